//! The owner of an arena: its lock, and what an owner that ended left behind.
//!
//! Invariants:
//! - The owner locks the file before it gives the file a size. A file with a size and without that lock was left behind
//!   by an owner that ended.
//! - A file that was left behind is unlinked, never truncated or reused: other processes may still have it mapped.
//! - A file is unlinked only if it is empty, begins with the magic of an arena, or is what a create leaves before it
//!   stores the magic. Any other file is not an arena's, and stays.
#![forbid(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};

use super::handle::OWNER_LOCK;
use super::layout::{HEADER, Layout, MAGIC};
use super::name::NamedFile;
use crate::error::{ArenaKind, Error, Result};
use crate::sys::fork_closed::{self, ForkClosedFile};
use crate::sys::private_files::OpenFlags;
use crate::sys::{range_lock, shared_memory};

/// Attempts to create a file that other processes create and remove at the same time.
const TRIES: usize = 100;

/// Removes the name of an arena whose owner has ended. Processes that have it open keep their memory. Errors: there is
/// none; its owner lives; the file is no arena.
pub fn collect(name: &str) -> Result<()> {
    let named = NamedFile::new(name)?;
    let file = named.open(OpenFlags { read: true, write: true, ..OpenFlags::default() })?;
    let locks = own_description(&file, true)?;
    if !take_owner_lock(&locks)? {
        return Err(lives(&named, &file));
    }
    check_leftover(&named, &file)?;
    named.remove_if(identity(&file)?);
    Ok(())
}

/// Opens and locks the file of a name, which is empty then.
pub fn take_name(named: &NamedFile, collect: bool) -> Result<(File, ForkClosedFile)> {
    for _ in 0..TRIES {
        let file = named.open(OpenFlags { read: true, write: true, make: true, direct: false })?;
        let locks = own_description(&file, true).inspect_err(|_| discard(named, &file))?;
        if !take_owner_lock(&locks).inspect_err(|_| discard(named, &file))? {
            return Err(lives(named, &file));
        }
        let found = identity(&file)?;
        if !named.is(found) {
            continue;
        }
        if file.metadata().map_err(unknown)?.len() == 0 {
            return Ok((file, locks));
        }
        check_leftover(named, &file)?;
        if !collect {
            let detail =
                "its owner has ended and left it behind; collect it, or create it with the flag that does so";
            return Err(named.error(ArenaKind::Exists, detail));
        }
        named.remove_if(found);
    }
    Err(Error::Busy(format!("{}: other processes create and remove it all the time", named.title())))
}

/// Removes the name of an empty file without an owner, which a failed create would leave behind.
fn discard(named: &NamedFile, file: &File) {
    // The lock keeps other processes from taking the file until its name is gone; it ends with the file's descriptor.
    let unowned = range_lock::take(file, OWNER_LOCK).unwrap_or(true);
    let empty = file.metadata().is_ok_and(|found| found.len() == 0);
    if let (true, Ok(found)) = (unowned && empty, identity(file)) {
        named.remove_if(found);
    }
}

fn lives(named: &NamedFile, file: &File) -> Error {
    let mut header = [0; HEADER];
    let owner = match file.read_exact_at(&mut header, 0) {
        Ok(()) if header[..8] == MAGIC => format!("process {}", Layout::owner_in(&header)),
        _ => "a process".to_string(),
    };
    named.error(ArenaKind::Exists, format!("{owner} owns it and has it open; choose another name"))
}

/// Fails unless an arena's owner left the file behind. The caller has the owner's lock.
fn check_leftover(named: &NamedFile, file: &File) -> Result<()> {
    let size = file.metadata().map_err(unknown)?.len();
    if size == 0 || left_by_an_owner(file, size).map_err(unknown)? {
        return Ok(());
    }
    let detail = "the file of this name was not made by an owner of an arena; it stays. Choose another name, or remove \
                  the file";
    Err(named.error(ArenaKind::Format, detail))
}

fn left_by_an_owner(file: &File, size: u64) -> io::Result<bool> {
    let mut header = [0; HEADER];
    if size >= HEADER as u64 {
        file.read_exact_at(&mut header, 0)?;
        if header[..8] == MAGIC {
            return Ok(true);
        }
        // The owner ended after the header, and before the magic.
        let mut completed = header;
        completed[..8].copy_from_slice(&MAGIC);
        if header[..8] == [0; 8] && Layout::described(&completed, size).is_ok() {
            return Ok(true);
        }
    }
    // The owner ended before the header.
    let mut block = [0; 1 << 14];
    let mut at = 0;
    loop {
        let read = match file.read_at(&mut block, at) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            outcome => outcome?,
        };
        if block[..read].iter().any(|byte| *byte != 0) {
            return Ok(false);
        }
        if read == 0 {
            return Ok(true);
        }
        at += read as u64;
    }
}

/// Device and inode.
pub fn identity(file: &File) -> Result<(u64, u64)> {
    let found = file.metadata().map_err(unknown)?;
    Ok((found.dev(), found.ino()))
}

fn unknown(error: io::Error) -> Error {
    Error::system("looking at shared memory", &error)
}

/// A description of the file for the locks of one handle.
pub fn own_description(file: &File, write: bool) -> Result<ForkClosedFile> {
    ForkClosedFile::open(|| shared_memory::reopen(file.as_raw_fd(), write)).map_err(|error| {
        let other = || Error::system("opening an arena anew by its name in /proc", &error);
        fork_closed::limit_reached(&error).unwrap_or_else(other)
    })
}

pub fn take_owner_lock(locks: &ForkClosedFile) -> Result<bool> {
    let Some(file) = locks.file() else { return Ok(false) };
    range_lock::take(file, OWNER_LOCK).map_err(|error| Error::system("locking an arena", &error))
}
