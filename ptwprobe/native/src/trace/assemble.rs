//! Words of one stream to hits, by the rules of the wire format: a header word opens a record of so many words.

use std::collections::VecDeque;

use super::table::Table;
use super::words::{GapReason, Word};
use crate::pt::parse_header_word;

/// What a stream tells, at `tsc`; `offset` in the file.
#[derive(Debug)]
pub struct Item {
    pub tsc: u64,
    pub offset: u64,
    pub kind: ItemKind,
}

#[derive(Debug)]
pub enum ItemKind {
    Hit {
        event_id: u16,
        header_ip: Option<u64>,
        args: Vec<u64>,
    },
    Stray {
        ip: Option<u64>,
        value: u64,
    },
    /// A record whose other words are missing.
    Incomplete {
        event_id: u16,
        got: usize,
        words: usize,
    },
    Gap(GapReason),
}

/// A record whose words are coming in.
#[derive(Debug)]
struct Open {
    event_id: u16,
    words: usize,
    tsc: u64,
    offset: u64,
    header_ip: Option<u64>,
    args: Vec<u64>,
    /// Addresses so far, header first, as long as all words have one; none where they are known.
    ips: Vec<u64>,
    /// Already told as incomplete: the words that still come are its own.
    broken: bool,
}

/// The record of one stream that is open, if any.
#[derive(Debug, Default)]
pub struct Assembler {
    open: Option<Open>,
}

impl Assembler {
    /// Takes one word; what it completes goes to `out`, at most three items.
    pub fn feed(&mut self, word: Word, table: &mut Table, out: &mut VecDeque<Item>) {
        match word {
            Word::Gap { tsc, offset, reason } => {
                self.close(out);
                out.push_back(Item { tsc, offset, kind: ItemKind::Gap(reason) });
            }
            Word::Value { tsc, value, ip, offset } => self.value(tsc, value, ip, offset, table, out),
        }
    }

    /// The end of the stream, or a gap: a record that is open stays incomplete.
    pub fn close(&mut self, out: &mut VecDeque<Item>) {
        if let Some(open) = self.open.take().filter(|open| !open.broken) {
            out.push_back(open.incomplete());
        }
    }

    fn value(
        &mut self,
        tsc: u64,
        value: u64,
        ip: Option<u64>,
        offset: u64,
        table: &mut Table,
        out: &mut VecDeque<Item>,
    ) {
        let fit = self.open.as_ref().map_or(Fit::Foreign, |open| open.fit(ip, table));
        if let (Fit::Next { sure: true }, Some(open)) = (fit, self.open.as_mut()) {
            open.take(value, ip);
            return self.complete(table, out);
        }
        if let Some((event_id, nargs)) = parse_header_word(value).filter(|_| table.may_be_header(ip)) {
            self.close(out);
            let words = usize::from(nargs);
            let args = Vec::with_capacity(words);
            let ips = ip.into_iter().filter(|&ip| table.slots(event_id, ip).is_none()).collect();
            self.open = Some(Open { event_id, words, tsc, offset, header_ip: ip, args, ips, broken: false });
            return self.complete(table, out);
        }
        let stray = Item { tsc, offset, kind: ItemKind::Stray { ip, value } };
        let Some(open) = self.open.as_mut() else { return out.push_back(stray) };
        match fit {
            Fit::Next { .. } => {
                open.take(value, ip);
                self.complete(table, out);
            }
            Fit::Later => {
                if !open.broken {
                    out.push_back(open.incomplete());
                }
                open.broken = true;
            }
            // The program's own word, from a signal handler say.
            Fit::Foreign => out.push_back(stray),
        }
    }

    fn complete(&mut self, table: &mut Table, out: &mut VecDeque<Item>) {
        let Some(open) = self.open.take_if(|open| open.args.len() >= open.words) else { return };
        if open.ips.len() == open.words + 1 {
            table.learn(open.event_id, &open.ips);
        }
        let kind = ItemKind::Hit { event_id: open.event_id, header_ip: open.header_ip, args: open.args };
        out.push_back(Item { tsc: open.tsc, offset: open.offset, kind });
    }
}

/// How a word fits the open record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fit {
    /// It is the next one; `sure` where its address says so.
    Next {
        sure: bool,
    },
    /// It belongs to the record, but one before it is missing.
    Later,
    Foreign,
}

