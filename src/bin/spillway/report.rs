//! Tables, byte counts and medians, as all commands read and print them.
#![forbid(unsafe_code)]

use bytesize::ByteSize;
use comfy_table::{CellAlignment, Table, presets};

/// A table of numbers: every column but the first is aligned to the right.
pub fn table<const N: usize>(header: [&str; N]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
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

pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_have_binary_units() {
        assert_eq!(parse_count("4096"), Ok(4096));
        assert_eq!((parse_count("64Ki"), parse_count("100Mi")), (Ok(64 << 10), Ok(100 << 20)));
        for wrong in ["", "0", "-1", "12x", "Ki"] {
            assert!(parse_count(wrong).is_err(), "{wrong}");
        }
        assert_eq!((size(256 << 10), size(1 << 30)), ("256.0 KiB".to_string(), "1.0 GiB".to_string()));
    }
}
