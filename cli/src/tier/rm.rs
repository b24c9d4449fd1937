//! `spillway tier rm`.
#![forbid(unsafe_code)]

use spillway::error::{Error, Result};
use spillway::tier::inspect::Found;
use spillway::tier::options::PathLocation;
use spillway::tier::select::Selection;
use spillway::tier::store::Opened;

use super::which::{Which, open, step_of};
use crate::report::size;
use crate::stdout;

#[derive(clap::Args)]
pub struct Options {
    #[command(flatten)]
    which: Which,
    /// Removes only the extents whose name matches, and commits; may be repeated. `*` stands for any letters, `?` for one.
    #[arg(long = "name", value_name = "PATTERN")]
    names: Vec<String>,
    /// Removes; without it the command only says what it would remove, and fails.
    #[arg(long)]
    yes: bool,
}

pub fn run(options: &Options) -> Result<()> {
    if !options.names.is_empty() {
        return extents(options, &options.which.one()?);
    }
    let tiers = options.which.some()?;
    let described: Vec<String> = tiers.iter().map(described).collect();
    confirm(options, &described)?;
    for (found, described) in tiers.iter().zip(described) {
        found.bases.iter().try_for_each(|base| PathLocation::of(base.clone()).collect(&found.owner))?;
        let left = found.missing();
        let left =
            if left.is_empty() { String::new() } else { format!("; its parts in {} stay", left.join(", ")) };
        stdout::say(&format!("removed {described}{left}"))?;
    }
    Ok(())
}

fn described(found: &Found) -> String {
    let Some(superblock) = &found.superblock else { return found.owner.to_string() };
    let bytes = superblock.extents.iter().flatten().map(|extent| extent.shape.bytes()).sum();
    format!("{}: {}, {}", found.owner, step_of(superblock.step), size(bytes))
}

fn confirm(options: &Options, what: &[String]) -> Result<()> {
    match options.yes {
        true => Ok(()),
        false => Err(Error::invalid("--yes", format!("is needed to remove {}", what.join("; ")))),
    }
}

fn extents(options: &Options, found: &Found) -> Result<()> {
    let selection = Selection { names: options.names.clone(), range: None };
    let tier = open(found)?;
    let removed: Vec<_> = tier.extents().into_iter().filter(|extent| selection.takes(&extent.name)).collect();
    if removed.is_empty() {
        return Err(selection.nothing(&found.owner.to_string()));
    }
    let names: Vec<String> = removed.iter().map(|extent| format!("{:?}", extent.name)).collect();
    confirm(options, &[format!("the extents {} of {}", names.join(", "), found.owner)])?;
    removed.iter().try_for_each(|extent| tier.remove(extent.number))?;
    let Opened { step, payload, .. } = tier.opened().clone();
    let step = step.ok_or_else(|| selection.nothing(&found.owner.to_string()))?;
    tier.commit(step, &payload)?;
    tier.close(None)?;
    stdout::say(&format!("removed {} of {}", names.join(", "), found.owner))
}
