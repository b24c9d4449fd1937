//! Parts of extents on their way between paths and files: in lanes, one for each path, each with buffers of its own. So
//! all paths work at the same time, and reads overlap writes.
//!
//! Invariants:
//! - The memory of all lanes is that of their buffers: [`MEMORY`], or two blocks a lane if that is more.
//! - A part is stored only after it was fetched and checked.
//! - A lane that fails ends the others. When a lane has ended, none of its transfers is in flight.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};

use super::volume::Scratch;
use crate::error::{Error, Result};
use crate::pool::transfer_buffer::TransferBuffer;
use crate::sys::sync::Lock;
use crate::sys::threads;

/// Bytes of the buffers of all lanes.
const MEMORY: u64 = 128 << 20;
/// Bytes of a buffer, unless blocks are larger or lanes are many.
const PART: u64 = 4 << 20;
/// Most buffers of a lane: more do not make a path faster.
const MOST_BUFFERS: u64 = 16;
/// Bytes of the only buffer of a lane that leaves bandwidth to others.
const GENTLE: u64 = 16 << 20;

/// The buffers of a lane.
#[derive(Debug, Clone, Copy)]
pub(super) struct Buffers {
    most: usize,
    pub(super) bytes: u64,
}

impl Buffers {
    /// For one of `lanes` lanes.
    pub(super) fn of(lanes: usize, block_bytes: u64) -> Buffers {
        let own = MEMORY / lanes.max(1) as u64;
        let bytes = whole_blocks(PART.min(own / 2), block_bytes);
        Buffers { most: (own / bytes).clamp(2, MOST_BUFFERS) as usize, bytes }
    }

    /// One buffer: a part is written before the next is read.
    pub(super) fn gentle(block_bytes: u64) -> Buffers {
        Buffers { most: 1, bytes: whole_blocks(GENTLE, block_bytes) }
    }

    /// These, but no larger than `bytes`.
    pub(super) fn within(self, bytes: u64) -> Buffers {
        Buffers { bytes: self.bytes.min(bytes), ..self }
    }
}

fn whole_blocks(bytes: u64, block_bytes: u64) -> u64 {
    (bytes / block_bytes).max(1) * block_bytes
}

/// The way of parts from one end to the other. Parts are fetched and stored in their order.
pub(super) trait Route<P> {
    /// Starts to fetch a part.
    fn fetch(&mut self, part: &P, buffer: &TransferBuffer) -> Result<u64>;

    /// Waits until the part is fetched, if it was `started`.
    fn fetched(&mut self, part: &P, started: Result<u64>) -> Result<()>;

    /// Checks a fetched part.
    fn check(&mut self, part: &P, buffer: &TransferBuffer) -> Result<()>;

    /// Starts to store a part.
    fn store(&mut self, part: &P, buffer: &TransferBuffer) -> Result<u64>;

    /// Waits until the part is stored, if that was `started`.
    fn stored(&mut self, part: &P, started: Result<u64>) -> Result<()>;
}

/// A part with the memory that it is in, and its transfer.
type UnderWay<P> = VecDeque<(P, Result<u64>, Scratch)>;

/// Takes parts along a route, until `stop`.
pub(super) fn run<P>(
    mut parts: impl Iterator<Item = P>,
    buffers: Buffers,
    stop: &AtomicBool,
    route: &mut impl Route<P>,
) -> Result<()> {
    let (mut coming, mut going) = (UnderWay::new(), UnderWay::new());
    let (mut free, mut made) = (Vec::new(), 0);
    let mut step = || -> Result<bool> {
        while made < buffers.most || !free.is_empty() {
            let Some(part) = parts.next() else {
                (made, free) = (buffers.most, Vec::new());
                break;
            };
            let buffer = match free.pop() {
                Some(buffer) => buffer,
                None => Scratch::new(buffers.bytes as usize)?,
            };
            made = (made + 1).min(buffers.most);
            let started = route.fetch(&part, &buffer.transfer());
            coming.push_back((part, started, buffer));
        }
        // Half of the buffers may be on the way out before the lane waits for them.
        if (going.len() <= buffers.most / 2 || coming.is_empty())
            && let Some((part, started, buffer)) = coming.pop_front()
        {
            route.fetched(&part, started)?;
            route.check(&part, &buffer.transfer())?;
            let started = route.store(&part, &buffer.transfer());
            going.push_back((part, started, buffer));
            return Ok(true);
        }
        let Some((part, started, buffer)) = going.pop_front() else { return Ok(false) };
        route.stored(&part, started)?;
        free.push(buffer);
        Ok(true)
    };
    let outcome = loop {
        match step() {
            Ok(true) if !stop.load(Ordering::Relaxed) => {}
            ended => break ended.map(drop),
        }
    };
    // Empty unless the lane failed or was stopped. These outcomes change nothing then.
    coming.into_iter().for_each(|(part, started, _)| drop(route.fetched(&part, started)));
    going.into_iter().for_each(|(part, started, _)| drop(route.stored(&part, started)));
    outcome
}

