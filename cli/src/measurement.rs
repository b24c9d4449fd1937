//! What a benchmark measured: the JSON shape that all benchmarks share, also those of the Python package.
//!
//! docs/benchmarks.md describes the shape. A figure is a median with its quartiles over the rounds.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::path::Path;
use std::time::SystemTime;

use serde_json::Value;
use spillway::error::{Error, Result};
use spillway::sys::{descriptor, threads};

/// Version of the JSON shape.
const FORMAT: u64 = 1;
/// Largest report; those of the benchmarks have a few kilobytes.
const MOST_BYTES: u64 = 64 << 20;

/// Names and values that identify a case, or settings of a run.
pub type Fields = BTreeMap<String, Value>;

#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Report {
    pub format: u64,
    pub bench: String,
    pub version: String,
    pub date: String,
    pub cpu: String,
    pub threads: usize,
    pub settings: Fields,
    pub rows: Vec<Row>,
}

/// One measured case.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Row {
    pub case: Fields,
    pub figures: BTreeMap<String, Quartiles>,
    /// Name of the figure that comparisons and plots of the Python package use.
    pub headline: String,
    pub better: Better,
}

/// Direction in which a headline improves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Better {
    Higher,
    Lower,
}

#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Quartiles {
    pub median: f64,
    pub q1: f64,
    pub q3: f64,
}

impl Quartiles {
    /// Interpolates between the two nearest values, like `statistics.quantiles(method="inclusive")` of Python.
    pub fn of(values: &[f64]) -> Quartiles {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let place = share * sorted.len().saturating_sub(1) as f64;
            let value = |index: f64| sorted.get(index as usize).copied().unwrap_or(f64::NAN);
            let (below, above) = (value(place.floor()), value(place.ceil()));
            below + (above - below) * place.fract()
        };
        Quartiles { median: at(0.5), q1: at(0.25), q3: at(0.75) }
    }
}

pub fn median(values: &[f64]) -> f64 {
    Quartiles::of(values).median
}

/// The ratio of two measurements in each round.
pub fn ratios(values: &[f64], references: &[f64]) -> Vec<f64> {
    values.iter().zip(references).map(|(value, reference)| value / reference).collect()
}

impl Row {
    pub fn new(headline: &str, better: Better) -> Row {
        Row { case: Fields::new(), figures: BTreeMap::new(), headline: headline.to_string(), better }
    }

    pub fn case(mut self, name: &str, value: impl Into<Value>) -> Row {
        self.case.insert(name.to_string(), value.into());
        self
    }

    /// Adds a figure with one value per round. JSON has no infinity, so a figure that is not finite is left out.
    pub fn figure(mut self, name: &str, values: &[f64]) -> Row {
        let quartiles = Quartiles::of(values);
        if [quartiles.median, quartiles.q1, quartiles.q3].iter().all(|value| value.is_finite()) {
            self.figures.insert(name.to_string(), quartiles);
        }
        self
    }
}

/// The day of `time` in UTC, such as 2026-11-24; "unknown" for a clock before 1970 or after 9999.
fn date(time: SystemTime) -> String {
    const YEAR_10000: u64 = 253_402_300_800;
    let since = time.duration_since(SystemTime::UNIX_EPOCH).map_or(YEAR_10000, |since| since.as_secs());
    if since >= YEAR_10000 {
        return "unknown".to_string();
    }
    // Years that begin in March have their leap day at the end. 719468 days lie between the first of March of year 0
    // and 1970; 400 years have 146097 days.
    let days = since / 86_400 + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (year, month) = match month {
        0..=9 => (era * 400 + year, month + 3),
        _ => (era * 400 + year + 1, month - 9),
    };
    format!("{year:04}-{month:02}-{day:02}")
}

