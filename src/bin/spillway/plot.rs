//! A report as an SVG: a bar for each row's headline, with a whisker between the quartiles.
#![forbid(unsafe_code)]

use plotters::prelude::*;

use super::drawing::{self, Area, Drawn, Margins, middle};
use super::measurement::{Fields, Quartiles, Report};
use super::report::labels;

/// Pixels: height of a bar with its gap, width of the bars' area, width of a letter.
const BAR: usize = 24;
const WIDTH: usize = 560;
const LETTER: usize = 7;
const FONT: u32 = 15;

/// The text of the SVG.
pub fn svg(report: &Report) -> Result<String, String> {
    // A headline that was not finite is not drawn.
    let drawn = report.rows.iter().filter_map(|row| Some((&row.case, *row.figures.get(&row.headline)?)));
    let (cases, values): (Vec<&Fields>, Vec<Quartiles>) = drawn.unzip();
    let (common, labels) = labels(&cases);
    let headline = report.rows.first().map_or("", |row| row.headline.as_str());
    let least = if headline.contains("ratio") { 1.0 } else { f64::MIN_POSITIVE };
    let most = values.iter().map(|value| value.q3).fold(least, f64::max) * 1.05;

    let left = labels.iter().map(|label| label.chars().count()).max().unwrap_or(0) * LETTER + 20;
    let size = ((left + WIDTH) as u32, (labels.len() * BAR + 100) as u32);
    let title = format!("bench {}: {common}", report.bench);
    let machine =
        format!("{}, {} threads, version {}, {}", report.cpu, report.threads, report.version, report.date);
    drawing::svg(size, |area| {
        drawing::write(area, title.trim_end_matches(": "), (10, 8), FONT)?;
        drawing::write(area, &machine, (10, 24), FONT)?;
        draw(area, left as u32, &labels, &values, most, headline)
    })
}

/// A bar for each row.
fn draw(area: &Area, left: u32, labels: &[String], values: &[Quartiles], most: f64, headline: &str) -> Drawn {
    let margins = Margins { top: 45, bottom: 0, axis: 45, names: left };
    let mut chart = drawing::rows(area, labels, most, headline, &margins, 1, FONT)?;
    for (row, value) in values.iter().enumerate() {
        let middle = middle(labels.len(), row);
        let bar = [(0.0, middle - 0.3), (value.median, middle + 0.3)];
        chart.draw_series([Rectangle::new(bar, RGBColor(120, 160, 210).filled())])?;
        let line = |from, to| PathElement::new([from, to], BLACK);
        let end = |x| line((x, middle - 0.15), (x, middle + 0.15));
        chart.draw_series([line((value.q1, middle), (value.q3, middle)), end(value.q1), end(value.q3)])?;
    }
    if headline.contains("ratio") {
        let line = PathElement::new([(1.0, 0.0), (1.0, labels.len() as f64)], RED);
        chart.draw_series([line])?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::measurement::{Better, Row};
    use super::*;

    #[test]
    fn a_plot_names_its_rows_and_escapes_their_text() {
        let mut report = Report::new("io", []).unwrap();
        for (direction, ratio) in [("read", 0.5), ("<write & more>", 2.0)] {
            let row = Row::new("speed_ratio_to_fio", Better::Higher).case("direction", direction);
            report.rows.push(row.figure("speed_ratio_to_fio", &[ratio; 3]));
        }
        let text = svg(&report).unwrap();
        assert!(text.starts_with("<svg") && text.trim_end().ends_with("</svg>"), "{text}");
        for words in ["read", "&lt;write &amp; more&gt;", "bench io", "speed_ratio_to_fio"] {
            assert!(text.contains(words), "{words}: {text}");
        }
        report.rows.clear();
        assert!(svg(&report).is_ok());
    }
}
