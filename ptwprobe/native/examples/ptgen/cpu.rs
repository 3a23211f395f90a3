//! The simulated CPU: walks over the code by chance and tells the emitter and the truth what happens.

use std::io;

use crate::blocks::{Block, Blocks, End};
use crate::events::Events;
use crate::image::Image;
use crate::options::Options;
use crate::packets::Emitter;
use crate::returns::ReturnStack;
use crate::rng::{mix, Rng};
use crate::stubs::Stubs;
use crate::truth::{Branch, Truth};

/// The program's own stack forgets its older half beyond this.
const MAX_DEPTH: usize = 4096;
/// Direct branches in a row after which the code is taken for an endless loop.
const MAX_RUN: u64 = 200;

/// What all streams share.
pub struct World<'a> {
    pub image: &'a Image,
    pub options: &'a Options,
    pub stubs: &'a Stubs,
    /// Where functions begin, those of the sites left out.
    pub entries: &'a [u64],
    /// Addresses that are traced.
    pub range: Option<(u64, u64)>,
    /// `mov rax, 15; syscall`, to which a signal handler returns.
    pub sigreturn: Option<u64>,
}

pub struct Cpu<'a> {
    pub world: &'a World<'a>,
    pub blocks: Blocks,
    pub em: Emitter,
    pub truth: Truth,
    pub rng: Rng,
    pub events: Events,
    /// The block that runs next.
    pub cur: u32,
    /// Where a decoder knows the flow to be, and the branches since then, all of them direct.
    anchor: u32,
    run: u64,
    pub stack: Vec<u64>,
    pub other_stacks: Vec<Vec<u64>>,
    pub retc: ReturnStack,
    /// Where to go at the next indirect jump or call.
    pub goal: Option<u64>,
    /// Interrupted addresses under signal handlers.
    pub frames: Vec<u64>,
    /// Where an abort of the present transaction goes.
    pub transaction: Option<u64>,
    /// First branch of a loss that needed a packet.
    pub unsure_from: Option<u64>,
    /// The system call that ran last.
    pub last_syscall: u64,
    /// What is written gets lost.
    pub unseen: bool,
}

impl<'a> Cpu<'a> {
    pub fn new(world: &'a World<'a>, blocks: Blocks, em: Emitter, truth: Truth, seed: u64) -> Self {
        Self {
            world,
            blocks,
            em,
            truth,
            rng: Rng::new(seed),
            events: Events::new(world.options, &mut Rng::new(seed ^ 0xe7)),
            cur: 0,
            anchor: 0,
            run: 0,
            stack: Vec::new(),
            other_stacks: vec![Vec::new(); 3],
            retc: ReturnStack::new(),
            goal: None,
            frames: Vec::new(),
            transaction: None,
            unsure_from: None,
            last_syscall: 0,
            unseen: false,
        }
    }

    /// Runs until the stream has its length, and ends it with an event.
    pub fn run(&mut self) -> io::Result<()> {
        let first = self.some_entry();
        self.cur = self.block(first);
        self.pin();
        self.psb()?;
        while self.em.out.len() < self.world.options.bytes {
            if self.em.out.len() >= self.events.limit {
                self.due()?;
                self.truth.spill()?;
            }
            self.step()?;
        }
        self.end();
        self.truth.finish()
    }

    pub fn block(&mut self, addr: u64) -> u32 {
        self.blocks.find(self.world.image, addr)
    }

    pub fn start(&self) -> u64 {
        self.blocks.all[self.cur as usize].start
    }

    /// The decoder will know that the flow has come to where it is now.
    #[inline]
    pub fn pin(&mut self) {
        self.anchor = self.cur;
        self.run = 0;
    }

    pub fn go(&mut self, addr: u64) {
        self.cur = self.block(addr);
        self.pin();
    }

    fn direct(&mut self, to: u32) {
        self.cur = to;
        self.run += 1;
    }

    #[inline]
    fn outside(&self, addr: u64) -> bool {
        self.world.range.is_some_and(|(low, high)| addr < low || addr >= high)
    }

    /// A packet is needed to know the flow from here on.
    #[inline]
    fn needs_packet(&mut self) {
        if self.unsure_from.is_none() {
            self.unsure_from = Some(self.truth.count);
        }
    }

    /// Runs one block.
    #[inline]
    pub fn step(&mut self) -> io::Result<()> {
        let block = self.blocks.all[self.cur as usize];
        self.em.clock.cycles += u64::from(block.count);
        if self.transaction.is_some() && self.abort_by_chance(&block) {
            return Ok(());
        }
        if self.world.range.is_some() && self.falls_out(&block) {
            self.interrupt(block.last);
            self.restart();
            return Ok(());
        }
        match block.end {
            End::Cond => self.cond(&block),
            End::Jump => {
                self.truth.branch(block.last, block.target, Branch::Jump);
                if self.outside(block.target) {
                    self.leave(block.target, None);
                } else {
                    let to = self.blocks.taken(self.world.image, self.cur);
                    self.direct(to);
                    self.break_endless();
                }
            }
            End::Call => self.call(&block),
            End::Return => self.ret(&block),
            End::IndirectJump => {
                self.needs_packet();
                let to = self.indirect_jump_target(block.last);
                self.indirect(&block, to, Branch::IndirectJump);
            }
            End::IndirectCall => {
                self.needs_packet();
                let to = self.target(block.last);
                self.push(block.next, true);
                self.indirect(&block, to, Branch::IndirectCall);
            }
            End::Fall => self.cur = self.blocks.fall(self.world.image, self.cur),
            End::Site => self.through_stub(&block)?,
            End::Ptwrite => self.ptwrite(&block)?,
            End::Syscall | End::FarReturn | End::FarOther | End::Fault => {
                self.needs_packet();
                self.rare(&block);
            }
            End::Xbegin | End::Xend | End::Xabort => self.tsx(&block),
        }
        Ok(())
    }

