//! Which of this library's mappings are there: memory is used through a span only while its mapping is.
//!
//! A span is an address that anybody may copy, and may outlive the mapping that it was made for. So each mapping has a
//! slot in a table, each span names slot and generation, and a use of the bytes pins the mapping.
//!
//! Invariants:
//! - A pinned mapping is not unmapped: its owner marks it as ended, and the last pin that is let go unmaps it.
//! - A generation is given to one mapping: a span of an ended one pins nothing, whoever has its slot or its address.
//! - No lock is held, so that a fork finds nothing locked. Pins of a parent's other threads stay in its child, where they
//!   keep a mapping for good and block nobody.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// The system allows a process fewer mappings, unless it was told otherwise.
const SLOTS: usize = 1 << 16;
/// Of a slot's state: a generation, two flags, and a count of pins.
const USED: u64 = 1 << 31;
const ENDED: u64 = 1 << 30;
const PINS: u64 = ENDED - 1;

struct Slot {
    state: AtomicU64,
    start: AtomicUsize,
    len: AtomicUsize,
}

static TABLE: [Slot; SLOTS] =
    [const { Slot { state: AtomicU64::new(0), start: AtomicUsize::new(0), len: AtomicUsize::new(0) } };
        SLOTS];
static NEXT: AtomicUsize = AtomicUsize::new(0);

/// Names one mapping, for as long as the process lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Life {
    slot: u32,
    generation: NonZeroU32,
}

/// The one who ends a mapping.
#[derive(Debug)]
pub struct Owner(Life);

/// Keeps a mapping from being unmapped.
#[derive(Debug)]
pub struct Pin(Life);

impl Owner {
    /// Takes a mapping over; `None` if there are too many of them.
    ///
    /// # Safety
    /// The bytes are whole pages that the caller mapped, and that nobody else unmaps if this succeeds.
    pub unsafe fn new(start: usize, len: usize) -> Option<Owner> {
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
            // Read by the one who unmaps alone, which is after the owner's end.
            slot.start.store(start, Ordering::Relaxed);
            slot.len.store(len, Ordering::Relaxed);
            Some(Owner(Life { slot: index as u32, generation }))
        })
    }

    /// The mapping's name.
    pub fn life(&self) -> Life {
        self.0
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let before = self.0.slot().state.fetch_or(ENDED, Ordering::AcqRel);
        if before & PINS == 0 {
            self.0.unmap();
        }
    }
}

impl Life {
    /// Pins the mapping; `None` if it has ended.
    pub fn pin(self) -> Option<Pin> {
        let state = &self.slot().state;
        let mut seen = state.load(Ordering::Relaxed);
        while self.is_of(seen) && seen & ENDED == 0 && seen & PINS != PINS {
            match state.compare_exchange_weak(seen, seen + 1, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Some(Pin(self)),
                Err(now) => seen = now,
            }
        }
        None
    }

    fn slot(self) -> &'static Slot {
        &TABLE[self.slot as usize]
    }

    fn is_of(self, state: u64) -> bool {
        state >> 32 == u64::from(self.generation.get()) && state & USED != 0
    }

    /// Unmaps an ended mapping without pins, once: the owner and the last pin may both come here.
    fn unmap(self) {
        let slot = self.slot();
        let (start, len) = (slot.start.load(Ordering::Relaxed), slot.len.load(Ordering::Relaxed));
        let generation = u64::from(self.generation.get()) << 32;
        let last = generation | USED | ENDED;
        if slot.state.compare_exchange(last, generation, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            // SAFETY: a mapping that was given over by the promise of `Owner::new`. It has ended and has no pins, and the
            // exchange lets one caller through: nobody uses the bytes, and nobody unmaps them again.
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
        // Whatever lies at the address now.
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
