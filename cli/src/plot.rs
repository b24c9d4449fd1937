//! A report as an SVG: a bar for each row's headline, with a whisker between the quartiles.
#![forbid(unsafe_code)]

use super::drawing::{Area, BLACK, Picture, RED, Rows};
use super::measurement::{Fields, Quartiles, Report};
use super::report::labels;

/// Pixels: height of a bar with its gap, width of the bars' area, width of a letter.
const BAR: usize = 24;
const WIDTH: usize = 560;
const LETTER: usize = 7;
const FONT: u32 = 15;
const BLUE: [u8; 3] = [120, 160, 210];

/// The text of the SVG.
pub fn svg(report: &Report) -> String {
    // A headline that was not finite is not drawn.
    let drawn = report.rows.iter().filter_map(|row| Some((&row.case, *row.figures.get(&row.headline)?)));
    let (cases, values): (Vec<&Fields>, Vec<Quartiles>) = drawn.unzip();
    let (common, labels) = labels(&cases);
    let headline = report.rows.first().map_or("", |row| row.headline.as_str());
    let least = if headline.contains("ratio") { 1.0 } else { f64::MIN_POSITIVE };
    let most = values.iter().map(|value| value.q3).fold(least, f64::max) * 1.05;

    let left = labels.iter().map(|label| label.chars().count()).max().unwrap_or(0) * LETTER + 20;
    let (rows, width) = ((labels.len() * BAR) as f64, (WIDTH - 20) as f64);
    let mut picture = Picture::new((left + WIDTH) as u32, (labels.len() * BAR + 100) as u32);
    let title = format!("bench {}: {common}", report.bench);
    let machine =
        format!("{}, {} threads, version {}, {}", report.cpu, report.threads, report.version, report.date);
    picture.write(title.trim_end_matches(": "), (10.0, 4.0), FONT);
    picture.write(&machine, (10.0, 20.0), FONT);
    let area = Area { left: left as f64, top: 45.0, width, height: rows };
    let chart = Rows::new(&mut picture, area, &labels, most, headline, FONT);
    for (row, value) in values.iter().enumerate() {
        picture.fill(chart.at(0.0, row, -0.3), chart.at(value.median, row, 0.3), BLUE);
        picture.line(chart.at(value.q1, row, 0.0), chart.at(value.q3, row, 0.0), BLACK);
        for end in [value.q1, value.q3] {
            picture.line(chart.at(end, row, -0.15), chart.at(end, row, 0.15), BLACK);
        }
    }
    if headline.contains("ratio") && !labels.is_empty() {
        picture.line(chart.at(1.0, 0, -0.5), chart.at(1.0, labels.len() - 1, 0.5), RED);
    }
    picture.finish()
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
        let text = svg(&report);
        assert!(text.starts_with("<svg") && text.trim_end().ends_with("</svg>"), "{text}");
        for words in ["read", "&lt;write &amp; more&gt;", "bench io", "speed_ratio_to_fio"] {
            assert!(text.contains(words), "{words}: {text}");
        }
        report.rows.clear();
        assert!(svg(&report).contains("bench io"));
    }
}
