//! `spillway bench undo`: the cost of rolling a step back, compared with the plain step.
//!
//! Plain step, logged step, undo, logged step, redo and step into a shadow alternate over the same arrays; ratios are
//! those to the plain step of the same round. The memory limit of a shadow is measured as well: streams that read
//! and write the same arrays with one addition each, into the shadow and in place. With `--fused` a step that may be
//! rolled back does not write the 16-bit copy of the parameter, as in speculation; the later write is a row of its own.
#![forbid(unsafe_code)]

use std::time::Instant;

use spillway::error::Result;
use spillway::kernel::{AdamRule, Kernel, Optimizer, StreamRule, log_bytes, log_used_of};
use spillway::optim;
use spillway::optim::adam::AdamOptions;
use spillway::optim::parallel::{Job, publish, step_on};
use spillway::optim::undo::undo_on;
use spillway::sys::reserve::Reserve;

use super::bench_adam::{Arrays, Case};
use super::measurement::{Better, Row, ratios};
use super::memory;
use super::output::{Output, Session};
use super::progress::Progress;
use super::report::{Column, parse_count};

#[derive(clap::Args)]
pub struct Options {
    #[command(flatten)]
    output: Output,
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

const COLUMNS: &[Column] = &[
    Column::case("parameters", "parameters", 10),
    Column::case("kernel", "kernel", 7),
    Column::case("arrays", "arrays", 6),
    Column::case("work", "work", 12),
    Column::median("ns/param", "ns_per_parameter", 8, 3),
    Column::median("ratio", "ratio_to_plain", 6, 3),
    Column::spread(3),
    Column::median("log B/param", "log_bytes_per_parameter", 11, 3),
];

/// Number of timed works in a round.
const WORKS: usize = 8;
/// The rows: name, place among the timed works, and place of the plain work that the row is compared with. The limit of a
/// shadow is compared with the same stream in place.
const ROWS: [(&str, usize, usize); 7] = [
    ("plain", 0, 0),
    ("logged", 1, 0),
    ("shadow", 4, 0),
    ("shadow limit", 5, 6),
    ("undo", 2, 0),
    ("redo", 3, 0),
    ("publication", PUBLICATION, 0),
];
const PUBLICATION: usize = 7;

pub fn run(options: &Options) -> Result<()> {
    let kernel = match &options.kernel {
        Some(name) => Kernel::named(name)?,
        None => optim::kernel()?,
    };
    let n = options.size;
    let settings = [("rounds", options.rounds.into())];
    let stages = 1 + options.rounds as usize;
    // Two sets of arrays; the log takes at most 12 bytes per parameter.
    memory::require("--size", n, 2 * Arrays::BYTES + 12)?;
    let mut session = Session::begin(&options.output, "undo", settings, COLUMNS, stages)?;
    let mut log = Reserve::new(log_bytes(n))?;
    let seconds = measure(kernel, options, &mut log, session.progress())?;
    let nanoseconds = |work: usize| seconds[work].iter().map(|s| s * 1e9 / n as f64).collect::<Vec<f64>>();
    for (name, work, plain) in ROWS {
        // Only the fused case has a 16-bit copy to publish.
        if work == PUBLICATION && !options.fused {
            continue;
        }
        let mut row = Row::new("ratio_to_plain", Better::Lower)
            .case("parameters", n)
            .case("kernel", kernel.name())
            .case("arrays", if options.fused { "fused" } else { "f32" })
            .case("work", name)
            .figure("ns_per_parameter", &nanoseconds(work))
            .figure("ratio_to_plain", &ratios(&seconds[work], &seconds[plain]));
        if name == "logged" {
            let used = log_used_of(log.bytes_mut(), n) as f64;
            row = row.figure("log_bytes_per_parameter", &[used / n as f64]);
        }
        session.row(row)?;
    }
    session.finish()
}

/// Seconds of each timed work in each round.
fn measure(
    kernel: Kernel,
    options: &Options,
    log: &mut Reserve,
    progress: &Progress,
) -> Result<[Vec<f64>; WORKS]> {
    let n = options.size;
    let (plain, withdrawn) =
        if options.fused { (Case::Fused, Case::KeptBack) } else { (Case::F32, Case::F32) };
    let mut arrays = Arrays::new(n);
    let mut shadow = Arrays::new(n);
    let mut seconds = [const { Vec::new() }; WORKS];
    for round in 0..=options.rounds {
        progress.begin(&format!("round {round} of {} on {n} parameters", options.rounds));
        let rule =
            AdamOptions { weight_decay: 0.01, step: u64::from(round) + 1, ..Default::default() }.rule()?;
        arrays.refresh_grad(round);
        // Discard one step: the first after new gradients also writes those back from the caches.
        step(kernel, rule, plain, &mut arrays, None, None)?;
        let times = [
            time(|| step(kernel, rule, plain, &mut arrays, None, None))?,
            time(|| step(kernel, rule, withdrawn, &mut arrays, Some(log), None))?,
            time(|| undo(kernel, rule, withdrawn, &mut arrays, log, None))?,
            {
                step(kernel, rule, withdrawn, &mut arrays, Some(log), None)?;
                time(|| undo(kernel, rule, plain, &mut arrays, log, Some(0.5)))?
            },
            time(|| step(kernel, rule, withdrawn, &mut arrays, None, Some(&mut shadow)))?,
            time(|| step(kernel, StreamRule, withdrawn, &mut arrays, None, Some(&mut shadow)))?,
            // In the shadow, because the sums that the stream writes are no valid states.
            time(|| step(kernel, StreamRule, plain, &mut shadow, None, None))?,
            time(|| publish(&mut [Job { optimizer: rule, tensor: arrays.tensor(plain)? }]))?,
        ];
        // The first round warms up.
        if round > 0 {
            times.iter().zip(&mut seconds).for_each(|(time, all)| all.push(*time));
        }
        progress.end();
    }
    Ok(seconds)
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
