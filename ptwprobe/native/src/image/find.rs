//! Which file of this machine is the one that was recorded.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};

use super::elf::{self, BuildId};
use super::files::{Content, Places, Problem, Wanted};

const DELETED: &[u8] = b" (deleted)";
const VDSO: &[u8] = b"[vdso]";
const IMAGES: &str = "images";
/// More than any vdso has.
const MAX_VDSO: u64 = 1 << 16;

/// What a search gave.
#[derive(Debug, Default)]
pub struct Found {
    pub content: Option<Content>,
    pub problem: Option<Problem>,
}

/// Whether a mapping of this name has no file that could be read: what the kernel names otherwise, or nobody.
#[must_use]
pub fn is_nameless(path: &[u8]) -> bool {
    let starts = |start: &[u8]| path.starts_with(start);
    path.is_empty()
        || (starts(b"[") && path != VDSO)
        || [b"//anon".as_slice(), b"/anon_hugepage", b"/dev/", b"/memfd:", b"/SYSV", b"anon_inode:"]
            .into_iter()
            .any(starts)
}

/// Looks for `wanted`: beside the trace, by its name, at a process that still has it, by build id.
pub fn find(wanted: &Wanted, places: &Places) -> Found {
    if let Some(name) = image_name(&wanted.path) {
        // Nowhere else: what has this name elsewhere is not what ran.
        let image = places.images.as_deref().and_then(|images| open_image(images, name).ok());
        if image.is_some() || places.images.is_some() {
            return checked(image.into_iter().map(|file| (Content::File(file), true)), wanted);
        }
    }
    if wanted.path == VDSO {
        return checked(own_vdso().into_iter().map(|bytes| (Content::Bytes(bytes), false)), wanted);
    }
    let named = named(wanted, places).map(|path| (path, true));
    let others = others(wanted, places).into_iter().map(|path| (path, false));
    let open = |(path, by_name): (PathBuf, bool)| Some((Content::File(open(&path, 0).ok()?), by_name));
    checked(named.into_iter().chain(others).filter_map(open), wanted)
}

/// The first that is surely the wanted one; else, where no build id tells, the one with its name (marked so).
fn checked(contents: impl Iterator<Item = (Content, bool)>, wanted: &Wanted) -> Found {
    let mut second = Found { content: None, problem: Some(Problem::Missing) };
    for (content, by_name) in contents {
        let Some(id) = wanted.build_id else {
            let told = wanted.inode.2 != 0;
            if told && inode(&content) == Some(wanted.inode) || !told && by_name {
                return Found { content: Some(content), problem: None };
            }
            if by_name {
                second = Found { content: Some(content), problem: Some(Problem::OtherInode) };
            }
            continue;
        };
        let found = build_id(&content);
        if found.is_some_and(|found| found.is(&id)) {
            return Found { content: Some(content), problem: None };
        }
        if second.problem == Some(Problem::Missing) {
            second.problem = Some(Problem::OtherBuild { found });
        }
    }
    second
}

fn build_id(content: &Content) -> Option<BuildId> {
    elf::build_id(|offset, buffer| content.read(offset, buffer))
}

fn inode(content: &Content) -> Option<(u32, u32, u64)> {
    let Content::File(file) = content else { return None };
    let metadata = file.metadata().ok()?;
    let device = metadata.dev();
    Some((libc::major(device), libc::minor(device), metadata.ino()))
}

/// Where the file is by its name; nowhere if it was deleted.
fn named(wanted: &Wanted, places: &Places) -> Option<PathBuf> {
    let path = Path::new(OsStr::from_bytes(&wanted.path));
    let there = path.is_absolute() && !wanted.path.ends_with(DELETED);
    there.then(|| places.root.as_ref().map_or_else(|| path.to_owned(), |root| join(root, path)))
}

/// Where else it may be.
fn others(wanted: &Wanted, places: &Places) -> Vec<PathBuf> {
    let path = Path::new(OsStr::from_bytes(wanted.path.strip_suffix(DELETED).unwrap_or(&wanted.path)));
    let mut out = Vec::new();
    if places.live && wanted.pid != 0 {
        let process = PathBuf::from(format!("/proc/{}", wanted.pid));
        let (start, end) = wanted.mapped;
        out.push(process.join(format!("map_files/{start:x}-{end:x}")));
        // In its container the name leads elsewhere; and a program that was deleted may still run.
        out.push(join(&process.join("root"), path));
        out.push(process.join("exe"));
    }
    let hex = wanted.build_id.map(|id| id.hex()).unwrap_or_default();
    if let Some((head, tail)) = hex.split_at_checked(2) {
        for cache in &places.caches {
            let of_perf = cache.join(".build-id").join(head).join(tail);
            out.extend([of_perf.join("elf"), of_perf, cache.join(&hex).join("executable")]);
        }
    }
    out
}

/// `path` below `root`, wherever its `..` lead.
fn join(root: &Path, path: &Path) -> PathBuf {
    let names = path.components().filter(|part| matches!(part, Component::Normal(_)));
    root.join(names.collect::<PathBuf>())
}

/// The name of a file in the folder of a session's images.
fn image_name(path: &[u8]) -> Option<&OsStr> {
    let path = Path::new(OsStr::from_bytes(path));
    (path.parent()?.file_name()? == IMAGES).then(|| path.file_name()).flatten()
}

fn open_image(images: &Path, name: &OsStr) -> io::Result<File> {
    let flags = libc::O_NOFOLLOW | libc::O_CLOEXEC;
    let folder = OpenOptions::new().read(true).custom_flags(flags | libc::O_DIRECTORY).open(images)?;
    open(&Path::new(&format!("/proc/self/fd/{}", folder.as_raw_fd())).join(name), libc::O_NOFOLLOW)
}

