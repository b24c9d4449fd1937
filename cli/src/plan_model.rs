//! `spillway plan MODEL`: reads the model's description and the machine's figures, and prints the plan.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use bytesize::ByteSize;
use spillway::error::{Error, Result};
use spillway::offload::swap::budget;
use spillway::offload::swap::encoding::Encoding;
use spillway::sys::descriptor;
use spillway_planner::model::config::{Model, parameters};
use spillway_planner::model::machine::{Machine, PathSpec, Workload};
use spillway_planner::model::presets;
use spillway_planner::model::report::{Outcome, Plan, plan};
use spillway_planner::model::strategy::{Strategy, TierNeed};

use super::plan_machine::{self, Sources};
use super::{plan_report, plan_svg, stdout};

/// Largest description of a model; those of transformers have a few kilobytes.
const MOST_BYTES: u64 = 1 << 20;
/// Most subgroups of a model of which only the size is given.
const MOST_SUBGROUPS: u64 = 1000;

/// A model, the machine and the run.
#[derive(clap::Args)]
#[group(id = "planner")]
#[command(next_help_heading = "With MODEL")]
pub struct Options {
    /// A config.json of transformers, a folder with one, a description, or a model of a paper; without MODEL and
    /// --parameters, only an interleaved update is planned.
    #[arg(help_heading = None, group = "subject", conflicts_with = "interleaved")]
    model: Option<String>,
    /// In place of MODEL: a decoder with this number of parameters, such as 7B, 350M or 7e9, of an assumed shape.
    #[arg(long, group = "subject", conflicts_with = "interleaved", value_name = "NUMBER", value_parser = parameters)]
    parameters: Option<u64>,
    #[command(flatten)]
    pub machine: plan_machine::Options,
    /// GPUs of the machine that train, one rank each; default: those of --machine, else 1.
    #[arg(long, requires = "subject", conflicts_with = "interleaved")]
    ranks: Option<u64>,
    /// ZeRO stage: 3 shards the weights over the ranks, 2 does not.
    #[arg(long, requires = "subject", conflicts_with = "interleaved", default_value_t = Workload::DEFAULT.stage)]
    zero_stage: u64,
    /// Sequences of a micro-batch.
    #[arg(long, requires = "subject", conflicts_with = "interleaved", default_value_t = Workload::DEFAULT.micro_batch)]
    micro_batch: u64,
    /// Tokens of a sequence.
    #[arg(long, requires = "subject", conflicts_with = "interleaved", default_value_t = Workload::DEFAULT.sequence)]
    sequence: u64,
    /// Micro-batches of a step.
    #[arg(long, requires = "subject", conflicts_with = "interleaved", default_value_t = Workload::DEFAULT.accumulation)]
    accumulation: u64,
    /// Keeps all activations, instead of one checkpoint per layer.
    #[arg(long, requires = "subject", conflicts_with = "interleaved")]
    no_recompute: bool,
    /// Parameters of a subgroup; default: 100000000, and with --parameters at least a thousandth of them.
    #[arg(long, requires = "subject", conflicts_with = "interleaved")]
    sub_group_size: Option<u64>,
    /// No step is committed, so that the paths need not keep the earlier state.
    #[arg(long, requires = "subject", conflicts_with = "interleaved")]
    no_commits: bool,
    /// GPU memory that the plan leaves alone, such as 1GiB.
    #[arg(long, requires = "subject", conflicts_with = "interleaved", value_parser = plan_machine::memory,
          default_value_t = ByteSize::b(Workload::DEFAULT.gpu_reserve))]
    gpu_reserve: ByteSize,
    /// Draws a step of the best strategy, or of --strategy, into this SVG file.
    #[arg(long, requires = "subject", conflicts_with = "interleaved", value_name = "FILE.svg")]
    svg: Option<PathBuf>,
    /// The strategy that --svg draws, as the table names it.
    #[arg(long, requires = "svg", value_parser = strategy)]
    strategy: Option<Strategy>,
}

/// The JSON object: the plan, and where each figure of the machine comes from.
#[derive(serde::Serialize)]
struct Report<'a> {
    #[serde(flatten)]
    plan: &'a Plan,
    sources: &'a Sources,
    /// How a program asks for each strategy, by its name.
    calls: BTreeMap<&'static str, String>,
}

impl Options {
    /// The model that is to be planned; `None`: no option names one.
    pub fn named(&self) -> Result<Option<Model>> {
        match &self.model {
            Some(name) => model(name).map(Some),
            None => Ok(self.parameters.map(Model::decoder)),
        }
    }

    fn subgroup(&self) -> u64 {
        let least = self.parameters.map_or(0, |parameters| parameters / MOST_SUBGROUPS);
        self.sub_group_size.unwrap_or(Workload::DEFAULT.subgroup.max(least))
    }
}

