//! Vectors whose length the caller of the library chooses: a failed allocation is an error, never an abort.
#![forbid(unsafe_code)]

use crate::error::{Error, Result};

/// An empty vector with room for `count` values; `what` names the vector in the error.
pub fn with_capacity<T>(what: &'static str, count: usize) -> Result<Vec<T>> {
    let mut values = Vec::new();
    values.try_reserve_exact(count).map_err(|_| {
        let reason = format!("out of memory for {count} entries of {} bytes", size_of::<T>());
        Error::System { what, reason }
    })?;
    Ok(values)
}

/// A vector of `count` values, which `make` computes from their index; `what` names the vector in the error.
pub fn from_fn<T>(what: &'static str, count: usize, make: impl FnMut(usize) -> T) -> Result<Vec<T>> {
    let mut values = with_capacity(what, count)?;
    values.extend((0..count).map(make));
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_that_cannot_be_are_errors_that_name_the_vector() {
        assert_eq!(from_fn("a list", 3, |n| n * n).unwrap(), [0, 1, 4]);
        for count in [1 << 52, usize::MAX / 8, usize::MAX] {
            let refused = with_capacity::<u64>("a list", count).unwrap_err().to_string();
            assert!(refused.contains("a list") && refused.contains(&count.to_string()), "{refused}");
        }
    }
}
