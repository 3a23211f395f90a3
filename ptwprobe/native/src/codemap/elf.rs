//! What the code map needs of an ELF file: its loaded bytes, where code is, names, and pointers to code in its data.

use std::fs::File;

use object::elf;
use object::read::elf::{ElfFile64, ProgramHeader};
use object::{Architecture, LittleEndian, Object, ObjectKind, ObjectSection, ObjectSymbol, ReadCache, ReadRef};

/// Why a file has no code map. `offset` is a file offset where one is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ElfError {
    pub kind: &'static str,
    pub message: String,
    pub offset: Option<u64>,
}

impl ElfError {
    pub fn bad(message: impl Into<String>, offset: Option<u64>) -> Self {
        Self { kind: "bad-elf", message: message.into(), offset }
    }
}

impl From<object::read::Error> for ElfError {
    fn from(error: object::read::Error) -> Self {
        Self::bad(error.to_string(), None)
    }
}

/// A run of bytes at a virtual address.
#[derive(Debug)]
pub struct Run {
    pub vaddr: u64,
    pub bytes: Vec<u8>,
}

impl Run {
    pub fn end(&self) -> u64 {
        self.vaddr + self.bytes.len() as u64
    }
}

/// A file as it is loaded, without relocation.
#[derive(Debug)]
pub struct Image {
    /// The bytes of every PT_LOAD, by address.
    pub segments: Vec<Run>,
    /// Where code is: [start, end) of executable sections, or of executable segments if there are no sections.
    pub code: Vec<(u64, u64)>,
    pub fixed_address: bool,
    pub entry: u64,
    /// (vaddr, size) of every named place in code; size 0 if not known.
    pub symbols: Vec<(u64, u64)>,
    /// Values that relocations put into memory and that lie in code.
    pub relocated_pointers: Vec<u64>,
    pub eh_frame: Option<(u64, u64)>,
}

/// More than any process has; bounds what a hostile header can make us read.
const MAX_SEGMENTS: usize = 4096;

impl Image {
    pub fn read(path: &str) -> Result<Self, ElfError> {
        let io = |e: std::io::Error| ElfError { kind: "io", message: format!("{path}: {e}"), offset: None };
        let file = File::open(path).map_err(io)?;
        let size = file.metadata().map_err(io)?.len();
        let cache = ReadCache::new(file);
        let parsed = ElfFile64::<LittleEndian, _>::parse(&cache)?;
        if parsed.architecture() != Architecture::X86_64 {
            return Err(ElfError::bad("not an x86-64 file", Some(18)));
        }
        let mut image = Self {
            segments: Vec::new(),
            code: Vec::new(),
            fixed_address: parsed.kind() == ObjectKind::Executable,
            entry: parsed.entry(),
            symbols: Vec::new(),
            relocated_pointers: Vec::new(),
            eh_frame: None,
        };
        let executable = image.load_segments(&parsed, &cache, size)?;
        image.find_code(&parsed, &executable)?;
        image.find_symbols(&parsed);
        image.find_relocated_pointers(&parsed)?;
        image.find_eh_frame(&parsed)?;
        Ok(image)
    }

    /// Up to `length` bytes at `vaddr`; empty if nothing is loaded there.
    pub fn at(&self, vaddr: u64, length: usize) -> &[u8] {
        let after = self.segments.partition_point(|run| run.vaddr <= vaddr);
        let Some(run) = after.checked_sub(1).and_then(|i| self.segments.get(i)) else {
            return &[];
        };
        let start = usize::try_from(vaddr - run.vaddr).unwrap_or(usize::MAX);
        let end = start.saturating_add(length).min(run.bytes.len());
        run.bytes.get(start..end).unwrap_or_default()
    }

    pub fn is_code(&self, vaddr: u64) -> bool {
        let after = self.code.partition_point(|range| range.0 <= vaddr);
        after.checked_sub(1).and_then(|i| self.code.get(i)).is_some_and(|range| vaddr < range.1)
    }

    /// Reads every PT_LOAD; returns [start, end) of the executable ones.
    fn load_segments<'d, R: ReadRef<'d>>(
        &mut self,
        file: &ElfFile64<'d, LittleEndian, R>,
        data: R,
        file_size: u64,
    ) -> Result<Vec<(u64, u64)>, ElfError> {
        let e = LittleEndian;
        let headers = file.elf_program_headers();
        if headers.len() > MAX_SEGMENTS {
            return Err(ElfError::bad("too many program headers", Some(56)));
        }
        let mut executable = Vec::new();
        let mut total = 0u64;
        for header in headers.iter().filter(|h| h.p_type(e) == elf::PT_LOAD) {
            let (offset, vaddr, length) = (header.p_offset(e), header.p_vaddr(e), header.p_filesz(e));
            total = total.saturating_add(length);
            if total > file_size.saturating_mul(2) || vaddr.checked_add(length).is_none() {
                return Err(ElfError::bad("segments are larger than the file", Some(offset)));
            }
            let bytes = data
                .read_bytes_at(offset, length)
                .map_err(|()| ElfError::bad("a segment lies outside of the file", Some(offset)))?;
            if header.p_flags(e).0 & elf::PF_X.0 != 0 {
                executable.push((vaddr, vaddr + length));
            }
            self.segments.push(Run { vaddr, bytes: bytes.to_vec() });
        }
        self.segments.sort_by_key(|run| run.vaddr);
        if self.segments.windows(2).any(|pair| matches!(pair, [a, b] if a.end() > b.vaddr)) {
            return Err(ElfError::bad("segments overlap", None));
        }
        Ok(executable)
    }

