//! The command line tool.
#![forbid(unsafe_code)]

mod bench_adam;
mod bench_tier;
mod bench_undo;

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
    /// Measures this machine against its own limits.
    #[command(subcommand)]
    Bench(Bench),
}

#[derive(Subcommand)]
enum Bench {
    /// Adam on every kernel, against a read-modify-write stream over the same arrays.
    Adam(bench_adam::Options),
    /// What taking a step back costs, against the plain step.
    Undo(bench_undo::Options),
    /// What the checksums of a tier cost, on these directories.
    Tier(bench_tier::Options),
}

fn main() -> std::process::ExitCode {
    let outcome = match Cli::parse().command {
        Command::Bench(Bench::Adam(options)) => bench_adam::run(&options),
        Command::Bench(Bench::Undo(options)) => bench_undo::run(&options),
        Command::Bench(Bench::Tier(options)) => bench_tier::run(&options),
    };
    match outcome {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("spillway: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}
