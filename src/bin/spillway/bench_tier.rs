//! `spillway bench tier`: the cost of a tier's checksums.
//!
//! A step fetches every extent and writes it again, with two fetches ahead and writes in the background, then commits.
//! Steps with and without checksums alternate on the same tier; the ratio is the median of the rounds' ratios.
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

use super::progress::Progress;
use super::report::{median, parse_count, size};

#[derive(clap::Args)]
pub struct Options {
    /// Directories, one per path of the tier.
    #[arg(required = true)]
    directories: Vec<PathBuf>,
    /// Prints one JSON object instead of text.
    #[arg(long)]
    json: bool,
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

#[derive(serde::Serialize)]
struct Report {
    version: &'static str,
    bytes_per_step: u64,
    checked_gb_per_s: f64,
    unchecked_gb_per_s: f64,
    /// Ratio of the step times with and without checksums.
    ratio: f64,
}

/// Number of extents fetched ahead.
const AHEAD: usize = 2;
/// Number of buffers: those being fetched, one in use, those being written.
const BUFFERS: usize = AHEAD + 3;

pub fn run(options: &Options) -> Result<()> {
    let owner = Owner { job: "bench".to_string(), host: "here".to_string(), rank: 0 };
    let settings =
        TierOptions { mode: Mode::Create, ..TierOptions::new(owner, options.directories.iter().cloned()) };
    let tier = Tier::open(settings)?;
    let outcome = measure(&tier, options);
    tier.destroy()?;
    let report = outcome?;
    if options.json {
        println!("{}", serde_json::to_string_pretty(&report).unwrap_or_default());
    } else {
        let Report { bytes_per_step, checked_gb_per_s, unchecked_gb_per_s, ratio, .. } = report;
        println!("{} read and written per step", size(bytes_per_step));
        println!("with checksums    {checked_gb_per_s:.3} GB/s");
        println!("without           {unchecked_gb_per_s:.3} GB/s");
        println!("ratio             {ratio:.4}");
    }
    Ok(())
}

fn measure(tier: &Tier, options: &Options) -> Result<Report> {
    let bytes = options.size as u64;
    let memory = Buffer::open_many(BUFFERS, options.size, Backing::default())?;
    let buffers: Vec<_> = memory.iter().map(|buffer| buffer.transfer(0, options.size)).collect();
    let mut extents = Vec::new();
    let progress = Progress::new(2 + options.rounds as usize);
    progress.begin(&format!("writing {} extents of {}", options.extents, size(bytes)));
    for n in 0..options.extents {
        let extent = tier.define(&format!("extent-{n}"), &[bytes])?;
        let ticket = tier.write(
            extent,
            &buffers[..1],
            &ExtentPlacement::On(n % options.directories.len() as u32),
            None,
        )?;
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
    drop(progress);
    let moved = 2 * bytes * u64::from(options.extents);
    let rate = |seconds: &[f64]| moved as f64 / median(seconds) / 1e9;
    let ratios: Vec<f64> = seconds[0].iter().zip(&seconds[1]).map(|(with, without)| with / without).collect();
    Ok(Report {
        version: spillway::VERSION,
        bytes_per_step: moved,
        checked_gb_per_s: rate(&seconds[0]),
        unchecked_gb_per_s: rate(&seconds[1]),
        ratio: median(&ratios),
    })
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
