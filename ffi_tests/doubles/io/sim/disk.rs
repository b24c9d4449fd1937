//! The files of a simulated disk: as reads see them, and as a crash leaves them.
//!
//! A file is certain to survive a crash only once its directory was synced. Its bytes and its length are certain to
//! survive only once the file itself was synced.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::backend::Wake;
use super::faults::{Stop, next};
use super::journal::{DiskEvent, Journal};

use crate::sys::sync::{Lock, Signal};

/// The unit in bytes that a crash keeps or loses.
pub const SECTOR: usize = 512;

/// The effect of a crash on writes that were not synced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Crash {
    /// All reached the disk.
    Kept,
    /// None reached the disk.
    Dropped,
    /// A random subset of their sectors reached the disk.
    Torn,
}

/// A simulated disk. It outlives the engines on it. Several engines may use it at a time, as several mounts.
#[derive(Debug, Clone, Default)]
pub struct Disk {
    inner: Arc<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    state: Lock<DiskState>,
    news: Signal,
}

type Files = BTreeMap<String, Vec<u8>>;

/// What happens after a number of further events.
struct Hook {
    events: u64,
    run: Box<dyn FnOnce() + Send>,
}

impl fmt::Debug for Hook {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_tuple("Hook").field(&self.events).finish()
    }
}

#[derive(Debug, Default)]
struct DiskState {
    current: Files,
    durable: Files,
    unsynced: Vec<DiskEvent>,
    /// Files created since the last sync of the directory.
    created: HashSet<String>,
    capacity: Option<u64>,
    journal: Option<(Journal, usize)>,
    requests: u64,
    events: u64,
    /// Number of wakes. Each engine remembers how many it has seen.
    wakes: u64,
    hook: Option<Hook>,
    released: bool,
}

impl Journal {
    /// The `disks` disks after the first `events` events, as a new process finds them without a power failure.
    pub fn replayed(&self, disks: usize, events: usize) -> Vec<Disk> {
        let image: Vec<Disk> = (0..disks).map(|_| Disk::default()).collect();
        for (disk, event) in self.events.lock().iter().take(events) {
            image[*disk].serve(event.clone());
        }
        image
    }

    /// Like [`Journal::replayed`], after a power failure.
    pub fn image(&self, disks: usize, events: usize, crash: Crash, seed: u64) -> Vec<Disk> {
        let image = self.replayed(disks, events);
        image.iter().zip(seed..).for_each(|(disk, seed)| disk.crash(crash, seed));
        image
    }
}

impl Disk {
    /// A disk that records its events in `journal` as disk number `number`.
    pub fn journaled(journal: &Journal, number: usize) -> Disk {
        let disk = Disk::default();
        disk.inner.state.lock().journal = Some((journal.clone(), number));
        disk
    }

    /// A copy of this disk, which records its present state and all later events in `journal`.
    pub fn moved_to(&self, journal: &Journal, number: usize) -> Disk {
        let disk = Disk::journaled(journal, number);
        let state = self.inner.state.lock();
        for (name, bytes) in state.durable.clone() {
            disk.serve(DiskEvent::Create { name: name.clone() });
            disk.serve(DiskEvent::Write { name: name.clone(), at: 0, bytes });
            disk.serve(DiskEvent::Sync { name });
        }
        disk.sync_directory();
        state.unsynced.iter().for_each(|event| disk.serve(event.clone()));
        disk.inner.state.lock().created = state.created.clone();
        drop(state);
        disk
    }

    /// The bytes of a file, as reads see them.
    pub fn contents(&self, name: &str) -> Vec<u8> {
        self.inner.state.lock().current.get(name).cloned().unwrap_or_default()
    }

    /// Stores a file durably.
    pub fn put(&self, name: &str, bytes: Vec<u8>) {
        let mut state = self.inner.state.lock();
        state.durable.insert(name.to_string(), bytes.clone());
        state.current.insert(name.to_string(), bytes);
    }

    /// Truncates a file durably, as another process might.
    pub fn truncate(&self, name: &str, len: usize) {
        let mut bytes = self.contents(name);
        bytes.truncate(len);
        self.put(name, bytes);
    }

