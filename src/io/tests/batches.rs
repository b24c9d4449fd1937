//! Operations are submitted in batches. The tests run the driver over a backend that counts the batches.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use super::faults::{SECTOR_512, buffers};
use crate::io::backend::{Action, Backend, Completion, Piece, Sleep, Wake};
use crate::io::driver::{Bounce, Driver};
use crate::io::file::File;
use crate::io::operation::{DriverLink, Operation};
use crate::io::options::TurnOptions;

const BLOCK: usize = 4096;
const DEPTH: usize = 32;

/// Completes the number of pieces that the driver waits for, oldest first, and records the size of each batch.
#[derive(Default)]
struct Counting {
    under_way: VecDeque<u64>,
    pushed: usize,
    batches: Vec<usize>,
    most: usize,
}

struct NoWake;

impl Wake for NoWake {
    fn wake(&self) {}
}

impl Backend for Counting {
    fn name(&self) -> &'static str {
        "counting"
    }

    fn push(&mut self, piece: Piece) {
        self.pushed += 1;
        self.under_way.push_back(piece.token);
        self.most = self.most.max(self.under_way.len());
    }

    fn wait(&mut self, sleep: Sleep, done: &mut Vec<Completion>) -> io::Result<()> {
        self.batches.push(std::mem::take(&mut self.pushed));
        let ended = self.under_way.drain(..sleep.completions.min(self.under_way.len()));
        done.extend(ended.map(|token| Completion::of(token, BLOCK as i32)));
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Wake> {
        Arc::new(NoWake)
    }
}

/// Refuses the first piece 30 times, and completes the others only after it. Records how often the driver slept although the
/// refused piece had to wait, and how often it was started again.
#[derive(Default)]
struct Refusing {
    refused: usize,
    pending: Vec<u64>,
    others: Vec<u64>,
    slept: usize,
}

impl Backend for Refusing {
    fn name(&self) -> &'static str {
        "refusing"
    }

    fn push(&mut self, piece: Piece) {
        if piece.token == 0 { self.pending.push(piece.token) } else { self.others.push(piece.token) }
    }

    fn wait(&mut self, sleep: Sleep, done: &mut Vec<Completion>) -> io::Result<()> {
        if let Some(token) = self.pending.pop() {
            self.refused += 1;
            let result = if self.refused <= 30 { -libc::EAGAIN } else { BLOCK as i32 };
            done.push(Completion::of(token, result));
        } else if self.refused > 30 {
            done.extend(self.others.drain(..).map(|token| Completion::of(token, BLOCK as i32)));
        } else if let Some(until) = sleep.until.filter(|_| sleep.completions > 0) {
            self.slept += 1;
            std::thread::sleep(until.saturating_duration_since(Instant::now()));
        }
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Wake> {
        Arc::new(NoWake)
    }
}

/// The backend's records after `count` operations of one piece each.
fn run(count: usize) -> Counting {
    run_on(count, Counting::default())
}

fn run_on<B: Backend>(count: usize, mut backend: B) -> B {
    let buffers = buffers(BLOCK, 1);
    let span = buffers[0].span();
    let file = Arc::new(File::named("file", 1, Some(SECTOR_512)));
    let shared = Arc::new(DriverLink::new(None));
    for n in 0..count {
        shared.state.lock().admit(|handle| Operation {
            handle,
            action: Action::Write,
            file: Arc::clone(&file),
            offset: (n * BLOCK) as u64,
            span,
            piece: BLOCK as u64,
            lease: Default::default(),
            submitted: Instant::now(),
            deadline: None,
            started: false.into(),
            expired: false.into(),
        });
    }
    shared.state.lock().closing = true;
    let bounce = Bounce::new(BLOCK, 1).unwrap();
    Driver::new(Arc::clone(&shared), DEPTH, bounce, TurnOptions::NONE).run(&mut backend).unwrap();
    assert_eq!(shared.state.lock().unfinished, 0);
    backend
}

#[test]
fn operations_that_wait_are_started_together_up_to_the_depth() {
    let few = run(10);
    assert_eq!((few.batches[0], few.most), (10, 10), "one call to the system for ten operations");
    let many = run(1000);
    assert_eq!((many.batches[0], many.most), (DEPTH, DEPTH));
}

#[test]
fn a_stream_is_refilled_in_batches() {
    let Counting { batches, most, .. } = run(1000);
    assert_eq!((batches.iter().sum::<usize>(), most), (1000, DEPTH));
    // The first completion makes the driver wait for batches; after the last few operations nothing is left to submit.
    let refills: Vec<usize> = batches.into_iter().skip(2).filter(|started| *started > 0).collect();
    assert!(refills.len() > 100, "{refills:?}");
    assert!(refills[..refills.len() - 1].iter().all(|started| *started == DEPTH / 4), "{refills:?}");
}

#[test]
fn completions_of_others_arrive_while_a_refused_piece_waits_for_its_next_try() {
    let Refusing { refused, slept, .. } = run_on(4, Refusing::default());
    assert_eq!(refused, 31);
    assert!(slept >= 10, "the driver waits in the backend: {slept}");
}
