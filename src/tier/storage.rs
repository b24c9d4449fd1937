//! Files of a path: what a storage must offer, the calls on it that are no transfers, and their errors. `directory` and
//! `bucket` are the storages that last; memory and the simulated disk are here.
//!
//! Invariants:
//! - Every open file keeps the lock on its directory or prefix, and an operation in flight keeps its file. The lock is
//!   therefore released only after the last operation has ended, even if the tier was closed before.
//! - A caller waits for a call at most for the I/O timeout. The call itself continues on its own thread, and keeps the
//!   storage, its files and their lock until it returns.
//! - Until then the path refuses further calls at once.
//! - The files of a path are closed by such a call, too: a file system may not respond to a close.
//! - All of these calls are made by [`PathFiles`], but two: an open, which has no storage yet, and the read of the
//!   owner's record. Both have the same limit. Transfers, syncs of files and allocations have the timeout of the engine.
#![forbid(unsafe_code)]

use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use std::{fs, io};

use crate::error::{Doing, Error, IoError, IoKind, Result, TierError, TierKind};
use crate::io::file::File;
use crate::log::{self, Level};
use crate::sys::file::{self, Access};
use crate::sys::fork::OpeningProcess;
use crate::sys::time_limit::{self, Answer, Call, NoAnswer};
use crate::sys::{node_memory, private_files};

/// File names of the two superblock copies.
pub(super) const SUPERBLOCKS: [&str; 2] = ["superblock.0", "superblock.1"];
/// File name of the data.
pub(super) const DATA: &str = "data";
/// Files of a storage, superblocks first: the order of removal.
pub const FILES: [&str; 3] = [SUPERBLOCKS[0], SUPERBLOCKS[1], DATA];
/// File name of the lock.
pub(super) const LOCK: &str = "lock";

/// One file, opened for reading and for writing.
#[derive(Debug, Clone)]
pub struct FilePair {
    /// Handle for reads.
    pub reader: Arc<File>,
    /// Handle for writes.
    pub writer: Arc<File>,
}

/// A file, and its name in [`FILES`].
pub type NamedFile = (&'static str, Arc<File>);

/// Storage for the files named in [`FILES`]. [`PathFiles`] calls it, on threads of their own, because a file system may
/// not respond. Only `name`, `key`, `lasts`, `finishes_removal` and `removal_has_limits` make no system call.
pub trait Storage: Send + Sync + Debug {
    /// Name of the path. It appears in messages and identifies the path at the next open.
    fn name(&self) -> String;

    /// Identifies the path among all paths of this process.
    fn key(&self) -> PathBuf {
        PathBuf::from(self.name())
    }

    /// False if the data is lost when the process ends.
    fn lasts(&self) -> bool {
        true
    }

    /// Opens a file, and creates it if it does not exist.
    fn open(&self, file: &str) -> Result<FilePair>;

    /// Length of a file in bytes; `None` if it does not exist.
    fn len(&self, file: &str) -> Result<Option<u64>>;

    /// Syncs the directory entries of the files.
    fn sync(&self) -> Result<()>;

    /// Fails if the names of the open files no longer stand for these files, or if the lock was lost.
    fn check(&self, _files: &[NamedFile]) -> Result<()> {
        Ok(())
    }

    /// Fails with `Fenced` if another process claimed the files since they were opened. An error of the device is
    /// returned as such.
    fn check_owner(&self) -> Result<()> {
        Ok(())
    }

    /// Fails with `Fenced` if another process may own the files by now. Called before each write of data, and fast
    /// unless a lease has to be renewed.
    fn check_lease(&self) -> Result<()> {
        Ok(())
    }

    /// Fails with `Fenced` if another process claimed the files since they were opened. Fails if one of the open files
    /// now has another name, so that a removal would leave its data.
    fn check_removal(&self, _files: &[NamedFile]) -> Result<()> {
        Ok(())
    }

    /// True if an interrupted removal is completed before the storage is used again.
    fn finishes_removal(&self) -> bool {
        false
    }

    /// True if each request of a removal has its own time limit. The removal as a whole has none then.
    fn removal_has_limits(&self) -> bool {
        false
    }

    /// Removes the files, superblocks first, and releases the lock. `Busy` if an operation on a file is in flight.
    fn remove(self: Arc<Self>) -> Result<()>;
}

/// `Busy` error of a removal while an operation may still write to the files.
pub(super) fn in_flight(name: &str) -> Error {
    Error::Busy(format!(
        "{name}: an operation is still in flight, so nothing was removed; remove it with collect \
         after the operation ends"
    ))
}

/// Error for a removal in a forked child, which removes nothing.
pub(super) fn inherited(path: &str) -> Error {
    Error::Unsupported(format!("{path} is in use by the parent of this process; nothing was removed"))
}

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

/// Error of a caller whose timeout expired while the transfer is in flight.
pub(super) fn timed_out() -> Error {
    IoError::wait_timeout("the tier's transfer is still in flight")
}

/// Result of `work` on the files below `path`, or a `Deadline` error after `io_timeout`. A call that did not
/// return continues in its thread, and keeps the directory's lock until it returns.
pub(super) fn within_timeout<T: Send + 'static>(
    io_timeout: Option<Duration>,
    doing: Doing,
    path: &Path,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    answer(time_limit::run_within(io_timeout, path, work), io_timeout, doing, path)
}