    /// Length of a file in bytes; `None` if it does not exist.
    pub fn len(&self, name: &str) -> Option<u64> {
        self.inner.state.lock().current.get(name).map(|file| file.len() as u64)
    }

    /// Names of all files.
    pub fn names(&self) -> Vec<String> {
        self.inner.state.lock().current.keys().cloned().collect()
    }

    /// Creates an empty file if it does not exist.
    pub fn create(&self, name: &str) {
        if self.len(name).is_none() {
            self.serve(DiskEvent::Create { name: name.to_string() });
        }
    }

    /// Extends a file to at least `len` bytes; false if the disk is too small.
    pub fn allocate(&self, name: &str, len: u64) -> bool {
        let fits = self.room(name) as u64 >= len;
        if fits {
            self.serve(DiskEvent::Allocate { name: name.to_string(), len: len as usize });
        }
        fits
    }

    /// Removes a file durably.
    pub fn remove(&self, name: &str) {
        self.serve(DiskEvent::Remove { name: name.to_string() });
    }

    /// Makes the creation of all files durable.
    pub fn sync_directory(&self) {
        self.serve(DiskEvent::SyncDirectory);
    }

    /// Limits the total bytes of all files.
    pub fn limit(&self, capacity: Option<u64>) {
        self.inner.state.lock().capacity = capacity;
    }

    /// Number of requests so far.
    pub fn requests(&self) -> u64 {
        self.inner.state.lock().requests
    }

    /// Lets hung requests complete.
    pub fn release(&self) {
        self.inner.state.lock().released = true;
        self.inner.wake();
    }

