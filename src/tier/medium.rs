//! Storage of a path's files: a directory, memory, or the simulation. `bucket` has the object store.
//!
//! Invariant: every open file keeps the lock on its directory or prefix, and an operation in flight keeps its file. The
//! lock is therefore released only after the last operation has ended, even if the tier was closed before.
#![forbid(unsafe_code)]

use std::fmt::Debug;
use std::fs;
use std::path::Path as FilePath;
use std::sync::Arc;
use std::time::Duration;

use super::directory::{Directory, FILES};
use crate::error::{Error, IoError, IoKind, Result};
use crate::io::file::File;
use crate::sys::answer;
use crate::sys::file::{self, Access};
use crate::sys::own::Want;

/// One file, opened for reading and for writing.
#[derive(Debug, Clone)]
pub struct Pair {
    /// Handle for reads.
    pub reader: Arc<File>,
    /// Handle for writes.
    pub writer: Arc<File>,
}

/// Storage for the files named in [`FILES`].
pub trait Medium: Send + Sync + Debug {
    /// Name of the path. It appears in messages and identifies the path at the next open.
    fn name(&self) -> String;

    /// False if the data is lost when the process ends.
    fn lasts(&self) -> bool {
        true
    }

    /// Opens a file, and creates it if it does not exist.
    fn open(&self, file: &str) -> Result<Pair>;

    /// Length of a file in bytes; `None` if it does not exist.
    fn len(&self, file: &str) -> Result<Option<u64>>;

    /// Syncs the directory entries of the files.
    fn sync(&self) -> Result<()>;

    /// Fails if the names of the open files no longer stand for these files, or if the lock was lost.
    fn check(&self, _files: &[(&'static str, &File)]) -> Result<()> {
        Ok(())
    }

    /// True if an interrupted removal is completed before the storage is used again.
    fn finishes_removal(&self) -> bool {
        false
    }

    /// Removes the files, superblocks first, and releases the lock. `Busy` if an operation on a file is in flight.
    fn remove(self: Box<Self>) -> Result<()>;
}

/// A directory of a mounted file system.
#[derive(Debug)]
pub struct Mounted {
    directory: Arc<Directory>,
    direct: bool,
    stall: Option<Duration>,
}

impl Mounted {
    /// Storage in this directory. `direct`: bypass the page cache. `stall`: longest time to wait for a sync of the
    /// directory.
    pub fn new(directory: Directory, direct: bool, stall: Option<Duration>) -> Mounted {
        Mounted { directory: Arc::new(directory), direct, stall }
    }

    fn open_for(&self, name: &str, path: &FilePath, access: Access) -> Result<Arc<File>> {
        let write = access != Access::Read;
        let want = |direct| Want { read: !write, write, make: write, direct };
        let file =
            File::opened_by(path, access, self.direct, |direct| self.directory.open(name, want(direct)))?;
        Ok(Arc::new(file.keeping(Arc::clone(&self.directory) as _)))
    }
}

/// Result of `work` on the files below `path`, or a `Deadline` error after `stall`. A call without an answer continues
/// in its thread, and keeps the directory's lock until it returns.
pub(super) fn answered<T: Send + 'static>(
    stall: Option<Duration>,
    doing: &'static str,
    path: &FilePath,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let found = answer::within(stall, path, work);
    match found.map_err(|error| Error::system("starting a thread", &error))? {
        Some(result) => result,
        None => Err(IoError {
            kind: IoKind::Deadline,
            doing,
            path: path.to_string_lossy().into_owned(),
            offset: 0,
            bytes: 0,
            errno: 0,
            detail: format!(
                "the file system gave no answer for {:.1} s; the call goes on, and keeps the lock until it returns",
                stall.unwrap_or_default().as_secs_f64()
            ),
        }
        .into()),
    }
}

/// `Busy` error of a removal while an operation may still write to the files.
pub(super) fn in_flight(name: &str) -> Error {
    Error::Busy(format!(
        "{name}: an operation is still in flight; nothing was removed, and the lock is kept until the operation ends; \
         collect it then"
    ))
}

impl Medium for Mounted {
    fn name(&self) -> String {
        self.directory.path().to_string_lossy().into_owned()
    }

