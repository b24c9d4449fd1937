//! Tables, rows of fixed width and byte counts, as all commands read and print them.
#![forbid(unsafe_code)]

use std::fmt;

use bytesize::ByteSize;
use serde_json::Value;

use super::measurement::Row;

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

/// A column of rows that are printed one by one, so that its width is fixed.
pub struct Column {
    title: &'static str,
    width: usize,
    cell: Cell,
}

/// What a column shows of a row.
enum Cell {
    /// A field of the case.
    Case(&'static str),
    /// The median of a figure, with so many decimals.
    Median(&'static str, usize),
    /// The quartiles of the headline, with so many decimals.
    Spread(usize),
}

impl Column {
    pub const fn case(title: &'static str, field: &'static str, width: usize) -> Column {
        Column { title, width, cell: Cell::Case(field) }
    }

    pub const fn median(title: &'static str, figure: &'static str, width: usize, decimals: usize) -> Column {
        Column { title, width, cell: Cell::Median(figure, decimals) }
    }

    pub const fn spread(decimals: usize) -> Column {
        Column { title: "q1..q3", width: 2 * decimals + 8, cell: Cell::Spread(decimals) }
    }

    fn text(&self, row: &Row) -> String {
        let figure = |name: &str| row.figures.get(name);
        let text = match self.cell {
            Cell::Case(field) => row.case.get(field).map(value),
            Cell::Median(name, decimals) => figure(name).map(|found| format!("{:.decimals$}", found.median)),
            Cell::Spread(decimals) => {
                figure(&row.headline).map(|found| format!("{:.decimals$}..{:.decimals$}", found.q1, found.q3))
            }
        };
        text.unwrap_or_else(|| "-".to_string())
    }
}

/// The line above the rows.
pub fn header(columns: &[Column]) -> String {
    line(columns, |column| column.title.to_string())
}

/// A row as one line.
pub fn row(columns: &[Column], row: &Row) -> String {
    line(columns, |column| column.text(row))
}

/// Cells of a case are aligned to the left, figures to the right.
fn line(columns: &[Column], text: impl Fn(&Column) -> String) -> String {
    let cells = columns.iter().map(|column| match column.cell {
        Cell::Case(_) => format!("{:<width$}", text(column), width = column.width),
        _ => format!("{:>width$}", text(column), width = column.width),
    });
    cells.collect::<Vec<String>>().join("  ").trim_end().to_string()
}

/// A field's value; a number as options accept it, such as 64Ki.
pub fn value(value: &Value) -> String {
    match (value.as_str(), value.as_u64()) {
        (Some(text), _) => text.to_string(),
        (_, Some(number)) => count(number),
        _ => value.to_string(),
    }
}

fn count(number: u64) -> String {
    let units = [(30, "Gi"), (20, "Mi"), (10, "Ki")];
    let unit = units.iter().find(|(shift, _)| number > 0 && number.is_multiple_of(1 << shift));
    unit.map_or_else(|| number.to_string(), |(shift, name)| format!("{}{name}", number >> shift))
}

/// A byte count with its binary unit, such as `64.0 KiB`.
pub fn size(bytes: u64) -> String {
    ByteSize::b(bytes).display().iec().to_string()
}

/// Reads a count such as 4096, 64Ki or 100Mi.
pub fn parse_count(text: &str) -> Result<usize, String> {
    let wrong = || format!("{text:?} is not a count such as 4096, 64Ki or 100Mi");
    let count = text.parse::<ByteSize>().map_err(|_| wrong())?.as_u64();
    usize::try_from(count).ok().filter(|count| *count > 0).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::super::measurement::Better;
    use super::*;

    #[test]
    fn counts_have_binary_units() {
        assert_eq!(parse_count("4096"), Ok(4096));
        assert_eq!((parse_count("64Ki"), parse_count("100Mi")), (Ok(64 << 10), Ok(100 << 20)));
        for wrong in ["", "0", "-1", "12x", "Ki"] {
            assert!(parse_count(wrong).is_err(), "{wrong}");
        }
        assert_eq!((size(256 << 10), size(1 << 30)), ("256.0 KiB".to_string(), "1.0 GiB".to_string()));
        assert_eq!([0, 1000, 4096, 100 << 20, 3 << 30].map(count), ["0", "1000", "4Ki", "100Mi", "3Gi"]);
    }

    #[test]
    fn a_table_aligns_numbers_to_the_right() {
        let mut table = table(["path", "GB/s"]);
        table.add_row(["a long name".to_string(), "1.5".to_string()]);
        table.add_row(["\u{3b1}".to_string(), "12.25".to_string()]);
        let wanted = [" path          GB/s", " a long name    1.5", " \u{3b1}            12.25"].join("\n");
        assert_eq!(table.to_string(), wanted);
    }

    #[test]
    fn rows_have_the_columns_of_their_header() {
        const COLUMNS: &[Column] = &[
            Column::case("parameters", "parameters", 10),
            Column::median("ratio", "ratio", 6, 3),
            Column::spread(2),
            Column::median("fio", "fio", 5, 1),
        ];
        let full =
            Row::new("ratio", Better::Higher).case("parameters", 65536).figure("ratio", &[0.5, 1.0, 2.0]);
        assert_eq!(header(COLUMNS), "parameters   ratio        q1..q3    fio");
        assert_eq!(row(COLUMNS, &full), "64Ki         1.000    0.75..1.50      -");
    }
}
