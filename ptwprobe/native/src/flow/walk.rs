//! Where in the code a stream is, and how packets move it.

mod blocks;
mod steps;

use super::block::NONE;
use super::cache::Cache;
use super::context::Spaces;
use super::returns::Returns;
use super::sink::Finding;
use super::suspended::{At, Suspended};
use crate::pt::Errata;

/// Caches of spaces and widths that are kept.
const MAX_CACHES: usize = 8;

/// Addresses of which it is kept whether there is code.
const ASKED: usize = 256;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Tracing is off.
    Off,
    /// Out of sync.
    Lost,
    At,
}

/// Branches of a TNT packet: the oldest in the highest bit, 1 is taken.
#[derive(Clone, Copy, Debug)]
pub struct Outcomes {
    pub bits: u64,
    pub count: u32,
}

/// Where the outcomes led.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Led {
    /// All were used.
    On,
    /// To an indirect branch: the rest comes behind it.
    ToIndirect,
    Nowhere(Finding),
}

/// See the module. `caches` are those that are not in use, with their space and width.
pub struct Walk<S> {
    spaces: S,
    compressed_returns: bool,
    errata: Errata,
    space: u32,
    tid: Option<u32>,
    bits: u32,
    caches: Vec<((u32, u32), Cache)>,
    cache: Cache,
    /// The space and the width of `cache`.
    key: (u32, u32),
    state: State,
    cur: u32,
    /// The next instruction, where it is not the first of the block.
    pos: Option<u64>,
    returns: Returns,
    suspended: Suspended,
    /// What was suspended before the piece began is among it.
    has_earlier: bool,
    /// The program goes on in code that nothing is known of: what was suspended before the piece would tell where.
    unresolved: Option<At>,
    /// (address, space, whether there is code), asked last.
    asked: [(u64, u32, bool); ASKED],
}

impl<S: Spaces> Walk<S> {
    pub fn new(spaces: S, compressed_returns: bool, errata: Errata) -> Self {
        Self {
            spaces,
            compressed_returns,
            errata,
            space: 0,
            tid: None,
            bits: 64,
            caches: Vec::new(),
            cache: Cache::new(64),
            key: (0, 64),
            state: State::Off,
            cur: NONE,
            pos: None,
            returns: Returns::default(),
            suspended: Suspended::default(),
            has_earlier: false,
            unresolved: None,
            asked: [(0, u32::MAX, false); ASKED],
        }
    }

    /// Starts a piece: nothing is known but the code.
    pub fn reset(&mut self) {
        self.state = State::Off;
        self.cur = NONE;
        self.pos = None;
        self.returns.clear();
        self.suspended.clear();
        self.has_earlier = false;
        self.unresolved = None;
        self.bits = 64;
    }

    /// The next instruction is the first of the present block.
    #[inline(always)]
    fn forget_pos(&mut self) {
        self.pos = None;
    }

    pub fn state(&self) -> State {
        self.state
    }

    /// From the next address that a packet tells on.
    pub fn set_context(&mut self, space: u32, tid: Option<u32>) {
        if self.tid != tid && self.state == State::Lost {
            // What the kernel did in between is not known: those of this thread may be far below the top.
            self.returns.clear();
        }
        self.space = space;
        self.tid = tid;
    }

    /// Width of the code from the next address that a packet tells on.
    pub fn set_bits(&mut self, bits: u32) {
        self.bits = bits;
    }

    /// The return addresses so far are void.
    pub fn clear_returns(&mut self) {
        self.returns.clear();
    }

    pub fn lose(&mut self) {
        self.state = State::Lost;
        self.returns.clear();
        self.pos = None;
    }

    /// The walk is in the kernel, whose code is not known. Its calls and returns are even: the return addresses of the
    /// program stay.
    pub fn leave_known(&mut self) {
        self.state = State::Lost;
        self.pos = None;
    }

    /// Whether the walk has come to where the code is not known.
    pub fn is_nowhere(&self) -> bool {
        self.state == State::At && self.cache.block(self.cur).is_nowhere()
    }

    /// Tracing is off; `suspended` at this address of unknown code.
    pub fn stop(&mut self, suspended: Option<u64>) {
        if let (Some(ip), Some(at)) = (suspended, self.position()) {
            if !self.knows(ip) {
                self.suspend(ip, at);
            }
        }
        self.state = State::Off;
        self.returns.clear();
        self.pos = None;
    }

