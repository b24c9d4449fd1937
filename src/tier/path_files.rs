//! The calls on a path that are no transfers: names, lengths, directories, free space, removals, and the close of the
//! files.
//!
//! Invariants:
//! - A caller waits for such a call at most for the I/O timeout. The call itself continues on its own thread, and keeps
//!   the storage, its files and their lock until it returns.
//! - Until then the path refuses further calls at once.
//! - The files of a path are closed by such a call, too: a file system may not respond to a close.
//! - All of these calls are made here, but two: an open, which has no storage yet, and the read of the owner's record. Both
//!   have the same limit (see `time_limits`). Transfers, syncs of files and allocations have the timeout of the engine.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::storage::{NamedFile, Storage, in_flight};
use super::time_limits::{EARLIER, answer, no_response, within_timeout};
use crate::error::{Doing, Error, IoKind, Result};
use crate::log::{self, Level};
use crate::sys::process::OpeningProcess;
use crate::sys::time_limit::{self, Call, NoAnswer};

type Prepared<T> = Box<dyn FnOnce() -> Result<T> + Send>;

/// The storage of a path, and its open files.
#[derive(Debug)]
pub(super) struct PathFiles {
    /// `None` after the close.
    storage: Option<Arc<dyn Storage>>,
    files: Vec<NamedFile>,
    name: String,
    key: PathBuf,
    lasts: bool,
    io_timeout: Option<Duration>,
    opener: OpeningProcess,
}

impl PathFiles {
    /// `files` are all open files of the storage.
    pub(super) fn new(
        storage: Arc<dyn Storage>,
        files: Vec<NamedFile>,
        io_timeout: Option<Duration>,
    ) -> PathFiles {
        let (name, key, lasts) = (storage.name(), storage.key(), storage.lasts());
        // Calls on memory need no thread.
        let io_timeout = io_timeout.filter(|_| lasts);
        let opener = OpeningProcess::current();
        PathFiles { storage: Some(storage), files, name, key, lasts, io_timeout, opener }
    }

    /// The storage, for its calls that bound themselves.
    pub(super) fn storage(&self) -> Result<&Arc<dyn Storage>> {
        self.storage.as_ref().ok_or_else(|| Error::invalid("path", format!("{} is closed", self.name)))
    }

    /// Name of the path, for messages.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// False if the data is lost when the process ends.
    pub(super) fn lasts(&self) -> bool {
        self.lasts
    }

    /// See [`Storage::finishes_removal`].
    pub(super) fn finishes_removal(&self) -> bool {
        self.storage.as_ref().is_some_and(|storage| storage.finishes_removal())
    }

    /// Fails with `PathFailed` while a call has not returned within the I/O timeout.
    pub(super) fn responds(&self, doing: Doing) -> Result<()> {
        match self.io_timeout.is_some() && time_limit::is_abandoned(&self.key) {
            false => Ok(()),
            true => Err(no_response(IoKind::PathFailed, doing, &self.key, EARLIER.to_string())),
        }
    }

