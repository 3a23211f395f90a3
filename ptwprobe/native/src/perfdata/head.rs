//! The head of a perf.data of ours: the file header and the attributes of its two events.

use super::layout::{attr_flag, pt_config, sample, ATTR_LEN, DUMMY_EVENT_ID, HEADER_LEN, MAGIC, PT_EVENT_ID};
use super::writer::WriterInfo;

/// Header, event ids and attributes; and where the data begin.
pub(super) fn file_head(who: WriterInfo) -> (Vec<u8>, u64) {
    let ids_at = HEADER_LEN;
    let attrs_at = ids_at + 16;
    let attr_entry = ATTR_LEN as u64 + 16;
    let data_at = attrs_at + 2 * attr_entry;
    let mut out = Vec::new();
    // Magic, own size; size of an attribute entry; sections of attributes, data, event types; feature mask.
    for word in [MAGIC, HEADER_LEN, attr_entry, attrs_at, 2 * attr_entry, data_at, 0, 0, 0, 0, 0, 0, 0] {
        out.extend_from_slice(&word.to_le_bytes());
    }
    for id in [PT_EVENT_ID, DUMMY_EVENT_ID] {
        out.extend_from_slice(&id.to_le_bytes());
    }
    let config = pt_config::PT | pt_config::FUP_ON_PTW | pt_config::TSC | pt_config::PTW;
    let common = attr_flag::DISABLED | attr_flag::EXCLUDE_KERNEL | attr_flag::EXCLUDE_HV | attr_flag::SAMPLE_ID_ALL;
    let sideband = attr_flag::MMAP
        | attr_flag::COMM
        | attr_flag::TASK
        | attr_flag::MMAP2
        | attr_flag::COMM_EXEC
        | attr_flag::CONTEXT_SWITCH
        | attr_flag::BUILD_ID;
    push_attr(&mut out, who.pmu_type, config, common, ids_at);
    // PERF_TYPE_SOFTWARE, PERF_COUNT_SW_DUMMY.
    push_attr(&mut out, 1, 9, common | sideband, ids_at + 8);
    (out, data_at)
}

fn push_attr(out: &mut Vec<u8>, kind: u32, config: u64, flags: u64, id_at: u64) {
    let end = out.len() + ATTR_LEN;
    let sample_type = sample::IP | sample::TID | sample::TIME | sample::CPU | sample::IDENTIFIER;
    out.extend_from_slice(&kind.to_le_bytes());
    out.extend_from_slice(&(ATTR_LEN as u32).to_le_bytes());
    for word in [config, 1, sample_type, 0, flags] {
        out.extend_from_slice(&word.to_le_bytes());
    }
    out.resize(end, 0);
    // Where its one id stands.
    out.extend_from_slice(&id_at.to_le_bytes());
    out.extend_from_slice(&8u64.to_le_bytes());
}
