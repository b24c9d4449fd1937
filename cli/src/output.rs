//! What the benchmarks do with their rows: they print each at once, and then write, plot and compare the report.
#![forbid(unsafe_code)]

use std::fs::OpenOptions;
use std::path::{Path, PathBuf};

use serde_json::Value;
use spillway::error::{Error, Result};

use super::measurement::{Report, Row};
use super::progress::Progress;
use super::report::{self, Column};
use super::{compare, plot, stdout};

const JSON_FILE: &str = "writing the file of --json";
const PLOT_FILE: &str = "writing the file of --plot";
/// The name that stands for standard output.
const STDOUT: &str = "-";

#[derive(clap::Args, Default)]
pub struct Output {
    /// Writes the report as one JSON object to FILE; without FILE to standard output, instead of the rows.
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true, default_missing_value = "-")]
    json: Option<PathBuf>,
    /// Draws the headline of each row as a bar in this SVG file.
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// Compares each row with an earlier report: faster or slower where the ranges between the quartiles lie apart.
    #[arg(long, value_name = "OLD.json")]
    compare: Option<PathBuf>,
}

impl Output {
    /// Fails if a file of the report cannot be written: before the measurement, not after it.
    fn check_files(&self) -> Result<()> {
        let json = self.json.as_deref().filter(|path| *path != Path::new(STDOUT));
        for (what, path) in [(JSON_FILE, json), (PLOT_FILE, self.plot.as_deref())] {
            if let Some(path) = path {
                // Appending leaves what an earlier report has written.
                let opened = OpenOptions::new().append(true).create(true).open(path);
                opened.map_err(|error| unwritable(what, path, &error))?;
            }
        }
        Ok(())
    }
}

/// A benchmark in progress.
pub struct Session<'a> {
    output: &'a Output,
    old: Option<(&'a Path, Report)>,
    report: Report,
    columns: &'static [Column],
    progress: Progress,
}

impl<'a> Session<'a> {
    /// Checks the report to compare with, and prints the header.
    pub fn begin(
        output: &'a Output,
        bench: &str,
        settings: impl IntoIterator<Item = (&'static str, Value)>,
        columns: &'static [Column],
        stages: usize,
    ) -> Result<Session<'a>> {
        let report = Report::new(bench, settings)?;
        let old = output.compare.as_deref().map(|path| -> Result<(&Path, Report)> {
            let old = Report::read("--compare", path)?;
            compare::check("--compare", path, &old, bench)?;
            compare::warn_of_other_machine(&old, &report);
            Ok((path, old))
        });
        let old = old.transpose()?;
        output.check_files()?;
        let session = Session { output, old, report, columns, progress: Progress::new(stages) };
        if !session.json_alone() {
            let Report { cpu, threads, settings, .. } = &session.report;
            let settings =
                settings.iter().map(|(name, setting)| format!(", {name} {}", report::value(setting)));
            session
                .say(&format!("bench {bench}: {cpu}, {threads} threads{}", settings.collect::<String>()))?;
            session.say(&report::header(columns))?;
        }
        Ok(session)
    }

    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    /// Prints a row that has been measured.
    pub fn row(&mut self, row: Row) -> Result<()> {
        if !self.json_alone() {
            self.say(&report::row(self.columns, &row))?;
        }
        self.report.rows.push(row);
        Ok(())
    }

    /// Writes the files, and prints the verdicts; beside JSON on standard output, they go to standard error.
    pub fn finish(self) -> Result<()> {
        let Session { output, old, report, progress, .. } = &self;
        progress.clear();
        match &output.json {
            Some(_) if self.json_alone() => self.say(&report.json())?,
            Some(path) => write(JSON_FILE, path, &(report.json() + "\n"))?,
            None => {}
        }
        if let Some((path, old)) = old {
            let verdicts = compare::text(path, old, report);
            match self.json_alone() {
                true => stdout::note(verdicts.trim_end()),
                false => self.say(verdicts.trim_end())?,
            }
        }
        // Last, so that a fault of the plot loses nothing else.
        if let Some(path) = &output.plot {
            write(PLOT_FILE, path, &plot::svg(report))?;
        }
        Ok(())
    }

    /// Standard output belongs to the JSON object.
    fn json_alone(&self) -> bool {
        self.output.json.as_deref() == Some(Path::new(STDOUT))
    }

    /// Prints a line at once, above the bar.
    fn say(&self, line: &str) -> Result<()> {
        self.progress.suspend(|| stdout::say(line))
    }
}

fn write(what: &'static str, path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).map_err(|error| unwritable(what, path, &error))
}

fn unwritable(what: &'static str, path: &Path, error: &std::io::Error) -> Error {
    Error::System { what, reason: format!("{}: {error}", path.display()) }
}
