//! `spillway bench undo`: the cost of rolling a step back, compared with the plain step.
//!
//! Plain step, logged step, undo, logged step, redo and step into a shadow alternate over the same arrays; ratios are
//! medians of the rounds' ratios to the plain step. The memory limit of a shadow is measured as well: streams that read
//! and write the same arrays with one addition each, into the shadow and in place. With `--fused` a step that may be
//! rolled back does not write the 16-bit copy of the parameter, as in speculation; the later write is a row of its own.
#![forbid(unsafe_code)]

use std::time::Instant;

use spillway::error::Result;
use spillway::kernel::{AdamRule, Kernel, Optimizer, StreamRule, log_bytes, log_used_of};
use spillway::optim::adam::AdamOptions;
use spillway::optim::parallel::{Job, publish, step_on};
use spillway::optim::processor;
use spillway::optim::undo::undo_on;
use spillway::sys::reserve::Reserve;

use super::bench_adam::{Arrays, Case};
use super::progress::Progress;
use super::report::{median, parse_count};

#[derive(clap::Args)]
pub struct Options {
    /// Prints one JSON object instead of a table.
    #[arg(long)]
    json: bool,
    /// Number of parameters, with Ki or Mi.
    #[arg(long, default_value = "100Mi", value_parser = parse_count)]
    size: usize,
    /// Uses a bf16 gradient and writes a bf16 copy of the parameter, as in mixed-precision training; otherwise all
    /// arrays are f32.
    #[arg(long)]
    fused: bool,
    /// Kernel to run.
    #[arg(long)]
    kernel: Option<String>,
    /// Number of rounds.
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
}

#[derive(serde::Serialize, Default)]
struct Report {
    version: &'static str,
    kernel: &'static str,
    parameters: usize,
    plain_ns_per_parameter: f64,
    logged_ratio: f64,
    shadow_ratio: f64,
    shadow_limit_ratio: f64,
    undo_ratio: f64,
    redo_ratio: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    publish_ratio: Option<f64>,
    log_bytes_per_parameter: f64,
}

pub fn run(options: &Options) -> Result<()> {
    let kernel = match &options.kernel {
        Some(name) => Kernel::named(name)?,
        None => processor::kernel()?,
    };
    let n = options.size;
    let (plain, withdrawn) =
        if options.fused { (Case::Fused, Case::KeptBack) } else { (Case::F32, Case::F32) };
    let mut arrays = Arrays::new(n);
    let mut shadow = Arrays::new(n);
    let mut log = Reserve::new(log_bytes(n))?;
    let mut seconds = vec![Vec::new(); 8];
    let progress = Progress::new(1 + options.rounds as usize);
    for round in 0..=options.rounds {
        progress.begin(&format!("round {round} of {} on {n} parameters", options.rounds));
        let rule =
            AdamOptions { weight_decay: 0.01, step: u64::from(round) + 1, ..Default::default() }.rule()?;
        arrays.refresh_grad(round);
        // Discard one step: the first after new gradients also writes those back from the caches.
        step(kernel, rule, plain, &mut arrays, None, None)?;
        let times = [
            time(|| step(kernel, rule, plain, &mut arrays, None, None))?,
            time(|| step(kernel, rule, withdrawn, &mut arrays, Some(&mut log), None))?,
            time(|| undo(kernel, rule, withdrawn, &mut arrays, &mut log, None))?,
            {
                step(kernel, rule, withdrawn, &mut arrays, Some(&mut log), None)?;
                time(|| undo(kernel, rule, plain, &mut arrays, &mut log, Some(0.5)))?
            },
            time(|| step(kernel, rule, withdrawn, &mut arrays, None, Some(&mut shadow)))?,
            time(|| step(kernel, StreamRule, withdrawn, &mut arrays, None, Some(&mut shadow)))?,
            // In the shadow, because the sums that the stream writes are no valid states.
            time(|| step(kernel, StreamRule, plain, &mut shadow, None, None))?,
            time(|| publish(&mut [Job { optimizer: rule, tensor: arrays.tensor(plain)? }]))?,
        ];
        if round > 0 {
            times.iter().zip(&mut seconds).for_each(|(time, all)| all.push(*time));
        }
        progress.end();
    }
    drop(progress);
    let ratio = |case: usize, to: usize| {
        let pairs = seconds[case].iter().zip(&seconds[to]);
        median(&pairs.map(|(a, b)| a / b).collect::<Vec<f64>>())
    };
    let report = Report {
        version: spillway::VERSION,
        kernel: kernel.name(),
        parameters: n,
        plain_ns_per_parameter: median(&seconds[0]) * 1e9 / n as f64,
        logged_ratio: ratio(1, 0),
        undo_ratio: ratio(2, 0),
        redo_ratio: ratio(3, 0),
        publish_ratio: options.fused.then(|| ratio(7, 0)),
        shadow_ratio: ratio(4, 0),
        shadow_limit_ratio: ratio(5, 6),
        log_bytes_per_parameter: log_used_of(log.bytes_mut(), n) as f64 / n as f64,
    };
    if options.json {
        println!("{}", serde_json::to_string_pretty(&report).unwrap_or_default());
    } else {
        let Report { kernel, parameters, plain_ns_per_parameter, .. } = report;
        println!("{parameters} parameters, {kernel}, plain step {plain_ns_per_parameter:.3} ns/param");
        println!("logged {:.3}", report.logged_ratio);
        println!("shadow {:.3}  limit  {:.3}", report.shadow_ratio, report.shadow_limit_ratio);
        println!("undo   {:.3}  redo   {:.3}", report.undo_ratio, report.redo_ratio);
        if let Some(ratio) = report.publish_ratio {
            println!("publication {ratio:.3}");
        }
        println!("log    {:.3} bytes/param", report.log_bytes_per_parameter);
    }
    Ok(())
}

fn step<R: Optimizer>(
    kernel: Kernel,
    rule: R,
    case: Case,
    arrays: &mut Arrays,
    log: Option<&mut Reserve>,
    shadow: Option<&mut Arrays>,
) -> Result<()> {
    let mut tensor = arrays.tensor(case)?;
    if let Some(log) = log {
        tensor = tensor.with_log(log.bytes_mut())?;
    }
    if let Some(shadow) = shadow {
        tensor = tensor.with_shadow(shadow.states())?;
    }
    step_on(kernel, &mut [Job { optimizer: rule, tensor }], false).map(drop)
}

fn undo(
    kernel: Kernel,
    rule: AdamRule,
    case: Case,
    arrays: &mut Arrays,
    log: &mut Reserve,
    again: Option<f32>,
) -> Result<()> {
    let tensor = arrays.tensor(case)?.with_log(log.bytes_mut())?;
    undo_on(kernel, &mut [Job { optimizer: rule, tensor }], again)
}

fn time(work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_secs_f64())
}
