//! Splits units over paths in proportion to the speeds of the paths (MLP-Offload Eq. 1).
//!
//! The largest-remainder method makes the parts add up to the whole. If a path lacks room for its part, the other paths
//! get the excess in proportion to their speeds. [`balanced_order`] interleaves the parts: every section of the order
//! contains each path about in proportion to its share, so that all paths are busy all the time.
#![forbid(unsafe_code)]

use crate::error::{Error, Result};

/// Returns the number of units per path, `count` in total. `weights` are speeds in any common unit. `room` is the
/// maximal number of units per path. Fails for invalid weights, for slices of different lengths, or if the room is too
/// small.
pub fn shares(count: usize, weights: &[f64], room: &[usize]) -> Result<Vec<usize>> {
    check("weights", weights)?;
    if weights.len() != room.len() {
        return Err(Error::invalid(
            "room",
            format!("there are {} paths, but {} weights", room.len(), weights.len()),
        ));
    }
    let total: usize = room.iter().fold(0, |sum, room| sum.saturating_add(*room));
    if total < count {
        return Err(Error::NoRoom(format!("the paths have no room for {count} units, only for {total}")));
    }
    let mut parts = vec![0; weights.len()];
    let mut open: Vec<usize> = (0..weights.len()).filter(|path| weights[*path] > 0.0).collect();
    let mut left = count;
    // Each iteration fills at least one path or ends the loop. Paths of weight zero get units only when all others are
    // full.
    while left > 0 {
        if open.is_empty() {
            open = (0..weights.len()).filter(|path| parts[*path] < room[*path]).collect();
        }
        let sum: f64 = open.iter().map(|path| weights[*path]).sum();
        let quota = |path: usize| match sum > 0.0 {
            true => left as f64 * (weights[path] / sum),
            false => left as f64 / open.len() as f64,
        };
        let full: Vec<usize> =
            open.iter().copied().filter(|path| quota(*path) >= (room[*path] - parts[*path]) as f64).collect();
        if full.is_empty() {
            let quotas: Vec<(usize, f64)> = open.iter().map(|path| (*path, quota(*path))).collect();
            largest_remainder(left, quotas, &mut parts);
            break;
        }
        for path in full {
            let taken = (room[path] - parts[path]).min(left);
            parts[path] += taken;
            left -= taken;
            open.retain(|other| *other != path);
        }
    }
    Ok(parts)
}

/// Gives each path its quota rounded down, then one more unit to the paths with the largest remainders. Ties go to the
/// earlier path.
fn largest_remainder(count: usize, quotas: Vec<(usize, f64)>, parts: &mut [usize]) {
    let mut given = 0;
    let mut rests: Vec<(usize, f64)> = Vec::with_capacity(quotas.len());
    for (path, quota) in quotas {
        let whole = (quota.floor() as usize).min(count - given);
        parts[path] += whole;
        given += whole;
        rests.push((path, quota - quota.floor()));
    }
    rests.sort_by(|a, b| b.1.total_cmp(&a.1));
    for (path, _) in rests.iter().cycle().take(count - given) {
        parts[*path] += 1;
    }
}

/// Returns the path of each unit, with `parts[p]` units on path p. Unit k (from 0) of the n units of a path has the
/// relative position (k + 0.5) / n in the order.
pub fn balanced_order(parts: &[usize]) -> Vec<usize> {
    let mut places: Vec<(f64, usize)> = Vec::with_capacity(parts.iter().sum());
    for (path, part) in parts.iter().enumerate() {
        places.extend((0..*part).map(|k| ((k as f64 + 0.5) / *part as f64, path)));
    }
    places.sort_by(|a, b| a.0.total_cmp(&b.0));
    places.into_iter().map(|(_, path)| path).collect()
}

/// Returns an error unless all weights are finite and not negative, and at least one is positive.
pub fn check(argument: &'static str, weights: &[f64]) -> Result<()> {
    if weights.is_empty() {
        return Err(Error::invalid(argument, "is empty; at least one path is needed"));
    }
    if let Some(bad) = weights.iter().position(|weight| !weight.is_finite() || *weight < 0.0) {
        return Err(Error::invalid(
            format!("{argument}[{bad}]"),
            format!("is {}, but must be finite and not negative", weights[bad]),
        ));
    }
    match weights.iter().any(|weight| *weight > 0.0) {
        true => Ok(()),
        false => Err(Error::invalid(argument, "must not all be 0")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MUCH: usize = usize::MAX;

    #[test]
    fn the_papers_two_machines() {
        // MLP-Offload: NVMe with min(6.9, 5.3) and PFS with min(3.6, 3.6) GB/s.
        assert_eq!(shares(100, &[5.3, 3.6], &[MUCH, MUCH]).unwrap(), [60, 40]);
        // The ratio of two to one that the paper's runs used.
        assert_eq!(shares(10, &[2.0, 1.0], &[MUCH, MUCH]).unwrap(), [7, 3]);
    }

    #[test]
    fn parts_add_up_and_are_within_one_of_their_quota() {
        for count in [0, 1, 2, 3, 7, 100, 1001] {
            for weights in [vec![1.0], vec![1.0, 1.0, 1.0], vec![0.1, 7.0, 3.3], vec![5.0, 0.0, 1e-9]] {
                let parts = shares(count, &weights, &vec![MUCH; weights.len()]).unwrap();
                assert_eq!(parts.iter().sum::<usize>(), count);
                let sum: f64 = weights.iter().sum();
                for (part, weight) in parts.iter().zip(&weights) {
                    assert!(
                        (*part as f64 - count as f64 * weight / sum).abs() < 1.0,
                        "{count} {weights:?} {parts:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_full_path_passes_its_part_on() {
        assert_eq!(shares(10, &[2.0, 1.0, 1.0], &[2, MUCH, MUCH]).unwrap(), [2, 4, 4]);
        assert_eq!(shares(10, &[1.0, 0.0], &[4, 20]).unwrap(), [4, 6]);
        assert_eq!(shares(3, &[1.0, 1.0], &[1, 2]).unwrap(), [1, 2]);
        assert!(matches!(shares(4, &[1.0, 1.0], &[1, 2]), Err(Error::NoRoom(_))));
    }

    #[test]
    fn weights_that_mean_nothing_are_refused() {
        for weights in [&[][..], &[f64::NAN], &[-1.0, 2.0], &[0.0, 0.0], &[f64::INFINITY]] {
            assert!(matches!(
                shares(1, weights, &vec![MUCH; weights.len()]),
                Err(Error::InvalidArgument { .. })
            ));
        }
        assert!(shares(1, &[1.0], &[]).is_err());
    }

    #[test]
    fn every_stretch_of_the_order_holds_its_shares() {
        let parts = [53, 36, 11];
        let order = balanced_order(&parts);
        assert_eq!(order.len(), 100);
        for (path, part) in parts.iter().enumerate() {
            let mut seen = 0usize;
            for (place, home) in order.iter().enumerate() {
                seen += usize::from(*home == path);
                let expected = *part as f64 * (place + 1) as f64 / 100.0;
                assert!(
                    (seen as f64 - expected).abs() <= 1.0,
                    "path {path} at {place}: {seen}, not {expected}"
                );
            }
        }
    }
}
