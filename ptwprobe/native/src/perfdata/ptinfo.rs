//! How Intel PT was set up for a recording: AUXTRACE_INFO and the `config` of its event.

use super::attrs::{Attr, Attrs};
use super::bytes::Cursor;
use super::layout::{attr_flag, pt_config};
use crate::clock::TimeConv;
use crate::pt::TimeConfig;

/// Longest filter kept, in bytes. The kernel takes a page.
const MAX_FILTER: usize = 1 << 14;

/// How a recording tells which thread ran on a CPU (`have_sched_switch`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SwitchSource {
    #[default]
    None,
    /// Samples of the tracepoint `sched:sched_switch`.
    Tracepoint,
    /// SWITCH records of the recorded threads only.
    Switch,
    /// SWITCH_CPU_WIDE records of all threads.
    SwitchCpuWide,
}

/// What an AUXTRACE_INFO of Intel PT says. Older recordings end after any field from `snapshot` on; what they do not
/// tell is 0 or `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PtInfo {
    /// `kind` of the event that is Intel PT.
    pub pmu_type: u32,
    /// `None` where the recording machine could not tell.
    pub conv: Option<TimeConv>,
    /// Bits of `config`.
    pub tsc_bit: u64,
    pub noretcomp_bit: u64,
    pub mtc_bit: u64,
    pub mtc_freq_bits: u64,
    pub cyc_bit: u64,
    pub switches: SwitchSource,
    /// Buffers are pictures of the last trace, which may overlap.
    pub snapshot: bool,
    /// Streams are those of CPUs; else of threads.
    pub per_cpu: bool,
    /// TSC ticks per tick of the core crystal clock, `n / d` (CPUID 0x15).
    pub tsc_ctc: Option<(u32, u32)>,
    /// Highest non-turbo ratio of core to bus clock; 0 where unknown.
    pub max_nonturbo: u8,
    /// The address filter as it was given to the kernel, cut to 16 KiB.
    pub filter: Option<Box<[u8]>>,
    /// The CPU could trace events (CFE, EVD).
    pub event_trace: bool,
}

impl PtInfo {
    /// The payload behind `type` and its padding.
    pub(super) fn parse(mut fields: Cursor<'_>) -> Option<Self> {
        let mut info = Self { pmu_type: fields.u64()? as u32, ..Self::default() };
        let conv = time_conv(&mut fields);
        info.conv = conv.filter(|_| fields.u64() != Some(0));
        info.tsc_bit = fields.u64()?;
        info.noretcomp_bit = fields.u64()?;
        info.switches = match fields.u64()? {
            0 => SwitchSource::None,
            1 => SwitchSource::Tracepoint,
            2 => SwitchSource::Switch,
            _ => SwitchSource::SwitchCpuWide,
        };
        // Every further field came with some version of perf.
        let _ = info.parse_newer(&mut fields);
        Some(info)
    }

    fn parse_newer(&mut self, fields: &mut Cursor<'_>) -> Option<()> {
        self.snapshot = fields.u64()? != 0;
        self.per_cpu = fields.u64()? != 0;
        self.mtc_bit = fields.u64()?;
        self.mtc_freq_bits = fields.u64()?;
        let (n, d) = (fields.u64()?, fields.u64()?);
        self.tsc_ctc = u32::try_from(n).ok().zip(u32::try_from(d).ok()).filter(|&(n, d)| n != 0 && d != 0);
        self.cyc_bit = fields.u64()?;
        self.max_nonturbo = u8::try_from(fields.u64()?).unwrap_or(0);
        let filter_len = usize::try_from(fields.u64()?).ok()?;
        if filter_len != 0 {
            let padded = filter_len.checked_next_multiple_of(8)?;
            let text = Cursor::new(fields.take(padded)?).text();
            self.filter = Some(text.get(..MAX_FILTER).unwrap_or(text).into());
        }
        self.event_trace = fields.u64()? != 0;
        Some(())
    }

    /// The event that is Intel PT.
    #[must_use]
    pub fn event<'a>(&self, attrs: &'a Attrs) -> Option<&'a Attr> {
        attrs.list().iter().find(|attr| attr.kind == self.pmu_type)
    }

    /// What its `config` turned on.
    #[must_use]
    pub fn config(&self, attrs: &Attrs) -> Option<PtConfig> {
        self.event(attrs).map(|attr| PtConfig::new(self, attr))
    }
}

/// What of Intel PT was turned on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PtConfig {
    /// TNT, TIP and FUP packets: control flow.
    pub branch: bool,
    pub tsc: bool,
    pub mtc: bool,
    /// An MTC holds bits of the crystal clock from this one up (`MTCFreq`).
    pub mtc_shift: u8,
    pub cyc: bool,
    /// At most 2^(`cyc_thresh` - 1) cycles pass before a packet has a CYC before it; 0 and 1: every packet has one.
    pub cyc_thresh: u8,
    /// No RET is compressed.
    pub noretcomp: bool,
    pub ptw: bool,
    /// A FUP with the address follows a PTW.
    pub fup_on_ptw: bool,
    pub pwr_evt: bool,
    /// CFE and EVD packets.
    pub event: bool,
    /// Conditional branches are not told: flow cannot be followed through them.
    pub notnt: bool,
    pub exclude_kernel: bool,
    pub exclude_user: bool,
}