    /// Waits until the last engine on the disk has ended, since released requests write until then. No other clone of
    /// the disk may exist.
    pub fn wait_unused(&self) {
        let end = Instant::now() + Duration::from_secs(60);
        while Arc::strong_count(&self.inner) > 1 {
            assert!(Instant::now() < end, "an engine that uses the disk does not end");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Simulates a power failure: synced data stays, and `crash` decides about the rest.
    pub fn crash(&self, crash: Crash, seed: u64) {
        let mut state = self.inner.state.lock();
        let mut random = seed | 1;
        let mut stays = || match crash {
            Crash::Kept => true,
            Crash::Dropped => false,
            Crash::Torn => next(&mut random) & 1 == 0,
        };
        for event in std::mem::take(&mut state.unsynced) {
            apply(&mut state.durable, &event, &mut stays);
        }
        for name in std::mem::take(&mut state.created) {
            if !stays() {
                state.durable.remove(&name);
            }
        }
        state.current = state.durable.clone();
    }

    /// Runs `run` once, after `events` further events, on the thread of the last one. That event has taken effect, and
    /// the engine that caused it has not learned of it.
    pub fn after_events(&self, events: u64, run: impl FnOnce() + Send + 'static) {
        self.inner.state.lock().hook = Some(Hook { events, run: Box::new(run) });
    }

    /// True if the action of [`Disk::after_events`] has not run.
    pub fn is_hooked(&self) -> bool {
        self.inner.state.lock().hook.is_some()
    }

    /// Executes an event and records it in the journal.
    pub fn serve(&self, event: DiskEvent) {
        self.execute(event);
        let due = {
            let mut state = self.inner.state.lock();
            if let Some(hook) = &mut state.hook {
                hook.events = hook.events.saturating_sub(1);
            }
            state.hook.take_if(|hook| hook.events == 0)
        };
        if let Some(hook) = due {
            (hook.run)();
        }
    }

    fn execute(&self, event: DiskEvent) {
        let mut state = self.inner.state.lock();
        let state = &mut *state;
        if let Some((journal, number)) = &state.journal {
            journal.add(*number, event.clone());
        }
        let touches = |other: &DiskEvent, name: &String| other.name() == Some(name);
        match &event {
            DiskEvent::Write { name, .. } | DiskEvent::Allocate { name, .. } => {
                state.durable.entry(name.clone()).or_default();
                apply(&mut state.current, &event, &mut || true);
                state.unsynced.push(event);
            }
            DiskEvent::Create { name } => {
                state.created.insert(name.clone());
                state.current.entry(name.clone()).or_default();
                state.durable.entry(name.clone()).or_default();
            }
            DiskEvent::Sync { name } => {
                let all = std::mem::take(&mut state.unsynced);
                let (own, others) = all.into_iter().partition(|other| touches(other, name));
                state.unsynced = others;
                let own: Vec<DiskEvent> = own;
                own.iter().for_each(|event| apply(&mut state.durable, event, &mut || true));
            }
            DiskEvent::Remove { name } => {
                state.current.remove(name);
                state.durable.remove(name);
                state.unsynced.retain(|other| !touches(other, name));
            }
            DiskEvent::SyncDirectory => state.created.clear(),
        }
    }

    pub(super) fn read(&self, name: &str, at: usize, len: usize) -> Vec<u8> {
        let state = self.inner.state.lock();
        let there = state.current.get(name).and_then(|file| file.get(at..)).unwrap_or_default();
        there[..there.len().min(len)].to_vec()
    }

    /// The largest possible length of a file, in bytes.
    pub(super) fn room(&self, name: &str) -> usize {
        let state = self.inner.state.lock();
        let Some(capacity) = state.capacity else { return usize::MAX };
        let others: usize =
            state.current.iter().filter(|(other, _)| *other != name).map(|(_, file)| file.len()).sum();
        let own = state.current.get(name).map_or(0, Vec::len);
        own.max((capacity as usize).saturating_sub(others))
    }

    /// Number of requests and of other calls so far.
    pub fn events(&self) -> u64 {
        self.inner.state.lock().events
    }

    /// Identifies the disk among all disks of this process.
    pub fn key(&self) -> String {
        format!("disk-{:p}", Arc::as_ptr(&self.inner))
    }

    /// Counts a call on the storage, which hangs if `stop` says so.
    pub fn call(&self, stop: Option<Stop>) {
        if self.count_event(stop) {
            let state = self.inner.state.lock();
            drop(self.inner.news.wait_while(state, None, |state| !state.released));
        }
    }

    /// Counts an event; true if it hangs.
    pub(super) fn count_event(&self, stop: Option<Stop>) -> bool {
        let mut state = self.inner.state.lock();
        state.events += 1;
        stop.is_some_and(|stop| stop.hits(state.events - 1)) && !state.released
    }

    pub(super) fn count_request(&self) -> u64 {
        let mut state = self.inner.state.lock();
        state.requests += 1;
        state.requests - 1
    }

    pub(super) fn released(&self) -> bool {
        self.inner.state.lock().released
    }

    /// Number of wakes so far.
    pub(super) fn wakes(&self) -> u64 {
        self.inner.state.lock().wakes
    }

    /// Sleeps until the disk is notified, at most until `until`. A wake that is not among the `seen` ones ends the call
    /// at once, and counts as seen then. True if there was one, or if `until` has passed.
    pub(super) fn wait_news(&self, seen: &mut u64, until: Option<Instant>) -> bool {
        let state = self.inner.state.lock();
        std::mem::replace(seen, state.wakes) != state.wakes || !self.inner.news.wait_until(state, until).1
    }

    pub(super) fn waker(&self) -> Arc<dyn Wake> {
        Arc::clone(&self.inner) as Arc<dyn Wake>
    }
}

impl Wake for Inner {
    fn wake(&self) {
        self.state.lock().wakes += 1;
        self.news.notify_all();
    }
}

/// Applies an event to `files`: each sector, or the new length, only if `stays` returns true.
fn apply(files: &mut Files, event: &DiskEvent, stays: &mut impl FnMut() -> bool) {
    match event {
        DiskEvent::Write { name, at, bytes } => {
            let file = files.entry(name.clone()).or_default();
            for (n, sector) in bytes.chunks(SECTOR).enumerate() {
                if stays() {
                    put(file, at + n * SECTOR, sector);
                }
            }
        }
        DiskEvent::Allocate { name, len } if stays() => {
            let file = files.entry(name.clone()).or_default();
            file.resize(file.len().max(*len), 0);
        }
        _ => {}
    }
}

fn put(file: &mut Vec<u8>, at: usize, bytes: &[u8]) {
    let end = at + bytes.len();
    if file.len() < end {
        file.resize(end, 0);
    }
    file[at..end].copy_from_slice(bytes);
}
