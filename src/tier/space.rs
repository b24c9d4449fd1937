//! Free space of a path's data file.
//!
//! Invariants:
//! - Each byte range is either free or allocated once. Only allocated ranges are freed.
//! - Adjacent free ranges are merged.
//! - This module does no I/O: the caller extends the file to `end` bytes before it allocates space up to there.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};

/// Allocator of one data file. Offsets and lengths are in bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Space {
    end: u64,
    limit: u64,
    /// The file system refused to extend the file.
    full: bool,
    /// Free ranges: length by offset.
    free: BTreeMap<u64, u64>,
    /// The same ranges: length and offset.
    by_length: BTreeSet<(u64, u64)>,
    /// Their sum.
    free_bytes: u64,
}

impl Space {
    /// A file of `end` bytes that may grow to `limit`, with the ranges `used` (offset, length) allocated. `None` if
    /// ranges overlap or exceed `end`.
    pub fn new(end: u64, limit: u64, used: impl IntoIterator<Item = (u64, u64)>) -> Option<Space> {
        let mut used: Vec<(u64, u64)> = used.into_iter().filter(|(_, len)| *len > 0).collect();
        used.sort_unstable();
        let mut space = Space { end, limit: limit.max(end), ..Space::default() };
        let mut at = 0;
        for (from, len) in used {
            if from < at {
                return None;
            }
            space.give(at, from - at);
            at = from.checked_add(len).filter(|to| *to <= end)?;
        }
        space.give(at, end - at);
        Some(space)
    }

    /// Allocates `len` contiguous bytes from the smallest free range that fits. Returns their offset.
    pub fn take(&mut self, len: u64) -> Option<u64> {
        let (room, at) = self.by_length.range((len, 0)..).next().copied()?;
        self.remove(at);
        self.give(at + len, room - len);
        Some(at)
    }

    /// Frees `len` bytes at offset `at`.
    pub fn give(&mut self, at: u64, len: u64) {
        if len == 0 {
            return;
        }
        let (mut from, mut to) = (at, at + len);
        if let Some(after) = self.remove(to) {
            to += after;
        }
        let before = self.free.range(..from).next_back().map(|(at, room)| (*at, *room));
        if let Some((start, room)) = before.filter(|(start, room)| start + room == from) {
            debug_assert!(room > 0);
            self.remove(start);
            from = start;
        }
        self.free.insert(from, to - from);
        self.by_length.insert((to - from, from));
        self.free_bytes += to - from;
    }

    /// Removes the free range at this offset, and returns its length.
    fn remove(&mut self, at: u64) -> Option<u64> {
        let len = self.free.remove(&at)?;
        self.by_length.remove(&(len, at));
        self.free_bytes -= len;
        Some(len)
    }

    /// File length at which `len` contiguous bytes are available; `None` if it exceeds the limit, or the file is full.
    pub fn end_for(&self, len: u64) -> Option<u64> {
        let tail = self.free.iter().next_back().filter(|(at, room)| *at + *room == self.end);
        let from = tail.map_or(self.end, |(at, _)| *at);
        from.checked_add(len).filter(|end| *end <= self.limit && !self.full)
    }

    /// Records that the file now has `end` bytes. The added bytes are free.
    pub fn grew(&mut self, end: u64) {
        if end > self.end {
            let from = std::mem::replace(&mut self.end, end);
            self.give(from, end - from);
        }
    }

    /// Records that the file system has no room for the file to grow.
    pub fn full(&mut self) {
        self.full = true;
    }

    /// Lets the file grow again: the file system may have room now. Returns true if the file was full.
    pub fn retry(&mut self) -> bool {
        std::mem::take(&mut self.full)
    }

    /// Length of the file, in bytes.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// Length of the longest free range, without growing the file.
    pub fn longest(&self) -> u64 {
        self.by_length.last().map_or(0, |(len, _)| *len)
    }

    /// Free bytes of the file as it is.
    pub fn free(&self) -> u64 {
        self.free_bytes
    }

    /// Free bytes, including growth up to the limit.
    pub fn room(&self) -> u64 {
        self.free() + if self.full { 0 } else { self.limit - self.end }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_taken_once_and_merge_when_they_come_back() {
        let mut space = Space::new(100, 200, [(10, 20), (50, 10)]).unwrap();
        assert_eq!((space.free(), space.room(), space.longest()), (70, 170, 40));
        assert_eq!(space.take(10), Some(0));
        assert_eq!(space.take(20), Some(30));
        assert_eq!(space.take(41), None);
        assert_eq!(space.end_for(41), Some(101));
        space.grew(101);
        assert_eq!(space.take(41), Some(60));
        assert_eq!((space.free(), space.end_for(100), space.end_for(99)), (0, None, Some(200)));
        for (at, len) in [(0, 10), (30, 20), (60, 41), (10, 20), (50, 10)] {
            space.give(at, len);
        }
        assert_eq!((space.longest(), space.free.len()), (101, 1));
        space.full();
        assert_eq!((space.room(), space.end_for(102)), (101, None));
        assert!(space.retry() && !space.retry());
        assert_eq!((space.room(), space.end_for(102)), (200, Some(102)));
    }

    #[test]
    fn parts_that_overlap_or_lie_outside_are_refused() {
        assert_eq!(Space::new(100, 100, [(0, 20), (19, 1)]), None);
        assert_eq!(Space::new(100, 100, [(90, 11)]), None);
        assert_eq!(Space::new(100, 100, [(u64::MAX, 11)]), None);
        assert!(Space::new(100, 100, [(90, 10), (0, 90)]).is_some_and(|space| space.free() == 0));
    }

    /// Compares the allocator with one rebuilt from the list of allocated ranges after every operation.
    #[test]
    fn a_thousand_random_turns_match_a_map_of_bytes() {
        let mut random = fastrand::Rng::with_seed(7);
        let mut next = |below: u64| random.u64(..below);
        let mut space = Space::new(256, 1024, []).unwrap();
        let mut taken: Vec<(u64, u64)> = Vec::new();
        for _ in 0..1000 {
            let len = 1 + next(40);
            if next(2) == 0 && !taken.is_empty() {
                let (at, len) = taken.swap_remove(next(taken.len() as u64) as usize);
                space.give(at, len);
            } else if let Some(at) = space.take(len) {
                taken.push((at, len));
            } else if let Some(end) = space.end_for(len) {
                space.grew(end);
                taken.push((space.take(len).unwrap(), len));
            }
            let model = Space::new(space.end, 1024, taken.iter().copied()).expect("no part is taken twice");
            assert_eq!(space, model);
        }
    }
}
