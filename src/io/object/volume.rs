//! The files of one prefix of a store; executes an engine's pieces on them.
//!
//! Invariants:
//! - A write creates one new object (see [`index`](super::index)). It takes effect once the store has acknowledged the
//!   object; only then are the objects deleted that it makes stale. A crash in between leaves stale objects, which the
//!   next open recognises by their numbers.
//! - A read returns every byte up to the first missing one, as at the end of a file.
//! - The caller that opens a volume holds the lock on its prefix. The index therefore never queries the store again.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use super::super::backend::{Action, Completion, Piece};
use super::super::file::File;
use super::index::{Index, Object};
use super::{ObjectMeta, Store, StoreError, StoreResult};
use crate::log::{self, Level};
use crate::sys::span::Span;
use crate::sys::sync::Lock;

/// Default bytes of an object: large enough that the request overhead is a small part of the transfer time.
pub const OBJECT_BYTES: u64 = 8 << 20;
/// Default number of requests in flight, and the largest.
pub const REQUESTS: u32 = 8;
pub(in super::super) const MAX_REQUESTS: u32 = 64;

/// Files of a store.
#[derive(Debug)]
pub struct ObjectVolume {
    store: Arc<dyn Store>,
    /// Used in messages and as the prefix of file names.
    address: String,
    prefix: String,
    files: Lock<BTreeMap<String, Index>>,
    next: AtomicU64,
}

impl ObjectVolume {
    /// The files `names` of `prefix`, which ends with a slash. `listed` is a listing of the prefix. Deletes stale
    /// objects.
    pub fn new(
        store: Arc<dyn Store>,
        address: String,
        prefix: String,
        names: &[&str],
        listed: &[ObjectMeta],
    ) -> ObjectVolume {
        let mut objects: BTreeMap<String, Vec<Object>> = BTreeMap::new();
        for ObjectMeta { key, len } in listed {
            let file = key.strip_prefix(&prefix).and_then(|rest| rest.split_once('/'));
            let Some((file, object)) = file.filter(|(file, _)| names.contains(file)) else { continue };
            objects.entry(file.to_string()).or_default().extend(Object::parse(object, *len));
        }
        let newest = objects.values().flatten().map(|object| object.number + 1).max().unwrap_or(0);
        // The next number exceeds those of all requests by earlier holders of the prefix, including requests that the
        // store never answered.
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_micros();
        let next = AtomicU64::new(newest.max(now as u64));
        let volume = ObjectVolume { store, address, prefix, files: Lock::default(), next };
        for (file, objects) in objects {
            let (index, stale) = Index::of(objects);
            volume.files.lock().insert(file.clone(), index);
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

    /// A file, whether it has objects or not.
    pub fn file(&self, name: &str) -> File {
        File::named(&format!("{}/{name}", self.address), 0, None)
    }

    /// The end of a file's last object, in bytes; `None` if the file has no objects.
    pub fn len(&self, name: &str) -> Option<u64> {
        self.files.lock().get(name).map(Index::end).filter(|end| *end > 0)
    }

    /// Executes a piece. A panic becomes an error of the piece; the worker and the engine continue.
    pub(in super::super) fn serve(&self, piece: &Piece) -> Completion {
        let served = catch_unwind(AssertUnwindSafe(|| self.serve_piece(piece)));
        let bug = || {
            Err(StoreError {
                errno: libc::EIO,
                message: "internal error in spillway, please report it".to_string(),
            })
        };
        match served.unwrap_or_else(|_| bug()) {
            Ok(moved) => Completion::of(piece.token, moved as i32),
            Err(StoreError { errno, message }) => {
                Completion { token: piece.token, result: -errno.max(1), message: Some(message.into()) }
            }
        }
    }

    fn serve_piece(&self, piece: &Piece) -> StoreResult<usize> {
        let file = piece.file.name().strip_prefix(&self.address).and_then(|rest| rest.strip_prefix('/'));
        let foreign = || StoreError {
            errno: libc::EBADF,
            message: "the file does not belong to this object volume".to_string(),
        };
        let file = file.ok_or_else(foreign)?;
        match piece.action {
            Action::Read => self.read(file, piece.offset, piece.span),
            Action::Write => self.write(file, piece.offset, piece.span),
            // The store acknowledges only objects that are durable and visible to every reader.
            Action::Sync | Action::Allocate { .. } => Ok(0),
        }
    }

    fn write(&self, file: &str, start: u64, span: Span) -> StoreResult<usize> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let object = Object { start, len: span.len() as u64, number };
        // A copy, because a request may continue after its timeout, when the memory belongs to the caller again.
        self.store.put(&self.key(file, &object), &span.to_vec())?;
        let stale = self.files.lock().entry(file.to_string()).or_default().insert(object);
        self.delete_stale(file, &stale);
        Ok(span.len())
    }

    fn read(&self, file: &str, offset: u64, span: Span) -> StoreResult<usize> {
        let parts = self.files.lock().get(file).map(|index| index.cover(offset, span.len() as u64));
        let mut done = 0;
        for part in parts.unwrap_or_default() {
            let into = span.part(done, part.len as usize);
            self.store.get(&self.key(file, &part.object), part.from, part.len, &mut |at, bytes| {
                into.part(at, bytes.len()).write(bytes);
            })?;
            done += part.len as usize;
        }
        Ok(done)
    }

    /// Deletes stale objects. A failed deletion only costs space until the next open.
    fn delete_stale(&self, file: &str, stale: &[Object]) {
        for object in stale {
            if let Err(error) = self.store.delete(&self.key(file, object)) {
                let (address, name) = (&self.address, object.name());
                let message =
                    format!("cannot delete the stale object {address}/{file}/{name}: {}", error.message);
                log::write(Level::Info, &message);
            }
        }
    }

    fn key(&self, file: &str, object: &Object) -> String {
        format!("{}{file}/{}", self.prefix, object.name())
    }
}
