//! Which entries are shown. What is lost or wrong is shown unless it is known to be elsewhere.

use std::collections::HashMap;

use super::entry::{Entry, What};

/// Empty lists let everything pass; times in ns, both ends included.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    events: Vec<String>,
    tids: Vec<u32>,
    from: Option<u64>,
    to: Option<u64>,
    /// What the patterns say of the events seen so far.
    known: HashMap<u16, bool>,
}

impl Filter {
    /// `events`: globs (`*`, `?`) over "group/name", or over the name alone.
    #[must_use]
    pub fn new(events: Vec<String>, tids: Vec<u32>, from: Option<u64>, to: Option<u64>) -> Self {
        Self { events, tids, from, to, known: HashMap::new() }
    }

    pub fn passes(&mut self, entry: &Entry<'_>) -> bool {
        let in_time = entry.ns.is_none_or(|ns| self.from.is_none_or(|a| a <= ns) && self.to.is_none_or(|b| ns <= b));
        let of_thread = self.tids.is_empty() || entry.tid.is_none_or(|tid| self.tids.contains(&tid));
        in_time && of_thread && self.passes_event(entry)
    }

    fn passes_event(&mut self, entry: &Entry<'_>) -> bool {
        if self.events.is_empty() {
            return true;
        }
        match entry.what {
            What::Hit { event, .. } => {
                let events = &self.events;
                *self.known.entry(event.id).or_insert_with(|| {
                    let name = event.name.rsplit('/').next().unwrap_or_default();
                    events.iter().any(|glob| {
                        let text = if glob.contains('/') { &event.name } else { name };
                        matches(glob.as_bytes(), text.as_bytes())
                    })
                })
            }
            What::Stray { .. } => false,
            _ => true,
        }
    }
}

/// `*` any bytes, `?` one byte.
fn matches(glob: &[u8], text: &[u8]) -> bool {
    let (mut g, mut t) = (0, 0);
    // Where to go on when the last star has to take one byte more.
    let mut retry = None;
    loop {
        match (glob.get(g), text.get(t)) {
            (None, None) => return true,
            (Some(b'*'), _) => {
                retry = Some((g, t));
                g += 1;
            }
            (Some(&want), Some(&is)) if want == b'?' || want == is => {
                g += 1;
                t += 1;
            }
            _ => match retry {
                Some((star, from)) if from < text.len() => {
                    retry = Some((star, from + 1));
                    g = star + 1;
                    t = from + 1;
                }
                _ => return false,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn globs_match_whole_names() {
        for (glob, text, yes) in [
            ("*", "", true),
            ("a*c", "abbc", true),
            ("a*c", "abcd", false),
            ("a?c", "abc", true),
            ("*b*b", "abab", true),
            ("", "a", false),
            ("a**", "a", true),
        ] {
            assert_eq!(matches(glob.as_bytes(), text.as_bytes()), yes, "{glob} {text}");
        }
    }
}