    fn find_code<'d, R: ReadRef<'d>>(
        &mut self,
        file: &ElfFile64<'d, LittleEndian, R>,
        executable: &[(u64, u64)],
    ) -> Result<(), ElfError> {
        let inside = |start: u64, end: u64| executable.iter().any(|s| s.0 <= start && end <= s.1);
        for section in file.sections() {
            let object::SectionFlags::Elf { sh_flags, .. } = section.flags() else {
                continue;
            };
            let wanted = elf::SHF_EXECINSTR.0 | elf::SHF_ALLOC.0;
            let (start, end) = (section.address(), section.address().saturating_add(section.size()));
            if sh_flags.0 & wanted == wanted && start < end && inside(start, end) {
                self.code.push((start, end));
            }
        }
        if self.code.is_empty() {
            self.code.extend_from_slice(executable);
        }
        self.code.sort_unstable();
        if self.code.windows(2).any(|pair| matches!(pair, [a, b] if a.1 > b.0)) {
            return Err(ElfError::bad("executable sections overlap", None));
        }
        Ok(())
    }

    fn find_symbols<'d, R: ReadRef<'d>>(&mut self, file: &ElfFile64<'d, LittleEndian, R>) {
        for symbol in file.symbols().chain(file.dynamic_symbols()) {
            let named = symbol.is_definition() || symbol.kind() == object::SymbolKind::Label;
            let section = symbol.kind() == object::SymbolKind::Section;
            if !section && (named || symbol.address() != 0) && self.is_code(symbol.address()) {
                self.symbols.push((symbol.address(), symbol.size()));
            }
        }
    }

    fn find_relocated_pointers<'d, R: ReadRef<'d>>(
        &mut self,
        file: &ElfFile64<'d, LittleEndian, R>,
    ) -> Result<(), ElfError> {
        let mut values = Vec::new();
        self.dynamic_values(file, &mut values)?;
        values.retain(|v| self.is_code(*v));
        self.relocated_pointers = values;
        Ok(())
    }

    /// Adds what relocations put into memory, going by the dynamic table: a file need not have sections.
    fn dynamic_values<'d, R: ReadRef<'d>>(
        &self,
        file: &ElfFile64<'d, LittleEndian, R>,
        values: &mut Vec<u64>,
    ) -> Result<(), ElfError> {
        let dynamic = file.elf_dynamic_table()?;
        let value = |tag| dynamic.iter().find(|entry| entry.tag == tag).map_or(0, |entry| entry.val);
        let table = |start, size| self.at(value(start), usize::try_from(value(size)).unwrap_or(0));
        let symbols = value(elf::DT_SYMTAB);
        for table in [table(elf::DT_RELA, elf::DT_RELASZ), table(elf::DT_JMPREL, elf::DT_PLTRELSZ)] {
            for entry in table.chunks_exact(24) {
                let field = |at: usize| entry.get(at..at + 8).and_then(word).unwrap_or(0);
                // What stands there may count, too: a lazily bound slot points to its PLT entry before it is bound.
                values.extend(word(self.at(field(0), 8)));
                let symbol = field(8) >> 32;
                let base = if symbol == 0 { None } else { word(self.at(symbols.wrapping_add(symbol * 24 + 8), 8)) };
                values.push(base.unwrap_or(0).wrapping_add(field(16)));
            }
        }
        self.packed_relocations(table(elf::DT_RELR, elf::DT_RELRSZ), values)
    }

    /// DT_RELR: a word is the address of a place, or (bit 0 set) a bitmap of the 63 places after the last ones. The
    /// value is what the file has there (System V gABI, "Relative Relocation Table").
    fn packed_relocations(&self, table: &[u8], values: &mut Vec<u64>) -> Result<(), ElfError> {
        let mut place = 0u64;
        // Places differ, so that a real file has at most one for every word.
        let limit = values.len() + self.segments.iter().map(|run| run.bytes.len() / 8).sum::<usize>();
        for entry in table.chunks_exact(8).filter_map(word) {
            if entry & 1 == 0 {
                values.extend(word(self.at(entry, 8)));
                place = entry.wrapping_add(8);
            } else {
                let set = (0..63).filter(|bit| entry >> (bit + 1) & 1 != 0);
                values.extend(set.filter_map(|bit| word(self.at(place.wrapping_add(8 * bit), 8))));
                place = place.wrapping_add(8 * 63);
            }
            if values.len() > limit {
                return Err(ElfError::bad("more packed relocations than words", None));
            }
        }
        Ok(())
    }

    fn find_eh_frame<'d, R: ReadRef<'d>>(&mut self, file: &ElfFile64<'d, LittleEndian, R>) -> Result<(), ElfError> {
        if let Some(section) = file.section_by_name(".eh_frame") {
            self.eh_frame = Some((section.address(), section.size()));
            return Ok(());
        }
        let e = LittleEndian;
        let header = file.elf_program_headers().iter().find(|h| h.p_type(e) == elf::PT_GNU_EH_FRAME);
        let Some(header) = header else { return Ok(()) };
        let vaddr = header.p_vaddr(e);
        let bytes = self.at(vaddr, usize::try_from(header.p_memsz(e)).unwrap_or(0));
        let bases = gimli::BaseAddresses::default().set_eh_frame_hdr(vaddr);
        let parsed = gimli::EhFrameHdr::new(bytes, gimli::LittleEndian)
            .parse(&bases, 8)
            .map_err(|error| ElfError::bad(format!(".eh_frame_hdr: {error}"), Some(header.p_offset(e))))?;
        if let gimli::Pointer::Direct(start) = parsed.eh_frame_ptr() {
            // Without sections its length is not told: it ends with a terminator, or with the segment.
            self.eh_frame = Some((start, self.at(start, usize::MAX).len() as u64));
        }
        Ok(())
    }
}

fn word(bytes: &[u8]) -> Option<u64> {
    bytes.try_into().map(u64::from_le_bytes).ok()
}
