//! Which objects hold the bytes of a file.
//!
//! Invariants:
//! - Every object has a unique name, never reused: the file offset of its first byte, and an increasing number. A
//!   request that the store executes late, or twice, therefore never changes newer bytes.
//! - A write touches only allocations whose bytes are no longer needed (the tier's invariant), and an object lies
//!   within one allocation. If two objects overlap, the one with the lower number is therefore entirely stale.
//! - No two objects of the index overlap.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;

/// An object of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Object {
    /// File offset of the object's first byte.
    pub start: u64,
    /// Size in bytes.
    pub len: u64,
    /// Position in the order of writes; higher is newer.
    pub number: u64,
}

/// A range of bytes in one object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ObjectRange {
    /// The object.
    pub object: Object,
    /// Offset in the object, in bytes.
    pub from: u64,
    /// Length in bytes.
    pub len: u64,
}

impl Object {
    /// The name of the object below its file's name.
    pub fn name(&self) -> String {
        format!("{:016x}.{:016x}", self.start, self.number)
    }

    /// The object with this name and `len` bytes; `None` if the name is not valid for an object.
    pub fn parse(name: &str, len: u64) -> Option<Object> {
        let (start, number) = name.split_once('.')?;
        let digits = |text: &str| text.len() == 16 && text.bytes().all(|b| b"0123456789abcdef".contains(&b));
        let value = |text: &str| u64::from_str_radix(text, 16).ok().filter(|_| digits(text));
        let object = Object { start: value(start)?, len, number: value(number)? };
        // A later write of this file gets a larger number.
        let numbered = object.number <= i64::MAX as u64;
        object
            .start
            .checked_add(len)
            .filter(|end| *end <= i64::MAX as u64 && len > 0 && numbered)
            .map(|_| object)
    }

    fn end(&self) -> u64 {
        self.start + self.len
    }
}

/// The objects of one file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Index {
    by_start: BTreeMap<u64, Object>,
}

impl Index {
    /// Builds the index from a listing; also returns the stale objects of the listing.
    pub fn of(mut listed: Vec<Object>) -> (Index, Vec<Object>) {
        // In the order of the writes.
        listed.sort_unstable_by_key(|object| object.number);
        let mut index = Index::default();
        let stale = listed.into_iter().flat_map(|object| index.insert(object)).collect();
        (index, stale)
    }

    /// Adds an object; returns the objects that are stale now, which may be the added one.
    pub fn insert(&mut self, object: Object) -> Vec<Object> {
        let before = self.by_start.range(..object.start).next_back().map(|(_, other)| *other);
        let within = self.by_start.range(object.start..object.end()).map(|(_, other)| *other);
        let overlapping: Vec<Object> =
            before.filter(|other| other.end() > object.start).into_iter().chain(within).collect();
        if overlapping.iter().any(|other| other.number > object.number) {
            return vec![object];
        }
        for stale in &overlapping {
            self.by_start.remove(&stale.start);
        }
        self.by_start.insert(object.start, object);
        overlapping
    }

    /// The parts that hold up to `len` bytes from `offset` on, ending before the first byte that no object holds.
    pub fn cover(&self, offset: u64, len: u64) -> Vec<ObjectRange> {
        let (mut parts, mut at, end) = (Vec::new(), offset, offset.saturating_add(len));
        while at < end {
            let found = self.by_start.range(..=at).next_back().map(|(_, object)| *object);
            let Some(object) = found.filter(|object| object.end() > at) else { break };
            let to = end.min(object.end());
            parts.push(ObjectRange { object, from: at - object.start, len: to - at });
            at = to;
        }
        parts
    }

    /// File offset of the end of the last object; 0 if there is none.
    pub fn end(&self) -> u64 {
        self.by_start.values().next_back().map_or(0, Object::end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(start: u64, len: u64, number: u64) -> Object {
        Object { start, len, number }
    }

    #[test]
    fn names_are_read_back_and_others_are_not_taken_for_them() {
        let one = object(0x1000, 5, 77);
        assert_eq!(one.name(), "0000000000001000.000000000000004d");
        assert_eq!(Object::parse(&one.name(), 5), Some(one));
        for wrong in ["", "lock", "1000.4d", "0000000000001000", "0000000000001000.000000000000004D"] {
            assert_eq!(Object::parse(wrong, 5), None, "{wrong}");
        }
        assert_eq!(Object::parse("+000000000001000.000000000000004d", 5), None);
        assert_eq!(Object::parse("ffffffffffffffff.000000000000004d", 5), None);
        assert_eq!(Object::parse("0000000000001000.ffffffffffffffff", 5), None);
        assert_eq!(Object::parse(&one.name(), 0), None);
    }

    #[test]
    fn reads_find_their_parts_and_end_at_a_hole() {
        let (index, stale) = Index::of(vec![object(0, 10, 1), object(10, 5, 2), object(20, 5, 3)]);
        assert_eq!((stale.len(), index.end()), (0, 25));
        let parts = index.cover(8, 100);
        let places: Vec<_> = parts.iter().map(|part| (part.object.start, part.from, part.len)).collect();
        assert_eq!(places, [(0, 8, 2), (10, 0, 5)]);
        assert_eq!(index.cover(15, 5), []);
        assert_eq!(index.cover(21, 2), [ObjectRange { object: object(20, 5, 3), from: 1, len: 2 }]);
        assert_eq!(index.cover(25, 1), []);
    }

    #[test]
    fn the_higher_number_counts_in_whatever_order_they_come() {
        let all = vec![object(0, 10, 1), object(8, 4, 2), object(20, 4, 9), object(20, 6, 4)];
        let (index, mut stale) = Index::of(all);
        stale.sort_unstable_by_key(|object| object.number);
        assert_eq!(index.by_start.values().copied().collect::<Vec<_>>(), [object(8, 4, 2), object(20, 4, 9)]);
        assert_eq!(stale, [object(0, 10, 1), object(20, 6, 4)]);
        // An old request that the store executes only now.
        let mut late = index.clone();
        assert_eq!(late.insert(object(8, 4, 1)), [object(8, 4, 1)]);
        assert_eq!(late, index);
    }

    /// Compares with a map of one entry per byte. Allocations are taken and freed as a whole, as in the tier.
    #[test]
    fn a_thousand_random_writes_match_a_map_of_bytes() {
        let mut random = fastrand::Rng::with_seed(11);
        let mut next = |below: u64| random.u64(..below);
        let mut index = Index::default();
        let mut listed: Vec<Object> = Vec::new();
        let mut places: Vec<(u64, u64)> = Vec::new();
        let mut bytes = [0_u64; 300];
        for number in 1..1000 {
            let (start, len) = (next(250), 1 + next(50));
            let overlaps = |(at, n): &(u64, u64)| *at < start + len && start < at + n;
            for (at, n) in places.extract_if(.., |place| overlaps(place)) {
                bytes[at as usize..(at + n) as usize].fill(0);
            }
            places.push((start, len));
            bytes[start as usize..(start + len) as usize].fill(number);
            listed.push(object(start, len, number));
            for stale in index.insert(object(start, len, number)) {
                // The store sometimes loses a deletion.
                if next(8) > 0 {
                    listed.retain(|other| *other != stale);
                }
            }
            for at in 0..300 {
                let found = index.cover(at, 1).first().map_or(0, |part| part.object.number);
                assert_eq!(found, bytes[at as usize], "byte {at} after write {number}");
            }
            let needed =
                |index: &Index| index.cover(start, len).iter().all(|part| part.object.number == number);
            assert!(needed(&Index::of(listed.clone()).0));
        }
    }
}
