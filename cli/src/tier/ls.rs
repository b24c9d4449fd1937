//! `spillway tier ls`.
#![forbid(unsafe_code)]

use std::fmt::Write;

use spillway::error::Result;
use spillway::offload::swap::tensors_of;
use spillway::tier::format::{ExtentRecord, Superblock};
use spillway::tier::inspect::Found;

use super::which::{Which, plain, step_of};
use crate::report::{size, table};
use crate::stdout;

#[derive(clap::Args)]
pub struct Options {
    #[command(flatten)]
    which: Which,
    /// Prints one JSON object instead of text.
    #[arg(long)]
    json: bool,
}

#[derive(serde::Serialize)]
struct Report {
    version: &'static str,
    tiers: Vec<TierReport>,
}

#[derive(serde::Serialize)]
struct TierReport {
    job: String,
    host: String,
    rank: u32,
    /// Number of ranks; absent if no superblock can be read.
    world: Option<u32>,
    /// The last committed step.
    step: Option<u64>,
    /// Bytes of the record that the commit stores beside the extents.
    record_bytes: usize,
    block_bytes: Option<u64>,
    /// The process that claimed the tier last.
    claimed_by: Option<String>,
    /// True if that process runs; absent if this machine cannot know it.
    claimant_runs: Option<bool>,
    damage: Vec<String>,
    paths: Vec<PathReport>,
    extents: Vec<ExtentReport>,
}

#[derive(serde::Serialize)]
struct PathReport {
    path: String,
    memory: bool,
    /// False if the path is not among those that were given.
    found: bool,
    file_bytes: u64,
    /// Bytes of the committed extents there, with the padding of blocks.
    data_bytes: u64,
    /// Bytes written since the tier was created.
    written_bytes: u64,
}

#[derive(serde::Serialize)]
struct ExtentReport {
    name: String,
    bytes: u64,
    streams: Vec<StreamReport>,
    /// 0 if the extent was never written.
    generation: u64,
    /// Share of each path, in the order of the paths.
    shares: Vec<f64>,
}

#[derive(serde::Serialize)]
struct StreamReport {
    bytes: u64,
    /// Name and dtype of an optimizer's state; absent for other extents.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dtype: Option<&'static str>,
}

pub fn run(options: &Options) -> Result<()> {
    let tiers: Vec<TierReport> = match options.json {
        true => options.which.find()?.iter().map(report).collect(),
        false => options.which.some()?.iter().map(report).collect(),
    };
    match options.json {
        true => stdout::say_json(&Report { version: spillway::VERSION, tiers }),
        false => stdout::say(&tiers.iter().map(text).collect::<Vec<_>>().join("\n\n")),
    }
}

fn report(found: &Found) -> TierReport {
    let superblock = found.superblock.as_ref();
    let extents: Vec<&ExtentRecord> =
        superblock.iter().flat_map(|one| one.extents.iter().flatten()).collect();
    TierReport {
        job: found.owner.job.clone(),
        host: found.owner.host.clone(),
        rank: found.owner.rank,
        world: superblock.map(|one| one.world),
        step: superblock.and_then(|one| one.step),
        record_bytes: superblock.map_or(0, |one| one.payload.len()),
        block_bytes: superblock.map(|one| one.block_bytes),
        claimed_by: found.claimed_by.as_ref().map(|one| one.process.clone()),
        claimant_runs: found.claimed_by.as_ref().and_then(|one| one.lives),
        damage: found.damage.clone(),
        paths: superblock.map_or_else(Vec::new, |one| paths(found, one, &extents)),
        extents: extents.iter().map(|one| extent(one, superblock.map_or(0, |one| one.paths.len()))).collect(),
    }
}

