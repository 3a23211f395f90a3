//! Probes in the code: which instructions can take one, and the stubs they jump to.
//!
//! A stub emits the header word and its words with PTWRITE, runs the displaced instruction and jumps back. Sites are
//! in functions that no other code reaches directly, so that a hit happens only when the walk is sent there.

use _native::codemap::{CodeMap, TargetKind};
use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction, Register};

use crate::image::{Image, Segment};
use crate::rng::Rng;

const JMP: u8 = 0xe9;
const JMP_LEN: usize = 5;
/// Low 40 bits of a header word: "PTRW1".
const MAGIC: u64 = 0x50_5452_5731;
const FIRST_EVENT: u64 = 0x8000;

pub struct Stub {
    pub start: u64,
    pub end: u64,
    /// Entry of the function that the site is in.
    pub entry: u64,
    pub site: u64,
    pub continues: u64,
    /// Address of every instruction, and which word it emits.
    pub steps: Vec<(u64, Option<usize>)>,
    pub header: u64,
}

#[derive(Default)]
pub struct Stubs {
    pub all: Vec<Stub>,
    pub addr: u64,
    pub code: Vec<u8>,
}

impl Stubs {
    /// At most `count` sites; hits of `words` PTWs each, of which the first is the header word.
    pub fn place(map: &CodeMap, image: &Image, count: usize, words: usize, rng: &mut Rng) -> Self {
        let mut stubs = Self { all: Vec::new(), addr: image.free_addr(), code: Vec::new() };
        let functions: Vec<u64> = map.functions().map(|f| f.0).collect();
        // A bounded number of tries: a small file may have no site at all.
        for _ in 0..functions.len().min(20_000) {
            if stubs.all.len() >= count {
                break;
            }
            let Some(&vaddr) = rng.pick(&functions) else { break };
            if stubs.all.iter().any(|s| s.entry == vaddr + image.base) {
                continue;
            }
            if let Some((site, len)) = site_in(map, image, vaddr) {
                stubs.add(image, vaddr + image.base, site, len, words);
            }
        }
        stubs.code.resize(stubs.code.len().next_multiple_of(4096), 0xcc);
        stubs
    }

    fn add(&mut self, image: &Image, entry: u64, site: u64, len: usize, words: usize) {
        let start = self.addr + self.code.len() as u64;
        let header = (FIRST_EVENT + self.all.len() as u64) << 48 | (words as u64 - 1) << 40 | MAGIC;
        let mut code = Vec::new();
        let mut steps = Vec::new();
        let mut push = |code: &mut Vec<u8>, bytes: &[u8], slot| {
            steps.push((start + code.len() as u64, slot));
            code.extend_from_slice(bytes);
        };
        // lea rsp, [rsp - 128]; mov [rsp], rax
        push(&mut code, &[0x48, 0x8d, 0x64, 0x24, 0x80], None);
        push(&mut code, &[0x48, 0x89, 0x04, 0x24], None);
        let mut literal_at = 0;
        for slot in 0..words {
            if slot == 0 {
                // ptwrite qword ptr [rip + literal]
                literal_at = code.len() + 5;
                push(&mut code, &[0xf3, 0x48, 0x0f, 0xae, 0x25, 0, 0, 0, 0], Some(slot));
            } else {
                // mov rax, [rsp]; ptwrite rax
                push(&mut code, &[0x48, 0x8b, 0x04, 0x24], None);
                push(&mut code, &[0xf3, 0x48, 0x0f, 0xae, 0xe0], Some(slot));
            }
        }
        // mov rax, [rsp]; lea rsp, [rsp + 128]; then the displaced instruction, and back.
        push(&mut code, &[0x48, 0x8b, 0x04, 0x24], None);
        push(&mut code, &[0x48, 0x8d, 0xa4, 0x24, 0x80, 0, 0, 0], None);
        push(&mut code, &image.at(site)[..len], None);
        let continues = site + len as u64;
        let back = jump(start + code.len() as u64, continues);
        push(&mut code, &back, None);
        let end = start + code.len() as u64;
        code.resize(code.len().next_multiple_of(8), 0xcc);
        let displacement = (code.len() - literal_at - 4) as u32;
        code[literal_at..literal_at + 4].copy_from_slice(&displacement.to_le_bytes());
        code.extend_from_slice(&header.to_le_bytes());
        code.resize(code.len().next_multiple_of(64), 0xcc);
        self.code.extend_from_slice(&code);
        self.all.push(Stub { start, end, entry, site, continues, steps, header });
    }

    /// Writes the jumps and maps the stubs.
    pub fn install(&self, image: &mut Image) {
        for stub in &self.all {
            let mut bytes = jump(stub.site, stub.start).to_vec();
            bytes.resize((stub.continues - stub.site) as usize, 0xcc);
            image.patch(stub.site, &bytes);
        }
        if !self.all.is_empty() {
            image.segments.push(Segment { addr: self.addr, bytes: self.code.clone(), file_offset: 0 });
        }
    }

    pub fn at_site(&self, addr: u64) -> Option<&Stub> {
        self.all.iter().find(|s| s.site == addr)
    }

    pub fn containing(&self, addr: u64) -> Option<&Stub> {
        self.all.iter().find(|s| s.start <= addr && addr < s.end)
    }

    /// Whether going to `addr` would lead through a site.
    pub fn leads_to_site(&self, addr: u64) -> bool {
        self.all.iter().any(|s| s.entry <= addr && addr <= s.site) || self.containing(addr).is_some()
    }
}

fn jump(from: u64, to: u64) -> [u8; JMP_LEN] {
    let displacement = to.wrapping_sub(from + JMP_LEN as u64) as u32;
    let [a, b, c, d] = displacement.to_le_bytes();
    [JMP, a, b, c, d]
}

/// A single instruction near the entry that is long enough for the jump, and that nothing else jumps to or into.
fn site_in(map: &CodeMap, image: &Image, vaddr: u64) -> Option<(u64, usize)> {
    let direct = |t: &(u64, TargetKind)| matches!(t.1, TargetKind::Branch | TargetKind::Call | TargetKind::LandingPad);
    if map.targets(vaddr.checked_sub(1)?, vaddr + 1).iter().any(direct) {
        return None;
    }
    // A call right before it that is taken not to return would return into it, and a short function may fall into it.
    let falls_into = |t: &(u64, TargetKind)| matches!(t.1, TargetKind::Return | TargetKind::Function);
    if map.targets(vaddr.saturating_sub(32), vaddr).iter().any(falls_into) {
        return None;
    }
    let entry = vaddr + image.base;
    let mut decoder = Decoder::with_ip(64, image.at(entry), entry, DecoderOptions::NONE);
    let mut instruction = Instruction::default();
    for _ in 0..8 {
        if !decoder.can_decode() {
            return None;
        }
        decoder.decode_out(&mut instruction);
        if instruction.is_invalid() || instruction.flow_control() != FlowControl::Next {
            return None;
        }
        let movable = !instruction.is_ip_rel_memory_operand()
            && instruction.memory_base() != Register::EIP
            && !instruction.has_lock_prefix()
            && !instruction.is_privileged();
        if instruction.len() >= JMP_LEN && movable {
            let end = instruction.next_ip() - image.base;
            return map.targets(vaddr, end).is_empty().then_some((instruction.ip(), instruction.len()));
        }
    }
    None
}
