//! What a packet is, and how its IP is compressed.

use std::fmt;

/// The IP of a TIP, TIP.PGE, TIP.PGD or FUP packet as it stands in the packet: `bytes` is the IPBytes field (0-7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpField {
    pub bytes: u8,
    pub value: u64,
}

impl IpField {
    /// Payload bytes that follow the packet's first byte; `None` for the reserved encodings.
    pub(super) fn payload_len(bytes: u8) -> Option<usize> {
        match bytes {
            0 => Some(0),
            1 => Some(2),
            2 => Some(4),
            3 | 4 => Some(6),
            6 => Some(8),
            _ => None,
        }
    }
}

/// The bits of an address that a packet has, by its field `IPBytes`.
const IP_BITS: [u64; 8] = [0, 0xffff, 0xffff_ffff, 0xffff_ffff_ffff, 0xffff_ffff_ffff, 0, u64::MAX, 0];

/// The last IP, against which the next is compressed. A PSB sets it to 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LastIp(pub u64);

impl LastIp {
    /// The full address of `field`, or `None` where the packet has no IP.
    #[inline]
    pub fn update(&mut self, field: IpField) -> Option<u64> {
        // By table, not by case: which one comes next is hard to foresee.
        let taken = IP_BITS[usize::from(field.bytes & 7)];
        if taken == 0 {
            return None;
        }
        let value = field.value & taken;
        self.0 = if field.bytes == 3 { sign_extend_48(value) } else { self.0 & !taken | value };
        Some(self.0)
    }

    /// The shortest field that yields `ip`, which becomes the last IP.
    pub fn compress(&mut self, ip: u64) -> IpField {
        let changed = self.0 ^ ip;
        self.0 = ip;
        let bytes = if changed >> 16 == 0 {
            1
        } else if changed >> 32 == 0 {
            2
        } else if sign_extend_48(ip) == ip {
            3
        } else {
            6
        };
        IpField { bytes, value: ip }
    }
}

fn sign_extend_48(value: u64) -> u64 {
    (((value << 16) as i64) >> 16) as u64
}

/// What a packet says. Payloads are as the packet has them, not interpreted further.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Pad,
    /// `count` branches (1-47), the oldest in the highest bit; 1 is taken.
    Tnt {
        bits: u64,
        count: u8,
        long: bool,
    },
    Tip(IpField),
    TipPge(IpField),
    TipPgd(IpField),
    Fup(IpField),
    /// CR3 with its low 5 bits zero; `nr`: VMX non-root.
    Pip {
        cr3: u64,
        nr: bool,
    },
    /// Bit 0 CS.L, bit 1 CS.D, bit 2 IF.
    ModeExec(u8),
    /// Bit 0 in a transaction, bit 1 aborted.
    ModeTsx(u8),
    TraceStop,
    /// Core to bus ratio.
    Cbr(u8),
    /// Low 56 bits of the time-stamp counter.
    Tsc(u64),
    Tma {
        ctc: u16,
        fast: u16,
    },
    Mtc(u8),
    Cyc(u64),
    /// Address of the VMCS, low 12 bits zero.
    Vmcs(u64),
    Ovf,
    Psb,
    PsbEnd,
    Mnt(u64),
    /// A word of `ptwrite`; with `ip` a FUP follows.
    Ptw {
        value: u64,
        size: u8,
        ip: bool,
    },
    ExStop {
        ip: bool,
    },
    Mwait {
        hints: u8,
        ext: u8,
    },
    /// `state`: resolved C-state in bits 7-4, sub-state in bits 3-0.
    Pwre {
        hw: bool,
        state: u8,
    },
    /// `last`/`deepest` core C-state, `wake` reason bits.
    Pwrx {
        last: u8,
        deepest: u8,
        wake: u8,
    },
    /// Begin of a block of items of 8 bytes, or 4 with `short`.
    Bbp {
        kind: u8,
        short: bool,
    },
    Bip {
        id: u8,
        value: u64,
        size: u8,
    },
    Bep {
        ip: bool,
    },
    Cfe {
        kind: u8,
        vector: u8,
        ip: bool,
    },
    Evd {
        kind: u8,
        value: u64,
    },
}

