//! What really happened, for tests to compare a decoder with.
//!
//! `branches.bin`: records of 24 bytes: from, to (u64), kind (u8), 7 zeros. `hits.bin`: records of 32 bytes: branches
//! before it, value, IP of its FUP (0 without one), TSC. `psbs.bin`: records of 32 bytes: offset in the stream, branches
//! and hits before it, IP of its FUP. All little endian.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Branch {
    Cond = 0,
    Jump = 1,
    IndirectJump = 2,
    Call = 3,
    IndirectCall = 4,
    Return = 5,
    Syscall = 6,
    FarReturn = 7,
    Interrupt = 8,
    TraceStart = 9,
    TxAbort = 11,
    FarOther = 12,
}

/// Something that no decoder can know in full.
pub struct Loss {
    pub what: &'static str,
    /// Offset in the stream as it was written.
    pub offset: usize,
    /// Bytes that were cut out.
    pub cut: usize,
    /// Branches `first..sure` may be known (direct ones behind the last packet), `sure..end` cannot. Behind cut bytes
    /// a decoder may be astray up to `until`, where the next PSB stands.
    pub first: u64,
    pub sure: u64,
    pub end: u64,
    pub until: u64,
    pub hits: (u64, u64),
}

const RECORD: usize = 24;
/// Records that stay in memory because they may be taken back.
const KEPT: usize = 1024;

pub struct Truth {
    branches: Vec<u8>,
    file: Option<BufWriter<File>>,
    hits: BufWriter<File>,
    psbs: BufWriter<File>,
    pub count: u64,
    pub hit_count: u64,
    pub losses: Vec<Loss>,
}

impl Truth {
    /// `suffix` tells the streams of one folder apart. Without `keep` branches are only counted.
    pub fn create(folder: &Path, suffix: &str, keep: bool) -> io::Result<Self> {
        let create = |name: &str| File::create(folder.join(format!("{name}{suffix}.bin")));
        Ok(Self {
            branches: Vec::new(),
            file: if keep { Some(BufWriter::with_capacity(1 << 20, create("branches")?)) } else { None },
            hits: BufWriter::new(create("hits")?),
            psbs: BufWriter::new(create("psbs")?),
            count: 0,
            hit_count: 0,
            losses: Vec::new(),
        })
    }

    #[inline]
    pub fn branch(&mut self, from: u64, to: u64, kind: Branch) {
        self.count += 1;
        if self.file.is_some() {
            let mut record = [0; RECORD];
            record[..8].copy_from_slice(&from.to_le_bytes());
            record[8..16].copy_from_slice(&to.to_le_bytes());
            record[16] = kind as u8;
            self.branches.extend_from_slice(&record);
        }
    }

    /// Takes the last `count` branches back.
    pub fn take_back(&mut self, count: u64) {
        self.count -= count;
        let len = self.branches.len().saturating_sub(count as usize * RECORD);
        self.branches.truncate(len);
    }

    pub fn hit(&mut self, value: u64, ip: u64, tsc: u64) -> io::Result<()> {
        self.hit_count += 1;
        self.hits.write_all(&[self.count, value, ip, tsc].map(u64::to_le_bytes).concat())
    }

    pub fn psb(&mut self, offset: usize, ip: u64) -> io::Result<()> {
        self.psbs.write_all(&[offset as u64, self.count, self.hit_count, ip].map(u64::to_le_bytes).concat())
    }

    /// Writes out what is sure to stay.
    pub fn spill(&mut self) -> io::Result<()> {
        let done = self.branches.len().saturating_sub(KEPT * RECORD);
        if done >= 1 << 16 {
            self.write(done)?;
        }
        Ok(())
    }

    pub fn finish(&mut self) -> io::Result<()> {
        self.write(self.branches.len())?;
        if let Some(file) = &mut self.file {
            file.flush()?;
        }
        self.hits.flush()?;
        self.psbs.flush()
    }

    fn write(&mut self, len: usize) -> io::Result<()> {
        if let Some(file) = &mut self.file {
            file.write_all(&self.branches[..len])?;
        }
        self.branches.drain(..len);
        Ok(())
    }
}