fn paths(found: &Found, superblock: &Superblock, extents: &[&ExtentRecord]) -> Vec<PathReport> {
    let missing = found.missing();
    let data = extents.iter().map(|one| stored(one, superblock.paths.len()));
    let data = data.fold(vec![0; superblock.paths.len()], |sum, one| {
        sum.iter().zip(one).map(|(sum, bytes)| sum + bytes).collect::<Vec<u64>>()
    });
    let reports = superblock.paths.iter().zip(data).map(|(record, data_bytes)| PathReport {
        path: if record.memory { "memory".to_string() } else { record.name.clone() },
        memory: record.memory,
        found: !record.memory && !record.name.is_empty() && !missing.contains(&record.name),
        file_bytes: record.end,
        data_bytes,
        written_bytes: record.written,
    });
    reports.collect()
}

/// Bytes of an extent on each path.
fn stored(extent: &ExtentRecord, paths: usize) -> Vec<u64> {
    let mut bytes = vec![0; paths];
    for chunk in extent.version.iter().flat_map(|version| &version.chunks) {
        bytes[chunk.path as usize] += extent.shape.stored(chunk.first, chunk.count);
    }
    bytes
}

fn extent(record: &ExtentRecord, paths: usize) -> ExtentReport {
    let stored = stored(record, paths);
    let all = stored.iter().sum::<u64>().max(1) as f64;
    let tensors = tensors_of(&record.name, record.shape.streams().len());
    let stream = |(n, bytes): (usize, &u64)| {
        let (name, dtype) = tensors.map(|tensors| tensors[n]).unzip();
        StreamReport { bytes: *bytes, name, dtype }
    };
    ExtentReport {
        name: record.name.clone(),
        bytes: record.shape.bytes(),
        streams: record.shape.streams().iter().enumerate().map(stream).collect(),
        generation: record.version.as_ref().map_or(0, |version| version.generation),
        shares: stored.iter().map(|bytes| *bytes as f64 / all).collect(),
    }
}

fn text(tier: &TierReport) -> String {
    let world = tier.world.map_or_else(String::new, |world| format!(" of {world}"));
    let step = step_of(tier.step);
    let bytes = tier.extents.iter().map(|extent| extent.bytes).sum();
    let mut text = format!(
        "{} on {}, rank {}{world}: {step}, {} extents, {} in all, record of {} bytes\n",
        tier.job,
        tier.host,
        tier.rank,
        tier.extents.len(),
        size(bytes),
        tier.record_bytes
    );
    if let Some(process) = &tier.claimed_by {
        let runs = match tier.claimant_runs {
            Some(true) => "which runs",
            Some(false) => "which has ended",
            None => "of which this machine knows nothing more",
        };
        let _ = writeln!(text, "claimed last by {}, {runs}", plain(process));
    }
    tier.damage.iter().for_each(|damage| {
        let _ = writeln!(text, "damaged: {}", plain(damage));
    });
    for (number, path) in tier.paths.iter().enumerate() {
        let missing =
            if path.found || path.memory || path.path.is_empty() { "" } else { ", not given or missing" };
        let data = size(path.data_bytes);
        let _ = writeln!(text, "path {number}: {}, {data} of data{missing}", plain(&path.path));
    }
    if tier.extents.is_empty() {
        return text;
    }
    let mut rows = table(["extent", "bytes", "streams", "generation", "paths"]);
    for extent in &tier.extents {
        let mut dtypes: Vec<&str> = extent.streams.iter().filter_map(|stream| stream.dtype).collect();
        dtypes.dedup();
        let streams = format!("{} {}", extent.streams.len(), dtypes.join(", ")).trim_end().to_string();
        let shares = extent.shares.iter().enumerate().filter(|(_, share)| **share > 0.0);
        let shares: Vec<String> =
            shares.map(|(path, share)| format!("{path}: {:.0} %", 100.0 * share)).collect();
        rows.add_row([
            plain(&extent.name),
            extent.bytes.to_string(),
            streams,
            extent.generation.to_string(),
            shares.join(", "),
        ]);
    }
    text + &rows.to_string()
}
