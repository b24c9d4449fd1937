//! Memory for the lists of one call. Its thread keeps the memory for the next call, so a call takes no page faults.
//!
//! Invariants:
//! - A nested call on the same thread has an allocator of its own.
//! - A thread keeps at most [`KEPT`] bytes between calls.
#![forbid(unsafe_code)]

use std::cell::Cell;

pub use bumpalo::Bump;

use crate::error::{Error, Result};

/// A vector in a bump allocator.
pub type BumpVec<'a, T> = bumpalo::collections::Vec<'a, T>;

/// About the lists of 30,000 tensors.
const KEPT: usize = 16 << 20;

thread_local! {
    static KEPT_BUMP: Cell<Option<Bump>> = const { Cell::new(None) };
}

/// Calls `work` with an allocator, which is emptied afterwards.
pub fn with<R>(work: impl FnOnce(&Bump) -> R) -> R {
    // A thread that ends has no allocator any more.
    let mut bump = KEPT_BUMP.try_with(Cell::take).ok().flatten().unwrap_or_default();
    let result = work(&bump);
    bump.reset();
    if bump.allocated_bytes() <= KEPT {
        let _ = KEPT_BUMP.try_with(|kept| kept.set(Some(bump)));
    }
    result
}

/// An empty vector in `bump` with room for `count` values; `what` names the vector in the error.
pub fn with_capacity<'a, T>(bump: &'a Bump, what: &'static str, count: usize) -> Result<BumpVec<'a, T>> {
    let mut values = BumpVec::new_in(bump);
    values.try_reserve_exact(count).map_err(|_| {
        let reason = format!("out of memory for {count} entries of {} bytes", size_of::<T>());
        Error::System { what, reason }
    })?;
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(bump: &Bump, count: usize) -> *const u64 {
        let mut list = with_capacity(bump, "a list", count).unwrap();
        list.extend(0..count as u64);
        list.as_ptr()
    }

    #[test]
    fn the_next_call_has_the_same_memory_and_a_nested_call_has_other_memory() {
        let first = with(|bump| filled(bump, 1000));
        assert_eq!(with(|bump| filled(bump, 1000)), first);
        with(|outer| assert_ne!(filled(outer, 1000), with(|inner| filled(inner, 1000))));
    }

    #[test]
    fn a_thread_keeps_little_and_an_impossible_length_is_an_error() {
        with(|bump| drop(with_capacity::<u8>(bump, "a list", 2 * KEPT).unwrap()));
        with(|bump| assert!(bump.allocated_bytes() <= KEPT));
        let refused = with(|bump| with_capacity::<u64>(bump, "a list", 1 << 52).map(drop)).unwrap_err();
        assert!(refused.to_string().contains("a list"), "{refused}");
    }
}
