//! A path in an object store: object names below `PREFIX/job/host/rank-N`.
//!
//! Invariants:
//! - A process writes only below a prefix that it has claimed (see `claim`). Every open file keeps the claim alive, so
//!   the claim ends after the last request in flight. A later request could delete objects of the next owner.
//! - A superblock of up to [`OBJECT_BYTES`] is one object, written by one put: a crash never leaves a partial one. A
//!   longer superblock is several objects. It is then as safe as on a disk: the last committed superblock is in the
//!   other copy.
//! - The bucket must exist. A mistyped bucket name is an error and never creates a bucket.
//! - A removal deletes the superblocks first, so a partial removal leaves no valid state. It does not delete locks:
//!   other processes may create theirs at any moment, and each deletes its own (see `claim`).
//!
//! [`OBJECT_BYTES`]: crate::io::object::folder::OBJECT_BYTES
#![forbid(unsafe_code)]

use std::sync::{Arc, Mutex, PoisonError};

use super::claim::{Claim, LOCKS};
use super::directory::{FILES, Owner, parents};
use super::layout::PAGE;
use super::medium::{Medium, Pair, in_flight};
use crate::error::{Error, IoKind, Result};
use crate::io::file::File;
use crate::io::object::folder::Folder;
use crate::io::object::{self, Address, Answer, Spot, Store};

/// Number of concurrent deletions.
const DELETERS: usize = 8;
/// Address of the store in tests.
#[cfg(test)]
pub(super) const TEST_ADDRESS: &str = "s3://bucket/prefix";

/// A claimed prefix of an object store, with its files.
#[derive(Debug)]
pub struct Bucket {
    folder: Arc<Folder>,
    claim: Arc<Claim>,
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
        let listed =
            match store.list(&prefix).map_err(|refusal| refusal.at(Spot { doing: "opening", path: &name })) {
                Err(error) if error.io_kind() == Some(IoKind::NotFound) && !make => return Ok(None),
                other => other?,
            };
        if !make && listed.iter().all(|one| is_lock(&one.key, &prefix)) {
            return Ok(None);
        }
        let (claim, listed) = Claim::take(&store, &prefix, &name)?;
        let folder = Folder::new(store, name, prefix, &FILES, &listed);
        Ok(Some(Bucket { folder: Arc::new(folder), claim: Arc::new(claim) }))
    }

    /// The folder that holds the files.
    pub fn folder(&self) -> Arc<Folder> {
        Arc::clone(&self.folder)
    }

    fn failed(&self, doing: &'static str) -> impl Fn(object::Refusal) -> Error {
        move |refusal| refusal.at(Spot { doing, path: self.folder.address() })
    }

    fn delete_all(&self, keys: &[String]) -> Answer<()> {
        let (store, next, outcome) = (self.folder.store(), Mutex::new(keys.iter()), Mutex::new(Ok(())));
        let take = || next.lock().unwrap_or_else(PoisonError::into_inner).next();
        std::thread::scope(|scope| {
            for _ in 0..DELETERS.min(keys.len()) {
                scope.spawn(|| {
                    while let Some(key) = take() {
                        if let Err(refusal) = store.delete(key) {
                            *outcome.lock().unwrap_or_else(PoisonError::into_inner) = Err(refusal);
                            return;
                        }
                    }
                });
            }
        });
        outcome.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Medium for Bucket {
    fn name(&self) -> String {
        self.folder.address().to_string()
    }

    fn open(&self, file: &str) -> Result<Pair> {
        let file = Arc::new(self.folder.file(file).keeping(Arc::clone(&self.claim) as _));
        Ok(Pair { reader: Arc::clone(&file), writer: file })
    }

    fn len(&self, file: &str) -> Result<Option<u64>> {
        // The last block of a chunk is stored without padding but occupies a whole page.
        Ok(self.folder.len(file).map(|end| end.next_multiple_of(PAGE)))
    }

    /// Does nothing: an object that the store has accepted is durable, and so is its name.
    fn sync(&self) -> Result<()> {
        Ok(())
    }

    fn check(&self, _: &[(&'static str, &File)]) -> Result<()> {
        self.claim.check(self.folder.address())
    }

    fn remove(self: Box<Self>) -> Result<()> {
        if !self.claim.is_own() {
            return Err(parents(self.folder.address()));
        }
        if Arc::strong_count(&self.claim) > 1 {
            return Err(in_flight(self.folder.address()));
        }
        let prefix = self.folder.prefix();
        let listed = self.folder.store().list(prefix).map_err(self.failed("removing"))?;
        let files = listed.into_iter().map(|one| one.key).filter(|key| !is_lock(key, prefix));
        let data = |key: &String| key.starts_with(&format!("{prefix}data/"));
        let (data, superblocks): (Vec<String>, Vec<String>) = files.partition(data);
        for part in [superblocks, data] {
            self.delete_all(&part).map_err(self.failed("removing"))?;
        }
        Ok(())
    }
}

fn is_lock(key: &str, prefix: &str) -> bool {
    key.strip_prefix(prefix).is_some_and(|rest| rest.starts_with(LOCKS))
}

/// Removes the objects of an owner whose process has ended. A live owner is an error.
pub(super) fn collect(address: &str, owner: &Owner) -> Result<()> {
    owner.check()?;
    let address = Address::parse(address)?;
    let store = object::connect(&address, None)?;
    match Bucket::claim(store, &address, owner, false)? {
        Some(bucket) => Box::new(bucket).remove(),
        None => {
            let refusal = object::Refusal { errno: libc::ENOENT, words: "nothing lies there".to_string() };
            Err(refusal.at(Spot { doing: "opening", path: &name(&address.text(), owner) }))
        }
    }
}
