//! The process that holds a directory: what identifies it, and whether it lives.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::sync::Arc;

use arc_swap::ArcSwapOption;
use serde::{Deserialize, Serialize};

use crate::sys::fork::{PerProcessStatic, Shared};
use crate::sys::{fork, host};

/// Text that systemd stores as the machine-id before it has assigned one.
const NO_MACHINE: &str = "uninitialized";

/// Unique identity of a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::tier) struct Holder {
    pub(in crate::tier) host: String,
    pub(in crate::tier) machine: String,
    pub(in crate::tier) boot: String,
    pub(in crate::tier) namespace: String,
    pub(in crate::tier) pid: u32,
    /// In clock ticks since the machine started.
    pub(in crate::tier) started: u64,
}

/// What this machine knows about a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::tier) enum Life {
    /// The process runs, and holds what it claimed.
    Alive,
    /// The process has ended, or is this process and does not hold the key.
    Dead,
    /// The process ran on another machine or in another container.
    Unknown,
}

impl Holder {
    /// Identity of this process, computed once, because later reads of /proc may give other values.
    pub(in crate::tier) fn this_process() -> Shared<Holder> {
        static KNOWN: PerProcessStatic<Holder> = PerProcessStatic::empty();
        KNOWN.get_or_make(|| Holder::found(fork::id()))
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
    pub(in crate::tier) fn life(&self, me: &Holder, key: &str) -> Life {
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
    pub(in crate::tier) fn describe(&self, me: &Holder) -> String {
        let Holder { host, pid, started, .. } = self;
        match self == me {
            true => "this process has the tier open; call close() of what has it open".to_string(),
            false => format!("process {pid} on {host}, started at tick {started}"),
        }
    }
}

/// Keys that this process holds. Not a mutex, because a thread may hold a mutex at the moment of a fork.
static HELD: ArcSwapOption<BTreeSet<String>> = ArcSwapOption::const_empty();

/// Records that this process holds `key`.
pub(in crate::tier) fn hold(key: &str) {
    held(|held| held.insert(key.to_string()));
}

/// Records that this process no longer holds `key`.
pub(in crate::tier) fn let_go(key: &str) {
    held(|held| held.remove(key));
}

fn held(change: impl Fn(&mut BTreeSet<String>) -> bool) {
    HELD.rcu(|held| {
        let mut held = held.as_deref().cloned().unwrap_or_default();
        change(&mut held);
        Some(Arc::new(held))
    });
}
