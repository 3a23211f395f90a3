//! The code that the simulated CPU runs: executable segments of an ELF file at a base, and code of our own beside it.

use object::read::elf::{ElfFile64, ProgramHeader};
use object::{elf, LittleEndian, Object, ObjectKind};

/// Where a position-independent file is mapped.
const BASE: u64 = 0x7f12_3450_0000;
const PAGE: u64 = 4096;

/// Bytes at an address, as the CPU sees them, and where they come from.
pub struct Segment {
    pub addr: u64,
    pub bytes: Vec<u8>,
    pub file_offset: u64,
}

impl Segment {
    pub fn end(&self) -> u64 {
        self.addr + self.bytes.len() as u64
    }
}

pub struct Image {
    pub segments: Vec<Segment>,
    /// What is added to the file's virtual addresses.
    pub base: u64,
    /// The whole file, for a copy with patched bytes.
    pub file: Vec<u8>,
}

impl Image {
    pub fn read(path: &str) -> Result<Self, String> {
        let file = std::fs::read(path).map_err(|e| format!("{path}: {e}"))?;
        let parsed = ElfFile64::<LittleEndian>::parse(&*file).map_err(|e| format!("{path}: {e}"))?;
        let base = if parsed.kind() == ObjectKind::Executable { 0 } else { BASE };
        let e = LittleEndian;
        let mut segments = Vec::new();
        for header in parsed.elf_program_headers() {
            if header.p_type(e) != elf::PT_LOAD || header.p_flags(e).0 & elf::PF_X.0 == 0 {
                continue;
            }
            // A mapping begins and ends at a page, with whatever the file has there.
            let before = header.p_vaddr(e) % PAGE;
            let offset = header.p_offset(e) - before.min(header.p_offset(e));
            let end = (header.p_offset(e) + header.p_filesz(e)).next_multiple_of(PAGE).min(file.len() as u64);
            let bytes = file.get(offset as usize..end as usize).ok_or("a segment lies outside of the file")?;
            segments.push(Segment {
                addr: base + header.p_vaddr(e) - before,
                bytes: bytes.to_vec(),
                file_offset: offset,
            });
        }
        segments.sort_by_key(|s| s.addr);
        if segments.is_empty() {
            return Err(format!("{path}: no executable segment"));
        }
        Ok(Self { segments, base, file })
    }

    /// Bytes from `addr` on; none where nothing is mapped.
    pub fn at(&self, addr: u64) -> &[u8] {
        self.segments
            .iter()
            .find(|s| s.addr <= addr && addr < s.end())
            .map_or(&[], |s| &s.bytes[(addr - s.addr) as usize..])
    }

    /// Writes `bytes` into the code and into the file that backs it.
    pub fn patch(&mut self, addr: u64, bytes: &[u8]) {
        for segment in &mut self.segments {
            if segment.addr <= addr && addr + bytes.len() as u64 <= segment.end() {
                let at = (addr - segment.addr) as usize;
                segment.bytes[at..at + bytes.len()].copy_from_slice(bytes);
                let at = segment.file_offset as usize + at;
                self.file[at..at + bytes.len()].copy_from_slice(bytes);
                return;
            }
        }
    }

    /// Room for code of our own, near enough for direct jumps.
    pub fn free_addr(&self) -> u64 {
        let end = self.segments.iter().map(Segment::end).max().unwrap_or(0);
        // Well behind the data segments that a loader would put there.
        (end + (256 << 20)).next_multiple_of(1 << 20)
    }
}
