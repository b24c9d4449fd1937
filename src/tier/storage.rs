//! Storage of a path's files: a directory, memory, or the simulation. `bucket` has the object store.
//!
//! Invariant: every open file keeps the lock on its directory or prefix, and an operation in flight keeps its file. The
//! lock is therefore released only after the last operation has ended, even if the tier was closed before.
#![forbid(unsafe_code)]

use std::fmt::Debug;
use std::fs;
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::directory::{Directory, FILES};
use super::failures::unless_fenced;
use super::time_limits::within_timeout;
use crate::error::{Doing, Error, Result};
use crate::io::file::File;
use crate::sys::file::{self, Access};
use crate::sys::private_files::OpenFlags;

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

/// Storage for the files named in [`FILES`]. `path_files` calls it, on threads of their own, because a file system may
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

/// A directory of a mounted file system.
#[derive(Debug)]
pub struct DirStorage {
    directory: Arc<Directory>,
    direct: bool,
    io_timeout: Option<Duration>,
}

impl DirStorage {
    /// Storage in this directory. `direct`: bypass the page cache. `io_timeout`: longest time to wait for the owner's
    /// record, which is read without a call of `path_files`.
    pub fn new(directory: Directory, direct: bool, io_timeout: Option<Duration>) -> DirStorage {
        DirStorage { directory: Arc::new(directory), direct, io_timeout }
    }

    fn bounded(&self, work: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
        within_timeout(self.io_timeout, Doing::ReadingOwner, self.directory.path(), work)
    }

    fn open_for(&self, name: &str, path: &FilePath, access: Access) -> Result<Arc<File>> {
        let write = access != Access::Read;
        let want = |direct| OpenFlags { read: !write, write, make: write, direct };
        let file =
            File::open_with(path, access, self.direct, |direct| self.directory.open(name, want(direct)))?;
        Ok(Arc::new(file.keep_alive(Arc::clone(&self.directory) as _)))
    }
}

/// `Busy` error of a removal while an operation may still write to the files.
pub(super) fn in_flight(name: &str) -> Error {
    Error::Busy(format!(
        "{name}: an operation is still in flight, so nothing was removed; remove it with spw_tier_collect \
         after the operation ends"
    ))
}

impl Storage for DirStorage {
    fn name(&self) -> String {
        self.directory.path().to_string_lossy().into_owned()
    }

    fn key(&self) -> PathBuf {
        self.directory.path().to_path_buf()
    }

    fn open(&self, file: &str) -> Result<FilePair> {
        let path = self.directory.file(file);
        let writer = self.open_for(file, &path, Access::Write { mode: 0o600 })?;
        Ok(FilePair { reader: self.open_for(file, &path, Access::Read)?, writer })
    }

    fn len(&self, file: &str) -> Result<Option<u64>> {
        self.directory.len(file)
    }

    fn check(&self, files: &[NamedFile]) -> Result<()> {
        let files: Vec<_> = files.iter().map(|(name, file)| (*name, file.identity())).collect();
        self.directory.check(&files)
    }

    fn check_owner(&self) -> Result<()> {
        if !self.directory.is_leased() {
            // The page is in the cache of this machine since the open. No server is asked.
            return self.directory.check_owner();
        }
        let directory = Arc::clone(&self.directory);
        self.bounded(move || directory.check_owner())
    }

    fn check_lease(&self) -> Result<()> {
        if self.directory.lease_is_valid() {
            return Ok(());
        }
        let directory = Arc::clone(&self.directory);
        self.bounded(move || directory.check_lease())
    }

    fn check_removal(&self, files: &[NamedFile]) -> Result<()> {
        // The caller bounds a removal and its checks.
        unless_fenced(self.directory.check_owner())?;
        let named = files.iter().filter(|(_, file)| file.has_a_name());
        let files: Vec<_> = named.map(|(name, file)| (*name, file.identity())).collect();
        self.directory.check_removal(&files)
    }

    fn finishes_removal(&self) -> bool {
        true
    }

    fn sync(&self) -> Result<()> {
        self.directory.sync()
    }

