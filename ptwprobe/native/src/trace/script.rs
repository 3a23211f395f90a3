//! The text formats of `script`: one line per entry. The formats are a contract with other tools.

use std::fmt::Display;
use std::io::Write as _;

use super::entry::{Entry, Totals, What};
use super::filter::Filter;
use super::flowtext::{csv_branch, csv_others, json_branch, json_stack, text_branch, text_stack, CSV_COLUMNS};
use super::table::{Event, Field, FieldType, TypeKind};
use super::text::{push_csv_name, push_hex, push_i128, push_json_name, push_name, push_right, push_seconds, push_u64};
use super::view::View;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// perf's layout.
    Text,
    JsonLines,
    Csv,
}

impl Format {
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "text" => Some(Self::Text),
            "jsonl" => Some(Self::JsonLines),
            "csv" => Some(Self::Csv),
            _ => None,
        }
    }
}

/// Integers up to this size are exact in every JSON reader; others are strings.
const MAX_JSON_INTEGER: u128 = 1 << 53;

const CSV_HEAD: &[u8] = b"type,time,pid,tid,cpu,comm,event,ip,args,count,message";

/// Lines of the entries that pass the filter.
pub struct Script {
    format: Format,
    filter: Filter,
    view: Option<View>,
    out: Vec<u8>,
    totals: Totals,
}

impl Script {
    /// `view`: how control flow is shown, of entries that have it.
    #[must_use]
    pub fn new(format: Format, filter: Filter, view: Option<View>) -> Self {
        let mut out = Vec::new();
        if format == Format::Csv {
            out.extend_from_slice(CSV_HEAD);
            out.extend_from_slice(view.as_ref().map_or(b"", |_| CSV_COLUMNS));
            out.push(b'\n');
        }
        Self { format, filter, view, out, totals: Totals::default() }
    }

    /// Of what was written.
    #[must_use]
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// Lines since the last [`Script::clear`].
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.out
    }

    pub fn clear(&mut self) {
        self.out.clear();
    }

    pub fn write(&mut self, entry: &Entry<'_>) {
        let depth = self.view.as_mut().map_or(0, |view| view.follow(entry));
        let shown = self.view.as_ref().is_none_or(|view| view.show.passes(&entry.what));
        if !shown || !self.filter.passes(entry) {
            return;
        }
        self.totals.add(&entry.what);
        let (out, view) = (&mut self.out, self.view.as_mut());
        match self.format {
            Format::Text => text_line(out, entry, depth, view),
            Format::JsonLines => json_line(out, entry, view),
            Format::Csv => csv_line(out, entry, view),
        }
        out.push(b'\n');
    }
}

/// `comm tid [cpu] sec.nsec: what`; a dash for what is not known.
fn text_line(out: &mut Vec<u8>, entry: &Entry<'_>, depth: usize, view: Option<&mut View>) {
    push_right(out, 16, b' ', |out| match entry.tid {
        Some(tid) if entry.comm.is_empty() => {
            out.push(b':');
            push_u64(out, tid.into());
        }
        Some(_) => push_name(out, entry.comm),
        None => out.push(b'-'),
    });
    out.push(b' ');
    push_right(out, 7, b' ', |out| match entry.tid {
        Some(tid) => push_u64(out, tid.into()),
        None => out.push(b'-'),
    });
    out.extend_from_slice(b" [");
    match entry.cpu {
        Some(cpu) => push_right(out, 3, b'0', |out| push_u64(out, cpu.into())),
        None => out.extend_from_slice(b"---"),
    }
    out.extend_from_slice(b"] ");
    push_right(out, 15, b' ', |out| match entry.ns {
        Some(ns) => push_seconds(out, ns),
        None => out.push(b'-'),
    });
    out.extend_from_slice(b": ");
    match entry.what {
        What::Hit { event, ip, args } => {
            push_name(out, event.name.as_bytes());
            out.extend_from_slice(b": (");
            push_hex(out, ip);
            out.push(b')');
            each_arg(event, args, |name, ty, word| {
                out.push(b' ');
                name.push(out, push_name);
                out.push(b'=');
                push_value(out, ty, word);
            });
            if let Some(view) = view.filter(|view| view.stack) {
                text_stack(out, ip, entry.tid, entry.space, view);
            }
        }
        What::Stray { ip, value } => {
            out.extend_from_slice(b"ptwrite: (");
            push_address(out, ip);
            out.extend_from_slice(b") 0x");
            push_hex(out, value);
        }
        What::Lost { count } => push_count(out, b"lost: ", count),
        What::Torn { count } => push_count(out, b"torn: ", count),
        What::Branch(branch) => {
            if let Some(view) = view {
                text_branch(out, &branch, entry.space, depth, view);
            }
        }
        What::Event { packet, ip } => {
            out.extend_from_slice(b"event: (");
            push_address(out, ip);
            out.extend_from_slice(b") ");
            push_display(out, packet);
        }
        What::Error { offset, message, .. } => {
            out.extend_from_slice(b"error: ");
            push_error(out, offset, message);
        }
        What::Note { offset, message } => {
            out.extend_from_slice(b"note: ");
            push_error(out, Some(offset), message);
        }
    }
}

