//! One address space during one stretch of time.

use std::sync::Arc;

use super::files::Files;
use super::regions::Regions;
use crate::flow::code::{Code, Stub};

/// See the module.
pub struct Space {
    pub(super) regions: Regions,
    pub(super) stubs: Arc<Stubs>,
    pub(super) files: Arc<Files>,
}

/// The stubs of a process, which do not overlap.
#[derive(Clone, Debug, Default)]
pub struct Stubs {
    all: Vec<Stub>,
    /// (site, start) of those with branches of their own, sorted.
    branching: Vec<(u64, u64)>,
}

impl Stubs {
    /// Empty ones, and of two that overlap the later, are left out.
    #[must_use]
    pub fn new(mut stubs: Vec<Stub>) -> Self {
        stubs.retain(|stub| stub.start < stub.end);
        stubs.sort_unstable_by_key(|stub| (stub.start, stub.end));
        let mut end = 0;
        stubs.retain(|stub| {
            let free = stub.start >= end;
            end = end.max(stub.end);
            free
        });
        let mut branching: Vec<_> =
            stubs.iter().filter(|stub| stub.continue_addr == 0).map(|stub| (stub.site, stub.start)).collect();
        branching.sort_unstable();
        Self { all: stubs, branching }
    }

    #[must_use]
    pub fn at(&self, ip: u64) -> Option<Stub> {
        let behind = self.all.partition_point(|stub| stub.start <= ip);
        self.all.get(behind.checked_sub(1)?).copied().filter(|stub| ip < stub.end)
    }

    /// See [`Code::closed_site`]; `knows`: whether there is code at a stub's start.
    #[must_use]
    pub fn closed_site(&self, ip: u64, knows: impl Fn(u64) -> bool) -> Option<u64> {
        let first = self.branching.partition_point(|&(site, _)| site < ip);
        let rest = self.branching.get(first..).unwrap_or_default();
        rest.iter().find(|&&(_, start)| !knows(start)).map(|&(site, _)| site)
    }
}

impl Code for Space {
    fn read(&self, ip: u64, buffer: &mut [u8]) -> usize {
        let mut done = 0;
        // Code may go on from one file in another: a patched page is followed by one that is not.
        while let Some(rest) = buffer.get_mut(done..).filter(|rest| !rest.is_empty()) {
            let Some(at) = ip.checked_add(done as u64) else { break };
            let Some(region) = self.regions.at(at) else { break };
            let room = usize::try_from(region.end - at).map_or(rest.len(), |room| room.min(rest.len()));
            let offset = region.source.offset.wrapping_add(at - region.start);
            let len = self.files.read(region.source.file, offset, rest.get_mut(..room).unwrap_or_default());
            done += len;
            if len < room {
                break;
            }
        }
        done
    }

    fn stub(&self, ip: u64) -> Option<Stub> {
        self.stubs.at(ip)
    }

    fn closed_site(&self, ip: u64) -> Option<u64> {
        self.stubs.closed_site(ip, |start| self.read(start, &mut [0]) != 0)
    }
}