/// Plans a model with these options.
pub fn run(model: &Model, options: &Options, json: bool) -> Result<()> {
    let found = plan_machine::machine(&options.machine)?;
    let run = Workload {
        ranks: options.ranks.unwrap_or(found.gpus),
        stage: options.zero_stage,
        micro_batch: options.micro_batch,
        sequence: options.sequence,
        accumulation: options.accumulation,
        recompute: !options.no_recompute,
        subgroup: options.subgroup(),
        commits: !options.no_commits,
        gpu_reserve: options.gpu_reserve.as_u64(),
    };
    let plan = plan(model, &found.machine, &run, &tier_need)?;
    if let Some(path) = &options.svg {
        let drawn = drawn(&plan, options.strategy)?;
        let svg =
            plan_svg::svg(&plan, drawn).map_err(|reason| Error::System { what: "drawing --svg", reason })?;
        std::fs::write(path, svg).map_err(|error| Error::System {
            what: "writing the file of --svg",
            reason: format!("{}: {error}", path.display()),
        })?;
    }
    if json {
        // A program reads in the object that nothing fits.
        let call = |outcome: &Outcome| (outcome.strategy.name(), plan_report::call(outcome, run.ranks));
        let calls = plan.strategies.iter().map(call);
        return stdout::say_json(&Report { plan: &plan, sources: &found.sources, calls: calls.collect() });
    }
    let with_a_path = with_a_path(&plan)?;
    match options.machine.fit {
        Some(_) => stdout::say(&plan_report::fitting(&plan, &found.sources, with_a_path.as_ref()))?,
        None => stdout::say(&plan_report::text(&plan, &found.sources, with_a_path.as_ref()))?,
    }
    match plan.best {
        Some(_) => Ok(()),
        None => {
            let reason = "no strategy fits; the plan says what each one lacks".to_string();
            Err(Error::System { what: "planning", reason })
        }
    }
}

/// The plan with a path that has room for everything, if without one nothing fits. It assumes 1 GB/s for this path.
fn with_a_path(without: &Plan) -> Result<Option<Plan>> {
    if without.best.is_some() || !without.machine.paths.is_empty() {
        return Ok(None);
    }
    let path = PathSpec { name: "DIR".to_string(), read: 1e9, write: 1e9, capacity: 1 << 60 };
    let machine = Machine { paths: vec![path], ..without.machine.clone() };
    let found = plan(&without.model, &machine, &without.run, &tier_need)?;
    Ok(found.best.is_some().then_some(found))
}

/// The model of a paper, or the file's.
fn model(name: &str) -> Result<Model> {
    if let Some(model) = presets::model(name) {
        return Ok(model);
    }
    let path = Path::new(name);
    let path = if path.is_dir() { path.join("config.json") } else { path.to_path_buf() };
    let refuse = |reason: String| Error::invalid("MODEL", format!("{}: {reason}", path.display()));
    let bytes = descriptor::read_small(&path, MOST_BYTES).map_err(refuse)?.ok_or_else(|| {
        let of = |names: Vec<String>| Some(format!("{} to {}", names.first()?, names.last()?));
        let papers: Vec<String> = presets::model_names().filter_map(of).collect();
        let by_size = match parameters(name) {
            Ok(_) => format!("--parameters {name} plans a decoder of that size"),
            Err(_) => "--parameters 7B plans a decoder of a size".to_string(),
        };
        refuse(format!(
            "there is no such file; {by_size}, and the models of the papers are {}",
            papers.join(", ")
        ))
    })?;
    Ok(Model::parse(&path.display().to_string(), &bytes)?)
}

/// The memory of a tiered update, as the update computes it.
fn tier_need(
    sizes: &[u64],
    split: bool,
    paths: usize,
    limit: Option<u64>,
) -> spillway_planner::error::Result<TierNeed> {
    use spillway_planner::error::Error as Refused;
    budget_of(sizes, split, paths, limit).map_err(|error| match error {
        Error::InvalidArgument { argument, reason } => Refused::InvalidArgument { argument, reason },
        other => Refused::Internal(other.to_string()),
    })
}

fn budget_of(sizes: &[u64], split: bool, paths: usize, limit: Option<u64>) -> Result<TierNeed> {
    let encoding = if split { Encoding::SPLIT } else { Encoding::FULL };
    let limit = match limit {
        Some(limit) => limit,
        None => budget::plan(sizes, encoding, paths, u64::MAX / 2)?.working_bytes,
    };
    let found = budget::plan(sizes, encoding, paths, limit)?;
    Ok(TierNeed {
        host_bytes: found.host_bytes,
        state_bytes: found.state_bytes,
        step_bytes: found.step_bytes,
        buffers: found.buffers as u64,
        cached: found.cached as u64,
    })
}

/// The outcome that --svg draws.
fn drawn(plan: &Plan, asked: Option<Strategy>) -> Result<&Outcome> {
    let name = asked
        .map(Strategy::name)
        .or(plan.best)
        .ok_or_else(|| Error::invalid("--svg", "no strategy fits the machine; name one with --strategy"))?;
    let outcome = plan.strategies.iter().find(|outcome| outcome.strategy.name() == name);
    outcome.filter(|outcome| outcome.step.is_some()).ok_or_else(|| {
        Error::invalid(
            "--strategy",
            format!("{name} has no timeline on this machine: it needs paths, buffers or GPU memory"),
        )
    })
}

fn strategy(text: &str) -> std::result::Result<Strategy, String> {
    let found = Strategy::ALL.into_iter().find(|strategy| strategy.name() == text);
    found.ok_or_else(|| format!("must be one of {}", Strategy::ALL.map(Strategy::name).join(", ")))
}
