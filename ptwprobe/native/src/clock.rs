//! TSC to CLOCK_MONOTONIC: the conversion as perf stores and computes it, and how its factors are measured.

use std::thread;
use std::time::Duration;

/// How long the first calibration takes. Two readings of some 50 ns uncertainty then give the rate to a few ppm.
const FIRST_SPAN: Duration = Duration::from_millis(20);

/// Pairs of readings of which the tightest counts: an interrupt between two readings spoils one pair, not all.
const TRIES: usize = 32;

/// perf's fields are 16 and 32 bits wide, and its users shift a 32-bit value: not more than 31.
const MAX_SHIFT: u16 = 31;

/// `ns = zero + (tsc >> shift) * mult + ((tsc & mask) * mult >> shift)`, all modulo 2^64 (`time_shift`, `time_mult`,
/// `time_zero` of `linux/perf_event.h`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimeConv {
    pub shift: u16,
    pub mult: u32,
    pub zero: u64,
}

impl TimeConv {
    /// Time in ns at `tsc`.
    #[must_use]
    pub fn tsc_to_ns(&self, tsc: u64) -> u64 {
        let shift = u32::from(self.shift.min(63));
        let mult = u64::from(self.mult);
        let low = tsc & ((1 << shift) - 1);
        self.zero.wrapping_add((tsc >> shift).wrapping_mul(mult)).wrapping_add(low.wrapping_mul(mult) >> shift)
    }

    /// TSC value at `ns`; 0 where the conversion has no rate.
    #[must_use]
    pub fn ns_to_tsc(&self, ns: u64) -> u64 {
        let shift = u32::from(self.shift.min(63));
        let mult = u64::from(self.mult);
        let Some(quotient) = ns.wrapping_sub(self.zero).checked_div(mult) else {
            return 0;
        };
        let rest = u128::from(ns.wrapping_sub(self.zero) % mult);
        (quotient << shift).wrapping_add(((rest << shift) / u128::from(mult)) as u64)
    }

    /// The conversion of a counter of `ticks` per `ns`, that gives `anchor.ns` at `anchor.tsc`.
    fn from_rate(ticks: u64, ns: u64, anchor: Anchor) -> Option<Self> {
        let mut shift = MAX_SHIFT;
        loop {
            let mult = (u128::from(ns) << shift).checked_div(u128::from(ticks))?;
            if let Ok(mult) = u32::try_from(mult) {
                let conv = Self { shift, mult, zero: 0 };
                return (mult != 0).then(|| Self { zero: anchor.ns.wrapping_sub(conv.tsc_to_ns(anchor.tsc)), ..conv });
            }
            shift = shift.checked_sub(1)?;
        }
    }
}

/// One moment on both clocks; `ns` of CLOCK_MONOTONIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Anchor {
    pub tsc: u64,
    pub ns: u64,
}

impl Anchor {
    /// Now, from the tightest of several readings.
    #[must_use]
    pub fn now() -> Self {
        let mut best = (u64::MAX, Self { tsc: 0, ns: 0 });
        for _ in 0..TRIES {
            let before = rdtsc();
            let ns = monotonic_ns();
            let width = rdtsc().wrapping_sub(before);
            if width < best.0 {
                best = (width, Self { tsc: before.wrapping_add(width / 2), ns });
            }
        }
        best.1
    }
}

/// The measured relation of the two clocks, refined the longer it runs.
#[derive(Clone, Copy, Debug)]
pub struct Calibration {
    first: Anchor,
    conv: TimeConv,
    tsc_hz: u64,
}

impl Calibration {
    /// Takes 20 ms.
    #[must_use]
    pub fn start() -> Self {
        let first = Anchor::now();
        let mut calibration = Self { first, conv: TimeConv { shift: 0, mult: 1, zero: 0 }, tsc_hz: 0 };
        thread::sleep(FIRST_SPAN);
        calibration.refine();
        calibration
    }

    /// The factors over the whole time since the start. Sideband times taken with them and hits converted with the
    /// last ones agree to some 100 ns, whatever the length of the session.
    pub fn refine(&mut self) -> TimeConv {
        self.refine_to(Anchor::now())
    }

    fn refine_to(&mut self, now: Anchor) -> TimeConv {
        let (ticks, ns) = (now.tsc.wrapping_sub(self.first.tsc), now.ns.wrapping_sub(self.first.ns));
        if let Some(conv) = TimeConv::from_rate(ticks, ns, now) {
            self.conv = conv;
            self.tsc_hz = (u128::from(ticks) * 1_000_000_000 / u128::from(ns.max(1))) as u64;
        }
        self.conv
    }

    /// The last measured factors.
    #[must_use]
    pub fn conv(&self) -> TimeConv {
        self.conv
    }

    /// Rate of the counter in Hz.
    #[must_use]
    pub fn tsc_hz(&self) -> u64 {
        self.tsc_hz
    }
}

/// The time-stamp counter, read after everything before it has been executed.
#[must_use]
pub fn rdtsc() -> u64 {
    // SAFETY: both instructions exist on every x86-64 CPU and touch no memory.
    unsafe {
        core::arch::x86_64::_mm_lfence();
        core::arch::x86_64::_rdtsc()
    }
}

/// CLOCK_MONOTONIC in ns.
#[must_use]
pub fn monotonic_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is a valid timespec to write to; the clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_conversion_is_that_of_perf() {
        let conv = TimeConv { shift: 10, mult: 512, zero: 7 };
        assert_eq!(conv.tsc_to_ns(2000), 1007);
        assert_eq!(conv.ns_to_tsc(1007), 2000);
    }

    #[test]
    fn a_calibration_follows_the_clock() {
        let mut calibration = Calibration::start();
        let conv = calibration.refine();
        let now = Anchor::now();
        assert!(conv.tsc_to_ns(now.tsc).abs_diff(now.ns) < 100_000);
        assert!(calibration.tsc_hz() > 100_000_000);
    }

    #[test]
    fn a_clock_that_does_not_move_keeps_the_old_factors() {
        let anchor = Anchor { tsc: 5, ns: 5 };
        let conv = TimeConv { shift: 1, mult: 2, zero: 3 };
        let mut calibration = Calibration { first: anchor, conv, tsc_hz: 1 };
        assert_eq!(calibration.refine_to(anchor), conv);
    }

    proptest! {
        #[test]
        fn measured_factors_convert_to_within_a_nanosecond_and_back(
            hz in 400_000_000u64..6_000_000_000, start in 0u64..1 << 55, after in 0u64..1 << 36) {
            let anchor = Anchor { tsc: start, ns: 1 << 50 };
            let conv = TimeConv::from_rate(hz, 1_000_000_000, anchor).expect("a rate");
            let ns = (u128::from(after) * 1_000_000_000 / u128::from(hz)) as u64;
            let got = conv.tsc_to_ns(start + after) - anchor.ns;
            // The factor has at least 29 significant bits.
            prop_assert!(got.abs_diff(ns) <= 2 + (ns >> 28), "{got} {ns}");
            prop_assert!(conv.ns_to_tsc(conv.tsc_to_ns(start + after)).abs_diff(start + after) <= 16);
        }

        #[test]
        fn no_factors_panic(shift: u16, mult: u32, zero: u64, value: u64) {
            let conv = TimeConv { shift, mult, zero };
            let _ = (conv.tsc_to_ns(value), conv.ns_to_tsc(value));
        }
    }
}
