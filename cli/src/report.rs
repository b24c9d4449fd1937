//! Tables and byte counts, as all commands print them.
#![forbid(unsafe_code)]

use std::fmt;

use spillway::io::options::BackendChoice;
use spillway::io::profile::Settings;

/// A table of numbers: every column but the first is aligned to the right.
pub struct Table<const N: usize>(Vec<[String; N]>);

pub fn table<const N: usize>(header: [&str; N]) -> Table<N> {
    Table(vec![header.map(String::from)])
}

impl<const N: usize> Table<N> {
    pub fn add_row(&mut self, row: [String; N]) {
        self.0.push(row);
    }
}

impl<const N: usize> fmt::Display for Table<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letters = |cell: &String| cell.chars().count();
        let widths: [usize; N] =
            std::array::from_fn(|column| self.0.iter().map(|row| letters(&row[column])).max().unwrap_or(0));
        for (nth, row) in self.0.iter().enumerate() {
            let cells = row.iter().zip(widths).enumerate().map(|(column, (cell, width))| match column {
                0 => format!(" {cell:<width$}"),
                _ => format!("  {cell:>width$}"),
            });
            let line = cells.collect::<String>();
            let end = if nth + 1 < self.0.len() { "\n" } else { "" };
            write!(f, "{}{end}", line.trim_end())?;
        }
        Ok(())
    }
}

/// Settings of the I/O engine.
pub fn io_settings(settings: Settings) -> String {
    let backend = if settings.backend == BackendChoice::Threads { "threads" } else { "io_uring" };
    format!("{backend}, blocks of {}, depth {}", size(settings.block_bytes), settings.depth)
}

pub use spillway_planner::model::bytes::size;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_binary_units() {
        assert_eq!((size(256 << 10), size(1 << 30)), ("256.0 KiB".to_string(), "1.0 GiB".to_string()));
    }

    #[test]
    fn a_table_aligns_numbers_to_the_right() {
        let mut table = table(["path", "GB/s"]);
        table.add_row(["a long name".to_string(), "1.5".to_string()]);
        table.add_row(["\u{3b1}".to_string(), "12.25".to_string()]);
        let wanted = [" path          GB/s", " a long name    1.5", " \u{3b1}            12.25"].join("\n");
        assert_eq!(table.to_string(), wanted);
    }
}
