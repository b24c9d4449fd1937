//! Pinned allocations of any size, shared by the whole process and freed by address.
//!
//! Small allocations of the default kind come from arenas, so a thousand tensors of 1 MiB share 2 MiB pages and a few registrations. A
//! freed part that the kernel still uses is quarantined until its lease ends.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::Arc;

use super::region::{self, Backing, Region};
use crate::error::{Error, Result};
use crate::sys::fork::{PerProcessStatic, Shared};
use crate::sys::memory::{BASE_PAGE, HUGE_PAGE};
use crate::sys::span::Span;
use crate::sys::sync::Lock;

/// Larger allocations have their own mapping.
const ARENA_SHARE: usize = ARENA_BYTES / 4;
const ARENA_BYTES: usize = 32 * HUGE_PAGE;
/// Small allocations after one that had no arena, until one is tried again: to map and touch an arena takes milliseconds.
const ALONE: u32 = 256;

/// Statistics of all allocations of the process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PinnedStats {
    /// Live allocations.
    pub allocations: usize,
    /// Requested bytes of live allocations.
    pub bytes: usize,
    /// Most requested bytes live at one time.
    pub high_water: usize,
    /// Bytes mapped for live allocations and arenas.
    pub mapped_bytes: usize,
    /// Locked bytes of the mapped ones.
    pub locked_bytes: usize,
}

#[derive(Debug, Default)]
struct PinnedState {
    live: BTreeMap<usize, Allocation>,
    arenas: Vec<Arena>,
    bytes: usize,
    high_water: usize,
    /// Small allocations that take regions of their own before an arena is tried again: memory, or the limit of locked memory,
    /// had no room for one.
    alone: u32,
}

#[derive(Debug)]
struct Allocation {
    region: Arc<Region>,
    span: Span,
    /// Requested bytes; the span is rounded up to whole pages.
    requested: usize,
}

#[derive(Debug)]
struct Arena {
    region: Arc<Region>,
    /// Free parts as offset and length in bytes, sorted and never adjacent.
    gaps: BTreeMap<usize, usize>,
    /// Parts freed while leased.
    stuck: Vec<Span>,
}

/// The allocations of this process. Those of its parent stay mapped in a forked child, where code may still use them.
static STATE: PerProcessStatic<Lock<PinnedState>> = PerProcessStatic::empty();

fn shared() -> Shared<Lock<PinnedState>> {
    STATE.get_or_make(Lock::default)
}

/// Allocates `bytes` (0 counts as 1): page-aligned and touched, with unspecified contents.
pub fn alloc(bytes: usize, backing: Backing) -> Result<Span> {
    let shared = shared();
    let Some(size) = bytes.max(1).checked_next_multiple_of(BASE_PAGE) else {
        return Err(Error::invalid("bytes", format!("{bytes} bytes exceed the address space")));
    };
    let is_shared = size <= ARENA_SHARE && backing == Backing::default();
    // Without the lock: many pages take a while.
    let own = if is_shared { None } else { Some(Region::open(size, backing)?) };
    let mut state = shared.lock();
    let (region, span) = match own {
        Some(region) => whole(region),
        None => state.cut(size)?,
    };
    state.live.insert(span.address(), Allocation { region, span, requested: bytes });
    state.bytes += bytes;
    state.high_water = state.high_water.max(state.bytes);
    Ok(span.part(0, bytes))
}

fn whole(region: Arc<Region>) -> (Arc<Region>, Span) {
    let span = region.span();
    (region, span)
}

/// Frees the allocation that begins at `address`. Memory of the parent of a forked child is `Unsupported`, any other
/// address an `InvalidArgument`.
pub fn free(address: usize) -> Result<()> {
    let shared = shared();
    let mut state = shared.lock();
    let Some(allocation) = state.live.remove(&address) else {
        if region::is_inherited(address) {
            let message = format!("{address:#x} was allocated by the parent of this process; free it there");
            return Err(Error::Unsupported(message));
        }
        let reason = format!("{address:#x} is not the start of a pinned allocation, or was freed already");
        return Err(Error::invalid("start", reason));
    };
    state.bytes -= allocation.requested;
    state.give_back(allocation);
    Ok(())
}

