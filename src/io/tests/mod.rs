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

/// Timeout of a test: long enough for any machine, so reaching it means a hang.
const PATIENCE: Option<Duration> = Some(Duration::from_secs(60));

/// Engines on both real backends; io_uring is skipped if the system refuses to create a ring.
fn engines(options: Options) -> Vec<Engine> {
    [Choice::Uring, Choice::Threads]
        .into_iter()
        .filter(|backend| *backend != Choice::Uring || system_has_rings())
        .map(|backend| Engine::open(Options { backend, ..options }).unwrap())
        .collect()
}

/// True if the system can create the smallest ring; independent of this library's code.
fn system_has_rings() -> bool {
    // All zero: no flags.
    let mut parameters = [0_u32; 30];
    // SAFETY: the call writes a struct of 120 bytes, which the array has.
    let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr()) };
    if ring >= 0 {
        // SAFETY: a descriptor that the call above opened.
        unsafe { libc::close(ring as i32) };
    }
    ring >= 0
}

fn request(target: Target<'_>, offset: u64, span: Span) -> Request<'_> {
    Request { target, offset, span, deadline: None }
}

/// Test bytes that differ by offset and by seed.
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
