//! The tables of a trace: its branches, its hits.

use std::collections::HashMap;

use super::entry::{Entry, What};
use super::flowtext::kind_name;
use super::merged::Merged;
use super::reader::TraceReader;
use super::table::{Event, FieldType, TypeKind};
use super::text::printable;
use crate::arrow::{Batches, Column, Field, Ints, Texts, Words};
use crate::flow::BranchKind;

/// Rows of a batch.
const ROWS: usize = 1 << 16;

/// The columns that every row has.
#[derive(Default)]
struct Common {
    ns: Ints<u64>,
    pid: Ints<u32>,
    tid: Ints<u32>,
    cpu: Ints<u32>,
}

impl Common {
    fn fields() -> Vec<Field> {
        let ids = ["pid", "tid", "cpu"].map(|name| Field::new(name, "I", true));
        std::iter::once(Field::new("ns", "L", true)).chain(ids).collect()
    }

    fn push(&mut self, entry: &Entry<'_>) {
        self.ns.push(entry.ns);
        self.pid.push(entry.pid);
        self.tid.push(entry.tid);
        self.cpu.push(entry.cpu);
    }

    fn take(&mut self) -> Vec<Column> {
        vec![self.ns.take(), self.pid.take(), self.tid.take(), self.cpu.take()]
    }
}

const KINDS: [BranchKind; 13] = [
    BranchKind::Cond,
    BranchKind::Jump,
    BranchKind::IndirectJump,
    BranchKind::Call,
    BranchKind::IndirectCall,
    BranchKind::Return,
    BranchKind::Syscall,
    BranchKind::FarReturn,
    BranchKind::Interrupt,
    BranchKind::TraceStart,
    BranchKind::TraceEnd,
    BranchKind::TxAbort,
    BranchKind::FarOther,
];

/// A row for each taken branch.
pub struct BranchTable {
    merged: Merged,
    common: Common,
    from: Ints<u64>,
    to: Ints<u64>,
    kind: Ints<u8>,
}

impl BranchTable {
    #[must_use]
    pub fn new(merged: Merged) -> Self {
        Self { merged, common: Common::default(), from: Ints::default(), to: Ints::default(), kind: Ints::default() }
    }
}

impl Batches for BranchTable {
    fn fields(&self) -> Vec<Field> {
        let mut fields = Common::fields();
        fields.extend(["from_addr", "to_addr"].map(|name| Field::new(name, "L", true)));
        fields.push(Field::dictionary("kind"));
        fields
    }

    fn next_columns(&mut self) -> Result<Option<Vec<Column>>, String> {
        let mut rows = 0;
        while rows < ROWS {
            let Some(entry) = self.merged.next_entry().map_err(|e| e.to_string())? else { break };
            let What::Branch(branch) = entry.what else { continue };
            self.common.push(&entry);
            self.from.push(Some(branch.from).filter(|&addr| addr != 0));
            self.to.push(Some(branch.to).filter(|&addr| addr != 0));
            self.kind.push(Some(branch.kind as u8));
            rows += 1;
        }
        if rows == 0 {
            return Ok(None);
        }
        let mut columns = self.common.take();
        columns.extend([self.from.take(), self.to.take(), self.kind.take_dictionary(KINDS.map(kind_name))]);
        Ok(Some(columns))
    }
}

/// An argument's values, in the width of its type.
enum Values {
    I8(Ints<i8>),
    I16(Ints<i16>),
    I32(Ints<i32>),
    I64(Ints<i64>),
    U8(Ints<u8>),
    U16(Ints<u16>),
    U32(Ints<u32>),
    U64(Ints<u64>),
}

impl Values {
    fn new(ty: FieldType) -> Self {
        match (ty.kind, ty.bits) {
            (TypeKind::Signed, 8) => Self::I8(Ints::default()),
            (TypeKind::Signed, 16) => Self::I16(Ints::default()),
            (TypeKind::Signed, 32) => Self::I32(Ints::default()),
            (TypeKind::Signed, _) => Self::I64(Ints::default()),
            (_, 8) => Self::U8(Ints::default()),
            (_, 16) => Self::U16(Ints::default()),
            (_, 32) => Self::U32(Ints::default()),
            _ => Self::U64(Ints::default()),
        }
    }

