//! Makes up Intel PT traces: a random walk over a real ELF file, written as the packets that a CPU would write, in a
//! perf.data that stock perf and libipt read, beside the true list of branches and hits.
//!
//! Where stock decoders part from what is written here (perf 6.1, libipt 2.0.5), as tried:
//! - perf's `b` prints every taken branch, direct ones included, and what begins and ends tracing; a Jcc that leaves an
//!   address range it prints with its target as the source.
//! - Both take a TNT bit for the answer to any RET: they fail at deferred TIPs of returns (`deferret`), also without
//!   RET compression.
//! - libipt takes an entry off its stack at compressed returns only and fails after returns that no call made
//!   (`retpoline` with `retc`).
//! - Both take the FUP after an MWAIT for its own and miss the event it belongs to (`mwait`).
//! - A FUP after a CFE with its IP bit stands alone for perf; that of an interrupt follows a CFE without.
//! - libipt does not know BBP, BIP and BEP, nor CFE and EVD.
//!
//! It shares no code with the decoder's flow, so that both can be compared. `ptgen` without arguments says how to use it.

mod blocks;
mod clock;
mod cpu;
mod events;
mod image;
mod noreturn;
mod options;
mod packets;
mod perffile;
mod rare;
mod returns;
mod rng;
mod stubs;
mod stubwalk;
mod summary;
mod truth;

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::process::ExitCode;

use _native::codemap::CodeMap;

use crate::blocks::Blocks;
use crate::cpu::{Cpu, World};
use crate::image::Image;
use crate::options::Options;
use crate::packets::Emitter;
use crate::perffile::{Mapping, Stream};
use crate::rng::Rng;
use crate::stubs::Stubs;
use crate::truth::Truth;

/// TSC at the start; some bits above the 56 that a packet has.
const START_TSC: u64 = 0x0100_1234_5678_9abc;

fn main() -> ExitCode {
    let done = Options::parse(std::env::args().skip(1)).and_then(|options| generate(&options));
    match done {
        Ok(line) => {
            println!("{line}");
            ExitCode::SUCCESS
        }
        Err(message) => {
            eprintln!("{message}");
            ExitCode::from(2)
        }
    }
}

fn generate(options: &Options) -> Result<String, String> {
    let io = |e: std::io::Error| e.to_string();
    let folder = Path::new(&options.out);
    fs::create_dir_all(folder).map_err(io)?;
    let elf = fs::canonicalize(&options.elf).map_err(|e| format!("{}: {e}", options.elf))?;
    let elf = elf.to_string_lossy();
    let mut image = Image::read(&elf)?;
    let map = CodeMap::read(&elf).map_err(|e| e.message)?;
    let mut rng = Rng::new(options.seed ^ 0x1_0000);
    let stubs = if options.hits > 0 {
        Stubs::place(&map, &image, options.sites, options.words, &mut rng)
    } else {
        Stubs::default()
    };
    let mappings = map_code(options, folder, &elf, &mut image, &stubs).map_err(io)?;
    let (entries, range) = entries(options, &map, &image, &stubs, &mut rng)?;
    let world = World {
        image: &image,
        options,
        stubs: &stubs,
        entries: &entries,
        range,
        sigreturn: if range.is_some() { None } else { find_sigreturn(&image) },
    };
    let hidden = if options.visible { &[] } else { stubs.all.as_slice() };
    let sites: HashMap<u64, u64> = hidden.iter().map(|s| (s.site, s.continues)).collect();
    let mut streams = Vec::new();
    let mut truths = Vec::new();
    for thread in 0..options.threads {
        let seed = options.seed.wrapping_mul(1000).wrapping_add(thread as u64);
        let suffix = if thread == 0 { String::new() } else { format!("-{thread}") };
        let truth = Truth::create(folder, &suffix, options.truth).map_err(io)?;
        let em = Emitter::new(options.style(), seed ^ 0xe3, START_TSC, options.bytes + (1 << 16));
        let blocks = Blocks::new(options.bias, options.seed, sites.clone());
        let mut cpu = Cpu::new(&world, blocks, em, truth, seed);
        cpu.run().map_err(io)?;
        fs::write(folder.join(format!("aux{suffix}.bin")), &cpu.em.out).map_err(io)?;
        streams.push(Stream { bytes: cpu.em.out, first_tsc: START_TSC });
        truths.push(cpu.truth);
    }
    let filter = range.map_or(String::new(), |r| summary::filter_text(&image, &mappings, r));
    perffile::write(&folder.join("perf.data"), options, &mappings, &filter, &streams).map_err(io)?;
    let text = summary::json(options, &elf, &image, &mappings, &stubs, range, &streams, &truths);
    fs::write(folder.join("truth.json"), text).map_err(io)?;
    let (branches, hits) = truths.iter().fold((0, 0), |sum, t| (sum.0 + t.count, sum.1 + t.hit_count));
    Ok(format!("branches={branches} hits={hits}"))
}

