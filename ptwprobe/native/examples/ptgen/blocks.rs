//! Straight runs of instructions up to the next one that can change the flow, found as the walk gets there.

use std::collections::HashMap;

use iced_x86::{Code, Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic};

use crate::image::Image;
use crate::noreturn::Returning;
use crate::rng::mix;

/// How a block ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Cond,
    Jump,
    Call,
    IndirectJump,
    IndirectCall,
    Return,
    Syscall,
    /// `iret`.
    FarReturn,
    /// `int n`, far jumps, calls and returns.
    FarOther,
    /// The last instruction faults, or does not decode.
    Fault,
    Ptwrite,
    /// Behind it the CPU goes through a stub that the image does not show.
    Site,
    Xbegin,
    Xend,
    Xabort,
    /// Nothing; the block got long.
    Fall,
}

pub const NOT_LINKED: u32 = u32::MAX;
const MAX_INSTRUCTIONS: u16 = 2000;
/// One of 1024.
const RARELY: u32 = 1 << 22;

#[derive(Clone, Copy, Debug)]
pub struct Block {
    pub start: u64,
    /// The instruction that ends it.
    pub last: u64,
    /// The address behind that one.
    pub next: u64,
    /// Of a direct branch.
    pub target: u64,
    /// A conditional branch is taken where a random word is below this.
    pub threshold: u32,
    /// Index of the block at `target` and at `next`.
    pub taken: u32,
    pub fall: u32,
    /// Instructions in it.
    pub count: u16,
    pub end: End,
}

pub struct Blocks {
    pub all: Vec<Block>,
    at: HashMap<u64, u32>,
    /// Start of a site whose patch the image does not show, and where the stub continues.
    sites: HashMap<u64, u64>,
    bias: f64,
    seed: u64,
    returning: Returning,
}

impl Blocks {
    /// `bias`: how often a conditional branch goes the way it likes best.
    pub fn new(bias: f64, seed: u64, sites: HashMap<u64, u64>) -> Self {
        Self { all: Vec::new(), at: HashMap::new(), sites, bias, seed, returning: Returning::default() }
    }

    pub fn find(&mut self, image: &Image, addr: u64) -> u32 {
        if let Some(&index) = self.at.get(&addr) {
            return index;
        }
        let mut block = self.read(image, addr);
        if block.end == End::Cond {
            self.avoid_doom(image, &mut block);
        }
        let index = self.all.len() as u32;
        self.all.push(block);
        self.at.insert(addr, index);
        index
    }

    #[inline]
    pub fn taken(&mut self, image: &Image, index: u32) -> u32 {
        let block = &self.all[index as usize];
        if block.taken != NOT_LINKED {
            return block.taken;
        }
        let to = self.find(image, block.target);
        self.all[index as usize].taken = to;
        to
    }

    #[inline]
    pub fn fall(&mut self, image: &Image, index: u32) -> u32 {
        let block = &self.all[index as usize];
        if block.fall != NOT_LINKED {
            return block.fall;
        }
        let to = self.find(image, block.next);
        self.all[index as usize].fall = to;
        to
    }

    /// Every address at which an instruction of the block begins.
    pub fn boundaries(&self, image: &Image, index: u32) -> Vec<u64> {
        let block = &self.all[index as usize];
        let mut out = Vec::with_capacity(usize::from(block.count) + 1);
        let mut decoder = Decoder::with_ip(64, image.at(block.start), block.start, DecoderOptions::NONE);
        let mut instruction = Instruction::default();
        while decoder.ip() < block.last && decoder.can_decode() {
            out.push(decoder.ip());
            decoder.decode_out(&mut instruction);
        }
        out.push(block.last);
        out
    }

