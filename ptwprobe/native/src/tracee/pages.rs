//! Code that is changed by the page: a copy of ours, with the patches, takes the place of a file's pages, which wait
//! *aside* meanwhile. Somebody else's breakpoint in that file then never comes into code that we changed, and a change
//! of many bytes, over page borders too, is one system call for the target.
//!
//! An exchange is a few calls of a borrowed thread while everything stands. Each call moves or maps a whole range at
//! once, and leaves the code runnable should nobody make the next one: pages that have just been moved away
//! are read from their file again where they were. What fails half-way is gone back, call by call.

use std::collections::BTreeMap;

use super::owner::Owner;
use super::plan::{Change, Site};
use super::remote::{Arg, Call};
use super::{Error, Result};

const MREMAP_DONTUNMAP: i32 = 4;
const READ_AT_ONCE: usize = 256 << 10;

/// What becomes of a range of pages. Addresses that pages go to are reserved before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Exchange {
    /// The file's pages go aside; our copy, which is mapped at `copy`, takes their place.
    Replace { aside: u64, copy: u64 },
    /// Another copy takes the place of ours, which goes to `scratch`.
    Renew { scratch: u64, copy: u64 },
    /// The file's pages come back. Our copy goes to `scratch`, or for good where this is the only exchange.
    Restore { aside: u64, scratch: Option<u64> },
    /// The range is no longer ours (its object was unloaded): the pages that wait aside go.
    Abandon { aside: u64 },
}

/// An exchange of the pages at [start, start + len).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Switch {
    pub start: u64,
    pub len: u64,
    /// What has to be there now; empty where that does not matter.
    pub content: Vec<u8>,
    pub exchange: Exchange,
}

impl Switch {
    fn end(&self) -> u64 {
        self.start.saturating_add(self.len)
    }

    pub fn holds(&self, site: &Site) -> bool {
        self.start <= site.addr && site.addr + site.new.len() as u64 <= self.end()
    }

    /// Whether our copy is there afterwards.
    fn is_copy(&self) -> bool {
        matches!(self.exchange, Exchange::Replace { .. } | Exchange::Renew { .. })
    }

    /// The calls, each with those that take it back.
    fn calls(&self) -> Vec<(Call, Vec<Call>)> {
        let (start, len) = (self.start, self.len);
        let away = |to| (moved(start, to, len, true), vec![moved(to, start, len, false), reserved(to, len)]);
        let here = |from| (moved(from, start, len, false), vec![moved(start, from, len, true)]);
        match self.exchange {
            Exchange::Replace { aside, copy } => vec![away(aside), here(copy)],
            Exchange::Renew { scratch, copy } => vec![away(scratch), here(copy)],
            Exchange::Restore { aside, scratch } => scratch.map(away).into_iter().chain([here(aside)]).collect(),
            Exchange::Abandon { aside } => {
                vec![(Call::new(libc::SYS_munmap, &[Arg::Value(aside), Arg::Value(len)]), Vec::new())]
            }
        }
    }
}

/// Pages at `from` go to `to`, where what is mapped goes. `keep`: the mapping at `from` stays, empty, so that its file is
/// read again (mremap(2), MREMAP_DONTUNMAP).
fn moved(from: u64, to: u64, len: u64, keep: bool) -> Call {
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | if keep { MREMAP_DONTUNMAP } else { 0 };
    Call::new(libc::SYS_mremap, &[from, len, len, flags as u64, to].map(Arg::Value))
}

fn reserved(addr: u64, len: u64) -> Call {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
    Call::new(libc::SYS_mmap, &[addr, len, libc::PROT_NONE as u64, flags as u64, u64::MAX, 0].map(Arg::Value))
}

/// The exchanges of one change, with all that they need, made before the target stops.
pub struct Exchanges {
    switches: Vec<Switch>,
    /// What is there afterwards, of each of `switches`; empty where that is the file's affair.
    after: Vec<Vec<u8>>,
    carried: Vec<(u64, Vec<u8>)>,
    calls: Vec<Call>,
    /// For each of `calls`, what takes it back.
    back: Vec<Vec<Call>>,
    buffer: Vec<u8>,
}

