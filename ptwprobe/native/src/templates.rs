//! The assembly templates of `stubs/`, as text.

/// (name, text) of every template, sorted by name.
pub const TEMPLATES: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/templates.rs"));

/// Text of the template `name` (file name without `.s`).
pub fn get(name: &str) -> Option<&'static str> {
    TEMPLATES.iter().find(|(n, _)| *n == name).map(|(_, text)| *text)
}
