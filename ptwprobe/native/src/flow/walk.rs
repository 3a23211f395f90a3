//! Where in the code a stream is, and how packets move it.

use super::block::{branch_kind, Term, NONE};
use super::cache::Cache;
use super::context::Spaces;
use super::returns::Returns;
use super::sink::{Batch, BranchKind, Finding};
use super::suspended::{At, Suspended};

/// Direct jumps in a row, without a packet: more lead round in circles, or the code is made to waste time.
const MAX_DIRECT: u32 = 1 << 12;

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
    pub fn new(spaces: S, compressed_returns: bool) -> Self {
        Self {
            spaces,
            compressed_returns,
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

    pub fn state(&self) -> State {
        self.state
    }

    /// From the next address that a packet tells on.
    pub fn set_context(&mut self, space: u32, tid: Option<u32>) {
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
        let same = self.key == (self.space, self.bits);
        match self.cache.recent(ip).filter(|_| same) {
            Some(index) => {
                self.cur = index;
                self.pos = None;
                self.state = State::At;
            }
            None => self.enter(ip),
        }
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
            if self.caches.len() >= MAX_CACHES {
                self.caches.remove(0);
            }
            self.caches.push((self.key, old));
            self.key = key;
            self.returns.forget_blocks();
        }
        if self.cache.is_full() {
            self.clear_cache();
        }
    }

    fn clear_cache(&mut self) {
        let at = self.position();
        self.cache.clear();
        self.returns.forget_blocks();
        if let Some(at) = at {
            self.pos = None;
            self.cur = self.cache.at(at, self.spaces.space(self.key.0));
        }
    }

    /// Takes care that the cache stays bounded.
    #[inline]
    pub fn bound_memory(&mut self) {
        if self.cache.is_full() {
            self.clear_cache();
        }
    }

    /// Follows `outcomes`, of which those used are taken away.
    #[inline(always)]
    pub fn branches(&mut self, outcomes: &mut Outcomes, out: &mut Batch) -> Led {
        self.pos = None;
        let mut sure = out.branches.len();
        let mut direct = 0;
        let Outcomes { mut bits, mut count } = *outcomes;
        let led = loop {
            if count == 0 {
                return Led::On;
            }
            let block = *self.cache.block(self.cur);
            match block.term {
                Term::Cond => {
                    // No branch on the outcome: it is what cannot be foreseen.
                    let taken = bits >> 63 == 1;
                    out.push_if(taken, block.branch, block.target, BranchKind::Cond);
                    let next = if taken { block.taken } else { block.fall };
                    self.cur = if next == NONE { self.link(taken) } else { next };
                    bits <<= 1;
                    count -= 1;
                    sure = out.branches.len();
                    direct = 0;
                    continue;
                }
                Term::Jump => {
                    out.push(block.branch, block.target, BranchKind::Jump);
                    self.cur = if block.taken == NONE { self.link(true) } else { block.taken };
                }
                Term::Call => self.call(out),
                Term::Split => self.cur = self.cache.fall(self.cur, self.spaces.space(self.key.0)),
                Term::Return if self.compressed_returns && bits >> 63 == 1 && !self.returns.is_empty() => {
                    bits <<= 1;
                    count -= 1;
                    if let Some(entry) = self.returns.pop() {
                        out.push(block.branch, entry.ip, BranchKind::Return);
                        self.cur = if entry.block == NONE {
                            self.cache.at(entry.ip, self.spaces.space(self.key.0))
                        } else {
                            entry.block
                        };
                    }
                    sure = out.branches.len();
                    direct = 0;
                    continue;
                }
                Term::Return | Term::IndirectJump | Term::IndirectCall => {
                    break Led::ToIndirect;
                }
                // Up to here there was no choice.
                Term::Unknown => break Led::Nowhere(Finding::NoCode { ip: block.branch }),
                Term::Syscall | Term::FarReturn | Term::FarOther | Term::Stop | Term::Invalid => {
                    out.branches.truncate(sure);
                    break Led::Nowhere(Finding::Mismatch { ip: block.branch });
                }
            }
            direct += 1;
            if direct > MAX_DIRECT {
                out.branches.truncate(sure);
                break Led::Nowhere(Finding::Endless { ip: block.branch });
            }
        };
        *outcomes = Outcomes { bits, count };
        led
    }

    /// Follows the indirect branch that outcomes led to; its target is told behind them.
    pub fn deferred(&mut self, ip: u64, out: &mut Batch) {
        self.indirect(ip, out);
    }

    /// The address of the instruction that ends the present block.
    pub fn branch(&self) -> u64 {
        self.cache.block(self.cur).branch
    }

    /// The block that comes after the present one, for the first time.
    #[cold]
    fn link(&mut self, taken: bool) -> u32 {
        let code = self.spaces.space(self.key.0);
        if taken {
            self.cache.taken(self.cur, code)
        } else {
            self.cache.fall(self.cur, code)
        }
    }

    /// Follows the direct call that ends the present block.
    #[inline(always)]
    fn call(&mut self, out: &mut Batch) {
        let block = *self.cache.block(self.cur);
        out.push(block.branch, block.target, BranchKind::Call);
        // A call of the next instruction is not kept by the CPU.
        if block.target != block.after() {
            self.returns.push(block.after(), block.fall);
        }
        self.cur = if block.taken == NONE { self.link(true) } else { block.taken };
    }

    /// Follows the indirect branch or the return that ends the present block to `ip`.
    #[inline(always)]
    fn indirect(&mut self, ip: u64, out: &mut Batch) {
        let block = *self.cache.block(self.cur);
        match block.term {
            Term::IndirectCall => self.returns.push(block.after(), block.fall),
            Term::Return => {
                self.returns.pop();
            }
            _ => {}
        }
        out.push(block.branch, ip, branch_kind(block.term));
        self.arrive(ip);
    }

    /// As `target`, where an indirect branch comes next, or behind one jump; else nothing happens.
    #[inline(always)]
    pub fn plain_target(&mut self, ip: u64, out: &mut Batch) -> bool {
        let is_indirect = |term| matches!(term, Term::IndirectJump | Term::IndirectCall | Term::Return);
        let block = self.cache.block(self.cur);
        if !is_indirect(block.term) {
            if block.term != Term::Jump || block.taken == NONE || !is_indirect(self.cache.block(block.taken).term) {
                return false;
            }
            out.push(block.branch, block.target, BranchKind::Jump);
            self.cur = block.taken;
        }
        self.indirect(ip, out);
        true
    }

    /// A TIP: to `ip`, or to where the trace does not say.
    pub fn target(&mut self, ip: Option<u64>, out: &mut Batch) -> Result<(), Finding> {
        let sure = out.branches.len();
        self.pos = None;
        let wrong = match self.run_direct(out) {
            Err(finding) => finding,
            Ok(()) => {
                let block = *self.cache.block(self.cur);
                match block.term {
                    Term::IndirectJump | Term::IndirectCall | Term::Return => match ip {
                        Some(ip) => {
                            self.indirect(ip, out);
                            return Ok(());
                        }
                        None => {
                            out.push(block.branch, 0, branch_kind(block.term));
                            self.lose();
                            return Ok(());
                        }
                    },
                    Term::Syscall | Term::FarReturn | Term::FarOther => {
                        out.push(block.branch, ip.unwrap_or(0), branch_kind(block.term));
                        match ip {
                            Some(ip) => self.come_back(ip),
                            None => self.lose(),
                        }
                        return Ok(());
                    }
                    Term::Unknown => Finding::NoCode { ip: block.branch },
                    _ => Finding::Mismatch { ip: block.branch },
                }
            }
        };
        if !matches!(wrong, Finding::NoCode { .. }) {
            out.branches.truncate(sure);
        }
        self.lose();
        if let Some(ip) = ip {
            self.enter(ip);
        }
        Err(wrong)
    }

    /// Follows direct jumps and calls up to what a packet has a say in.
    fn run_direct(&mut self, out: &mut Batch) -> Result<(), Finding> {
        for _ in 0..MAX_DIRECT {
            let block = self.cache.block(self.cur);
            match block.term {
                Term::Jump => {
                    out.push(block.branch, block.target, BranchKind::Jump);
                    self.cur = self.cache.taken(self.cur, self.spaces.space(self.key.0));
                }
                Term::Call => self.call(out),
                Term::Split => self.cur = self.cache.fall(self.cur, self.spaces.space(self.key.0)),
                _ => return Ok(()),
            }
        }
        Err(Finding::Endless { ip: self.cache.block(self.cur).branch })
    }

    /// Goes on to `ip`, where direct jumps lead there; else nothing moves. `executed`: the instruction there has run.
    pub fn go_to(&mut self, ip: u64, executed: bool, out: &mut Batch) -> Result<(), Finding> {
        let Some(from) = self.position() else { return Ok(()) };
        let (mut at, mut least, mut blocks) = (self.cur, from, 0);
        let next = loop {
            let start = self.cache.start(at);
            let ahead = ip.wrapping_sub(start) >= least.wrapping_sub(start);
            if let Some(next) = self.cache.next_of(at, ip).filter(|_| ahead) {
                break next;
            }
            match self.cache.direct(at, self.spaces.space(self.key.0)).filter(|_| blocks < MAX_DIRECT) {
                Some((next, _)) => at = next,
                None => return Err(Finding::Unreachable { from, ip }),
            }
            blocks += 1;
            least = self.cache.start(at);
        };
        for _ in 0..blocks {
            let block = self.cache.block(self.cur);
            match block.term {
                Term::Jump => {
                    out.push(block.branch, block.target, BranchKind::Jump);
                    self.cur = self.cache.taken(self.cur, self.spaces.space(self.key.0));
                }
                Term::Call => self.call(out),
                _ => self.cur = self.cache.fall(self.cur, self.spaces.space(self.key.0)),
            }
        }
        self.pos = Some(if executed { next } else { ip });
        Ok(())
    }

    /// `ip` is in code that nothing is known of: goes on to the site of the stub there, where a session tells it.
    pub fn go_to_site(&mut self, ip: u64, out: &mut Batch) {
        if let Some(stub) = self.spaces.space(self.key.0).stub(ip) {
            // Where nothing leads there, nothing moves, and nothing is lost.
            let _ = self.go_to(stub.site, false, out);
        }
    }

    /// Tracing ends with a branch of the program, a TIP.PGD without a FUP: to `ip` where it says so.
    pub fn leave(&mut self, ip: Option<u64>, out: &mut Batch) {
        let sure = out.branches.len();
        self.pos = None;
        for _ in 0..MAX_DIRECT {
            let block = *self.cache.block(self.cur);
            let kind = branch_kind(block.term);
            match block.term {
                // It leaves the range that is traced.
                Term::Jump | Term::Call | Term::Cond if ip == Some(block.target) => {
                    out.push(block.branch, block.target, kind);
                    return self.stop(None);
                }
                Term::Jump => {
                    out.push(block.branch, block.target, kind);
                    self.cur = self.cache.taken(self.cur, self.spaces.space(self.key.0));
                }
                Term::Call => self.call(out),
                Term::Split => self.cur = self.cache.fall(self.cur, self.spaces.space(self.key.0)),
                Term::Return | Term::IndirectJump | Term::IndirectCall => {
                    out.push(block.branch, ip.unwrap_or(0), kind);
                    return self.stop(None);
                }
                Term::Syscall | Term::FarReturn | Term::FarOther => {
                    out.push(block.branch, ip.unwrap_or(0), kind);
                    return self.stop(None);
                }
                _ => break,
            }
        }
        out.branches.truncate(sure);
        out.push(0, ip.unwrap_or(0), BranchKind::TraceEnd);
        self.stop(None);
    }

    /// An interrupt, a fault, the end of a transaction: from `from` to `to`, where it is traced.
    pub fn interrupt(&mut self, from: u64, to: Option<u64>, kind: BranchKind, out: &mut Batch) {
        out.push(from, to.unwrap_or(0), kind);
        if let Some(at) = self.position() {
            if !self.knows(from) {
                self.suspend(from, at);
            }
        }
        match to {
            Some(to) => self.enter(to),
            None => self.lose(),
        }
    }
}
