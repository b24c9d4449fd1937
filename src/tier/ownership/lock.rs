//! The lock file of a directory: its claim by this process, its heartbeats, and its release; see `ownership` for the invariants.
#![forbid(unsafe_code)]

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::holder::{Holder, hold, let_go};
use super::{
    ClaimState, Claiming, LockPage, OwnerRecord, Register, TIMING, Timing, Whose, give_back, renew, whose,
};
use crate::error::{Doing, Error, Result, TierError, TierKind};
use crate::log::{self, Level};
use crate::sys::file::Identity;
use crate::sys::lock::{FileLock, PAGE};
use crate::sys::private_files::PrivateDirectory;
use crate::sys::sync::{Lock, Signal};
use crate::sys::{host, threads, time_limit};
use crate::tier::storage::{LOCK, failed, fenced, locked};

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
pub(in crate::tier) struct PendingLock {
    pages: LockPages,
    claiming: Claiming,
    timing: Timing,
    told: bool,
}

/// What a claim came to so far.
#[derive(Debug)]
pub(in crate::tier) enum LockStep {
    /// This process owns the directory.
    Owned(OwnedLock),
    /// Continue after this time.
    Wait(Box<PendingLock>, Duration),
}

/// A directory's lock file, which this process owns.
#[derive(Debug)]
pub(in crate::tier) struct OwnedLock {
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
    pub(in crate::tier) fn new(
        lock: FileLock,
        directory: &PrivateDirectory,
        path: &Path,
    ) -> Result<PendingLock> {
        let local = lock.file_system().is_ok_and(|found| found.is_local());
        let leased = !local || !lock.excludes();
        PendingLock::with(lock, directory, path, leased, TIMING)
    }

    /// As `new`, with a lease or without one.
    pub(in crate::tier) fn with(
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
    pub(in crate::tier) fn resume(mut self, path: &Path) -> Result<LockStep> {
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
    pub(in crate::tier) fn check_owner(&self) -> Result<()> {
        self.verdict(self.kept.whose())
    }

    /// True if the owner holds a lease, because the file system is not of this machine alone.
    pub(in crate::tier) fn is_leased(&self) -> bool {
        self.kept.pages.leased
    }

    /// True if the lease is valid. Without a lease, because the system's lock suffices: true until another owner was
    /// seen, or the lock was removed.
    pub(in crate::tier) fn lease_is_valid(&self) -> bool {
        if self.is_leased() { self.kept.is_valid() } else { !self.kept.is_lost() && self.lock().has_a_name() }
    }

    /// Fails with `Fenced` if another process may own the directory. Reads the record only if the lease has to be
    /// renewed.
    pub(in crate::tier) fn check_lease(&self) -> Result<()> {
        match self.lease_is_valid() {
            true => Ok(()),
            false if self.is_leased() => self.verdict(self.kept.renew()),
            false if self.lock().has_a_name() => self.check_owner(),
            false => {
                let message = "the file was removed, and another process may own the tier by now";
                Err(TierError::at(TierKind::PathMissing, self.path.join(LOCK).to_string_lossy(), message))
            }
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
    pub(in crate::tier) fn lock(&self) -> &FileLock {
        &self.kept.pages.lock
    }

    /// Which file is locked.
    pub(in crate::tier) fn identity(&self) -> Identity {
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
#[path = "lock_tests.rs"]
mod tests;
