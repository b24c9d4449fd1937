//! `spillway tier`: lists, checks, copies and removes the tiers that programs left in directories.
//!
//! `ls` and copies of all ranks only read files. The other commands claim the tier, so they fail while a process uses it.
//! `verify`, `snapshot` and `export` write no superblock: a run can still go back to the step before the last one.
#![forbid(unsafe_code)]

mod all_ranks;
mod copy;
mod ls;
mod rm;
mod verify;
mod which;

use spillway::error::Result;

#[derive(clap::Subcommand)]
pub enum Command {
    /// Lists the tiers below directories, and what their last commits hold; reads files only.
    Ls(ls::Options),
    /// Reads every block and compares it with its checksum; fails if something is damaged.
    Verify(verify::Options),
    /// Writes the last commit to a new directory, which `import` reads.
    Snapshot(copy::SnapshotOptions),
    /// Writes the last commit, or parts of it, to a new file of the format safetensors.
    Export(copy::ExportOptions),
    /// Reads what `export` or `snapshot` wrote, or another safetensors file, into a tier, and commits it.
    Import(copy::ImportOptions),
    /// Removes tiers, or extents of a tier.
    Rm(rm::Options),
}

pub fn run(command: &Command) -> Result<()> {
    match command {
        Command::Ls(options) => ls::run(options),
        Command::Verify(options) => verify::run(options),
        Command::Snapshot(options) => copy::snapshot(options),
        Command::Export(options) => copy::export(options),
        Command::Import(options) => copy::import(options),
        Command::Rm(options) => rm::run(options),
    }
}
