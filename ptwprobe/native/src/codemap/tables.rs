//! Tables that indirect jumps go through, and pointers to code in data.

use super::elf::Image;
use super::sweep::{JumpSource, Sweep};
use super::{Functions, TargetKind, Targets};

/// Longest table that is followed; compilers make none of this size.
const MAX_ENTRIES: usize = 1 << 16;

/// Adds the targets of every table of 4-byte entries relative to its own start, and of every code pointer in data.
/// Returns the addresses of the indirect jumps whose targets stay unknown.
///
/// A table's length is not told anywhere, so it goes on while entries point into code and up to the next table: too
/// many targets cost a probe, too few a program.
pub fn follow(image: &Image, functions: &Functions, sweep: &Sweep, targets: &mut Targets) -> Vec<u64> {
    for &value in &image.relocated_pointers {
        targets.push(value, TargetKind::Pointer);
    }
    if image.fixed_address {
        data_pointers(image, targets);
    }
    let mut bases = Vec::new();
    let mut jumps = Vec::new();
    let mut unknown = Vec::new();
    for &(ip, source) in &sweep.indirect_jumps {
        match source {
            JumpSource::Pointer => {}
            JumpSource::Unknown => unknown.push(ip),
            JumpSource::RelativeTable(Some(base)) => {
                bases.push(base);
                jumps.push((ip, vec![base]));
            }
            JumpSource::RelativeTable(None) => {
                let taken = taken_in(sweep, functions.containing(ip));
                bases.extend_from_slice(&taken);
                jumps.push((ip, taken));
            }
        }
    }
    bases.sort_unstable();
    bases.dedup();
    let lengths: Vec<usize> = (0..bases.len())
        .map(|i| {
            let next = bases.get(i + 1).copied().unwrap_or(u64::MAX);
            bases.get(i).map_or(0, |base| follow_table(image, *base, next, targets))
        })
        .collect();
    for (ip, candidates) in jumps {
        let found = candidates
            .iter()
            .any(|base| bases.binary_search(base).is_ok_and(|i| lengths.get(i).is_some_and(|length| *length > 0)));
        if !found {
            unknown.push(ip);
        }
    }
    unknown.sort_unstable();
    unknown
}

/// The addresses that code of one function takes and that are not code themselves.
fn taken_in(sweep: &Sweep, function: Option<(u64, u64)>) -> Vec<u64> {
    let Some((start, end)) = function else {
        return Vec::new();
    };
    let first = sweep.addresses_taken.partition_point(|taken| taken.0 < start);
    let last = sweep.addresses_taken.partition_point(|taken| taken.0 < end);
    sweep.addresses_taken.get(first..last).unwrap_or_default().iter().map(|taken| taken.1).collect()
}

/// Number of entries found.
fn follow_table(image: &Image, base: u64, next_base: u64, targets: &mut Targets) -> usize {
    let room = usize::try_from((next_base - base) / 4).unwrap_or(MAX_ENTRIES).min(MAX_ENTRIES);
    let mut found = 0;
    for entry in image.at(base, room * 4).chunks_exact(4).filter_map(|b| b.try_into().ok()) {
        let target = base.wrapping_add(i64::from(i32::from_le_bytes(entry)) as u64);
        if !image.is_code(target) {
            break;
        }
        targets.push(target, TargetKind::Table);
        found += 1;
    }
    found
}

/// In a program at a fixed address nothing tells a pointer from a number: every aligned word that could be one is.
fn data_pointers(image: &Image, targets: &mut Targets) {
    for run in &image.segments {
        let skip = (run.vaddr.wrapping_neg() & 7) as usize;
        for word in run.bytes.get(skip..).unwrap_or_default().chunks_exact(8).filter_map(|w| w.try_into().ok()) {
            let value = u64::from_le_bytes(word);
            if image.is_code(value) {
                targets.push(value, TargetKind::Pointer);
            }
        }
    }
}
