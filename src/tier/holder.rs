//! Identity of the process that holds a tier, and the proof that it has ended.
//!
//! Invariants:
//! - A process counts as dead only if this machine can prove it: the process ran on this machine and has ended, or it
//!   ran before the last boot. A process is of this machine if host name and machine-id are the same; without a
//!   machine-id, the boot id must be the same too.
//! - A machine-id that is part of an image breaks this rule. Machines made from such an image need their own ids;
//!   systemd assigns one to a machine without an id.
//! - A process in another container counts as unknown, because its process id means nothing here.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::sync::Arc;

use arc_swap::ArcSwapOption;
use serde::{Deserialize, Serialize};

use crate::sys::host;
use crate::sys::per_process::{PerProcessStatic, Shared};
use crate::sys::process;

/// Text that systemd stores as the machine-id before it has assigned one.
const NO_MACHINE: &str = "uninitialized";

/// Unique identity of a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Holder {
    pub(super) host: String,
    pub(super) machine: String,
    pub(super) boot: String,
    pub(super) namespace: String,
    pub(super) pid: u32,
    /// In clock ticks since the machine started.
    pub(super) started: u64,
}

/// What this machine knows about a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Life {
    /// The process runs, and holds what it claimed.
    Alive,
    /// The process has ended, or is this process and does not hold the key.
    Dead,
    /// The process ran on another machine or in another container.
    Unknown,
}

impl Holder {
    /// Identity of this process, computed once, because later reads of /proc may give other values.
    pub(super) fn this_process() -> Shared<Holder> {
        static KNOWN: PerProcessStatic<Holder> = PerProcessStatic::empty();
        KNOWN.get_or_make(|| Holder::found(process::id()))
    }

    fn found(pid: u32) -> Holder {
        Holder {
            host: host::name(),
            machine: Some(host::machine()).filter(|machine| machine != NO_MACHINE).unwrap_or_default(),
            boot: host::boot(),
            namespace: host::pid_namespace(),
            pid,
            started: host::process_start(pid).unwrap_or(0),
        }
    }

    /// Whether the holder of `key` lives, as the process `me` sees it.
    pub(super) fn life(&self, me: &Holder, key: &str) -> Life {
        let known = !self.boot.is_empty() && !me.boot.is_empty() && self.started != 0;
        if (&self.host, &self.machine) != (&me.host, &me.machine) || !known {
            return Life::Unknown;
        }
        if self.boot != me.boot {
            // Machines without an id may have the same host name.
            return if self.machine.is_empty() { Life::Unknown } else { Life::Dead };
        }
        let ended = match self {
            // A key that this process failed to give back.
            _ if self == me => HELD.load().as_ref().is_none_or(|held| !held.contains(key)),
            _ if self.namespace != me.namespace => return Life::Unknown,
            _ => host::process_ended(self.pid, self.started),
        };
        if ended { Life::Dead } else { Life::Alive }
    }

    /// Description for error messages, as the process `me` sees it.
    pub(super) fn describe(&self, me: &Holder) -> String {
        let Holder { host, pid, started, .. } = self;
        match self == me {
            true => "this process has the tier open".to_string(),
            false => format!("process {pid} on {host}, started at tick {started}"),
        }
    }
}

/// Keys that this process holds. Not a mutex, because a thread may hold a mutex at the moment of a fork.
static HELD: ArcSwapOption<BTreeSet<String>> = ArcSwapOption::const_empty();

/// Records that this process holds `key`.
pub(super) fn hold(key: &str) {
    held(|held| held.insert(key.to_string()));
}

/// Records that this process no longer holds `key`.
pub(super) fn let_go(key: &str) {
    held(|held| held.remove(key));
}

fn held(change: impl Fn(&mut BTreeSet<String>) -> bool) {
    HELD.rcu(|held| {
        let mut held = held.as_deref().cloned().unwrap_or_default();
        change(&mut held);
        Some(Arc::new(held))
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_without_an_id_are_told_apart_by_their_starts() {
        let of = |machine: &str, boot: &str| Holder {
            host: "localhost".to_string(),
            machine: machine.to_string(),
            boot: boot.to_string(),
            namespace: "one".to_string(),
            pid: u32::MAX,
            started: 1,
        };
        let life = |theirs: Holder, mine: Holder| theirs.life(&mine, "p/lock/other");
        assert_eq!(life(of("", "monday"), of("", "tuesday")), Life::Unknown, "it may be another machine");
        assert_eq!(life(of("id", "monday"), of("id", "tuesday")), Life::Dead);
        assert_eq!(life(of("id", "monday"), of("", "tuesday")), Life::Unknown);
        assert_eq!(life(of("", "monday"), of("", "monday")), Life::Dead, "this machine has no such process");
    }

    #[test]
    fn a_key_that_this_process_does_not_hold_is_of_a_dead_holder() {
        let me = Holder::this_process();
        assert_eq!(me.life(&me, "a key"), Life::Dead);
        hold("a key");
        assert_eq!(me.life(&me, "a key"), Life::Alive);
        let_go("a key");
        assert_eq!(me.life(&me, "a key"), Life::Dead);
    }
}
