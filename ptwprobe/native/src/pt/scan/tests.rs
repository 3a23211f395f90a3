use proptest::prelude::*;

use super::*;
use crate::pt::arbitrary::kind;
use crate::pt::{encode, Bad, Clock, Decoder, Kind, Packet, TimeConfig, PSB};

type Item = Result<Packet, Bad>;

/// Every packet that `keep` says, with the state before it; and the state at the end.
fn run(bytes: &[u8], fast: bool, keep: fn(&Item) -> bool) -> (Vec<(Item, Scan)>, Scan) {
    let mut decoder = Decoder::new(bytes, 0);
    let mut scan = Scan::default();
    let mut found = Vec::new();
    loop {
        if fast {
            decoder.pass(&mut scan);
        }
        let Some(item) = decoder.next_packet() else { return (found, scan) };
        if keep(&item) {
            found.push((item, scan));
        }
        let Ok(packet) = item else { return (found, scan) };
        match packet.kind {
            Kind::Tip(field) | Kind::TipPge(field) | Kind::TipPgd(field) | Kind::Fup(field) => {
                scan.last_ip.update(field);
            }
            Kind::Tsc(low) => scan.tsc = nearest_tsc(scan.tsc, low),
            Kind::Psb => scan.last_ip = LastIp::default(),
            _ => {}
        }
    }
}

/// What a scan may not pass over.
fn stays(item: &Item) -> bool {
    item.map_or(true, |packet| {
        matches!(
            packet.kind,
            Kind::Psb | Kind::Ovf | Kind::Ptw { .. } | Kind::Bbp { .. } | Kind::Bip { .. } | Kind::Mnt(_)
        )
    })
}

/// Many of the packets that there are many of.
fn packets() -> impl Strategy<Value = Vec<u8>> {
    let tnt = (1u8..7, any::<u64>()).prop_map(|(count, bits)| Kind::Tnt { bits, count, long: false });
    let ip = (any::<u64>(), 0u32..50).prop_map(|(ip, shift)| Kind::Tip(LastIp(0x7f00_0000_0000).compress(ip >> shift)));
    proptest::collection::vec(prop_oneof![3 => tnt, 2 => ip, 3 => kind()], 0..60).prop_map(|kinds| {
        let mut bytes = Vec::new();
        kinds.into_iter().for_each(|kind| encode(&mut bytes, kind));
        bytes
    })
}

#[test]
fn a_run_of_flow_is_passed_up_to_the_word_behind_it() {
    let mut bytes = Vec::new();
    let mut last = LastIp::default();
    for ip in 0..100 {
        encode(&mut bytes, Kind::Tip(last.compress(0xffff_8000_0000_0000 + ip * 0x3000)));
        encode(&mut bytes, Kind::Tnt { bits: 5, count: 6, long: false });
        encode(&mut bytes, Kind::Tsc(ip));
    }
    let flow = bytes.len();
    encode(&mut bytes, Kind::Ptw { value: 1, size: 8, ip: true });
    bytes.extend_from_slice(&[0; WINDOW_LEN]);
    let mut scan = Scan::default();
    assert_eq!(scan.pass(&bytes), flow);
    assert_eq!(scan, Scan { last_ip: last, tsc: 99 });
}

/// Without blocks, as on a CPU that cannot.
fn pass_singly(scan: &mut Scan, bytes: &[u8]) -> usize {
    let mut at = 0;
    while let Some(len) = packet(&mut scan.last_ip, &mut scan.tsc, &bytes[at..]) {
        at += len;
    }
    at
}

proptest! {
    #[test]
    fn blocks_pass_over_what_single_packets_do(bytes in packets(), before: u64) {
        let mut by_blocks = Scan { tsc: 7, last_ip: LastIp(before) };
        let mut singly = by_blocks;
        prop_assert_eq!(by_blocks.pass(&bytes), pass_singly(&mut singly, &bytes));
        prop_assert_eq!(by_blocks, singly);
    }

    #[test]
    fn passing_finds_what_plain_decoding_finds(bytes in packets()) {
        prop_assert_eq!(run(&bytes, true, stays), run(&bytes, false, stays));
    }

    #[test]
    fn passing_finds_the_same_damage(mut bytes in packets(), spoils in proptest::collection::vec(any::<(usize, u8)>(), 0..8)) {
        bytes.extend_from_slice(&PSB);
        for (at, value) in spoils {
            let at = at % bytes.len();
            bytes[at] = value;
        }
        prop_assert_eq!(run(&bytes, true, stays), run(&bytes, false, stays));
    }

    #[test]
    fn of_any_bytes_as_well(bytes in proptest::collection::vec(prop_oneof![any::<u8>(), Just(0x02), Just(0x06)], 0..200)) {
        prop_assert_eq!(run(&bytes, true, stays), run(&bytes, false, stays));
    }

    #[test]
    fn a_clock_is_told_of_every_packet_of_time(bytes in packets(), mtc_shift in 0u8..12) {
        let config = TimeConfig { tsc_ctc: Some((168, 2)), mtc_shift, max_nonturbo: 24, cyc_thresh: 0 };
        let times = |fast: bool| {
            let (mut decoder, mut scan, mut clock) = (Decoder::new(&bytes, 0), Scan::default(), Clock::new(config, 0));
            let mut found = Vec::new();
            loop {
                if fast {
                    decoder.pass_timed(&mut scan, &mut clock);
                }
                let Some(item) = decoder.next_packet() else { return (found, clock.now()) };
                if stays(&item) {
                    found.push((item, clock.now()));
                }
                match item.map(|packet| packet.kind) {
                    Ok(Kind::Tsc(low)) => clock.tsc(low),
                    Ok(Kind::Tma { ctc, fast }) => clock.tma(ctc, fast),
                    Ok(Kind::Mtc(ctc)) => clock.mtc(ctc),
                    Ok(Kind::Cyc(cycles)) => clock.cyc(cycles),
                    Ok(Kind::Cbr(ratio)) => clock.cbr(ratio),
                    Ok(_) => {}
                    Err(_) => return (found, clock.now()),
                }
            }
        };
        prop_assert_eq!(times(true), times(false));
    }
}
