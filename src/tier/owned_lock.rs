//! The lock file of a claimed directory: the system's lock, the owner's record, and the thread that keeps the lease.
//!
//! Invariants:
//! - The thread holds the lock only during a heartbeat. The drop waits for that heartbeat up to [`LAST_BEAT`], and then
//!   gives the directory back, within the same time. A call that does not return keeps the lock until it returns.
//! - The record is given back only while the lease is valid. Without a valid lease another process may be the owner.
//! - A full disk of this machine does not keep a tier closed: there the system's lock suffices. The owner then expects
//!   the record that it found.
#![forbid(unsafe_code)]

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::failures::{failed, fenced, locked};
use super::holder::{self, Holder};
use super::ownership::{self, Claiming, OwnerRecord, Part, Progress, Register, TIMING, Timing, Whose};
use crate::error::{Doing, Error, Result, TierError, TierKind};
use crate::log::{self, Level};
use crate::sys::file::Identity;
use crate::sys::host;
use crate::sys::lock::{FileLock, PAGE};
use crate::sys::private_files::PrivateDirectory;
use crate::sys::sync::{Lock, Signal};
use crate::sys::threads;
use crate::sys::time_limit;

/// File name of the lock.
pub(super) const LOCK: &str = "lock";
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
    fn read(&self, part: Part) -> io::Result<Option<Vec<u8>>> {
        // The cache of one machine shows every write of that machine.
        self.lock.read_page(&self.directory, LOCK, part as u64, self.leased)
    }

    fn write(&self, part: Part, bytes: &[u8; PAGE]) -> io::Result<()> {
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
    /// Go on after this time.
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

    /// Goes on until the claim is decided or has to wait.
    pub(super) fn resume(mut self, path: &Path) -> Result<LockStep> {
        let file = path.join(LOCK);
        loop {
            let writes = self.claiming.writes_next();
            match self.claiming.step(&self.pages, &Instant::now) {
                Ok(Progress::Owned) => return self.owned(false, path).map(LockStep::Owned),
                Ok(Progress::Held(text)) => return Err(locked(path, &text)),
                Ok(Progress::Wait(time)) if time.is_zero() => {}
                Ok(Progress::Wait(time)) => {
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
        holder::hold(&own.claim);
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
        let found = ownership::renew(&self.pages, &self.own, number)?;
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
            let found = ownership::whose(&self.pages, &self.own)?;
            self.note(&found);
            return Ok(found);
        };
        let page = self.pages.read(Part::Record)?;
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
    pub(super) fn check_owner(&self, path: &Path) -> Result<()> {
        self.verdict(path, self.kept.whose())
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
    pub(super) fn check_lease(&self, path: &Path) -> Result<()> {
        match self.lease_is_valid() {
            true => Ok(()),
            false if self.is_leased() => self.verdict(path, self.kept.renew()),
            false => self.check_owner(path),
        }
    }

    fn verdict(&self, path: &Path, found: io::Result<Whose>) -> Result<()> {
        let file = path.join(LOCK);
        match found.map_err(|error| failed(Doing::Reading, &file, error, ""))? {
            Whose::Own => Ok(()),
            Whose::Other(other) => Err(fenced(&path.to_string_lossy(), &other)),
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
                ownership::give_back(&kept.pages, &kept.own)
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
        holder::let_go(&self.kept.own.claim);
    }
}

#[cfg(test)]
mod tests;
