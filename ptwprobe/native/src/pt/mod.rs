//! Intel PT packets (Intel SDM volume 3, "Intel Processor Trace"): bytes to packets and back. No control flow here.

#[cfg(test)]
pub mod arbitrary;
mod decode;
mod encode;
mod errata;
mod packet;
mod scan;
mod time;

pub use decode::{behind_bad, find_psb, Block, Decoder};
pub use encode::{encode, encode_fup, encode_hit, encode_psb, encode_psb_plus};
pub use errata::{Cpu, Errata};
pub use packet::{Bad, BadReason, IpField, Kind, LastIp, Packet};
pub use scan::Scan;
pub use time::{nearest_tsc, Clock, TimeConfig};

/// A PSB packet; decoding can start at one.
pub const PSB: [u8; 16] =
    [0x02, 0x82, 0x02, 0x82, 0x02, 0x82, 0x02, 0x82, 0x02, 0x82, 0x02, 0x82, 0x02, 0x82, 0x02, 0x82];

/// A packet is never longer: PSB has 16 bytes, a CYC of more than 10 would not fit 64 bits.
pub const MAX_PACKET_LEN: usize = 16;

/// A TSC packet carries the low 56 bits.
pub const TSC_BITS: u32 = 56;

/// Low 40 bits of a header word: "PTRW1".
pub const HEADER_MAGIC: u64 = 0x50_5452_5731;
const HEADER_MAGIC_MASK: u64 = 0xff_ffff_ffff;

/// The word that opens a record: event id, number of argument words, magic.
#[must_use]
pub fn header_word(event_id: u16, nargs: u8) -> u64 {
    u64::from(event_id) << 48 | u64::from(nargs) << 40 | HEADER_MAGIC
}

/// `(event id, number of argument words)` where `word` looks like a header.
#[must_use]
pub fn parse_header_word(word: u64) -> Option<(u16, u8)> {
    // Truncating casts: the fields are 16 and 8 bits wide.
    (word & HEADER_MAGIC_MASK == HEADER_MAGIC).then_some(((word >> 48) as u16, (word >> 40) as u8))
}
