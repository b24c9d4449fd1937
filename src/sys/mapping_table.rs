//! Lifetimes of this library's mappings: a span accesses memory only while its mapping exists.
//!
//! A span is a plain address: any code may copy it, and it may outlive its mapping. Each mapping therefore has a slot
//! in a table. A span stores the slot and its generation, and each access to the bytes pins the mapping.
//!
//! Invariants:
//! - A pinned mapping is not unmapped: its owner marks it as ended, and release of the last pin unmaps it.
//! - Each generation of a slot belongs to one mapping. A span of an ended mapping pins nothing, even if another mapping
//!   now has the same slot or address.
//! - No lock is held across a fork. Pins of the parent's other threads stay set in the child: there they keep a mapping
//!   mapped for good, and block no thread.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Number of mappings; the system's default limit per process (vm.max_map_count) is lower.
const SLOTS: usize = 1 << 16;
/// Bits of a slot's state: the generation in the upper half, two flags, and a count of pins.
const USED: u64 = 1 << 31;
const ENDED: u64 = 1 << 30;
const PINS: u64 = ENDED - 1;

struct MappingSlot {
    state: AtomicU64,
    start: AtomicUsize,
    len: AtomicUsize,
}

static TABLE: [MappingSlot; SLOTS] = [const {
    MappingSlot { state: AtomicU64::new(0), start: AtomicUsize::new(0), len: AtomicUsize::new(0) }
}; SLOTS];
static NEXT: AtomicUsize = AtomicUsize::new(0);

/// Identifies one mapping; unique until the 32-bit generation of the slot wraps around.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MappingId {
    slot: u32,
    generation: NonZeroU32,
}

/// Keeps a mapping from being unmapped.
#[derive(Debug)]
pub struct Pin(MappingId);

impl MappingId {
    /// Enters a mapping; `None` if the table is full.
    ///
    /// # Safety
    /// The bytes are whole pages that the caller mapped. No other code unmaps them if this call succeeds.
    pub unsafe fn begin(start: usize, len: usize) -> Option<MappingId> {
        let from = NEXT.fetch_add(1, Ordering::Relaxed);
        (0..SLOTS).map(|n| from.wrapping_add(n) % SLOTS).find_map(|index| {
            let slot = &TABLE[index];
            let seen = slot.state.load(Ordering::Relaxed);
            if seen & USED != 0 {
                return None;
            }
            let generation =
                NonZeroU32::new(((seen >> 32) as u32).wrapping_add(1)).unwrap_or(NonZeroU32::MIN);
            let taken = u64::from(generation.get()) << 32 | USED;
            slot.state.compare_exchange(seen, taken, Ordering::AcqRel, Ordering::Relaxed).ok()?;
            // Only `unmap` reads these fields, after `end`.
            slot.start.store(start, Ordering::Relaxed);
            slot.len.store(len, Ordering::Relaxed);
            Some(MappingId { slot: index as u32, generation })
        })
    }

    /// Unmaps the mapping, or leaves that to the last pin. The owner calls it once.
    ///
    /// # Safety
    /// No code uses the bytes any more without a pin.
    pub unsafe fn end(self) {
        let before = self.slot().state.fetch_or(ENDED, Ordering::AcqRel);
        if before & PINS == 0 {
            self.unmap();
        }
    }

    /// Pins the mapping; `None` if it has ended.
    pub fn pin(self) -> Option<Pin> {
        let state = &self.slot().state;
        let mut seen = state.load(Ordering::Relaxed);
        while self.is_current(seen) && seen & ENDED == 0 && seen & PINS != PINS {
            match state.compare_exchange_weak(seen, seen + 1, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Some(Pin(self)),
                Err(now) => seen = now,
            }
        }
        None
    }

    fn slot(self) -> &'static MappingSlot {
        &TABLE[self.slot as usize]
    }

    fn is_current(self, state: u64) -> bool {
        state >> 32 == u64::from(self.generation.get()) && state & USED != 0
    }

    /// Unmaps an ended mapping without pins, once: the owner and the last pin may both call this function.
    fn unmap(self) {
        let slot = self.slot();
        let (start, len) = (slot.start.load(Ordering::Relaxed), slot.len.load(Ordering::Relaxed));
        let generation = u64::from(self.generation.get()) << 32;
        let last = generation | USED | ENDED;
        if slot.state.compare_exchange(last, generation, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            // SAFETY: a mapping whose ownership `begin` took. It has ended and has no pins, and the
            // exchange succeeds for one caller: no code uses the bytes, and no code unmaps them again.
            unsafe { libc::munmap(start as *mut libc::c_void, len) };
        }
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        let before = self.0.slot().state.fetch_sub(1, Ordering::AcqRel);
        if before & ENDED != 0 && before & PINS == 1 {
            self.0.unmap();
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::sys::memory::{BASE_PAGE, Mapping};

    #[test]
    fn a_span_outlives_its_mapping_and_uses_nothing() {
        let mapping = Mapping::untouched(BASE_PAGE).unwrap();
        let span = mapping.span();
        span.part(7, 3).write(b"abc");
        let other = Mapping::untouched(BASE_PAGE).unwrap();
        drop(mapping);
        assert!(!span.is_mapped() && !span.part(7, 3).is_mapped() && other.span().is_mapped());
        // New mappings, one of which may have the same address.
        let again: Vec<Mapping> = (0..8).map(|_| Mapping::untouched(BASE_PAGE).unwrap()).collect();
        let refused = |work: &dyn Fn()| {
            assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).is_err());
        };
        refused(&|| span.write(b"x"));
        refused(&|| span.part(7, 3).write(b"x"));
        refused(&|| drop(span.to_vec()));
        refused(&|| span.copy_to(other.span()));
        refused(&|| other.span().copy_to(span));
        assert!(again.iter().all(|mapping| mapping.span().to_vec() == vec![0; BASE_PAGE]));
    }

    #[test]
    fn what_is_in_use_is_unmapped_by_its_last_user() {
        let mapping = Mapping::untouched(BASE_PAGE).unwrap();
        let span = mapping.span();
        span.write(b"abc");
        span.with_bytes(|bytes| {
            drop(mapping);
            assert!(!span.is_mapped() && bytes.starts_with(b"abc"));
        });
        assert!(std::panic::catch_unwind(|| span.to_vec()).is_err());
    }

    #[test]
    fn readers_on_other_threads_never_meet_unmapped_memory() {
        for _ in 0..200 {
            let mapping = Mapping::untouched(BASE_PAGE).unwrap();
            let span = mapping.span();
            std::thread::scope(|scope| {
                for _ in 0..2 {
                    scope.spawn(|| {
                        while span.is_mapped() {
                            let seen = std::panic::catch_unwind(|| span.to_vec());
                            assert!(seen.is_err() || seen.is_ok_and(|bytes| bytes == vec![0; BASE_PAGE]));
                        }
                    });
                }
                std::thread::yield_now();
                drop(mapping);
            });
        }
    }
}
