//! The files of one prefix of a store.
//!
//! Invariants:
//! - A write creates one new object (see `index`). It takes effect once the store has acknowledged the
//!   object; only then are the objects deleted that it makes stale. A crash in between leaves stale objects, which the
//!   next open recognises by their numbers.
//! - A read returns every byte up to the first missing one, as at the end of a file.
//! - The caller that opens a volume holds the lock on its prefix. The index therefore never queries the store again.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use crate::index::{Index, Object};
use crate::store::{ObjectMeta, Store, StoreResult};

/// Default bytes of an object: large enough that the request overhead is a small part of the transfer time.
pub const OBJECT_BYTES: u64 = 8 << 20;
/// Default number of requests in flight.
pub const REQUESTS: u32 = 8;
/// Most requests in flight.
pub const MAX_REQUESTS: u32 = 64;

/// Files of a store.
#[derive(Debug)]
pub struct ObjectVolume {
    store: Arc<dyn Store>,
    /// Used in messages and as the prefix of file names.
    address: String,
    prefix: String,
    files: Mutex<BTreeMap<String, Index>>,
    next: AtomicU64,
    report: fn(&str),
}

impl ObjectVolume {
    /// The files `names` of `prefix`, which ends with a slash. `listed` is a listing of the prefix. Deletes stale
    /// objects; `report` receives a sentence about each that stays.
    pub fn new(
        store: Arc<dyn Store>,
        address: String,
        prefix: String,
        names: &[&str],
        listed: &[ObjectMeta],
        report: fn(&str),
    ) -> ObjectVolume {
        let mut objects: BTreeMap<String, Vec<Object>> = BTreeMap::new();
        for ObjectMeta { key, len } in listed {
            let file = key.strip_prefix(&prefix).and_then(|rest| rest.split_once('/'));
            let Some((file, object)) = file.filter(|(file, _)| names.contains(file)) else { continue };
            objects.entry(file.to_string()).or_default().extend(Object::parse(object, *len));
        }
        let newest = objects.values().flatten().map(|object| object.number + 1).max().unwrap_or(0);
        // The next number exceeds those of all requests by earlier holders of the prefix, including requests that the
        // store never answered, unless the clock was set back in between.
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_micros();
        let next = AtomicU64::new(newest.max(now as u64));
        let volume = ObjectVolume { store, address, prefix, files: Mutex::default(), next, report };
        for (file, objects) in objects {
            let (index, stale) = Index::of(objects);
            volume.files().insert(file.clone(), index);
            volume.delete_stale(&file, &stale);
        }
        volume
    }

    /// The underlying store.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// The address of the volume, for messages.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The prefix of the object names.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// The end of a file's last object, in bytes; `None` if the file has no objects.
    pub fn len(&self, name: &str) -> Option<u64> {
        self.files().get(name).map(Index::end).filter(|end| *end > 0)
    }

    /// Writes bytes of a file, from `start` on; returns their number.
    pub fn write(&self, file: &str, start: u64, bytes: Vec<u8>) -> StoreResult<usize> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let object = Object { start, len: bytes.len() as u64, number };
        self.store.put(&self.key(file, &object), &bytes)?;
        let stale = self.files().entry(file.to_string()).or_default().insert(object);
        self.delete_stale(file, &stale);
        Ok(bytes.len())
    }

    /// Reads up to `len` bytes of a file, from `offset` on, to the first missing one; returns their number. `into`
    /// receives each part with its offset among them. A retry repeats parts.
    pub fn read(
        &self,
        file: &str,
        offset: u64,
        len: u64,
        into: &mut dyn FnMut(usize, &[u8]),
    ) -> StoreResult<usize> {
        let parts = self.files().get(file).map(|index| index.cover(offset, len));
        let mut done = 0;
        for part in parts.unwrap_or_default() {
            self.store.get(&self.key(file, &part.object), part.from, part.len, &mut |at, bytes| {
                into(done + at, bytes);
            })?;
            done += part.len as usize;
        }
        Ok(done)
    }

    fn files(&self) -> MutexGuard<'_, BTreeMap<String, Index>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Deletes stale objects. A failed deletion only costs space until the next open.
    fn delete_stale(&self, file: &str, stale: &[Object]) {
        for object in stale {
            if let Err(error) = self.store.delete(&self.key(file, object)) {
                let (address, name) = (&self.address, object.name());
                let message =
                    format!("cannot delete the stale object {address}/{file}/{name}: {}", error.message);
                (self.report)(&message);
            }
        }
    }

    fn key(&self, file: &str, object: &Object) -> String {
        format!("{}{file}/{}", self.prefix, object.name())
    }
}
