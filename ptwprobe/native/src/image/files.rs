//! The files that code comes from: found by name, checked by identity, read when they are asked for.
//!
//! They are read, never mapped: a file that is cut while it is read must not end this process.

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::elf::BuildId;
use super::find::{find, Found};
use super::regions::FileId;

/// Which file a mapping is of, as far as the records tell.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Wanted {
    /// As the process saw it.
    pub path: Vec<u8>,
    pub build_id: Option<BuildId>,
    /// Major, minor, inode; zeros where they are not told.
    pub inode: (u32, u32, u64),
    /// A process that had it mapped, and where.
    pub pid: u32,
    pub mapped: (u64, u64),
}

/// Where files are looked for.
#[derive(Clone, Debug, Default)]
pub struct Places {
    /// The folder `images` beside the perf.data.
    pub images: Option<PathBuf>,
    /// Put in front of every path.
    pub root: Option<PathBuf>,
    /// Folders with files by build id: perf's `~/.debug`, debuginfod's cache.
    pub caches: Vec<PathBuf>,
    /// Processes of this machine that still run are asked for the files that they have mapped.
    pub live: bool,
}

/// Why code of a file is not known, or not sure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Problem {
    /// There is none, or it cannot be read.
    Missing,
    /// The file has another build id.
    OtherBuild { found: Option<BuildId> },
    /// Read all the same: nothing but its inode could tell, and that is another one.
    OtherInode,
}

/// A file with a problem, for a user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    pub path: String,
    pub problem: Problem,
    pub wanted: Option<BuildId>,
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, problem, wanted } = self;
        let id = |id: &Option<BuildId>| id.map_or_else(|| "none".to_owned(), |id| id.hex());
        match problem {
            Problem::Missing => {
                write!(f, "{path}: not found, its code is unknown")?;
                match wanted {
                    Some(id) => write!(f, " (build id {}: put that file back, or name a debug cache)", id.hex()),
                    None => Ok(()),
                }
            }
            Problem::OtherBuild { found } => write!(
                f,
                "{path}: another file by now (build id {}, recorded was {}), its code is unknown: put that file back, \
                 or name a debug cache",
                id(found),
                id(wanted)
            ),
            Problem::OtherInode => write!(
                f,
                "{path}: maybe another file by now (another inode, no build id was recorded): record with \
                 `perf record --buildid-mmap` to be sure"
            ),
        }
    }
}

const PAGE: u64 = 4096;
/// Pages that are kept, of all files together: 64 MiB. Others are read each time.
const MAX_PAGES: usize = 1 << 14;

/// Bytes that names may take, and what a file takes besides.
const MAX_SIZE: usize = 32 << 20;
const BACKING_LEN: usize = size_of::<Backing>() + size_of::<Wanted>();

struct Backing {
    wanted: Wanted,
    found: OnceLock<Found>,
    /// By number; the last one of a file may be short.
    pages: Mutex<HashMap<u64, Arc<[u8]>>>,
}

/// What a file that was found is read from.
#[derive(Debug)]
pub enum Content {
    File(File),
    Bytes(Vec<u8>),
}

impl Content {
    /// As many bytes from `offset` on as there are and as fit.
    pub fn read(&self, offset: u64, buffer: &mut [u8]) -> std::io::Result<usize> {
        match self {
            Self::File(file) => loop {
                match file.read_at(buffer, offset) {
                    Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                    result => return result,
                }
            },
            Self::Bytes(bytes) => {
                let rest = usize::try_from(offset).ok().and_then(|at| bytes.get(at..)).unwrap_or_default();
                Ok(buffer.iter_mut().zip(rest).map(|(to, from)| *to = *from).count())
            }
        }
    }
}

/// See the module.
#[derive(Default)]
pub struct Files {
    places: Places,
    list: Vec<Backing>,
    ids: HashMap<Wanted, FileId>,
    cached: AtomicUsize,
    /// By path, for mappings that do not tell one.
    build_ids: HashMap<Vec<u8>, BuildId>,
    /// What names and the rest take, in bytes.
    size: usize,
}