fn open(path: &Path, flags: i32) -> io::Result<File> {
    // A pipe that nobody writes to must not be waited for.
    let flags = flags | libc::O_NONBLOCK | libc::O_CLOEXEC | libc::O_NOCTTY;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    Ok(file)
}

/// The vdso of this process, which is that of every 64-bit process under this kernel.
fn own_vdso() -> Option<Vec<u8>> {
    // SAFETY: no memory is involved.
    let start = unsafe { libc::getauxval(libc::AT_SYSINFO_EHDR) };
    let memory = File::open("/proc/self/mem").ok()?;
    let mut bytes = Vec::new();
    while start != 0 && (bytes.len() as u64) < MAX_VDSO {
        let mut page = [0; 4096];
        // It ends where nothing is mapped.
        match memory.read_at(&mut page, start + bytes.len() as u64) {
            Ok(len) if len == page.len() => bytes.extend_from_slice(&page),
            _ => break,
        }
    }
    Some(bytes).filter(|bytes| !bytes.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(path: &Path) -> Wanted {
        Wanted { path: path.as_os_str().as_bytes().to_vec(), ..Wanted::default() }
    }

    fn folder(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("ptwprobe-find-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        path
    }

    fn first(found: &Found) -> Option<u8> {
        let mut byte = [0];
        found.content.as_ref().filter(|c| c.read(0, &mut byte).unwrap() == 1).map(|_| byte[0])
    }

    #[test]
    fn a_file_of_another_build_is_none() {
        let id = BuildId::new(&[9; 20]);
        let found = find(&Wanted { build_id: id, ..wanted(Path::new("/bin/true")) }, &Places::default());
        assert!(found.content.is_none());
        assert!(matches!(found.problem, Some(Problem::OtherBuild { found: Some(_) })));
        let found = find(&wanted(Path::new("/no/such")), &Places::default());
        assert_eq!(found.problem, Some(Problem::Missing));
    }

    #[test]
    fn a_file_of_another_inode_is_read_with_a_note_unless_a_process_has_the_right_one() {
        let dir = folder("inode");
        let path = dir.join("a");
        std::fs::write(&path, b"1").unwrap();
        let wanted = Wanted { inode: (1, 2, 3), ..wanted(&path) };
        let found = find(&wanted, &Places::default());
        assert_eq!((first(&found), found.problem), (Some(b'1'), Some(Problem::OtherInode)));
        let meta = std::fs::metadata("/proc/self/exe").unwrap();
        let inode = (libc::major(meta.dev()), libc::minor(meta.dev()), meta.ino());
        let live = Places { live: true, ..Places::default() };
        let found = find(&Wanted { inode, pid: std::process::id(), ..wanted }, &live);
        assert_eq!((first(&found), found.problem), (Some(0x7f), None));
    }

    #[test]
    fn images_are_those_beside_the_trace_and_no_links() {
        let dir = folder("images");
        std::fs::create_dir(dir.join("images")).unwrap();
        std::fs::write(dir.join("images/a"), b"1").unwrap();
        std::os::unix::fs::symlink("a", dir.join("images/link")).unwrap();
        let places = Places { images: Some(dir.join("images")), ..Places::default() };
        let moved = |name: &str| find(&wanted(&Path::new("/elsewhere/x.ptw/images").join(name)), &places);
        assert_eq!(first(&moved("a")), Some(b'1'));
        assert_eq!(moved("link").problem, Some(Problem::Missing));
        assert_eq!(moved("../images/a/..").problem, Some(Problem::Missing));
        std::fs::rename(dir.join("images"), dir.join("real")).unwrap();
        std::os::unix::fs::symlink("real", dir.join("images")).unwrap();
        assert_eq!(moved("a").problem, Some(Problem::Missing));
    }

    #[test]
    fn caches_hold_files_by_build_id() {
        let dir = folder("cache");
        let bytes = std::fs::read("/bin/true").unwrap();
        let id = build_id(&Content::Bytes(bytes.clone())).unwrap();
        let hex = id.hex();
        let places = Places { caches: vec![dir.clone()], ..Places::default() };
        let wanted = Wanted { build_id: Some(id), ..wanted(Path::new("/gone")) };
        assert_eq!(find(&wanted, &places).problem, Some(Problem::Missing));
        let kept = dir.join(".build-id").join(&hex[..2]).join(&hex[2..]);
        std::fs::create_dir_all(&kept).unwrap();
        std::fs::write(kept.join("elf"), b"another").unwrap();
        assert_eq!(find(&wanted, &places).problem, Some(Problem::OtherBuild { found: None }));
        std::fs::create_dir_all(dir.join(&hex)).unwrap();
        std::fs::write(dir.join(&hex).join("executable"), bytes).unwrap();
        assert_eq!(find(&wanted, &places).problem, None);
    }

    #[test]
    fn the_vdso_is_this_kernels_if_the_build_id_says_so() {
        let Some(vdso) = own_vdso() else { return };
        let id = build_id(&Content::Bytes(vdso));
        assert!(id.is_some());
        let wanted = wanted(Path::new("[vdso]"));
        assert_eq!(find(&wanted, &Places::default()).problem, Some(Problem::Missing));
        assert_eq!(find(&Wanted { build_id: id, ..wanted }, &Places::default()).problem, None);
    }

    #[test]
    fn folders_and_pipes_are_no_files() {
        assert!(open(Path::new("/tmp"), 0).is_err());
        assert!(open(Path::new("/dev/null"), 0).is_err());
    }
}
