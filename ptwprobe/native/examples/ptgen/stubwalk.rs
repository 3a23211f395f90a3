//! What happens in stubs, those that the image shows and those that it does not.

use std::io;

use crate::blocks::Block;
use crate::cpu::Cpu;
use crate::stubs::Stub;

impl Cpu<'_> {
    /// Through a stub whose code nobody sees: only its packets tell of it.
    pub fn through_stub(&mut self, block: &Block) -> io::Result<()> {
        let world = self.world;
        let Some(stub) = world.stubs.at_site(block.last) else { return Ok(()) };
        let stop = self.breaks_in(stub.steps.len());
        let mut disturbed = false;
        for (index, &(addr, slot)) in stub.steps.iter().enumerate() {
            self.em.clock.cycles += 1;
            if stop == Some(index) {
                self.settle(stub.site);
                self.interrupt(addr);
                self.away();
                self.resume_event(addr);
                disturbed = true;
            }
            if world.options.features.stubpsb && !self.unseen && self.rng.chance(1, 40) {
                self.settle(stub.site);
                self.psb_at(Some(addr))?;
                disturbed = true;
            }
            if let Some(slot) = slot {
                self.word(stub, slot, addr)?;
            }
        }
        self.cur = self.blocks.fall(world.image, self.cur);
        if disturbed {
            self.pin();
        }
        Ok(())
    }

    /// A `ptwrite` that the image shows.
    pub fn ptwrite(&mut self, block: &Block) -> io::Result<()> {
        let world = self.world;
        let stub = world.stubs.containing(block.last);
        let slot = stub.and_then(|s| s.steps.iter().find(|step| step.0 == block.last)?.1);
        if slot == Some(0) && self.breaks_in(2) == Some(0) {
            self.interrupt_and_resume(block.last);
        }
        match (stub, slot) {
            (Some(stub), Some(slot)) => self.word(stub, slot, block.last)?,
            _ => {
                let value = self.rng.word();
                self.emit_word(value, block.last)?;
            }
        }
        self.cur = self.blocks.fall(world.image, self.cur);
        if !world.options.features.noptwip {
            self.pin();
        }
        if slot.is_some() && self.breaks_in(4) == Some(1) {
            let at = self.some_boundary();
            self.interrupt_and_resume(at);
        }
        Ok(())
    }

    fn interrupt_and_resume(&mut self, at: u64) {
        self.settle(at);
        self.interrupt(at);
        self.away();
        self.resume_event(at);
        // The block that starts at `at` runs next; a `ptwrite` there was not executed yet.
        self.go(at);
    }

    fn breaks_in(&mut self, steps: usize) -> Option<usize> {
        self.world.options.stub_break.then(|| self.rng.below(steps))
    }

    fn word(&mut self, stub: &Stub, slot: usize, addr: u64) -> io::Result<()> {
        let value = if slot == 0 { stub.header } else { self.rng.word() };
        self.emit_word(value, addr)
    }

    fn emit_word(&mut self, value: u64, addr: u64) -> io::Result<()> {
        self.em.begin_event();
        let ip = (!self.world.options.features.noptwip).then_some(addr);
        let tsc = self.em.clock.tsc();
        self.truth.hit(value, ip.unwrap_or(0), tsc)?;
        self.em.ptw(value, ip);
        Ok(())
    }
}
