//! Names of functions at addresses of the recorded processes, from the symbol tables of their files.

use std::collections::HashMap;
use std::fs::File;
use std::sync::Arc;

use object::read::elf::ElfFile64;
use object::{LittleEndian, Object, ObjectSegment, ObjectSymbol, ReadCache, ReadRef, SymbolKind};

use super::text::{push_hex, push_name};
use crate::demangle::demangle;
use crate::image::{Content, Place, Timeline};

/// Symbols of one file, and names that are kept ready; beyond the latter all are made anew.
const MAX_SYMBOLS: usize = 1 << 22;
const MAX_READY: usize = 1 << 19;

/// See the module.
pub struct Symbols {
    timeline: Arc<Timeline>,
    files: HashMap<u32, Table>,
    /// By space and address.
    ready: HashMap<(u32, u64), Box<[u8]>>,
}

impl Symbols {
    #[must_use]
    pub fn new(timeline: Arc<Timeline>) -> Self {
        Self { timeline, files: HashMap::new(), ready: HashMap::new() }
    }

    /// `function+0x12`, printable; empty where it is not known.
    pub fn at(&mut self, space: u32, ip: u64) -> &[u8] {
        if self.ready.len() >= MAX_READY {
            self.ready.clear();
        }
        let (timeline, files) = (&self.timeline, &mut self.files);
        self.ready.entry((space, ip)).or_insert_with(|| name(timeline, files, space, ip).unwrap_or_default())
    }
}

fn name(timeline: &Timeline, files: &mut HashMap<u32, Table>, space: u32, ip: u64) -> Option<Box<[u8]>> {
    let Place { file, offset } = timeline.place(space, ip)?;
    let table = files.entry(file).or_insert_with(|| timeline.content(file).map(Table::read).unwrap_or_default());
    let (name, inside) = table.at(offset)?;
    let mut out = Vec::new();
    match demangle(name) {
        Some(name) => push_name(&mut out, name.plain.as_bytes()),
        None => push_name(&mut out, name.as_bytes()),
    }
    out.extend_from_slice(b"+0x");
    push_hex(&mut out, inside);
    Some(out.into_boxed_slice())
}

/// The functions of one file.
#[derive(Debug, Default)]
struct Table {
    /// (offset in the file, bytes, address) of what is loaded, by offset.
    segments: Vec<(u64, u64, u64)>,
    /// By address.
    symbols: Vec<Symbol>,
    names: String,
}

#[derive(Clone, Copy, Debug)]
struct Symbol {
    addr: u64,
    /// 0: up to the next.
    size: u64,
    /// Where in the names.
    name: (u32, u32),
    local: bool,
}

impl Table {
    fn read(content: &Content) -> Self {
        let read = match content {
            Content::File(file) => file.try_clone().ok().and_then(|file: File| Self::parse(&ReadCache::new(file))),
            Content::Bytes(bytes) => Self::parse(bytes.as_slice()),
        };
        read.unwrap_or_default()
    }

    fn parse<'d, R: ReadRef<'d>>(data: R) -> Option<Self> {
        let elf = ElfFile64::<LittleEndian, R>::parse(data).ok()?;
        let mut table = Self::default();
        for segment in elf.segments() {
            let (offset, size) = segment.file_range();
            table.segments.push((offset, size, segment.address()));
        }
        table.segments.sort_unstable();
        for symbol in elf.symbols().chain(elf.dynamic_symbols()) {
            let code = matches!(symbol.kind(), SymbolKind::Text | SymbolKind::Unknown | SymbolKind::Label);
            if !symbol.is_definition() || !code || table.symbols.len() >= MAX_SYMBOLS {
                continue;
            }
            let Some(name) = symbol.name().ok().filter(|name| !name.is_empty()) else { continue };
            let (Ok(start), Ok(len)) = (u32::try_from(table.names.len()), u32::try_from(name.len())) else { break };
            table.names.push_str(name);
            let (addr, size, local) = (symbol.address(), symbol.size(), symbol.is_local());
            table.symbols.push(Symbol { addr, size, name: (start, len), local });
        }
        // Of several at one address: one that tells its size, then one that others see, then the shorter name.
        table.symbols.sort_by_key(|s| (s.addr, s.size == 0, s.local, s.name.1, s.name.0));
        table.symbols.dedup_by_key(|s| s.addr);
        Some(table)
    }

    /// The function at `offset` of the file, and how far inside it that is.
    fn at(&self, offset: u64) -> Option<(&str, u64)> {
        let behind = self.segments.partition_point(|&(start, ..)| start <= offset);
        let &(start, size, addr) = self.segments.get(behind.checked_sub(1)?)?;
        let inside = (offset - start < size).then_some(offset - start)?;
        let addr = addr.checked_add(inside)?;
        let behind = self.symbols.partition_point(|symbol| symbol.addr <= addr);
        let symbol = self.symbols.get(behind.checked_sub(1)?)?;
        let inside = addr - symbol.addr;
        if symbol.size != 0 && inside >= symbol.size {
            return None;
        }
        let start = symbol.name.0 as usize;
        Some((self.names.get(start..start + symbol.name.1 as usize)?, inside))
    }
}
