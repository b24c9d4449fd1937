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
//! - The thread holds the lock only during a heartbeat. The drop waits for that heartbeat up to [`LAST_BEAT`], and then
//!   gives the directory back, within the same time. A call that does not return keeps the lock until it returns.
//! - The record is given back only while the lease is valid. Without a valid lease another process may be the owner.
//! - A full disk of this machine does not keep a tier closed: there the system's lock suffices. The owner then expects
//!   the record that it found.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;
use serde::{Deserialize, Serialize};

use super::storage::{LOCK, failed, fenced, locked};
use crate::error::{Doing, Error, Result, TierError, TierKind};
use crate::log::{self, Level};
use crate::sys::file::Identity;
use crate::sys::fork::{PerProcessStatic, Shared};
use crate::sys::lock::{FileLock, PAGE};
use crate::sys::private_files::PrivateDirectory;
use crate::sys::sync::{Lock, Signal};
use crate::sys::{fork, host, threads, time_limit};

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
            true => "this process has the tier open; call close() of what has it open".to_string(),
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

/// How long the drop waits for a heartbeat in flight.
const LAST_BEAT: Duration = Duration::from_secs(2);

/// The two pages of a lock file.
#[derive(Debug)]
struct LockPages {
    directory: PrivateDirectory,
    lock: FileLock,
    /// True if other machines must see what is written.
    leased: bool,
}

impl Register for LockPages {
    fn read(&self, part: LockPage) -> io::Result<Option<Vec<u8>>> {
        // The cache of one machine shows every write of that machine.
        self.lock.read_page(&self.directory, LOCK, part as u64, self.leased)
    }

    fn write(&self, part: LockPage, bytes: &[u8; PAGE]) -> io::Result<()> {
        self.lock.write_page(part as u64, bytes, self.leased)
    }
}

/// A claim of a directory whose lock this process has, in progress.
#[derive(Debug)]
pub(super) struct PendingLock {
    pages: LockPages,
    claiming: Claiming,
    timing: Timing,
    told: bool,
}

/// What a claim came to so far.
#[derive(Debug)]
pub(super) enum LockStep {
    /// This process owns the directory.
    Owned(OwnedLock),
    /// Continue after this time.
    Wait(Box<PendingLock>, Duration),
}

/// A directory's lock file, which this process owns.
#[derive(Debug)]
pub(super) struct OwnedLock {
    kept: Arc<Kept>,
    beats: Option<Arc<Beats>>,
    path: PathBuf,
}

/// What the owner and its heartbeats share.
#[derive(Debug)]
struct Kept {
    pages: LockPages,
    own: OwnerRecord,
    /// The record to expect if the own one could not be written.
    found: Option<Vec<u8>>,
    timing: Timing,
    began: Instant,
    /// End of the valid lease, in nanoseconds after `began`.
    valid_until: AtomicU64,
    number: AtomicU64,
    /// Another process is the owner.
    lost: AtomicBool,
}

/// Signals between the owner and its thread.
#[derive(Debug, Default)]
struct Beats {
    state: Lock<BeatState>,
    changed: Signal,
}

#[derive(Debug, Default)]
struct BeatState {
    stop: bool,
    beating: bool,
}

impl PendingLock {
    /// Begins to claim a directory whose lock this process just took.
    pub(super) fn new(lock: FileLock, directory: &PrivateDirectory, path: &Path) -> Result<PendingLock> {
        let local = lock.file_system().is_ok_and(|found| found.is_local());
        let leased = !local || !lock.excludes();
        PendingLock::with(lock, directory, path, leased, TIMING)
    }

    /// As `new`, with a lease or without one.
    pub(super) fn with(
        lock: FileLock,
        directory: &PrivateDirectory,
        path: &Path,
        leased: bool,
        timing: Timing,
    ) -> Result<PendingLock> {
        let directory = directory.try_clone().map_err(|error| failed(Doing::Opening, path, error, ""))?;
        let claim =
            host::random().map_err(|error| Error::system("generating the number of a lock", &error))?;
        let holder = (*Holder::this_process()).clone();
        let own = OwnerRecord { claim: format!("{claim:032x}"), held: true, leased, holder };
        lock.reserve();
        let claiming = Claiming::new(own, timing, Instant::now());
        let pages = LockPages { directory, lock, leased };
        Ok(PendingLock { pages, claiming, timing, told: false })
    }

