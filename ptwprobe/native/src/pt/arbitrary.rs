//! Random packets for property tests.

use proptest::prelude::*;

use super::{IpField, Kind};

/// Every kind with every value that its packet can have.
pub fn kind() -> impl Strategy<Value = Kind> {
    let ip = (prop_oneof![0u8..5, Just(6)], any::<u64>()).prop_map(|(bytes, value)| {
        let len = IpField::payload_len(bytes).expect("not reserved");
        IpField { bytes, value: value & !u64::MAX.checked_shl(8 * len as u32).unwrap_or(0) }
    });
    let tnt = |most: u8, long| {
        (1..=most, any::<u64>()).prop_map(move |(count, bits)| Kind::Tnt {
            bits: bits & ((1 << count) - 1),
            count,
            long,
        })
    };
    let number = || any::<u64>();
    let bits = |n: u32| any::<u64>().prop_map(move |value| value & ((1 << n) - 1));
    let short = |n: u32| any::<u8>().prop_map(move |value| value & ((1 << n) - 1) as u8);
    // Not both of its low bits.
    let mode = || (0u8..8, 0u8..3).prop_map(|(high, low)| high << 2 | low);
    let flows = prop_oneof![
        Just(Kind::Pad),
        tnt(6, false),
        tnt(47, true),
        ip.clone().prop_map(Kind::Tip),
        ip.clone().prop_map(Kind::TipPge),
        ip.clone().prop_map(Kind::TipPgd),
        ip.prop_map(Kind::Fup),
        (bits(47), any::<bool>()).prop_map(|(cr3, nr)| Kind::Pip { cr3: cr3 << 5, nr }),
        mode().prop_map(Kind::ModeExec),
        mode().prop_map(Kind::ModeTsx),
        Just(Kind::TraceStop),
        Just(Kind::Ovf),
        Just(Kind::Psb),
        Just(Kind::PsbEnd),
        bits(40).prop_map(|page| Kind::Vmcs(page << 12)),
    ];
    let times = prop_oneof![
        any::<u8>().prop_map(Kind::Cbr),
        bits(56).prop_map(Kind::Tsc),
        (any::<u16>(), 0u16..0x200).prop_map(|(ctc, fast)| Kind::Tma { ctc, fast }),
        any::<u8>().prop_map(Kind::Mtc),
        (0u32..64, number()).prop_map(|(shift, cycles)| Kind::Cyc(cycles >> shift)),
    ];
    let words = prop_oneof![
        number().prop_map(Kind::Mnt),
        (bits(32), any::<bool>()).prop_map(|(value, ip)| Kind::Ptw { value, size: 4, ip }),
        (number(), any::<bool>()).prop_map(|(value, ip)| Kind::Ptw { value, size: 8, ip }),
        any::<bool>().prop_map(|ip| Kind::ExStop { ip }),
        (any::<u8>(), short(2)).prop_map(|(hints, ext)| Kind::Mwait { hints, ext }),
        (any::<bool>(), any::<u8>()).prop_map(|(hw, state)| Kind::Pwre { hw, state }),
        (short(4), short(4), short(4)).prop_map(|(last, deepest, wake)| Kind::Pwrx { last, deepest, wake }),
        (short(5), any::<bool>()).prop_map(|(kind, short)| Kind::Bbp { kind, short }),
        (short(5), bits(32)).prop_map(|(id, value)| Kind::Bip { id, value, size: 4 }),
        (short(5), number()).prop_map(|(id, value)| Kind::Bip { id, value, size: 8 }),
        any::<bool>().prop_map(|ip| Kind::Bep { ip }),
        (short(5), any::<u8>(), any::<bool>()).prop_map(|(kind, vector, ip)| Kind::Cfe { kind, vector, ip }),
        (short(6), number()).prop_map(|(kind, value)| Kind::Evd { kind, value }),
    ];
    prop_oneof![flows, times, words]
}
