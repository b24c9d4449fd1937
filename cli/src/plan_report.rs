//! The plan of a model as text.
#![forbid(unsafe_code)]

use spillway_planner::model::case::Strategy;
use spillway_planner::model::report::{Outcome, Plan};

use super::plan_machine::Sources;
use super::report::{size, table};

/// The text of a plan. `with_a_path`: the plan with a path, where nothing fits without one.
pub fn text(plan: &Plan, sources: &Sources, with_a_path: Option<&Plan>) -> String {
    let mut parts = vec![model(plan), machine(plan, sources), strategies(plan)];
    parts.extend(lacks(plan, with_a_path));
    if let Some(outcome) = plan.strategies.iter().rev().find(|outcome| !outcome.paths.is_empty()) {
        let shares: Vec<String> = outcome
            .paths
            .iter()
            .map(|path| format!("{} {:.0} % ({})", path.name, 100.0 * path.share, size(path.bytes)))
            .collect();
        parts.push(format!("paths of {}: {}", outcome.strategy.name(), shares.join(", ")));
    }
    parts.extend(residents(plan));
    let flow = &plan.weight_flow;
    parts.push(format!(
        "weights that flow: efficiency {:.1} %{}",
        100.0 * flow.efficiency,
        match (flow.hidden, flow.recommended) {
            (_, true) => "",
            (true, _) => ", below the recommended 60 %",
            _ => ", too low to hide the loads: more tokens per micro-batch are needed",
        }
    ));
    parts.push(match (plan.best, plan.fastest) {
        (Some(best), Some(fastest)) if best != fastest => {
            format!("best: {best}; {fastest} is faster, but rounds the moments")
        }
        (Some(best), _) => format!("best: {best}"),
        (None, _) => "no strategy fits this machine".to_string(),
    });
    let best = plan.strategies.iter().find(|outcome| Some(outcome.strategy.name()) == plan.best);
    parts.extend(best.map(|outcome| format!("its call: {}", call(outcome, plan.run.ranks))));
    let text = parts.join("\n");
    text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
}

/// What each strategy lacks that does not fit, and what fits with a path.
fn lacks(plan: &Plan, with_a_path: Option<&Plan>) -> Vec<String> {
    let line = |outcome: &Outcome| {
        let reasons = outcome.reasons.join("; ");
        (!outcome.fits).then(|| format!("{} does not fit: {reasons}", outcome.strategy.name()))
    };
    let mut lines: Vec<String> = plan.strategies.iter().filter_map(line).collect();
    let tiers = with_a_path.map_or(&[][..], |found| &found.strategies).iter().filter(|outcome| outcome.fits);
    let space = |outcome: &Outcome| outcome.paths.iter().map(|path| path.space_bytes).sum::<u64>();
    if let Some(least) = tiers.clone().map(space).min() {
        let names: Vec<&str> = tiers.map(|outcome| outcome.strategy.name()).collect();
        lines.push(format!(
            "with a path of {} or more: {} fit; add --path DIR:READ:WRITE:CAPACITY, with GB/s of reads and writes",
            size(least),
            names.join(", ")
        ));
    }
    lines
}

/// What a plan of `--fit` takes for granted, in one line.
fn assumptions(plan: &Plan, sources: &Sources) -> String {
    let (run, machine) = (&plan.run, &plan.machine);
    let giga = |value: f64| format!("{:.2}", value / 1e9);
    let of = |field: &str, text: String| {
        let source = sources.get(field).map_or("assumed", String::as_str);
        format!("{text} ({source})")
    };
    [
        format!("of a step: {} x {} x {} tokens", run.accumulation, run.micro_batch, run.sequence),
        of("h2d", format!("link {} and {} GB/s", giga(machine.h2d), giga(machine.d2h))),
        of("cpu", format!("Adam {} G parameters/s on the CPU", giga(machine.cpu))),
        of("gpu", format!("{} on a GPU", giga(machine.gpu))),
        of("flops", format!("{:.0} x 10^12 operations/s", machine.flops / 1e12)),
    ]
    .join(", ")
}