    fn open(&self, file: &str) -> Result<Pair> {
        let path = self.directory.file(file);
        let writer = self.open_for(file, &path, Access::Write { mode: 0o600 })?;
        Ok(Pair { reader: self.open_for(file, &path, Access::Read)?, writer })
    }

    fn len(&self, file: &str) -> Result<Option<u64>> {
        self.directory.len(file)
    }

    fn check(&self, files: &[(&'static str, &File)]) -> Result<()> {
        let files: Vec<_> = files.iter().map(|(name, file)| (*name, file.identity())).collect();
        self.directory.check(&files)
    }

    fn finishes_removal(&self) -> bool {
        true
    }

    fn sync(&self) -> Result<()> {
        let directory = Arc::clone(&self.directory);
        answered(self.stall, "syncing", self.directory.path(), move || directory.sync())
    }

    fn remove(self: Box<Self>) -> Result<()> {
        let name = self.name();
        Arc::into_inner(self.directory).ok_or_else(|| in_flight(&name))?.remove()
    }
}

/// Files in memory of this process.
#[derive(Debug)]
pub struct Memory {
    files: Vec<(&'static str, fs::File)>,
}

impl Memory {
    /// Creates empty files.
    pub fn new() -> Result<Memory> {
        let make = |name: &'static str| file::in_memory().map(|file| (name, file));
        let files = FILES.into_iter().map(make).collect::<std::io::Result<_>>();
        Ok(Memory { files: files.map_err(|error| Error::system("taking a file in memory", &error))? })
    }

    fn file(&self, name: &str) -> Option<&fs::File> {
        self.files.iter().find(|(known, _)| *known == name).map(|(_, file)| file)
    }
}

impl Medium for Memory {
    fn name(&self) -> String {
        "memory".to_string()
    }

    fn lasts(&self) -> bool {
        false
    }

    fn open(&self, file: &str) -> Result<Pair> {
        use std::os::fd::AsRawFd;
        let fd = self.file(file).map_or(-1, |file| file.as_raw_fd());
        let open = |access| File::of_descriptor(fd, access).map(Arc::new);
        Ok(Pair { reader: open(Access::Read)?, writer: open(Access::Write { mode: 0o600 })? })
    }

    fn len(&self, file: &str) -> Result<Option<u64>> {
        let found = self.file(file).map(|file| file.metadata());
        let found =
            found.transpose().map_err(|error| Error::system("looking at a file in memory", &error))?;
        Ok(found.map(|found| found.len()))
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }

    fn remove(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}

/// A simulated disk.
#[cfg(any(test, feature = "sim"))]
#[derive(Debug)]
pub struct Simulated {
    disk: crate::io::sim::Disk,
    number: u64,
}

#[cfg(any(test, feature = "sim"))]
impl Simulated {
    /// Storage on the disk with this number.
    pub fn new(disk: &crate::io::sim::Disk, number: u64) -> Simulated {
        Simulated { disk: disk.clone(), number }
    }

    fn path(&self, file: &str) -> String {
        format!("{}/{file}", self.name())
    }
}

#[cfg(any(test, feature = "sim"))]
impl Medium for Simulated {
    fn name(&self) -> String {
        format!("disk-{}", self.number)
    }

    fn open(&self, file: &str) -> Result<Pair> {
        let path = self.path(file);
        self.disk.create(&path);
        let need = Some(crate::io::plan::Alignment { memory: 512, offset: 4096 });
        let open = || Arc::new(File::named(&path, self.number, need));
        Ok(Pair { reader: open(), writer: open() })
    }

    fn len(&self, file: &str) -> Result<Option<u64>> {
        Ok(self.disk.len(&self.path(file)))
    }

    fn sync(&self) -> Result<()> {
        self.disk.sync_directory();
        Ok(())
    }

    fn remove(self: Box<Self>) -> Result<()> {
        FILES.iter().for_each(|file| self.disk.remove(&self.path(file)));
        Ok(())
    }
}
