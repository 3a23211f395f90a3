//! What CPUs are known to write otherwise than the manual says, as Intel's specification updates list it by name.
//!
//! Only what changes the result and cannot be told from the packets alone is asked for here by the CPU's model.

/// A CPU of Intel's, by its display family, model and stepping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cpu {
    pub family: u32,
    pub model: u32,
    pub stepping: u32,
}

impl Cpu {
    /// From the text in a perf.data: `GenuineIntel,6,94,3`. `None`: another vendor's, or none.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut numbers = text.strip_prefix("GenuineIntel,")?.split(',').map(|number| number.trim().parse().ok());
        Some(Self { family: numbers.next()??, model: numbers.next()??, stepping: numbers.next()?? })
    }
}

/// See the module.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Errata {
    /// SKD007 (SKL049, KBL041): the bytes of a CYC behind its first may be missing where an OVF follows.
    pub cut_cyc: bool,
    /// SKL014 (KBL014): where a direct jump leaves the filtered range, TIP.PGD may tell no target.
    pub no_target: bool,
}

impl Errata {
    #[must_use]
    pub fn of(cpu: Option<Cpu>) -> Self {
        let Some(Cpu { family: 6, model, .. }) = cpu else { return Self::default() };
        let skylake = matches!(model, 0x4e | 0x5e | 0x8e | 0x9e | 0xa5 | 0xa6);
        let server = matches!(model, 0x55 | 0x6a | 0x6c | 0x8f | 0xad | 0xae | 0xcf);
        let later = matches!(model, 0x66 | 0x7d | 0x7e | 0x8c | 0x8d | 0xa7 | 0xa8);
        let hybrid = matches!(model, 0x97 | 0x9a | 0xbf | 0xb7 | 0xb5 | 0xaa | 0xac | 0xba | 0xcc | 0xbd | 0xc5 | 0xc6);
        Self { cut_cyc: skylake, no_target: skylake || server || later || hybrid }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_is_known_by_its_numbers() {
        let skylake = Cpu::parse("GenuineIntel,6,94,3");
        assert_eq!(skylake, Some(Cpu { family: 6, model: 94, stepping: 3 }));
        assert_eq!(Errata::of(skylake), Errata { cut_cyc: true, no_target: true });
        assert_eq!(Errata::of(Cpu::parse("GenuineIntel,6,143,8")), Errata { cut_cyc: false, no_target: true });
        for other in ["AuthenticAMD,25,33,0", "GenuineIntel,6", "GenuineIntel,6,x,1", "", "GenuineIntel,15,94,3"] {
            assert_eq!(Errata::of(Cpu::parse(other)), Errata::default(), "{other}");
        }
    }
}
