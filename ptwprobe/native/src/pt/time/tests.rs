use proptest::prelude::*;

use super::*;

/// 96 ticks of the counter per tick of the crystal clock (2.304 GHz over 24 MHz), an MTC every 8.
const CONFIG: TimeConfig = TimeConfig { tsc_ctc: Some((192, 2)), mtc_shift: 3, max_nonturbo: 23, cyc_thresh: 0 };
const PERIOD: u64 = 96 << 3;

#[test]
fn a_short_tsc_is_completed_across_a_wrap() {
    let wrap = 1u64 << TSC_BITS;
    assert_eq!(nearest_tsc(wrap - 5, 3), wrap + 3);
    assert_eq!(nearest_tsc(wrap + 5, wrap - 3), wrap - 3);
    assert_eq!(nearest_tsc(5 * wrap + 100, 90), 5 * wrap + 90);
    assert_eq!(nearest_tsc(0, 7), 7);
    assert_eq!(nearest_tsc(0, wrap - 1), wrap - 1);
}

/// A clock at TSC 1,000,000, where the crystal clock reads `ctc` and changed `fast` ticks before.
fn tied(config: TimeConfig, ctc: u16, fast: u16) -> Clock {
    let mut clock = Clock::new(config, 0);
    clock.tsc(1_000_000);
    clock.tma(ctc, fast);
    clock
}

#[test]
fn an_mtc_is_the_time_of_its_edge() {
    let mut clock = tied(CONFIG, 0x1235, 10);
    // The next multiple of 8 is 0x1238.
    clock.mtc((0x1238 >> 3) as u8);
    assert_eq!(clock.now(), 1_000_000 - 10 + 3 * 96);
    clock.mtc((0x1240 >> 3) as u8);
    assert_eq!(clock.now(), 1_000_000 - 10 + 3 * 96 + PERIOD);
}

#[test]
fn mtcs_wrap_and_one_may_be_lost() {
    let mut clock = tied(CONFIG, 0x7f8, 0);
    clock.mtc(0);
    assert_eq!(clock.now(), 1_000_000 + PERIOD);
    clock.mtc(2);
    assert_eq!(clock.now(), 1_000_000 + 3 * PERIOD);
}

#[test]
fn the_mtc_at_the_edge_that_the_tma_tells_says_nothing_new() {
    let mut clock = tied(CONFIG, 0x1238, 5);
    clock.mtc((0x1238 >> 3) as u8);
    assert_eq!(clock.now(), 1_000_000);
    clock.mtc((0x1240 >> 3) as u8);
    assert_eq!(clock.now(), 1_000_000 - 5 + PERIOD);
}

#[test]
fn an_mtc_that_comes_after_the_tsc_behind_its_edge_is_late() {
    let mut clock = tied(CONFIG, 0, 0);
    clock.mtc(1);
    // Edge 2 has passed when the TSC is taken, but its packet comes after.
    clock.tsc(1_000_000 + 2 * PERIOD + 7);
    clock.mtc(2);
    assert_eq!(clock.now(), 1_000_000 + 2 * PERIOD + 7);
    clock.mtc(3);
    assert_eq!(clock.now(), 1_000_000 + 3 * PERIOD);
    // So far behind that the edge before the last comes, too.
    clock.tsc(1_000_000 + 5 * PERIOD + 1);
    clock.mtc(4);
    clock.mtc(5);
    assert_eq!(clock.now(), 1_000_000 + 5 * PERIOD + 1);
    clock.mtc(6);
    assert_eq!(clock.now(), 1_000_000 + 6 * PERIOD);
}

#[test]
fn after_a_tsc_without_tma_the_edges_go_on() {
    let mut clock = tied(CONFIG, 0, 0);
    // Longer than an MTC can count.
    clock.tsc(1_000_000 + 1000 * PERIOD + 100);
    clock.mtc((1001 % 256) as u8);
    assert_eq!(clock.now(), 1_000_000 + 1001 * PERIOD);
}

#[test]
fn without_any_tma_the_first_mtc_is_taken_for_an_edge() {
    let mut clock = Clock::new(CONFIG, 0);
    clock.tsc(1_000_000);
    clock.mtc(200);
    assert_eq!(clock.now(), 1_000_000);
    clock.mtc(201);
    assert_eq!(clock.now(), 1_000_000 + PERIOD);
}

#[test]
fn bits_of_an_mtc_that_a_tma_lacks_come_from_the_first_mtc() {
    let config = TimeConfig { mtc_shift: 9, ..CONFIG };
    let mut clock = tied(config, 3 << 9, 0);
    // Bit 16 of the crystal clock is 1: the TMA could not say so.
    clock.mtc(0x84);
    assert_eq!(clock.now(), 1_000_000 + (96 << 9));
    clock.mtc(0x85);
    assert_eq!(clock.now(), 1_000_000 + (192 << 9));
}

