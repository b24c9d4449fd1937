//! Who owns a directory: the protocol by which a process claims it, keeps it, and notices another owner.
//!
//! The lock file has two pages. The first holds the owner's record: a random claim, and the identity of the process. The
//! second holds the owner's heartbeat. A lock of the system comes before this protocol, where the file system has locks.
//!
//! Invariants:
//! - A claim is written before anything else of the directory is read. An owner reads the record again after each of
//!   its superblocks. If the record is still its own, every later owner finds that superblock. Else the commit fails.
//! - On a file system of this machine alone, the system's lock decides who may claim. Elsewhere a lock may not reach
//!   another mount, and a server may forget it. There the owner holds a lease: it writes its heartbeat every
//!   [`Timing::period`], and starts no write of data later than [`Timing::valid`] after its last heartbeat.
//! - Another process claims a leased directory only after it saw no heartbeat for [`Timing::quiet`], or if the owner
//!   gave the directory back, or if this machine can prove that the owner has ended.
//! - The owner writes its heartbeat, then reads the record. A new owner writes the record, then reads the heartbeat. At
//!   least one of the two sees the other.
//! - Of several processes that claim at once, the last writer of the record wins. Each waits for [`Timing::settle`],
//!   which is twice as long as its own look and write may take together. One that took longer waits for
//!   [`Timing::quiet`], so that the others notice.
//! - A claim ends with the first heartbeat. It fails if another process claimed the directory by then.
//! - The record is written by a claim and by its release only. A late heartbeat therefore never replaces a record.
//! - A process counts as dead only if this machine can prove it: the process ran on this machine and has ended, or it
//!   ran before the last boot. A process is of this machine if host name and machine-id are the same; without a
//!   machine-id, the boot id must be the same too.
//! - A machine-id that is part of an image breaks this rule. Machines made from such an image need their own ids;
//!   systemd assigns one to a machine without an id.
//! - A process in another container counts as unknown, because its process id means nothing here.
//! - The thread holds the lock only during a heartbeat. The drop waits for that heartbeat up to two seconds, and then
//!   gives the directory back, within the same time. A call that does not return keeps the lock until it returns.
//! - The record is given back only while the lease is valid. Without a valid lease another process may be the owner.
//! - A full disk of this machine does not keep a tier closed: there the system's lock suffices. The owner then expects
//!   the record that it found.
#![forbid(unsafe_code)]

mod holder;
mod lock;

use std::fmt::Debug;
use std::io;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::sys::lock::PAGE;

pub(super) use holder::{Holder, Life, hold, let_go};
pub(super) use lock::{LockStep, OwnedLock, PendingLock};

/// A page of the lock file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LockPage {
    /// The owner's record.
    Record,
    /// The owner's heartbeat.
    Heartbeat,
}

/// Storage of the two pages.
pub(super) trait Register: Debug {
    /// The bytes of a page as the device or the server has them; `None` if the file is gone.
    fn read(&self, part: LockPage) -> io::Result<Option<Vec<u8>>>;

    /// Overwrites a page.
    fn write(&self, part: LockPage, bytes: &[u8; PAGE]) -> io::Result<()>;
}

/// Times of a lease.
#[derive(Debug, Clone, Copy)]
pub(super) struct Timing {
    /// Time between two heartbeats.
    pub(super) period: Duration,
    /// Time after a heartbeat in which the owner may start to write data.
    pub(super) valid: Duration,
    /// Time without a heartbeat after which another process may claim the directory.
    pub(super) quiet: Duration,
    /// Time after which a claim reads its record back.
    pub(super) settle: Duration,
}

/// The lease of every owner. A tenth of `quiet` is the period, so that one slow heartbeat loses nothing. Half of it is
/// left for writes that were started while the lease was valid.
pub(super) const TIMING: Timing = Timing {
    period: Duration::from_secs(2),
    valid: Duration::from_secs(10),
    quiet: Duration::from_secs(20),
    settle: Duration::from_secs(1),
};

/// Content of the first page.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct OwnerRecord {
    /// Random number of the claim, in hexadecimal digits.
    pub(super) claim: String,
    /// False after the owner gave the directory back.
    pub(super) held: bool,
    /// True if the owner writes heartbeats.
    pub(super) leased: bool,
    /// The owner's process.
    pub(super) holder: Holder,
}

/// Content of the second page.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Heartbeat {
    claim: String,
    number: u64,
}

