//! Names of arenas: files of the directory of shared memory.
//!
//! Invariants:
//! - A file at a name is opened as `sys::private_files` demands: no link is followed, and the file belongs to this user
//!   alone.
//! - A name is removed only while it refers to the caller's file.
#![forbid(unsafe_code)]

use std::fs::File;
use std::io;
use std::path::Path;

use crate::error::{ArenaError, ArenaKind, Error, Result};
use crate::log::{self, Level};
use crate::sys::private_files::{self, GivenDirectory, OpenFlags};
use crate::sys::shared_memory;

/// Most bytes of a name.
const MAX_NAME: usize = 200;

/// A file of shared memory.
#[derive(Debug)]
pub struct NamedFile {
    directory: GivenDirectory,
    file_name: String,
    title: String,
}

impl NamedFile {
    /// The file of the arena `name`. Errors: characters that a name may not have.
    pub fn new(name: &str) -> Result<NamedFile> {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        if name.is_empty() || name.len() > MAX_NAME || !name.bytes().all(allowed) {
            let reason =
                format!("{name:?} is not 1 to {MAX_NAME} letters, digits, dots, dashes and underscores");
            return Err(Error::invalid("name", reason));
        }
        let directory = GivenDirectory::open(Path::new(shared_memory::DIRECTORY))
            .map_err(|error| Error::system("opening the directory of shared memory", &error))?;
        Ok(NamedFile { directory, file_name: format!("spillway-{name}"), title: format!("arena {name:?}") })
    }

    /// Opens the file.
    pub fn open(&self, flags: OpenFlags) -> Result<File> {
        self.directory.open(&self.file_name, flags).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => {
                self.error(ArenaKind::Missing, "create it first, or wait for its owner")
            }
            _ if private_files::is_refusal(&error) => self.error(ArenaKind::Foreign, error.to_string()),
            _ => Error::system("opening shared memory", &error),
        })
    }

    /// An error about this arena.
    pub fn error(&self, kind: ArenaKind, detail: impl Into<String>) -> Error {
        ArenaError::of(kind, self.title.clone(), detail)
    }

    /// True if the name refers to that file (device and inode).
    pub fn is(&self, file: (u64, u64)) -> bool {
        let entry = self.directory.entry(&self.file_name);
        entry.is_ok_and(|entry| {
            entry.is_some_and(|found| (found.identity.device, found.identity.inode) == file)
        })
    }

    /// The arena in error messages.
    pub fn title(&self) -> &str {
        &self.title
    }

    /// Removes the name if it still refers to that file (device and inode).
    pub fn remove_if(&self, file: (u64, u64)) {
        if self.is(file)
            && let Err(error) = self.directory.remove_file(&self.file_name)
        {
            log::write(
                Level::Warn,
                &format!("{}: its name stays: {error}; collect it as the user that created it", self.title),
            );
        }
    }
}
