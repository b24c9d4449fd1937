//! Tests of the tier on simulated disks and in real directories.
#![forbid(unsafe_code)]

mod before;
mod beside;
mod bucket;
mod commits;
mod crash;
mod degraded;
mod faults;
mod format;
mod hang;
mod in_flight;
mod memory;
mod opening;
mod others;
mod owners;
mod reading;
mod real;
mod removed;
mod truncated;

use std::sync::Mutex;
use std::time::Duration;

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

use super::directory::Owner;
use super::options::{Durability, Mode, PathLocation, PathOptions, TierOptions};
use super::volume::Scratch;
use super::{ExtentPlacement, Tier};
use crate::error::Result;
use crate::io::options::Options as IoOptions;
use crate::io::sim::{Disk, Faults, short_io_timeout};
use crate::pool::transfer_buffer::TransferBuffer;
use crate::sys::span::Span;

/// Timeout that is long enough for any machine.
const PATIENCE: Option<Duration> = Some(Duration::from_secs(60));
const BLOCK: u64 = 4096;
/// Stream lengths of the test extents: partial last blocks, an empty stream, a single block, many blocks.
const STREAMS: [&[u64]; 3] = [&[10_000, 5_000, 0, 4096], &[20_000], &[12_293, 1]];

fn owner() -> Owner {
    Owner { job: "run".to_string(), host: "node".to_string(), rank: 0 }
}

fn on_disks(disks: &[Disk], faults: &[Faults]) -> TierOptions {
    let path = |(n, disk): (usize, &Disk)| PathOptions {
        location: PathLocation::Simulated(disk.clone(), faults.get(n).cloned().unwrap_or_default()),
        limit: None,
        reserve: 0,
    };
    let io = IoOptions { depth: 4, block_bytes: 16 << 10, ..IoOptions::default() };
    let paths = disks.iter().enumerate().map(path).collect();
    TierOptions { paths, block_bytes: BLOCK, io, ..TierOptions::new(owner(), []) }
}

fn reorder(seed: u64) -> Faults {
    Faults { seed, reorder: true, ..Faults::default() }
}

/// Pseudo-random bytes that depend on position and seed.
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

/// Memory for the streams of an extent; each stream begins on a page.
struct Memory {
    all: Scratch,
    streams: Vec<u64>,
}

impl Memory {
    fn new(streams: &[u64]) -> Memory {
        let pages = streams.iter().map(|bytes| bytes.next_multiple_of(BLOCK)).sum::<u64>();
        Memory { all: Scratch::new(pages as usize).unwrap(), streams: streams.to_vec() }
    }

    fn filled(streams: &[u64], seed: u64) -> Memory {
        let memory = Memory::new(streams);
        for (n, span) in (0..).zip(memory.spans()) {
            span.write(&pattern(seed * 10 + n, span.len()));
        }
        memory
    }

    fn buffers(&self) -> Vec<TransferBuffer> {
        let mut from = 0;
        let part = |bytes: &u64| {
            let part = self.all.transfer().part(from, *bytes as usize);
            from += bytes.next_multiple_of(BLOCK) as usize;
            part
        };
        self.streams.iter().map(part).collect()
    }

    fn spans(&self) -> Vec<Span> {
        self.buffers().iter().map(TransferBuffer::span).collect()
    }

    fn holds(&self, seed: u64) -> bool {
        (0..).zip(self.spans()).all(|(n, span)| span.to_vec() == pattern(seed * 10 + n, span.len()))
    }
}

/// Seed of the contents of extent `n` at a step.
fn seed_of(step: u64, n: usize) -> u64 {
    step * 100 + n as u64 + 1
}

fn name_of(n: usize) -> String {
    format!("subgroup-{n}")
}

fn write(tier: &Tier, n: usize, seed: u64, placement: &ExtentPlacement) -> Result<()> {
    let extent = tier.define(&name_of(n), STREAMS[n])?;
    let memory = Memory::filled(STREAMS[n], seed);
    let ticket = tier.write(extent, &memory.buffers(), placement, None)?;
    tier.wait(ticket, PATIENCE).map(|_| ())
}

/// Reads extent `n`; true if it holds the contents of `seed`.
fn read(tier: &Tier, n: usize, seed: u64) -> Result<bool> {
    let extent = tier.define(&name_of(n), STREAMS[n])?;
    let memory = Memory::new(STREAMS[n]);
    let ticket = tier.read(extent, &memory.buffers())?;
    tier.wait(ticket, PATIENCE)?;
    Ok(memory.holds(seed))
}

/// Writes all extents concurrently, alternating over the paths, and commits.
fn step(tier: &Tier, step: u64) -> Result<()> {
    write_all(tier, step)?;
    tier.commit(step, &step.to_le_bytes())
}

/// Writes all extents concurrently, alternating over the paths.
fn write_all(tier: &Tier, step: u64) -> Result<()> {
    let memories: Vec<Memory> =
        (0..STREAMS.len()).map(|n| Memory::filled(STREAMS[n], seed_of(step, n))).collect();
    let paths = tier.paths().len() as u32;
    let mut tickets = Vec::new();
    for (n, memory) in memories.iter().enumerate() {
        let extent = tier.define(&name_of(n), STREAMS[n])?;
        let placement = match (n, step % 3) {
            (_, 0) => ExtentPlacement::Auto,
            (0, _) => ExtentPlacement::Striped((0..paths).map(|path| (path, 2)).collect()),
            _ => ExtentPlacement::On((n as u64 + step) as u32 % paths),
        };
        tickets.push(tier.write(extent, &memory.buffers(), &placement, None)?);
    }
    tickets.into_iter().try_for_each(|ticket| tier.wait(ticket, PATIENCE).map(drop))
}

/// True if every extent and the payload have the contents of `step`.
fn is_at(tier: &Tier, step: u64) -> bool {
    tier.opened().payload == step.to_le_bytes()
        && (0..STREAMS.len()).all(|n| read(tier, n, seed_of(step, n)).unwrap())
}

/// Waits for another thread.
fn until(reached: impl Fn() -> bool) {
    let end = std::time::Instant::now() + Duration::from_secs(60);
    while !reached() {
        assert!(std::time::Instant::now() < end, "it never came so far");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Pins a test and the engines that it opens to one core. The crash tests switch thousands of times between two threads
/// that never run at once. Waking a thread on another core takes several times as long.
struct OneCore {
    before: CpuSet,
    core: usize,
}

/// Number of tests pinned to each core.
static ON_CORES: Mutex<Vec<usize>> = Mutex::new(Vec::new());

impl OneCore {
    fn take() -> OneCore {
        let before = sched_getaffinity(Pid::from_raw(0)).unwrap();
        let mut used = ON_CORES.lock().unwrap();
        used.resize(CpuSet::count(), 0);
        let cores = (0..CpuSet::count()).filter(|core| before.is_set(*core).unwrap());
        let core = cores.min_by_key(|core| used[*core]).unwrap();
        used[core] += 1;
        let mut only = CpuSet::new();
        only.set(core).unwrap();
        sched_setaffinity(Pid::from_raw(0), &only).unwrap();
        OneCore { before, core }
    }
}

impl Drop for OneCore {
    fn drop(&mut self) {
        ON_CORES.lock().unwrap()[self.core] -= 1;
        let _ = sched_setaffinity(Pid::from_raw(0), &self.before);
    }
}
