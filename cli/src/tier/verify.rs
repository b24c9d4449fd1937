//! `spillway tier verify`.
#![forbid(unsafe_code)]

use spillway::error::{Error, Result, TierKind};
use spillway::tier::inspect::Found;
use spillway::tier::verify::VerifyReport;

use super::which::{Which, open_to_read, plain, step_of};
use crate::progress::Copying;
use crate::report::size;
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
    tiers: Vec<Verified>,
}

#[derive(serde::Serialize)]
struct Verified {
    job: String,
    host: String,
    rank: u32,
    step: Option<u64>,
    extents: u64,
    blocks: u64,
    bytes: u64,
    damage: Vec<String>,
    #[serde(skip)]
    blocks_damaged: bool,
}

pub fn run(options: &Options) -> Result<()> {
    let tiers = options.which.some()?;
    let (mut verified, mut read, mut unread) = (Vec::new(), Vec::new(), Vec::new());
    for found in &tiers {
        match verify(found) {
            Ok(one) => {
                verified.push(one);
                read.push(found);
            }
            // The others are verified all the same.
            Err(error) => unread.push(error),
        }
    }
    let damaged: Vec<&Verified> = verified.iter().filter(|one| !one.damage.is_empty()).collect();
    let failed = damaged.len();
    let blocks = damaged.iter().any(|one| one.blocks_damaged);
    let report = Report { version: spillway::VERSION, tiers: verified };
    match options.json {
        true => stdout::say_json(&report)?,
        false => stdout::say(&report.tiers.iter().zip(read).map(text).collect::<String>())?,
    }
    match failed {
        0 => unread.into_iter().next().map_or(Ok(()), Err),
        _ => {
            unread.iter().for_each(|error| stdout::note(&format!("spillway: {error}")));
            let cure = match blocks {
                true => "restore them from a snapshot or an export, or train again from a checkpoint",
                false => {
                    "their other superblocks are whole, and the next commit of the program replaces the damaged ones"
                }
            };
            let reason = format!("{failed} of {} tiers are damaged; {cure}", report.tiers.len());
            Err(Error::System { what: "verifying", reason })
        }
    }
}

fn verify(found: &Found) -> Result<Verified> {
    let tier = match open_to_read(found) {
        Ok(tier) => tier,
        // Both superblocks are damaged: this is what the command looks for.
        Err(error) if found.superblock.is_none() && !found.damage.is_empty() => {
            return Ok(verified(found, VerifyReport { damage: vec![error], ..VerifyReport::default() }, &[]));
        }
        Err(error) if error.tier_kind() == Some(TierKind::NoState) => {
            return Ok(verified(found, VerifyReport::default(), &[]));
        }
        Err(error) => return Err(error),
    };
    let bytes = tier.extents().iter().flat_map(|extent| &extent.streams).sum();
    let reading = Copying::begin(&format!("reading {}", found.owner), bytes);
    let report = tier.verify_telling(&|bytes| reading.passed(bytes))?;
    drop(reading);
    tier.close(None)?;
    Ok(verified(found, report, &found.damage))
}

/// `superblocks`: what is wrong with superblocks in whose place others were used.
fn verified(found: &Found, report: VerifyReport, superblocks: &[String]) -> Verified {
    let superblocks =
        superblocks.iter().map(|text| format!("{text}; another one is used, which may be a step older"));
    Verified {
        job: found.owner.job.clone(),
        host: found.owner.host.clone(),
        rank: found.owner.rank,
        step: found.superblock.as_ref().and_then(|one| one.step),
        extents: report.extents,
        blocks: report.blocks,
        bytes: report.bytes,
        blocks_damaged: !report.damage.is_empty(),
        damage: superblocks.chain(report.damage.iter().map(Error::to_string)).collect(),
    }
}

fn text((tier, found): (&Verified, &Found)) -> String {
    let mut text = format!(
        "{}: {}, {} extents, {} blocks, {}: {}\n",
        found.owner,
        step_of(tier.step),
        tier.extents,
        tier.blocks,
        size(tier.bytes),
        if tier.damage.is_empty() { "no damage" } else { "DAMAGED" }
    );
    tier.damage.iter().for_each(|damage| text += &format!("  {}\n", plain(damage)));
    text
}
