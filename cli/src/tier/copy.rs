//! `spillway tier snapshot`, `export` and `import`.
#![forbid(unsafe_code)]

use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytesize::ByteSize;
use spillway::error::{Doing, Error, IoError, IoKind, Result, TierError, TierKind};
use spillway::offload::swap::exported_tensors;
use spillway::sys::host;
use spillway::tier::Tier;
use spillway::tier::directory::Owner;
use spillway::tier::export::{Export, Form, Pace};
use spillway::tier::import::Source;
use spillway::tier::inspect::Found;
use spillway::tier::options::{Mode, TierOptions};
use spillway::tier::select::Selection;
use spillway::tier::snapshot::TierSnapshot;

use super::all_ranks::{Ranks, added, part};
use super::which::{Which, open};
use crate::progress::Copying;
use crate::report::size;
use crate::stdout;

#[derive(clap::Args)]
pub struct SnapshotOptions {
    /// The new directory.
    #[arg(value_name = "DIR")]
    to: PathBuf,
    #[command(flatten)]
    which: Which,
    /// Limits the speed, such as 200MB; 0 means no limit.
    #[arg(long)]
    bytes_per_second: Option<ByteSize>,
    /// Writes the parts rank-0, rank-1 and so on of all ranks of the job, in the form of a snapshot by its program.
    #[arg(long, conflicts_with = "rank")]
    all_ranks: bool,
}

#[derive(clap::Args)]
pub struct ExportOptions {
    /// The new file; with --all-ranks the new directory.
    #[arg(value_name = "FILE")]
    to: PathBuf,
    #[command(flatten)]
    which: Which,
    /// Takes only the extents whose name matches; may be repeated. `*` stands for any letters, `?` for one.
    #[arg(long = "name", value_name = "PATTERN")]
    names: Vec<String>,
    /// Takes these elements of each tensor only. The file is then no export that `import` can restore.
    #[arg(long, value_name = "FROM:TO", value_parser = range)]
    range: Option<Range<u64>>,
    /// Type of the elements of extents that are no optimizer states, as safetensors names it.
    #[arg(long, default_value = "U8")]
    dtype: String,
    /// Writes a file rank-N.safetensors for each rank of the job, and index.json, which lists them.
    #[arg(long, conflicts_with = "rank")]
    all_ranks: bool,
}

#[derive(clap::Args)]
pub struct ImportOptions {
    /// The file or directory.
    #[arg(value_name = "FROM")]
    from: PathBuf,
    #[command(flatten)]
    which: Which,
    /// Takes only the extents whose name matches; may be repeated. `*` stands for any letters, `?` for one.
    #[arg(long = "name", value_name = "PATTERN")]
    names: Vec<String>,
    /// Makes a new tier, of the job, rank and number of ranks of the export unless --job, --rank or --world is given.
    /// Also takes one without a commit, which an interrupted import left.
    #[arg(long)]
    create: bool,
    /// Number of ranks of a new tier.
    #[arg(long, requires = "create")]
    world: Option<u32>,
}

fn range(text: &str) -> std::result::Result<Range<u64>, String> {
    let wrong = || format!("{text:?} is not FROM:TO with FROM below TO, such as 0:1000");
    let (from, to) = text.split_once(':').ok_or_else(wrong)?;
    let range = from.parse().map_err(|_| wrong())?..to.parse().map_err(|_| wrong())?;
    if range.is_empty() { Err(wrong()) } else { Ok(range) }
}

pub fn snapshot(options: &SnapshotOptions) -> Result<()> {
    if options.all_ranks {
        let ranks = Ranks::find(&options.which)?;
        let write = |found: &Found, tier, to: &Path| one_snapshot(options, tier, &part(to, found)).map(drop);
        ranks.write(&options.to, write)?;
        return stdout::say(&format!("{}: step {} of all ranks", options.to.display(), ranks.step()));
    }
    let found = options.which.one()?;
    let step = one_snapshot(options, open(&found)?, &options.to)?;
    stdout::say(&format!("{}: step {step} of {}", options.to.display(), found.owner))
}

