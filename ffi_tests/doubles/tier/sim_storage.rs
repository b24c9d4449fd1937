//! The files of a tier on a simulated disk.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::sync::Arc;

use super::storage::{FILES, FilePair, LOCK, NamedFile, Storage, fenced, unless_fenced};
use crate::error::{Error, Result};
use crate::io::file::File;
use crate::io::plan::Alignment;
use crate::io::sim::{Disk, DiskEvent, Stop};

/// The storage of a path on a simulated disk. Each call counts as an event of the disk, also the close of its files.
#[derive(Debug)]
pub struct SimStorage {
    disk: Disk,
    number: u64,
    /// The owner's record. The simulated disk has no lock that keeps another owner out, as two mounts of one directory
    /// whose locks do not reach each other.
    claim: Vec<u8>,
    stop: Option<Stop>,
}

impl SimStorage {
    /// Takes the files of the disk with this number.
    pub fn acquire(disk: &Disk, number: u64, stop: Option<Stop>) -> Result<SimStorage> {
        let claim = crate::sys::host::random().map_err(|error| Error::system("claiming a disk", &error))?;
        let storage = SimStorage { disk: disk.clone(), number, claim: claim.to_le_bytes().to_vec(), stop };
        let lock = storage.path(LOCK);
        storage.disk.create(&lock);
        let bytes = storage.claim.clone();
        storage.disk.serve(DiskEvent::Write { name: lock, at: 0, bytes });
        Ok(storage)
    }

    fn path(&self, file: &str) -> String {
        format!("{}/{file}", self.name())
    }
}

impl Drop for SimStorage {
    fn drop(&mut self) {
        self.disk.call(self.stop);
    }
}

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
        let alignment = Some(Alignment { memory: 512, offset: 4096 });
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
        match self.disk.contents(&self.path(LOCK)) == self.claim {
            true => Ok(()),
            false => Err(fenced(&self.name(), "another owner")),
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
