//! `truth.json`: what was asked for, where the code is, what was lost.

use std::fmt::Write;

use crate::image::Image;
use crate::options::Options;
use crate::perffile::{Mapping, Stream, PID};
use crate::stubs::Stubs;
use crate::truth::{Loss, Truth};

/// The range as perf's address filters say it.
pub fn filter_text(image: &Image, mappings: &[Mapping], range: (u64, u64)) -> String {
    let (low, high) = range;
    let segment = image.segments.iter().find(|s| s.addr <= low && low < s.end());
    let offset = segment.map_or(low, |s| low - s.addr + s.file_offset);
    let path = mappings.first().map_or("", |m| m.path.as_str());
    format!("filter {offset:#x}/{:#x}@{path}", high - low)
}

/// A string literal of JSON; paths with quotes or control characters are not expected here.
fn quoted(text: &str) -> String {
    format!("{text:?}")
}

fn list<T>(items: &[T], mut show: impl FnMut(&T) -> String) -> String {
    let items: Vec<String> = items.iter().map(&mut show).collect();
    format!("[{}]", items.join(", "))
}

#[allow(clippy::too_many_arguments)]
pub fn json(
    options: &Options,
    elf: &str,
    image: &Image,
    mappings: &[Mapping],
    stubs: &Stubs,
    range: Option<(u64, u64)>,
    streams: &[Stream],
    truths: &[Truth],
) -> String {
    let mut out = String::from("{\n");
    let mut line = |name: &str, value: String| {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "  {}: {value},", quoted(name));
    };
    line("elf", quoted(elf));
    line("base", image.base.to_string());
    line("seed", options.seed.to_string());
    line("preset", options.preset.as_deref().map_or("null".into(), quoted));
    line("features", list(&options.features.names(), |name| quoted(name)));
    line("bias", options.bias.to_string());
    line("functions", options.functions.to_string());
    line("psb", options.psb.to_string());
    line("words", options.words.to_string());
    line("visible", options.visible.to_string());
    line("stub_break", options.stub_break.to_string());
    line("pid", PID.to_string());
    line("filter", range.map_or("null".into(), |(low, high)| format!("[{low}, {high}]")));
    line("mappings", list(mappings, mapping));
    line(
        "stubs",
        list(&stubs.all, |s| {
            let slots: Vec<u64> = s.steps.iter().filter(|step| step.1.is_some()).map(|step| step.0).collect();
            format!(
            "{{\"start\": {}, \"end\": {}, \"site\": {}, \"continue\": {}, \"entry\": {}, \"header\": {}, \"slots\": {slots:?}}}",
            s.start, s.end, s.site, s.continues, s.entry, s.header
        )
        }),
    );
    let all: Vec<_> = streams.iter().zip(truths).enumerate().collect();
    let text = list(&all, |(index, (stream, truth))| {
        format!(
            "{{\"tid\": {}, \"bytes\": {}, \"branches\": {}, \"hits\": {}, \"losses\": {}}}",
            u64::from(PID) + *index as u64,
            stream.bytes.len(),
            truth.count,
            truth.hit_count,
            list(&truth.losses, loss)
        )
    });
    let _ = writeln!(out, "  \"streams\": {text}\n}}");
    out
}

fn mapping(mapping: &Mapping) -> String {
    format!(
        "{{\"addr\": {}, \"len\": {}, \"offset\": {}, \"path\": {}}}",
        mapping.addr,
        mapping.len,
        mapping.file_offset,
        quoted(&mapping.path)
    )
}

fn loss(loss: &Loss) -> String {
    let Loss { what, offset, cut, first, sure, end, until, hits } = loss;
    format!(
        "{{\"what\": {}, \"offset\": {offset}, \"cut\": {cut}, \"first\": {first}, \"sure\": {sure}, \"end\": {end}, \"until\": {until}, \"hits\": [{}, {}]}}",
        quoted(what),
        hits.0,
        hits.1
    )
}
