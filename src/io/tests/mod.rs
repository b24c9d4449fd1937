//! Tests of the engine over the real backends and over the simulation.

mod batches;
mod deadlines;
mod faults;
mod real;
mod tuned;

use std::time::Duration;

use super::engine::Engine;
use super::options::{Choice, Options, Request, Target};
use crate::sys::span::Span;

/// Long enough for any machine; a test that meets it has found a hang.
const PATIENCE: Option<Duration> = Some(Duration::from_secs(60));

/// Both real backends, as far as this machine has them.
fn engines(options: Options) -> Vec<Engine> {
    [Choice::Uring, Choice::Threads]
        .into_iter()
        .filter_map(|backend| Engine::open(Options { backend, ..options }).ok())
        .collect()
}

fn request(target: Target<'_>, offset: u64, span: Span) -> Request<'_> {
    Request { target, offset, span, deadline: None }
}

/// Bytes that differ from place to place and from seed to seed.
fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as u8
        })
        .collect()
}