/// The result of a call, or the error that says why there is none.
pub(super) fn answer<T>(
    found: Answer<Result<T>>,
    io_timeout: Option<Duration>,
    doing: Doing,
    path: &Path,
) -> Result<T> {
    let detail = match found.map_err(|error| Error::system("starting a thread", &error))? {
        Ok(result) => return result,
        Err(NoAnswer::TooLong) => format!(
            "the file system did not respond for {:?}; the call is still in flight and keeps the lock until it returns",
            io_timeout.unwrap_or_default()
        ),
        Err(NoAnswer::EarlierCall) => format!("{EARLIER} and keeps the lock; try again after it returns"),
    };
    Err(no_response(IoKind::Deadline, doing, path, detail))
}

/// Why a path refuses a call.
const EARLIER: &str = "an earlier call, to which the file system did not respond, is still in flight";

/// Error of a path that does not respond.
fn no_response(kind: IoKind, doing: Doing, path: &Path, detail: String) -> Error {
    IoError::about(kind, doing, path.to_string_lossy()).because(detail).into()
}

/// Error of a directory that a live process holds.
pub(super) fn locked(path: &Path, message: &str) -> Error {
    TierError::at(TierKind::Locked, path.to_string_lossy(), message)
}

/// Error of a system call on a directory or a lock. A file that belongs to another user is `Foreign`.
pub(super) fn failed(doing: Doing, path: &Path, error: io::Error, detail: &str) -> Error {
    if private_files::is_refusal(&error) {
        return TierError::at(TierKind::Foreign, path.to_string_lossy(), error.to_string());
    }
    let failure = IoError::of(&error, doing, path.to_string_lossy());
    if failure.errno == 0 { failure.into() } else { failure.because(detail).into() }
}

/// Error of a tier that another process claimed.
pub(super) fn fenced(path: &str, other: &str) -> Error {
    let message = format!(
        "{other} claimed it while this process had it open; nothing was committed; close this tier, end one of the two \
         processes, and open the tier again"
    );
    TierError::at(TierKind::Fenced, path, message)
}

/// The outcome of a check of the owner before a removal: only another owner prevents it. An error of the device is that
/// of the calls which follow, and a damaged record does not keep the files.
pub(super) fn unless_fenced(checked: Result<()>) -> Result<()> {
    checked.or_else(|error| if error.is_fenced() { Err(error) } else { Ok(()) })
}

/// The error of a path, with the reason why its data could not be moved to another path.
pub(super) fn with_reason(error: &Error, reason: &Error) -> Error {
    error.clone().context(format_args!("the data on this path could not be moved to another: {reason}"))
}

/// Files in memory of this process.
#[derive(Debug)]
pub struct MemoryStorage {
    files: Vec<(&'static str, fs::File)>,
}

impl MemoryStorage {
    /// Creates empty files, whose pages come from `node` while it has some.
    pub fn new(node: Option<u32>) -> Result<MemoryStorage> {
        let make = |name: &'static str| file::in_memory().map(|file| (name, file));
        let files = FILES.into_iter().map(make).collect::<std::io::Result<Vec<_>>>();
        let files = files.map_err(|error| Error::system("creating a file in memory", &error))?;
        if let Some(node) = node
            && let Err(error) = files.iter().try_for_each(|(_, file)| node_memory::prefer(file, node))
        {
            let message = format!("a memory path takes its pages from any node, not from {node}: {error}");
            log::write(Level::Warn, &message);
        }
        Ok(MemoryStorage { files })
    }

    fn file(&self, name: &str) -> Option<&fs::File> {
        self.files.iter().find(|(known, _)| *known == name).map(|(_, file)| file)
    }
}

impl Storage for MemoryStorage {
    fn name(&self) -> String {
        "memory".to_string()
    }

    fn lasts(&self) -> bool {
        false
    }

    fn open(&self, file: &str) -> Result<FilePair> {
        use std::os::fd::AsRawFd;
        let fd = self.file(file).map_or(-1, |file| file.as_raw_fd());
        let name = format!("{}/{file}", self.name());
        let open = |access| File::of_descriptor(fd, name.clone(), access).map(Arc::new);
        Ok(FilePair { reader: open(Access::Read)?, writer: open(Access::Write { mode: 0o600 })? })
    }

    fn len(&self, file: &str) -> Result<Option<u64>> {
        let found = self.file(file).map(|file| file.metadata());
        let found = found
            .transpose()
            .map_err(|error| Error::system("reading the size of a file in memory", &error))?;
        Ok(found.map(|found| found.len()))
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }

    fn remove(self: Arc<Self>) -> Result<()> {
        Ok(())
    }
}
