//! `spillway trace`: the predicted timeline of one interleaved step, as a file for Perfetto.
#![forbid(unsafe_code)]

use std::path::PathBuf;

use spillway::error::{Error, Result};
use spillway::offload::interleave::trace;

use super::{plan, stdout};

#[derive(clap::Args)]
#[group(skip)]
pub struct Options {
    /// Output file; open it in ui.perfetto.dev or chrome://tracing.
    #[arg(long, default_value = "step.json")]
    output: PathBuf,
    #[command(flatten)]
    plan: plan::Options,
}

pub fn run(options: &Options) -> Result<()> {
    let shape = options.plan.shape()?;
    let chosen = options.plan.plan(&shape)?;
    let trace = trace::of_prediction(&chosen.prediction);
    std::fs::write(&options.output, trace.to_json())
        .map_err(|error| Error::system("writing the file of --output", &error))?;
    stdout::say(&format!(
        "{}: {} spans, update exposed for {:.3} s",
        options.output.display(),
        trace.len(),
        chosen.prediction.exposed
    ))
}