#[test]
fn cycles_count_by_the_ratio_of_the_core() {
    let mut clock = tied(CONFIG, 0, 0);
    clock.cyc(100);
    assert_eq!(clock.now(), 1_000_000, "the ratio is not known");
    clock.cbr(46);
    clock.cyc(101);
    clock.cyc(1);
    assert_eq!(clock.now(), 1_000_051);
    clock.cbr(23);
    clock.cyc(10);
    assert_eq!(clock.now(), 1_000_061);
}

#[test]
fn without_max_nonturbo_the_ratio_is_measured_between_edges() {
    let mut clock = tied(TimeConfig { max_nonturbo: 0, ..CONFIG }, 0, 0);
    for edge in 1..=8 {
        clock.cyc(2 * PERIOD);
        clock.mtc(edge);
    }
    let now = clock.now();
    clock.cyc(200);
    assert_eq!(clock.now(), now + 100);
}

#[test]
fn what_other_packets_have_told_of_a_cycle_count_counts_once() {
    let mut clock = tied(TimeConfig { cyc_thresh: 8, ..CONFIG }, 0, 0);
    clock.cbr(23);
    clock.cyc(PERIOD - 100);
    // No CYC before the MTC: 100 cycles of the next are before it.
    clock.mtc(1);
    clock.cyc(150);
    assert_eq!(clock.now(), 1_000_000 + PERIOD + 50);
}

#[test]
fn a_wrong_ratio_does_not_lead_far_astray() {
    let mut clock = tied(TimeConfig { max_nonturbo: 255, ..CONFIG }, 0, 0);
    clock.cbr(1);
    clock.cyc(1 << 40);
    assert_eq!(clock.now(), 1_000_000 + 2 * PERIOD);
}

#[test]
fn a_new_piece_starts_anew_with_the_time_as_reference() {
    let wrap = 1u64 << TSC_BITS;
    let mut clock = Clock::new(CONFIG, 3 * wrap + 5);
    assert!(!clock.known());
    clock.tsc(70);
    assert_eq!(clock.now(), 3 * wrap + 70);
    clock.psb();
    assert!(!clock.known());
    clock.mtc(3);
    clock.tsc(60);
    assert_eq!(clock.now(), 3 * wrap + 60);
}

#[test]
fn edges_that_were_guessed_are_guessed_anew_after_a_tsc() {
    let mut clock = Clock::new(CONFIG, 0);
    clock.tsc(1_000_000);
    // Three periods late: the guess is that much behind, and the TSC seems to be behind edges that are still to come.
    clock.mtc(3);
    clock.tsc(1_000_000 + 4 * PERIOD + 10);
    clock.mtc(5);
    assert_eq!(clock.now(), 1_000_000 + 4 * PERIOD + 10);
    clock.mtc(6);
    assert_eq!(clock.now(), 1_000_000 + 5 * PERIOD + 10);
}

/// What happens next in a simulated CPU.
#[derive(Clone, Copy, Debug)]
enum Event {
    /// Runs so many ticks up to a packet that is no packet of time.
    Run(u64),
    /// Sleeps: the counter goes on, cycles do not.
    Sleep(u64),
    Ratio(u8),
    Tsc,
    LoseMtc,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        20 => (1u64..2000).prop_map(Event::Run),
        1 => (1u64..400_000).prop_map(Event::Sleep),
        2 => (8u8..40).prop_map(Event::Ratio),
        1 => Just(Event::Tsc),
        1 => Just(Event::LoseMtc),
    ]
}

/// A CPU that writes packets of time into a [`Clock`].
struct Cpu {
    config: TimeConfig,
    clock: Clock,
    cyc: bool,
    tma: bool,
    tsc: u64,
    /// Cycles times `max_nonturbo`, and how many of them CYC packets have told.
    cycles: u64,
    told: u64,
    ratio: u8,
    phase: u64,
    lose: bool,
    /// MTCs lost since the last that came; all, where no TMA says which they were.
    lost: u64,
}

impl Cpu {
    fn ctc(&self) -> u64 {
        let (n, d) = self.config.tsc_ctc.expect("a ratio");
        (self.tsc + self.phase) * u64::from(d) / u64::from(n)
    }

    fn period(&self) -> u64 {
        let (n, d) = self.config.tsc_ctc.expect("a ratio");
        (u64::from(n) << self.config.mtc_shift).div_ceil(u64::from(d))
    }

    fn write_cyc(&mut self) {
        let unit = u64::from(self.config.max_nonturbo);
        let cycles = (self.cycles - self.told) / unit;
        let threshold = 1 << self.config.cyc_thresh >> 1;
        if self.cyc && cycles > 0 && cycles >= threshold {
            self.clock.cyc(cycles);
            self.told += cycles * unit;
        }
    }

    fn write_tsc(&mut self) {
        self.write_cyc();
        self.clock.tsc(self.tsc & ((1 << TSC_BITS) - 1));
        if self.tma {
            let (n, d) = self.config.tsc_ctc.expect("a ratio");
            let edge = (self.ctc() * u64::from(n)).div_ceil(u64::from(d));
            self.clock.tma(self.ctc() as u16, (self.tsc + self.phase - edge) as u16);
        }
    }

