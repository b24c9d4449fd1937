//! The plan: every strategy with its bytes and seconds, whether it fits, and the best that does.
#![forbid(unsafe_code)]

use serde::Serialize;

use super::super::interleave::placements::Placement as Where;
use super::super::interleave::share::{self, Balance};
use super::super::{split, weights};
use super::bytes::size;
use super::config::Model;
use super::machine::{Machine, PathSpec, Workload};
use super::step::{self, PathSeconds, StepTimes};
use super::strategy::{Case, GpuBytes, HostBytes, Placement, Residents, Strategy, TierBudget, Traffic};
use crate::error::{Error, Result};

/// Units in which the state is divided over the paths; a tiered update moves parts of subgroups.
const UNITS: usize = 10_000;

/// The plan of a model on a machine.
#[derive(Debug, Clone, Serialize)]
pub struct Plan {
    /// The model.
    pub model: Model,
    /// The machine.
    pub machine: Machine,
    /// The run.
    pub run: Workload,
    /// Parameters of a rank's shard.
    pub shard_parameters: u64,
    /// Number of subgroups of a rank; all have `run.subgroup` parameters but the last, which has the rest.
    pub subgroups: usize,
    /// Bytes of all model states in mixed precision without offload: 16 per parameter (SuperOffload section 2.2).
    pub model_state_bytes: u64,
    /// Weights that flow (SuperOffload Eq. 1 to 3).
    pub weight_flow: WeightFlow,
    /// The share of the GPU (Deep Optimizer States Eq. 1).
    pub interleave: Interleave,
    /// All strategies.
    pub strategies: Vec<Outcome>,
    /// Name of the strategy with the shortest step among those that fit, with moments in f32 if one of them does.
    pub best: Option<&'static str>,
    /// Name of the strategy with the shortest step among all that fit.
    pub fastest: Option<&'static str>,
}

/// Weights that are loaded from the host for each pass.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct WeightFlow {
    /// Efficiency of a forward pass if all weights flow (Eq. 3).
    pub efficiency: f64,
    /// True if the loads can be hidden: an efficiency of at least 50 %.
    pub hidden: bool,
    /// True if the margin of the paper is met: an efficiency of at least 60 %.
    pub recommended: bool,
}

/// The share of the GPU in an update of infinite length.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Interleave {
    /// CPU subgroups per GPU subgroup (k); `None`: no subgroup should be on the GPU.
    pub eq1_k: Option<f64>,
    /// The stride that follows from Eq. 1.
    pub derived_stride: usize,
    /// Best fraction of the parameters on the GPU, with two slots.
    pub gpu_share: f64,
    /// Parameters per second with that share, for one GPU.
    pub parameters_per_second: f64,
    /// Parameters per second of step, rounding and upload one after the other, for one GPU.
    pub serial_parameters_per_second: f64,
}

/// One strategy.
#[derive(Debug, Clone, Serialize)]
pub struct Outcome {
    /// Its name.
    pub strategy: Strategy,
    /// True if GPU, host and paths have room.
    pub fits: bool,
    /// Why it does not fit.
    pub reasons: Vec<String>,
    /// Memory of each GPU.
    pub gpu: GpuBytes,
    /// Sum of `gpu`.
    pub gpu_bytes: u64,
    /// Host memory of all ranks.
    pub host: HostBytes,
    /// Sum of `host`.
    pub host_bytes: u64,
    /// States on each path.
    pub paths: Vec<PathUse>,
    /// Bytes that a step moves.
    pub traffic: Traffic,
    /// "stationary", or "flow": weights in host memory are loaded for each pass.
    pub weights: &'static str,
    /// Fraction of the weights in host memory.
    pub weights_on_host: f64,
    /// Subgroups of a rank that host memory keeps from step to step.
    pub cached_subgroups: u64,
    /// Subgroups of an interleaved plan whose states stay on the GPU of their rank.
    pub residents: Residents,
    /// Buckets, or subgroups of an interleaved plan, that the GPU steps.
    pub gpu_steps: usize,
    /// The times; `None` if host memory cannot hold even the buffers.
    pub seconds: Option<Seconds>,
    /// The work of a step, for its timeline.
    #[serde(skip)]
    pub step: Option<StepTimes>,
}

/// Seconds of a step.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Seconds {
    /// Forward passes.
    pub forward: f64,
    /// Backward passes.
    pub backward: f64,
    /// The rest of the step, in which the GPU runs neither.
    pub exposed: f64,
    /// The whole step.
    pub step: f64,
    /// Tokens of all ranks per second.
    pub tokens_per_second: f64,
}

