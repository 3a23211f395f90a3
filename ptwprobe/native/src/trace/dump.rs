//! Every packet of every chunk with its offset, as text.

use std::io::Write as _;
use std::path::Path;

use super::text::{push_hex, push_right};
use super::window::Window;
use crate::perfdata::{AuxChunk, Body, Error, Next, Reader};
use crate::pt::{find_psb, BadReason, Block, Decoder, Packet, PSB};

/// Room for the bytes of a packet before its name; PSB is the longest.
const BYTES_COLUMN: usize = 3 * 16 + 1;

/// See the module.
pub struct Dump {
    reader: Reader,
    window: Window,
    chunk: Option<AuxChunk>,
    block: Block,
    lost: bool,
    ended: bool,
    errors: u64,
}

impl Dump {
    pub fn open(path: &Path) -> Result<Self, Error> {
        let reader = Reader::open(path)?;
        Ok(Self {
            reader,
            window: Window::default(),
            chunk: None,
            block: Block::None,
            lost: false,
            ended: false,
            errors: 0,
        })
    }

    /// Bytes that are no packet, and a cut file.
    #[must_use]
    pub fn errors(&self) -> u64 {
        self.errors
    }

    /// Some more lines; empty at the end.
    pub fn next_lines(&mut self) -> Result<Vec<u8>, Error> {
        let mut out = Vec::new();
        while out.is_empty() && !self.ended {
            if self.chunk.is_some() {
                self.packets(&mut out);
            } else {
                self.next_chunk(&mut out)?;
            }
        }
        Ok(out)
    }

    fn next_chunk(&mut self, out: &mut Vec<u8>) -> Result<(), Error> {
        match self.reader.next_record()? {
            Next::Record(record) => {
                if let Body::Aux(chunk) = record.body {
                    self.window.clear();
                    self.window.start(&chunk);
                    self.block = Block::None;
                    self.lost = false;
                    chunk_line(out, record.file_offset, &chunk);
                    self.chunk = Some(chunk);
                }
            }
            Next::End => self.ended = true,
            Next::Cut(offset) | Next::Broken(offset) => {
                self.ended = true;
                self.errors += 1;
                let _ = writeln!(out, "error: the file is cut or damaged: read up to byte {offset}");
            }
        }
        Ok(())
    }

    /// The packets of the window; then the window is refilled.
    fn packets(&mut self, out: &mut Vec<u8>) {
        let Some(chunk) = self.chunk else { return };
        let (rest, base) = self.window.rest();
        let base = base.saturating_sub(chunk.file_offset);
        let mut decoder = Decoder::resume(rest, base, self.block);
        let mut done = 0;
        let mut starved = true;
        if self.lost {
            match find_psb(rest, 0) {
                Some(_) => {
                    decoder.sync();
                    self.lost = false;
                }
                None => done = rest.len().saturating_sub(PSB.len() - 1),
            }
        }
        while !self.lost {
            done = decoder.position();
            match decoder.next_packet() {
                Some(Ok(packet)) => packet_line(out, rest, done, &packet),
                None => break,
                Some(Err(bad)) if bad.reason == BadReason::Cut => break,
                Some(Err(bad)) => {
                    bad_line(out, rest, done, bad.offset, "no packet: goes on at the next PSB");
                    self.errors += 1;
                    self.lost = true;
                    starved = false;
                    done += 1;
                }
            }
        }
        self.block = decoder.block();
        self.window.advance(done);
        if starved && !self.window.read(&self.reader) {
            let (rest, base) = self.window.rest();
            if !rest.is_empty() && !self.lost {
                bad_line(out, rest, 0, base.saturating_sub(chunk.file_offset), "cut: the chunk ends inside a packet");
                self.errors += 1;
            }
            self.chunk = None;
        }
    }
}

fn chunk_line(out: &mut Vec<u8>, record_offset: u64, chunk: &AuxChunk) {
    let id = |id: Option<u32>| id.map_or_else(|| "-".to_owned(), |n| n.to_string());
    let AuxChunk { file_offset, len, stream_offset, tsc_reference, idx, .. } = chunk;
    let (tid, cpu) = (id(chunk.tid), id(chunk.cpu));
    // Writing to a Vec does not fail.
    let _ = writeln!(
        out,
        "AUXTRACE at 0x{record_offset:x}: idx {idx} tid {tid} cpu {cpu} size 0x{len:x} offset 0x{stream_offset:x} \
         reference 0x{tsc_reference:x} data at 0x{file_offset:x}"
    );
}

fn packet_line(out: &mut Vec<u8>, bytes: &[u8], at: usize, packet: &Packet) {
    push_offset(out, packet.offset);
    let len = usize::from(packet.len);
    push_bytes(out, bytes.get(at..at + len).unwrap_or_default());
    let _ = writeln!(out, "{}", packet.kind);
}

fn bad_line(out: &mut Vec<u8>, bytes: &[u8], at: usize, offset: u64, message: &str) {
    push_offset(out, offset);
    let end = bytes.len().min(at + PSB.len());
    push_bytes(out, bytes.get(at..end).unwrap_or_default());
    let _ = writeln!(out, "error: {message}");
}

fn push_offset(out: &mut Vec<u8>, offset: u64) {
    push_right(out, 8, b'0', |out| push_hex(out, offset));
    out.extend_from_slice(b": ");
}

fn push_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    let end = out.len() + BYTES_COLUMN;
    for &byte in bytes {
        out.push(b' ');
        push_right(out, 2, b'0', |out| push_hex(out, byte.into()));
    }
    out.resize(end.max(out.len() + 1), b' ');
}