impl Report {
    /// A report without rows, of this machine and version.
    pub fn new(bench: &str, settings: impl IntoIterator<Item = (&'static str, Value)>) -> Result<Report> {
        Ok(Report {
            format: FORMAT,
            bench: bench.to_string(),
            version: spillway::VERSION.to_string(),
            date: date(SystemTime::now()),
            cpu: cpu(),
            threads: threads::count()?,
            settings: settings.into_iter().map(|(name, value)| (name.to_string(), value)).collect(),
            rows: Vec::new(),
        })
    }

    /// Reads the report that `option` names.
    pub fn read(option: &'static str, path: &Path) -> Result<Report> {
        let wrong = |reason: String| Error::invalid(option, format!("{}: {reason}", path.display()));
        let bytes = descriptor::read_small(path, MOST_BYTES)
            .and_then(|bytes| bytes.ok_or_else(|| "there is no such file".to_string()))
            .map_err(wrong)?;
        let text = String::from_utf8(bytes).map_err(|error| wrong(error.to_string()))?;
        Report::parse(&text).map_err(wrong)
    }

    fn parse(text: &str) -> std::result::Result<Report, String> {
        let value: Value =
            serde_json::from_str(text).map_err(|error| format!("the file is not JSON: {error}"))?;
        if value["format"] != FORMAT {
            return Err(match &value["format"] {
                Value::Null => "the file is not a report of a benchmark: it has no format".to_string(),
                other => format!("the report has format {other}, and this version reads format {FORMAT}"),
            });
        }
        let report: Report = serde_json::from_value(value)
            .map_err(|error| format!("the file is not a report of a benchmark: {error}"))?;
        match report.rows.iter().find(|row| !row.figures.contains_key(&row.headline)) {
            Some(row) => Err(format!("a row of the report lacks its headline {}", row.headline)),
            None => Ok(report),
        }
    }

    pub fn json(&self) -> String {
        // All keys are text and all figures are finite, so this cannot fail.
        serde_json::to_string_pretty(self).unwrap_or_default()
    }
}

/// The processor's name, as Python's benchmarks report it.
fn cpu() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find(|line| line.starts_with("model name")).and_then(|line| line.split_once(':'));
    name.map_or_else(|| "unknown".to_string(), |(_, name)| name.trim().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        let at = |seconds| date(SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(seconds));
        let known = [
            (0, "1970-01-01"),
            (951_782_399, "2000-02-28"),
            (951_782_400, "2000-02-29"),
            (951_868_800, "2000-03-01"),
            (1_735_603_200, "2024-12-31"),
            (1_795_478_400, "2026-11-24"),
            (4_107_542_400, "2100-03-01"),
        ];
        for (seconds, wanted) in known {
            assert_eq!(at(seconds), wanted);
        }
    }

    #[test]
    fn quartiles_interpolate_between_the_nearest_values() {
        let of = |values: &[f64]| {
            let Quartiles { median, q1, q3 } = Quartiles::of(values);
            (q1, median, q3)
        };
        assert_eq!(of(&[5.0, 1.0, 4.0, 2.0, 3.0]), (2.0, 3.0, 4.0));
        assert_eq!(of(&[4.0, 1.0, 3.0, 2.0]), (1.75, 2.5, 3.25));
        assert_eq!(of(&[7.0]), (7.0, 7.0, 7.0));
        assert!(Quartiles::of(&[]).median.is_nan());
    }

    #[test]
    fn a_report_survives_json() {
        let mut report = Report::new("adam", [("rounds", 3.into())]).unwrap();
        let row = Row::new("ratio", Better::Higher).case("kernel", "scalar").case("parameters", 4096);
        report.rows.push(row.figure("ratio", &[0.1, 0.7, 0.9]).figure("infinite", &[1.0 / 0.0]));
        assert_eq!(Report::parse(&report.json()), Ok(report.clone()));
        assert_eq!(report.rows[0].figures.keys().collect::<Vec<_>>(), ["ratio"]);
        assert_eq!((report.date.len(), report.date.matches('-').count()), (10, 2), "{}", report.date);
    }

    #[test]
    fn other_texts_are_refused_with_their_fault() {
        let row = r#"{"case": {}, "figures": {}, "headline": "ratio", "better": "higher"}"#;
        let report = |format: u32, rows: &str| {
            format!(
                r#"{{"format": {format}, "bench": "io", "version": "1", "date": "2026-01-01", "cpu": "c",
                "threads": 1, "settings": {{}}, "rows": [{rows}]}}"#
            )
        };
        for (text, words) in [
            ("", "not JSON"),
            ("{", "not JSON"),
            ("[1]", "no format"),
            (r#"{"format": 1}"#, "missing field"),
            (&report(2, ""), "has format 2"),
            (&report(1, row), "lacks its headline ratio"),
        ] {
            let fault = Report::parse(text).expect_err(text);
            assert!(fault.contains(words), "{text}: {fault}");
        }
        assert!(Report::parse(&report(1, "")).is_ok());
    }

    #[test]
    fn a_report_has_a_date_whatever_the_clock_says() {
        let at = |seconds: u64| SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
        assert_eq!(date(at(86_400)), "1970-01-02");
        assert_eq!(date(at(253_402_300_799)), "9999-12-31");
        assert_eq!(date(at(253_402_300_800)), "unknown");
        assert_eq!(date(SystemTime::UNIX_EPOCH - std::time::Duration::from_secs(1)), "unknown");
    }
}
