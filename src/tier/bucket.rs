//! A path in an object store: object names below `PREFIX/job/host/rank-N`.
//!
//! Invariants:
//! - A process writes only below a prefix that it has claimed. Every open file keeps the lock alive, so the
//!   lock ends after the last request in flight. A later request could delete objects of the next owner.
//! - A superblock of up to [`OBJECT_BYTES`] is one object, written by one put: a crash never leaves a partial one. A
//!   longer superblock is several objects. It is then as safe as on a disk: the last committed superblock is in the
//!   other copy.
//! - The bucket must exist. A mistyped bucket name is an error and never creates a bucket.
//! - A removal deletes the superblocks first, so a partial removal leaves no valid state. It does not delete locks:
//!   other processes may create theirs at any moment, and each deletes its own.
//! - An object store has no locks that end with a process. A process that claims a prefix first puts a lock object with a unique name, and then lists the locks. It gets the
//!   prefix only if its own lock is listed and every other lock belongs to a dead process. A listing shows every object
//!   that exists, so of two concurrent claims at least one sees the other. Both may be refused; never do both succeed.
//! - One object put with If-None-Match does not suffice. To take over a dead lock, a process must delete the object,
//!   which may belong to a live process by then.
//! - The files below the prefix are listed after that. A listing of several pages that began earlier could show data of
//!   a holder in mid-work, and miss the lock of a holder that released it meanwhile.
//! - A lock is deleted only by its owner, or by the process that got the prefix and knows that the owner is dead. Any
//!   other process that put a lock may be about to list it.
//! - A process counts as dead only if this machine can prove it (see `ownership`). A process elsewhere, also in another
//!   container, counts as alive until a person deletes its lock object.
//! - A process whose lock was deleted commits nothing any more. It reads its lock after each superblock. A process that
//!   claims the prefix after that read finds the superblock.
//!
//! [`OBJECT_BYTES`]: spillway_stores::volume::OBJECT_BYTES
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use spillway_stores::secrets::printable;
use spillway_stores::volume::ObjectVolume;
use spillway_stores::{Address, ObjectMeta, Store, StoreError, StoreResult};

use super::directory::Owner;
use super::extent::PAGE;
use super::ownership::{self, Holder, Life};
use super::storage::{FILES, FilePair, NamedFile, Storage, fenced, in_flight, inherited, unless_fenced};
use crate::environment;
use crate::error::{Doing, Error, IoError, IoKind, Result, TierError, TierKind};
use crate::io::engine::Engine;
use crate::io::object;
use crate::io::options::Options as IoOptions;
use crate::log::{self, Level};
use crate::sys::fork::OpeningProcess;
use crate::sys::sync::Lock;
use crate::sys::{host, threads};

/// Number of concurrent deletions.
const DELETERS: usize = 8;
/// Address of the store in tests.
#[cfg(test)]
pub(super) const TEST_ADDRESS: &str = "s3://bucket/prefix";

/// A claimed prefix of an object store, with its files.
#[derive(Debug)]
pub struct Bucket {
    volume: Arc<ObjectVolume>,
    lock: Arc<PrefixLock>,
}

/// Full address of `owner`'s objects, for messages.
pub(super) fn name(address: &str, owner: &Owner) -> String {
    format!("{}/{}", address.trim_end_matches('/'), below(owner))
}

fn below(owner: &Owner) -> String {
    format!("{}/{}/rank-{}", owner.job, owner.host, owner.rank)
}

impl Bucket {
    /// Takes the prefix of `owner` in a store. `None` if it holds no objects and `make` is false. Errors: `Locked` if
    /// another process holds the prefix, and errors of the store.
    pub fn acquire(
        store: Arc<dyn Store>,
        address: &Address,
        owner: &Owner,
        make: bool,
    ) -> Result<Option<Bucket>> {
        let prefix = format!("{}{}/", address.prefix, below(owner));
        let name = name(&address.text(), owner);
        // Listed before the lock is put, because some servers create a missing bucket on a put.
        let listed = match store.list(&prefix).map_err(failed(Doing::Opening, &name)) {
            Err(error) if error.io_kind() == Some(IoKind::NotFound) && !make => return Ok(None),
            other => other?,
        };
        if !make && listed.iter().all(|one| is_lock(&one.key, &prefix)) {
            return Ok(None);
        }
        let (lock, listed) = PrefixLock::acquire(&store, &prefix, &name)?;
        let volume =
            ObjectVolume::new(store, name, prefix, &FILES, &listed, |report| log::write(Level::Info, report));
        Ok(Some(Bucket { volume: Arc::new(volume), lock: Arc::new(lock) }))
    }