    #[inline]
    fn cond(&mut self, block: &Block) {
        self.needs_packet();
        let taken = self.rng.half() < block.threshold;
        if taken {
            self.truth.branch(block.last, block.target, Branch::Cond);
            if self.outside(block.target) {
                self.leave(block.target, None);
                return;
            }
            self.cur = self.blocks.taken(self.world.image, self.cur);
        } else {
            self.cur = self.blocks.fall(self.world.image, self.cur);
        }
        self.em.tnt(taken);
        self.pin();
    }

    fn call(&mut self, block: &Block) {
        self.truth.branch(block.last, block.target, Branch::Call);
        // `call next` is how code finds its own address: it takes the return address off again.
        if block.target != block.next {
            self.push(block.next, true);
        }
        if self.outside(block.target) {
            self.stack.pop();
            self.leave(block.target, Some(block.next));
            return;
        }
        let to = self.blocks.taken(self.world.image, self.cur);
        self.direct(to);
        self.break_endless();
    }

    pub fn push(&mut self, addr: u64, by_call: bool) {
        if self.stack.len() >= MAX_DEPTH {
            self.stack.drain(..MAX_DEPTH / 2);
        }
        self.stack.push(addr);
        if by_call {
            self.retc.push(addr);
        }
    }

    fn ret(&mut self, block: &Block) {
        self.needs_packet();
        let features = &self.world.options.features;
        if features.coroutines && self.rng.chance(1, 100) {
            let other = self.rng.below(self.other_stacks.len());
            std::mem::swap(&mut self.stack, &mut self.other_stacks[other]);
        }
        let to = if features.retpoline && self.rng.chance(1, 100) {
            self.target(block.last)
        } else {
            match self.stack.pop() {
                Some(addr) => addr,
                None => self.target(block.last),
            }
        };
        let was_empty = self.retc.is_surely_empty();
        let compressed = self.retc.pop() == Some(to) && features.retc;
        let deferrable = features.deferret && (!features.retc || was_empty);
        self.truth.branch(block.last, to, Branch::Return);
        if self.outside(to) {
            self.leave(to, None);
            return;
        }
        if compressed {
            self.em.tnt(true);
        } else {
            self.em.tip(to, deferrable);
        }
        self.go(to);
    }

    fn indirect_jump_target(&mut self, ip: u64) -> u64 {
        if self.world.options.features.longjmp && self.stack.len() > 3 && self.rng.chance(1, 10) {
            let frames = self.rng.between(1, self.stack.len().min(20));
            self.stack.truncate(self.stack.len() - frames + 1);
            if let Some(addr) = self.stack.pop() {
                return addr;
            }
        }
        self.target(ip)
    }

    fn indirect(&mut self, block: &Block, to: u64, kind: Branch) {
        self.truth.branch(block.last, to, kind);
        if self.outside(to) {
            self.leave(to, (kind == Branch::IndirectCall).then_some(block.next));
            return;
        }
        self.em.tip(to, self.world.options.features.defer);
        self.go(to);
    }

    /// Where an indirect branch at `ip` goes.
    pub fn target(&mut self, ip: u64) -> u64 {
        if let Some(goal) = self.goal.take() {
            return goal;
        }
        let liking = (2.0 * self.world.options.bias - 1.0) * 100.0;
        if self.rng.chance(liking as u32, 100) {
            let which = mix(ip ^ self.world.options.seed) as usize % self.world.entries.len();
            return self.world.entries[which];
        }
        if self.rng.chance(1, 2) {
            let index = self.rng.below(self.blocks.all.len());
            let block = &self.blocks.all[index];
            let usable = block.count > 0 && block.end != End::Fault;
            if usable && !self.outside(block.start) && !self.world.stubs.leads_to_site(block.start) {
                return block.start;
            }
        }
        self.some_entry()
    }

    pub fn some_entry(&mut self) -> u64 {
        self.rng.pick(self.world.entries).copied().unwrap_or(0)
    }

    /// Behind a fall out of the range nothing could be told by packets that decoders know: the walk is stopped before.
    fn falls_out(&self, block: &Block) -> bool {
        let goes_on = !matches!(block.end, End::Jump | End::IndirectJump | End::Return | End::Fault | End::Site);
        goes_on && self.outside(block.next)
    }

    fn break_endless(&mut self) {
        if self.run > MAX_RUN {
            let at = self.start();
            self.interrupt(at);
            self.restart();
        }
    }

    /// Before an event at `ip`: a decoder takes the first way to `ip` that it finds, so what came after the flow was
    /// there for the first time is taken back. Only endless loops of direct branches have any of it.
    pub fn settle(&mut self, ip: u64) {
        if self.run == 0 {
            return;
        }
        let mut index = self.anchor;
        let mut passed = 0;
        while passed < self.run {
            let block = self.blocks.all[index as usize];
            let within = block.start <= ip && ip <= block.last;
            if within && self.blocks.boundaries(self.world.image, index).contains(&ip) {
                break;
            }
            if matches!(block.end, End::Jump | End::Call) {
                passed += 1;
                index = self.blocks.taken(self.world.image, index);
            } else {
                index = self.blocks.fall(self.world.image, index);
            }
        }
        if passed < self.run {
            self.truth.take_back(self.run - passed);
            self.retc.forget();
        }
        self.run = 0;
    }

    /// The address of some instruction of the present block.
    pub fn some_boundary(&mut self) -> u64 {
        let all = self.blocks.boundaries(self.world.image, self.cur);
        self.rng.pick(&all).copied().unwrap_or_else(|| self.start())
    }
}
