//! `spillway topo`: draws the machine, and says how a launcher binds ranks to the nodes of their GPUs.
#![forbid(unsafe_code)]

mod launch;
mod placed;
mod svg;
mod text;

use std::path::PathBuf;

use spillway::error::{Error, Result};
use spillway::gpu::machine::Machine;
use spillway::gpu::visible::Ask;
use spillway::sys::topology::Root;
use spillway::sys::topology::placement::Scope;

use crate::stdout;
use placed::Placed;

#[derive(clap::Args)]
pub struct Options {
    /// Number of ranks on this machine; default: one for each visible GPU, else one.
    #[arg(long)]
    ranks: Option<u32>,
    /// Processors of a rank: those of the node of its GPU, or of that node's package.
    #[arg(long, default_value = "node", value_parser = scope)]
    scope: Scope,
    /// Share of a rank's cores for the optimizer's workers, as DeepSpeed's cpuadam_cores_perc.
    #[arg(long, default_value_t = 0.8)]
    share: f64,
    /// Reads the GPUs' order from CUDA_VISIBLE_DEVICES and PCI, without loading the CUDA driver.
    #[arg(long)]
    no_driver: bool,
    /// Reads a recorded tree with `sys` and `proc` below this directory instead of this machine.
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,
    /// Prints one JSON object instead of text.
    #[arg(long)]
    json: bool,
    /// Draws the machine in this SVG file too.
    #[arg(long, value_name = "FILE.svg")]
    svg: Option<PathBuf>,
}

#[derive(serde::Serialize)]
struct Report<'a> {
    #[serde(flatten)]
    machine: &'a Machine,
    ranks: &'a [Placed<'a>],
    launch: launch::Launch,
}

pub fn run(options: &Options) -> Result<()> {
    let root = options.root.as_ref().map_or_else(|| Ok(Root::live()), Root::recorded);
    let root = root.map_err(|error| error.within("--"))?;
    let machine = Machine::read(root, if options.no_driver { Ask::Never } else { Ask::Load })?;
    let ranks = options.ranks.unwrap_or(machine.visible.gpus.len().max(1) as u32);
    let ranks = machine.place(ranks, options.scope, options.share)?;
    let placed = |rank| Placed { rank, drives: machine.drives_near(&rank.cpus) };
    let placed: Vec<Placed> = ranks.iter().map(placed).collect();
    let list = spillway::gpu::visible::visible_devices();
    let launch = launch::Launch::new(&machine, &ranks, options.scope, list.as_deref());
    if let Some(path) = &options.svg {
        std::fs::write(path, svg::svg(&machine, &placed)).map_err(|error| Error::System {
            what: "writing the file of --svg",
            reason: format!("{}: {error}", path.display()),
        })?;
    }
    match options.json {
        true => {
            let report = Report { machine: &machine, ranks: &placed, launch };
            stdout::say_json(&report)
        }
        false => stdout::say(&[text::machine(&machine), text::ranks(&placed), launch.text()].concat()),
    }
}

fn scope(text: &str) -> std::result::Result<Scope, String> {
    match text {
        "node" => Ok(Scope::Node),
        "package" => Ok(Scope::Package),
        _ => Err("must be node or package".to_string()),
    }
}
