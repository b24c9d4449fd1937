//! Where a path keeps its files: a directory, memory, or the simulation; an object store is in `bucket`.
//!
//! Invariant: every file that a medium opens keeps the lock on its place. An operation in flight keeps its file, so the
//! lock ends after the last operation, however long that takes after the tier was closed.
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

/// The same file, open for reading and for writing.
#[derive(Debug, Clone)]
pub struct Pair {
    /// For reading.
    pub reader: Arc<File>,
    /// For writing.
    pub writer: Arc<File>,
}

/// A place for files, named as in [`FILES`].
pub trait Medium: Send + Sync + Debug {
    /// For messages, and to know it again.
    fn name(&self) -> String;

    /// False if all is gone with the process.
    fn lasts(&self) -> bool {
        true
    }

    /// Opens a file, made if it does not exist.
    fn open(&self, file: &str) -> Result<Pair>;

    /// Length of a file; `None` if it does not exist.
    fn len(&self, file: &str) -> Result<Option<u64>>;

    /// Makes durable which files there are.
    fn sync(&self) -> Result<()>;

    /// Refuses if names of the open files do not stand for these files any more, or the lock was lost.
    fn check(&self, _files: &[(&'static str, &File)]) -> Result<()> {
        Ok(())
    }

    /// True if a removal that was cut short is finished before the place is used again.
    fn finishes_removal(&self) -> bool {
        false
    }

    /// Removes the files, superblocks first, and gives the place up. `Busy` while an operation on a file is in flight.
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
    /// On this directory; past the page cache if `direct`. It fails if a sync has no answer for `stall`.
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

/// What `work` on the files below `path` returns, if the file system answers before the stall limit. A call without an
/// answer goes on without its caller, and keeps the directory's lock until it returns.
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

/// A place is not removed while an operation may still write there.
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

/// Memory of this process.
#[derive(Debug)]
pub struct Memory {
    files: Vec<(&'static str, fs::File)>,
}

impl Memory {
    /// Empty.
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
    /// The disk with this number.
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