    /// The volume that holds the files.
    pub fn volume(&self) -> Arc<ObjectVolume> {
        Arc::clone(&self.volume)
    }

    fn delete_all(&self, keys: &[String]) -> StoreResult<()> {
        let (store, next, outcome) = (self.volume.store(), Lock::new(keys.iter()), Lock::new(Ok(())));
        let take = || next.lock().next();
        let delete = || {
            while let Some(key) = take() {
                if let Err(error) = store.delete(key) {
                    *outcome.lock() = Err(error);
                    return;
                }
            }
        };
        std::thread::scope(|scope| {
            // Where no more threads can be started, those that run delete everything.
            let started = |_: &usize| threads::spawn_scoped_quiet(scope, "spillway-delete", delete).is_ok();
            (1..DELETERS.min(keys.len())).take_while(started).for_each(drop);
            delete();
        });
        outcome.into_inner()
    }
}

impl Storage for Bucket {
    fn name(&self) -> String {
        self.volume.address().to_string()
    }

    fn open(&self, file: &str) -> Result<FilePair> {
        let file = Arc::new(object::file(&self.volume, file).keep_alive(Arc::clone(&self.lock) as _));
        Ok(FilePair { reader: Arc::clone(&file), writer: file })
    }

    fn len(&self, file: &str) -> Result<Option<u64>> {
        // The last block of a chunk is stored without padding but occupies a whole page.
        Ok(self.volume.len(file).map(|end| end.next_multiple_of(PAGE)))
    }

    /// Does nothing: an object that the store has accepted is durable, and so is its name.
    fn sync(&self) -> Result<()> {
        Ok(())
    }

    fn check(&self, _: &[NamedFile]) -> Result<()> {
        match self.check_owner() {
            // Errors of the store are those of the requests that follow.
            Err(Error::Io(_)) => Ok(()),
            other => other,
        }
    }

    fn check_owner(&self) -> Result<()> {
        self.lock.check(self.volume.prefix(), self.volume.address())
    }

    fn check_removal(&self, _: &[NamedFile]) -> Result<()> {
        unless_fenced(self.check_owner())
    }

    fn removal_has_limits(&self) -> bool {
        true
    }

    fn remove(self: Arc<Self>) -> Result<()> {
        if !self.lock.is_own() {
            return Err(inherited(self.volume.address()));
        }
        if Arc::strong_count(&self.lock) > 1 {
            return Err(in_flight(self.volume.address()));
        }
        let prefix = self.volume.prefix();
        let listed =
            self.volume.store().list(prefix).map_err(failed(Doing::Removing, self.volume.address()))?;
        // Other objects below the prefix are not of the tier.
        let file_of = |key: &str| key.strip_prefix(prefix)?.split_once('/').map(|(file, _)| file.to_string());
        let is_of_a_file = |key: &String| file_of(key).is_some_and(|file| FILES.contains(&file.as_str()));
        let files = listed.into_iter().map(|one| one.key).filter(is_of_a_file);
        let data = |key: &String| key.starts_with(&format!("{prefix}data/"));
        let (data, superblocks): (Vec<String>, Vec<String>) = files.partition(data);
        for part in [superblocks, data] {
            self.delete_all(&part).map_err(failed(Doing::Removing, self.volume.address()))?;
        }
        Ok(())
    }
}

/// The error of a failed request on an object, file or prefix.
fn failed(doing: Doing, path: &str) -> impl Fn(StoreError) -> Error + Copy {
    move |StoreError { errno, message }| IoError::of_errno(errno, doing, path).because(message).into()
}

fn is_lock(key: &str, prefix: &str) -> bool {
    key.strip_prefix(prefix).is_some_and(|rest| rest.starts_with(LOCKS))
}

/// A path's storage and engine.
type Opened = (Box<dyn Storage>, Engine);

/// Takes the prefix of `owner` at `address`. `None` if it holds no objects and `make` is false.
pub(super) fn open(address: &str, owner: &Owner, io: IoOptions, make: bool) -> Result<Option<Opened>> {
    let (address, store) = connect(address, io.io_timeout)?;
    open_in(store, &address, owner, io, make)
}