fn push_display(out: &mut Vec<u8>, what: impl Display) {
    // Writing to a Vec does not fail.
    let _ = write!(out, "{what}");
}

fn push_address(out: &mut Vec<u8>, ip: Option<u64>) {
    match ip {
        Some(ip) => push_hex(out, ip),
        None => out.push(b'-'),
    }
}

fn push_count(out: &mut Vec<u8>, what: &[u8], count: u64) {
    out.extend_from_slice(what);
    push_u64(out, count);
    out.extend_from_slice(if count == 1 { b" hit" } else { b" hits" });
}

fn push_error(out: &mut Vec<u8>, offset: Option<u64>, message: &str) {
    push_name(out, message.as_bytes());
    if let Some(offset) = offset {
        out.extend_from_slice(b" (byte ");
        push_u64(out, offset);
        out.extend_from_slice(b" of the file)");
    }
}

/// In text and CSV: hex for `x` types, decimal else.
fn push_value(out: &mut Vec<u8>, ty: FieldType, word: u64) {
    let value = ty.value(word);
    if ty.kind == TypeKind::Hex {
        out.extend_from_slice(b"0x");
        push_hex(out, value as u64);
    } else {
        push_i128(out, value);
    }
}

/// The name of an argument; `arg1` ... where the session has none.
enum ArgName<'a> {
    Known(&'a str),
    Number(usize),
}

impl ArgName<'_> {
    fn push(&self, out: &mut Vec<u8>, push: impl FnOnce(&mut Vec<u8>, &[u8])) {
        match self {
            Self::Known(name) => push(out, name.as_bytes()),
            Self::Number(number) => push(out, format!("arg{number}").as_bytes()),
        }
    }
}

