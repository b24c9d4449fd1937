//! Writes that are still in flight when their tier is closed, dropped or destroyed. The lock is held against this
//! process and others until the last write has ended.
#![forbid(unsafe_code)]

use std::path::Path as FilePath;
use std::process::{Command, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

use super::*;
use crate::error::{Error, IoKind, TierKind};
use crate::io::engine::Engine;
use crate::sys::fork::in_forked_child;
use crate::tier::bucket::{Bucket, TEST_ADDRESS};
use crate::tier::directory::{DirStorage, Directory, acquire, collect};
use crate::tier::volume::Volume;
use spillway_stores::memory::MemoryStore as Objects;
use spillway_stores::{Address, ObjectMeta, Store, StoreResult};

/// A door at which writes wait until it opens.
#[derive(Debug, Clone, Default)]
struct Door(Arc<(Mutex<bool>, Condvar)>);

impl Door {
    fn pass(&self) {
        let open = self.0.0.lock().unwrap();
        drop(self.0.1.wait_while(open, |open| !*open).unwrap());
    }

    fn open(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }
}

/// A path in a real directory whose writes hang until the door opens.
fn hanging(base: &FilePath, door: &Door, io_timeout: Option<Duration>) -> Volume {
    let directory = acquire(None, base, &owner(), true).unwrap().unwrap();
    let door = door.clone();
    let options = IoOptions { preallocate: false, direct: false, io_timeout, ..IoOptions::default() };
    let engine = Engine::open_with_hook(options, move || door.pass());
    Volume::open(Box::new(DirStorage::new(directory, false, None)), engine.unwrap()).unwrap()
}

fn claimed_here(base: &FilePath) -> Result<Directory> {
    acquire(None, base, &owner(), true).map(Option::unwrap)
}

/// A thread waits for the bell while another thread drives its ticket. Without this event it would never wake up.
#[test]
fn the_bell_rings_when_a_ticket_is_settled_that_another_thread_has_asked_for() {
    let tier = Tier::open(on_disks(&[Disk::default()], &[])).unwrap();
    let extent = tier.define(&name_of(0), STREAMS[0]).unwrap();
    for (asks, more) in [(false, 0), (true, 1)] {
        let memory = Memory::filled(STREAMS[0], 1);
        let ticket = tier.write(extent, &memory.buffers(), &ExtentPlacement::Auto, None).unwrap();
        let mut job = tier.state.lock().tickets.take(ticket).unwrap();
        assert!(job.drive(None));
        let seen = tier.events();
        if asks {
            let error = tier.wait(ticket, Some(Duration::ZERO)).unwrap_err();
            assert_eq!(error.io_kind(), Some(IoKind::Timeout));
        }
        tier.drive(ticket, job, None).unwrap().unwrap();
        assert_eq!(tier.events(), seen + more);
        tier.wait(ticket, PATIENCE).unwrap();
    }
}

/// A bug in the check of a read is the error of its ticket. The extent can be written and committed afterwards.
#[test]
fn a_panic_ends_its_ticket_alone() {
    let tier = Tier::open(on_disks(&[Disk::default()], &[])).unwrap();
    let extent = tier.define(&name_of(0), STREAMS[0]).unwrap();
    let memory = Memory::filled(STREAMS[0], 1);
    let write = || tier.write(extent, &memory.buffers(), &ExtentPlacement::Auto, None).unwrap();
    tier.wait(write(), PATIENCE).unwrap();
    let ticket = tier.read(extent, &memory.buffers()).unwrap();
    let mut job = tier.state.lock().tickets.take(ticket).unwrap();
    job.spans.clear();
    let error = tier.drive(ticket, job, None).unwrap().unwrap_err();
    assert!(matches!(error, Error::Internal(_)), "{error}");
    assert_eq!(tier.wait(ticket, PATIENCE), Err(error));
    tier.wait(write(), PATIENCE).unwrap();
    tier.commit(1, &[]).unwrap();
}

#[test]
#[ignore = "the body of the second process of these tests"]
fn another_process() {
    let base = std::env::var("SPILLWAY_TEST_IN_FLIGHT").expect("set by the test that starts this process");
    let code = match claimed_here(FilePath::new(&base)) {
        Ok(_) => 10,
        Err(error) if error.tier_kind() == Some(TierKind::Locked) => 11,
        Err(_) => 12,
    };
    std::process::exit(code);
}

fn claimed_elsewhere(base: &FilePath) -> bool {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "tier::tests::in_flight::another_process", "--nocapture"]);
    let status = command.env("SPILLWAY_TEST_IN_FLIGHT", base).stdout(Stdio::null()).status().unwrap();
    assert!(matches!(status.code(), Some(10 | 11)), "{status}");
    status.code() == Some(10)
}

fn assert_locked(base: &FilePath) {
    let error = claimed_here(base).unwrap_err();
    assert_eq!(error.tier_kind(), Some(TierKind::Locked), "{error}");
    assert!(error.to_string().contains("still in flight"), "{error}");
    assert!(!claimed_elsewhere(base), "the lock ended before the write");
}

