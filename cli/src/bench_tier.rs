//! `spillway bench tier`: the cost of a tier's checksums.
//!
//! A step fetches every extent and writes it again, with two fetches ahead and writes in the background, then commits.
//! Steps with and without checksums alternate on the same tier; both times of a ratio are of one round.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::Instant;

use spillway::error::Result;
use spillway::pool::buffer::Buffer;
use spillway::pool::region::Backing;
use spillway::pool::transfer_buffer::TransferBuffer;
use spillway::tier::directory::Owner;
use spillway::tier::options::{Mode, TierOptions};
use spillway::tier::{ExtentPlacement, Tier};

use super::measurement::{Better, Row, ratios};
use super::output::{Output, Session};
use super::progress::Progress;
use super::report::{Column, parse_count, size};

#[derive(clap::Args)]
pub struct Options {
    /// Directories, one per path of the tier.
    #[arg(required = true)]
    directories: Vec<PathBuf>,
    #[command(flatten)]
    output: Output,
    /// Bytes of an extent, with Ki or Mi.
    #[arg(long, default_value = "64Mi", value_parser = parse_count)]
    size: usize,
    /// Number of extents.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    extents: u32,
    /// Number of rounds.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
}

const COLUMNS: &[Column] = &[
    Column::case("paths", "paths", 5),
    Column::case("extents", "extents", 7),
    Column::case("of", "extent_bytes", 6),
    Column::case("checksums", "checksums", 9),
    Column::median("seconds", "seconds", 7, 3),
    Column::median("GB/s", "gb_per_s", 7, 3),
    Column::median("ratio", "ratio_to_unchecked", 6, 3),
    Column::spread(3),
];

/// Number of extents fetched ahead.
const AHEAD: usize = 2;
/// Number of buffers: those being fetched, one in use, those being written.
const BUFFERS: usize = AHEAD + 3;

pub fn run(options: &Options) -> Result<()> {
    let settings = [("rounds", options.rounds.into())];
    let stages = 2 + options.rounds as usize;
    let mut session = Session::begin(&options.output, "tier", settings, COLUMNS, stages)?;
    let owner = Owner { job: "bench".to_string(), host: "here".to_string(), rank: 0 };
    let settings =
        TierOptions { mode: Mode::Create, ..TierOptions::new(owner, options.directories.iter().cloned()) };
    let tier = Tier::open(settings)?;
    let outcome = measure(&tier, options, session.progress());
    tier.destroy()?;
    let seconds = outcome?;
    // Every extent is read and written.
    let moved = 2.0 * options.size as f64 * f64::from(options.extents);
    for (checksums, own) in ["with", "without"].into_iter().zip(&seconds) {
        let rates: Vec<f64> = own.iter().map(|seconds| moved / seconds / 1e9).collect();
        session.row(
            Row::new("ratio_to_unchecked", Better::Lower)
                .case("paths", options.directories.len())
                .case("extents", options.extents)
                .case("extent_bytes", options.size)
                .case("checksums", checksums)
                .figure("seconds", own)
                .figure("gb_per_s", &rates)
                .figure("ratio_to_unchecked", &ratios(own, &seconds[1])),
        )?;
    }
    session.finish()
}

/// Seconds of each step with checksums, and of each without.
fn measure(tier: &Tier, options: &Options, progress: &Progress) -> Result<[Vec<f64>; 2]> {
    let bytes = options.size as u64;
    let memory = Buffer::open_many(BUFFERS, options.size, Backing::default())?;
    let buffers: Vec<_> = memory.iter().map(|buffer| buffer.transfer(0, options.size)).collect();
    let mut extents = Vec::new();
    progress.begin(&format!("writing {} extents of {}", options.extents, size(bytes)));
    for n in 0..options.extents {
        let extent = tier.define(&format!("extent-{n}"), &[bytes])?;
        let path = ExtentPlacement::On(n % options.directories.len() as u32);
        let ticket = tier.write(extent, &buffers[..1], &path, None)?;
        tier.wait(ticket, None)?;
        extents.push(extent);
    }
    tier.commit(0, &[])?;
    progress.end();
    let mut seconds = [Vec::new(), Vec::new()];
    for round in 0..=u64::from(options.rounds) {
        progress.begin(&format!("round {round} of {}", options.rounds));
        for (case, checked) in [(0, round % 2 == 0), (1, round % 2 != 0)] {
            let start = Instant::now();
            step(tier, &extents, &buffers, checked)?;
            tier.commit(2 * round + case + 1, &[])?;
            // The first round extends the files to their final length.
            if round > 0 {
                seconds[usize::from(!checked)].push(start.elapsed().as_secs_f64());
            }
        }
        progress.end();
    }
    Ok(seconds)
}

fn step(tier: &Tier, extents: &[u32], buffers: &[TransferBuffer], checked: bool) -> Result<()> {
    let mut free = buffers.to_vec();
    let (mut reads, mut writes) = (VecDeque::new(), VecDeque::new());
    let mut next = extents.iter();
    loop {
        while reads.len() <= AHEAD && !free.is_empty() {
            let Some(extent) = next.next() else { break };
            let Some(buffer) = free.pop() else { break };
            let ticket = tier.read(*extent, std::slice::from_ref(&buffer), !checked)?;
            reads.push_back((*extent, buffer, ticket));
        }
        if let Some((extent, buffer, ticket)) = reads.pop_front() {
            tier.wait(ticket, None)?;
            // Without checksums: reuse the known sums instead of computing them.
            let sums = if checked { None } else { tier.checksums(extent)?.map(|sums| sums.to_vec()) };
            let ticket = tier.write(extent, std::slice::from_ref(&buffer), &ExtentPlacement::Auto, sums)?;
            writes.push_back((buffer, ticket));
        } else if writes.is_empty() {
            return Ok(());
        }
        if free.is_empty() || reads.is_empty() {
            let Some((buffer, ticket)) = writes.pop_front() else { continue };
            tier.wait(ticket, None)?;
            free.push(buffer);
        }
    }
}
