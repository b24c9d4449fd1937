//! The lock of a prefix of an object store, which knows no locks that end with a process.
//!
//! Invariants:
//! - Whoever wants the prefix first puts a lock object with a name of its own, and then lists the locks. It has the
//!   prefix only if every other lock is a dead process's. A store shows every object that is there, so of two who come
//!   at once at least one sees the other: both may be refused, never both let in. (One object put with If-None-Match
//!   would not do: to take a dead one over it has to be deleted, and might be a live one's by then.)
//! - Dead is what can be proved dead from here: a process of this machine that is gone, or one of before it started.
//!   Whatever runs elsewhere, another container included, counts as alive until a person deletes the object.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::sync::Arc;

use arc_swap::ArcSwapOption;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, TierError, TierKind};
use crate::io::object::{Listed, Refusal, Spot, Store};
use crate::log::{self, Level};
use crate::sys::{host, process};

/// Below a prefix, with a slash.
pub(super) const LOCKS: &str = "lock/";
/// More is none of ours.
const MOST_BYTES: u64 = 4096;

/// A claimed prefix; free again when dropped.
#[derive(Debug)]
pub(super) struct Claim {
    store: Arc<dyn Store>,
    key: String,
    process: u32,
}

/// A process, as nobody else is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Holder {
    host: String,
    machine: String,
    boot: String,
    namespace: String,
    pid: u32,
    /// In clock ticks since the machine started.
    started: u64,
}

impl Claim {
    /// Claims `prefix`, and lists what is there since nobody else changes it.
    pub(super) fn take(store: &Arc<dyn Store>, prefix: &str, name: &str) -> Result<(Claim, Vec<Listed>)> {
        let failed = |refusal: Refusal| refusal.at(Spot { doing: "opening", path: name });
        let number = host::random().map_err(|error| Error::system("drawing a number for a lock", &error))?;
        let key = format!("{prefix}{LOCKS}{number:032x}");
        let me = Holder::this_process();
        let words = serde_json::to_vec(&*me)
            .map_err(|error| Error::System { what: "writing a lock", reason: error.to_string() })?;
        // Before the put: even one that fails may arrive.
        let claim = Claim { store: Arc::clone(store), key, process: process::id() };
        held(|held| held.insert(claim.key.clone()));
        store.put(&claim.key, &words).map_err(failed)?;
        let listed = store.list(prefix).map_err(failed)?;
        let locks = format!("{prefix}{LOCKS}");
        let others = listed.iter().filter(|one| one.key.starts_with(&locks) && one.key != claim.key);
        let mut dead = Vec::new();
        for Listed { key, len } in others {
            match read(store, key, *len).map_err(failed)? {
                Found::Gone => {}
                Found::Holder(holder) if holder.is_dead(&me, key) => dead.push(key),
                Found::Holder(holder) => return Err(locked(name, key, prefix, &holder.words(&me))),
                Found::Unknown => return Err(locked(name, key, prefix, "its lock cannot be read")),
            }
        }
        for key in dead {
            store.delete(key).map_err(failed)?;
        }
        Ok((claim, listed))
    }

    pub(super) fn key(&self) -> &str {
        &self.key
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if self.process != process::id() {
            return;
        }
        if let Err(refusal) = self.store.delete(&self.key) {
            let words =
                format!("the lock {} stays for the next open to take over: {}", self.key, refusal.words);
            log::write(Level::Warn, &words);
        }
        held(|held| held.remove(&self.key));
    }
}

impl Holder {
    /// The same for all threads and all the time, whatever /proc says to each.
    fn this_process() -> Arc<Holder> {
        static KNOWN: ArcSwapOption<Holder> = ArcSwapOption::const_empty();
        let pid = process::id();
        let seen = KNOWN.load_full();
        if let Some(known) = seen.as_ref().filter(|known| known.pid == pid) {
            return Arc::clone(known);
        }
        let found = Arc::new(Holder::found(pid));
        let first = KNOWN.compare_and_swap(&seen, Some(Arc::clone(&found)));
        first.as_ref().filter(|first| first.pid == pid).map_or(found, Arc::clone)
    }

    fn found(pid: u32) -> Holder {
        Holder {
            host: host::name(),
            machine: host::machine(),
            boot: host::boot(),
            namespace: host::pid_namespace(),
            pid,
            started: host::process_start(pid).unwrap_or(0),
        }
    }

    fn is_dead(&self, me: &Holder, key: &str) -> bool {
        let known = !self.boot.is_empty() && !me.boot.is_empty() && self.started != 0;
        if (&self.host, &self.machine) != (&me.host, &me.machine) || !known {
            return false;
        }
        if self.boot != me.boot {
            return true;
        }
        match self {
            // A lock of this process that it could not delete.
            _ if self == me => HELD.load().as_ref().is_none_or(|held| !held.contains(key)),
            _ => self.namespace == me.namespace && host::process_ended(self.pid, self.started),
        }
    }