/// The bucket of an address. Its endpoint and credentials are variables of the environment.
fn connect(address: &str, timeout: Option<Duration>) -> Result<(Address, Arc<dyn Store>)> {
    spillway_stores::connect(address, timeout, |name| Ok(environment::text(name)?))
}

/// As `open`, in a store in memory.
#[cfg(test)]
pub(super) fn open_in_memory(
    store: &spillway_stores::memory::MemoryStore,
    owner: &Owner,
    io: IoOptions,
    make: bool,
) -> Result<Option<Opened>> {
    open_in(Arc::new(store.clone()), &Address::parse(TEST_ADDRESS)?, owner, io, make)
}

fn open_in(
    store: Arc<dyn Store>,
    address: &Address,
    owner: &Owner,
    io: IoOptions,
    make: bool,
) -> Result<Option<Opened>> {
    let Some(bucket) = Bucket::acquire(store, address, owner, make)? else { return Ok(None) };
    let engine = Engine::open_volume(io, bucket.volume())?;
    Ok(Some((Box::new(bucket), engine)))
}

/// Removes the objects of an owner whose process has ended. A live owner is an error.
pub(super) fn collect(address: &str, owner: &Owner) -> Result<()> {
    owner.check()?;
    let (address, store) = connect(address, None)?;
    match Bucket::acquire(store, &address, owner, false)? {
        Some(bucket) => Arc::new(bucket).remove(),
        None => {
            let error = StoreError { errno: libc::ENOENT, message: "it contains no tier".to_string() };
            Err(failed(Doing::Opening, &name(&address.text(), owner))(error))
        }
    }
}

/// Prefix of the lock objects, below the claimed prefix.
const LOCKS: &str = "lock/";
/// Maximum length of a lock object, in bytes. Locks of this library are shorter.
const MAX_LOCK_BYTES: u64 = 4096;

/// A claimed prefix. Dropping it releases the prefix.
#[derive(Debug)]
pub(super) struct PrefixLock {
    store: Arc<dyn Store>,
    key: String,
    /// Length of the lock object, in bytes.
    bytes: u64,
    opener: OpeningProcess,
}

impl PrefixLock {
    /// Takes `prefix`, then lists its objects; no other process changes them from then on.
    pub(super) fn acquire(
        store: &Arc<dyn Store>,
        prefix: &str,
        name: &str,
    ) -> Result<(PrefixLock, Vec<ObjectMeta>)> {
        let failed = failed(Doing::Opening, name);
        let number =
            host::random().map_err(|error| Error::system("generating the number of a lock", &error))?;
        let key = format!("{prefix}{LOCKS}{number:032x}");
        let me = Holder::this_process();
        let message = serde_json::to_vec(&*me)
            .map_err(|error| Error::System { what: "writing a lock", reason: error.to_string() })?;
        // Before the put, because a put that reports an error may still take effect.
        let lock = PrefixLock {
            store: Arc::clone(store),
            key,
            bytes: message.len() as u64,
            opener: OpeningProcess::current(),
        };
        ownership::hold(&lock.key);
        store.put(&lock.key, &message).map_err(failed)?;
        let locks = store.list(&format!("{prefix}{LOCKS}")).map_err(failed)?;
        let (own, others): (Vec<_>, Vec<_>) = locks.iter().partition(|one| one.key == lock.key);
        if own.is_empty() {
            // A later claim would not see this lock.
            let message = "another process deleted the lock that this process just wrote".to_string();
            return Err(TierError::at(TierKind::Locked, name, message));
        }
        let mut dead = Vec::new();
        for ObjectMeta { key, len } in others {
            match read(store, key, *len).map_err(failed)? {
                LockContent::Gone => {}
                LockContent::Holder(holder) if holder.life(&me, key) == Life::Dead => dead.push(key),
                LockContent::Holder(holder) => {
                    return Err(locked(name, key, prefix, &printable(&holder.describe(&me))));
                }
                LockContent::Unknown => {
                    return Err(locked(name, key, prefix, "its lock object cannot be read"));
                }
            }
        }
        for key in dead {
            store.delete(key).map_err(failed)?;
        }
        let listed = store.list(prefix).map_err(failed)?;
        Ok((lock, listed))
    }

    /// False in a forked child.
    pub(super) fn is_own(&self) -> bool {
        self.opener.is_current()
    }

