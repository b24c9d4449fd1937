//! The rule in every order of calls; the window in host memory, on the fake CUDA driver, and over a tier.
#![forbid(unsafe_code)]

mod blocked;
mod device;
mod order;
mod tier;

use super::device::{ALIGNMENT, Host};
use super::engine::{Home, Unit, Window};
use crate::gpu::tests::bytes_at as seen;
use crate::pool::buffer::Buffer;
use crate::pool::region::Backing;

/// Pinned memory with values of a unit, which differ by unit and step.
fn memory(bytes: usize, unit: usize, step: usize) -> Buffer {
    let memory = Buffer::open(bytes, Backing { huge: false, lock: false, node: None }).unwrap();
    memory.span().write(&values(bytes, unit, step));
    memory
}

fn values(bytes: usize, unit: usize, step: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at * 7 + unit * 31 + step * 101) as u8).collect()
}

fn unit(memory: &Buffer, bytes: usize, keep: bool) -> Unit {
    Unit { bytes: bytes as u64, home: Home::Memory(memory.transfer(0, bytes)), keep }
}

fn on_host(units: &[Unit], slots: usize, tier: Option<std::sync::Arc<crate::tier::Tier>>) -> Window {
    Window::open(units, slots, tier, |layout| Ok(Box::new(Host::new(layout)?))).unwrap()
}

fn rounded(bytes: usize) -> u64 {
    (bytes as u64).next_multiple_of(ALIGNMENT)
}
