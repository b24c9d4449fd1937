//! Pictures as SVG text: a white area, text, and the axes of bars in rows.
#![forbid(unsafe_code)]

use std::error::Error;

use plotters::chart::ChartContext;
use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

pub type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
pub type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;
pub type Drawn<T = ()> = Result<T, Box<dyn Error>>;

/// Space around the rows of a chart, in pixels.
pub struct Margins {
    pub top: u32,
    pub bottom: u32,
    /// Height of the axis with its description.
    pub axis: u32,
    /// Width of the names of the rows.
    pub names: u32,
}

/// The text of a picture of this size, in pixels.
pub fn svg(size: (u32, u32), draw: impl FnOnce(&Area) -> Drawn) -> Result<String, String> {
    let mut text = String::new();
    on_white(&mut text, size, draw).map_err(|error| error.to_string())?;
    Ok(text)
}

fn on_white(text: &mut String, size: (u32, u32), draw: impl FnOnce(&Area) -> Drawn) -> Drawn {
    let area = SVGBackend::with_string(text, size).into_drawing_area();
    area.fill(&WHITE)?;
    draw(&area)?;
    Ok(area.present()?)
}

/// Writes a line of letters of `size` pixels, with its upper left corner at `at`.
pub fn write(area: &Area, line: &str, at: (i32, i32), size: u32) -> Drawn {
    Ok(area.draw_text(line, &("sans-serif", size).into_text_style(area), at)?)
}

/// A chart of `names.len()` rows of height 1, the first row at the top, with values up to `most` on the axis `unit`. Letters
/// have `size` pixels.
pub fn rows<'a, 'b>(
    area: &'a Area<'b>,
    names: &[String],
    most: f64,
    unit: &str,
    margins: &Margins,
    light_lines: usize,
    size: u32,
) -> Drawn<Chart<'a, 'b>> {
    let font = ("sans-serif", size);
    let mut chart = ChartBuilder::on(area)
        .margin_top(margins.top)
        .margin_bottom(margins.bottom)
        .margin_right(20)
        .x_label_area_size(margins.axis)
        .y_label_area_size(margins.names)
        .build_cartesian_2d(0.0..most, 0.0..names.len() as f64)?;
    chart
        .configure_mesh()
        .disable_y_mesh()
        .max_light_lines(light_lines)
        .disable_y_axis()
        .x_desc(unit)
        .label_style(font)
        .draw()?;
    let right = font.into_text_style(area).pos(Pos::new(HPos::Right, VPos::Center));
    for (row, name) in names.iter().enumerate() {
        let (x, y) = chart.backend_coord(&(0.0, middle(names.len(), row)));
        area.draw_text(name, &right, (x - 8, y))?;
    }
    Ok(chart)
}

/// The middle of a row.
pub fn middle(rows: usize, row: usize) -> f64 {
    (rows - row) as f64 - 0.5
}
