//! A report as an SVG: a bar for each row's headline, with a whisker between the quartiles.
#![forbid(unsafe_code)]

use std::error::Error;

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::measurement::{Fields, Quartiles, Report};
use super::report::labels;

/// Pixels: height of a bar with its gap, width of the bars' area, width of a letter.
const BAR: usize = 24;
const WIDTH: usize = 560;
const LETTER: usize = 7;
const FONT: (&str, u32) = ("sans-serif", 15);

/// The text of the SVG.
pub fn svg(report: &Report) -> Result<String, String> {
    let mut text = String::new();
    draw(report, &mut text).map_err(|error| error.to_string())?;
    Ok(text)
}

fn draw(report: &Report, text: &mut String) -> Result<(), Box<dyn Error>> {
    // A headline that was not finite is not drawn.
    let drawn = report.rows.iter().filter_map(|row| Some((&row.case, *row.figures.get(&row.headline)?)));
    let (cases, values): (Vec<&Fields>, Vec<Quartiles>) = drawn.unzip();
    let (common, labels) = labels(&cases);
    let headline = report.rows.first().map_or("", |row| row.headline.as_str());
    let ratio = headline.contains("ratio");
    let least = if ratio { 1.0 } else { f64::MIN_POSITIVE };
    let most = values.iter().map(|value| value.q3).fold(least, f64::max) * 1.05;

    let left = labels.iter().map(|label| label.chars().count()).max().unwrap_or(0) * LETTER + 20;
    let size = ((left + WIDTH) as u32, (labels.len() * BAR + 100) as u32);
    let root = SVGBackend::with_string(text, size).into_drawing_area();
    root.fill(&WHITE)?;
    let title = format!("bench {}: {common}", report.bench);
    root.draw_text(title.trim_end_matches(": "), &FONT.into_text_style(&root), (10, 8))?;
    let machine =
        format!("{}, {} threads, version {}, {}", report.cpu, report.threads, report.version, report.date);
    root.draw_text(&machine, &FONT.into_text_style(&root), (10, 24))?;
    let mut chart = ChartBuilder::on(&root)
        .margin_top(45)
        .margin_right(20)
        .x_label_area_size(45)
        .y_label_area_size(left as u32)
        .build_cartesian_2d(0.0..most, 0.0..labels.len() as f64)?;
    chart
        .configure_mesh()
        .disable_y_mesh()
        .max_light_lines(1)
        .disable_y_axis()
        .x_desc(headline)
        .label_style(FONT)
        .draw()?;
    let right = FONT.into_text_style(&root).pos(Pos::new(HPos::Right, VPos::Center));
    for (n, (label, value)) in labels.iter().zip(&values).enumerate() {
        let middle = (labels.len() - n) as f64 - 0.5;
        let (x, y) = chart.backend_coord(&(0.0, middle));
        root.draw_text(label, &right, (x - 8, y))?;
        let bar = [(0.0, middle - 0.3), (value.median, middle + 0.3)];
        chart.draw_series([Rectangle::new(bar, RGBColor(120, 160, 210).filled())])?;
        let line = |from, to| PathElement::new([from, to], BLACK);
        let end = |x| line((x, middle - 0.15), (x, middle + 0.15));
        chart.draw_series([line((value.q1, middle), (value.q3, middle)), end(value.q1), end(value.q3)])?;
    }
    if ratio {
        let line = PathElement::new([(1.0, 0.0), (1.0, labels.len() as f64)], RED);
        chart.draw_series([line])?;
    }
    root.present()?;
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
