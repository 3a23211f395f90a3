//! The time-stamp counter between its packets: an estimate from TSC, TMA, MTC, CYC and CBR packets.
//!
//! A TSC packet is exact. An MTC packet says that the crystal clock (CTC) has reached a multiple of 2^`mtc_shift`; a TMA
//! packet after a TSC ties that clock to the counter. Between these points CYC packets count core cycles, which the
//! core's ratio (CBR, or what the last points have measured) turns into ticks of the counter. Intel SDM volume 3,
//! "Intel Processor Trace", sections on the timing packets.

use super::TSC_BITS;

#[cfg(test)]
mod tests;

/// Ratios and fractions of ticks have 32 bits after the point.
const POINT: u32 = 32;

/// Bits of the crystal clock in an MTC packet, and in a TMA packet.
const MTC_BITS: u32 = 8;
const TMA_BITS: u32 = 16;

/// MTCs that may come after a TSC packet that was taken later.
const LATE_MTCS: u8 = 8;

/// Ticks over which the core's ratio is measured at least: a tick of error at either end is then below 0.2 %.
const MEASURED_TICKS: u64 = 1024;

/// How the CPU was set up, as AUXTRACE_INFO and the event's config say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TimeConfig {
    /// Ticks of the counter per tick of the crystal clock, as numerator and denominator (CPUID 0x15). Without them MTC
    /// packets say nothing.
    pub tsc_ctc: Option<(u32, u32)>,
    /// An MTC packet comes every 2^`mtc_shift` ticks of the crystal clock, at most 2^15.
    pub mtc_shift: u8,
    /// The ratio at which core cycles are ticks of the counter; 0: unknown.
    pub max_nonturbo: u8,
    /// `cyc_thresh` of the event: at most 2^(`cyc_thresh` - 1) cycles pass before a packet has a CYC before it; 0 and 1:
    /// every packet has one.
    pub cyc_thresh: u8,
}

/// The estimate along one stream of packets. It never runs backwards between two calls of [`Clock::psb`].
#[derive(Clone, Debug)]
pub struct Clock {
    config: TimeConfig,
    now: u64,
    /// The estimate as it stands, with its fraction: `now` without the promise not to run backwards.
    ticks: u64,
    fraction: u32,
    /// `ticks` do not go beyond: cycles may be mistaken, but after a sure point the next MTC is never far.
    limit: u64,
    /// The last TSC packet; `None` before the first.
    tsc: Option<u64>,
    edge: Option<Edge>,
    /// A TSC packet came after the last MTC or TMA: the edge lies behind, and an MTC may still come late.
    tsc_after_edge: bool,
    cycles: Cycles,
}

/// The last multiple of the MTC period on the crystal clock.
#[derive(Clone, Copy, Debug)]
struct Edge {
    tsc: u64,
    /// Of the division by the ratio's denominator.
    rest: u64,
    /// The payload of an MTC packet at this edge, of which `bits` low bits are known.
    payload: u8,
    bits: u32,
    /// No TMA has told where the edges are.
    guessed: bool,
}

/// What is known of core cycles.
#[derive(Clone, Copy, Debug, Default)]
struct Cycles {
    /// All since the start; wraps.
    count: u64,
    /// Cycles that may pass without a CYC packet.
    slack: u64,
    /// The last packet of time was a CYC: `count` is that of the next one, but for `slack`.
    fresh: bool,
    /// Ticks since the last CYC packet that other packets have told already.
    told: u64,
    /// (ticks, cycles) at a sure point, for the next measurement.
    since: Option<(u64, u64)>,
    cbr: u8,
    /// Ticks per cycle.
    measured: Option<u64>,
    by_cbr: Option<u64>,
}

impl Clock {
    /// `reference`: the time before the first TSC packet, of which that one takes its upper 8 bits.
    #[must_use]
    pub fn new(config: TimeConfig, reference: u64) -> Self {
        let tsc_ctc = config.tsc_ctc.filter(|&(n, d)| n != 0 && d != 0 && config.mtc_shift < 16);
        Self::start(TimeConfig { tsc_ctc, ..config }, reference)
    }

    fn start(config: TimeConfig, reference: u64) -> Self {
        Self {
            config,
            now: reference,
            ticks: reference,
            fraction: 0,
            limit: u64::MAX,
            tsc: None,
            edge: None,
            tsc_after_edge: false,
            cycles: Cycles {
                slack: 1u64.checked_shl(config.cyc_thresh.into()).unwrap_or(0) >> 1 & !1,
                ..Cycles::default()
            },
        }
    }

