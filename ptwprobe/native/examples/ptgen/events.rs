//! What happens beside the program's own flow, by the bytes that were written: PSBs, interrupts, losses and the rest.

use std::io;

use crate::cpu::Cpu;
use crate::options::Options;
use crate::rng::Rng;
use crate::truth::{Branch, Loss};

/// MODE.Exec of 64-bit code: CS.L.
pub const MODE_64: u8 = 1;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Event {
    Psb,
    Hit,
    Interrupt,
    UserInterrupt,
    Overflow,
    Cut,
    Cbr,
    Sprinkle,
}

struct Timer {
    event: Event,
    /// Mean distance, bytes.
    gap: usize,
    at: usize,
}

pub struct Events {
    timers: Vec<Timer>,
    /// Length of the stream at which the next one is due.
    pub limit: usize,
}

impl Events {
    pub fn new(options: &Options, rng: &mut Rng) -> Self {
        let features = &options.features;
        let hit_gap = options.bytes.checked_div(options.hits).unwrap_or(0);
        let sprinkle = features.power || features.blocks || features.misc || features.events;
        let wanted = [
            (Event::Psb, options.psb, true),
            (Event::Hit, hit_gap, hit_gap > 0),
            (Event::Interrupt, options.event_gap, features.interrupts || features.signals),
            (Event::UserInterrupt, 3 * options.event_gap, features.uintr),
            (Event::Overflow, options.loss_gap, features.ovf),
            (Event::Cut, options.loss_gap, features.cut),
            (Event::Cbr, 3 * options.event_gap, features.cbr),
            (Event::Sprinkle, options.event_gap, sprinkle),
        ];
        let timers = wanted.into_iter().filter(|w| w.2).map(|(event, gap, _)| {
            let at = match event {
                Event::Psb => gap,
                // As many as there are whole distances.
                Event::Hit => gap / 2,
                _ => rng.around(gap),
            };
            Timer { event, gap, at }
        });
        let mut events = Self { timers: timers.collect(), limit: 0 };
        events.set_limit();
        events
    }

    fn set_limit(&mut self) {
        self.limit = self.timers.iter().map(|t| t.at).min().unwrap_or(usize::MAX);
    }
}

