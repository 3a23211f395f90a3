//! The part of `script`'s lines that is about control flow.

use super::script::{json_addr, json_key};
use super::text::{push_csv_name, push_hex, push_json_name, push_right};
use super::view::View;
use crate::flow::{Branch, BranchKind};

/// Columns behind those that every CSV has.
pub const CSV_COLUMNS: &[u8] = b",from,to,kind,from_symbol,to_symbol,stack";

/// The stable name of a kind.
#[must_use]
pub fn kind_name(kind: BranchKind) -> &'static str {
    match kind {
        BranchKind::Cond => "cond",
        BranchKind::Jump => "jump",
        BranchKind::IndirectJump => "indirect-jump",
        BranchKind::Call => "call",
        BranchKind::IndirectCall => "indirect-call",
        BranchKind::Return => "return",
        BranchKind::Syscall => "syscall",
        BranchKind::FarReturn => "far-return",
        BranchKind::Interrupt => "interrupt",
        BranchKind::TraceStart => "trace-start",
        BranchKind::TraceEnd => "trace-end",
        BranchKind::TxAbort => "tx-abort",
        BranchKind::FarOther => "far-other",
    }
}

/// `branch: call 401136 main+0x6 => 401100 f+0x0`; a dash for an address that is not known.
pub fn text_branch(out: &mut Vec<u8>, branch: &Branch, space: u32, depth: usize, view: &mut View) {
    out.extend_from_slice(b"branch: ");
    if view.indent {
        out.resize(out.len() + 2 * depth, b' ');
    }
    out.extend_from_slice(kind_name(branch.kind).as_bytes());
    out.push(b' ');
    text_addr(out, branch.from, space, view);
    out.extend_from_slice(b" => ");
    text_addr(out, branch.to, space, view);
}

fn text_addr(out: &mut Vec<u8>, addr: u64, space: u32, view: &mut View) {
    if addr == 0 {
        return out.push(b'-');
    }
    push_hex(out, addr);
    let name = view.symbols.at(space, addr);
    if !name.is_empty() {
        out.push(b' ');
        out.extend_from_slice(name);
    }
}

/// The calls that led to a hit, a line each, as perf prints a call chain.
pub fn text_stack(out: &mut Vec<u8>, ip: u64, tid: Option<u32>, space: u32, view: &mut View) {
    for addr in std::iter::once(ip).chain(view.calls(tid)) {
        out.extend_from_slice(b"\n\t");
        push_right(out, 16, b' ', |out| push_hex(out, addr));
        let name = view.symbols.at(space, addr);
        out.push(b' ');
        out.extend_from_slice(if name.is_empty() { b"[unknown]" } else { name });
    }
}

pub fn json_branch(out: &mut Vec<u8>, branch: &Branch, space: u32, view: &mut View) {
    let known = |addr| Some(addr).filter(|&addr| addr != 0);
    json_addr(out, "from", known(branch.from));
    json_addr(out, "to", known(branch.to));
    json_key(out, "kind");
    push_json_name(out, kind_name(branch.kind).as_bytes());
    for (key, addr) in [("from_symbol", branch.from), ("to_symbol", branch.to)] {
        let name = view.symbols.at(space, addr);
        if !name.is_empty() {
            json_key(out, key);
            push_json_name(out, name);
        }
    }
}

/// The calls that led to a hit: `"stack":[{"ip":…,"symbol":…},…]`, innermost first.
pub fn json_stack(out: &mut Vec<u8>, ip: u64, tid: Option<u32>, space: u32, view: &mut View) {
    json_key(out, "stack");
    let mut before: &[u8] = b"[{\"ip\":\"0x";
    for addr in std::iter::once(ip).chain(view.calls(tid)) {
        out.extend_from_slice(std::mem::replace(&mut before, b",{\"ip\":\"0x"));
        push_hex(out, addr);
        out.push(b'"');
        let name = view.symbols.at(space, addr);
        if !name.is_empty() {
            json_key(out, "symbol");
            push_json_name(out, name);
        }
        out.push(b'}');
    }
    out.push(b']');
}

/// What stands in [`CSV_COLUMNS`] of a branch.
pub fn csv_branch(out: &mut Vec<u8>, branch: &Branch, space: u32, view: &mut View) {
    for addr in [branch.from, branch.to] {
        out.push(b',');
        if addr != 0 {
            out.extend_from_slice(b"0x");
            push_hex(out, addr);
        }
    }
    out.push(b',');
    out.extend_from_slice(kind_name(branch.kind).as_bytes());
    for addr in [branch.from, branch.to] {
        out.push(b',');
        push_csv_name(out, view.symbols.at(space, addr));
    }
    out.push(b',');
}

/// What stands in them of anything else.
pub fn csv_others(out: &mut Vec<u8>, stack: Option<(u64, Option<u32>)>, view: &View) {
    out.extend_from_slice(b",,,,,,");
    if let Some((ip, tid)) = stack {
        let mut between: &[u8] = b"0x";
        for addr in std::iter::once(ip).chain(view.calls(tid)) {
            out.extend_from_slice(std::mem::replace(&mut between, b" 0x"));
            push_hex(out, addr);
        }
    }
}
