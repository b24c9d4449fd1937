//! Compares two reports of one benchmark, row by row; `spillway bench compare`.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};

use spillway::error::{Error, Result};

use super::measurement::{Better, Fields, Quartiles, Report, Row};
use super::report::{labels, table};
use super::stdout;

#[derive(clap::Args)]
pub struct Options {
    /// Report of the earlier run, as --json wrote it.
    #[arg(value_name = "OLD.json")]
    old: PathBuf,
    /// Report of the later run.
    #[arg(value_name = "NEW.json")]
    new: PathBuf,
}

/// What two measurements of a case say about its speed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Faster,
    Slower,
    /// The ranges between the quartiles overlap.
    Same,
    New,
    Missing,
}

impl Verdict {
    fn name(self) -> &'static str {
        match self {
            Verdict::Faster => "faster",
            Verdict::Slower => "slower",
            Verdict::Same => "same",
            Verdict::New => "new",
            Verdict::Missing => "missing",
        }
    }
}

/// A case of either report, with the figure that is compared.
struct Line<'a> {
    case: &'a Fields,
    figure: &'a str,
    old: Option<Quartiles>,
    new: Option<Quartiles>,
    verdict: Verdict,
}

pub fn run(options: &Options) -> Result<()> {
    let old = Report::read("OLD.json", &options.old)?;
    let new = Report::read("NEW.json", &options.new)?;
    check("NEW.json", &options.new, &new, &old.bench)?;
    warn_of_other_machine(&old, &new);
    stdout::say(&text(&options.old, &old, &new))
}

/// Refuses a report of another benchmark.
pub fn check(option: &'static str, path: &Path, report: &Report, bench: &str) -> Result<()> {
    let Report { bench: found, .. } = report;
    if found == bench {
        return Ok(());
    }
    Err(Error::invalid(
        option,
        format!("{} is a report of bench {found}, not of bench {bench}", path.display()),
    ))
}

/// Prints one warning if the reports come from different processors.
pub fn warn_of_other_machine(old: &Report, new: &Report) {
    if (&old.cpu, old.threads) != (&new.cpu, new.threads) {
        let machine = |report: &Report| format!("{} with {} threads", report.cpu, report.threads);
        let (old, new) = (machine(old), machine(new));
        stdout::note(&format!("spillway: warning: the old report is from {old}, the new from {new}"));
    }
}

/// The verdicts, as a table.
pub fn text(path: &Path, old: &Report, new: &Report) -> String {
    let lines = lines(old, new);
    let (common, names) = labels(&lines.iter().map(|line| line.case).collect::<Vec<_>>());
    let mut table = table(["case", "figure", "old", "new", "new/old", "verdict"]);
    for (line, name) in lines.iter().zip(names) {
        let median =
            |side: Option<Quartiles>| side.map_or("-".to_string(), |side| format!("{:.3}", side.median));
        let ratio = line.old.zip(line.new).map(|(old, new)| new.median / old.median);
        let ratio = ratio.filter(|ratio| ratio.is_finite());
        table.add_row([
            name,
            line.figure.to_string(),
            median(line.old),
            median(line.new),
            ratio.map_or("-".to_string(), |ratio| format!("{ratio:.3}")),
            line.verdict.name().to_string(),
        ]);
    }
    let common = if common.is_empty() { common } else { format!(": {common}") };
    format!("\nbench {} compared with {} of {}{common}\n{table}\n", new.bench, path.display(), old.date)
}

/// One line per case: those of the new report, then those that only the old one has.
fn lines<'a>(old: &'a Report, new: &'a Report) -> Vec<Line<'a>> {
    let of = |report: &'a Report, case: &Fields| report.rows.iter().find(|row| row.case == *case);
    let alone = |row: &'a Row, verdict| {
        let own = row.figures.get(&row.headline).copied();
        let (old, new) = if verdict == Verdict::New { (None, own) } else { (own, None) };
        Line { case: &row.case, figure: &row.headline, old, new, verdict }
    };
    let measured = new.rows.iter().map(|row| {
        let both = of(old, &row.case).and_then(|before| judge(before, row));
        both.unwrap_or_else(|| alone(row, Verdict::New))
    });
    let missing = old.rows.iter().filter(|row| of(new, &row.case).is_none());
    measured.chain(missing.map(|row| alone(row, Verdict::Missing))).collect()
}

