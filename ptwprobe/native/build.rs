//! Embeds every template of `stubs/*.s` into the extension, so that the package needs no data files.

use std::{env, fs, io::Write, path::Path};

fn main() {
    let dir = Path::new(&env::var("CARGO_MANIFEST_DIR").expect("set by cargo")).join("../../stubs");
    let dir = dir.canonicalize().expect("the stubs folder of the source tree");
    let out = Path::new(&env::var("OUT_DIR").expect("set by cargo")).join("templates.rs");
    let mut names: Vec<_> = fs::read_dir(&dir)
        .expect("stubs folder")
        .filter_map(|e| Some(e.ok()?.path()))
        .filter(|p| p.extension().is_some_and(|x| x == "s"))
        .collect();
    names.sort();
    let mut file = fs::File::create(out).expect("OUT_DIR is writable");
    writeln!(file, "&[").expect("write");
    for path in &names {
        let stem = path.file_stem().expect("has a name").to_string_lossy();
        writeln!(file, "    ({stem:?}, include_str!({path:?})),").expect("write");
    }
    writeln!(file, "]").expect("write");
    println!("cargo:rerun-if-changed={}", dir.display());
}