    /// Fails if the lock object was deleted: with `Fenced` if another process put one, else with `PathMissing`. Errors of
    /// the store are returned.
    pub(super) fn check(&self, prefix: &str, name: &str) -> Result<()> {
        let failed = failed(Doing::Opening, name);
        if !matches!(read(&self.store, &self.key, self.bytes).map_err(failed)?, LockContent::Gone) {
            return Ok(());
        }
        if !self.store.list(&format!("{prefix}{LOCKS}")).map_err(failed)?.is_empty() {
            return Err(fenced(name, "another process"));
        }
        let message = "its lock object was deleted while the tier was open; another process may have written there \
                       since";
        Err(TierError::at(TierKind::PathMissing, name, message))
    }
}

impl Drop for PrefixLock {
    fn drop(&mut self) {
        if !self.is_own() {
            return;
        }
        if let Err(error) = self.store.delete(&self.key) {
            let message = format!(
                "cannot delete the lock {}, so the next open takes it over: {}",
                self.key, error.message
            );
            log::write(Level::Warn, &message);
        }
        ownership::let_go(&self.key);
    }
}

/// Content of a lock object.
enum LockContent {
    Holder(Holder),
    /// Deleted since it was listed.
    Gone,
    Unknown,
}

fn read(store: &Arc<dyn Store>, key: &str, len: u64) -> std::result::Result<LockContent, StoreError> {
    let mut bytes = vec![0; len.min(MAX_LOCK_BYTES) as usize];
    let got = store.get(key, 0, bytes.len() as u64, &mut |at, part| {
        bytes[at..at + part.len()].copy_from_slice(part);
    });
    match got {
        Err(StoreError { errno: libc::ENOENT, .. }) => Ok(LockContent::Gone),
        Err(error) => Err(error),
        Ok(()) => Ok(serde_json::from_slice(&bytes).map_or(LockContent::Unknown, LockContent::Holder)),
    }
}

