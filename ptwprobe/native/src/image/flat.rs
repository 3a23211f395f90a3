//! Code that lies in memory: a list of regions.

use super::space::Stubs;
use crate::flow::code::{Code, Stub};
use crate::flow::context::Spaces;

/// One address space that never changes. Regions and stubs do not overlap.
#[derive(Clone, Debug, Default)]
pub struct FlatCode {
    /// (start, bytes), sorted.
    regions: Vec<(u64, Vec<u8>)>,
    stubs: Stubs,
}

impl FlatCode {
    #[must_use]
    pub fn new(mut regions: Vec<(u64, Vec<u8>)>, stubs: Vec<Stub>) -> Self {
        regions.sort_unstable_by_key(|&(start, _)| start);
        Self { regions, stubs: Stubs::new(stubs) }
    }
}

impl Code for FlatCode {
    fn read(&self, ip: u64, buffer: &mut [u8]) -> usize {
        let mut done = 0;
        let mut next = self.regions.partition_point(|&(start, _)| start <= ip).saturating_sub(1);
        // A region may go on in the next one.
        while let (Some((start, bytes)), Some(rest)) = (self.regions.get(next), buffer.get_mut(done..)) {
            let here = ip.checked_add(done as u64).and_then(|at| at.checked_sub(*start));
            let Some(code) = here.and_then(|at| bytes.get(usize::try_from(at).ok()?..)) else { break };
            let len = code.len().min(rest.len());
            for (to, from) in rest.iter_mut().zip(code) {
                *to = *from;
            }
            if len == 0 {
                break;
            }
            done += len;
            next += 1;
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

/// The same code whoever runs.
impl Spaces for FlatCode {
    fn space(&self, _index: u32) -> &dyn Code {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_is_read_up_to_where_it_is_known() {
        let code = FlatCode::new(vec![(0x20, vec![3, 4]), (0x10, vec![1; 4]), (0x14, vec![2; 2])], vec![]);
        let read = |ip, len| {
            let mut buffer = vec![0; len];
            let len = code.read(ip, &mut buffer);
            buffer.truncate(len);
            buffer
        };
        assert_eq!(read(0x12, 15), [1, 1, 2, 2]);
        assert_eq!(read(0x12, 3), [1, 1, 2]);
        assert_eq!(read(0x21, 15), [4]);
        for ip in [0, 0xf, 0x16, 0x22, u64::MAX] {
            assert_eq!(read(ip, 15), [0u8; 0], "{ip:#x}");
        }
        assert_eq!(read(0x10, 0), [0u8; 0]);
        assert_eq!(FlatCode::new(vec![(u64::MAX, vec![7, 8])], vec![]).read(u64::MAX, &mut [0; 4]), 2);
    }

    #[test]
    fn a_stub_is_found_by_any_of_its_addresses() {
        let stub = |start| Stub { start, end: start + 8, site: 1, continue_addr: 2 };
        let code = FlatCode::new(vec![], vec![stub(0x30), stub(0x10)]);
        assert_eq!(code.stub(0x10), Some(stub(0x10)));
        assert_eq!(code.stub(0x37), Some(stub(0x30)));
        for ip in [0, 0xf, 0x18, 0x38] {
            assert_eq!(code.stub(ip), None, "{ip:#x}");
        }
    }
}