/// Whose record a register holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Whose {
    /// The record is that of the claim.
    Own,
    /// Another process claimed the directory. The text names it.
    Other(String),
    /// The record is gone or not readable.
    Damaged,
}

/// State of a claim after a step of [`Claiming`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ClaimState {
    /// The next step is due after this time.
    Wait(Duration),
    /// The directory is claimed.
    Owned,
    /// A live process owns the directory. The text names it.
    Held(String),
}

/// A claim in progress. Each step makes one access to the register.
#[derive(Debug)]
pub(super) struct Claiming {
    own: OwnerRecord,
    timing: Timing,
    stage: Stage,
    /// When the step began that decided that the directory is free.
    looked: Instant,
    /// The record that was found.
    found: Vec<u8>,
    heartbeat: Vec<u8>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Read the record.
    Look,
    /// Read the heartbeat for the first time; then watch it if the owner may live.
    Baseline { watch: bool },
    /// Compare the heartbeat until `until`.
    Watch { until: Instant },
    /// Read the record again after the watch.
    Recheck,
    /// Write the record.
    Write,
    /// Wait until `until`, and read the record back.
    Settle { until: Instant },
    /// Compare the heartbeat after the record was read back.
    Compare,
}

impl OwnerRecord {
    /// The stored page: a line for people, the record, and spaces.
    pub(super) fn page(&self) -> io::Result<[u8; PAGE]> {
        let Holder { host, pid, started, .. } = &self.holder;
        let line = match self.held {
            true => format!("process {pid} on {host}, started at tick {started}"),
            false => "no process".to_string(),
        };
        stored(&format!("{line}\n{}", serde_json::to_string(self)?))
    }

    /// Parses a page; `None` if it holds no record.
    pub(super) fn parse(page: &[u8]) -> Option<OwnerRecord> {
        let text = std::str::from_utf8(page).ok()?;
        serde_json::from_str(text.split_once('\n')?.1.trim()).ok()
    }
}

/// True if `text`, the beginning of a lock file, names a process that has ended, as far as this machine can prove.
pub(super) fn owner_has_ended(text: &str) -> bool {
    let record = OwnerRecord::parse(text.as_bytes());
    record.is_some_and(|record| record.holder.life(&Holder::this_process(), &record.claim) == Life::Dead)
}

fn stored(text: &str) -> io::Result<[u8; PAGE]> {
    let mut page = [b' '; PAGE];
    page[PAGE - 1] = b'\n';
    match page.get_mut(..text.len()) {
        Some(head) if text.len() < PAGE => head.copy_from_slice(text.as_bytes()),
        _ => return Err(io::Error::other("the record of the owner exceeds a page")),
    }
    Ok(page)
}

/// The page of a heartbeat.
fn heartbeat(claim: &str, number: u64) -> io::Result<[u8; PAGE]> {
    stored(&serde_json::to_string(&Heartbeat { claim: claim.to_string(), number })?)
}

/// Whose record the register holds, for the owner of `own`.
pub(super) fn whose(register: &dyn Register, own: &OwnerRecord) -> io::Result<Whose> {
    let page = register.read(LockPage::Record)?;
    Ok(match page.as_deref().and_then(OwnerRecord::parse) {
        Some(found) if found.claim == own.claim && found.held => Whose::Own,
        Some(found) => Whose::Other(found.holder.describe(&own.holder)),
        None => Whose::Damaged,
    })
}

/// Writes a heartbeat, then reads the record.
pub(super) fn renew(register: &dyn Register, own: &OwnerRecord, number: u64) -> io::Result<Whose> {
    register.write(LockPage::Heartbeat, &heartbeat(&own.claim, number)?)?;
    whose(register, own)
}

/// Marks the directory as given back, if it still is the owner's.
pub(super) fn give_back(register: &dyn Register, own: &OwnerRecord) -> io::Result<()> {
    match whose(register, own)? {
        Whose::Own => register.write(LockPage::Record, &OwnerRecord { held: false, ..own.clone() }.page()?),
        Whose::Other(_) | Whose::Damaged => Ok(()),
    }
}

impl Claiming {
    /// Begins to claim for `own`.
    pub(super) fn new(own: OwnerRecord, timing: Timing, now: Instant) -> Claiming {
        let (found, heartbeat) = (Vec::new(), Vec::new());
        Claiming { own, timing, stage: Stage::Look, looked: now, found, heartbeat }
    }

