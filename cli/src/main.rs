//! The command line tool `spillway`.
#![forbid(unsafe_code)]

mod chart;
mod doctor;
mod draw;
mod io_load;
mod plan;
mod plan_command;
mod plan_machine;
mod plan_model;
mod plan_report;
mod plan_svg;
mod progress;
mod report;
mod stdout;
mod tier;
mod topo;
mod trace;
mod tune;

use clap::{Parser, Subcommand};

/// The commands that only the Python package has.
const OF_PYTHON: &str = "\
Commands of the Python package, also as python -m spillway:
  doctor JOB       Says what of a job Spillway serves: train.py, ds_config.json, a model's config.json, or --torch
  watch DIR|PID    Shows live what a running job does
  metrics DIR|PID  Prints the same once, in Prometheus' text format";

/// Optimizer offload for training large models on few GPUs.
#[derive(Parser)]
#[command(name = "spillway", version = spillway::VERSION, after_help = OF_PYTHON)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Tests each part of the library on this machine, and says what to change.
    Doctor(doctor::Options),
    /// Finds the best I/O settings for a directory, and saves them in the profile that engines read.
    Tune(tune::Options),
    /// Plans the training of a model on a machine, or one interleaved update: bytes, seconds, and the best strategy.
    Plan(Box<plan_command::Options>),
    /// Draws processors, NUMA nodes, GPUs and drives, and says how a launcher binds ranks to them.
    Topo(topo::Options),
    /// Lists, checks, copies and removes tiers: optimizer states that a program left in directories.
    #[command(subcommand)]
    Tier(tier::Command),
    /// Writes the predicted timeline of one interleaved step as a trace.
    Trace(trace::Options),
    /// Draws the trace of a step: what each row did when, and the throughput of each transfer.
    Draw(draw::Options),
}

fn main() -> std::process::ExitCode {
    let outcome = match Cli::parse().command {
        Command::Doctor(options) => doctor::run(&options),
        Command::Tune(options) => tune::run(&options),
        Command::Plan(options) => plan_command::run(&options),
        Command::Topo(options) => topo::run(&options),
        Command::Tier(command) => tier::run(&command),
        Command::Trace(options) => trace::run(&options),
        Command::Draw(options) => draw::run(&options),
    };
    match outcome {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            stdout::note(&format!("spillway: {error}"));
            std::process::ExitCode::FAILURE
        }
    }
}