    /// Result of a call on the storage, or a `Deadline` error.
    pub(super) fn call<T: Send + 'static>(
        &self,
        doing: Doing,
        work: impl FnOnce(&dyn Storage, &[NamedFile]) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let work = self.prepared(work)?;
        within_timeout(self.io_timeout, doing, &self.key, work)
    }

    /// Results of the same call on several paths, which share one timeout.
    pub(super) fn call_all<T: Send + 'static>(
        doing: Doing,
        all: &[&PathFiles],
        work: impl Fn(&dyn Storage, &[NamedFile]) -> Result<T> + Clone + Send + 'static,
    ) -> Vec<Result<T>> {
        let limit = all.iter().filter_map(|files| files.io_timeout).max();
        let calls = all.iter().map(|files| {
            let work = files.prepared(work.clone());
            Call::new(&files.key, move || work?())
        });
        let answers = time_limit::run_all_within(limit, calls.collect());
        answers.into_iter().zip(all).map(|(found, files)| answer(found, limit, doing, &files.key)).collect()
    }

    fn prepared<T: 'static>(
        &self,
        work: impl FnOnce(&dyn Storage, &[NamedFile]) -> Result<T> + Send + 'static,
    ) -> Result<Prepared<T>> {
        let (storage, files) = (Arc::clone(self.storage()?), self.files.clone());
        Ok(Box::new(move || work(&*storage, &files)))
    }

    /// The call that closes the files, once it is run. `with` is dropped first, in that call.
    fn closing(&mut self, with: impl Send + 'static) -> Call<()> {
        let (storage, files) = (self.storage.take(), std::mem::take(&mut self.files));
        Call::cleanup(&self.key, move || drop((with, files, storage)))
    }

    /// Closes the files of several paths, each with what uses them, at the same time and for at most `limit`. Returns
    /// the first error; a path that was known not to respond is none.
    pub(super) fn close_all<T: Send + 'static>(
        limit: Option<Duration>,
        all: Vec<(PathFiles, T)>,
    ) -> Result<()> {
        let limit = all
            .iter()
            .filter_map(|(files, _)| files.io_timeout)
            .max()
            .map(|own| limit.map_or(own, |limit| own.min(limit)));
        let (keys, calls): (Vec<PathBuf>, Vec<Call<()>>) =
            all.into_iter().map(|(mut files, with)| (files.key.clone(), files.closing(with))).unzip();
        let answers = time_limit::run_all_within(limit, calls);
        answers.into_iter().zip(keys).try_for_each(|(found, key)| match found {
            Ok(Err(NoAnswer::EarlierCall)) => Ok(()),
            found => answer(found.map(|found| found.map(Ok)), limit, Doing::Closing, &key),
        })
    }

    /// Removes the files of several paths, each with what uses them, at the same time. Returns the first error, after
    /// all were tried.
    pub(super) fn remove_all<T: Send + 'static>(all: Vec<(PathFiles, T)>) -> Result<()> {
        let has_limits =
            |files: &PathFiles| files.storage.as_ref().is_none_or(|storage| storage.removal_has_limits());
        let (own, ours): (Vec<_>, Vec<_>) = all.into_iter().partition(|(files, _)| has_limits(files));
        let limit = ours.iter().filter_map(|(files, _)| files.io_timeout).max();
        let removed = remove_within(limit, ours);
        removed.and(remove_within(None, own))
    }
}

fn remove_within<T: Send + 'static>(limit: Option<Duration>, all: Vec<(PathFiles, T)>) -> Result<()> {
    let removal = |(mut files, with): (PathFiles, T)| {
        let (key, name) = (files.key.clone(), files.name.clone());
        let (storage, named) = (files.storage.take(), std::mem::take(&mut files.files));
        let removal = move || {
            let storage = storage.ok_or_else(|| in_flight(&name))?;
            storage.check_removal(&named)?;
            drop((with, named));
            storage.remove()
        };
        (key.clone(), Call::cleanup(&key, removal))
    };
    let (keys, calls): (Vec<PathBuf>, Vec<Call<Result<()>>>) = all.into_iter().map(removal).unzip();
    let answers = time_limit::run_all_within(limit, calls);
    let outcomes =
        answers.into_iter().zip(keys).map(|(found, key)| answer(found, limit, Doing::Removing, &key));
    outcomes.fold(Ok(()), Result::and)
}

impl Drop for PathFiles {
    fn drop(&mut self) {
        // A forked child has none of the threads, and its copies of the files hold no lock.
        if self.storage.is_none() || !self.opener.is_current() {
            return;
        }
        let closing = self.closing(());
        let closed = time_limit::run_all_within(self.io_timeout, vec![closing]).pop();
        if let Some(Ok(Err(NoAnswer::TooLong))) = closed {
            log::write(Level::Warn, &format!("closing {}: the file system does not respond", self.name));
        }
    }
}
