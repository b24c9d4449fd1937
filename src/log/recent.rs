//! The last values of a kind, which any thread adds and any thread reads, without a lock.
//!
//! Invariants:
//! - Each value has a serial number of its own, from 0. [`Recent::get`] gives the value with that number or none, never
//!   another value.
//! - `N` values are kept: value `s` ends when value `s + N` is added.
//! - A fork at any moment leaves a child that can add and read.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_swap::ArcSwapOption;

/// The last `N` values.
pub struct Recent<T, const N: usize> {
    next: AtomicU64,
    kept: [ArcSwapOption<(u64, T)>; N],
}

impl<T, const N: usize> Recent<T, N> {
    /// No values.
    pub const fn empty() -> Recent<T, N> {
        Recent { next: AtomicU64::new(0), kept: [const { ArcSwapOption::const_empty() }; N] }
    }

    /// Adds a value, and returns it with its serial number.
    pub fn push(&self, value: T) -> Arc<(u64, T)> {
        let serial = self.next.fetch_add(1, Ordering::SeqCst);
        let kept = Arc::new((serial, value));
        self.place(serial).store(Some(Arc::clone(&kept)));
        kept
    }

    /// The value with this serial number; `None` if it is not kept, or not yet.
    pub fn get(&self, serial: u64) -> Option<Arc<(u64, T)>> {
        self.place(serial).load_full().filter(|kept| kept.0 == serial)
    }

    /// The serial number of the value that is added next.
    pub fn end(&self) -> u64 {
        self.next.load(Ordering::SeqCst)
    }

    /// Frees all values.
    pub fn clear(&self) {
        self.kept.iter().for_each(|place| place.store(None));
    }

    fn place(&self, serial: u64) -> &ArcSwapOption<(u64, T)> {
        &self.kept[(serial % N as u64) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_gives_its_own_value_or_none() {
        let recent = Recent::<u64, 4>::empty();
        for value in 0..9 {
            assert_eq!(*recent.push(value * 10), (value, value * 10));
        }
        let found: Vec<Option<u64>> = (0..10).map(|serial| recent.get(serial).map(|kept| kept.1)).collect();
        let kept = [Some(50), Some(60), Some(70), Some(80), None];
        assert_eq!(found, [[None; 5], kept].concat());
        recent.clear();
        assert!((0..9).all(|serial| recent.get(serial).is_none()) && recent.end() == 9);
    }

    #[test]
    fn threads_that_add_at_once_read_their_own_values() {
        let recent = Recent::<(usize, u64), 64>::empty();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let recent = &recent;
                scope.spawn(move || {
                    for round in 0..2000 {
                        let serial = recent.push((thread, round)).0;
                        let found = recent.get(serial);
                        assert!(found.is_none_or(|kept| kept.1 == (thread, round)));
                    }
                });
            }
        });
        assert_eq!(recent.end(), 8000);
    }
}