    fn run(&mut self, ticks: u64, asleep: bool) {
        for _ in 0..ticks {
            let before = self.ctc();
            self.tsc += 1;
            self.cycles += if asleep { 0 } else { u64::from(self.ratio) };
            let (shift, after) = (self.config.mtc_shift, self.ctc());
            if before >> shift == after >> shift || asleep {
                continue;
            }
            if std::mem::take(&mut self.lose) {
                self.lost += 1;
                continue;
            }
            if self.tma {
                self.lost = 0;
            }
            self.write_cyc();
            self.clock.mtc((after >> shift) as u8);
        }
        if asleep {
            self.write_tsc();
        }
    }
}

proptest! {
    #[test]
    fn estimates_stay_close_to_a_simulated_cpu(
        events in proptest::collection::vec(event(), 1..60), cyc: bool, tma: bool, shift in 0u8..8,
        (n, d) in prop_oneof![Just((192u32, 2u32)), Just((167, 2)), Just((250, 3))],
        cyc_thresh in 0u8..7, start in 1u64 << 20..1 << 57, phase in 0u64..1 << 24) {
        let config = TimeConfig { tsc_ctc: Some((n, d)), mtc_shift: shift, max_nonturbo: 23, cyc_thresh };
        let mut cpu = Cpu {
            config, cyc, tma, phase, clock: Clock::new(config, start), tsc: start + 1000, cycles: 0, told: 0, ratio: 23,
            lose: false,
            lost: 0,
        };
        cpu.write_tsc();
        cpu.clock.cbr(cpu.ratio);
        let mut last = 0;
        for event in events {
            match event {
                Event::Run(ticks) => cpu.run(ticks, false),
                Event::Sleep(ticks) => cpu.run(ticks, true),
                Event::Ratio(ratio) => {
                    cpu.write_cyc();
                    cpu.ratio = ratio;
                    cpu.clock.cbr(ratio);
                }
                Event::Tsc => cpu.write_tsc(),
                Event::LoseMtc => cpu.lose = true,
            }
            cpu.write_cyc();
            let now = cpu.clock.now();
            prop_assert!(now >= last, "backwards");
            last = now;
            // A lost MTC costs one period, a missing TMA another.
            let periods = 1 + cpu.lost + u64::from(!tma);
            // Without MTCs, cycles are as exact as the threshold and one cycle of each packet.
            let coarse = periods * cpu.period() + 2;
            prop_assert!(now <= cpu.tsc + coarse && cpu.tsc <= now + coarse, "{} {now} {event:?}", cpu.tsc);
        }
    }

    #[test]
    fn with_cycles_estimates_are_far_better_than_an_mtc_period(
        runs in proptest::collection::vec((1u64..3000, 15u8..40, 0u8..8), 1..40), lost in 0usize..40) {
        let config = TimeConfig { mtc_shift: 6, ..CONFIG };
        let mut cpu = Cpu {
            config, cyc: true, tma: true, phase: 77, clock: Clock::new(config, 0), tsc: 1 << 30, cycles: 0, told: 0,
            ratio: 23, lose: false,
            lost: 0,
        };
        cpu.write_tsc();
        cpu.clock.cbr(23);
        for (index, (ticks, ratio, change)) in runs.into_iter().enumerate() {
            if change == 0 {
                cpu.write_cyc();
                cpu.ratio = ratio;
                cpu.clock.cbr(ratio);
            }
            cpu.lose |= index == lost;
            cpu.run(ticks, false);
            cpu.write_cyc();
            let error = cpu.clock.now().abs_diff(cpu.tsc);
            // A 50th of a period.
            prop_assert!(error <= cpu.period() / 50, "{error}");
        }
    }

    #[test]
    fn no_packets_panic_or_go_backwards(
        calls in proptest::collection::vec((0u8..8, any::<u64>()), 0..100), n: u32, d: u32, mtc_shift: u8,
        max_nonturbo: u8, cyc_thresh: u8, reference: u64) {
        let config = TimeConfig { tsc_ctc: Some((n, d)), mtc_shift, max_nonturbo, cyc_thresh };
        let mut clock = Clock::new(config, reference);
        let mut last = None;
        for (call, value) in calls {
            match call {
                0 => clock.tsc(value & ((1 << TSC_BITS) - 1)),
                1 => clock.tma(value as u16, (value >> 16) as u16 & 0x1ff),
                2 | 3 => clock.mtc(value as u8),
                4 => clock.cyc(value),
                5 => clock.cyc(value & 0xffff),
                6 => clock.cbr(value as u8),
                _ => clock.ovf(),
            }
            let now = clock.known().then(|| clock.now());
            prop_assert!(now >= last);
            last = now;
        }
    }
}
