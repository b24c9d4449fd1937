//! Transfers of one path that wait for this process's turn on the path.
//!
//! Invariants:
//! - A gate is open by default. Only a tiered update closes it, and reopens it at the end of each round.
//! - A transfer that reaches a closed gate is held. It starts when the gate opens, and callers wait for it as for any
//!   other. If it cannot start then, it has failed.
//! - Time spent at the gate does not count toward a deadline: use of the path by other processes is not a stall.
#![forbid(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use crate::error::Result;
use crate::pool::transfer_buffer::TransferBuffer;
use crate::sys::sync::{Lock, Signal};

/// A read or write of a path's data.
#[derive(Debug, Clone)]
pub(in crate::tier) struct DataTransfer {
    pub(in crate::tier) write: bool,
    pub(in crate::tier) offset: u64,
    pub(in crate::tier) buffer: TransferBuffer,
}

#[derive(Debug, Default)]
pub(in crate::tier) struct Gate {
    state: Lock<GateState>,
    opened: Signal,
}

#[derive(Debug, Default)]
struct GateState {
    closed: bool,
    waiting: VecDeque<(u64, DataTransfer)>,
    /// Outcomes of released transfers by number, kept until [`Gate::forget`]: engine handle or error.
    begun: HashMap<u64, Result<u64>>,
    numbers: u64,
}

/// Bit that marks numbers of held transfers; handles of the engine are far smaller.
const HELD: u64 = 1 << 63;

impl Gate {
    /// Holds a transfer if the gate is closed, and returns its number.
    pub(in crate::tier) fn hold(&self, transfer: &DataTransfer) -> Option<u64> {
        let mut state = self.state.lock();
        if !state.closed {
            return None;
        }
        state.numbers += 1;
        let number = HELD | state.numbers;
        state.waiting.push_back((number, transfer.clone()));
        Some(number)
    }

    /// Starts the held transfers with `begin`. Later transfers are held if `closed`.
    pub(in crate::tier) fn release_held(
        &self,
        closed: bool,
        mut begin: impl FnMut(DataTransfer) -> Result<u64>,
    ) {
        let mut state = self.state.lock();
        state.closed = closed;
        let held = std::mem::take(&mut state.waiting);
        // Released first: `begin` may log, and the log callback may use the path.
        drop(state);
        for (number, transfer) in held {
            let handle = begin(transfer);
            self.state.lock().begun.insert(number, handle);
        }
        self.opened.notify_all();
    }

    /// Removes a held transfer. False if it is not held any more.
    pub(in crate::tier) fn withdraw(&self, number: u64) -> bool {
        if number & HELD == 0 {
            return false;
        }
        let mut state = self.state.lock();
        let held = state.waiting.iter().position(|(other, _)| *other == number);
        held.and_then(|at| state.waiting.remove(at)).is_some()
    }

    /// Closes the gate: later transfers are held.
    pub(in crate::tier) fn close(&self) {
        self.state.lock().closed = true;
    }

    /// Number of held transfers.
    pub(in crate::tier) fn waiting(&self) -> usize {
        self.state.lock().waiting.len()
    }

    /// Engine handle of a transfer. `number` comes from [`Gate::hold`] or is an engine handle itself. `None` if the
    /// transfer is still held at `until`.
    pub(in crate::tier) fn handle(&self, number: u64, until: Option<Instant>) -> Result<Option<u64>> {
        if number & HELD == 0 {
            return Ok(Some(number));
        }
        let mut state = self.state.lock();
        loop {
            if let Some(begun) = state.begun.get(&number) {
                return begun.clone().map(Some);
            }
            let in_time;
            (state, in_time) = self.opened.wait_until(state, until);
            if !in_time {
                return Ok(None);
            }
        }
    }

    /// Forgets a transfer that has ended. Its number must not be used again.
    pub(in crate::tier) fn forget(&self, number: u64) {
        if number & HELD != 0 {
            self.state.lock().begun.remove(&number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    fn transfer(offset: u64) -> DataTransfer {
        DataTransfer { write: false, offset, buffer: TransferBuffer::empty() }
    }

    #[test]
    fn what_comes_to_a_closed_gate_begins_when_it_opens_and_in_its_order() {
        let gate = Gate::default();
        assert!(gate.hold(&transfer(7)).is_none());
        gate.close();
        let held: Vec<u64> = (0..3).map(|offset| gate.hold(&transfer(offset)).unwrap()).collect();
        assert_eq!((gate.waiting(), gate.handle(held[0], Some(Instant::now())).unwrap()), (3, None));
        gate.release_held(true, |transfer| match transfer.offset {
            1 => Err(Error::Unsupported("this one".to_string())),
            offset => Ok(100 + offset),
        });
        assert_eq!(gate.handle(held[2], None).unwrap(), Some(102));
        assert!(gate.handle(held[1], None).is_err() && gate.hold(&transfer(7)).is_some());
        gate.forget(held[2]);
        assert_eq!(gate.handle(held[2], Some(Instant::now())).unwrap(), None);
        gate.release_held(false, |_| Ok(5));
        assert!(gate.waiting() == 0 && gate.hold(&transfer(7)).is_none());
        assert_eq!(gate.handle(17, None).unwrap(), Some(17), "the engine's own handles pass");
    }

    #[test]
    fn the_begin_of_a_held_transfer_may_use_the_gate() {
        let gate = Gate::default();
        gate.close();
        let held: Vec<u64> = (0..2).map(|offset| gate.hold(&transfer(offset)).unwrap()).collect();
        assert!(gate.withdraw(held[1]) && !gate.withdraw(held[1]) && !gate.withdraw(17));
        gate.release_held(true, |transfer| {
            assert!(gate.hold(&transfer).is_some(), "a transfer from the log callback");
            Ok(0)
        });
        assert_eq!(gate.waiting(), 1);
    }

    #[test]
    fn a_waiter_is_woken_by_the_opening() {
        let gate = Gate::default();
        gate.close();
        let held = gate.hold(&transfer(7)).unwrap();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| gate.handle(held, None).unwrap());
            gate.release_held(false, |_| Ok(9));
            assert_eq!(waiter.join().unwrap(), Some(9));
        });
    }
}