fn wait_until(what: impl Fn() -> bool) {
    let begin = std::time::Instant::now();
    while !what() {
        assert!(begin.elapsed() < PATIENCE.unwrap());
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_tier_closed_with_a_timeout_stays_locked_until_its_writes_have_ended() {
    let dir = tempfile::tempdir().unwrap();
    let door = Door::default();
    let path = hanging(dir.path(), &door, None);
    let memory = Memory::filled(&[8192], 5);
    path.write(0, memory.buffers()[0].clone()).unwrap();
    let error = path.engine.close(Some(Duration::ZERO)).unwrap_err();
    assert_eq!(error.io_kind(), Some(IoKind::Timeout));
    drop(path);
    assert_locked(dir.path());
    door.open();
    wait_until(|| claimed_here(dir.path()).is_ok());
    assert!(claimed_elsewhere(dir.path()));
    let data = std::fs::read(owner().below(dir.path()).join("data")).unwrap();
    assert!(data == memory.spans()[0].to_vec(), "the write landed while the directory was still locked");
}

#[test]
fn a_tier_that_is_destroyed_with_a_write_in_flight_keeps_its_files_and_its_lock() {
    let dir = tempfile::tempdir().unwrap();
    let door = Door::default();
    let path = hanging(dir.path(), &door, short_io_timeout());
    let memory = Memory::filled(&[8192], 5);
    let handle = path.write(0, memory.buffers()[0].clone()).unwrap();
    assert_eq!(path.wait(handle, None).unwrap_err().io_kind(), Some(IoKind::Deadline));
    let error = Volume::remove_all(vec![path]).unwrap_err();
    assert!(matches!(&error, Error::Busy(message) if message.contains("in flight")), "{error}");
    assert_locked(dir.path());
    assert!(owner().below(dir.path()).join("data").exists());
    assert_eq!(collect(None, dir.path(), &owner()).unwrap_err().tier_kind(), Some(TierKind::Locked));
    door.open();
    wait_until(|| claimed_here(dir.path()).is_ok());
    collect(None, dir.path(), &owner()).unwrap();
    assert!(std::fs::read_dir(dir.path()).unwrap().next().is_none());
}

#[test]
fn a_forked_child_removes_nothing_of_its_parents() {
    let dir = tempfile::tempdir().unwrap();
    let mut directory = Some(claimed_here(dir.path()).unwrap());
    let refused = in_forked_child(|| directory.take().is_some_and(|directory| directory.remove().is_err()));
    assert!(refused && owner().below(dir.path()).join("lock").exists());
    assert!(!claimed_elsewhere(dir.path()));
}

/// A store whose puts of data objects wait until the door opens.
#[derive(Debug)]
struct Slow {
    objects: Objects,
    door: Door,
}

impl Store for Slow {
    fn put(&self, key: &str, bytes: &[u8]) -> StoreResult<()> {
        if key.contains("/data/") {
            self.door.pass();
        }
        self.objects.put(key, bytes)
    }

    fn get(&self, key: &str, from: u64, len: u64, part: &mut dyn FnMut(usize, &[u8])) -> StoreResult<()> {
        self.objects.get(key, from, len, part)
    }

    fn delete(&self, key: &str) -> StoreResult<()> {
        self.objects.delete(key)
    }

    fn list(&self, prefix: &str) -> StoreResult<Vec<ObjectMeta>> {
        self.objects.list(prefix)
    }
}

/// The request in flight deletes objects that it makes stale. After a new claim these could belong to the next owner.
#[test]
fn a_prefix_stays_claimed_until_the_last_request_has_ended() {
    let (objects, door) = (Objects::default(), Door::default());
    let claim = || {
        let store = Arc::new(Slow { objects: objects.clone(), door: door.clone() });
        Bucket::acquire(store, &Address::parse(TEST_ADDRESS).unwrap(), &owner(), true).map(Option::unwrap)
    };
    for destroy in [false, true] {
        let bucket = claim().unwrap();
        *door.0.0.lock().unwrap() = false;
        let io_timeout = short_io_timeout().filter(|_| destroy);
        let engine =
            Engine::open_volume(IoOptions { io_timeout, ..IoOptions::default() }, bucket.volume()).unwrap();
        let path = Volume::open(Box::new(bucket), engine).unwrap();
        let memory = Memory::filled(&[8192], 5);
        let handle = path.write(0, memory.buffers()[0].clone()).unwrap();
        if destroy {
            assert_eq!(path.wait(handle, None).unwrap_err().io_kind(), Some(IoKind::Deadline));
            assert!(matches!(Volume::remove_all(vec![path]), Err(Error::Busy(_))));
        } else {
            assert_eq!(path.engine.close(Some(Duration::ZERO)).unwrap_err().io_kind(), Some(IoKind::Timeout));
            drop(path);
        }
        assert_eq!(claim().unwrap_err().tier_kind(), Some(TierKind::Locked));
        door.open();
        wait_until(|| objects.keys().iter().all(|key| !key.contains("/lock/")));
        assert!(objects.keys().iter().any(|key| key.contains("/data/")), "the request came before the end");
    }
}
