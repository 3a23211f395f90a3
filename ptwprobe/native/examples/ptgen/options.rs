//! The command line: features by name, presets, numbers.

use crate::packets::Style;
use crate::rng::Rng;

pub const USAGE: &str = "\
ptgen --elf FILE --out DIR [--seed N] [--bytes N] [options]: a made-up Intel PT trace over FILE, and its truth

  --with A,B,…       features (--list names them)      --without A,B,…
  --all              each feature by chance, from the seed
  --preset P         uniform | hot | full | tolerance
  --bias F           how often a conditional branch goes its own preferred way (0.5: a coin)
  --functions N      start and land in N functions only (0: all)
  --psb BYTES        distance of PSBs
  --hits N           about so many hits of probes over the trace     --sites N   --words N (PTWs of a hit)
  --stubs S          visible | invisible                --stub-break   interrupted inside at each hit
  --threads N        streams of as many threads
  --no-truth         branches are counted, not written
  --list             names of all features
";

macro_rules! features {
    ($($name:ident $help:literal,)*) => {
        /// What a trace may contain beyond TNT and TIP.
        #[derive(Clone, Copy, Default)]
        pub struct Features { $(pub $name: bool,)* }

        pub const FEATURES: &[(&str, &str)] = &[$((stringify!($name), $help),)*];

        impl Features {
            fn set(&mut self, name: &str, on: bool) -> Result<(), String> {
                match name {
                    $(stringify!($name) => self.$name = on,)*
                    _ => return Err(format!("no feature {name:?}; --list names them")),
                }
                Ok(())
            }

            pub fn names(&self) -> Vec<&'static str> {
                [$((stringify!($name), self.$name),)*].iter().filter(|f| f.1).map(|f| f.0).collect()
            }
        }
    };
}

features! {
    retc "RET compression",
    retpoline "returns to where no call came from",
    longjmp "frames left by an indirect jump",
    coroutines "stacks switched before a return",
    defer "TIPs of jumps and calls behind later TNT bits",
    deferret "TIPs of returns behind later TNT bits, where no compressed return can be meant",
    longtnt "TNT packets of up to 47 branches",
    ipforms "IPs in any form that yields them",
    tsc "TSC in PSB+ and at wake-ups, CBR in PSB+",
    mtc "MTC and TMA (with tsc)",
    cyc "CYC",
    cbr "changes of the bus ratio",
    noptwip "PTW without FUP",
    interrupts "FUP and TIP.PGD at any instruction",
    uintr "interrupts that stay in user mode: FUP and TIP",
    signals "handlers entered by TIP.PGE, left by sigreturn",
    ovf "overflows",
    cut "bytes cut out of the stream",
    stubpsb "PSBs inside stubs",
    filter "an address range; what leaves it is TIP.PGD with its target",
    stop "TraceStop after some TIP.PGD (with filter)",
    tsx "aborts of transactions",
    power "EXSTOP, PWRE, PWRX",
    mwait "MWAIT (stock decoders take the next FUP for its own)",
    events "CFE and EVD with interrupts",
    blocks "BBP, BIP, BEP",
    vm "PIP and VMCS",
    misc "PAD and MNT",
}

#[derive(Clone)]
pub struct Options {
    pub elf: String,
    pub out: String,
    pub seed: u64,
    pub bytes: usize,
    pub preset: Option<String>,
    pub bias: f64,
    pub functions: usize,
    pub psb: usize,
    pub hits: usize,
    pub sites: usize,
    pub words: usize,
    pub visible: bool,
    pub stub_break: bool,
    pub threads: usize,
    pub truth: bool,
    pub features: Features,
    /// Mean distances of events, bytes.
    pub event_gap: usize,
    /// The same of overflows and cuts.
    pub loss_gap: usize,
}

