//! Regions of pinned memory that this process owns, found by address.
//!
//! Invariants:
//! - An id is never reused, so a registration of one region never applies to another region at its address.
//! - A region stays mapped while it is referenced; a lease holds a reference.
//! - Memory that a device accesses is not copied into forked children, where its addresses are unmapped. A child does
//!   not unmap it: the child may have mapped something else there.
//! - Lookup takes no lock. A forked child does not find its parent's regions, since memory locks are not inherited.
//! - A region that retires in a forked child calls no watcher of the parent.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use arc_swap::ArcSwapOption;
use slab::Slab;

use super::population;
use crate::error::{Error, Result};
use crate::log::{self, Level};
use crate::sys::fork::OpeningProcess;
use crate::sys::memory::{self, Mapping, PageKind};
use crate::sys::span::Span;
use crate::sys::sync::{Guard, Lock};

/// The kind of memory to take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backing {
    /// Try 2 MiB pages.
    pub huge: bool,
    /// Lock the memory (mlock).
    pub lock: bool,
    /// NUMA node to take it from.
    pub node: Option<u32>,
}

impl Default for Backing {
    fn default() -> Self {
        Backing { huge: true, lock: true, node: None }
    }
}

/// One mapping of pinned memory.
#[derive(Debug)]
pub struct Region {
    id: u64,
    opener: OpeningProcess,
    mapping: Arc<Mapping>,
    locked: bool,
    retired: AtomicBool,
    leases: Lock<Slab<Range<usize>>>,
    /// Number of devices that access the region. Changed under the lock; a child reads it without the lock.
    reached: AtomicUsize,
    reaching: Lock<()>,
}

/// A device's access to a region. While it lives, the region is not copied into forked children.
#[derive(Debug)]
pub struct Reach(Arc<Region>);

type Index = BTreeMap<usize, Arc<Region>>;

/// A function to call when a region retires, and the process that registered it.
#[derive(Clone)]
struct Watcher {
    opener: OpeningProcess,
    call: Weak<dyn Fn() + Send + Sync>,
}

impl Watcher {
    /// The function; `None` once it was dropped, and in a forked child. A parent's watcher may take a lock that a thread
    /// of the parent held at the fork.
    fn live(&self) -> Option<Arc<dyn Fn() + Send + Sync>> {
        self.opener.is_current().then(|| self.call.upgrade()).flatten()
    }
}

static INDEX: ArcSwapOption<Index> = ArcSwapOption::const_empty();
static WATCHERS: ArcSwapOption<Vec<Watcher>> = ArcSwapOption::const_empty();
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

impl Region {
    /// Maps, touches and locks `bytes`, and adds the region to the index. Only missing memory is an error; a refused
    /// lock or NUMA node causes a warning.
    pub fn open(bytes: usize, backing: Backing) -> Result<Arc<Region>> {
        let (mapping, unbound) = population::touched(bytes, backing.huge, backing.node)
            .map_err(|error| Error::system("allocating pinned memory", &error))?;
        if let (Some(error), Some(node)) = (unbound, backing.node) {
            warn_unbound(node, &error);
        }
        let locked = backing.lock && lock(&mapping);
        Ok(Region::adopt(Arc::new(mapping), locked))
    }

    /// Adds memory that is already mapped to the index, so that transfers treat it as pinned memory.
    pub fn adopt(mapping: Arc<Mapping>, locked: bool) -> Arc<Region> {
        let region = Arc::new(Region {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            opener: OpeningProcess::current(),
            mapping,
            locked,
            retired: AtomicBool::new(false),
            leases: Lock::default(),
            reached: AtomicUsize::new(0),
            reaching: Lock::default(),
        });
        INDEX.rcu(|index| {
            let mut index = index.as_deref().cloned().unwrap_or_default();
            index.insert(region.span().address(), Arc::clone(&region));
            Some(Arc::new(index))
        });
        region
    }

    /// Removes the region from the index and notifies the watchers. The memory is unmapped when the last reference is
    /// dropped.
    pub fn retire(&self) {
        self.retired.store(true, Ordering::Release);
        INDEX.rcu(|index| {
            let mut index = index.as_deref().cloned().unwrap_or_default();
            // In a child, its own region may have the same address as a region retired only there.
            if index.get(&self.span().address()).is_some_and(|found| found.id == self.id) {
                index.remove(&self.span().address());
            }
            Some(Arc::new(index))
        });
        if let Some(watchers) = WATCHERS.load_full() {
            watchers.iter().filter_map(Watcher::live).for_each(|watcher| watcher());
        }
    }