    /// The record that is being claimed.
    pub(super) fn own(&self) -> &OwnerRecord {
        &self.own
    }

    /// The record's page that the claim found.
    pub(super) fn found(&self) -> &[u8] {
        &self.found
    }

    /// True if the record is written.
    pub(super) fn wrote(&self) -> bool {
        matches!(self.stage, Stage::Settle { .. } | Stage::Compare)
    }

    /// True if the next step writes the record.
    fn writes_next(&self) -> bool {
        self.stage == Stage::Write
    }

    /// Makes the next step. `now` returns the time.
    pub(super) fn step(
        &mut self,
        register: &dyn Register,
        now: &dyn Fn() -> Instant,
    ) -> io::Result<ClaimState> {
        let began = now();
        match self.stage {
            Stage::Look => {
                self.looked = began;
                self.found = register.read(LockPage::Record)?.unwrap_or_default();
                return Ok(self.judge());
            }
            Stage::Baseline { watch } => {
                self.heartbeat = self.read_heartbeat(register)?;
                // Counted from the end of the read, because the read may have taken long.
                self.stage =
                    if watch { Stage::Watch { until: now() + self.timing.quiet } } else { Stage::Write };
            }
            Stage::Watch { until } => {
                if self.read_heartbeat(register)? != self.heartbeat {
                    return Ok(ClaimState::Held(self.owner_found()));
                }
                if began < until {
                    return Ok(ClaimState::Wait(self.timing.period.min(until - began)));
                }
                self.looked = began;
                self.stage = Stage::Recheck;
            }
            Stage::Recheck => {
                let same = register.read(LockPage::Record)?.unwrap_or_default() == self.found;
                self.stage = if same { Stage::Write } else { Stage::Look };
            }
            Stage::Write => {
                register.write(LockPage::Record, &self.own.page()?)?;
                if !self.own.leased {
                    return Ok(ClaimState::Owned);
                }
                let ended = now();
                let late = ended - self.looked > self.timing.settle / 2;
                let wait = if late { self.timing.quiet } else { self.timing.settle };
                self.stage = Stage::Settle { until: ended + wait };
                return Ok(ClaimState::Wait(wait));
            }
            Stage::Settle { until } => {
                if began < until {
                    return Ok(ClaimState::Wait(until - began));
                }
                match whose(register, &self.own)? {
                    Whose::Own => self.stage = Stage::Compare,
                    Whose::Other(text) => return Ok(ClaimState::Held(text)),
                    Whose::Damaged => return Ok(ClaimState::Held("its owner is not readable".to_string())),
                }
            }
            Stage::Compare => {
                let found = self.read_heartbeat(register)?;
                if found == self.heartbeat {
                    return Ok(ClaimState::Owned);
                }
                // The former owner lives. It notices this claim with its next heartbeat.
                self.heartbeat = found;
                self.stage = Stage::Settle { until: now() + self.timing.quiet };
                return Ok(ClaimState::Wait(self.timing.quiet));
            }
        }
        Ok(ClaimState::Wait(Duration::ZERO))
    }

    fn read_heartbeat(&self, register: &dyn Register) -> io::Result<Vec<u8>> {
        Ok(register.read(LockPage::Heartbeat)?.unwrap_or_default())
    }

    /// Decides from the record that was found how to continue.
    fn judge(&mut self) -> ClaimState {
        let record = OwnerRecord::parse(&self.found);
        let blank = self.found.iter().all(|byte| *byte == 0);
        let leased = self.own.leased;
        let watch = match &record {
            // A record of an unknown format, which no process of this library writes.
            None => leased && !blank,
            Some(record) if !record.held => false,
            // The system's lock, which this process has, decides.
            Some(record) if !record.leased && !leased => false,
            Some(record) => match record.holder.life(&self.own.holder, &record.claim) {
                Life::Dead => false,
                Life::Alive if record.leased => return ClaimState::Held(self.owner_found()),
                Life::Alive | Life::Unknown => true,
            },
        };
        self.stage = if watch || leased { Stage::Baseline { watch } } else { Stage::Write };
        ClaimState::Wait(Duration::ZERO)
    }

    /// Description of the owner that was found.
    fn owner_found(&self) -> String {
        let record = OwnerRecord::parse(&self.found);
        record.map_or_else(
            || "an unknown process".to_string(),
            |record| record.holder.describe(&self.own.holder),
        )
    }
}

#[cfg(test)]
mod tests;
