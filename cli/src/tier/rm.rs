//! `spillway tier rm`.
#![forbid(unsafe_code)]

use spillway::error::{Error, Result};
use spillway::tier::inspect::Found;
use spillway::tier::options::PathLocation;
use spillway::tier::select::Selection;

use super::{Which, open, title};
use crate::report::size;
use crate::stdout;

#[derive(clap::Args)]
pub struct Options {
    #[command(flatten)]
    which: Which,
    /// Removes the extents with such a name only, and commits; may be repeated. `*` stands for any letters, `?` for one.
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
    let Some(superblock) = &found.superblock else { return title(found) };
    let step = superblock.step.map_or("no commit".to_string(), |step| format!("step {step}"));
    let bytes = superblock.extents.iter().flatten().map(|extent| extent.shape.bytes()).sum();
    format!("{}: {step}, {}", title(found), size(bytes))
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
        return Err(selection.nothing(&title(found)));
    }
    let names: Vec<String> = removed.iter().map(|extent| format!("{:?}", extent.name)).collect();
    confirm(options, &[format!("the extents {} of {}", names.join(", "), title(found))])?;
    removed.iter().try_for_each(|extent| tier.remove(extent.number))?;
    let opened = tier.opened().clone();
    tier.commit(opened.step.unwrap_or_default(), &opened.payload)?;
    tier.close(None)?;
    stdout::say(&format!("removed {} of {}", names.join(", "), title(found)))
}
