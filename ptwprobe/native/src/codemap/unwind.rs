//! Function bounds and landing pads from the unwind tables: `.eh_frame` (LSB core, "Exception Frames") and the
//! language-specific data areas that it points to (Itanium C++ ABI, "Exception Handling Tables").

use gimli::{BaseAddresses, CieOrFde, DwEhPe, EhFrame, LittleEndian, Pointer, Reader, UnwindSection};

use super::elf::{ElfError, Image};

#[derive(Debug, Default)]
pub struct Unwind {
    /// [start, end) of every frame description that lies in code.
    pub functions: Vec<(u64, u64)>,
    pub landing_pads: Vec<u64>,
    /// Functions whose data area could not be read: their landing pads are not known.
    pub opaque: Vec<(u64, u64)>,
}

/// More than any program has; many frame descriptions may name one hostile data area.
const MAX_CALL_SITES: u32 = 1 << 24;

pub fn read(image: &Image) -> Result<Unwind, ElfError> {
    let mut out = Unwind::default();
    let Some((vaddr, size)) = image.eh_frame else {
        return Ok(out);
    };
    let bytes = image.at(vaddr, usize::try_from(size).unwrap_or(usize::MAX));
    let bad = |e: gimli::Error| ElfError::bad(format!(".eh_frame: {e}"), None);
    let mut section = EhFrame::new(bytes, LittleEndian);
    section.set_address_size(8);
    let bases = BaseAddresses::default().set_eh_frame(vaddr);
    let mut entries = section.entries(&bases);
    let mut budget = MAX_CALL_SITES;
    while let Some(entry) = entries.next().map_err(bad)? {
        let CieOrFde::Fde(partial) = entry else {
            continue;
        };
        let fde = partial.parse(EhFrame::cie_from_offset).map_err(bad)?;
        let (start, end) = (fde.initial_address(), fde.initial_address().wrapping_add(fde.len()));
        if end <= start || !image.is_code(start) {
            continue;
        }
        out.functions.push((start, end));
        let area = match fde.lsda() {
            None => continue,
            Some(Pointer::Direct(area)) => Some(area),
            Some(Pointer::Indirect(_)) => None,
        };
        let known = area.and_then(|area| landing_pads(image, area, start, &mut out.landing_pads, &mut budget));
        if known.is_none() {
            out.opaque.push((start, end));
        }
    }
    Ok(out)
}

/// Adds the landing pads of the data area at `area`; None if it cannot be read.
fn landing_pads(image: &Image, area: u64, function: u64, pads: &mut Vec<u64>, budget: &mut u32) -> Option<()> {
    let mut data = Cursor { at: area, bytes: gimli::EndianSlice::new(image.at(area, usize::MAX), LittleEndian) };
    let base_encoding = data.byte()?;
    let base = match base_encoding {
        OMIT => function,
        encoding => data.encoded(encoding)?,
    };
    if data.byte()? != OMIT {
        data.uleb()?;
    }
    let encoding = data.byte()?;
    let length = data.uleb()?;
    let end = data.at.checked_add(length)?;
    while data.at < end {
        *budget = budget.checked_sub(1)?;
        data.encoded(encoding)?;
        data.encoded(encoding)?;
        let pad = data.encoded(encoding)?;
        data.uleb()?;
        if pad != 0 {
            pads.push(base.wrapping_add(pad));
        }
    }
    Some(())
}

const OMIT: u8 = 0xff;

/// Reads forward and knows its address.
struct Cursor<'a> {
    at: u64,
    bytes: gimli::EndianSlice<'a, LittleEndian>,
}

impl Cursor<'_> {
    fn step<T>(&mut self, read: impl FnOnce(&mut Self) -> gimli::Result<T>) -> Option<T> {
        let before = self.bytes.len();
        let value = read(self).ok()?;
        self.at += (before - self.bytes.len()) as u64;
        Some(value)
    }

    fn byte(&mut self) -> Option<u8> {
        self.step(|c| c.bytes.read_u8())
    }

    fn uleb(&mut self) -> Option<u64> {
        self.step(|c| c.bytes.read_uleb128())
    }

    fn encoded(&mut self, encoding: u8) -> Option<u64> {
        let encoding = DwEhPe(encoding);
        let place = self.at;
        let value = self.step(|c| match encoding.format() {
            gimli::DW_EH_PE_absptr | gimli::DW_EH_PE_udata8 | gimli::DW_EH_PE_sdata8 => c.bytes.read_u64(),
            gimli::DW_EH_PE_uleb128 => c.bytes.read_uleb128(),
            gimli::DW_EH_PE_sleb128 => c.bytes.read_sleb128().map(|v| v as u64),
            gimli::DW_EH_PE_udata2 => c.bytes.read_u16().map(u64::from),
            gimli::DW_EH_PE_sdata2 => c.bytes.read_i16().map(|v| v as u64),
            gimli::DW_EH_PE_udata4 => c.bytes.read_u32().map(u64::from),
            gimli::DW_EH_PE_sdata4 => c.bytes.read_i32().map(|v| v as u64),
            _ => Err(gimli::Error::UnknownPointerEncoding(encoding)),
        })?;
        match encoding.application() {
            gimli::DW_EH_PE_absptr if !encoding.is_indirect() => Some(value),
            gimli::DW_EH_PE_pcrel if !encoding.is_indirect() => Some(place.wrapping_add(value)),
            _ => None,
        }
    }
}