/// Writes the snapshot of one tier, and closes the tier.
fn one_snapshot(options: &SnapshotOptions, tier: Tier, to: &Path) -> Result<u64> {
    const POLL: Option<Duration> = Some(Duration::from_millis(200));
    let tier = Arc::new(tier);
    let speed = options.bytes_per_second.map(|speed| speed.as_u64()).filter(|speed| *speed > 0);
    let snapshot = TierSnapshot::begin(&tier, to, speed)?;
    let copying = Copying::begin(&format!("writing {}", to.display()), snapshot.progress().bytes);
    let step = loop {
        match snapshot.wait(POLL) {
            Err(error) if error.io_kind() == Some(IoKind::Timeout) => {
                copying.reached(snapshot.progress().written);
            }
            ended => break ended?,
        }
    };
    drop(copying);
    drop(snapshot);
    close(tier).map(|()| step)
}

/// The entry of index.json for the file of one rank.
#[derive(serde::Serialize)]
struct Exported {
    rank: u32,
    host: String,
    file: String,
    bytes: u64,
}

/// The contents of index.json of an export of all ranks.
#[derive(serde::Serialize)]
struct Index {
    format: &'static str,
    step: u64,
    world: usize,
    ranks: Vec<Exported>,
}

pub fn export(options: &ExportOptions) -> Result<()> {
    if !options.all_ranks {
        let found = options.which.one()?;
        let (step, bytes, seconds) = one_export(options, open(&found)?, &options.to)?;
        let (to, owner) = (options.to.display(), &found.owner);
        return stdout::say(&format!("{to}: step {step} of {owner}, {} in {seconds:.1} s", size(bytes)));
    }
    let ranks = Ranks::find(&options.which)?;
    let mut written = Vec::new();
    ranks.write(&options.to, |found, tier, to| {
        let file = added(&part(to, found), ".safetensors");
        let (_, bytes, _) = one_export(options, tier, &file)?;
        let file = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        written.push(Exported { rank: found.owner.rank, host: found.owner.host.clone(), file, bytes });
        if found.owner.rank as usize + 1 == ranks.world() {
            let (step, ranks) = (ranks.step(), std::mem::take(&mut written));
            let index = Index { format: "spillway export of all ranks", step, world: ranks.len(), ranks };
            write_index(&to.join("index.json"), &index)?;
        }
        Ok(())
    })?;
    stdout::say(&format!("{}: step {} of {} ranks", options.to.display(), ranks.step(), ranks.world()))
}

fn write_index(path: &Path, index: &Index) -> Result<()> {
    let failed = |error: std::io::Error| IoError::of(&error, Doing::Writing, path.to_string_lossy());
    let text = serde_json::to_string_pretty(index).map_err(|error| Error::Internal(error.to_string()))?;
    let mut file = std::fs::File::create(path).map_err(failed)?;
    file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).map_err(failed)?;
    Ok(())
}

/// Writes the file of one tier, and closes the tier. Returns its step, bytes and seconds.
fn one_export(options: &ExportOptions, tier: Tier, to: &Path) -> Result<(u64, u64, f64)> {
    let selection = Selection { names: options.names.clone(), range: options.range.clone() };
    let tensors = |extent: &str, streams: usize| exported_tensors(extent, streams, &options.dtype);
    let export = Export::begin(&tier, to, Form::Safetensors(&tensors), &selection)?;
    let bytes = export.bytes();
    let copying = Copying::begin(&format!("writing {}", to.display()), bytes);
    let step = export.run(Pace::Fast, &|bytes| {
        copying.passed(bytes);
        Ok(())
    })?;
    let seconds = copying.seconds();
    drop(copying);
    tier.close(None).map(|()| (step, bytes, seconds))
}