impl Files {
    #[must_use]
    pub fn new(places: Places) -> Self {
        Self { places, ..Self::default() }
    }

    /// Files of this name have this build id, unless they tell another. Before they are added.
    pub fn build_id(&mut self, path: &[u8], id: BuildId) {
        self.size += path.len() + BACKING_LEN;
        if self.size <= MAX_SIZE {
            self.build_ids.insert(path.to_vec(), id);
        }
    }

    /// The number of a file, which is not looked for before it is read; `None` where there are too many.
    pub fn add(&mut self, mut wanted: Wanted) -> Option<FileId> {
        wanted.build_id = wanted.build_id.or_else(|| self.build_ids.get(&wanted.path).copied());
        // By what makes it a file of its own.
        let mut key = wanted.clone();
        key.mapped = (0, 0);
        if key.build_id.is_some() {
            (key.inode, key.pid) = ((0, 0, 0), 0);
        } else if key.inode.2 != 0 {
            key.pid = 0;
        }
        if let Some(&id) = self.ids.get(&key) {
            return Some(id);
        }
        self.size += 2 * wanted.path.len() + BACKING_LEN;
        if self.size > MAX_SIZE {
            return None;
        }
        let id = self.list.len() as FileId;
        self.list.push(Backing { wanted, found: OnceLock::new(), pages: Mutex::default() });
        self.ids.insert(key, id);
        Some(id)
    }

    /// The file itself, if it is there and the right one.
    #[must_use]
    pub fn content(&self, id: FileId) -> Option<&Content> {
        self.found(self.list.get(id as usize)?).content.as_ref()
    }

    #[cfg(test)]
    pub fn wanted(&self, id: FileId) -> Option<&Wanted> {
        Some(&self.list.get(id as usize)?.wanted)
    }

    fn found<'a>(&self, backing: &'a Backing) -> &'a Found {
        backing.found.get_or_init(|| find(&backing.wanted, &self.places))
    }

    /// Copies what the file has from `offset` on; how many bytes that are.
    pub fn read(&self, id: FileId, offset: u64, buffer: &mut [u8]) -> usize {
        let Some(backing) = self.list.get(id as usize) else { return 0 };
        let mut done = 0;
        while let Some(rest) = buffer.get_mut(done..).filter(|rest| !rest.is_empty()) {
            let Some(at) = offset.checked_add(done as u64) else { break };
            let Some(page) = self.page(backing, at / PAGE) else { break };
            let bytes = page.get((at % PAGE) as usize..).unwrap_or_default();
            let len = rest.iter_mut().zip(bytes).map(|(to, from)| *to = *from).count();
            if len == 0 {
                break;
            }
            done += len;
        }
        done
    }

    fn page(&self, backing: &Backing, number: u64) -> Option<Arc<[u8]>> {
        let lock = || backing.pages.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(page) = lock().get(&number) {
            return Some(Arc::clone(page));
        }
        let content = self.found(backing).content.as_ref()?;
        let mut bytes = [0; PAGE as usize];
        let len = content.read(number.checked_mul(PAGE)?, &mut bytes).ok()?;
        let page: Arc<[u8]> = bytes.get(..len)?.into();
        if self.cached.fetch_add(1, Ordering::Relaxed) < MAX_PAGES {
            lock().insert(number, Arc::clone(&page));
        } else {
            self.cached.fetch_sub(1, Ordering::Relaxed);
        }
        Some(page)
    }

    /// What a user should know of the files that were asked for so far.
    #[must_use]
    pub fn notes(&self) -> Vec<Note> {
        let note = |backing: &Backing| {
            let problem = backing.found.get()?.problem.clone()?;
            let path = String::from_utf8_lossy(&backing.wanted.path).into_owned();
            Some(Note { path, problem, wanted: backing.wanted.build_id })
        };
        self.list.iter().filter_map(note).collect()
    }
}