/// Does the work of each lane, several lanes on threads of their own. Returns the first error.
pub(super) fn each<L: Send>(lanes: Vec<L>, work: impl Fn(L, &AtomicBool) -> Result<()> + Sync) -> Result<()> {
    let (stop, first) = (AtomicBool::new(false), Lock::new(None::<Error>));
    let ended = |outcome: Result<()>| {
        if let Err(error) = outcome {
            stop.store(true, Ordering::Relaxed);
            first.lock().get_or_insert(error);
        }
    };
    let (ended, work, stop) = (&ended, &work, &stop);
    match lanes.len() {
        0 | 1 => lanes.into_iter().for_each(|lane| ended(work(lane, stop))),
        _ => std::thread::scope(|scope| {
            for lane in lanes {
                let started =
                    threads::spawn_scoped_quiet(scope, "spillway-lane", move || ended(work(lane, stop)));
                ended(started.map_err(|error| Error::system("starting the thread of a path", &error)));
            }
        }),
    }
    first.into_inner().map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_keep_to_the_memory_for_any_number_of_lanes() {
        for (lanes, block) in [(1, 4096), (2, 1 << 20), (3, 4096), (24, 1 << 20), (256, 4096), (2, 8 << 20)] {
            let Buffers { most, bytes } = Buffers::of(lanes, block);
            assert!(bytes.is_multiple_of(block) && most >= 2, "{lanes} {block}");
            assert!(lanes as u64 * most as u64 * bytes <= MEMORY, "{lanes} {block}");
        }
        assert_eq!(Buffers::of(256, 1 << 30).bytes, 1 << 30);
    }

    /// Where a route fails.
    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Fails {
        Fetch,
        Check,
        Store,
    }

    /// A route that notes what it is asked for, and fails at one part.
    struct Noted {
        fails: (Fails, u32),
        under_way: i64,
        stored: Vec<u32>,
    }

    impl Noted {
        fn outcome(&self, doing: Fails, part: u32) -> Result<()> {
            if self.fails == (doing, part) { Err(Error::Busy("it fails".to_string())) } else { Ok(()) }
        }

        fn start(&mut self, doing: Fails, part: u32) -> Result<u64> {
            self.outcome(doing, part)?;
            self.under_way += 1;
            Ok(u64::from(part))
        }
    }

    impl Route<u32> for Noted {
        fn fetch(&mut self, part: &u32, _: &TransferBuffer) -> Result<u64> {
            self.start(Fails::Fetch, *part)
        }

        fn fetched(&mut self, part: &u32, started: Result<u64>) -> Result<()> {
            assert_eq!(u64::from(*part), started?);
            self.under_way -= 1;
            Ok(())
        }

        fn check(&mut self, part: &u32, _: &TransferBuffer) -> Result<()> {
            self.outcome(Fails::Check, *part)
        }

        fn store(&mut self, part: &u32, _: &TransferBuffer) -> Result<u64> {
            self.start(Fails::Store, *part)
        }

        fn stored(&mut self, part: &u32, started: Result<u64>) -> Result<()> {
            assert_eq!(u64::from(*part), started?);
            self.under_way -= 1;
            self.stored.push(*part);
            Ok(())
        }
    }

    /// Wherever a route fails, the parts before are stored first.
    #[test]
    fn parts_keep_their_order_and_nothing_is_under_way_at_the_end() {
        for most in [1, 2, 3, 8] {
            let buffers = Buffers { most, bytes: 4096 };
            for at in [0, 5, 100] {
                for doing in [Fails::Fetch, Fails::Check, Fails::Store] {
                    let mut route = Noted { fails: (doing, at), under_way: 0, stored: Vec::new() };
                    let outcome = run(0..20, buffers, &AtomicBool::new(false), &mut route);
                    assert_eq!((outcome.is_ok(), route.under_way), (at == 100, 0), "{most} {doing:?} {at}");
                    let before: Vec<u32> = (0..at.min(20)).collect();
                    assert_eq!(route.stored[..before.len()], before, "{most} {doing:?} {at}");
                    assert!(route.stored.is_sorted() && !route.stored.contains(&at));
                }
            }
        }
    }
}
