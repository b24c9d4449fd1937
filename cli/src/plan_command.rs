//! `spillway plan`: with a model, the plan of its training; without one, the plan of an interleaved update.
#![forbid(unsafe_code)]

use spillway::error::Result;

use super::{plan, plan_model};

#[derive(clap::Args)]
#[group(skip)]
pub struct Options {
    /// Prints one JSON object instead of a table.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    model: plan_model::Options,
    #[command(flatten)]
    update: plan::Options,
}

pub fn run(options: &Options) -> Result<()> {
    match options.model.named()? {
        Some(model) => plan_model::run(&model, &options.model, options.json),
        None => plan::run(&options.update, options.json),
    }
}