/// What fits, fastest first, and how a program asks for it; what each strategy lacks, if none fits.
pub fn fitting(plan: &Plan, sources: &Sources, with_a_path: Option<&Plan>) -> String {
    let step = |outcome: &Outcome| outcome.seconds.as_ref().map_or(f64::INFINITY, |seconds| seconds.step);
    let mut fits: Vec<&Outcome> = plan.strategies.iter().filter(|outcome| outcome.fits).collect();
    fits.sort_by(|one, other| step(one).total_cmp(&step(other)));
    let mut table = table(["strategy", "GPU", "host", "link", "paths", "exposed s", "step s"]);
    for outcome in &fits {
        let [name, _, gpu, host, paths, .., exposed, step] = row(outcome);
        table.add_row([name, gpu, host, size(link(outcome)), paths, exposed, step]);
    }
    let mut parts = vec![model(plan), assumptions(plan, sources)];
    match fits.is_empty() {
        true => {
            parts.push("no strategy fits this machine".to_string());
            parts.extend(lacks(plan, with_a_path));
        }
        false => parts.push(format!("\n{table}\n")),
    }
    parts.extend(
        fits.iter().map(|outcome| format!("{}: {}", outcome.strategy.name(), call(outcome, plan.run.ranks))),
    );
    parts.join("\n")
}

/// The call that steps as a strategy does, on each of `ranks`.
pub fn call(outcome: &Outcome, ranks: u64) -> String {
    let flows = outcome.weights_on_host > 0.0;
    let offload = |options: &str| {
        let flow = if flows { ", weights=\"flow\", device=\"cuda\"" } else { "" };
        format!("spillway.torch.offload(model, torch.optim.AdamW{options}{flow})")
    };
    match outcome.strategy {
        Strategy::Gpu => "torch.optim.AdamW(model.parameters(), fused=True)".to_string(),
        Strategy::Host => offload(", overlap=False"),
        Strategy::HostBf16Moments => offload(", moment_dtype=\"bf16\", overlap=False"),
        Strategy::HostSplitMaster => offload(", moment_dtype=\"bf16\", master=\"split\""),
        Strategy::HostInt8Moments => {
            format!("{}; not for DTensors", offload(", moment_dtype=\"int8\", master=\"split\""))
        }
        Strategy::Speculation => offload(", tail=\"auto\""),
        Strategy::InterleaveResidents => {
            "no class of torch: a program over spillway/interleave.h".to_string()
        }
        Strategy::Interleave => {
            "only under DeepSpeed, ZeRO-3: \"interleave\": {} in the object \"spillway\" of its \
                                 configuration; or a program over spillway/interleave.h"
                .to_string()
        }
        Strategy::TierOnePath | Strategy::Tier | Strategy::TierCache => {
            let flow =
                if flows { "flow = spillway.torch.Flow(model, \"cuda\", keep_bytes=None); " } else { "" };
            let memory = match outcome.cached_subgroups {
                0 => String::new(),
                _ => format!(", host_memory={}", outcome.host.states / ranks),
            };
            format!(
                "{flow}spillway.torch.AdamW(model.parameters(), tier={}{memory}, overlap=True)",
                directories(outcome)
            )
        }
        Strategy::TierSplitMaster => format!(
            "only under DeepSpeed, ZeRO-3: \"paths\": {}, \"split_master\": true in the object \"spillway\" of its \
             configuration",
            directories(outcome)
        ),
    }
}

/// The directories of the paths, as a list of Python and JSON.
fn directories(outcome: &Outcome) -> String {
    match outcome.paths.as_slice() {
        [] => "[...]".to_string(),
        paths => format!("{:?}", paths.iter().map(|path| &path.name).collect::<Vec<_>>()),
    }
}

