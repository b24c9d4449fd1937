//! Checks a benchmark's memory before it is allocated. The system would otherwise end the process, or another one.
#![forbid(unsafe_code)]

use spillway::error::{Error, Result};
use spillway::sys::memory::unused_bytes;

const GIB: f64 = (1u64 << 30) as f64;

/// Fails if the system has less than `per_element * elements` bytes of available memory. Succeeds if the system does not
/// say how much it has.
pub fn require(argument: &'static str, elements: usize, per_element: u64) -> Result<()> {
    let needed = (elements as u64).saturating_mul(per_element);
    match unused_bytes() {
        Some(available) if needed > available => Err(Error::invalid(
            argument,
            format!(
                "{elements} parameters need {:.1} GiB of memory, but {:.1} GiB are available; pass a smaller number",
                needed as f64 / GIB,
                available as f64 / GIB
            ),
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_the_machine_has_is_refused_with_both_figures() {
        assert_eq!(require("--size", 1, 28), Ok(()));
        let message = require("--size", usize::MAX, 28).unwrap_err().to_string();
        assert!(message.starts_with("--size") && message.contains("GiB are available"), "{message}");
    }
}
