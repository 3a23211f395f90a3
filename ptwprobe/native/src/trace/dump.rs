//! Every packet of every chunk with its offset, as text.

use std::io::Write as _;
use std::path::Path;

use super::damage::Damage;
use super::text::{push_hex, push_right};
use super::window::Window;
use crate::perfdata::layout::AUXTRACE_LEN;
use crate::perfdata::{AuxChunk, Body, Error, Next, Reader, Record};
use crate::pt::{find_psb, BadReason, Block, Decoder, Packet, PSB};

/// Room for the bytes of a packet before its name; PSB is the longest.
const BYTES_COLUMN: usize = 3 * 16 + 1;

/// See the module.
pub struct Dump {
    reader: Reader,
    window: Window,
    chunk: Option<AuxChunk>,
    block: Block,
    /// Bytes that are missing where the file, in this chunk, ends.
    cut: Option<u64>,
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
            cut: None,
            lost: false,
            ended: false,
            errors: 0,
        })
    }

    /// Lines that begin with "error", or have it in the place of a packet.
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
                if let Some(text) = record.body.problem() {
                    self.error(out, record.file_offset, format_args!("{text}"));
                }
                match record.body {
                    Body::Aux(chunk) => self.start(out, chunk, chunk.len),
                    Body::Lost { count } => count_line(out, "LOST", &record, count),
                    Body::LostSamples { count } => count_line(out, "TORN", &record, count),
                    _ => {}
                }
            }
            Next::End => {
                self.ended = true;
                return self.reader.no_trace().filter(|_| self.errors == 0).map_or(Ok(()), Err);
            }
            Next::Cut { offset, missing } => {
                self.ended = true;
                self.error(out, offset, format_args!("{}", Damage::Cut { missing }));
            }
            Next::CutChunk { chunk, told, missing } => {
                self.start(out, chunk, told);
                self.cut = Some(missing);
            }
            Next::BadChunk { chunk, told } => {
                self.start(out, chunk, told);
                let damage = Damage::BadChunk { told, len: chunk.len };
                self.error(out, chunk.file_offset, format_args!("{damage}"));
            }
            Next::NoRecord { offset, len } => {
                self.error(out, offset, format_args!("{}", Damage::NoRecord { len }));
            }
        }
        Ok(())
    }

    /// `told`: bytes that the record says the chunk has.
    fn start(&mut self, out: &mut Vec<u8>, chunk: AuxChunk, told: u64) {
        self.window.clear();
        self.window.start(&chunk);
        self.block = Block::None;
        self.lost = false;
        chunk_line(out, &chunk, told);
        self.chunk = Some(chunk);
    }

    fn error(&mut self, out: &mut Vec<u8>, file_offset: u64, text: std::fmt::Arguments<'_>) {
        self.errors += 1;
        // Writing to a Vec does not fail.
        let _ = writeln!(out, "error: {text} (byte {file_offset} of the file)");
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
                    let text = "no packet: goes on at the next PSB";
                    bad_line(out, rest, done, chunk.file_offset, bad.offset, text);
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
            let (rest, offset) = self.window.rest();
            if let Some(missing) = self.cut {
                self.ended = true;
                self.error(out, chunk.file_offset + chunk.len, format_args!("{}", Damage::Cut { missing }));
            } else if !rest.is_empty() && !self.lost {
                let offset = offset.saturating_sub(chunk.file_offset);
                bad_line(out, rest, 0, chunk.file_offset, offset, "cut: the chunk ends inside a packet");
                self.errors += 1;
            }
            self.chunk = None;
        }
    }
}

fn chunk_line(out: &mut Vec<u8>, chunk: &AuxChunk, told: u64) {
    let id = |id: Option<u32>| id.map_or_else(|| "-".to_owned(), |n| n.to_string());
    let AuxChunk { file_offset, stream_offset, tsc_reference, idx, .. } = chunk;
    let (tid, cpu) = (id(chunk.tid), id(chunk.cpu));
    let record_offset = file_offset.saturating_sub(AUXTRACE_LEN as u64);
    // Writing to a Vec does not fail.
    let _ = writeln!(
        out,
        "AUXTRACE at 0x{record_offset:x}: idx {idx} tid {tid} cpu {cpu} size 0x{told:x} offset 0x{stream_offset:x} \
         reference 0x{tsc_reference:x} data at 0x{file_offset:x}"
    );
}

fn packet_line(out: &mut Vec<u8>, bytes: &[u8], at: usize, packet: &Packet) {
    push_offset(out, packet.offset);
    let len = usize::from(packet.len);
    push_bytes(out, bytes.get(at..at + len).unwrap_or_default());
    let _ = writeln!(out, "{}", packet.kind);
}

fn count_line(out: &mut Vec<u8>, what: &str, record: &Record, count: u64) {
    let _ = writeln!(out, "{what} at 0x{:x}: {count} hits", record.file_offset);
}

/// `offset` in the chunk, which begins at `file_offset`.
fn bad_line(out: &mut Vec<u8>, bytes: &[u8], at: usize, file_offset: u64, offset: u64, message: &str) {
    push_offset(out, offset);
    let end = bytes.len().min(at + PSB.len());
    push_bytes(out, bytes.get(at..end).unwrap_or_default());
    let _ = writeln!(out, "error: {message} (byte {} of the file)", file_offset.saturating_add(offset));
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
