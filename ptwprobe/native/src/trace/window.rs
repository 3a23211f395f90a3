//! The bytes of one chunk of trace, a piece at a time.

use crate::perfdata::{AuxChunk, Reader};

/// Bytes read at once.
const PIECE_LEN: u64 = 1 << 16;

/// A piece of the trace with what of it is still to decode.
#[derive(Debug, Default)]
pub struct Window {
    bytes: Vec<u8>,
    pos: usize,
    /// In the file, of the first byte; of bytes kept from the chunk before it is counted back from this chunk.
    offset: u64,
    /// In the file, of the next byte to read, and how many of the chunk are left.
    next: u64,
    left: u64,
}

impl Window {
    /// Goes to the start of `chunk`, keeping what of the last one is not decoded.
    pub fn start(&mut self, chunk: &AuxChunk) {
        self.drop_decoded();
        self.offset = chunk.file_offset.saturating_sub(self.bytes.len() as u64);
        self.next = chunk.file_offset;
        self.left = chunk.len;
    }

    /// Reads on in the chunk; false at its end. What the file does not have is not waited for.
    pub fn read(&mut self, file: &Reader) -> bool {
        if self.left == 0 {
            return false;
        }
        let kept = self.drop_decoded();
        let len = self.left.min(PIECE_LEN) as usize;
        self.bytes.resize(kept + len, 0);
        let read = self.bytes.get_mut(kept..).map_or(0, |piece| file.read_trace(self.next, piece).unwrap_or(0));
        self.bytes.truncate(kept + read);
        self.next = self.next.saturating_add(read as u64);
        self.left = if read == 0 { 0 } else { self.left.saturating_sub(read as u64) };
        read != 0
    }

    /// The bytes still to decode, and the offset in the file of the first.
    #[must_use]
    pub fn rest(&self) -> (&[u8], u64) {
        (self.bytes.get(self.pos..).unwrap_or_default(), self.offset.saturating_add(self.pos as u64))
    }

    pub fn advance(&mut self, len: usize) {
        self.pos = self.pos.saturating_add(len).min(self.bytes.len());
    }

    /// Forgets all bytes that were read.
    pub fn clear(&mut self) {
        self.advance(self.bytes.len());
    }

    /// Gives the memory of a piece back; a cut packet stays.
    pub fn shrink(&mut self) {
        self.drop_decoded();
        self.bytes.shrink_to_fit();
    }

    fn drop_decoded(&mut self) -> usize {
        self.bytes.drain(..self.pos);
        self.offset = self.offset.saturating_add(self.pos as u64);
        self.pos = 0;
        self.bytes.len()
    }
}
