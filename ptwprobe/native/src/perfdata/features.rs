//! The feature sections after the data: who recorded, and where.

use std::ffi::CStr;

/// What the header tells about the machine and the command.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Features {
    pub hostname: String,
    pub os_release: String,
    /// Of the recording tool.
    pub version: String,
    pub arch: String,
    pub cpus_configured: u32,
    pub cpus_online: u32,
    pub command_line: Vec<String>,
}

/// Bits of the header's feature mask.
const HOSTNAME: u32 = 3;
const OSRELEASE: u32 = 4;
const VERSION: u32 = 5;
const ARCH: u32 = 6;
const NRCPUS: u32 = 7;
const CMDLINE: u32 = 11;
/// Attributes, ids and names of the events.
pub(super) const BUILD_ID: u32 = 2;
pub(super) const EVENT_DESC: u32 = 12;
pub(super) const CPUID: u32 = 9;

/// perf pads its strings to this.
const STRING_ALIGN: usize = 64;

impl Features {
    /// This machine, as `uname` and `sysconf` tell it.
    #[must_use]
    pub fn of_this_machine(version: &str, command_line: Vec<String>) -> Self {
        // SAFETY: an all-zero utsname is valid, and `uname` fills it with terminated strings.
        let name = unsafe {
            let mut name: libc::utsname = std::mem::zeroed();
            libc::uname(&mut name);
            name
        };
        let text = |field: &[libc::c_char]| {
            // SAFETY: a slice of c_char is a slice of bytes.
            let bytes = unsafe { std::slice::from_raw_parts(field.as_ptr().cast::<u8>(), field.len()) };
            CStr::from_bytes_until_nul(bytes).map(|s| s.to_string_lossy().into_owned()).unwrap_or_default()
        };
        let cpus = |which| {
            // SAFETY: no memory is involved.
            u32::try_from(unsafe { libc::sysconf(which) }).unwrap_or(0)
        };
        Self {
            hostname: text(&name.nodename),
            os_release: text(&name.release),
            version: version.to_owned(),
            arch: text(&name.machine),
            cpus_configured: cpus(libc::_SC_NPROCESSORS_CONF),
            cpus_online: cpus(libc::_SC_NPROCESSORS_ONLN),
            command_line,
        }
    }

    /// `(bit of the mask, section)`, in the order in which the file has them.
    pub(super) fn sections(&self) -> Vec<(u32, Vec<u8>)> {
        let string = |text: &str| {
            let mut out = Vec::new();
            push_string(&mut out, text);
            out
        };
        let mut cpus = self.cpus_configured.to_le_bytes().to_vec();
        cpus.extend_from_slice(&self.cpus_online.to_le_bytes());
        let mut command_line = (self.command_line.len() as u32).to_le_bytes().to_vec();
        for word in &self.command_line {
            push_string(&mut command_line, word);
        }
        vec![
            (HOSTNAME, string(&self.hostname)),
            (OSRELEASE, string(&self.os_release)),
            (VERSION, string(&self.version)),
            (ARCH, string(&self.arch)),
            (NRCPUS, cpus),
            (CMDLINE, command_line),
        ]
    }
}

/// A text as `push_string` writes it.
pub(super) fn string(section: &[u8]) -> Option<&str> {
    let (len, text) = section.split_first_chunk()?;
    let text = text.get(..usize::try_from(u32::from_le_bytes(*len)).ok()?)?;
    text.split(|&byte| byte == 0).next().and_then(|text| std::str::from_utf8(text).ok())
}

/// Padded length, then the text with at least one zero.
fn push_string(out: &mut Vec<u8>, text: &str) {
    let len = (text.len() + 1).next_multiple_of(STRING_ALIGN);
    out.extend_from_slice(&(len as u32).to_le_bytes());
    let end = out.len() + len;
    out.extend_from_slice(text.as_bytes());
    out.resize(end, 0);
}
