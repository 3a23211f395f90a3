//! What the packets of a stream leave behind for those that come: the last address, and the time.

use crate::pt::{nearest_tsc, Clock, Decoder, Kind, LastIp, Scan, TimeConfig};

/// Times further apart are not of one recording: a TSC packet leaves the upper bits to the time before it.
const FAR_TICKS: u64 = 1 << 54;

/// See the module. The time is that of the flow, tick for tick.
#[derive(Debug, Default)]
pub struct Past {
    /// Its time counts where there is no clock.
    pub scan: Scan,
    /// Where more than TSC packets tell the time.
    clock: Option<Clock>,
    config: TimeConfig,
}

impl Past {
    /// `time`: where more than TSC packets tell the time.
    #[must_use]
    pub fn new(time: Option<TimeConfig>) -> Self {
        let clock = time.map(|time| Clock::new(time, 0));
        Self { scan: Scan::default(), clock, config: time.unwrap_or_default() }
    }

    #[must_use]
    pub fn now(&self) -> u64 {
        self.clock.as_ref().map_or(self.scan.tsc, Clock::now)
    }

    /// Passes over packets of flow and time.
    #[inline]
    pub fn pass(&mut self, decoder: &mut Decoder<'_>) {
        match &mut self.clock {
            None => decoder.pass(&mut self.scan),
            Some(clock) => decoder.pass_timed(&mut self.scan, clock),
        }
    }

    /// Takes a packet that tells the time and nothing else, or nothing at all; false: it is another.
    pub fn takes(&mut self, kind: Kind) -> bool {
        match (kind, &mut self.clock) {
            (Kind::Tsc(low), None) => self.scan.tsc = nearest_tsc(self.scan.tsc, low),
            (Kind::Tsc(low), Some(clock)) => clock.tsc(low),
            (Kind::Tma { ctc, fast }, Some(clock)) => clock.tma(ctc, fast),
            (Kind::Mtc(ctc), Some(clock)) => clock.mtc(ctc),
            (Kind::Cyc(cycles), Some(clock)) => clock.cyc(cycles),
            (Kind::Cbr(ratio), Some(clock)) => clock.cbr(ratio),
            (Kind::Tma { .. } | Kind::Mtc(_) | Kind::Cyc(_) | Kind::Cbr(_) | Kind::Pad | Kind::Mnt(_), _) => {}
            _ => return false,
        }
        true
    }

    pub fn psb(&mut self) {
        self.scan.last_ip = LastIp::default();
        if let Some(clock) = &mut self.clock {
            clock.psb();
        }
    }

    pub fn ovf(&mut self) {
        if let Some(clock) = &mut self.clock {
            clock.ovf();
        }
    }

    /// Whether `tsc` cannot be a time soon after the present one.
    #[must_use]
    pub fn is_far(&self, tsc: u64) -> bool {
        tsc.abs_diff(self.now()) > FAR_TICKS
    }

    /// The time is near `tsc`.
    pub fn set(&mut self, tsc: u64) {
        self.scan.tsc = tsc;
        self.clock = self.clock.as_ref().map(|_| Clock::new(self.config, tsc));
    }
}