    fn format(&self) -> &'static str {
        match self {
            Self::I8(_) => "c",
            Self::I16(_) => "s",
            Self::I32(_) => "i",
            Self::I64(_) => "l",
            Self::U8(_) => "C",
            Self::U16(_) => "S",
            Self::U32(_) => "I",
            Self::U64(_) => "L",
        }
    }

    /// The low bits of a word.
    fn push(&mut self, word: Option<u64>) {
        match self {
            Self::I8(ints) => ints.push(word.map(|word| word as i8)),
            Self::I16(ints) => ints.push(word.map(|word| word as i16)),
            Self::I32(ints) => ints.push(word.map(|word| word as i32)),
            Self::I64(ints) => ints.push(word.map(|word| word as i64)),
            Self::U8(ints) => ints.push(word.map(|word| word as u8)),
            Self::U16(ints) => ints.push(word.map(|word| word as u16)),
            Self::U32(ints) => ints.push(word.map(|word| word as u32)),
            Self::U64(ints) => ints.push(word),
        }
    }

    fn take(&mut self) -> Column {
        match self {
            Self::I8(ints) => ints.take(),
            Self::I16(ints) => ints.take(),
            Self::I32(ints) => ints.take(),
            Self::I64(ints) => ints.take(),
            Self::U8(ints) => ints.take(),
            Self::U16(ints) => ints.take(),
            Self::U32(ints) => ints.take(),
            Self::U64(ints) => ints.take(),
        }
    }
}

/// A row for each hit. An argument has the column of its name, or `group/name.argument` where events disagree on its
/// type or a column is called so; arguments that no session names are in `words`.
pub struct HitTable {
    reader: TraceReader,
    common: Common,
    comm: Texts,
    event: Texts,
    ip: Ints<u64>,
    args: Vec<(String, Values)>,
    words: Words,
    /// The columns of the arguments of each event.
    by_event: HashMap<u16, Vec<usize>>,
}

const FIXED: [&str; 8] = ["ns", "pid", "tid", "cpu", "comm", "event", "ip", "words"];

impl HitTable {
    /// `events`: those of the reader's table.
    #[must_use]
    pub fn new(reader: TraceReader, events: &[Event]) -> Self {
        let mut types: HashMap<&str, Option<FieldType>> = HashMap::new();
        for field in events.iter().flat_map(|event| &event.fields) {
            let ty = Some(column_type(field.ty)).filter(|_| !FIXED.contains(&field.name.as_str()));
            types.entry(&field.name).and_modify(|same| *same = same.filter(|&same| Some(same) == ty)).or_insert(ty);
        }
        let mut args: Vec<(String, Values)> = Vec::new();
        let mut by_name: HashMap<String, usize> = HashMap::new();
        let mut by_event = HashMap::new();
        for event in events {
            let columns = event.fields.iter().map(|field| {
                let agreed = types.get(field.name.as_str()).is_some_and(Option::is_some);
                let name = if agreed { field.name.clone() } else { format!("{}.{}", event.name, field.name) };
                *by_name.entry(name.clone()).or_insert_with(|| {
                    args.push((name, Values::new(field.ty)));
                    args.len() - 1
                })
            });
            by_event.insert(event.id, columns.collect());
        }
        Self {
            reader,
            common: Common::default(),
            comm: Texts::default(),
            event: Texts::default(),
            ip: Ints::default(),
            args,
            words: Words::default(),
            by_event,
        }
    }
}

/// Hexadecimal or not is no matter of a column.
fn column_type(ty: FieldType) -> FieldType {
    match ty.kind {
        TypeKind::Hex => FieldType { kind: TypeKind::Unsigned, ..ty },
        _ => ty,
    }
}

impl Batches for HitTable {
    fn fields(&self) -> Vec<Field> {
        let mut fields = Common::fields();
        fields.extend([Field::new("comm", "u", false), Field::new("event", "u", false), Field::new("ip", "L", false)]);
        fields.extend(self.args.iter().map(|(name, values)| Field::new(name, values.format(), true)));
        fields.push(Field::words("words"));
        fields
    }

    fn next_columns(&mut self) -> Result<Option<Vec<Column>>, String> {
        let mut rows = 0;
        let mut row: Vec<Option<u64>> = vec![None; self.args.len()];
        while rows < ROWS {
            let Some(entry) = self.reader.next_entry().map_err(|e| e.to_string())? else { break };
            let What::Hit { event, ip, args } = entry.what else { continue };
            self.common.push(&entry);
            self.comm.push(&printable(entry.comm));
            self.event.push(&event.name);
            self.ip.push(Some(ip));
            row.fill(None);
            let columns = self.by_event.get(&event.id).map(Vec::as_slice).unwrap_or_default();
            for (&column, &word) in columns.iter().zip(args) {
                if let Some(value) = row.get_mut(column) {
                    *value = Some(word);
                }
            }
            self.args.iter_mut().zip(&row).for_each(|((_, values), &word)| values.push(word));
            self.words.push(args.get(columns.len()..).unwrap_or_default());
            rows += 1;
        }
        if rows == 0 {
            return Ok(None);
        }
        let mut columns = self.common.take();
        columns.extend([self.comm.take(), self.event.take(), self.ip.take()]);
        columns.extend(self.args.iter_mut().map(|(_, values)| values.take()));
        columns.push(self.words.take());
        Ok(Some(columns))
    }
}