/// Compares the new headline, or the old one if only that is in both rows; `None` if neither is.
fn judge<'a>(old: &'a Row, new: &'a Row) -> Option<Line<'a>> {
    [new, old].into_iter().find_map(|row| {
        let (before, after) = (*old.figures.get(&row.headline)?, *new.figures.get(&row.headline)?);
        let higher = after.median > before.median;
        let verdict = match row.better {
            _ if before.overlaps(&after) => Verdict::Same,
            Better::Higher if higher => Verdict::Faster,
            Better::Lower if !higher => Verdict::Faster,
            _ => Verdict::Slower,
        };
        Some(Line { case: &new.case, figure: &row.headline, old: Some(before), new: Some(after), verdict })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(better: Better, rows: &[(&str, [f64; 3])]) -> Report {
        let mut report = Report::new("adam", []).unwrap();
        let row = |(name, values): &(&str, [f64; 3])| {
            Row::new("ratio", better).case("kernel", *name).figure("ratio", values).figure("gb_per_s", values)
        };
        report.rows = rows.iter().map(row).collect();
        report
    }

    fn verdicts(old: &Report, new: &Report) -> Vec<Verdict> {
        lines(old, new).iter().map(|line| line.verdict).collect()
    }

    const LOW: [f64; 3] = [1.0, 1.1, 1.2];
    const BETWEEN: [f64; 3] = [1.1, 1.5, 2.1];
    const HIGH: [f64; 3] = [2.0, 2.1, 2.2];

    #[test]
    fn only_ranges_that_lie_apart_differ() {
        let low = report(Better::Higher, &[("a", LOW)]);
        let high = report(Better::Higher, &[("a", HIGH)]);
        let between = report(Better::Higher, &[("a", BETWEEN)]);
        assert_eq!(verdicts(&low, &high), [Verdict::Faster]);
        assert_eq!(verdicts(&high, &low), [Verdict::Slower]);
        assert_eq!(verdicts(&high, &high), [Verdict::Same]);
        // The quartiles of BETWEEN are 1.3 and 1.8; those of LOW are 1.05 and 1.15.
        assert_eq!(verdicts(&low, &between), [Verdict::Faster]);
        assert_eq!(verdicts(&low, &report(Better::Higher, &[("a", [1.1, 1.15, 2.1])])), [Verdict::Same]);
        let times = |values| report(Better::Lower, &[("a", values)]);
        assert_eq!(verdicts(&times(LOW), &times(HIGH)), [Verdict::Slower]);
        assert_eq!(verdicts(&times(HIGH), &times(LOW)), [Verdict::Faster]);
    }

    #[test]
    fn rows_of_one_report_are_new_or_missing() {
        let old = report(Better::Higher, &[("a", LOW), ("b", LOW)]);
        let new = report(Better::Higher, &[("c", LOW), ("b", LOW)]);
        assert_eq!(verdicts(&old, &new), [Verdict::New, Verdict::Same, Verdict::Missing]);
        let text = text(Path::new("old.json"), &old, &new);
        for line in ["c ", "b ", "a "] {
            assert!(text.lines().any(|found| found.trim_start().starts_with(line)), "{text}");
        }
    }

    #[test]
    fn the_ratio_to_a_median_of_zero_is_left_out() {
        let (zero, low) = (report(Better::Lower, &[("a", [0.0; 3])]), report(Better::Lower, &[("a", LOW)]));
        for (old, new) in [(&zero, &low), (&zero, &zero)] {
            let text = text(Path::new("old.json"), old, new);
            assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
        }
    }

    #[test]
    fn a_headline_that_one_report_lacks_gives_way_to_the_other() {
        let old = report(Better::Higher, &[("a", LOW)]);
        let mut new = report(Better::Higher, &[("a", HIGH)]);
        new.rows[0].headline = "gb_per_s".to_string();
        new.rows[0].figures.remove("ratio");
        assert_eq!((lines(&old, &new)[0].figure, lines(&new, &old)[0].figure), ("gb_per_s", "gb_per_s"));
        new.rows[0].figures.clear();
        assert_eq!(verdicts(&old, &new), [Verdict::New]);
    }
}
