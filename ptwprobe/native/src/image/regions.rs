//! What is mapped where: sorted regions that do not overlap, of which versions share what is equal.

use std::sync::Arc;

/// Which file; index into `Files`.
pub type FileId = u32;

/// Where bytes of code are: from `offset` of `file` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    pub file: FileId,
    pub offset: u64,
    /// Made at run time, in memory that a mapping without a file names: such a mapping does not replace it.
    pub jit: bool,
}

/// [`start`, `end`) holds code of `source`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    pub start: u64,
    pub end: u64,
    pub source: Source,
}

impl Region {
    /// The part of it from `start` to `end`, if there is one.
    fn part(&self, start: u64, end: u64) -> Option<Self> {
        let (start, end) = (start.max(self.start), end.min(self.end));
        let offset = self.source.offset.wrapping_add(start.wrapping_sub(self.start));
        (start < end).then_some(Self { start, end, source: Source { offset, ..self.source } })
    }

    fn continues(&self, before: &Self) -> bool {
        before.end == self.start
            && before.part(before.start, before.end).is_some_and(|all| {
                let offset = all.source.offset.wrapping_add(all.end.wrapping_sub(all.start));
                Source { offset, ..all.source } == self.source
            })
    }
}

/// Regions of a shared piece at most; it is split beyond.
const PIECE: usize = 32;

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Regions {
    /// None is empty.
    pieces: Vec<Arc<Vec<Region>>>,
}

impl Regions {
    /// What a copy of it takes, in bytes, all pieces being shared.
    #[must_use]
    pub fn size_of_copy(&self) -> usize {
        size_of::<Self>() + self.pieces.len() * size_of::<Arc<Vec<Region>>>()
    }

    /// The region that holds `addr`.
    #[must_use]
    pub fn at(&self, addr: u64) -> Option<&Region> {
        let piece = self.pieces.get(self.piece_of(addr)?)?;
        let behind = piece.partition_point(|region| region.start <= addr);
        piece.get(behind.checked_sub(1)?).filter(|region| addr < region.end)
    }

    /// Those that overlap [`start`, `end`), by address.
    pub fn within(&self, start: u64, end: u64) -> impl Iterator<Item = &Region> {
        let pieces = self.pieces.get(self.piece_of(start).unwrap_or(0)..).unwrap_or_default();
        let regions = pieces.iter().flat_map(|piece| piece.iter());
        regions
            .skip_while(move |region| region.end <= start)
            .take_while(move |region| start < end && region.start < end)
    }

    /// Whether `set` would change bytes that are known now; new ones where nothing was known do not.
    #[must_use]
    pub fn conflicts(&self, start: u64, end: u64, source: Option<Source>) -> bool {
        let new = source.and_then(|source| Region { start, end, source }.part(start, end));
        self.within(start, end).any(|old| match new {
            Some(new) => old.part(start, end) != new.part(old.start, old.end),
            None => true,
        })
    }

    /// From now on [`start`, `end`) is `source`, or nothing. Returns how many bytes the new pieces take.
    pub fn set(&mut self, start: u64, end: u64, source: Option<Source>) -> usize {
        if start >= end {
            return 0;
        }
        let new = source.map(|source| Region { start, end, source });
        let overlapping: Vec<Region> = self.within(start, end).copied().collect();
        if let ([old], Some(new)) = (overlapping.as_slice(), new) {
            if old.part(start, end) == Some(new) {
                return 0;
            }
        }
        if overlapping.is_empty() && new.is_none() {
            return 0;
        }
        // The pieces that have regions in it, and the one in which it would be put.
        let first = self.piece_of(start).unwrap_or(0);
        let last = self.pieces.partition_point(|piece| piece.first().is_some_and(|region| region.start < end));
        // A neighbour at least, so that no piece stays small where regions come one before the other.
        let last = last.max(first + 1).min(self.pieces.len());
        let old: Vec<Region> =
            self.pieces.get(first..last).unwrap_or_default().iter().flat_map(|p| p.iter().copied()).collect();
        let mut merged: Vec<Region> = Vec::with_capacity(old.len() + 2);
        let before = old.iter().filter_map(|region| region.part(0, start));
        let behind = old.iter().filter_map(|region| region.part(end, u64::MAX));
        for region in before.chain(new).chain(behind) {
            match merged.last_mut() {
                Some(last) if region.continues(last) => last.end = region.end,
                _ => merged.push(region),
            }
        }
        let pieces = merged.chunks(if merged.len() > PIECE { PIECE / 2 } else { PIECE });
        let pieces: Vec<_> = pieces.map(|piece| Arc::new(piece.to_vec())).collect();
        self.pieces.splice(first..last, pieces);
        merged.len() * size_of::<Region>()
    }