/// A packet at `offset` (bytes from where the decoder's bytes start, plus its base), `len` bytes long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    pub offset: u64,
    pub len: u8,
    pub kind: Kind,
}

/// Why bytes are not a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadReason {
    /// No packet begins like this, or a field has a reserved value.
    Unknown,
    /// The bytes end inside the packet.
    Cut,
}

/// Bytes that are not a packet. The decoder goes on at the next PSB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bad {
    pub offset: u64,
    pub reason: BadReason,
}

fn write_ip(f: &mut fmt::Formatter<'_>, name: &str, field: &IpField) -> fmt::Result {
    match field.bytes {
        0 => write!(f, "{name} no ip"),
        bytes => write!(f, "{name} {bytes}: 0x{:x}", field.value),
    }
}

fn with_ip(ip: bool) -> &'static str {
    if ip {
        " ip"
    } else {
        ""
    }
}

/// Name and payload, as `dump` prints them.
impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kind::Pad => f.write_str("PAD"),
            Kind::Tnt { bits, count, long } => {
                f.write_str(if *long { "TNT.64 " } else { "TNT.8 " })?;
                for i in (0..*count).rev() {
                    f.write_str(if bits >> i & 1 == 1 { "T" } else { "N" })?;
                }
                Ok(())
            }
            Kind::Tip(ip) => write_ip(f, "TIP", ip),
            Kind::TipPge(ip) => write_ip(f, "TIP.PGE", ip),
            Kind::TipPgd(ip) => write_ip(f, "TIP.PGD", ip),
            Kind::Fup(ip) => write_ip(f, "FUP", ip),
            Kind::Pip { cr3, nr } => write!(f, "PIP cr3 0x{cr3:x} nr {}", u8::from(*nr)),
            Kind::ModeExec(bits) => {
                write!(f, "MODE.Exec cs.l {} cs.d {} if {}", bits & 1, bits >> 1 & 1, bits >> 2 & 1)
            }
            Kind::ModeTsx(bits) => write!(f, "MODE.TSX intx {} abort {}", bits & 1, bits >> 1 & 1),
            Kind::TraceStop => f.write_str("TraceStop"),
            Kind::Cbr(ratio) => write!(f, "CBR {ratio}"),
            Kind::Tsc(tsc) => write!(f, "TSC 0x{tsc:x}"),
            Kind::Tma { ctc, fast } => write!(f, "TMA ctc 0x{ctc:x} fast 0x{fast:x}"),
            Kind::Mtc(ctc) => write!(f, "MTC 0x{ctc:x}"),
            Kind::Cyc(cycles) => write!(f, "CYC {cycles}"),
            Kind::Vmcs(addr) => write!(f, "VMCS 0x{addr:x}"),
            Kind::Ovf => f.write_str("OVF"),
            Kind::Psb => f.write_str("PSB"),
            Kind::PsbEnd => f.write_str("PSBEND"),
            Kind::Mnt(value) => write!(f, "MNT 0x{value:x}"),
            Kind::Ptw { value, size, ip } => write!(f, "PTW.{size} 0x{value:x}{}", with_ip(*ip)),
            Kind::ExStop { ip } => write!(f, "EXSTOP{}", with_ip(*ip)),
            Kind::Mwait { hints, ext } => write!(f, "MWAIT hints 0x{hints:x} ext 0x{ext:x}"),
            Kind::Pwre { hw, state } => write!(f, "PWRE c-state 0x{state:x} hw {}", u8::from(*hw)),
            Kind::Pwrx { last, deepest, wake } => write!(f, "PWRX last {last} deepest {deepest} wake 0x{wake:x}"),
            Kind::Bbp { kind, short } => write!(f, "BBP type 0x{kind:x} items of {}", if *short { 4 } else { 8 }),
            Kind::Bip { id, value, size } => write!(f, "BIP.{size} id 0x{id:x} 0x{value:x}"),
            Kind::Bep { ip } => write!(f, "BEP{}", with_ip(*ip)),
            Kind::Cfe { kind, vector, ip } => {
                write!(f, "CFE type 0x{kind:x} vector 0x{vector:x}{}", with_ip(*ip))
            }
            Kind::Evd { kind, value } => write!(f, "EVD type 0x{kind:x} 0x{value:x}"),
        }
    }
}