fn locked(name: &str, key: &str, prefix: &str, message: &str) -> Error {
    let object = printable(key.strip_prefix(prefix).unwrap_or(key));
    let message = format!("{message}; if no process uses the tier, delete {name}/{object} to free it");
    TierError::at(TierKind::Locked, name, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::host;
    use spillway_stores::memory::MemoryStore;

    #[test]
    fn refusals_become_errors_of_their_kind() {
        let kind = |errno| {
            let error = StoreError { errno, message: "HTTP 418".to_string() };
            let error = failed(Doing::Opening, "s3://b/a")(error);
            assert!(error.to_string().contains("s3://b/a") && error.to_string().contains("HTTP 418"));
            error.io_kind().unwrap()
        };
        assert_eq!(kind(libc::ENOENT), IoKind::NotFound);
        assert_eq!(kind(libc::ENOSPC), IoKind::NoSpace);
        assert_eq!(kind(libc::EACCES), IoKind::Failed);
    }

    fn lock(memory: &MemoryStore, holder: &Holder) {
        memory.put("p/lock/other", &serde_json::to_vec(holder).unwrap()).unwrap();
    }

    fn take(memory: &MemoryStore) -> Result<PrefixLock> {
        let store: Arc<dyn Store> = Arc::new(memory.clone());
        PrefixLock::acquire(&store, "p/", "s3://b/p").map(|(claim, _)| claim)
    }

    fn refused(memory: &MemoryStore) -> String {
        let error = take(memory).unwrap_err();
        assert_eq!(error.tier_kind(), Some(TierKind::Locked));
        error.to_string()
    }

    #[test]
    fn a_prefix_is_claimed_once_and_free_again_when_dropped() {
        let memory = MemoryStore::default();
        let lock = take(&memory).unwrap();
        let message = refused(&memory);
        assert!(
            message.contains("this process has the tier open") && message.contains("s3://b/p/lock/"),
            "{message}"
        );
        assert_eq!(memory.keys().len(), 1, "who is refused leaves nothing");
        drop(lock);
        assert_eq!(memory.keys(), [""; 0]);
        take(&memory).unwrap();
    }

    #[test]
    fn the_dead_are_taken_over_and_the_living_are_not() {
        let me = (*Holder::this_process()).clone();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let dead = [
            Holder { pid: child.id(), ..me.clone() },
            Holder { started: me.started + 1, ..me.clone() },
            Holder { boot: "another".to_string(), ..me.clone() },
            // Of this process, which failed to delete it.
            me.clone(),
        ];
        for holder in dead {
            let memory = MemoryStore::default();
            lock(&memory, &holder);
            let lock = take(&memory).unwrap_or_else(|error| panic!("{holder:?}: {error}"));
            assert_eq!(memory.keys(), [lock.key.as_str()]);
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
            let memory = MemoryStore::default();
            lock(&memory, &holder);
            let message = refused(&memory);
            assert!(message.contains(&format!("process {} on {}", holder.pid, holder.host)), "{message}");
            assert!(message.contains("delete s3://b/p/lock/other to free it"), "{message}");
            assert_eq!(memory.keys(), ["p/lock/other"]);
        }
    }

    /// A change of the store at one moment of a claim.
    type Hook = fn(&MemoryStore);

    /// A store that lists in two pages: the objects before the locks, then the rest.
    #[derive(Debug)]
    struct Paged {
        memory: MemoryStore,
        before_listing: Hook,
        between_pages: Hook,
    }

    impl Store for Paged {
        fn put(&self, key: &str, bytes: &[u8]) -> StoreResult<()> {
            self.memory.put(key, bytes)
        }

        fn get(&self, key: &str, from: u64, len: u64, part: &mut dyn FnMut(usize, &[u8])) -> StoreResult<()> {
            self.memory.get(key, from, len, part)
        }

        fn delete(&self, key: &str) -> StoreResult<()> {
            self.memory.delete(key)
        }

        fn list(&self, prefix: &str) -> StoreResult<Vec<ObjectMeta>> {
            (self.before_listing)(&self.memory);
            let mut first = self.memory.list(prefix)?;
            first.retain(|one| one.key.as_str() < "p/lock/");
            (self.between_pages)(&self.memory);
            let mut rest = self.memory.list(prefix)?;
            rest.retain(|one| one.key.as_str() >= "p/lock/");
            Ok(first.into_iter().chain(rest).collect())
        }
    }

    fn take_paged(
        memory: &MemoryStore,
        before_listing: Hook,
        between_pages: Hook,
    ) -> Result<Vec<ObjectMeta>> {
        let store: Arc<dyn Store> = Arc::new(Paged { memory: memory.clone(), before_listing, between_pages });
        PrefixLock::acquire(&store, "p/", "s3://b/p").map(|(_, listed)| listed)
    }

    #[test]
    fn who_lost_its_lock_before_it_looked_does_not_get_the_prefix() {
        let delete_all = |memory: &MemoryStore| {
            memory.keys().iter().for_each(|key| memory.delete(key).unwrap());
        };
        let error = take_paged(&MemoryStore::default(), delete_all, |_| {}).unwrap_err();
        assert_eq!(error.tier_kind(), Some(TierKind::Locked));
        assert!(error.to_string().contains("another process deleted the lock"), "{error}");
    }

    #[test]
    fn what_a_holder_did_before_it_let_go_is_in_the_listing() {
        let memory = MemoryStore::default();
        memory.put("p/data/old", b"1").unwrap();
        lock(&memory, &Holder { host: "elsewhere".to_string(), ..(*Holder::this_process()).clone() });
        let finish = |memory: &MemoryStore| {
            memory.put("p/data/new", b"2").unwrap();
            memory.delete("p/data/old").unwrap();
            memory.delete("p/lock/other").unwrap();
        };
        let listed = take_paged(&memory, |_| {}, finish).unwrap();
        assert_eq!(listed[0].key, "p/data/new");
    }

    #[test]
    fn a_lock_that_cannot_be_read_is_a_live_one() {
        let memory = MemoryStore::default();
        memory.put("p/lock/other", b"{}").unwrap();
        assert!(refused(&memory).contains("cannot be read"));
    }

    #[test]
    fn of_many_at_once_at_most_one_gets_it() {
        for _ in 0..20 {
            let memory = MemoryStore::default();
            let outcomes: Vec<Result<PrefixLock>> = std::thread::scope(|scope| {
                let all: Vec<_> = (0..4).map(|_| scope.spawn(|| take(&memory))).collect();
                all.into_iter().map(|one| one.join().unwrap()).collect()
            });
            let claimed = outcomes.iter().filter(|outcome| outcome.is_ok()).count();
            assert!(claimed <= 1, "{claimed}");
            assert_eq!(memory.keys().len(), claimed);
        }
    }
}