impl Options {
    pub fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self {
            elf: String::new(),
            out: String::new(),
            seed: 1,
            bytes: 1 << 20,
            preset: None,
            bias: 0.8,
            functions: 0,
            psb: 4096,
            hits: 0,
            sites: 8,
            words: 2,
            visible: false,
            stub_break: false,
            threads: 1,
            truth: true,
            features: Features::default(),
            event_gap: 1500,
            loss_gap: 40_000,
        };
        let mut later = Vec::new();
        let mut all = false;
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or(format!("{arg} needs a value"));
            match arg.as_str() {
                "--elf" => options.elf = value()?,
                "--out" => options.out = value()?,
                "--seed" => options.seed = number(&value()?)?,
                "--preset" => options.preset = Some(value()?),
                "--all" => all = true,
                "--no-truth" => options.truth = false,
                "--stub-break" => later.push(("--stub-break".to_owned(), String::new())),
                "--list" => {
                    let lines: Vec<_> = FEATURES.iter().map(|(name, help)| format!("{name:12}{help}")).collect();
                    return Err(lines.join("\n"));
                }
                _ if arg.starts_with("--") => {
                    let value = value()?;
                    later.push((arg, value));
                }
                _ => return Err(USAGE.to_owned()),
            }
        }
        if let Some(preset) = options.preset.clone() {
            options.apply_preset(&preset)?;
        }
        if all {
            options.by_chance();
        }
        // What is said explicitly counts more than a preset or chance, wherever it stands.
        for (name, value) in later {
            options.set(&name, &value)?;
        }
        if options.elf.is_empty() || options.out.is_empty() {
            return Err(USAGE.to_owned());
        }
        Ok(options)
    }

    fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        let size = || number(value).map(|n| n as usize);
        match name {
            "--bytes" => self.bytes = size()?,
            "--with" | "--without" => {
                for feature in value.split(',').filter(|f| !f.is_empty()) {
                    self.features.set(feature, name == "--with")?;
                }
            }
            "--bias" => self.bias = value.parse().map_err(|_| format!("--bias {value}: not a number"))?,
            "--functions" => self.functions = size()?,
            "--psb" => self.psb = size()?.max(64),
            "--hits" => self.hits = size()?,
            "--sites" => self.sites = size()?.max(1),
            "--words" => self.words = size()?.max(1),
            "--threads" => self.threads = size()?.max(1),
            "--event-gap" => self.event_gap = size()?.max(1),
            "--loss-gap" => self.loss_gap = size()?.max(1),
            "--stub-break" => self.stub_break = true,
            "--stubs" => {
                self.visible = match value {
                    "visible" => true,
                    "invisible" => false,
                    _ => return Err(format!("--stubs {value}: visible or invisible")),
                }
            }
            _ => return Err(USAGE.to_owned()),
        }
        Ok(())
    }

    fn apply_preset(&mut self, preset: &str) -> Result<(), String> {
        let features = match preset {
            "uniform" => {
                (self.bytes, self.bias, self.truth) = (64 << 20, 0.5, false);
                ""
            }
            "hot" => {
                (self.bytes, self.bias, self.functions, self.truth) = (64 << 20, 0.9, 64, false);
                ""
            }
            "full" => {
                (self.bytes, self.bias, self.truth) = (64 << 20, 0.8, false);
                (self.hits, self.visible) = (150_000, true);
                "retc,tsc,interrupts"
            }
            "tolerance" => {
                (self.bytes, self.bias, self.hits, self.words) = (4 << 20, 0.5, 69, 1);
                "tsc"
            }
            _ => return Err(format!("no preset {preset:?}: uniform, hot, full, tolerance")),
        };
        self.set("--with", features)
    }

    fn by_chance(&mut self) {
        let mut rng = Rng::new(self.seed ^ 0xa11);
        for (name, _) in FEATURES {
            // Names come from the table itself.
            let _ = self.features.set(name, rng.chance(1, 2));
        }
        self.bias = *rng.pick(&[0.5, 0.8, 0.95]).unwrap_or(&0.5);
        self.functions = *rng.pick(&[0, 0, 64]).unwrap_or(&0);
        self.psb = *rng.pick(&[1024, 4096, 16384]).unwrap_or(&4096);
        self.hits = *rng.pick(&[0, 50, 2000]).unwrap_or(&0);
        self.words = rng.between(1, 4);
        self.visible = rng.chance(1, 2);
        self.stub_break = rng.chance(1, 2);
    }

    pub fn style(&self) -> Style {
        let f = &self.features;
        Style {
            long_tnt: f.longtnt,
            defer: f.defer || f.deferret,
            any_ip_form: f.ipforms,
            tsc: f.tsc,
            mtc: f.tsc && f.mtc,
            cyc: f.cyc,
        }
    }
}

fn number(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.char_indices().next_back() {
        Some((at, 'K')) => (&text[..at], 10),
        Some((at, 'M')) => (&text[..at], 20),
        Some((at, 'G')) => (&text[..at], 30),
        _ => (text, 0),
    };
    digits.parse::<u64>().map(|n| n << shift).map_err(|_| format!("{text:?}: not a number"))
}
