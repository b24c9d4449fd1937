//! Pictures as SVG text: rectangles, lines and letters on white.
#![forbid(unsafe_code)]

use std::fmt::Write as _;

/// Red, green and blue.
pub type Color = [u8; 3];
/// Black.
pub const BLACK: Color = [0, 0, 0];

/// A point in pixels, from the upper left corner of the picture.
pub type Point = (f64, f64);

/// Where a text begins, lies, or ends at its point.
#[derive(Debug, Clone, Copy)]
pub enum Anchor {
    /// It begins there.
    Start,
    /// It lies there with its middle.
    Middle,
    /// It ends there.
    End,
}

/// A picture that is drawn from back to front.
#[derive(Debug)]
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

    /// Fills a rectangle between two opposite corners, in any order.
    pub fn fill(&mut self, from: Point, to: Point, color: Color) {
        self.rectangle(from, to, &format!("fill=\"{}\"", hex(color)), "/>");
    }

    /// Fills a rectangle that shows `title` to a reader who points at it.
    pub fn titled(&mut self, from: Point, to: Point, color: Color, title: &str) {
        let title = format!(">\n<title>\n{}\n</title>\n</rect>", escaped(title));
        self.rectangle(from, to, &format!("fill=\"{}\"", hex(color)), &title);
    }

    /// Draws the edges of a rectangle.
    pub fn frame(&mut self, from: Point, to: Point, color: Color) {
        self.rectangle(from, to, &format!("fill=\"none\" stroke=\"{}\"", hex(color)), "/>");
    }

    /// Draws a line.
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
    fn rectangle(&mut self, from: Point, to: Point, style: &str, end: &str) {
        let (x, y) = (from.0.min(to.0), from.1.min(to.1));
        let (width, height) = ((from.0 - to.0).abs(), (from.1 - to.1).abs());
        let _ = writeln!(
            self.0,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" {style}{end}"
        );
    }

    /// Writes a line of letters of `size` pixels on a base line at `at`. The text has a line of its own, so that programs find it.
    pub fn letters(&mut self, line: &str, (x, y): Point, size: u32, anchor: Anchor) {
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

/// Text of XML, which has no form for control characters.
fn escaped(text: &str) -> String {
    let text: String = text.chars().map(|one| if one.is_control() { '\u{fffd}' } else { one }).collect();
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_escapes_its_text_and_orders_corners() {
        let mut picture = Picture::new(10, 20);
        picture.write("a < b & c\u{1}", (1.0, 2.0), 12);
        picture.fill((5.0, 6.0), (1.0, 2.0), BLACK);
        let text = picture.finish();
        assert!(text.starts_with("<svg width=\"10\" height=\"20\"") && text.ends_with("</svg>\n"), "{text}");
        assert!(text.lines().any(|line| line == "a &lt; b &amp; c\u{fffd}"), "{text}");
        assert!(text.contains("x=\"1.0\" y=\"2.0\" width=\"4.0\" height=\"4.0\" fill=\"#000000\""), "{text}");
    }
}