/// States on a path.
#[derive(Debug, Clone, Serialize)]
pub struct PathUse {
    /// The path.
    pub name: String,
    /// Its share (MLP-Offload Eq. 1), less where it has no room.
    pub share: f64,
    /// Bytes of states.
    pub bytes: u64,
    /// Bytes of the data file: also the earlier state that a commit keeps, or the subgroups in motion.
    pub space_bytes: u64,
}

/// Plans `model` on `machine`. Fails where an argument is out of range; a strategy that does not fit is not an error.
pub fn plan(model: &Model, machine: &Machine, run: &Workload, budget: &TierBudget) -> Result<Plan> {
    let case = Case::new(model, machine, run, budget)?;
    let mut strategies = Vec::new();
    for strategy in Strategy::ALL {
        let paths = machine.paths.len();
        let has_paths = if strategy == Strategy::TierOnePath { paths > 1 } else { paths > 0 };
        if !strategy.is_tiered() || has_paths {
            let found = outcome(&case, strategy)?;
            let shortens = |without: &Outcome| {
                let step = |outcome: &Outcome| outcome.seconds.map_or(f64::INFINITY, |seconds| seconds.step);
                found.residents.subgroups > 0 && step(&found) < step(without)
            };
            // The one before it is the same without residents.
            if strategy != Strategy::InterleaveResidents || strategies.last().is_some_and(shortens) {
                strategies.push(found);
            }
        }
    }
    let fastest = quickest(&strategies, |_| true);
    let best = quickest(&strategies, Strategy::is_exact).or(fastest);
    let efficiency = weights::efficiency(machine.flops, machine.h2d, run.tokens() as f64);
    let rates = case.rates();
    let gpu_share = share::gpu_share(&rates, 0.0, Balance::TwoSlots);
    Ok(Plan {
        model: model.clone(),
        machine: machine.clone(),
        run: *run,
        shard_parameters: case.shard,
        subgroups: case.sizes.len(),
        model_state_bytes: 16 * model.parameters,
        weight_flow: WeightFlow {
            efficiency,
            hidden: efficiency >= weights::LEAST_EFFICIENCY,
            recommended: efficiency >= weights::GOOD_EFFICIENCY,
        },
        interleave: Interleave {
            eq1_k: share::cpu_per_gpu(&rates, 0.0, Balance::OneSlot),
            derived_stride: share::derived_stride(&rates),
            gpu_share,
            parameters_per_second: share::throughput(&rates, 0.0, gpu_share, Balance::TwoSlots),
            serial_parameters_per_second: share::serial_throughput(&rates),
        },
        best,
        fastest,
        strategies,
    })
}

/// The strategy with the shortest step among those that fit; of two, the earlier one.
fn quickest(strategies: &[Outcome], counts: fn(Strategy) -> bool) -> Option<&'static str> {
    let fitting = strategies.iter().filter(|outcome| outcome.fits && counts(outcome.strategy));
    let timed = fitting.filter_map(|outcome| Some((outcome.strategy.name(), outcome.seconds?.step)));
    timed.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(name, _)| name)
}

