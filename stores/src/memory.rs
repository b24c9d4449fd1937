//! A store in memory for tests. It can fail all requests and ignore deletions.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::store::{ObjectMeta, Store, StoreError, StoreResult};

/// A store in memory; clones share the objects.
#[derive(Debug, Clone, Default)]
pub struct MemoryStore {
    state: Arc<Mutex<MemoryState>>,
}

#[derive(Debug, Default)]
struct MemoryState {
    objects: BTreeMap<String, Vec<u8>>,
    requests: u64,
    fails_from: Option<u64>,
    forgets_deletions: bool,
}

impl MemoryStore {
    /// Requests with this number (from 0) or a higher one fail; `None` lets all succeed.
    pub fn fail_from(&self, request: Option<u64>) {
        self.state().fails_from = request;
    }

    /// If true, deletions succeed without effect.
    pub fn forget_deletions(&self, forgets: bool) {
        self.state().forgets_deletions = forgets;
    }

    /// Number of requests so far.
    pub fn requests(&self) -> u64 {
        self.state().requests
    }

    /// Names of all objects.
    pub fn keys(&self) -> Vec<String> {
        self.state().objects.keys().cloned().collect()
    }

    /// An independent store with the same objects.
    pub fn copy(&self) -> MemoryStore {
        let copy = MemoryStore::default();
        copy.state().objects = self.state().objects.clone();
        copy
    }

    /// Changes the bytes of an object.
    pub fn change(&self, key: &str, change: impl FnOnce(&mut Vec<u8>)) {
        if let Some(bytes) = self.state().objects.get_mut(key) {
            change(bytes);
        }
    }

    fn state(&self) -> MutexGuard<'_, MemoryState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn request(&self) -> StoreResult<MutexGuard<'_, MemoryState>> {
        let mut state = self.state();
        state.requests += 1;
        match state.fails_from.is_some_and(|from| state.requests > from) {
            true => Err(StoreError { errno: libc::EIO, message: "HTTP 500".to_string() }),
            false => Ok(state),
        }
    }
}

impl Store for MemoryStore {
    fn put(&self, key: &str, bytes: &[u8]) -> StoreResult<()> {
        self.request()?.objects.insert(key.to_string(), bytes.to_vec());
        Ok(())
    }

    fn get(&self, key: &str, from: u64, len: u64, part: &mut dyn FnMut(usize, &[u8])) -> StoreResult<()> {
        let state = self.request()?;
        let missing = || StoreError { errno: libc::ENOENT, message: "HTTP 404 NoSuchKey".to_string() };
        let bytes = state.objects.get(key).ok_or_else(missing)?;
        let short = || StoreError { errno: libc::EIO, message: "HTTP 416".to_string() };
        part(0, bytes.get(from as usize..(from + len) as usize).ok_or_else(short)?);
        Ok(())
    }

    fn delete(&self, key: &str) -> StoreResult<()> {
        let mut state = self.request()?;
        if !state.forgets_deletions {
            state.objects.remove(key);
        }
        Ok(())
    }

    fn list(&self, prefix: &str) -> StoreResult<Vec<ObjectMeta>> {
        let state = self.request()?;
        let found = state.objects.iter().filter(|(key, _)| key.starts_with(prefix));
        Ok(found.map(|(key, bytes)| ObjectMeta { key: key.clone(), len: bytes.len() as u64 }).collect())
    }
}
