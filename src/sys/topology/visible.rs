//! `CUDA_VISIBLE_DEVICES`: which GPUs a CUDA process sees, and in which order.
//!
//! The driver's rules, as torch's `_parse_visible_devices` states them too:
//!
//! - Numbers count the GPUs in the driver's order; other words are UUIDs ("GPU-" and a unique beginning), or MIG
//!   instances ("MIG-").
//! - The first word that names no GPU ends the list. A GPU that is named twice makes the whole list empty.
#![forbid(unsafe_code)]

/// Most ordinals that a list without effect has; the driver has the same limit.
const MOST: usize = 4096;

/// Indices into `uuids` of the GPUs that are visible, in their order. `uuids` has the UUID of each GPU in the driver's
/// order, empty if unknown. `None` for a MIG instance whose GPU the word does not name.
pub fn visible(variable: Option<&str>, uuids: &[&str]) -> Vec<Option<usize>> {
    let Some(list) = variable else { return (0..uuids.len().min(MOST)).map(Some).collect() };
    match list.get(..4) {
        Some("GPU-") => words(list, |word| by_uuid(word, uuids)),
        Some("MIG-") => words(list, |word| mig(word, uuids)),
        _ => words(list, |word| number(word).filter(|ordinal| *ordinal < uuids.len()).map(Some)),
    }
}

fn words(list: &str, find: impl Fn(&str) -> Option<Option<usize>>) -> Vec<Option<usize>> {
    let mut seen: Vec<&str> = Vec::new();
    let mut found = Vec::new();
    for word in list.split(',').take(MOST) {
        let Some(gpu) = find(word) else { break };
        // Several MIG instances may be on one GPU.
        if seen.contains(&word) || (!word.starts_with("MIG-") && found.contains(&gpu)) {
            return Vec::new();
        }
        seen.push(word);
        found.push(gpu);
    }
    found
}

/// The number with which a word begins, as strtoul reads it.
fn number(word: &str) -> Option<usize> {
    let word = word.trim();
    let word = word.strip_prefix('+').unwrap_or(word);
    let end = word.find(|c: char| !c.is_ascii_digit()).unwrap_or(word.len());
    word[..end].parse().ok()
}

fn by_uuid(word: &str, uuids: &[&str]) -> Option<Option<usize>> {
    let mut matches =
        (0..uuids.len()).filter(|gpu| word.starts_with("GPU-") && uuids[*gpu].starts_with(word));
    match (matches.next(), matches.next()) {
        (Some(only), None) => Some(Some(only)),
        _ => None,
    }
}

/// "MIG-GPU-UUID/INSTANCE/INSTANCE" names its GPU; "MIG-UUID" does not.
fn mig(word: &str, uuids: &[&str]) -> Option<Option<usize>> {
    let rest = word.strip_prefix("MIG-")?;
    match rest.split_once('/') {
        Some((gpu, _)) => by_uuid(gpu, uuids),
        None => Some(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_read_as_the_driver_reads_it() {
        let uuids = ["GPU-aa11", "GPU-ab22", "GPU-cc33", ""];
        let numbers =
            |list: &str| visible(Some(list), &uuids).into_iter().map(|gpu| gpu.unwrap()).collect::<Vec<_>>();
        for (list, expected) in [
            ("2,0", &[2, 0][..]),
            (" 1 ,+3", &[1, 3]),
            ("1gpu2,2ampere", &[1, 2]),
            ("", &[]),
            ("NoDevFiles", &[]),
            ("-1,0", &[]),
            ("0,-1,1", &[0]),
            ("0,4,1", &[0]),
            ("0,1,0", &[]),
            ("99999999999999999999", &[]),
            ("GPU-cc,GPU-aa", &[2, 0]),
            ("GPU-a", &[]),
            ("GPU-cc33,GPU-c", &[]),
            ("GPU-cc,0", &[2]),
            ("0,GPU-cc", &[0]),
            ("GPU-dd", &[]),
            ("MIG-GPU-ab22/1/0,MIG-GPU-ab22/2/0", &[1, 1]),
            ("MIG-GPU-ab22/1/0,MIG-GPU-ab22/1/0", &[]),
        ] {
            assert_eq!(numbers(list), expected, "{list:?}");
        }
        assert_eq!(visible(None, &uuids).len(), 4);
        assert_eq!(visible(Some("MIG-1234"), &uuids), [None]);
    }
}
