//! What the benchmarks do with their rows: they print each at once, and then write the report, which
//! `python -m spillway.bench compare` reads.
#![forbid(unsafe_code)]

use std::fs::OpenOptions;
use std::path::{Path, PathBuf};

use serde_json::Value;
use spillway::error::{Error, Result};

use super::measurement::{Report, Row};
use super::progress::Progress;
use super::report::{self, Column};
use super::stdout;

const JSON_FILE: &str = "writing the file of --json";
/// The name that stands for standard output.
const STDOUT: &str = "-";

#[derive(clap::Args, Default)]
pub struct Output {
    /// Writes the report as one JSON object to FILE; without FILE to standard output, instead of the rows.
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true, default_missing_value = "-")]
    json: Option<PathBuf>,
}

impl Output {
    /// The file of the report. Fails if it cannot be written: before the measurement, not after it.
    fn file(&self) -> Result<Option<&Path>> {
        let file = self.json.as_deref().filter(|path| *path != Path::new(STDOUT));
        if let Some(path) = file {
            // Appending leaves what an earlier report has written.
            let opened = OpenOptions::new().append(true).create(true).open(path);
            opened.map_err(|error| unwritable(path, &error))?;
        }
        Ok(file)
    }
}

/// A benchmark in progress.
pub struct Session<'a> {
    /// The file that receives the report.
    file: Option<&'a Path>,
    /// Standard output has the report instead of the rows.
    json_alone: bool,
    report: Report,
    columns: &'static [Column],
    progress: Progress,
}

impl<'a> Session<'a> {
    /// Checks the file of the report, and prints the header.
    pub fn begin(
        output: &'a Output,
        bench: &str,
        settings: impl IntoIterator<Item = (&'static str, Value)>,
        columns: &'static [Column],
        stages: usize,
    ) -> Result<Session<'a>> {
        let report = Report::new(bench, settings)?;
        let file = output.file()?;
        let json_alone = output.json.is_some() && file.is_none();
        let session = Session { file, json_alone, report, columns, progress: Progress::new(stages) };
        if !session.json_alone {
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
        if !self.json_alone {
            self.say(&report::row(self.columns, &row))?;
        }
        self.report.rows.push(row);
        Ok(())
    }

    /// Writes the report.
    pub fn finish(self) -> Result<()> {
        self.progress.clear();
        match self.file {
            Some(path) => {
                std::fs::write(path, self.report.json() + "\n").map_err(|error| unwritable(path, &error))
            }
            None if self.json_alone => self.say(&self.report.json()),
            None => Ok(()),
        }
    }

    /// Prints a line at once, above the bar.
    fn say(&self, line: &str) -> Result<()> {
        self.progress.suspend(|| stdout::say(line))
    }
}

fn unwritable(path: &Path, error: &std::io::Error) -> Error {
    Error::System { what: JSON_FILE, reason: format!("{}: {error}", path.display()) }
}
