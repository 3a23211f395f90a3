//! Demangling of C++ (Itanium ABI) and Rust (legacy and v0) symbol names, with and without the parameter list.
//!
//! Names come from files that nobody vouches for: their length, the depth of the demangler's recursion and the length
//! of what comes out are bounded, and a name that does not demangle is `None`.

use cpp_demangle::{DemangleOptions, ParseOptions, Symbol};
use std::fmt::Write;

/// Longer mangled names are left as they are.
const MAX_MANGLED: usize = 16 * 1024;
/// Substitutions can make a short name grow exponentially.
const MAX_DEMANGLED: usize = 64 * 1024;
const MAX_RECURSION: u32 = 128;
/// What one call of `demangle_all` may return.
const MAX_TOTAL: usize = 512 * 1024 * 1024;

/// A demangled name: `full` with parameters, `plain` without them (and without return type).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Demangled {
    pub full: String,
    pub plain: String,
}

/// A string that refuses to grow beyond `MAX_DEMANGLED`.
struct Bounded(String);

impl Write for Bounded {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        if self.0.len() + text.len() > MAX_DEMANGLED {
            return Err(std::fmt::Error);
        }
        self.0.push_str(text);
        Ok(())
    }
}

/// Demangles `name`; `None` for a name that is not mangled. A suffix such as `.isra.0` that a compiler appended for a
/// clone comes out as ` [clone .isra.0]`, as binutils print it.
pub fn demangle(name: &str) -> Option<Demangled> {
    if name.len() > MAX_MANGLED {
        return None;
    }
    if name.starts_with("_Z") || name.starts_with("_R") {
        return rust(name).or_else(|| cpp(name));
    }
    None
}

/// Demangles each of `names`; once the results take `MAX_TOTAL` bytes, the rest is left as it is.
pub fn demangle_all(names: &[String]) -> Vec<Option<Demangled>> {
    let mut total = 0;
    names
        .iter()
        .map(|name| {
            let found = if total < MAX_TOTAL { demangle(name) } else { None };
            total += found.as_ref().map_or(0, |d| d.full.len() + d.plain.len());
            found
        })
        .collect()
}

fn rust(name: &str) -> Option<Demangled> {
    let symbol = rustc_demangle::try_demangle(name).ok()?;
    let mut out = Bounded(String::new());
    // The alternate form leaves out the hash.
    write!(out, "{symbol:#}").ok()?;
    Some(Demangled { plain: out.0.clone(), full: out.0 })
}

fn cpp(name: &str) -> Option<Demangled> {
    let (mangled, suffix) = match name.find('.') {
        Some(at) => name.split_at(at),
        None => (name, ""),
    };
    let parse = ParseOptions::default().recursion_limit(MAX_RECURSION);
    let symbol = Symbol::new_with_options(mangled, &parse).ok()?;
    let print = |options: DemangleOptions| {
        let mut out = Bounded(String::new());
        symbol.structured_demangle(&mut out, &options.recursion_limit(MAX_RECURSION)).ok()?;
        if !suffix.is_empty() {
            write!(out, " [clone {suffix}]").ok()?;
        }
        Some(out.0)
    };
    let full = print(DemangleOptions::new())?;
    // Thunks and other special names have no parameter list of their own.
    let special = mangled.starts_with("_ZT") || mangled.starts_with("_ZG");
    let plain = if special {
        full.clone()
    } else {
        // The ref-qualifier of a member function goes with its parameters.
        let name = print(DemangleOptions::new().no_params().no_return_type())?;
        let name = name.strip_suffix(" &&").or_else(|| name.strip_suffix(" &")).unwrap_or(&name);
        name.to_owned()
    };
    Some(Demangled { full, plain })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn both(name: &str) -> Option<(String, String)> {
        demangle(name).map(|d| (d.full, d.plain))
    }

    fn pair(full: &str, plain: &str) -> Option<(String, String)> {
        Some((full.to_owned(), plain.to_owned()))
    }

    #[test]
    fn cpp_with_and_without_parameters() {
        assert_eq!(both("_ZN3foo3barEiPKc"), pair("foo::bar(int, char const*)", "foo::bar"));
        assert_eq!(both("_ZNK3foo3barEv"), pair("foo::bar() const", "foo::bar"));
        assert_eq!(both("_ZNKR3foo3barEv"), pair("foo::bar() const &", "foo::bar"));
        assert_eq!(both("_ZN3fooplERKS_"), pair("foo::operator+(foo const&)", "foo::operator+"));
    }

    #[test]
    fn thunks_are_told_by_their_kind() {
        let thunk = "{virtual override thunk({offset(-16)}, A::f())}";
        assert_eq!(both("_ZThn16_N1A1fEv"), pair(thunk, thunk));
    }

    #[test]
    fn clones_are_told_apart() {
        assert_eq!(both("_ZN3foo3barEv.isra.0"), pair("foo::bar() [clone .isra.0]", "foo::bar [clone .isra.0]"));
    }

    #[test]
    fn rust_legacy_and_v0_without_hash() {
        let name = "core::fmt::write";
        assert_eq!(both("_ZN4core3fmt5write17h0123456789abcdefE"), pair(name, name));
        assert_eq!(both("_RNvNtCs1234_4core3fmt5write"), pair(name, name));
    }

    #[test]
    fn names_that_are_not_mangled() {
        for name in ["", "main", "_Z", "_R", "_ZN", "_Zzzzz", "_start"] {
            assert_eq!(demangle(name), None, "{name}");
        }
        assert_eq!(demangle(&format!("_ZN{}E", "1a".repeat(MAX_MANGLED))), None);
    }

    #[test]
    fn deep_and_growing_names_are_bounded() {
        let deep = format!("_Z1f{}i", "P".repeat(10_000));
        assert_eq!(demangle(&deep), None);
        let mut growing = String::from("_Z1fI");
        for i in 0..36 {
            let digit = char::from_digit(i, 36).unwrap_or('0').to_ascii_uppercase();
            growing.push_str(&format!("1aIS{digit}_S{digit}_E"));
        }
        growing.push_str("Ei");
        assert!(demangle(&growing).is_none_or(|d| d.full.len() <= MAX_DEMANGLED));
    }
}