impl Exchanges {
    /// `sites` are those of the change.
    pub fn new(change: &Change, sites: &[&Site]) -> Result<Exchanges> {
        let mut switches = change.switches.clone();
        switches.sort_by_key(|s| (matches!(s.exchange, Exchange::Abandon { .. }), s.start));
        let mut after = Vec::with_capacity(switches.len());
        for switch in &switches {
            let unused = switch.content.is_empty();
            if switch.len == 0 || !unused && switch.content.len() as u64 != switch.len || unused && switch.is_copy() {
                return Err(Error::new("invalid", "a range and its content are not of one length").at(switch.start));
            }
            let mut content = if switch.is_copy() { switch.content.clone() } else { Vec::new() };
            for site in sites.iter().filter(|s| switch.is_copy() && switch.holds(s)) {
                let at = usize::try_from(site.addr - switch.start).unwrap_or(usize::MAX);
                if let Some(place) = content.get_mut(at..).and_then(|rest| rest.get_mut(..site.new.len())) {
                    place.copy_from_slice(&site.new);
                }
            }
            after.push(content);
        }
        let (calls, back) = switches.iter().flat_map(Switch::calls).unzip();
        let buffer = if switches.is_empty() { Vec::new() } else { vec![0; READ_AT_ONCE] };
        Ok(Exchanges { switches, after, carried: change.carried.clone(), calls, back, buffer })
    }

    /// Whether a site changes by an exchange, so that it is neither compared nor written by itself.
    pub fn hold(&self, site: &Site) -> bool {
        self.switches.iter().any(|s| s.holds(site))
    }

    /// Whether what is at the site now is known once `verify` says that all is well.
    pub fn verify_site(&self, site: &Site) -> bool {
        self.switches.iter().any(|s| s.holds(site) && !s.content.is_empty())
    }
}

impl Owner {
    /// Whether every range holds what it has to, and what waits aside is there. The first address that does not.
    pub(super) fn verify_pages(&self, pid: i32, exchanges: &mut Exchanges) -> Result<std::result::Result<(), u64>> {
        for switch in &exchanges.switches {
            if let Exchange::Restore { aside, .. } = switch.exchange {
                // Whatever it is: the file may have got somebody's breakpoint meanwhile.
                let _ = self.compare_pages(pid, aside, switch.len, &[], &mut exchanges.buffer)?;
            }
            if !switch.content.is_empty() {
                let found =
                    self.compare_pages(pid, switch.start, switch.len, &switch.content, &mut exchanges.buffer)?;
                if found.is_err() {
                    return Ok(found);
                }
            }
        }
        Ok(Ok(()))
    }

    /// Make the exchanges and look at what came out; as it was where that fails.
    pub(super) fn exchange_pages(&mut self, pid: i32, exchanges: &mut Exchanges) -> Result<()> {
        if exchanges.calls.is_empty() {
            return Ok(());
        }
        let results = self.remote_stopped(pid, &exchanges.calls, &mut [])?;
        let failed = results.last().filter(|r| (-4095..0).contains(*r)).copied();
        let mut outcome = match failed {
            Some(errno) => Err(unswitchable(pid, -errno as i32)),
            None => Ok(()),
        };
        for (addr, bytes) in &exchanges.carried {
            outcome = outcome.and_then(|()| self.write_memory(pid, *addr, bytes));
        }
        for (switch, after) in exchanges.switches.iter().zip(&exchanges.after).filter(|(_, after)| !after.is_empty()) {
            if outcome.is_ok() {
                let found = self.compare_pages(pid, switch.start, switch.len, after, &mut exchanges.buffer)?;
                outcome = found.map_err(|addr| Error::new("failed", did_not_take(pid)).at(addr));
            }
        }
        if outcome.is_err() {
            self.go_back(pid, exchanges, results.len() - usize::from(failed.is_some()));
        }
        outcome
    }

    /// Take the first `done` calls back.
    pub(super) fn go_back(&mut self, pid: i32, exchanges: &Exchanges, done: usize) {
        for call in exchanges.back.iter().take(done).rev().flatten() {
            // One by one: where a reservation is not to be had again, that is no reason to leave the others.
            let _ = self.remote_stopped(pid, std::slice::from_ref(call), &mut []);
        }
    }

    /// The same when all of them were made.
    pub(super) fn undo_exchange(&mut self, pid: i32, exchanges: &Exchanges) {
        self.go_back(pid, exchanges, exchanges.calls.len());
    }

    fn compare_pages(
        &self,
        pid: i32,
        start: u64,
        len: u64,
        want: &[u8],
        buffer: &mut [u8],
    ) -> Result<std::result::Result<(), u64>> {
        let mut at = 0;
        while at < len {
            let size = usize::try_from(len - at).unwrap_or(READ_AT_ONCE).min(buffer.len());
            let Some(found) = buffer.get_mut(..size) else { break };
            self.read_memory(pid, start + at, found)?;
            let from = usize::try_from(at).unwrap_or(usize::MAX);
            if let Some(want) = want.get(from..).and_then(|rest| rest.get(..size)) {
                if found != want {
                    let differs = found.iter().zip(want).position(|(a, b)| a != b).unwrap_or(0);
                    return Ok(Err(start + at + differs as u64));
                }
            }
            at += size as u64;
        }
        Ok(Ok(()))
    }

