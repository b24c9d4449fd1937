//! Pictures as SVG text: rectangles, lines and letters on white, and charts of bars in rows.
#![forbid(unsafe_code)]

use std::fmt::Write as _;

/// Red, green and blue.
pub type Color = [u8; 3];
pub const BLACK: Color = [0, 0, 0];
const GREY: Color = [225, 225, 225];

/// A point in pixels, from the upper left corner of the picture.
pub type Point = (f64, f64);

/// Where a text begins, lies, or ends at its point.
#[derive(Clone, Copy)]
enum Anchor {
    Start,
    Middle,
    End,
}

/// A picture that is drawn from back to front.
pub struct Picture(String);

impl Picture {
    /// A white picture of this width and height in pixels.
    pub fn new(width: u32, height: u32) -> Picture {
        let head = format!(
            "<svg width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
             xmlns=\"http://www.w3.org/2000/svg\">\n<rect width=\"{width}\" height=\"{height}\" fill=\"white\"/>\n"
        );
        Picture(head)
    }

    /// The text of the SVG.
    pub fn finish(self) -> String {
        self.0 + "</svg>\n"
    }

    /// Writes a line of letters of `size` pixels, with its upper left corner at `at`.
    pub fn write(&mut self, line: &str, (x, y): Point, size: u32) {
        self.letters(line, (x, y + f64::from(size)), size, Anchor::Start);
    }

    pub fn fill(&mut self, from: Point, to: Point, color: Color) {
        self.rectangle(from, to, &format!("fill=\"{}\"", hex(color)));
    }

    pub fn frame(&mut self, from: Point, to: Point, color: Color) {
        self.rectangle(from, to, &format!("fill=\"none\" stroke=\"{}\"", hex(color)));
    }

    pub fn line(&mut self, from: Point, to: Point, color: Color) {
        let _ = writeln!(
            self.0,
            "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"{}\"/>",
            from.0,
            from.1,
            to.0,
            to.1,
            hex(color)
        );
    }

    /// Two opposite corners, in any order.
    fn rectangle(&mut self, from: Point, to: Point, style: &str) {
        let (x, y) = (from.0.min(to.0), from.1.min(to.1));
        let (width, height) = ((from.0 - to.0).abs(), (from.1 - to.1).abs());
        let _ = writeln!(
            self.0,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" {style}/>"
        );
    }

    /// The text has a line of its own, so that programs find it.
    fn letters(&mut self, line: &str, (x, y): Point, size: u32, anchor: Anchor) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let _ = writeln!(
            self.0,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" font-family=\"sans-serif\" font-size=\"{size}\" \
             text-anchor=\"{anchor}\">\n{}\n</text>",
            escaped(line)
        );
    }
}

fn hex([red, green, blue]: Color) -> String {
    format!("#{red:02x}{green:02x}{blue:02x}")
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

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

    #[test]
    fn a_picture_escapes_its_text_and_orders_corners() {
        let mut picture = Picture::new(10, 20);
        picture.write("a < b & c", (1.0, 2.0), 12);
        picture.fill((5.0, 6.0), (1.0, 2.0), BLACK);
        let text = picture.finish();
        assert!(text.starts_with("<svg width=\"10\" height=\"20\"") && text.ends_with("</svg>\n"), "{text}");
        assert!(text.lines().any(|line| line == "a &lt; b &amp; c"), "{text}");
        assert!(text.contains("x=\"1.0\" y=\"2.0\" width=\"4.0\" height=\"4.0\" fill=\"#000000\""), "{text}");
    }
}
