//! The fields of a SAMPLE, up to what of it is needed: who, when, where, and what it carries.

use super::attrs::Attr;
use super::bytes::Cursor;
use super::layout::{read_format, sample, BRANCH_COUNTERS, BRANCH_HW_INDEX};
use super::records::SampleId;

/// `cpu` of a sample that has none.
const NO_CPU: u32 = u32::MAX;

/// See the module.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sample<'a> {
    pub id: SampleId,
    /// What a tracepoint gathered.
    pub raw: Option<&'a [u8]>,
    /// Trace of an AUX area.
    pub aux: Option<&'a [u8]>,
}

/// `payload`: of the record, without its header. `None` where it ends too early.
pub(super) fn parse<'a>(payload: &'a [u8], attr: &Attr) -> Option<Sample<'a>> {
    let mut fields = Cursor::new(payload);
    let mut out = Sample::default();
    let has = |bit: u64| attr.samples(bit);
    for bit in [sample::IDENTIFIER, sample::IP] {
        skip(&mut fields, has(bit))?;
    }
    if has(sample::TID) {
        (out.id.pid, out.id.tid) = (Some(fields.u32()?), Some(fields.u32()?));
    }
    if has(sample::TIME) {
        out.id.ns = Some(fields.u64()?);
    }
    for bit in [sample::ADDR, sample::ID, sample::STREAM_ID] {
        skip(&mut fields, has(bit))?;
    }
    if has(sample::CPU) {
        let (cpu, _reserved) = (fields.u32()?, fields.u32()?);
        out.id.cpu = (cpu != NO_CPU).then_some(cpu);
    }
    if !has(sample::RAW) && !has(sample::AUX) {
        return Some(out);
    }
    skip(&mut fields, has(sample::PERIOD))?;
    if has(sample::READ) {
        skip_counts(&mut fields, attr.read_format)?;
    }
    if has(sample::CALLCHAIN) {
        let count = fields.u64()?;
        take_words(&mut fields, count)?;
    }
    if has(sample::RAW) {
        let len = fields.u32()? as usize;
        out.raw = Some(fields.take(len)?);
    }
    if has(sample::AUX) {
        out.aux = Some(find_aux(&mut fields, attr)?);
    }
    Some(out)
}

/// Steps over what lies between RAW and the trace.
fn find_aux<'a>(fields: &mut Cursor<'a>, attr: &Attr) -> Option<&'a [u8]> {
    let has = |bit: u64| attr.samples(bit);
    if has(sample::BRANCH_STACK) {
        let count = fields.u64()?;
        skip(fields, attr.branch_sample_type & BRANCH_HW_INDEX != 0)?;
        let words = if attr.branch_sample_type & BRANCH_COUNTERS != 0 { 4 } else { 3 };
        take_words(fields, count.checked_mul(words)?)?;
    }
    if has(sample::REGS_USER) {
        skip_registers(fields, attr.regs_user)?;
    }
    if has(sample::STACK_USER) {
        let len = usize::try_from(fields.u64()?).ok()?;
        fields.take(len)?;
        skip(fields, len != 0)?;
    }
    skip(fields, has(sample::WEIGHT) || has(sample::WEIGHT_STRUCT))?;
    for bit in [sample::DATA_SRC, sample::TRANSACTION] {
        skip(fields, has(bit))?;
    }
    if has(sample::REGS_INTR) {
        skip_registers(fields, attr.regs_intr)?;
    }
    for bit in [sample::PHYS_ADDR, sample::CGROUP, sample::DATA_PAGE_SIZE, sample::CODE_PAGE_SIZE] {
        skip(fields, has(bit))?;
    }
    let len = usize::try_from(fields.u64()?).ok()?;
    fields.take(len)
}

fn skip(fields: &mut Cursor<'_>, there: bool) -> Option<()> {
    if there {
        fields.u64()?;
    }
    Some(())
}

fn take_words(fields: &mut Cursor<'_>, count: u64) -> Option<()> {
    let len = usize::try_from(count.checked_mul(8)?).ok()?;
    fields.take(len).map(|_| ())
}

fn skip_registers(fields: &mut Cursor<'_>, mask: u64) -> Option<()> {
    let abi = fields.u64()?;
    take_words(fields, if abi == 0 { 0 } else { mask.count_ones().into() })
}

fn skip_counts(fields: &mut Cursor<'_>, format: u64) -> Option<()> {
    let words = |bits: &[u64]| bits.iter().filter(|&&bit| format & bit != 0).count() as u64;
    let times = words(&[read_format::TOTAL_TIME_ENABLED, read_format::TOTAL_TIME_RUNNING]);
    let each = 1 + words(&[read_format::ID, read_format::LOST]);
    let count = if format & read_format::GROUP == 0 { 1 } else { fields.u64()? };
    take_words(fields, count.checked_mul(each)?.checked_add(times)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ALL: u64 = (1 << 25) - 1;

    #[test]
    fn trace_is_found_behind_everything_else() {
        let attr = Attr {
            sample_type: ALL & !sample::WEIGHT_STRUCT,
            read_format: read_format::GROUP | read_format::ID | read_format::TOTAL_TIME_ENABLED,
            branch_sample_type: BRANCH_HW_INDEX,
            regs_user: 0b101,
            regs_intr: 0b1,
            ..Attr::default()
        };
        let mut bytes = Vec::new();
        let mut words = |words: &[u64]| bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        words(&[1, 0x401000, 7 << 32 | 6, 1000, 0, 1, 1, 3, 100]); // up to PERIOD
        words(&[2, 50, 1, 1, 2, 2]); // two counts
        words(&[1, 0x401000]); // one caller
        words(&[4 | 0xaabb_ccdd << 32]); // four raw bytes
        words(&[1, 0, 1, 2, 3]); // one branch
        words(&[2, 11, 12]); // two registers
        words(&[8, 77, 8]); // a stack of 8 bytes
        words(&[1, 2, 3, 0]); // weight, source, transaction; no registers
        words(&[1, 2, 3, 4]); // physical address, cgroup, page sizes
        words(&[8, 0x8202_8202_8202_8202]);
        let got = parse(&bytes, &attr).expect("a sample");
        assert_eq!(got.id, SampleId { pid: Some(6), tid: Some(7), ns: Some(1000), cpu: Some(3) });
        assert_eq!(got.raw, Some(&[0xdd, 0xcc, 0xbb, 0xaa][..]));
        assert_eq!(got.aux, Some(&[2, 0x82, 2, 0x82, 2, 0x82, 2, 0x82][..]));
        for len in 0..bytes.len() {
            assert!(parse(&bytes[..len], &attr).is_none());
        }
    }

    proptest! {
        #[test]
        fn no_bytes_panic(
            bytes in prop::collection::vec(prop_oneof![Just(0u8), any::<u8>()], 0..300),
            sample_type: u64, read_format in 0u64..32, branch_sample_type: u64, regs_user: u64, regs_intr: u64,
        ) {
            let attr = Attr { sample_type, read_format, branch_sample_type, regs_user, regs_intr, ..Attr::default() };
            let _ = parse(&bytes, &attr);
        }
    }
}