pub fn import(options: &ImportOptions) -> Result<()> {
    let has = |name: &str| options.from.join(name).exists();
    if !has("manifest.json") && (has("index.json") || has("rank-0")) {
        let reason = format!(
            "{} holds several ranks; name what it has of one, such as rank-0",
            options.from.display()
        );
        return Err(Error::invalid("FROM", reason));
    }
    let source = Source::open(&options.from, TierOptions::IO_TIMEOUT)?;
    let selection = Selection { names: options.names.clone(), range: None };
    let (tier, owner) = match options.create {
        true => create(options, &source)?,
        false => {
            let found = options.which.one()?;
            check_rank(options, &source, &found.owner)?;
            (open(&found)?, found.owner)
        }
    };
    let bytes = source.bytes(&selection);
    let copying = Copying::begin(&format!("reading {}", options.from.display()), bytes);
    let imported = tier.import_from(&source, &selection, &|bytes| {
        copying.passed(bytes);
        Ok(())
    });
    drop(copying);
    let step = match imported {
        // A tier that this command made, and could not fill, is of no use.
        Err(error) if options.create => {
            tier.destroy()?;
            return Err(error);
        }
        imported => imported?,
    };
    tier.close(None)?;
    stdout::say(&format!("{owner}: step {step} from {}, {}", options.from.display(), size(bytes)))
}

/// Refuses the state of another rank, unless the program was told the rank or the extents.
fn check_rank(options: &ImportOptions, source: &Source, owner: &Owner) -> Result<()> {
    match source.origin() {
        Some(origin)
            if origin.rank != owner.rank && options.which.rank.is_none() && options.names.is_empty() =>
        {
            let (from, to) = (origin.rank, owner.rank);
            let reason = format!(
                "is missing: the export is of rank {from}, the tier of rank {to}; pass --rank {to} to import it there"
            );
            Err(Error::invalid("--rank", reason))
        }
        _ => Ok(()),
    }
}

fn create(options: &ImportOptions, source: &Source) -> Result<(Tier, Owner)> {
    let (which, origin) = (&options.which, source.origin());
    let job = which.job.clone().or_else(|| origin.map(|origin| origin.job.clone()));
    let job = job.ok_or_else(|| {
        Error::invalid("--job", "is missing, and no export wrote the file; name the job of the new tier")
    })?;
    let owner = Owner {
        job,
        host: which.host.clone().unwrap_or_else(host::name),
        rank: which.rank.or(origin.map(|origin| origin.rank)).unwrap_or(0),
    };
    let world = options.world.or(origin.map(|origin| origin.world)).unwrap_or(owner.rank.saturating_add(1));
    let exists = || {
        let message = "there is such a tier already; leave out --create to import into it, or remove it with `spillway tier rm`";
        Err(TierError::at(TierKind::Foreign, owner.to_string(), message))
    };
    let mode = match which.find()?.into_iter().find(|found| found.owner == owner) {
        None => Mode::Create,
        Some(found) => match found.superblock {
            None if found.damage.is_empty() => Mode::Create,
            Some(superblock) if superblock.step.is_none() => Mode::Auto,
            _ => return exists(),
        },
    };
    let tier = Tier::open(TierOptions {
        mode,
        world,
        ..TierOptions::new(owner.clone(), which.distinct().into_iter().cloned())
    })?;
    // Another process may have committed since the look.
    if tier.opened().step.is_some() {
        tier.close(None)?;
        return exists();
    }
    Ok((tier, owner))
}

/// Closes the tier of a snapshot that has ended.
fn close(tier: Arc<Tier>) -> Result<()> {
    let tier =
        Arc::into_inner(tier).ok_or_else(|| Error::Internal("a snapshot did not let its tier go".into()))?;
    tier.close(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_two_numbers_in_order() {
        assert_eq!(range("5:10"), Ok(5..10));
        for wrong in ["", "5", "5:", ":5", "5:5", "6:5", "-1:5", "1:2:3", "99999999999999999999:1"] {
            assert!(range(wrong).is_err(), "{wrong}");
        }
    }
}
