//! Texts of records (paths, symbols, bytes of code), each held once, so that a record stays small and copyable.

use std::collections::HashMap;
use std::sync::Arc;

/// What all texts of a file may take together, in bytes: a hostile file could bring new ones without end.
const MAX_BYTES: usize = 64 << 20;
/// What one costs beside its own bytes.
const OVERHEAD: usize = 96;

/// A text of a file, to be had from its [`Names`]. The default one is empty.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(u32);

/// See the module.
#[derive(Debug, Default)]
pub struct Names {
    /// All but the empty one.
    texts: Vec<Arc<[u8]>>,
    by_text: HashMap<Arc<[u8]>, Name>,
    bytes: usize,
    dropped: u64,
}

impl Names {
    /// The bytes of `name`.
    #[must_use]
    pub fn get(&self, name: Name) -> &[u8] {
        let index = (name.0 as usize).checked_sub(1);
        index.and_then(|index| self.texts.get(index)).map_or(&[], |text| text)
    }

    /// Texts that found no room and became the empty one.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    pub(super) fn add(&mut self, text: &[u8]) -> Name {
        if text.is_empty() {
            return Name::default();
        }
        if let Some(&name) = self.by_text.get(text) {
            return name;
        }
        let cost = text.len() + OVERHEAD;
        let name = u32::try_from(self.texts.len() + 1).ok().filter(|_| self.bytes + cost <= MAX_BYTES);
        let Some(name) = name.map(Name) else {
            self.dropped += 1;
            return Name::default();
        };
        self.bytes += cost;
        let text: Arc<[u8]> = text.into();
        self.texts.push(Arc::clone(&text));
        self.by_text.insert(text, name);
        name
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_held_once() {
        let mut names = Names::default();
        let libc = names.add(b"/lib/libc.so");
        assert_eq!(names.add(b"/bin/true"), Name(2));
        assert_eq!(names.add(b"/lib/libc.so"), libc);
        assert_eq!(names.get(libc), b"/lib/libc.so");
        assert_eq!((names.add(b""), names.get(Name(99))), (Name::default(), &[][..]));
    }

    #[test]
    fn texts_without_end_are_dropped_and_counted() {
        let mut names = Names::default();
        let mut text = vec![b'x'; 1 << 16];
        for n in 0u32..1100 {
            text.splice(0..4, n.to_le_bytes());
            names.add(&text);
        }
        assert!(names.bytes <= MAX_BYTES && names.dropped() > 0);
        assert_eq!(names.dropped() + names.texts.len() as u64, 1100);
    }
}