/// What residents change in an interleaved update.
fn residents(plan: &Plan) -> Option<String> {
    let of = |strategy| plan.strategies.iter().find(|outcome| outcome.strategy == strategy);
    let (with, without) = (of(Strategy::InterleaveResidents)?, of(Strategy::Interleave)?);
    let (kept, step) = (with.residents, |outcome: &Outcome| outcome.seconds.map(|seconds| seconds.step));
    Some(format!(
        "residents of {}: {} of {} subgroups of each rank, {} parameters with {} of states; a step takes {:.3} s instead of \
         {:.3} s, moves {} over each link instead of {}, and needs {} of host memory instead of {}",
        with.strategy.name(),
        kept.subgroups,
        plan.subgroups,
        kept.parameters,
        size(kept.bytes),
        step(with)?,
        step(without)?,
        size(link(with)),
        size(link(without)),
        size(with.host_bytes),
        size(without.host_bytes)
    ))
}

/// Bytes over the link of one GPU.
fn link(outcome: &Outcome) -> u64 {
    outcome.traffic.h2d + outcome.traffic.d2h
}

fn model(plan: &Plan) -> String {
    let model = &plan.model;
    let active = match model.active_parameters == model.parameters {
        true => String::new(),
        false => format!(", {} used by a token", model.active_parameters),
    };
    format!(
        "{} ({}): {} parameters{active}, {} layers of width {}\nstates without offload: {}; ranks: {}, subgroups of each: {}",
        model.name,
        model.family,
        model.parameters,
        model.layers,
        model.hidden,
        size(plan.model_state_bytes),
        plan.run.ranks,
        plan.subgroups
    )
}

fn machine(plan: &Plan, sources: &Sources) -> String {
    let machine = &plan.machine;
    let giga = |value: f64| format!("{:.2}", value / 1e9);
    let mut table = table(["machine", "value", "source"]);
    for (name, field, value) in [
        ("GPU memory", "gpu_memory", size(machine.gpu_memory)),
        ("host memory", "host_memory", size(machine.host_memory)),
        ("to the GPU, GB/s", "h2d", giga(machine.h2d)),
        ("to the host, GB/s", "d2h", giga(machine.d2h)),
        ("Adam on the CPU, G parameters/s", "cpu", giga(machine.cpu)),
        ("Adam on a GPU, G parameters/s", "gpu", giga(machine.gpu)),
        ("forward and backward, 10^12/s", "flops", format!("{:.0}", machine.flops / 1e12)),
    ] {
        let source = sources.get(field).cloned().unwrap_or_default();
        table.add_row([name.to_string(), value, source]);
    }
    for path in &machine.paths {
        let speeds = format!("{} and {}", giga(path.read), giga(path.write));
        let source =
            format!("{}, {}", size(path.capacity), sources.get("paths").cloned().unwrap_or_default());
        table.add_row([format!("path {}, GB/s", path.name), speeds, source]);
    }
    format!("\n{table}\n")
}

fn strategies(plan: &Plan) -> String {
    let mut table = table([
        "strategy",
        "fits",
        "GPU",
        "host",
        "paths",
        "to GPU",
        "to host",
        "path I/O",
        "exposed s",
        "step s",
    ]);
    for outcome in &plan.strategies {
        table.add_row(row(outcome));
    }
    format!("{table}\n")
}

fn row(outcome: &Outcome) -> [String; 10] {
    let seconds = |pick: fn(&spillway_planner::model::report::Seconds) -> f64| {
        outcome.seconds.as_ref().map_or("-".to_string(), |seconds| format!("{:.3}", pick(seconds)))
    };
    let flow = if outcome.weights_on_host > 0.0 { ", weights flow" } else { "" };
    let stored: u64 = outcome.paths.iter().map(|path| path.bytes).sum();
    [
        format!("{}{flow}", outcome.strategy.name()),
        if outcome.fits { "yes" } else { "no" }.to_string(),
        size(outcome.gpu_bytes),
        size(outcome.host_bytes),
        size(stored),
        size(outcome.traffic.h2d),
        size(outcome.traffic.d2h),
        size(outcome.traffic.path_read + outcome.traffic.path_written),
        seconds(|seconds| seconds.exposed),
        seconds(|seconds| seconds.step),
    ]
}