/// True if the whole range lies in one live allocation.
pub fn contains(address: usize, len: usize) -> bool {
    let shared = shared();
    shared.lock().contains(address, len)
}

/// False if some of the range is memory of allocations, and the range is not in a live one.
pub fn is_whole(range: Span) -> bool {
    let shared = shared();
    let state = shared.lock();
    let (address, len) = (range.address(), range.len());
    let end = address.saturating_add(len);
    let shares = |own: Span| own.address() < end && address < own.address() + own.len();
    let last = state.live.range(..end).next_back();
    let touched = last.is_some_and(|(_, found)| shares(found.span))
        || state.arenas.iter().any(|arena| shares(arena.region.span()));
    !touched || state.contains(address, len)
}

/// Statistics of all allocations.
pub fn stats() -> PinnedStats {
    let shared = shared();
    let state = shared.lock();
    let own =
        state.live.values().filter(|one| one.span.len() == one.region.span().len()).map(|one| &one.region);
    let regions: Vec<_> = own.chain(state.arenas.iter().map(|arena| &arena.region)).collect();
    PinnedStats {
        allocations: state.live.len(),
        bytes: state.bytes,
        high_water: state.high_water,
        mapped_bytes: regions.iter().map(|region| region.span().len()).sum(),
        locked_bytes: regions.iter().filter(|region| region.locked()).map(|region| region.span().len()).sum(),
    }
}

impl PinnedState {
    fn contains(&self, address: usize, len: usize) -> bool {
        let before = self.live.range(..=address).next_back();
        before.is_some_and(|(_, found)| found.span.part(0, found.requested).covers(address, len))
    }

    /// Room in an arena. Where memory or its lock does not suffice for a new arena, a region of its own.
    fn cut(&mut self, size: usize) -> Result<(Arc<Region>, Span)> {
        if let Some(found) = self.arenas.iter_mut().find_map(|arena| arena.cut(size)) {
            return Ok(found);
        }
        let arena = match self.alone {
            0 => Region::open(ARENA_BYTES, Backing::default()).ok(),
            _ => None,
        };
        let region = match arena {
            Some(region) if region.locked() => region,
            other => {
                let own = Region::open(size, Backing::default())?;
                match other {
                    // Nothing can be locked: an arena saves mappings.
                    Some(region) if !own.locked() => {
                        own.retire();
                        region
                    }
                    other => {
                        other.inspect(|region| region.retire());
                        self.alone = self.alone.checked_sub(1).unwrap_or(ALONE);
                        return Ok(whole(own));
                    }
                }
            }
        };
        let gaps = BTreeMap::from([(0, region.span().len())]);
        let mut arena = Arena { region, gaps, stuck: Vec::new() };
        let found = arena.cut(size);
        self.arenas.push(arena);
        found.ok_or_else(|| Error::LimitReached(format!("no room for {size} bytes in a new arena")))
    }

    fn give_back(&mut self, allocation: Allocation) {
        let Allocation { region, span, .. } = allocation;
        let Some(at) = self.arenas.iter().position(|arena| arena.region.id() == region.id()) else {
            return region.retire();
        };
        self.arenas[at].give_back(span);
        // One empty arena is kept, so that a loop over one small tensor does not map and lock memory each time.
        let spare = self.arenas.iter().filter(|arena| arena.is_empty()).count() > 1;
        if spare && self.arenas[at].is_empty() {
            self.arenas.swap_remove(at).region.retire();
        }
    }
}

