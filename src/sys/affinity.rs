//! Affinity of single threads of this library. The caller's affinity is read, never changed.
#![forbid(unsafe_code)]

use std::io;

use nix::errno::Errno;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

use super::bitmap::Bitmap;

/// Processors that the calling thread may use; `None` if the system does not say, as on a machine with more than
/// `CpuSet::count()` processors.
pub fn current() -> Option<Bitmap> {
    let set = sched_getaffinity(Pid::from_raw(0)).ok()?;
    Some((0..CpuSet::count()).filter(|cpu| set.is_set(*cpu).unwrap_or(false)).map(|cpu| cpu as u32).collect())
}

/// True if the calling thread may use only a part of the processors of the parent process. A launcher that binds its
/// ranks leaves itself unbound.
pub fn is_narrower_than_parent() -> bool {
    let parent = std::fs::read_to_string(format!("/proc/{}/status", Pid::parent())).unwrap_or_default();
    let line = parent.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let (Some(parents), Some(own)) = (line.and_then(Bitmap::parse_list), current()) else { return false };
    own != parents && own.is_subset(&parents)
}

/// Binds the calling thread, which must belong to this library.
pub(super) fn bind_own_thread(cpus: &Bitmap) -> io::Result<()> {
    let mut set = CpuSet::new();
    for cpu in cpus.iter() {
        set.set(cpu as usize).map_err(|_| io::Error::from(Errno::EINVAL))?;
    }
    sched_setaffinity(Pid::from_raw(0), &set).map_err(io::Error::from)
}
