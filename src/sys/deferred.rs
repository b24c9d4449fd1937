//! A value that is created at its first use.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::sync::Lock;
use crate::error::Result;

/// A value that is created at its first use. Uses of one value wait for its creation.
#[derive(Debug)]
pub struct Deferred<T>(Lock<Option<Arc<T>>>);

impl<T> Deferred<T> {
    /// Not created yet.
    pub fn new() -> Deferred<T> {
        Deferred(Lock::new(None))
    }

    /// The value. If its creation fails, the next use tries again.
    pub fn get(&self, create: impl FnOnce() -> Result<T>) -> Result<Arc<T>> {
        let mut created = self.0.lock();
        match &*created {
            Some(created) => Ok(Arc::clone(created)),
            None => Ok(Arc::clone(created.insert(Arc::new(create()?)))),
        }
    }

    /// Takes the value out; the next use creates another one.
    pub fn take(&self) -> Option<Arc<T>> {
        self.0.lock().take()
    }
}

impl<T> Default for Deferred<T> {
    fn default() -> Deferred<T> {
        Deferred::new()
    }
}