fn each_arg(event: &Event, args: &[u64], mut take: impl FnMut(ArgName<'_>, FieldType, u64)) {
    for (index, &word) in args.iter().enumerate() {
        match event.fields.get(index) {
            Some(Field { name, ty }) => take(ArgName::Known(name), *ty, word),
            None => take(ArgName::Number(index + 1), FieldType::X64, word),
        }
    }
}

fn json_line(out: &mut Vec<u8>, entry: &Entry<'_>, view: Option<&mut View>) {
    out.extend_from_slice(match entry.what {
        What::Hit { .. } => b"{\"type\":\"hit\"",
        What::Stray { .. } => b"{\"type\":\"ptwrite\"",
        What::Lost { .. } | What::Torn { .. } => b"{\"type\":\"lost\"",
        What::Branch(_) => b"{\"type\":\"branch\"",
        What::Event { .. } => b"{\"type\":\"event\"",
        What::Error { .. } => b"{\"type\":\"error\"",
        What::Note { .. } => b"{\"type\":\"note\"",
    });
    json_number(out, "time", entry.ns);
    if !matches!(entry.what, What::Lost { .. } | What::Torn { .. }) {
        json_number(out, "pid", entry.pid.map(u64::from));
        json_number(out, "tid", entry.tid.map(u64::from));
    }
    json_number(out, "cpu", entry.cpu.map(u64::from));
    if matches!(entry.what, What::Hit { .. } | What::Stray { .. } | What::Branch(_) | What::Event { .. }) {
        out.extend_from_slice(b",\"comm\":");
        push_json_name(out, entry.comm);
    }
    match entry.what {
        What::Hit { event, ip, args } => {
            out.extend_from_slice(b",\"event\":");
            push_json_name(out, event.name.as_bytes());
            json_addr(out, "ip", Some(ip));
            out.extend_from_slice(b",\"args\":{");
            let mut first = true;
            each_arg(event, args, |name, ty, word| {
                if !std::mem::take(&mut first) {
                    out.push(b',');
                }
                name.push(out, push_json_name);
                out.push(b':');
                json_integer(out, ty.value(word));
            });
            out.push(b'}');
            if let Some(view) = view.filter(|view| view.stack) {
                json_stack(out, ip, entry.tid, entry.space, view);
            }
        }
        What::Stray { ip, value } => {
            json_addr(out, "ip", ip);
            json_number(out, "value", Some(value));
        }
        What::Lost { count } => json_lost(out, "lost", count),
        What::Torn { count } => json_lost(out, "torn", count),
        What::Branch(branch) => {
            if let Some(view) = view {
                json_branch(out, &branch, entry.space, view);
            }
        }
        What::Event { packet, ip } => {
            json_addr(out, "ip", ip);
            json_key(out, "packet");
            push_json_name(out, packet.to_string().as_bytes());
        }
        What::Note { offset, message } => {
            json_number(out, "offset", Some(offset));
            out.extend_from_slice(b",\"message\":");
            push_json_name(out, message.as_bytes());
        }
        What::Error { offset, message, .. } => {
            json_number(out, "offset", offset);
            out.extend_from_slice(b",\"message\":");
            push_json_name(out, message.as_bytes());
        }
    }
    out.push(b'}');
}

pub(super) fn json_key(out: &mut Vec<u8>, key: &str) {
    out.extend_from_slice(b",\"");
    out.extend_from_slice(key.as_bytes());
    out.extend_from_slice(b"\":");
}

fn json_number(out: &mut Vec<u8>, key: &str, value: Option<u64>) {
    json_key(out, key);
    match value {
        Some(value) => json_integer(out, value.into()),
        None => out.extend_from_slice(b"null"),
    }
}

fn json_integer(out: &mut Vec<u8>, value: i128) {
    let quote = value.unsigned_abs() > MAX_JSON_INTEGER;
    if quote {
        out.push(b'"');
    }
    push_i128(out, value);
    if quote {
        out.push(b'"');
    }
}

pub(super) fn json_addr(out: &mut Vec<u8>, key: &str, addr: Option<u64>) {
    json_key(out, key);
    match addr {
        Some(addr) => {
            out.extend_from_slice(b"\"0x");
            push_hex(out, addr);
            out.push(b'"');
        }
        None => out.extend_from_slice(b"null"),
    }
}

fn json_lost(out: &mut Vec<u8>, kind: &str, count: u64) {
    json_key(out, "kind");
    push_json_name(out, kind.as_bytes());
    json_number(out, "count", Some(count));
}

/// Columns as `CSV_HEAD` names them; arguments are in one, as `name=value` with a space between.
fn csv_line(out: &mut Vec<u8>, entry: &Entry<'_>, view: Option<&mut View>) {
    out.extend_from_slice(match entry.what {
        What::Hit { .. } => b"hit",
        What::Stray { .. } => b"ptwrite",
        What::Lost { .. } => b"lost",
        What::Torn { .. } => b"torn",
        What::Branch(_) => b"branch",
        What::Event { .. } => b"event",
        What::Error { .. } => b"error",
        What::Note { .. } => b"note",
    });
    let ids = [entry.ns, entry.pid.map(u64::from), entry.tid.map(u64::from), entry.cpu.map(u64::from)];
    for id in ids {
        out.push(b',');
        if let Some(id) = id {
            push_u64(out, id);
        }
    }
    out.push(b',');
    push_csv_name(out, entry.comm);
    out.push(b',');
    match entry.what {
        What::Hit { event, ip, args } => {
            push_csv_name(out, event.name.as_bytes());
            out.extend_from_slice(b",0x");
            push_hex(out, ip);
            out.push(b',');
            let mut first = true;
            each_arg(event, args, |name, ty, word| {
                if !std::mem::take(&mut first) {
                    out.push(b' ');
                }
                name.push(out, push_name);
                out.push(b'=');
                push_value(out, ty, word);
            });
            out.extend_from_slice(b",,");
        }
        What::Stray { ip, value } => {
            out.push(b',');
            if let Some(ip) = ip {
                out.extend_from_slice(b"0x");
                push_hex(out, ip);
            }
            out.extend_from_slice(b",value=0x");
            push_hex(out, value);
            out.extend_from_slice(b",,");
        }
        What::Lost { count } | What::Torn { count } => {
            out.extend_from_slice(b",,,");
            push_u64(out, count);
            out.push(b',');
        }
        What::Branch(_) => out.extend_from_slice(b",,,,"),
        What::Event { packet, ip } => {
            out.push(b',');
            if let Some(ip) = ip {
                out.extend_from_slice(b"0x");
                push_hex(out, ip);
            }
            out.extend_from_slice(b",,,");
            push_csv_name(out, packet.to_string().as_bytes());
        }
        What::Error { offset, message, .. } => csv_message(out, offset, message),
        What::Note { offset, message } => csv_message(out, Some(offset), message),
    }
    match (view, &entry.what) {
        (None, _) => {}
        (Some(view), What::Branch(branch)) => csv_branch(out, branch, entry.space, view),
        (Some(view), What::Hit { ip, .. }) if view.stack => csv_others(out, Some((*ip, entry.tid)), view),
        (Some(view), _) => csv_others(out, None, view),
    }
}

fn csv_message(out: &mut Vec<u8>, offset: Option<u64>, message: &str) {
    out.extend_from_slice(b",,,,");
    let mut text = Vec::new();
    push_error(&mut text, offset, message);
    push_csv_name(out, &text);
}