    /// Continues until the claim is decided or has to wait.
    pub(super) fn resume(mut self, path: &Path) -> Result<LockStep> {
        let file = path.join(LOCK);
        loop {
            let writes = self.claiming.writes_next();
            match self.claiming.step(&self.pages, &Instant::now) {
                Ok(ClaimState::Owned) => return self.owned(false, path).map(LockStep::Owned),
                Ok(ClaimState::Held(text)) => return Err(locked(path, &text)),
                Ok(ClaimState::Wait(time)) if time.is_zero() => {}
                Ok(ClaimState::Wait(time)) => {
                    if !std::mem::replace(&mut self.told, true) && !self.claiming.wrote() {
                        self.tell(path);
                    }
                    return Ok(LockStep::Wait(Box::new(self), time));
                }
                Err(error) => {
                    let error =
                        failed(if writes { Doing::Writing } else { Doing::Reading }, &file, error, "");
                    if writes && error.is_full() && !self.pages.leased {
                        let message = format!(
                            "{error}; the tier opens with the record of its former owner, because the system's lock \
                             suffices here; free some space before the next commit"
                        );
                        log::write(Level::Warn, &message);
                        return self.owned(true, path).map(LockStep::Owned);
                    }
                    return Err(error);
                }
            }
        }
    }

    fn tell(&self, path: &Path) {
        let message = format!(
            "{}: its last owner did not close it, and may run on another machine; the open waits {} s for a sign of \
             life",
            path.display(),
            self.timing.quiet.as_secs()
        );
        log::write(Level::Warn, &message);
    }

    fn owned(self, unwritten: bool, path: &Path) -> Result<OwnedLock> {
        let PendingLock { pages, claiming, timing, .. } = self;
        let own = claiming.own().clone();
        hold(&own.claim);
        let leased = pages.leased;
        let kept = Arc::new(Kept {
            found: unwritten.then(|| claiming.found().to_vec()),
            pages,
            own,
            timing,
            began: Instant::now(),
            valid_until: AtomicU64::new(0),
            number: AtomicU64::new(0),
            lost: AtomicBool::new(false),
        });
        let mut owned = OwnedLock { kept, beats: None, path: path.to_path_buf() };
        if leased {
            // A process that claimed the directory after the last look of this claim is the owner.
            match owned.kept.renew().map_err(|error| failed(Doing::Writing, &path.join(LOCK), error, ""))? {
                Whose::Own => owned.beats = start_beats(&owned.kept),
                Whose::Other(other) => return Err(locked(path, &other)),
                Whose::Damaged => return Err(locked(path, "its owner is not readable")),
            }
        }
        Ok(owned)
    }
}

/// Starts the thread of the heartbeats. Without a thread each write of data renews the lease itself.
fn start_beats(kept: &Arc<Kept>) -> Option<Arc<Beats>> {
    let beats = Arc::<Beats>::default();
    let (shared, kept, period) = (Arc::clone(&beats), Arc::downgrade(kept), kept.timing.period);
    match threads::spawn_quiet("spillway-lease", move || shared.run(&kept, period)) {
        Ok(()) => Some(beats),
        Err(error) => {
            log::write(Level::Warn, &format!("no thread keeps the lease of a tier's directory: {error}"));
            None
        }
    }
}

impl Beats {
    fn run(&self, kept: &Weak<Kept>, period: Duration) {
        loop {
            {
                let mut state = self.state.lock();
                if state.stop {
                    return;
                }
                state.beating = true;
            }
            // The lock is held only inside this block.
            let goes_on = kept.upgrade().is_some_and(|kept| !matches!(kept.renew(), Ok(Whose::Other(_))));
            let mut state = self.state.lock();
            state.beating = false;
            self.changed.notify_all();
            let until = Instant::now().checked_add(period);
            if !goes_on || self.changed.wait_while(state, until, |state| !state.stop).stop {
                return;
            }
        }
    }

    /// Ends the thread. False if its heartbeat in flight does not return.
    fn stop(&self) -> bool {
        let mut state = self.state.lock();
        state.stop = true;
        self.changed.notify_all();
        let until = Instant::now().checked_add(LAST_BEAT);
        !self.changed.wait_while(state, until, |state| state.beating).beating
    }
}