    fn words(&self, me: &Holder) -> String {
        let Holder { host, pid, started, .. } = self;
        match self == me {
            true => "this process has it open".to_string(),
            false => format!("process {pid} on {host}, started at tick {started}"),
        }
    }
}

/// What a lock object says.
enum Found {
    Holder(Holder),
    /// Deleted since it was listed.
    Gone,
    Unknown,
}

fn read(store: &Arc<dyn Store>, key: &str, len: u64) -> std::result::Result<Found, Refusal> {
    let mut bytes = vec![0; len.min(MOST_BYTES) as usize];
    let got = store.get(key, 0, bytes.len() as u64, &mut |at, part| {
        bytes[at..at + part.len()].copy_from_slice(part);
    });
    match got {
        Err(Refusal { errno: libc::ENOENT, .. }) => Ok(Found::Gone),
        Err(refusal) => Err(refusal),
        Ok(()) => Ok(serde_json::from_slice(&bytes).map_or(Found::Unknown, Found::Holder)),
    }
}

fn locked(name: &str, key: &str, prefix: &str, words: &str) -> Error {
    let object = key.strip_prefix(prefix).unwrap_or(key);
    let words = format!("{words}; if that is not so, deleting {name}/{object} frees it");
    TierError::at(TierKind::Locked, name, words)
}

/// Locks that this process has. No mutex: a thread may hold one in the moment of a fork.
static HELD: ArcSwapOption<BTreeSet<String>> = ArcSwapOption::const_empty();

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
    use crate::io::object::memory::Memory;

    fn lock(memory: &Memory, holder: &Holder) {
        memory.put("p/lock/other", &serde_json::to_vec(holder).unwrap()).unwrap();
    }

    fn take(memory: &Memory) -> Result<Claim> {
        let store: Arc<dyn Store> = Arc::new(memory.clone());
        Claim::take(&store, "p/", "s3://b/p").map(|(claim, _)| claim)
    }

    fn refused(memory: &Memory) -> String {
        let error = take(memory).unwrap_err();
        assert_eq!(error.tier_kind(), Some(TierKind::Locked));
        error.to_string()
    }

    #[test]
    fn a_prefix_is_claimed_once_and_free_again_when_dropped() {
        let memory = Memory::default();
        let claim = take(&memory).unwrap();
        let words = refused(&memory);
        assert!(words.contains("this process has it open") && words.contains("s3://b/p/lock/"), "{words}");
        assert_eq!(memory.keys().len(), 1, "who is refused leaves nothing");
        drop(claim);
        assert_eq!(memory.keys(), [""; 0]);
        take(&memory).unwrap();
    }

    #[test]
    fn the_dead_are_taken_over_and_the_living_are_not() {
        let me = Holder::this_process().as_ref().clone();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let dead = [
            Holder { pid: child.id(), ..me.clone() },
            Holder { started: me.started + 1, ..me.clone() },
            Holder { boot: "another".to_string(), ..me.clone() },
            // Of this process, which could not delete it.
            me.clone(),
        ];
        for holder in dead {
            let memory = Memory::default();
            lock(&memory, &holder);
            let claim = take(&memory).unwrap_or_else(|error| panic!("{holder:?}: {error}"));
            assert_eq!(memory.keys(), [claim.key()]);
        }
        let parent = std::os::unix::process::parent_id();
        let living = [
            Holder { pid: parent, started: host::process_start(parent).unwrap(), ..me.clone() },
            Holder { host: "elsewhere".to_string(), pid: child.id(), ..me.clone() },
            Holder { machine: "another".to_string(), boot: "another".to_string(), ..me.clone() },
            Holder { namespace: "another".to_string(), pid: child.id(), ..me.clone() },
            Holder { pid: child.id(), started: 0, ..me.clone() },
        ];
        for holder in living {
            let memory = Memory::default();
            lock(&memory, &holder);
            let words = refused(&memory);
            assert!(words.contains(&format!("process {} on {}", holder.pid, holder.host)), "{words}");
            assert!(words.contains("deleting s3://b/p/lock/other frees it"), "{words}");
            assert_eq!(memory.keys(), ["p/lock/other"]);
        }
    }

    #[test]
    fn a_lock_that_cannot_be_read_is_a_live_one() {
        let memory = Memory::default();
        memory.put("p/lock/other", b"{}").unwrap();
        assert!(refused(&memory).contains("cannot be read"));
    }

    #[test]
    fn of_many_at_once_at_most_one_gets_it() {
        for _ in 0..20 {
            let memory = Memory::default();
            let outcomes: Vec<Result<Claim>> = std::thread::scope(|scope| {
                let all: Vec<_> = (0..4).map(|_| scope.spawn(|| take(&memory))).collect();
                all.into_iter().map(|one| one.join().unwrap()).collect()
            });
            let claimed = outcomes.iter().filter(|outcome| outcome.is_ok()).count();
            assert!(claimed <= 1, "{claimed}");
            assert_eq!(memory.keys().len(), claimed);
        }
    }
}