    /// A number that this process assigns to no other region, before or later.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// All memory of the region.
    pub fn span(&self) -> Span {
        self.mapping.span()
    }

    /// The page size of the memory.
    pub fn kind(&self) -> PageKind {
        self.mapping.kind()
    }

    /// True if the memory is locked.
    pub fn locked(&self) -> bool {
        self.locked
    }

    /// True once the owner has retired the region; only leases keep it mapped.
    pub fn retired(&self) -> bool {
        self.retired.load(Ordering::Acquire)
    }

    /// True in the process that opened the region.
    pub fn is_own(&self) -> bool {
        self.opener.is_current()
    }

    /// True if a lease overlaps `part`.
    pub fn leased(&self, part: Span) -> bool {
        let (start, end) = (part.address(), part.address() + part.len());
        self.leases().iter().any(|(_, lease)| lease.start < end && start < lease.end)
    }

    fn change_reach(&self, change: impl FnOnce(usize) -> usize) {
        let _guard = self.reaching.lock();
        let before = self.reached.load(Ordering::Relaxed);
        let after = change(before);
        self.reached.store(after, Ordering::Relaxed);
        if (before == 0) != (after == 0) {
            // Systems without this advice refuse it; children then copy the memory as usual.
            let _ = self.mapping.hide_from_children(after > 0);
        }
    }

    fn leases(&self) -> Guard<'_, Slab<Range<usize>>> {
        self.leases.lock()
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if !self.is_own() && self.reached.load(Ordering::Relaxed) > 0 {
            std::mem::forget(Arc::clone(&self.mapping));
        }
    }
}

impl Reach {
    /// Registers a device's access to a region of this process.
    pub fn begin(region: &Arc<Region>) -> Reach {
        region.change_reach(|reached| reached + 1);
        Reach(Arc::clone(region))
    }
}

impl Drop for Reach {
    fn drop(&mut self) {
        if self.0.is_own() {
            self.0.change_reach(|reached| reached.saturating_sub(1));
        }
    }
}

/// The region that contains all of `address..address + len`; `None` if there is none, or if a parent process opened it.
pub fn find(address: usize, len: usize) -> Option<Arc<Region>> {
    containing(address, len).filter(|region| region.is_own())
}

/// True if a parent of this process opened the region at `address`.
pub fn is_inherited(address: usize) -> bool {
    containing(address, 1).is_some_and(|region| !region.is_own())
}

fn containing(address: usize, len: usize) -> Option<Arc<Region>> {
    let index = INDEX.load();
    let (_, region) = index.as_ref()?.range(..=address).next_back()?;
    region.span().covers(address, len).then(|| Arc::clone(region))
}

/// The regions of this process that share a byte with `address..address + len`.
pub fn touching(address: usize, len: usize) -> Vec<Arc<Region>> {
    let index = INDEX.load();
    let (Some(index), Some(last)) = (index.as_ref(), len.checked_sub(1)) else { return Vec::new() };
    let last = address.saturating_add(last);
    // Regions do not overlap, so only the last one that begins at or before the address can reach it.
    let before = index.range(..=address).next_back();
    let first =
        before.filter(|(_, region)| region.span().covers(address, 1)).map_or(address, |(start, _)| *start);
    let found = index.range(first..=last.max(first)).map(|(_, region)| region);
    found.filter(|region| region.is_own()).cloned().collect()
}

/// Calls `watcher` whenever a region retires in this process, until the watcher is dropped.
pub fn watch(watcher: &Arc<dyn Fn() + Send + Sync>) {
    let added = Watcher { opener: OpeningProcess::current(), call: Arc::downgrade(watcher) };
    WATCHERS.rcu(|watchers| {
        let all = watchers.as_deref().map_or(&[][..], Vec::as_slice);
        let live = all.iter().filter(|watcher| watcher.live().is_some()).cloned();
        Some(Arc::new(live.chain([added.clone()]).collect()))
    });
}

/// Keeps the pinned part of a span mapped and prevents its reuse.
#[derive(Debug, Default)]
pub struct Lease {
    whole: Option<LeasedPart>,
    _parts: Vec<LeasedPart>,
}

#[derive(Debug)]
struct LeasedPart {
    region: Arc<Region>,
    key: usize,
}

impl Lease {
    /// Leases `span`, which lies in the region `whole`, or partly in the regions `parts`.
    pub fn of(span: Span, whole: Option<&Arc<Region>>, parts: &[Arc<Region>]) -> Lease {
        let lease = |region: &Arc<Region>| {
            let key = region.leases().insert(span.address()..span.address() + span.len());
            LeasedPart { region: Arc::clone(region), key }
        };
        Lease { whole: whole.map(lease), _parts: parts.iter().map(lease).collect() }
    }

