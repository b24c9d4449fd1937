//! Memory for the lists of one call. Its thread keeps the memory for the next call, so a call takes no page faults.
//!
//! Invariants:
//! - A nested call on the same thread has an arena of its own.
//! - A thread keeps at most [`KEPT`] bytes between calls.
#![forbid(unsafe_code)]

use std::cell::Cell;

pub use bumpalo::Bump as Arena;

use crate::error::{Error, Result};

/// A vector in an arena.
pub type ArenaVec<'a, T> = bumpalo::collections::Vec<'a, T>;

/// About the lists of 30,000 tensors.
const KEPT: usize = 16 << 20;

thread_local! {
    static ARENA: Cell<Option<Arena>> = const { Cell::new(None) };
}

/// Calls `work` with an arena, which is emptied afterwards.
pub fn with<R>(work: impl FnOnce(&Arena) -> R) -> R {
    // A thread that ends has no arena any more.
    let mut arena = ARENA.try_with(Cell::take).ok().flatten().unwrap_or_default();
    let result = work(&arena);
    arena.reset();
    if arena.allocated_bytes() <= KEPT {
        let _ = ARENA.try_with(|kept| kept.set(Some(arena)));
    }
    result
}

/// An empty vector in `arena` with room for `count` values; `what` names the vector in the error.
pub fn with_capacity<'a, T>(arena: &'a Arena, what: &'static str, count: usize) -> Result<ArenaVec<'a, T>> {
    let mut values = ArenaVec::new_in(arena);
    values.try_reserve_exact(count).map_err(|_| {
        let reason = format!("out of memory for {count} entries of {} bytes", size_of::<T>());
        Error::System { what, reason }
    })?;
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(arena: &Arena, count: usize) -> *const u64 {
        let mut list = with_capacity(arena, "a list", count).unwrap();
        list.extend(0..count as u64);
        list.as_ptr()
    }

    #[test]
    fn the_next_call_has_the_same_memory_and_a_nested_call_has_other_memory() {
        let first = with(|arena| filled(arena, 1000));
        assert_eq!(with(|arena| filled(arena, 1000)), first);
        with(|outer| assert_ne!(filled(outer, 1000), with(|inner| filled(inner, 1000))));
    }

    #[test]
    fn a_thread_keeps_little_and_an_impossible_length_is_an_error() {
        with(|arena| drop(with_capacity::<u8>(arena, "a list", 2 * KEPT).unwrap()));
        with(|arena| assert!(arena.allocated_bytes() <= KEPT));
        let refused = with(|arena| with_capacity::<u64>(arena, "a list", 1 << 52).map(drop)).unwrap_err();
        assert!(refused.to_string().contains("a list"), "{refused}");
    }
}
