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
use std::path::PathBuf;

use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::sys::topology::Root;
use crate::sys::{host, private_files};

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
    pub fn lock(root: &Root) -> Result<Place> {
        let folder = root.path(FOLDER);
        let failed = |error: &io::Error| system(&folder.display().to_string(), error);
        match DirBuilder::new().mode(0o700).create(&folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(failed(&error)),
            _ => {}
        }
        let found = fs::symlink_metadata(&folder).map_err(|error| failed(&error))?;
        if !found.is_dir() || found.uid() != private_files::user() || found.mode() & 0o022 != 0 {
            let reason = format!("{} is not a directory of this user alone", folder.display());
            return Err(Error::System { what: "opening the state of resctrl", reason });
        }
        let mut options = OpenOptions::new();
        let options =
            options.write(true).create(true).truncate(false).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        let file = options.open(folder.join("lock")).map_err(|error| failed(&error))?;
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
            options.write(true).create_new(true).mode(0o600).open(&new)?.write_all(text.as_bytes())?;
            fs::hard_link(&new, &path)?;
            fs::remove_file(&new)
        };
        write().map_err(|error| system(&path.display().to_string(), &error))
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

fn unusable(path: &std::path::Path, reason: &str) -> Error {
    let reason = format!(
        "{}: {reason}. Remove the groups {} with rmdir, then this file",
        path.display(),
        super::partition::NAMES.join(" and ")
    );
    Error::System { what: "reading the owner of resctrl groups", reason }
}

fn system(path: &str, error: &io::Error) -> Error {
    let hint = match error.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => "; run as root",
        _ => "",
    };
    let reason = format!("{path}: {error}{hint}").replace("os error", "errno");
    Error::System { what: "keeping the owner of resctrl groups", reason }
}