fn outcome(case: &Case, strategy: Strategy) -> Result<Outcome> {
    let placed = match case.place(strategy) {
        // The buffers of a tiered update do not fit, which is the answer.
        Err(Error::InvalidArgument { argument, reason }) if argument == "host_memory" => {
            return Ok(refused(strategy, reason));
        }
        placed => placed?,
    };
    let (machine, run) = (case.machine, case.run);
    let mut reasons = Vec::new();
    let flow = placed.flow;
    let beside = placed.gpu.total() - placed.gpu.weights;
    if flow > 0.0 && beside > machine.gpu_memory {
        let there = machine.gpu_memory;
        reasons.push(format!(
            "each GPU has {}, but {} are needed beside its weights",
            size(there),
            size(beside)
        ));
    }
    let host = placed.host_of_all(run.ranks);
    for (what, needed, there) in [
        ("each GPU", placed.gpu.total(), machine.gpu_memory),
        ("the host", host.total(), machine.host_memory),
    ] {
        if needed > there && !reasons.iter().any(|reason: &String| reason.starts_with(what)) {
            reasons.push(format!("{what} has {}, but {} are needed", size(there), size(needed)));
        }
    }
    let specs = case.paths(strategy);
    let (stored, space) = (placed.stored * run.ranks, path_space(&placed, run));
    let (paths, seconds) = match strategy.is_tiered() {
        false => (Vec::new(), None),
        true => match divide(&specs, space) {
            Ok(shares) => {
                let seconds = path_seconds(&specs, &shares, run.ranks);
                (uses(&specs, &shares, stored, space), Some(seconds))
            }
            Err(reason) => {
                reasons.push(format!("the paths have no room for {space} bytes: {reason}"));
                let equal = vec![1.0 / specs.len() as f64; specs.len()];
                (Vec::new(), Some(path_seconds(&specs, &equal, run.ranks)))
            }
        },
    };
    let step = step::predict(case, strategy, &placed, flow, seconds);
    let tokens = run.tokens() as f64 * run.accumulation as f64 * run.ranks as f64;
    Ok(Outcome {
        strategy,
        fits: reasons.is_empty(),
        reasons,
        gpu_bytes: placed.gpu.total(),
        gpu: placed.gpu,
        host_bytes: host.total(),
        host,
        paths,
        traffic: placed.traffic,
        weights: if flow > 0.0 { "flow" } else { "stationary" },
        weights_on_host: flow,
        cached_subgroups: placed.tier.map_or(0, |need| need.cached),
        residents: placed.residents,
        gpu_steps: match &placed.interleaved {
            Some(chosen) => chosen.plan.count() - chosen.plan.count_on(Where::Cpu),
            None => placed.tail as usize,
        },
        seconds: Some(Seconds {
            forward: step.forward,
            backward: step.backward,
            exposed: step.exposed,
            step: step.total,
            tokens_per_second: tokens / step.total,
        }),
        step: Some(step),
    })
}

/// Bytes of the data files of all ranks. The tier never overwrites a committed state; without commits, the subgroups in
/// motion have a second place.
fn path_space(placed: &Placement, run: &Workload) -> u64 {
    let in_motion = placed.tier.map_or(0, |need| {
        let buffer = need.host_bytes.checked_div(need.buffers).unwrap_or(0);
        (need.buffers - need.cached) * buffer
    });
    (placed.stored + if run.commits { placed.stored } else { in_motion }) * run.ranks
}

/// Shares of the paths in `space` bytes, by Eq. 1.
fn divide(paths: &[&PathSpec], space: u64) -> std::result::Result<Vec<f64>, String> {
    let speeds: Vec<f64> = paths.iter().map(|path| path.speed()).collect();
    let unit = (space as f64 / UNITS as f64).max(1.0);
    let room: Vec<usize> = paths.iter().map(|path| (path.capacity as f64 / unit) as usize).collect();
    let parts = split::shares(UNITS, &speeds, &room).map_err(|error| error.to_string())?;
    Ok(parts.iter().map(|part| *part as f64 / UNITS as f64).collect())
}

fn uses(paths: &[&PathSpec], shares: &[f64], stored: u64, space: u64) -> Vec<PathUse> {
    let of = |(path, share): (&&PathSpec, &f64)| PathUse {
        name: path.name.clone(),
        share: *share,
        bytes: (stored as f64 * share) as u64,
        space_bytes: (space as f64 * share) as u64,
    };
    paths.iter().zip(shares).map(of).collect()
}

/// Seconds per byte of one rank: all paths work at once, and ranks take turns.
fn path_seconds(paths: &[&PathSpec], shares: &[f64], ranks: u64) -> PathSeconds {
    let slowest = |speed: fn(&PathSpec) -> f64| {
        let each = paths.iter().zip(shares).map(|(path, share)| share / speed(path));
        each.fold(0.0, f64::max) * ranks as f64
    };
    PathSeconds { read: slowest(|path| path.read), write: slowest(|path| path.write) }
}

/// A strategy whose host memory cannot hold even its buffers.
fn refused(strategy: Strategy, reason: String) -> Outcome {
    Outcome {
        strategy,
        fits: false,
        reasons: vec![reason],
        gpu: GpuBytes::default(),
        gpu_bytes: 0,
        host: HostBytes::default(),
        host_bytes: 0,
        paths: Vec::new(),
        traffic: Traffic::default(),
        weights: "stationary",
        weights_on_host: 0.0,
        cached_subgroups: 0,
        residents: Residents::default(),
        gpu_steps: 0,
        seconds: None,
        step: None,
    }
}