    pub fn read(&self, image: &Image, start: u64) -> Block {
        let mut block = Block {
            start,
            last: start,
            next: start,
            target: 0,
            threshold: 0,
            taken: NOT_LINKED,
            fall: NOT_LINKED,
            count: 0,
            end: End::Fault,
        };
        let mut decoder = Decoder::with_ip(64, image.at(start), start, DecoderOptions::NONE);
        let mut instruction = Instruction::default();
        loop {
            block.last = decoder.ip();
            if let Some(&continues) = self.sites.get(&block.last) {
                block.next = continues;
                block.end = End::Site;
                return block;
            }
            if !decoder.can_decode() {
                return block;
            }
            decoder.decode_out(&mut instruction);
            if instruction.is_invalid() {
                return block;
            }
            block.count += 1;
            block.next = instruction.next_ip();
            if let Some(end) = end_of(&instruction) {
                block.end = end;
                if matches!(end, End::Cond | End::Jump | End::Call | End::Xbegin) {
                    block.target = instruction.near_branch_target();
                }
                block.threshold = self.threshold(block.last);
                return block;
            }
            if block.count >= MAX_INSTRUCTIONS {
                block.end = End::Fall;
                return block;
            }
        }
    }

    /// Error paths are taken now and then only, as in a program that works.
    fn avoid_doom(&mut self, image: &Image, block: &mut Block) {
        let mut returning = std::mem::take(&mut self.returning);
        let mut is_doomed = |addr| returning.is_doomed(self, image, &self.read(image, addr));
        match (is_doomed(block.target), is_doomed(block.next)) {
            (true, false) => block.threshold = RARELY,
            (false, true) => block.threshold = u32::MAX - RARELY,
            _ => {}
        }
        self.returning = returning;
    }

    fn threshold(&self, addr: u64) -> u32 {
        let likes_taken = mix(addr ^ self.seed) & 1 == 1;
        let part = if likes_taken { self.bias } else { 1.0 - self.bias };
        (part * f64::from(u32::MAX)) as u32
    }
}

fn end_of(instruction: &Instruction) -> Option<End> {
    let code = instruction.code();
    match instruction.flow_control() {
        FlowControl::Next if instruction.mnemonic() == Mnemonic::Ptwrite => Some(End::Ptwrite),
        FlowControl::Next if faults_in_user_mode(instruction) => Some(End::Fault),
        FlowControl::Next => None,
        FlowControl::ConditionalBranch => Some(End::Cond),
        FlowControl::UnconditionalBranch if code.is_jmp_short_or_near() => Some(End::Jump),
        FlowControl::UnconditionalBranch => Some(End::FarOther),
        FlowControl::IndirectBranch if code.is_jmp_near_indirect() => Some(End::IndirectJump),
        FlowControl::IndirectBranch => Some(End::FarOther),
        FlowControl::Call if code.is_call_near() => Some(End::Call),
        FlowControl::Call => Some(match instruction.mnemonic() {
            Mnemonic::Syscall | Mnemonic::Sysenter => End::Syscall,
            Mnemonic::Call => End::FarOther,
            // A monitor's calls: without a monitor they do not exist.
            _ => End::Fault,
        }),
        FlowControl::IndirectCall if code.is_call_near_indirect() => Some(End::IndirectCall),
        FlowControl::IndirectCall => Some(End::FarOther),
        FlowControl::Return => Some(match instruction.mnemonic() {
            Mnemonic::Ret => End::Return,
            Mnemonic::Iret | Mnemonic::Iretd | Mnemonic::Iretq => End::FarReturn,
            Mnemonic::Retf => End::FarOther,
            _ => End::Fault,
        }),
        FlowControl::Interrupt => Some(End::FarOther),
        FlowControl::Exception => Some(End::Fault),
        FlowControl::XbeginXabortXend => Some(match instruction.mnemonic() {
            Mnemonic::Xbegin => End::Xbegin,
            Mnemonic::Xend => End::Xend,
            _ => End::Xabort,
        }),
    }
}

/// What raises #GP or #UD at CPL 3.
fn faults_in_user_mode(instruction: &Instruction) -> bool {
    instruction.is_privileged()
        || matches!(instruction.mnemonic(), Mnemonic::Hlt | Mnemonic::Enclu | Mnemonic::In | Mnemonic::Out)
        || matches!(instruction.code(), Code::Cli | Code::Sti)
}
