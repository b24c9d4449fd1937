//! The process for which partitions were made. The file is written before the first group is made and removed after the
//! last one is gone, so that a later run finds what a crash left.
//!
//! Invariants:
//! - A lock is held from reading the file to the last change: two runs never change groups at once.
//! - The directory belongs to the effective user alone; otherwise nothing is read from it.
//! - The file appears whole: it is written under another name, and then linked to its own, which fails if it exists.
#![forbid(unsafe_code)]

use std::fmt;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::sys::topology::Root;
use crate::sys::{descriptor, host, private_files};

const FOLDER: &str = "run/spillway-resctrl";
const VERSION: u32 = 1;

/// A process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Owner {
    version: u32,
    pid: u32,
    /// In clock ticks since boot.
    start: u64,
    boot: String,
    pid_namespace: String,
}

impl Owner {
    fn of(pid: u32) -> Result<Owner> {
        let start = host::process_start(pid)
            .ok_or_else(|| Error::invalid("owner", format!("there is no process {pid}")))?;
        Ok(Owner { version: VERSION, pid, start, boot: host::boot(), pid_namespace: host::pid_namespace() })
    }

    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// True if the process runs. A process of another container counts as running: its id says nothing here.
    pub fn is_alive(&self) -> bool {
        let is_here = self.pid_namespace == host::pid_namespace();
        self.boot == host::boot() && !(is_here && host::process_ended(self.pid, self.start))
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "process {}", self.pid)?;
        match self.pid_namespace == host::pid_namespace() {
            true => Ok(()),
            false => write!(out, " of another container"),
        }
    }
}

/// The directory with the file, locked.
pub(super) struct Place {
    folder: PathBuf,
    _lock: Flock<File>,
}

impl Place {
    /// Makes the directory if it is missing.
    pub fn lock(root: &Root) -> Result<Place> {
        let folder = root.path(FOLDER);
        match DirBuilder::new().mode(0o700).create(&folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(system(&folder.display().to_string(), &error));
            }
            _ => {}
        }
        Place::of(folder)
    }

    /// `None` if the directory is missing: no partitions were made.
    pub fn lock_present(root: &Root) -> Result<Option<Place>> {
        let folder = root.path(FOLDER);
        match fs::symlink_metadata(&folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            _ => Place::of(folder).map(Some),
        }
    }

    fn of(folder: PathBuf) -> Result<Place> {
        let failed = |error: &io::Error| system(&folder.display().to_string(), error);
        let found = fs::symlink_metadata(&folder).map_err(|error| failed(&error))?;
        check_private(&folder, &found)?;
        let mut options = OpenOptions::new();
        let options =
            options.write(true).create(true).truncate(false).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        let file = descriptor::open(options, folder.join("lock")).map_err(|error| failed(&error))?;
        let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock)
            .map_err(|_| Error::Busy("another run changes resctrl at this moment; try again".to_string()))?;
        Ok(Place { folder, _lock: lock })
    }

    /// The owner; `None` if there is none. An unreadable file is an error: its groups may belong to a live process.
    pub fn owner(&self) -> Result<Option<Owner>> {
        let path = self.folder.join("owner");
        let text = Root::at(&self.folder).text("owner");
        match (text, fs::symlink_metadata(&path)) {
            (_, Err(error)) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            (Some(text), Ok(_)) => match serde_json::from_str::<Owner>(&text) {
                Ok(owner) if owner.version == VERSION => Ok(Some(owner)),
                Ok(owner) => Err(unusable(&path, &format!("it has version {}", owner.version))),
                Err(error) => Err(unusable(&path, &error.to_string())),
            },
            _ => Err(unusable(&path, "it cannot be read")),
        }
    }

    pub fn set(&self, pid: u32) -> Result<()> {
        let owner = Owner::of(pid)?;
        let text = serde_json::to_string(&owner).map_err(|error| Error::Internal(error.to_string()))?;
        let (new, path) = (self.folder.join("owner.new"), self.folder.join("owner"));
        let write = || {
            let _ = fs::remove_file(&new);
            let mut options = OpenOptions::new();
            options.write(true).create_new(true).mode(0o600);
            descriptor::open(&options, &new)?.write_all(text.as_bytes())?;
            fs::hard_link(&new, &path)?;
            fs::remove_file(&new)
        };
        write().map_err(|error| {
            // Absent if its creation failed.
            let _ = fs::remove_file(&new);
            system(&path.display().to_string(), &error)
        })
    }

    pub fn clear(&self) -> Result<()> {
        let path = self.folder.join("owner");
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(system(&path.display().to_string(), &error))
            }
            _ => Ok(()),
        }
    }
}

/// The directory belongs to the effective user alone.
fn check_private(folder: &Path, found: &fs::Metadata) -> Result<()> {
    let (owner, user) = (found.uid(), private_files::user());
    let reason = if !found.is_dir() {
        "is not a directory; remove it"
    } else if owner != user && user != 0 {
        "belongs to another user; run as root"
    } else if owner != user {
        "belongs to another user; remove it"
    } else if found.mode() & 0o022 != 0 {
        "can be written by other users; remove it"
    } else {
        return Ok(());
    };
    let reason = format!("{} {reason}", folder.display());
    Err(Error::System { what: "opening the state of resctrl", reason })
}

fn unusable(path: &Path, reason: &str) -> Error {
    let reason = format!(
        "{}: {reason}. Remove the groups {} with rmdir, then this file",
        path.display(),
        super::partition::NAMES.join(" and ")
    );
    Error::System { what: "reading the owner of resctrl groups", reason }
}

fn system(path: &str, error: &io::Error) -> Error {
    let reason = format!("{path}: {}", super::words(error));
    Error::System { what: "keeping the owner of resctrl groups", reason }
}
