//! The two partitions of SuperOffload's release page. There, on 72 cores whose L3 cache has 12 parts:
//!
//! | partition | processors | memory bandwidth | L3 cache |
//! |---|---|---|---|
//! | trainer | 0-6 | 100 | ff0 |
//! | optimizer | 7-71 | 20 | f |
//!
//! On other machines the optimizer gets a third of the parts of the cache, rounded down, and a fifth of the bandwidth,
//! rounded up to the hardware's steps.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;

use serde::Serialize;

use super::support::{MOUNT, Support};
use crate::error::{Error, Result};
use crate::sys::bitmap::Bitmap;
use crate::sys::topology::{Root, Topology};

/// Share of the optimizer in the parts of the cache, and in the bandwidth.
const CACHE_SHARE: u32 = 3;
const BANDWIDTH_SHARE: u64 = 5;
/// A larger value is not a share: with the mount option mba_MBps, values are MB/s.
const MOST_BANDWIDTH: u64 = 1 << 16;

/// A group of resctrl.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Partition {
    /// Name of its directory.
    pub name: &'static str,
    /// Its processors.
    pub cpus: Bitmap,
    /// Lines of its schemata.
    pub schemata: Vec<String>,
}

/// Groups that the partitions need, the default group included.
const GROUPS: u32 = 1 + NAMES.len() as u32;

/// Names of the directories. No other directory is ever made or removed.
pub const NAMES: [&str; 2] = ["spillway-trainer", "spillway-optimizer"];

/// The partitions of processors of the trainer and of the optimizer.
///
/// [`Error::Unsupported`] if the hardware divides neither the cache nor the bandwidth, or distinguishes too few groups. [`Error::InvalidArgument`] if one
/// of the sets is empty or they overlap.
pub fn partitions(
    root: &Root,
    topology: &Topology,
    trainer: &Bitmap,
    optimizer: &Bitmap,
) -> Result<[Partition; 2]> {
    super::support::mounted(root)?;
    if trainer.is_empty() || optimizer.is_empty() || trainer.meets(optimizer) {
        let reason = format!("trainer {trainer} and optimizer {optimizer} need processors of their own each");
        return Err(Error::invalid("share", reason));
    }
    let support = Support::read(root);
    if (1..GROUPS).contains(&support.groups) {
        return Err(Error::Unsupported(format!(
            "this machine's resctrl distinguishes {} groups (num_closids), but trainer, optimizer and the default group \
             need {GROUPS}; the mount option cdp halves their number: mount without it",
            support.groups
        )));
    }
    let domains = domains(topology, &trainer.or(optimizer));
    let text = root.text(&format!("{MOUNT}/schemata")).unwrap_or_default();
    let mut schemata: [Vec<String>; 2] = Default::default();
    for (resource, present) in text.lines().filter_map(line) {
        let values = |domain: &(u32, &str)| match resource {
            "MB" => bandwidth(&support, domain.1).map(|[one, two]| [one.to_string(), two.to_string()]),
            "L3" | "L3CODE" | "L3DATA" => masks(&support).map(|pair| pair.map(|mask| format!("{mask:x}"))),
            _ => None,
        };
        // Without a known domain among them, the numbers are of another kind of domain: all are set.
        let known = present.iter().any(|(domain, _)| domains.contains(domain));
        let used = present.iter().filter(|(domain, _)| !known || domains.contains(domain));
        let pairs: Vec<(u32, [String; 2])> =
            used.filter_map(|domain| Some((domain.0, values(domain)?))).collect();
        for (at, lines) in schemata.iter_mut().enumerate().filter(|_| !pairs.is_empty()) {
            let list: Vec<String> =
                pairs.iter().map(|(domain, pair)| format!("{domain}={}", pair[at])).collect();
            lines.push(format!("{resource}:{}", list.join(";")));
        }
    }
    if schemata[0].is_empty() {
        let message =
            "this machine's resctrl divides neither the L3 cache nor the memory bandwidth by shares";
        return Err(Error::Unsupported(message.to_string()));
    }
    let [first, second] = schemata;
    Ok([
        Partition { name: NAMES[0], cpus: trainer.clone(), schemata: first },
        Partition { name: NAMES[1], cpus: optimizer.clone(), schemata: second },
    ])
}

/// Numbers of the L3 caches of these processors.
fn domains(topology: &Topology, cpus: &Bitmap) -> BTreeSet<u32> {
    let caches = topology.caches.iter().filter(|cache| cache.level == 3 && cache.cpus.meets(cpus));
    caches.filter_map(|cache| cache.id).collect()
}

/// A line of schemata: "L3:0=fff;1=fff". `None` if it is none.
pub(super) fn line(text: &str) -> Option<(&str, Vec<(u32, &str)>)> {
    let (resource, list) = text.trim().split_once(':')?;
    let domain = |part| -> Option<(u32, &str)> {
        let (domain, value): (&str, &str) = str::split_once(part, '=')?;
        Some((domain.trim().parse().ok()?, value.trim()))
    };
    Some((resource.trim(), list.split(';').map(domain).collect::<Option<_>>()?))
}

/// Masks of trainer and optimizer; `None` if the cache has too few parts.
fn masks(support: &Support) -> Option<[u64; 2]> {
    let cache = support.cache?;
    let optimizer = (cache.bits / CACHE_SHARE).max(cache.least);
    let trainer = cache.bits.checked_sub(optimizer).filter(|trainer| *trainer >= cache.least)?;
    let ones = |count: u32| u64::MAX >> (64 - count);
    Some([ones(trainer) << optimizer, ones(optimizer)])
}

/// Bandwidths of trainer and optimizer; `None` if `full` is not a share.
fn bandwidth(support: &Support, full: &str) -> Option<[u64; 2]> {
    let (support, full) = (support.bandwidth?, full.parse::<u64>().ok()?);
    let fifth = full.div_ceil(BANDWIDTH_SHARE).div_ceil(support.step) * support.step;
    let optimizer = fifth.max(support.least);
    (full <= MOST_BANDWIDTH && optimizer <= full).then_some([full, optimizer])
}