impl Cpu<'_> {
    /// Does what is due.
    pub fn due(&mut self) -> io::Result<()> {
        for index in 0..self.events.timers.len() {
            let Timer { event, gap, at } = self.events.timers[index];
            if at > self.em.out.len() {
                continue;
            }
            match event {
                Event::Psb => self.psb()?,
                Event::Hit => self.aim_at_site(),
                Event::Interrupt => self.random_interrupt(),
                Event::UserInterrupt => self.user_interrupt(),
                Event::Overflow => self.overflow()?,
                Event::Cut => self.cut()?,
                Event::Cbr => self.change_ratio(),
                Event::Sprinkle => self.sprinkle(),
            }
            let now = self.em.out.len();
            self.events.timers[index].at = match event {
                Event::Psb => now + gap,
                // Hits are counted over the trace: one that came late does not put off the next.
                Event::Hit => at + gap,
                _ => now + self.rng.around(gap),
            };
        }
        self.events.set_limit();
        Ok(())
    }

    pub fn psb(&mut self) -> io::Result<()> {
        let ip = self.start();
        self.settle(ip);
        self.psb_at(Some(ip))?;
        self.pin();
        Ok(())
    }

    /// PSB+ and what it does to the CPU. Without `ip` packets are not enabled.
    pub fn psb_at(&mut self, ip: Option<u64>) -> io::Result<()> {
        self.em.begin_event();
        self.truth.psb(self.em.out.len(), ip.unwrap_or(0))?;
        for loss in &mut self.truth.losses {
            if loss.until == u64::MAX {
                loss.until = self.truth.count;
            }
        }
        let features = &self.world.options.features;
        self.em.psb_plus(ip, u8::from(self.transaction.is_some()), MODE_64, features.vm);
        self.retc.clear();
        Ok(())
    }

    fn aim_at_site(&mut self) {
        self.goal = self.rng.pick(&self.world.stubs.all).map(|stub| stub.entry);
    }

    /// FUP and TIP.PGD: the CPU is in the kernel afterwards.
    pub fn interrupt(&mut self, ip: u64) {
        self.settle(ip);
        self.begin_interrupt(ip);
        self.em.fup(ip);
        self.em.event_pgd();
        self.truth.branch(ip, 0, Branch::Interrupt);
        self.retc.clear();
    }

    fn begin_interrupt(&mut self, ip: u64) {
        self.em.begin_event();
        if self.world.options.features.events && self.rng.chance(1, 2) {
            if self.rng.chance(1, 3) {
                // The address of a page fault.
                self.em.evd(0, ip ^ 0x1234);
            }
            // No IP bit: the FUP is the interrupt's, not one that stands alone.
            self.em.cfe(1, self.rng.between(14, 250) as u8, None);
        }
    }

    /// Time in the kernel, where packets are not enabled.
    pub fn away(&mut self) {
        let features = &self.world.options.features;
        let ticks = self.rng.around(4000) as u64;
        self.em.clock.sleep(ticks);
        if features.mwait && self.rng.chance(1, 4) {
            self.em.mwait(0x20);
            self.em.pwre(0x20);
        }
        if features.power && self.rng.chance(1, 4) {
            self.em.exstop(None);
            self.em.pwrx(2, 2);
        }
        if features.vm && self.rng.chance(1, 4) {
            self.em.pip(0x1234_5000);
        }
        if features.tsc && self.rng.chance(1, 2) {
            self.em.tsc();
        }
        if features.misc && self.rng.chance(1, 8) {
            self.em.pad();
        }
    }

    pub fn resume_event(&mut self, ip: u64) {
        if self.rng.chance(1, 4) {
            self.em.mode_exec(MODE_64);
        }
        self.em.pge(ip);
        self.truth.branch(0, ip, Branch::TraceStart);
    }

    /// Goes on somewhere else, packets not being enabled.
    pub fn restart(&mut self) {
        self.away();
        let to = self.some_entry();
        self.resume_event(to);
        self.go(to);
    }

    fn random_interrupt(&mut self) {
        let ip = self.some_boundary();
        if self.transaction.is_some() {
            self.abort(ip);
            return;
        }
        self.interrupt(ip);
        self.away();
        if self.world.options.features.signals && self.rng.chance(1, 2) && self.enter_handler(ip) {
            return;
        }
        self.resume_event(ip);
        self.go(ip);
    }

    /// A signal is delivered on the way back to `ip`; false where the code has no way out of a handler.
    pub fn enter_handler(&mut self, ip: u64) -> bool {
        let Some(restorer) = self.world.sigreturn.filter(|_| self.frames.len() < 16) else { return false };
        self.frames.push(ip);
        self.push(restorer, false);
        let handler = self.some_entry();
        self.resume_event(handler);
        self.go(handler);
        true
    }

    fn user_interrupt(&mut self) {
        if self.transaction.is_some() {
            return;
        }
        let ip = self.some_boundary();
        self.settle(ip);
        self.em.begin_event();
        self.em.fup(ip);
        let handler = self.some_entry();
        self.em.event_tip(handler);
        self.truth.branch(ip, handler, Branch::Interrupt);
        self.retc.forget();
        self.go(handler);
    }

    fn change_ratio(&mut self) {
        let ratio = self.rng.between(8, 40) as u8;
        self.em.begin_event();
        self.em.clock.set_cbr(ratio);
        self.em.cbr(ratio);
    }

    fn sprinkle(&mut self) {
        let features = &self.world.options.features;
        let ip = self.some_boundary();
        self.settle(ip);
        self.em.begin_event();
        if features.power && self.rng.chance(1, 3) {
            self.em.exstop(Some(ip));
        }
        if features.blocks && self.rng.chance(1, 3) {
            let items: Vec<(u8, u64)> = (0..5).map(|id| (id, self.rng.word())).collect();
            self.em.block(&items, Some(ip));
        }
        if features.events && self.rng.chance(1, 3) {
            // The end of an interrupt, with a FUP of its own.
            self.em.cfe(2, 0, Some(ip));
        }
        if features.misc {
            self.em.mnt(self.rng.word());
            self.em.pad();
        }
        self.cur = self.block(ip);
        // Only a packet with the address tells the decoder; without one it knows no more than before.
        self.go(ip);
    }

    /// Runs on while what is written gets lost; the loss without its place in the stream.
    fn run_unseen(&mut self, what: &'static str) -> io::Result<Loss> {
        let ip = self.start();
        self.settle(ip);
        self.pin();
        self.em.begin_event();
        let (first, first_hit, offset) = (self.truth.count, self.truth.hit_count, self.em.out.len());
        self.unsure_from = None;
        self.unseen = true;
        for _ in 0..self.rng.between(1, 300) {
            self.step()?;
        }
        self.unseen = false;
        let ip = self.start();
        self.settle(ip);
        let end = self.truth.count;
        let sure = self.unsure_from.unwrap_or(end);
        Ok(Loss {
            what,
            offset,
            cut: 0,
            first,
            sure: sure.min(end),
            end,
            until: end,
            hits: (first_hit, self.truth.hit_count),
        })
    }

    fn overflow(&mut self) -> io::Result<()> {
        let mut loss = self.run_unseen("ovf")?;
        self.em.take_back(loss.offset);
        self.em.ovf();
        self.retc.clear();
        self.transaction = None;
        let ip = self.start();
        if self.rng.chance(3, 4) {
            self.em.full_fup(ip);
            if self.world.options.features.tsc {
                self.em.tsc();
            }
        } else {
            // It ended while the CPU was in the kernel.
            self.em.full_pge(ip);
            loss.end = self.truth.count;
            loss.until = loss.end;
            self.truth.branch(0, ip, Branch::TraceStart);
        }
        self.pin();
        self.truth.losses.push(loss);
        Ok(())
    }

    fn cut(&mut self) -> io::Result<()> {
        let mut loss = self.run_unseen("cut")?;
        self.em.flush();
        self.pin();
        let len = self.em.out.len() - loss.offset;
        // Packets are cut through, as if pages were missing.
        let keep_front = self.rng.below(4).min(len);
        let keep_back = self.rng.below(4).min(len - keep_front);
        let from = loss.offset + keep_front;
        loss.cut = len - keep_front - keep_back;
        self.em.out.drain(from..from + loss.cut);
        loss.until = u64::MAX;
        self.truth.losses.push(loss);
        Ok(())
    }

    /// The stream ends with an event that pins the last branches.
    pub fn end(&mut self) {
        let ip = self.start();
        self.interrupt(ip);
        for loss in &mut self.truth.losses {
            loss.until = loss.until.min(self.truth.count);
        }
    }
}
