//! What the session tells about its events: names, fields, sites, and which address stands for which word.

use super::quick::QuickMap;

/// How a value is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TypeKind {
    Unsigned,
    Signed,
    Hex,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FieldType {
    pub kind: TypeKind,
    /// 8, 16, 32 or 64.
    pub bits: u32,
}

impl FieldType {
    pub const X64: Self = Self { kind: TypeKind::Hex, bits: 64 };

    /// "u32", "s8", "x64" ...
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (kind, bits) = text.split_at_checked(1)?;
        let kind = match kind {
            "u" => TypeKind::Unsigned,
            "s" => TypeKind::Signed,
            "x" => TypeKind::Hex,
            _ => return None,
        };
        let bits = bits.parse().ok().filter(|b| [8, 16, 32, 64].contains(b))?;
        Some(Self { kind, bits })
    }

    /// The value in the low bits of `word`.
    #[must_use]
    pub fn value(self, word: u64) -> i128 {
        let unused = 64u32.saturating_sub(self.bits).min(63);
        match self.kind {
            TypeKind::Signed => i128::from(((word << unused) as i64) >> unused),
            TypeKind::Unsigned | TypeKind::Hex => i128::from((word << unused) >> unused),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    pub name: String,
    pub ty: FieldType,
}

/// One place in one process where an event was installed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Site {
    pub pid: u32,
    pub addr: u64,
    /// Addresses that stand for each word, header first.
    pub slots: Vec<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    pub id: u16,
    /// "group/name".
    pub name: String,
    pub fields: Vec<Field>,
    pub sites: Vec<Site>,
}

/// What is learned of events that no session names is bounded by these.
const MAX_LEARNED: usize = 1 << 14;

/// See the module. Events that are not in it are named by their id, their fields `arg1` ... of type x64.
#[derive(Debug, Default)]
pub struct Table {
    events: QuickMap<u16, Event>,
    /// Word of a site by its address: the event and the index of the word, 0 is the header.
    roles: QuickMap<u64, (u16, usize)>,
    learned: QuickMap<(u16, u64), Vec<u64>>,
}

impl Table {
    #[must_use]
    pub fn new(events: Vec<Event>) -> Self {
        let mut table = Self::default();
        for event in events {
            for site in &event.sites {
                table.roles.extend(site.slots.iter().enumerate().map(|(index, &addr)| (addr, (event.id, index))));
            }
            table.events.insert(event.id, event);
        }
        table
    }

    /// Whether the word at `ip` can open a record; what no session tells can.
    #[must_use]
    pub fn may_be_header(&self, ip: Option<u64>) -> bool {
        ip.and_then(|ip| self.roles.get(&ip)).is_none_or(|&(_, index)| index == 0)
    }

    /// Addresses of the words of the record that `header_ip` opens.
    #[must_use]
    pub fn slots(&self, id: u16, header_ip: u64) -> Option<&[u64]> {
        if self.roles.get(&header_ip) == Some(&(id, 0)) {
            let sites = &self.events.get(&id)?.sites;
            return sites.iter().find(|s| s.slots.first() == Some(&header_ip)).map(|s| s.slots.as_slice());
        }
        self.learned.get(&(id, header_ip)).map(Vec::as_slice)
    }

    /// Takes the addresses of a record that came whole, where the session does not tell them.
    pub fn learn(&mut self, id: u16, slots: &[u64]) {
        if let Some(&header_ip) = slots.first() {
            if self.learned.len() < MAX_LEARNED && self.slots(id, header_ip).is_none() {
                self.learned.insert((id, header_ip), slots.to_vec());
            }
        }
    }

    pub fn event(&mut self, id: u16) -> &Event {
        self.events.entry(id).or_insert_with(|| Event {
            id,
            name: format!("id/{id}"),
            fields: Vec::new(),
            sites: Vec::new(),
        })
    }

    /// The site of a hit in process `pid` whose header word has the address `header_ip`. A process that no site names
    /// (a fork child) has its parent's.
    #[must_use]
    pub fn site_addr(&self, id: u16, pid: Option<u32>, header_ip: u64) -> Option<u64> {
        let mut found = None;
        for site in self.events.get(&id)?.sites.iter().filter(|s| s.slots.first() == Some(&header_ip)) {
            if Some(site.pid) == pid {
                return Some(site.addr);
            }
            found = found.or(Some(site.addr));
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_cut_and_extended_to_their_type() {
        let value = |ty: &str, word| FieldType::parse(ty).expect("a type").value(word);
        assert_eq!(value("u8", 0x1ff), 0xff);
        assert_eq!(value("s8", 0x1ff), -1);
        assert_eq!(value("s64", u64::MAX), -1);
        assert_eq!(value("u64", u64::MAX), i128::from(u64::MAX));
        assert_eq!(value("x32", u64::MAX), 0xffff_ffff);
        for bad in ["", "u", "u7", "f64", "é8", "u64x"] {
            assert_eq!(FieldType::parse(bad), None);
        }
    }

    #[test]
    fn equal_stubs_of_two_processes_have_their_own_sites() {
        let site = |pid, addr| Site { pid, addr, slots: vec![0x1000, 0x1010] };
        let sites = vec![site(1, 0x10), site(2, 0x20)];
        let table = Table::new(vec![Event { id: 9, name: "g/e".into(), fields: vec![], sites }]);
        assert_eq!(table.site_addr(9, Some(2), 0x1000), Some(0x20));
        assert_eq!(table.site_addr(9, Some(3), 0x1000), Some(0x10));
        assert_eq!(table.site_addr(9, Some(2), 0x1010), None);
        assert!(!table.may_be_header(Some(0x1010)));
    }
}