    fn remove(self: Arc<Self>) -> Result<()> {
        let name = self.name();
        let only = Arc::into_inner(self).and_then(|storage| Arc::into_inner(storage.directory));
        only.ok_or_else(|| in_flight(&name))?.remove()
    }
}

/// Files in memory of this process.
#[derive(Debug)]
pub struct MemoryStorage {
    files: Vec<(&'static str, fs::File)>,
}

impl MemoryStorage {
    /// Creates empty files.
    pub fn new() -> Result<MemoryStorage> {
        let make = |name: &'static str| file::in_memory().map(|file| (name, file));
        let files = FILES.into_iter().map(make).collect::<std::io::Result<_>>();
        Ok(MemoryStorage {
            files: files.map_err(|error| Error::system("creating a file in memory", &error))?,
        })
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
        let open = |access| File::of_descriptor(fd, access).map(Arc::new);
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

/// A simulated disk. Each call counts as an event of the disk, also the close of its files.
#[cfg(any(test, feature = "sim"))]
#[derive(Debug)]
pub struct SimStorage {
    disk: crate::io::sim::Disk,
    number: u64,
    /// The owner's record. The simulated disk has no lock that keeps another owner out, as two mounts of one directory
    /// whose locks do not reach each other.
    claim: Vec<u8>,
    stop: Option<crate::io::sim::Stop>,
}

#[cfg(any(test, feature = "sim"))]
impl SimStorage {
    /// Claims the files of the disk with this number.
    pub fn claim(
        disk: &crate::io::sim::Disk,
        number: u64,
        stop: Option<crate::io::sim::Stop>,
    ) -> Result<SimStorage> {
        let claim = crate::sys::host::random().map_err(|error| Error::system("claiming a disk", &error))?;
        let storage = SimStorage { disk: disk.clone(), number, claim: claim.to_le_bytes().to_vec(), stop };
        let lock = storage.path(super::owned_lock::LOCK);
        storage.disk.create(&lock);
        let bytes = storage.claim.clone();
        storage.disk.serve(crate::io::sim::DiskEvent::Write { name: lock, at: 0, bytes });
        Ok(storage)
    }

    fn path(&self, file: &str) -> String {
        format!("{}/{file}", self.name())
    }
}

#[cfg(any(test, feature = "sim"))]
impl Drop for SimStorage {
    fn drop(&mut self) {
        self.disk.call(self.stop);
    }
}

#[cfg(any(test, feature = "sim"))]
impl Storage for SimStorage {
    fn name(&self) -> String {
        format!("disk-{}", self.number)
    }

    fn key(&self) -> PathBuf {
        PathBuf::from(self.disk.key())
    }

    fn open(&self, file: &str) -> Result<FilePair> {
        self.disk.call(self.stop);
        let path = self.path(file);
        self.disk.create(&path);
        let alignment = Some(crate::io::plan::Alignment { memory: 512, offset: 4096 });
        let open = || Arc::new(File::named(&path, self.number, alignment));
        Ok(FilePair { reader: open(), writer: open() })
    }

    fn len(&self, file: &str) -> Result<Option<u64>> {
        self.disk.call(self.stop);
        Ok(self.disk.len(&self.path(file)))
    }

    fn sync(&self) -> Result<()> {
        self.disk.call(self.stop);
        self.disk.sync_directory();
        Ok(())
    }

    fn check_owner(&self) -> Result<()> {
        match self.disk.contents(&self.path(super::owned_lock::LOCK)) == self.claim {
            true => Ok(()),
            false => Err(super::failures::fenced(&self.name(), "another owner")),
        }
    }

    fn check_lease(&self) -> Result<()> {
        self.check_owner()
    }

    fn check(&self, _: &[NamedFile]) -> Result<()> {
        self.disk.call(self.stop);
        Ok(())
    }

    fn check_removal(&self, _: &[NamedFile]) -> Result<()> {
        self.disk.call(self.stop);
        unless_fenced(self.check_owner())
    }

    fn remove(self: Arc<Self>) -> Result<()> {
        self.disk.call(self.stop);
        FILES.iter().for_each(|file| self.disk.remove(&self.path(file)));
        Ok(())
    }
}
