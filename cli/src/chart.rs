//! Charts of bars in rows.
#![forbid(unsafe_code)]

use spillway_planner::picture::{Anchor, BLACK, Color, Picture, Point};

const GREY: Color = [225, 225, 225];
const COLORS: [Color; 12] = [
    [76, 120, 168],
    [245, 133, 24],
    [84, 162, 75],
    [228, 87, 86],
    [114, 183, 178],
    [238, 202, 59],
    [178, 121, 162],
    [157, 117, 93],
    [255, 157, 166],
    [121, 112, 110],
    [31, 119, 180],
    [188, 189, 34],
];

/// The color of a kind of bars, by its number.
pub fn color(kind: usize) -> Color {
    COLORS[kind % COLORS.len()]
}

/// Names of kinds of bars, in lines of a picture of this width. A name has a place of `place` pixels, and letters of `size`.
pub struct Legend {
    pub place: u32,
    pub width: u32,
    pub size: u32,
}

impl Legend {
    fn places(&self) -> u32 {
        (self.width / self.place).max(1)
    }

    /// Pixels that it takes.
    pub fn height(&self, kinds: usize) -> u32 {
        (kinds as u32).div_ceil(self.places()) * 20
    }

    /// Draws the names with the colors of their numbers.
    pub fn draw(&self, picture: &mut Picture, top: f64, kinds: &[impl AsRef<str>]) {
        for (number, kind) in kinds.iter().enumerate() {
            let (line, place) = (number as u32 / self.places(), number as u32 % self.places());
            let (x, y) = (f64::from(place * self.place + 10), top + f64::from(line * 20) - 4.0);
            picture.fill((x, y), (x + 12.0, y + 12.0), color(number));
            picture.write(kind.as_ref(), (x + 18.0, y - 2.0), self.size);
        }
    }
}

/// The area of a chart in pixels, without the names of its rows and its axis.
#[derive(Clone, Copy)]
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
        for value in marks(most) {
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

/// An axis to the left of a chart, with values from 0 at its bottom to `most`.
pub struct Levels {
    area: Area,
    most: f64,
}

impl Levels {
    /// Draws the axis, and its `unit` above it. Letters have `size` pixels.
    pub fn new(picture: &mut Picture, area: Area, most: f64, unit: &str, size: u32) -> Levels {
        let levels = Levels { area, most };
        for value in marks(most) {
            let y = levels.at(value);
            picture.line((area.left, y), (area.left + area.width, y), GREY);
            let below = f64::from(size) / 3.0;
            picture.letters(&number(value), (area.left - 8.0, y + below), size, Anchor::End);
        }
        picture.letters(unit, (area.left - 8.0, area.top - 6.0), size, Anchor::End);
        levels
    }

    /// The height of a value in the picture.
    pub fn at(&self, value: f64) -> f64 {
        self.area.top + self.area.height * (1.0 - value / self.most)
    }
}

/// The values of an axis' marks.
fn marks(most: f64) -> impl Iterator<Item = f64> {
    let step = step(most);
    (0..=ceiling(most / step)).map(move |mark| f64::from(mark) * step).take_while(move |value| *value <= most)
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