    /// Remember what calls have mapped for a change to come, so that it goes should the recorder die before the change:
    /// (number of the call, offset in what it mapped, length) each.
    pub fn keep_mapped(&mut self, pid: i32, results: &[i64], keep: &[(usize, u64, u64)]) {
        if results.last().is_none_or(|last| (-4095..0).contains(last)) || keep.is_empty() {
            return;
        }
        let data = &mut self.mapped.entry(pid).or_default().data;
        let mapped = |(i, offset, len): &(usize, u64, u64)| Some((results.get(*i)?.cast_unsigned() + offset, *len));
        data.extend(keep.iter().filter_map(mapped));
    }

    /// Remember which ranges are switched now, and whose the reserved places are.
    pub(super) fn note_exchanges(&mut self, pid: i32, exchanges: &Exchanges) {
        let switched = self.switched.entry(pid).or_default();
        let mut used: Vec<u64> = Vec::new();
        for switch in &exchanges.switches {
            match switch.exchange {
                Exchange::Replace { aside, copy } => {
                    switched.insert(aside, (switch.start, switch.len));
                    used.extend([aside, copy]);
                }
                Exchange::Restore { aside, .. } | Exchange::Abandon { aside } => {
                    switched.remove(&aside);
                }
                Exchange::Renew { copy, .. } => used.push(copy),
            }
        }
        if let Some(mapped) = self.mapped.get_mut(&pid) {
            mapped.data.retain(|(addr, _)| !used.contains(addr));
        }
    }
}

/// What is switched in a process: address aside → (start, length).
pub type Switched = BTreeMap<u64, (u64, u64)>;

fn unswitchable(pid: i32, errno: i32) -> Error {
    if errno == libc::ESRCH {
        return Error::gone(pid);
    }
    let why = std::io::Error::from_raw_os_error(errno);
    Error::new("unswitchable", format!("the code of process {pid} cannot be switched by the page: {why}"))
}

pub fn did_not_take(pid: i32) -> String {
    format!("the code of process {pid} did not take the change")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn switch(exchange: Exchange) -> Switch {
        Switch { start: 0x1000, len: 0x2000, content: vec![0x90; 0x2000], exchange }
    }

    #[test]
    fn every_call_is_taken_back_in_its_turn() {
        let restore = switch(Exchange::Restore { aside: 0x9000, scratch: Some(0x5000) });
        let calls = restore.calls();
        let forward: Vec<Call> = calls.iter().map(|(call, _)| *call).collect();
        assert_eq!(forward, [moved(0x1000, 0x5000, 0x2000, true), moved(0x9000, 0x1000, 0x2000, false)]);
        let back: Vec<Call> = calls.iter().rev().flat_map(|(_, back)| back.clone()).collect();
        let expected =
            [moved(0x1000, 0x9000, 0x2000, true), moved(0x5000, 0x1000, 0x2000, false), reserved(0x5000, 0x2000)];
        assert_eq!(back, expected);
        assert_eq!(switch(Exchange::Restore { aside: 0x9000, scratch: None }).calls().len(), 1);
    }

    #[test]
    fn the_copy_is_the_content_with_the_sites_and_abandoning_comes_last() {
        let site = |addr, len| Site { addr, old: vec![0x90; len], new: vec![0xe9; len], window_len: 5, moves: vec![] };
        let (inside, crossing, outside) = (site(0x1ffe, 5), site(0x2ffe, 5), site(0x2ffe, 2));
        let switches = vec![
            switch(Exchange::Abandon { aside: 0x20000 }),
            switch(Exchange::Replace { aside: 0x9000, copy: 0x30000 }),
        ];
        let change = Change { switches, ..Change::default() };
        let made = Exchanges::new(&change, &[&inside, &crossing]).expect("valid");
        assert!(made.hold(&inside) && made.hold(&outside) && !made.hold(&crossing));
        let after = made.after.first().expect("one");
        assert_eq!(after.get(0xffd..0x1004), Some(&[0x90, 0xe9, 0xe9, 0xe9, 0xe9, 0xe9, 0x90][..]));
        assert_eq!(after.last(), Some(&0x90));
        assert_eq!(made.calls.last(), Some(&Call::new(libc::SYS_munmap, &[Arg::Value(0x20000), Arg::Value(0x2000)])));
    }

    #[test]
    fn a_copy_needs_its_whole_content() {
        let mut short = switch(Exchange::Replace { aside: 0x9000, copy: 0x30000 });
        short.content.pop();
        let change = Change { switches: vec![short], ..Change::default() };
        assert_eq!(Exchanges::new(&change, &[]).err().map(|e| e.kind), Some("invalid"));
    }
}
