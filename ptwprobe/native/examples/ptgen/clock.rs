//! The simulated clocks of the CPU: core cycles, and from them TSC, crystal (CTC) and bus ratio.

/// TSC ticks per tick of the crystal are `TSC_CTC_N / TSC_CTC_D`.
pub const TSC_CTC_N: u32 = 160;
pub const TSC_CTC_D: u32 = 2;
/// Bus ratio at which a core cycle is one tick of the TSC.
pub const MAX_NONTURBO: u8 = 20;
/// An MTC packet every 2^3 ticks of the crystal.
pub const MTC_SHIFT: u8 = 3;

const TSC_PER_CTC: u64 = (TSC_CTC_N / TSC_CTC_D) as u64;

pub struct Clock {
    /// Core cycles so far: the walk counts here.
    pub cycles: u64,
    /// Bus ratio now.
    pub cbr: u8,
    /// TSC and cycles when the ratio last changed.
    base_tsc: u64,
    base_cycles: u64,
    /// Cycles told by CYC packets so far.
    told_cycles: u64,
    /// Number of the last crystal period that an MTC told.
    told_period: u64,
}

impl Clock {
    pub fn new(start_tsc: u64) -> Self {
        let mut clock =
            Self { cycles: 0, cbr: MAX_NONTURBO, base_tsc: start_tsc, base_cycles: 0, told_cycles: 0, told_period: 0 };
        clock.told_period = clock.period();
        clock
    }

    pub fn tsc(&self) -> u64 {
        let cycles = self.cycles - self.base_cycles;
        self.base_tsc + cycles * u64::from(MAX_NONTURBO) / u64::from(self.cbr)
    }

    pub fn set_cbr(&mut self, cbr: u8) {
        self.base_tsc = self.tsc();
        self.base_cycles = self.cycles;
        self.cbr = cbr.max(1);
    }

    /// Time passes in which nothing is traced.
    pub fn sleep(&mut self, tsc: u64) {
        self.base_tsc += tsc;
    }

    pub fn ctc(&self) -> u64 {
        self.tsc() / TSC_PER_CTC
    }

    /// TSC ticks since the last tick of the crystal.
    pub fn fast(&self) -> u16 {
        (self.tsc() % TSC_PER_CTC) as u16
    }

    fn period(&self) -> u64 {
        self.ctc() >> MTC_SHIFT
    }

    /// Payload of the next MTC that is due; after a long sleep only the last ones are told.
    pub fn next_mtc(&mut self) -> Option<u8> {
        let now = self.period();
        if self.told_period >= now {
            return None;
        }
        self.told_period = (self.told_period + 1).max(now.saturating_sub(3));
        Some(self.told_period as u8)
    }

    /// Periods up to now need no MTC: a TMA told the crystal.
    pub fn told_crystal(&mut self) {
        self.told_period = self.period();
    }

    /// Cycles since the last CYC packet.
    pub fn take_cycles(&mut self) -> u64 {
        let new = self.cycles - self.told_cycles;
        self.told_cycles = self.cycles;
        new
    }
}