impl PtConfig {
    /// How to tell the time by the packets that there are.
    #[must_use]
    pub fn time(pt: Option<Self>, info: Option<&PtInfo>) -> TimeConfig {
        TimeConfig {
            tsc_ctc: info.and_then(|info| info.tsc_ctc),
            mtc_shift: pt.map_or(0, |pt| pt.mtc_shift),
            max_nonturbo: info.map_or(0, |info| info.max_nonturbo),
            cyc_thresh: pt.map_or(0, |pt| pt.cyc_thresh),
        }
    }

    /// The bits that `info` names are where it says; the others where every Intel PT has them.
    fn new(info: &PtInfo, attr: &Attr) -> Self {
        let has = |bits: u64| attr.config & bits != 0;
        let named = |told: u64, usual: u64| has(if told == 0 { usual } else { told });
        let freq_bits = if info.mtc_freq_bits == 0 { pt_config::MTC_PERIOD } else { info.mtc_freq_bits };
        let mtc_shift = (attr.config & freq_bits).checked_shr(freq_bits.trailing_zeros()).unwrap_or(0);
        Self {
            // Before the bit `pt` there was none to turn branches off.
            branch: !has(pt_config::PT) || has(pt_config::BRANCH),
            tsc: named(info.tsc_bit, pt_config::TSC),
            mtc: named(info.mtc_bit, pt_config::MTC),
            mtc_shift: u8::try_from(mtc_shift).unwrap_or(0),
            cyc: named(info.cyc_bit, pt_config::CYC),
            cyc_thresh: (attr.config >> pt_config::CYC_THRESH_SHIFT & 0xf) as u8,
            noretcomp: named(info.noretcomp_bit, pt_config::NORETCOMP),
            ptw: has(pt_config::PTW),
            fup_on_ptw: has(pt_config::FUP_ON_PTW),
            pwr_evt: has(pt_config::PWR_EVT),
            event: has(pt_config::EVENT),
            notnt: has(pt_config::NOTNT),
            exclude_kernel: attr.has_flag(attr_flag::EXCLUDE_KERNEL),
            exclude_user: attr.has_flag(attr_flag::EXCLUDE_USER),
        }
    }
}

/// Factors that give every counter value the same time are none.
pub(super) fn time_conv(fields: &mut Cursor<'_>) -> Option<TimeConv> {
    let (shift, mult, zero) = (fields.u64()?, fields.u64()?, fields.u64()?);
    let shift = u16::try_from(shift).ok().filter(|&s| s < 64)?;
    let mult = u32::try_from(mult).ok().filter(|&m| m != 0)?;
    Some(TimeConv { shift, mult, zero })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const WORDS: [u64; 17] = [9, 10, 512, 7, 1, 1 << 10, 1 << 11, 3, 1, 1, 1 << 9, 0xf << 14, 168, 2, 2, 24, 0];

    fn bytes(words: &[u64]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    fn parse(bytes: &[u8]) -> Option<PtInfo> {
        PtInfo::parse(Cursor::new(bytes))
    }

    #[test]
    fn every_field_is_read() {
        let mut words = WORDS.to_vec();
        words[16] = 9;
        let text = b"filter \x41\x42\0\0\0\0\0\0\0";
        let info = parse(&[&bytes(&words)[..], text, &1u64.to_le_bytes()].concat()).expect("an info");
        assert_eq!(info.conv, Some(TimeConv { shift: 10, mult: 512, zero: 7 }));
        assert_eq!((info.pmu_type, info.tsc_ctc, info.max_nonturbo), (9, Some((168, 2)), 24));
        assert_eq!((info.switches, info.snapshot, info.per_cpu), (SwitchSource::SwitchCpuWide, true, true));
        assert_eq!((info.filter.as_deref(), info.event_trace), (Some(&b"filter AB"[..]), true));
    }

    #[test]
    fn an_older_recording_tells_less() {
        let info = parse(&bytes(&WORDS[..10])).expect("an info");
        assert_eq!((info.per_cpu, info.mtc_bit, info.tsc_ctc, info.max_nonturbo), (true, 0, None, 0));
        assert!(parse(&bytes(&WORDS[..5])).is_none());
        let mut words = WORDS;
        words[4] = 0;
        assert_eq!(parse(&bytes(&words)).and_then(|info| info.conv), None);
    }

    #[test]
    fn the_config_is_that_of_the_event() {
        let info = parse(&bytes(&WORDS)).expect("an info");
        let config = |config| PtConfig::new(&info, &Attr { kind: 9, config, flags: 1 << 5, ..Attr::default() });
        let got = config(1 | 1 << 5 | 1 << 9 | 1 << 12 | 1 << 13 | 3 << 14);
        assert_eq!((got.branch, got.ptw, got.fup_on_ptw, got.mtc, got.mtc_shift), (true, true, true, true, 3));
        assert_eq!((got.tsc, got.cyc, got.noretcomp, got.exclude_kernel), (false, false, false, true));
        // perf names the bit of CYC as bit 1.
        assert_eq!((config(1).cyc_thresh, config(1 | 5 << 19).cyc_thresh), (0, 5));
        assert_eq!((config(1).branch, config(0).branch, config(2).cyc), (false, true, true));
    }

    proptest! {
        #[test]
        fn no_words_panic(words in prop::collection::vec(prop_oneof![any::<u64>(), 0u64..64], 0..24), config: u64) {
            if let Some(info) = parse(&bytes(&words)) {
                let _ = PtConfig::new(&info, &Attr { config, ..Attr::default() });
            }
        }
    }
}
