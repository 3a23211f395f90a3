//! Tables that indirect jumps go through, and pointers to code in data.

use std::collections::BTreeSet;

use super::elf::Image;
use super::jumps::{Source, Table};
use super::{TargetKind, Targets};

/// Longest table that is followed; compilers make none of this size.
const MAX_ENTRIES: usize = 1 << 16;
/// Entries that are followed in all, so that overlapping tables of a hostile file end.
const MAX_ALL_ENTRIES: usize = 1 << 24;

/// Adds the targets of every table. Returns the addresses of the jumps whose targets stay unknown.
///
/// A table's length is not told anywhere, so it goes on while entries point into code and up to the next table: too
/// many targets cost a probe, too few a program.
pub fn follow(image: &Image, jumps: &[(u64, Source)], targets: &mut Targets) -> Vec<u64> {
    let tables: BTreeSet<Table> = jumps
        .iter()
        .flat_map(|(_, source)| match source {
            Source::Tables(tables) | Source::SomeOf(tables) => tables.as_slice(),
            _ => &[],
        })
        .copied()
        .collect();
    let mut budget = MAX_ALL_ENTRIES;
    let mut found = BTreeSet::new();
    for &(start, base) in &tables {
        let next = tables.range((start.saturating_add(1), 0)..).next().map_or(u64::MAX, |table| table.0);
        let entries = follow_one(image, (start, base), next, &mut budget, targets);
        if entries > 0 && budget > 0 {
            found.insert((start, base));
        }
    }
    let unknown = jumps.iter().filter(|(_, source)| match source {
        Source::Pointer => false,
        Source::Unknown => true,
        Source::Tables(tables) => !tables.iter().all(|table| found.contains(table)),
        Source::SomeOf(tables) => !tables.iter().any(|table| found.contains(table)),
    });
    unknown.map(|(ip, _)| *ip).collect()
}

/// Number of entries found.
fn follow_one(image: &Image, table: Table, next: u64, budget: &mut usize, targets: &mut Targets) -> usize {
    let (start, base) = table;
    let room = usize::try_from((next - start) / 4).unwrap_or(MAX_ENTRIES).min(MAX_ENTRIES).min(*budget);
    let mut found = 0;
    for entry in image.at(start, room * 4).chunks_exact(4).filter_map(|b| b.try_into().ok()) {
        let target = base.wrapping_add(i64::from(i32::from_le_bytes(entry)) as u64);
        if !image.is_code(target) {
            break;
        }
        targets.push(target, TargetKind::Table);
        found += 1;
    }
    *budget -= found;
    found
}

/// Adds every pointer to code that relocations or data hold.
pub fn data_pointers(image: &Image, targets: &mut Targets) {
    for &value in &image.relocated_pointers {
        targets.push(value, TargetKind::Pointer);
    }
    if !image.fixed_address {
        return;
    }
    // In a program at a fixed address nothing tells a pointer from a number: every aligned word that could be one is.
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
