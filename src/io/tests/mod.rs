//! Tests of the engine over the real backends and over the simulation.

mod batches;
mod deadlines;
mod faults;
mod real;
mod tuned;

use std::time::Duration;

use super::engine::Engine;
use super::options::{BackendChoice, Options, Request, Target};
use crate::sys::span::Span;

/// Timeout of a test: long enough for any machine, so reaching it means a hang.
const PATIENCE: Option<Duration> = Some(Duration::from_secs(60));

/// Engines on both real backends. Under an emulator, which has no io_uring, on threads alone.
///
/// # Panics
///
/// On any other system that refuses io_uring: half of a test must not be left out in silence.
fn engines(options: Options) -> Vec<Engine> {
    let backends = match std::env::var_os("SPILLWAY_TEST_EMULATOR") {
        Some(_) => vec![BackendChoice::Threads],
        None => vec![BackendChoice::Uring, BackendChoice::Threads],
    };
    let open = |backend| {
        Engine::open(Options { backend, ..options }).unwrap_or_else(|error| {
            panic!("{error}; these tests need io_uring: allow it (sysctl kernel.io_uring_disabled, seccomp)")
        })
    };
    backends.into_iter().map(open).collect()
}

fn request(target: Target<'_>, offset: u64, span: Span) -> Request<'_> {
    Request { target, offset, buffer: span.into(), deadline: None }
}

/// Test bytes that differ by offset and by seed.
fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}
