//! A path in an object store: object names below `PREFIX/job/host/rank-N`.
//!
//! Invariants:
//! - A process writes only below a prefix that it has claimed (see `prefix_lock`). Every open file keeps the lock
//!   alive, so the lock ends after the last request in flight. A later request could delete objects of the next owner.
//! - A superblock of up to [`OBJECT_BYTES`] is one object, written by one put: a crash never leaves a partial one. A
//!   longer superblock is several objects. It is then as safe as on a disk: the last committed superblock is in the
//!   other copy.
//! - The bucket must exist. A mistyped bucket name is an error and never creates a bucket.
//! - A removal deletes the superblocks first, so a partial removal leaves no valid state. It does not delete locks:
//!   other processes may create theirs at any moment, and each deletes its own (see `prefix_lock`).
//!
//! [`OBJECT_BYTES`]: crate::io::object::volume::OBJECT_BYTES
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::directory::{FILES, Owner, inherited};
use super::failures::unless_fenced;
use super::layout::PAGE;
use super::prefix_lock::{LOCKS, PrefixLock};
use super::storage::{FilePair, NamedFile, Storage, in_flight};
use crate::error::{Doing, Error, IoKind, Result};
use crate::io::engine::Engine;
use crate::io::object::volume::ObjectVolume;
use crate::io::object::{self, Address, RequestContext, Store, StoreResult};
use crate::io::options::Options as IoOptions;
use crate::sys::sync::Lock;
use crate::sys::threads;

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
    /// Claims the prefix of `owner` in a store. `None` if it holds no objects and `make` is false. Errors: `Locked` if
    /// another process holds the prefix, and errors of the store.
    pub fn claim(
        store: Arc<dyn Store>,
        address: &Address,
        owner: &Owner,
        make: bool,
    ) -> Result<Option<Bucket>> {
        let prefix = format!("{}{}/", address.prefix, below(owner));
        let name = name(&address.text(), owner);
        // Listed before the lock is put, because some servers create a missing bucket on a put.
        let listed = match store
            .list(&prefix)
            .map_err(|error| error.at(RequestContext { doing: Doing::Opening, path: &name }))
        {
            Err(error) if error.io_kind() == Some(IoKind::NotFound) && !make => return Ok(None),
            other => other?,
        };
        if !make && listed.iter().all(|one| is_lock(&one.key, &prefix)) {
            return Ok(None);
        }
        let (lock, listed) = PrefixLock::acquire(&store, &prefix, &name)?;
        let volume = ObjectVolume::new(store, name, prefix, &FILES, &listed);
        Ok(Some(Bucket { volume: Arc::new(volume), lock: Arc::new(lock) }))
    }

    /// The volume that holds the files.
    pub fn volume(&self) -> Arc<ObjectVolume> {
        Arc::clone(&self.volume)
    }

    fn failed(&self, doing: Doing) -> impl Fn(object::StoreError) -> Error {
        move |error| error.at(RequestContext { doing, path: self.volume.address() })
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
        let file = Arc::new(self.volume.file(file).keep_alive(Arc::clone(&self.lock) as _));
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
        let listed = self.volume.store().list(prefix).map_err(self.failed(Doing::Removing))?;
        let files = listed.into_iter().map(|one| one.key).filter(|key| !is_lock(key, prefix));
        let data = |key: &String| key.starts_with(&format!("{prefix}data/"));
        let (data, superblocks): (Vec<String>, Vec<String>) = files.partition(data);
        for part in [superblocks, data] {
            self.delete_all(&part).map_err(self.failed(Doing::Removing))?;
        }
        Ok(())
    }
}

fn is_lock(key: &str, prefix: &str) -> bool {
    key.strip_prefix(prefix).is_some_and(|rest| rest.starts_with(LOCKS))
}

/// A path's storage and engine.
type Opened = (Box<dyn Storage>, Engine);

/// Claims the prefix of `owner` at `address`. `None` if it holds no objects and `make` is false.
#[cfg(feature = "s3")]
pub(super) fn open(address: &str, owner: &Owner, io: IoOptions, make: bool) -> Result<Option<Opened>> {
    let address = Address::parse(address)?;
    open_in(object::connect(&address, io.io_timeout)?, &address, owner, io, make)
}

/// As `open`, in a store in memory.
#[cfg(test)]
pub(super) fn open_in_memory(
    store: &object::memory::MemoryStore,
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
    let Some(bucket) = Bucket::claim(store, address, owner, make)? else { return Ok(None) };
    let engine = Engine::open_volume(io, bucket.volume())?;
    Ok(Some((Box::new(bucket), engine)))
}

/// Removes the objects of an owner whose process has ended. A live owner is an error.
#[cfg(feature = "s3")]
pub(super) fn collect(address: &str, owner: &Owner) -> Result<()> {
    owner.check()?;
    let address = Address::parse(address)?;
    let store = object::connect(&address, None)?;
    match Bucket::claim(store, &address, owner, false)? {
        Some(bucket) => Arc::new(bucket).remove(),
        None => {
            let error =
                object::StoreError { errno: libc::ENOENT, message: "it contains no tier".to_string() };
            Err(error.at(RequestContext { doing: Doing::Opening, path: &name(&address.text(), owner) }))
        }
    }
}
