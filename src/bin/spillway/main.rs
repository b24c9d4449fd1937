//! The command line tool.
#![forbid(unsafe_code)]

mod bench_adam;
mod bench_io;
mod bench_tier;
mod bench_undo;
mod doctor;
mod fio;
mod io_load;
mod plan;
mod trace;
mod tune;

use clap::{Parser, Subcommand};

/// Optimizer offload for training large models on few GPUs.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Tries what the library would use on this machine, and says what to change.
    Doctor(doctor::Options),
    /// Measures this machine against its own limits.
    #[command(subcommand)]
    Bench(Bench),
    /// Finds the I/O settings that suit a directory, and writes them where engines read them.
    Tune(tune::Options),
    /// Plans an interleaved update of CPU and GPU: who updates what, seconds and bytes.
    Plan(plan::Options),
    /// Writes one step of that plan as a trace, as the model sees it.
    Trace(trace::Options),
}

#[derive(Subcommand)]
enum Bench {
    /// Adam on every kernel, against a read-modify-write stream over the same arrays.
    Adam(bench_adam::Options),
    /// Reads and writes past the page cache, against fio on the same file.
    Io(bench_io::Options),
    /// What taking a step back costs, against the plain step.
    Undo(bench_undo::Options),
    /// What the checksums of a tier cost, on these directories.
    Tier(bench_tier::Options),
}

fn main() -> std::process::ExitCode {
    let outcome = match Cli::parse().command {
        Command::Bench(Bench::Adam(options)) => bench_adam::run(&options),
        Command::Bench(Bench::Io(options)) => bench_io::run(&options),
        Command::Bench(Bench::Undo(options)) => bench_undo::run(&options),
        Command::Bench(Bench::Tier(options)) => bench_tier::run(&options),
        Command::Doctor(options) => doctor::run(&options),
        Command::Tune(options) => tune::run(&options),
        Command::Plan(options) => plan::run(&options),
        Command::Trace(options) => trace::run(&options),
    };
    match outcome {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("spillway: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}