impl Open {
    fn fit(&self, ip: Option<u64>, table: &Table) -> Fit {
        let slots = self.header_ip.and_then(|header_ip| table.slots(self.event_id, header_ip));
        let (Some(slots), Some(ip)) = (slots, ip) else {
            return if self.broken { Fit::Foreign } else { Fit::Next { sure: false } };
        };
        let next = self.args.len() + 1;
        if !self.broken && slots.get(next) == Some(&ip) {
            Fit::Next { sure: true }
        } else if slots.get(1..).is_some_and(|slots| slots.contains(&ip)) {
            Fit::Later
        } else {
            Fit::Foreign
        }
    }

    fn take(&mut self, value: u64, ip: Option<u64>) {
        self.args.push(value);
        if !self.ips.is_empty() {
            self.ips.extend(ip);
        }
    }

    fn incomplete(&self) -> Item {
        let kind = ItemKind::Incomplete { event_id: self.event_id, got: self.args.len(), words: self.words };
        Item { tsc: self.tsc, offset: self.offset, kind }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pt::header_word;
    use crate::trace::table::{Event, Site};

    const SLOTS: [u64; 4] = [0x1000, 0x1010, 0x1020, 0x1030];

    fn table(known: bool) -> Table {
        let site = Site { pid: 1, addr: 0x10, slots: SLOTS.to_vec() };
        let event = Event { id: 9, name: "g/e".into(), fields: vec![], sites: vec![site] };
        Table::new(if known { vec![event] } else { vec![] })
    }

    /// Feeds (value, slot) pairs and returns what comes out, in short.
    fn run(table: &mut Table, words: &[(u64, u64)]) -> Vec<String> {
        let mut assembler = Assembler::default();
        let mut out = VecDeque::new();
        for (&(value, ip), tsc) in words.iter().zip(1..) {
            assembler.feed(Word::Value { tsc, value, ip: Some(ip), offset: 0 }, table, &mut out);
        }
        assembler.close(&mut out);
        out.iter()
            .map(|item| match &item.kind {
                ItemKind::Hit { args, .. } => format!("hit {args:?} at {}", item.tsc),
                ItemKind::Stray { value, .. } => format!("stray {value}"),
                ItemKind::Incomplete { got, words, .. } => format!("{got} of {words}"),
                ItemKind::Gap(reason) => format!("{reason:?}"),
            })
            .collect()
    }

    #[test]
    fn a_record_is_a_header_and_its_words() {
        let header = header_word(9, 3);
        let words = [(header, 0x1000), (1, 0x1010), (2, 0x1020), (3, 0x1030), (header_word(9, 0), 0x1000)];
        assert_eq!(run(&mut table(true), &words), ["hit [1, 2, 3] at 1", "hit [] at 5"]);
    }

    #[test]
    fn a_lost_middle_word_spoils_one_record_only() {
        let header = header_word(9, 3);
        let words = [(header, 0x1000), (1, 0x1010), (3, 0x1030)];
        let again = [(header, 0x1000), (4, 0x1010), (5, 0x1020), (6, 0x1030)];
        let all = [words.as_slice(), &again].concat();
        assert_eq!(run(&mut table(true), &all), ["1 of 3", "hit [4, 5, 6] at 4"]);
    }

    #[test]
    fn without_a_session_slots_are_learned_from_a_whole_record() {
        let header = header_word(9, 3);
        let whole = [(header, 0x1000), (4, 0x1010), (5, 0x1020), (6, 0x1030)];
        let lost = [(header, 0x1000), (1, 0x1010), (3, 0x1030), (7, 0x2000)];
        let mut unknown = table(false);
        assert_eq!(run(&mut unknown, &[whole, lost].concat()), ["hit [4, 5, 6] at 1", "1 of 3", "stray 7"]);
    }

    #[test]
    fn a_new_header_ends_an_incomplete_record() {
        let header = header_word(9, 1);
        let words = [(header, 0x1000), (header, 0x1000), (1, 0x1010), (2, 0x5000)];
        assert_eq!(run(&mut table(true), &words), ["0 of 1", "hit [1] at 2", "stray 2"]);
    }

    #[test]
    fn an_argument_that_looks_like_a_header_is_an_argument_by_its_address() {
        let header = header_word(9, 1);
        assert_eq!(run(&mut table(true), &[(header, 0x1000), (header, 0x1010)]), [format!("hit [{header}] at 1")]);
        assert_eq!(run(&mut table(true), &[(header, 0x1010)]), [format!("stray {header}")]);
    }
}