    /// All of them, by address.
    pub fn iter(&self) -> impl Iterator<Item = &Region> {
        self.pieces.iter().flat_map(|piece| piece.iter())
    }

    /// The last piece that begins at or before `addr`.
    fn piece_of(&self, addr: u64) -> Option<usize> {
        self.pieces.partition_point(|piece| piece.first().is_some_and(|region| region.start <= addr)).checked_sub(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SPACE: u64 = 400;

    /// The source of every byte.
    type Model = Vec<Option<(FileId, u64, bool)>>;

    fn set(model: &mut Model, start: u64, end: u64, source: Option<Source>) {
        for addr in start..end {
            model[addr as usize] = source.map(|s| (s.file, s.offset + addr - start, s.jit));
        }
    }

    fn seen(regions: &Regions) -> Model {
        let at = |addr| regions.at(addr).map(|r| (r.source.file, r.source.offset + addr - r.start, r.source.jit));
        (0..SPACE).map(at).collect()
    }

    fn source() -> impl Strategy<Value = Option<Source>> {
        proptest::option::weighted(0.8, (0u32..3, 0u64..4, any::<bool>()))
            .prop_map(|s| s.map(|(file, offset, jit)| Source { file, offset: offset * 8, jit }))
    }

    proptest! {
        #[test]
        fn any_changes_give_what_a_table_of_bytes_gives(
            changes in proptest::collection::vec((0..SPACE, 0u64..60, source(), any::<bool>()), 0..120)) {
            let mut regions = Regions::default();
            let mut model: Model = vec![None; SPACE as usize];
            let mut versions = Vec::new();
            for (start, len, source, keep) in changes {
                let end = (start + len).min(SPACE);
                if keep {
                    versions.push((regions.clone(), model.clone()));
                }
                let mut new = model.clone();
                set(&mut new, start, end, source);
                let conflict = model.iter().zip(&new).any(|(old, new)| old.is_some() && old != new);
                prop_assert_eq!(regions.conflicts(start, end, source), conflict);
                regions.set(start, end, source);
                model = new;
            }
            versions.push((regions, model));
            for (regions, model) in versions {
                prop_assert_eq!(seen(&regions), model);
                let all: Vec<Region> = regions.iter().copied().collect();
                prop_assert!(all.windows(2).all(|w| w[0].end <= w[1].start));
                prop_assert!(all.iter().all(|r| r.start < r.end));
                prop_assert!(regions.pieces.iter().all(|p| !p.is_empty() && p.len() <= PIECE));
            }
        }
    }

    #[test]
    fn versions_share_what_is_equal() {
        let mut regions = Regions::default();
        for i in 0..10_000u64 {
            regions.set(i * 32, i * 32 + 16, Some(Source { file: 1, offset: 0, jit: false }));
        }
        let old = regions.clone();
        regions.set(16 * 32, 16 * 32 + 8, Some(Source { file: 2, offset: 0, jit: false }));
        let shared = old.pieces.iter().filter(|p| regions.pieces.iter().any(|q| Arc::ptr_eq(p, q))).count();
        assert_eq!(shared, old.pieces.len() - 1);
        assert_eq!(old.at(16 * 32).map(|r| r.source.file), Some(1));
        assert_eq!(regions.at(16 * 32).map(|r| r.source.file), Some(2));
        assert_eq!(regions.at(16 * 32 + 8).map(|r| r.source.offset), Some(8));
    }

    #[test]
    fn the_ends_of_the_address_space_are_addresses_like_others() {
        let mut regions = Regions::default();
        let source = Some(Source { file: 0, offset: u64::MAX - 3, jit: false });
        regions.set(0, u64::MAX, source);
        regions.set(5, 5, None);
        regions.set(10, 20, None);
        assert_eq!(regions.iter().count(), 2);
        assert!(regions.at(u64::MAX).is_none());
        assert_eq!(regions.at(20).map(|r| r.source.offset), Some(16));
    }
}