    /// The region that contains the whole span.
    pub fn region(&self) -> Option<&Arc<Region>> {
        self.whole.as_ref().map(|part| &part.region)
    }
}

impl Drop for LeasedPart {
    fn drop(&mut self) {
        self.region.leases().remove(self.key);
    }
}

/// Warns once per process: a model has many regions, and their cause is the same.
fn warn_unbound(node: u32, error: &std::io::Error) {
    static WARNED: AtomicBool = AtomicBool::new(false);
    if !WARNED.swap(true, Ordering::Relaxed) {
        let message =
            format!("cannot bind pinned memory to NUMA node {node}, so it may be on another node: {error}");
        log::write(Level::Warn, &message);
    }
}

/// Locks the memory or warns. It warns once per process, since the limit and its remedy are the same for every region.
fn lock(mapping: &Mapping) -> bool {
    static WARNED: AtomicBool = AtomicBool::new(false);
    let Err(error) = mapping.lock() else { return true };
    if !WARNED.swap(true, Ordering::Relaxed) {
        let need = mapping.span().len();
        let limit = memory::lock_limit().map_or("unlimited".to_string(), |bytes| format!("{bytes} bytes"));
        let message = format!(
            "memory is not locked: {error}; RLIMIT_MEMLOCK is {limit}, and this memory needs {need} bytes: \
             raise it with ulimit -l or in limits.conf. Transfers work, but are slower if the system swaps"
        );
        log::write(Level::Warn, &message);
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::fork::in_forked_child;

    /// A watcher of the parent may take a lock that a thread of the parent held at the fork.
    #[test]
    fn a_region_that_retires_in_a_child_calls_no_watcher_of_the_parent() {
        let small = || Region::open(4096, Backing { huge: false, lock: false, node: None }).unwrap();
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&calls);
        let watcher: Arc<dyn Fn() + Send + Sync> = Arc::new(move || {
            counted.fetch_add(1, Ordering::Relaxed);
        });
        watch(&watcher);
        small().retire();
        assert!(calls.load(Ordering::Relaxed) > 0);
        assert!(in_forked_child(|| {
            let before = calls.load(Ordering::Relaxed);
            small().retire();
            calls.load(Ordering::Relaxed) == before
        }));
    }

    #[test]
    fn regions_are_found_by_any_part_until_they_retire() {
        let region = Region::open(8192, Backing::default()).unwrap();
        let (start, len) = (region.span().address(), region.span().len());
        assert_eq!(find(start + 1, len - 1).unwrap().id(), region.id());
        assert!(find(start + 1, len).is_none() && find(start, usize::MAX).is_none());
        let ids = |address, len| touching(address, len).iter().map(|found| found.id()).collect::<Vec<_>>();
        for (address, bytes) in [(start - 1, 2), (start + 1, 1), (start + len - 1, 2), (start - 1, len + 2)] {
            assert!(ids(address, bytes).contains(&region.id()), "{address:x} {bytes}");
        }
        assert!(![ids(start - 1, 1), ids(start + len, 1), ids(start, 0)].concat().contains(&region.id()));
        region.retire();
        assert!(find(start, 1).is_none_or(|found| found.id() != region.id()));
    }

    #[test]
    fn a_lease_keeps_a_retired_region_mapped() {
        let region = Region::open(8192, Backing::default()).unwrap();
        let part = region.span().part(100, 50);
        let lease = Lease::of(part, Some(&region), &[]);
        region.retire();
        assert!(region.leased(region.span().part(149, 1)) && !region.leased(region.span().part(150, 10)));
        drop(region);
        part.write(&[7; 50]);
        assert_eq!(part.to_vec(), [7; 50]);
        drop(lease);
    }

    #[test]
    fn watchers_hear_of_retirement_until_dropped() {
        let heard = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&heard);
        let watcher: Arc<dyn Fn() + Send + Sync> = Arc::new(move || {
            counter.fetch_add(1, Ordering::Relaxed);
        });
        watch(&watcher);
        Region::open(1, Backing::default()).unwrap().retire();
        let after_first = heard.load(Ordering::Relaxed);
        assert!(after_first >= 1);
        drop(watcher);
        Region::open(1, Backing::default()).unwrap().retire();
        assert_eq!(heard.load(Ordering::Relaxed), after_first);
    }
}