/// The mappings as perf.data tells them; writes the files that they need.
fn map_code(
    options: &Options,
    folder: &Path,
    elf: &str,
    image: &mut Image,
    stubs: &Stubs,
) -> std::io::Result<Vec<Mapping>> {
    let folder = fs::canonicalize(folder)?;
    let stub_file = folder.join("stubs.bin");
    let mut mappings = Vec::new();
    let code = if options.visible && !stubs.all.is_empty() { folder.join("code.elf") } else { elf.into() };
    for segment in &image.segments {
        mappings.push(Mapping {
            addr: segment.addr,
            len: segment.bytes.len().next_multiple_of(4096) as u64,
            file_offset: segment.file_offset,
            path: code.to_string_lossy().into_owned(),
        });
    }
    if !stubs.all.is_empty() {
        fs::write(&stub_file, &stubs.code)?;
        let shown = if options.visible { stub_file.to_string_lossy().into_owned() } else { "[uprobes-ptwrite]".into() };
        mappings.push(Mapping { addr: stubs.addr, len: stubs.code.len() as u64, file_offset: 0, path: shown });
        if options.visible {
            stubs.install(image);
            fs::write(code, &image.file)?;
        }
    }
    Ok(mappings)
}

/// Where the walk may start, and the range that is traced, if there is one.
type Places = (Vec<u64>, Option<(u64, u64)>);

fn entries(options: &Options, map: &CodeMap, image: &Image, stubs: &Stubs, rng: &mut Rng) -> Result<Places, String> {
    let mut entries: Vec<u64> = map.functions().map(|f| f.0 + image.base).collect();
    entries.retain(|addr| !image.at(*addr).is_empty() && !stubs.leads_to_site(*addr));
    entries.sort_unstable();
    entries.dedup();
    let mut range = None;
    if options.features.filter {
        let at = |quarter: usize| entries.get(entries.len() * quarter / 4).copied();
        range = at(1).zip(at(3));
        if let Some((low, high)) = range {
            entries.retain(|addr| low <= *addr && *addr < high);
        }
    }
    if options.functions > 0 {
        let all = entries;
        entries = (0..options.functions).filter_map(|_| rng.pick(&all).copied()).collect();
    }
    if entries.is_empty() {
        return Err(format!("{}: no functions", options.elf));
    }
    Ok((entries, range))
}

/// `mov rax, 15; syscall`: what the C library gives the kernel as the return address of signal handlers.
fn find_sigreturn(image: &Image) -> Option<u64> {
    const CODE: [u8; 9] = [0x48, 0xc7, 0xc0, 15, 0, 0, 0, 0x0f, 0x05];
    image.segments.iter().find_map(|s| {
        let at = s.bytes.windows(CODE.len()).position(|w| w == CODE)?;
        Some(s.addr + at as u64)
    })
}