    /// Everything but the time so far is forgotten, and the time is only the reference for what comes.
    pub fn psb(&mut self) {
        *self = Self::start(self.config, self.now);
    }

    /// The estimate.
    #[must_use]
    pub fn now(&self) -> u64 {
        self.now
    }

    /// Whether a TSC packet has come.
    #[must_use]
    pub fn known(&self) -> bool {
        self.tsc.is_some()
    }

    /// The low 56 bits of the counter.
    pub fn tsc(&mut self, low: u64) {
        let tsc = nearest_tsc(self.now, low);
        if self.tsc.is_none() {
            // The reference is no time of this stream.
            (self.now, self.ticks) = (tsc, tsc);
        }
        self.tsc = Some(tsc);
        self.tsc_after_edge = true;
        // A new guess is better than one that may be some periods behind.
        self.edge = self.edge.filter(|edge| !edge.guessed);
        self.sure(tsc);
    }

    /// `ctc`: low 16 bits of the crystal clock at the last TSC packet; `fast`: ticks of the counter since it changed.
    pub fn tma(&mut self, ctc: u16, fast: u16) {
        let (Some(tsc), Some((n, d))) = (self.tsc, self.config.tsc_ctc) else { return };
        let shift = u32::from(self.config.mtc_shift);
        let beyond = u64::from(ctc) & ((1 << shift) - 1);
        let (product, d) = (beyond * u64::from(n), u64::from(d));
        let back = product.div_ceil(d);
        self.edge = Some(Edge {
            tsc: tsc.wrapping_sub(u64::from(fast)).wrapping_sub(back),
            rest: back * d - product,
            // Truncated as the MTC's field is.
            payload: (ctc >> shift) as u8,
            bits: MTC_BITS.min(TMA_BITS - shift),
            guessed: false,
        });
        self.tsc_after_edge = false;
        self.cycles.fresh = false;
        self.set_limit(tsc);
    }

    /// 8 bits of the crystal clock, from bit `mtc_shift` on.
    pub fn mtc(&mut self, payload: u8) {
        let (Some(tsc), Some(ratio)) = (self.tsc, self.config.tsc_ctc) else {
            self.cycles.fresh = false;
            return;
        };
        let Some(mut edge) = self.edge else {
            // The TMA is missing: the edge is here, or less than a period ahead.
            let edge = Edge { tsc: self.ticks, rest: 0, payload, bits: MTC_BITS, guessed: true };
            self.edge = Some(edge);
            self.tsc_after_edge = false;
            // How many cycles it took to get here is not known well enough to measure with.
            self.cycles.since = None;
            self.cycles.fresh = false;
            return self.set_limit(edge.tsc);
        };
        if self.tsc_after_edge {
            edge.pass(tsc, ratio, self.config.mtc_shift);
        }
        let steps = payload.wrapping_sub(edge.payload) & ((1u16 << edge.bits) - 1) as u8;
        // Few steps back are an MTC that comes after the TSC that was taken behind its edge.
        let late = self.tsc_after_edge && edge.bits == MTC_BITS && steps > u8::MAX - LATE_MTCS;
        if !late {
            edge.step(steps.into(), ratio, self.config.mtc_shift);
            (edge.payload, edge.bits) = (payload, MTC_BITS);
        }
        self.edge = Some(edge);
        self.tsc_after_edge = late;
        // The same edge again, or one before the last TSC packet, says nothing new.
        if steps != 0 && !late && edge.tsc.wrapping_sub(tsc) as i64 > 0 {
            self.sure(edge.tsc);
        } else {
            self.cycles.fresh = false;
        }
    }

    /// Core cycles since the last CYC packet.
    pub fn cyc(&mut self, cycles: u64) {
        self.cycles.count = self.cycles.count.wrapping_add(cycles);
        self.cycles.fresh = true;
        let told = std::mem::take(&mut self.cycles.told);
        let (Some(_), Some(ratio)) = (self.tsc, self.cycles.ratio()) else { return };
        let ticks = u128::from(cycles) * u128::from(ratio);
        let Some(more) = ticks.checked_sub(u128::from(told) << POINT) else { return };
        let more = more + u128::from(self.fraction);
        // Truncating casts: the fraction's bits, and at most 2^64 after `min`.
        self.fraction = more as u32;
        let whole = (more >> POINT).min(u128::from(u64::MAX)) as u64;
        self.ticks = self.ticks.saturating_add(whole).min(self.limit.max(self.ticks));
        self.now = self.now.max(self.ticks);
    }

