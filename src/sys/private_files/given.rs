//! A directory that the caller named, such as the base directory of a path.
//!
//! Invariants:
//! - The caller is responsible for its links, owner and mode.
//! - Its name is checked from where it was opened: a relative name from the working directory of the open. A process may
//!   work below directories that it cannot search.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Deref;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::fcntl::{AT_FDCWD, AtFlags};
use nix::sys::stat::fstatat;

use super::PrivateDirectory;
use crate::sys::descriptor;
use crate::sys::file::Identity;

/// An open directory with the name that the caller gave.
#[derive(Debug)]
pub struct GivenDirectory {
    directory: PrivateDirectory,
    path: PathBuf,
    /// The working directory at the open, if `path` is relative.
    from: Option<File>,
}

impl GivenDirectory {
    /// Opens it.
    pub fn open(path: &Path) -> io::Result<GivenDirectory> {
        let open = |path: &Path, flags: i32| {
            descriptor::open(OpenOptions::new().read(true).custom_flags(flags | libc::O_DIRECTORY), path)
        };
        let directory = PrivateDirectory { file: open(path, 0)? };
        let from = path.is_relative().then(|| open(Path::new("."), libc::O_PATH)).transpose()?;
        Ok(GivenDirectory { directory, path: path.to_path_buf(), from })
    }

    /// The name that the caller gave.
    pub fn name(&self) -> &Path {
        &self.path
    }

    /// True if its name still stands for this directory.
    pub fn has_its_name(&self) -> io::Result<bool> {
        let from = self.from.as_ref().map_or(AT_FDCWD, |from| from.as_fd());
        let found = fstatat(from, &self.path, AtFlags::empty())?;
        let found = Identity { device: found.st_dev, inode: found.st_ino };
        Ok(found == self.directory.identity()?)
    }
}

impl Deref for GivenDirectory {
    type Target = PrivateDirectory;
    fn deref(&self) -> &PrivateDirectory {
        &self.directory
    }
}

impl From<GivenDirectory> for PrivateDirectory {
    fn from(given: GivenDirectory) -> PrivateDirectory {
        given.directory
    }
}