impl Arena {
    fn cut(&mut self, size: usize) -> Option<(Arc<Region>, Span)> {
        let stuck = std::mem::take(&mut self.stuck);
        stuck.into_iter().for_each(|span| self.give_back(span));
        let (from, room) =
            self.gaps.iter().find(|(_, room)| **room >= size).map(|(from, room)| (*from, *room))?;
        self.gaps.remove(&from);
        if room > size {
            self.gaps.insert(from + size, room - size);
        }
        Some((Arc::clone(&self.region), self.region.span().part(from, size)))
    }

    fn give_back(&mut self, span: Span) {
        if self.region.leased(span) {
            return self.stuck.push(span);
        }
        let mut from = span.address() - self.region.span().address();
        let mut len = span.len();
        if let Some(after) = self.gaps.remove(&(from + len)) {
            len += after;
        }
        if let Some((before, room)) = self.gaps.range(..from).next_back().map(|(at, room)| (*at, *room))
            && before + room == from
        {
            (from, len) = (before, room + len);
        }
        self.gaps.insert(from, len);
    }

    fn is_empty(&self) -> bool {
        self.gaps.get(&0) == Some(&self.region.span().len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::transfer_buffer::TransferBuffer;

    #[test]
    fn allocations_of_every_size_are_disjoint_and_sliceable() {
        let sizes = [1, 4096, 4097, 1 << 20, 3 << 20, ARENA_SHARE, ARENA_SHARE + 1];
        let spans: Vec<Span> = sizes.iter().map(|size| alloc(*size, Backing::default()).unwrap()).collect();
        for (n, span) in spans.iter().enumerate() {
            assert_eq!((span.len(), span.address() % BASE_PAGE), (sizes[n], 0));
            span.write(&vec![n as u8; span.len()]);
        }
        for (n, span) in spans.iter().enumerate() {
            assert!(span.to_vec().iter().all(|byte| *byte == n as u8));
            assert!(contains(span.address() + span.len() / 2, span.len() / 2));
            assert!(!contains(span.address(), span.len() + 1));
        }
        for span in spans {
            free(span.address()).unwrap();
            assert!(!contains(span.address(), 1));
            assert!(free(span.address()).is_err());
        }
        assert!(alloc(usize::MAX, Backing::default()).is_err());
    }

    #[test]
    fn an_allocation_of_another_kind_has_its_own_mapping() {
        let unlocked = Backing { lock: false, ..Backing::default() };
        let span = alloc(5000, unlocked).unwrap();
        let region = region::find(span.address(), 5000).unwrap();
        assert!(!region.locked() && region.span().address() == span.address());
        free(span.address()).unwrap();
        assert!(region.retired());
    }

    #[test]
    fn gaps_merge_until_the_arena_is_whole() {
        let region = Region::open(64 * BASE_PAGE, Backing::default()).unwrap();
        let gaps = BTreeMap::from([(0, region.span().len())]);
        let mut arena = Arena { region, gaps, stuck: Vec::new() };
        let mut parts: Vec<Span> = (1..=5).map(|n| arena.cut(n * BASE_PAGE).unwrap().1).collect();
        assert!(arena.cut(50 * BASE_PAGE).is_none());
        for at in [2, 0, 2, 0, 0] {
            arena.give_back(parts.remove(at));
        }
        assert!(arena.is_empty());
    }

    #[test]
    fn a_part_freed_under_a_lease_is_cut_again_only_afterwards() {
        let region = Region::open(2 * BASE_PAGE, Backing::default()).unwrap();
        let gaps = BTreeMap::from([(0, region.span().len())]);
        let mut arena = Arena { region, gaps, stuck: Vec::new() };
        let part = arena.cut(2 * BASE_PAGE).unwrap().1;
        let lease = TransferBuffer::at_address(part).lease();
        arena.give_back(part);
        assert!(arena.cut(BASE_PAGE).is_none() && !arena.is_empty());
        drop(lease);
        assert!(arena.cut(BASE_PAGE).is_some());
    }
}