impl Kept {
    fn renew(&self) -> io::Result<Whose> {
        let began = self.began.elapsed();
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        let found = renew(&self.pages, &self.own, number)?;
        self.note(&found);
        if found == Whose::Own {
            let end = (began + self.timing.valid).as_nanos() as u64;
            self.valid_until.fetch_max(end, Ordering::AcqRel);
        }
        Ok(found)
    }

    fn note(&self, found: &Whose) {
        if matches!(found, Whose::Other(_)) {
            self.lost.store(true, Ordering::Release);
        }
    }

    /// True if another owner was seen.
    fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    fn is_valid(&self) -> bool {
        !self.is_lost() && (self.began.elapsed().as_nanos() as u64) < self.valid_until.load(Ordering::Acquire)
    }

    /// Whose record the file holds.
    fn whose(&self) -> io::Result<Whose> {
        let Some(expected) = &self.found else {
            let found = whose(&self.pages, &self.own)?;
            self.note(&found);
            return Ok(found);
        };
        let page = self.pages.read(LockPage::Record)?;
        Ok(match page {
            None => Whose::Damaged,
            Some(page) if page == *expected => Whose::Own,
            Some(page) => {
                let other = OwnerRecord::parse(&page);
                other.map_or(Whose::Damaged, |other| Whose::Other(other.holder.describe(&self.own.holder)))
            }
        })
    }
}

impl OwnedLock {
    /// Fails with `Fenced` if another process claimed the directory since.
    pub(super) fn check_owner(&self) -> Result<()> {
        self.verdict(self.kept.whose())
    }

    /// True if the owner holds a lease, because the file system is not of this machine alone.
    pub(super) fn is_leased(&self) -> bool {
        self.kept.pages.leased
    }

    /// True if the lease is valid. Without a lease, because the system's lock suffices: true until another owner was
    /// seen.
    pub(super) fn lease_is_valid(&self) -> bool {
        if self.is_leased() { self.kept.is_valid() } else { !self.kept.is_lost() }
    }

    /// Fails with `Fenced` if another process may own the directory. Reads the record only if the lease has to be
    /// renewed.
    pub(super) fn check_lease(&self) -> Result<()> {
        match self.lease_is_valid() {
            true => Ok(()),
            false if self.is_leased() => self.verdict(self.kept.renew()),
            false => self.check_owner(),
        }
    }

    fn verdict(&self, found: io::Result<Whose>) -> Result<()> {
        let file = self.path.join(LOCK);
        match found.map_err(|error| failed(Doing::Reading, &file, error, ""))? {
            Whose::Own => Ok(()),
            Whose::Other(other) => Err(fenced(&self.path.to_string_lossy(), &other)),
            Whose::Damaged => {
                let message = "the record of its owner was removed or damaged while the tier was open";
                Err(TierError::at(TierKind::PathMissing, file.to_string_lossy(), message))
            }
        }
    }

    /// The lock of the system.
    pub(super) fn lock(&self) -> &FileLock {
        &self.kept.pages.lock
    }

    /// Which file is locked.
    pub(super) fn identity(&self) -> Identity {
        self.lock().identity()
    }
}

impl Drop for OwnedLock {
    fn drop(&mut self) {
        // A forked child has neither the thread nor the lock.
        if !self.lock().is_own() {
            return;
        }
        let stopped = self.beats.as_ref().is_none_or(|beats| beats.stop());
        if self.kept.pages.leased && stopped && self.kept.is_valid() {
            let kept = Arc::clone(&self.kept);
            let given_back = time_limit::run_within(Some(LAST_BEAT), &self.path, move || {
                give_back(&kept.pages, &kept.own)
            });
            if !matches!(given_back, Ok(Ok(Ok(())))) {
                let message = format!(
                    "{}: the lock file could not be written, so the next open from another machine waits {} s",
                    self.path.display(),
                    self.kept.timing.quiet.as_secs()
                );
                log::write(Level::Warn, &message);
            }
        }
        let_go(&self.kept.own.claim);
    }
}

#[cfg(test)]
mod lock_tests;
#[cfg(test)]
mod tests;