    fn suspend(&mut self, ip: u64, reached: u64) {
        // No probe's stub is in the kernel.
        if ip >> 63 == 0 {
            self.suspended.push(At { ip, space: self.key.0, tid: self.tid }, reached);
        }
    }

    /// What is suspended now; whether that is all, or only what this piece knows of.
    pub fn suspended(&mut self) -> (Suspended, bool) {
        (std::mem::take(&mut self.suspended), self.has_earlier)
    }

    /// Whether the walk cannot go on before it is told what was suspended before the piece.
    pub fn waits(&self) -> bool {
        self.unresolved.is_some()
    }

    /// What was suspended before the piece.
    pub fn resolve(&mut self, earlier: &Suspended) {
        self.suspended.follow(earlier);
        self.has_earlier = true;
        if let Some(at) = self.unresolved.take() {
            self.resume(at);
        }
    }

    /// Tracing goes on at `ip`, or the kernel gives control back there. In code that nothing is known of the walk goes
    /// on where it was when it was interrupted there.
    pub fn come_back(&mut self, ip: u64) {
        if self.come_back_soon(ip) {
            return;
        }
        self.enter(ip);
        if self.cache.block(self.cur).is_nowhere() && ip >> 63 == 0 && !self.knows(ip) {
            self.resume(At { ip, space: self.key.0, tid: self.tid });
        }
    }

    #[cold]
    fn resume(&mut self, at: At) {
        match self.suspended.take(at) {
            Some(reached) => self.cur = self.cache.at(reached, self.spaces.space(self.key.0)),
            None if !self.has_earlier => self.unresolved = Some(at),
            None => {}
        }
    }

    /// The address that the walk has reached.
    pub fn position(&self) -> Option<u64> {
        (self.state == State::At).then(|| self.pos.unwrap_or_else(|| self.cache.start(self.cur)))
    }

    /// Whether there is code at `ip`.
    pub fn knows(&mut self, ip: u64) -> bool {
        if self.state != State::At {
            self.select();
        }
        let Some(asked) = self.asked.get_mut((ip ^ ip >> 8) as usize % ASKED) else { return false };
        if (asked.0, asked.1) != (ip, self.key.0) {
            *asked = (ip, self.key.0, self.spaces.space(self.key.0).read(ip, &mut [0]) != 0);
        }
        asked.2
    }

    /// The walk is at `ip`, as a packet says.
    #[inline(always)]
    fn arrive(&mut self, ip: u64) {
        match self.cache.recent(ip).filter(|_| self.is_selected()) {
            Some(index) => self.be_at(index),
            None => self.enter(ip),
        }
    }

    /// The present cache is that of the present space and width.
    #[inline(always)]
    fn is_selected(&self) -> bool {
        self.key == (self.space, self.bits)
    }

    #[inline(always)]
    fn be_at(&mut self, index: u32) {
        self.cur = index;
        self.pos = None;
        self.state = State::At;
    }

    /// The walk is at `ip`, as a packet says.
    pub fn enter(&mut self, ip: u64) {
        // Until it is found: the cache may be another one.
        self.state = State::Lost;
        self.pos = None;
        self.select();
        self.cur = self.cache.at(ip, self.spaces.space(self.key.0));
        self.state = State::At;
    }

    /// Makes the cache of the present space and width the present one, with room in it.
    fn select(&mut self) {
        let key = (self.space, self.bits);
        if self.key != key {
            let new = match self.caches.iter().position(|(other, _)| *other == key) {
                Some(at) => self.caches.remove(at).1,
                None => Cache::new(self.bits),
            };
            let old = std::mem::replace(&mut self.cache, new);
            let code = self.spaces.space(key.0);
            self.returns.renumber(|block| self.cache.at(old.start(block), code));
            if self.caches.len() >= MAX_CACHES {
                self.caches.remove(0);
            }
            self.caches.push((self.key, old));
            self.key = key;
        }
        if self.cache.is_full() {
            self.clear_cache();
        }
    }

    fn clear_cache(&mut self) {
        let at = self.position();
        let old = std::mem::replace(&mut self.cache, Cache::new(self.key.1));
        let code = self.spaces.space(self.key.0);
        self.returns.renumber(|block| self.cache.at(old.start(block), code));
        if let Some(at) = at {
            self.pos = None;
            self.cur = self.cache.at(at, code);
        }
    }

    /// Takes care that the cache stays bounded.
    #[inline]
    pub fn bound_memory(&mut self) {
        if self.cache.is_full() {
            self.clear_cache();
        }
    }
}
