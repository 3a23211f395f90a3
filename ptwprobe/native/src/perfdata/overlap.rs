//! Snapshots and the trace in samples are pictures of a ring: one may hold bytes that the one before had already, and
//! between two of them trace may be missing. Here they become the chunks of one stream.

use std::collections::HashMap;

use super::reader::Reader;
use super::records::{AuxChunk, ChunkKind};
use crate::pt::{find_psb, Decoder, Kind, PSB};

/// The end of a picture by which its bytes are found again in the next one.
const TAIL_LEN: u64 = 1 << 20;
/// Bytes read at once.
const WINDOW_LEN: usize = 1 << 17;
/// A PSB+ has its TSC within so many bytes.
const PSB_PLUS_LEN: usize = 64;
/// perf pads a picture to a multiple of 8 bytes.
const MAX_PADDING: usize = 7;

/// What a hole between two pictures is counted as in the offsets of a stream: its true length is not known.
const HOLE: u64 = 1;

/// See the module. Chunks of a whole stream stay as they are.
#[derive(Debug, Default)]
pub struct Joiner {
    last: HashMap<(u32, Option<u32>, Option<u32>), Last>,
}

#[derive(Clone, Copy, Debug)]
struct Last {
    chunk: AuxChunk,
    stream_end: u64,
}

impl Joiner {
    /// `chunk` without what the one before in its stream had already, and with an offset in the stream that goes on
    /// there if nothing is missing between them. Without time in the trace nothing is taken for the same.
    pub fn join(&mut self, file: &Reader, chunk: AuxChunk) -> AuxChunk {
        if chunk.kind == ChunkKind::Stream {
            return chunk;
        }
        let key = (chunk.idx, chunk.tid, chunk.cpu);
        let (skip, stream_offset) = match self.last.get(&key) {
            Some(last) => match overlap(file, &last.chunk, &chunk) {
                Some(skip) => (skip, last.stream_end),
                None => (0, last.stream_end.saturating_add(HOLE)),
            },
            None => (0, 0),
        };
        let len = chunk.len.saturating_sub(skip);
        if skip < chunk.len || !self.last.contains_key(&key) {
            self.last.insert(key, Last { chunk, stream_end: stream_offset.saturating_add(len) });
        }
        AuxChunk { file_offset: chunk.file_offset.saturating_add(skip), len, stream_offset, ..chunk }
    }
}

/// How many bytes of `next` belong to what `before` has, if its end is in `next`.
fn overlap(file: &Reader, before: &AuxChunk, next: &AuxChunk) -> Option<u64> {
    let tail_len = before.len.min(TAIL_LEN);
    let mut tail = vec![0; tail_len as usize];
    let read = file.read_trace(before.file_offset.saturating_add(before.len - tail_len), &mut tail).ok()?;
    tail.truncate(read);
    let (mark, tsc) = last_timed_psb(&tail)?;
    let mut at = 0;
    let mut window = Vec::new();
    while at < next.len {
        let want = (next.len - at).min((WINDOW_LEN + mark.len()) as u64) as usize;
        window.resize(want, 0);
        let read = file.read_trace(next.file_offset.saturating_add(at), &mut window).ok()?;
        window.truncate(read);
        let last = at + read as u64 >= next.len || read < want;
        let mut from = 0;
        while let Some(psb) = find_psb(&window, from) {
            let rest = window.get(psb..).unwrap_or_default();
            if !last && rest.len() < mark.len() {
                break;
            }
            if let Some(same) = same_bytes(mark, rest) {
                return Some(at + (psb + same) as u64);
            }
            if time_of(rest).is_some_and(|time| time > tsc) {
                return None;
            }
            from = psb + PSB.len();
        }
        if last {
            return None;
        }
        // The start of a mark may be in what is left of the window.
        at += read.saturating_sub(mark.len() + PSB.len() - 1).max(1) as u64;
    }
    None
}

/// From the last PSB of `tail` on that has a time.
fn last_timed_psb(tail: &[u8]) -> Option<(&[u8], u64)> {
    let starts = (0..tail.len()).rev().filter(|&at| tail.get(at..).is_some_and(|rest| rest.starts_with(&PSB)));
    starts.take(1 << 10).find_map(|at| {
        let mark = tail.get(at..)?;
        time_of(mark).map(|tsc| (mark, tsc))
    })
}

/// The time of the PSB+ that `bytes` begin with.
fn time_of(bytes: &[u8]) -> Option<u64> {
    let mut decoder = Decoder::new(bytes.get(..PSB_PLUS_LEN).unwrap_or(bytes), 0);
    for _ in 0..PSB_PLUS_LEN {
        match decoder.next_packet()?.ok()?.kind {
            Kind::Tsc(tsc) => return Some(tsc),
            Kind::PsbEnd => return None,
            _ => {}
        }
    }
    None
}

/// Bytes of `rest` that are those of `mark`, if all of them are: up to padding, or up to the end of `rest`.
fn same_bytes(mark: &[u8], rest: &[u8]) -> Option<usize> {
    let same = mark.iter().zip(rest).take_while(|(a, b)| a == b).count();
    let left = mark.get(same..).unwrap_or_default();
    let padding = left.len() <= MAX_PADDING && left.iter().all(|&byte| byte == 0);
    (padding || same == rest.len()).then_some(same)
}
