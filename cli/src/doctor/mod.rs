//! `spillway doctor`: tests each part of the library on this machine, and says what to change.
//!
//! The doctor tests behavior instead of reading versions or settings where it can. Kernels run and their results are
//! compared, memory is allocated and locked, files are written, read back and compared, and a tier commits and is
//! reopened.
#![forbid(unsafe_code)]

mod finding;
mod machine;
mod storage;

use std::fmt::Write;
use std::path::PathBuf;

use spillway::error::{Error, Result};

use crate::progress::Progress;
use crate::stdout;
use finding::{Finding, Verdict};

/// The doctor of jobs, which only the Python package has.
const OF_PYTHON: &str = "\
Of the Python package: spillway doctor JOB, or python -m spillway doctor JOB, says what of a job Spillway serves, and what \
it saves. JOB is train.py, ds_config.json, a model's config.json, or --torch.";

#[derive(clap::Args)]
#[command(after_help = OF_PYTHON)]
pub struct Options {
    /// A directory for offloaded state; may be repeated. A few MiB are written there and removed.
    #[arg(long = "dir", default_value = ".")]
    directories: Vec<PathBuf>,
    /// Tests no directory, and writes nothing.
    #[arg(long, conflicts_with = "directories")]
    machine_only: bool,
    /// Prints one JSON object instead of text.
    #[arg(long)]
    json: bool,
}

#[derive(serde::Serialize)]
struct Report {
    version: &'static str,
    findings: Vec<Finding>,
}

pub fn run(options: &Options) -> Result<()> {
    let directories = if options.machine_only { &[][..] } else { &options.directories };
    let progress = Progress::new(1 + directories.len());
    progress.begin("testing kernels, threads, memory and GPU");
    let mut findings = machine::findings();
    progress.end();
    for directory in directories {
        progress.begin(&format!("testing files in {}", directory.display()));
        let about = |finding| Finding { directory: Some(directory.clone()), ..finding };
        findings.extend(storage::findings(directory).into_iter().map(about));
        progress.end();
    }
    drop(progress);
    let failed = findings.iter().filter(|finding| finding.verdict == Verdict::Fails).count();
    let report = Report { version: spillway::VERSION, findings };
    if options.json {
        stdout::say_json(&report)?
    } else {
        stdout::say(&text(&report))?
    }
    match failed {
        0 => Ok(()),
        _ => {
            let reason = format!("{failed} of {} checks failed", report.findings.len());
            Err(Error::System { what: "doctor", reason })
        }
    }
}

fn text(report: &Report) -> String {
    let mut text = format!("spillway {}\n", report.version);
    let mut directory = None;
    for Finding { check, directory: about, verdict, found, fix } in &report.findings {
        if about != &directory {
            directory.clone_from(about);
            let about = directory.as_deref().unwrap_or_else(|| "this machine".as_ref());
            let _ = writeln!(text, "\n{}", about.display());
        }
        let word = match verdict {
            Verdict::Ok => "ok",
            Verdict::Worse => "worse",
            Verdict::Fails => "FAILS",
            Verdict::None => "-",
        };
        let _ = writeln!(text, "  {word:<6} {check:<14} {found}");
        if let Some(fix) = fix {
            let _ = writeln!(text, "  {:<6} {:<14} to do: {fix}", "", "");
        }
    }
    text
}