    /// The core's ratio from here on.
    pub fn cbr(&mut self, ratio: u8) {
        if ratio != self.cycles.cbr {
            let by_cbr = (u64::from(self.config.max_nonturbo) << POINT).checked_div(ratio.into());
            let by_cbr = by_cbr.filter(|&by_cbr| by_cbr != 0);
            self.cycles.cbr = ratio;
            // What was measured is of the old ratio, but better than nothing.
            self.cycles.measured = self.cycles.measured.filter(|_| by_cbr.is_none());
            self.cycles.by_cbr = by_cbr;
            self.cycles.since = None;
        }
        self.cycles.fresh = false;
    }

    /// Packets are missing here, of time as well.
    pub fn ovf(&mut self) {
        self.limit = u64::MAX;
        self.cycles.told = 0;
        self.cycles.since = None;
        self.cycles.fresh = false;
    }

    /// The counter is at `tsc`, exactly.
    fn sure(&mut self, tsc: u64) {
        let cycles = &mut self.cycles;
        if cycles.fresh {
            cycles.measure(tsc, self.config.max_nonturbo);
        }
        cycles.told = match cycles.fresh && cycles.slack == 0 {
            true => 0,
            false => cycles.told.saturating_add(tsc.saturating_sub(self.ticks)),
        };
        cycles.fresh = false;
        (self.ticks, self.fraction) = (tsc, 0);
        self.now = self.now.max(tsc);
        self.set_limit(tsc);
    }

    /// Two periods, so that one MTC may be lost. Without a TMA there may be no MTCs at all.
    fn set_limit(&mut self, tsc: u64) {
        let period = self.config.tsc_ctc.filter(|_| self.edge.is_some());
        self.limit = period.map_or(u64::MAX, |(n, d)| {
            let period = (u64::from(n) << self.config.mtc_shift).div_ceil(u64::from(d).max(1));
            tsc.saturating_add(period.saturating_mul(2))
        });
    }
}

impl Edge {
    /// Goes `steps` MTC periods on.
    fn step(&mut self, steps: u64, (n, d): (u32, u32), shift: u8) {
        let (n, d) = (u128::from(n) << shift, u128::from(d).max(1));
        let product = u128::from(steps) * n + u128::from(self.rest);
        // Truncating casts: modulo 2^64 as the counter is, and a rest below 2^32.
        self.tsc = self.tsc.wrapping_add((product / d) as u64);
        self.rest = (product % d) as u64;
        self.payload = self.payload.wrapping_add(steps as u8);
    }

    /// Goes on to the last edge that is not after `tsc`.
    fn pass(&mut self, tsc: u64, (n, d): (u32, u32), shift: u8) {
        let (period, d) = ((u128::from(n) << shift).max(1), u128::from(d));
        let behind = u128::from(tsc.saturating_sub(self.tsc)) * d;
        let steps = behind.saturating_sub(u128::from(self.rest)) / period;
        self.step(steps as u64, (n, d as u32), shift);
    }
}

impl Cycles {
    /// Ticks per cycle.
    fn ratio(&self) -> Option<u64> {
        self.measured.or(self.by_cbr)
    }

    /// Both clocks are known here: what has the ratio been since the last such point?
    fn measure(&mut self, tsc: u64, max_nonturbo: u8) {
        let Some((since_tsc, since_count)) = self.since else {
            self.since = Some((tsc, self.count));
            return;
        };
        let ticks = tsc.saturating_sub(since_tsc);
        let cycles = self.count.wrapping_sub(since_count);
        if ticks < MEASURED_TICKS || cycles < self.slack << 6 {
            return;
        }
        self.since = Some((tsc, self.count));
        let ratio = (u128::from(ticks) << POINT).checked_div(cycles.into()).and_then(|ratio| u64::try_from(ratio).ok());
        // CBR is rounded to a whole number; more apart from it, the core has slept in between.
        let bound = |cbr: u8| (u64::from(max_nonturbo) << POINT).checked_div(cbr.into()).unwrap_or(u64::MAX);
        let fits = |&ratio: &u64| {
            self.by_cbr.is_none()
                || (bound(self.cbr.saturating_add(1))..=bound(self.cbr.saturating_sub(1))).contains(&ratio)
        };
        self.measured = ratio.filter(fits).or(self.measured);
    }
}

/// The value with these low 56 bits that is nearest to `reference`.
#[must_use]
pub fn nearest_tsc(reference: u64, low: u64) -> u64 {
    let unused = 64 - TSC_BITS;
    let step = ((low.wrapping_sub(reference) << unused) as i64) >> unused;
    match reference.checked_add_signed(step) {
        Some(tsc) => tsc,
        None => low,
    }
}
