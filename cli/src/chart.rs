//! Charts of bars in rows.
#![forbid(unsafe_code)]

use spillway_planner::picture::{Anchor, BLACK, Color, Picture, Point};

const GREY: Color = [225, 225, 225];

/// The area of a chart in pixels, without the names of its rows and its axis.
pub struct Area {
    pub left: f64,
    pub top: f64,
    pub width: f64,
    pub height: f64,
}

/// A chart of rows of equal height, the first at the top, with values from 0 to `most` to the right.
pub struct Rows {
    area: Area,
    most: f64,
    count: f64,
}

impl Rows {
    /// Draws the names of the rows, the axis below them, and its `unit`. Letters have `size` pixels.
    pub fn new(
        picture: &mut Picture,
        area: Area,
        names: &[String],
        most: f64,
        unit: &str,
        size: u32,
    ) -> Rows {
        let rows = Rows { area, most, count: names.len() as f64 };
        let (bottom, letter) = (rows.area.top + rows.area.height, f64::from(size));
        for mark in 0..=ceiling(most / step(most)) {
            let value = mark as f64 * step(most);
            if value > most {
                break;
            }
            let x = rows.x(value);
            picture.line((x, rows.area.top), (x, bottom + 4.0), GREY);
            picture.letters(&number(value), (x, bottom + 4.0 + letter), size, Anchor::Middle);
        }
        picture.line((rows.area.left, bottom), (rows.area.left + rows.area.width, bottom), BLACK);
        picture.line((rows.area.left, rows.area.top), (rows.area.left, bottom), BLACK);
        let middle = rows.area.left + rows.area.width / 2.0;
        picture.letters(unit, (middle, bottom + 8.0 + 2.0 * letter), size, Anchor::Middle);
        for (row, name) in names.iter().enumerate() {
            let (_, y) = rows.at(0.0, row, 0.0);
            picture.letters(name, (rows.area.left - 8.0, y + letter / 3.0), size, Anchor::End);
        }
        rows
    }

    /// The point of a value, `offset` rows below the middle of a row.
    pub fn at(&self, value: f64, row: usize, offset: f64) -> Point {
        let height = self.area.height / self.count.max(1.0);
        (self.x(value), self.area.top + (row as f64 + 0.5 + offset) * height)
    }

    fn x(&self, value: f64) -> f64 {
        self.area.left + value / self.most * self.area.width
    }
}

/// The distance of the axis' marks: 1, 2 or 5 times a power of ten, for at most ten marks.
fn step(most: f64) -> f64 {
    let least = most.max(f64::MIN_POSITIVE) / 10.0;
    let power = 10f64.powf(least.log10().floor());
    [1.0, 2.0, 5.0].into_iter().map(|times| times * power).find(|step| *step >= least).unwrap_or(10.0 * power)
}

/// At most 11: see [`step`].
fn ceiling(marks: f64) -> u32 {
    marks.clamp(0.0, 11.0).ceil() as u32
}

/// A mark's value, without digits that only rounding made.
fn number(value: f64) -> String {
    if value != 0.0 && !(1e-4..1e6).contains(&value) {
        return format!("{value:.0e}");
    }
    let text = format!("{value:.6}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_axis_has_at_most_ten_marks_of_round_values() {
        for (most, wanted) in [(1.0, 0.1), (1.05, 0.2), (0.42, 0.05), (37.0, 5.0), (3e-7, 5e-8)] {
            assert!((step(most) / wanted - 1.0).abs() < 1e-9, "{most}: {}", step(most));
        }
        assert!(step(0.0) > 0.0 && step(f64::MIN_POSITIVE) >= 0.0);
        assert_eq!([0.0, 0.30000000000000004, 20.0, 5e-8].map(number), ["0", "0.3", "20", "5e-8"]);
    }
}
