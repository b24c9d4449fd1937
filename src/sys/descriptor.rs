//! Descriptors of the library are never 0 to 2, the numbers of the standard streams.
//!
//! A program that closed its standard streams gets their numbers from its next opens. What the program, or the log,
//! writes to its standard error would then overwrite a file of the library.
//!
//! Invariant: every descriptor that the library keeps, or writes through, comes from a function of this file.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::errno::Errno;

use crate::error::Error;

/// The lowest number of a descriptor of the library.
const LEAST: RawFd = 3;

/// `made`, or its duplicate if its number is that of a standard stream.
pub fn moved<T: AsRawFd + From<OwnedFd>>(made: T) -> io::Result<T> {
    if made.as_raw_fd() >= LEAST { Ok(made) } else { duplicate(made.as_raw_fd()).map(T::from) }
}

/// What `make` makes, with a descriptor that is not of a standard stream. For what cannot be made of a duplicate: `make`
/// is called again while the descriptors with low numbers stay open, at most three times.
pub fn made<T: AsRawFd>(mut make: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let mut low = Vec::new();
    loop {
        let made = make()?;
        if made.as_raw_fd() >= LEAST {
            return Ok(made);
        }
        low.push(made);
    }
}

/// Opens a file.
pub fn open(options: &OpenOptions, path: impl AsRef<Path>) -> io::Result<File> {
    moved(options.open(path)?)
}

/// The descriptor that a system call returned; its errno if it is negative.
///
/// # Safety
/// Nothing else owns the descriptor.
pub unsafe fn returned(fd: RawFd) -> io::Result<OwnedFd> {
    let fd = Errno::result(fd)?;
    // SAFETY: a descriptor that the caller passes on.
    moved(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Duplicates a descriptor. Any number may be passed: one that is not an open descriptor is EBADF.
pub fn duplicate(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: fcntl on any number is safe.
    let copy = Errno::result(unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, LEAST) })?;
    // SAFETY: a descriptor that this call just made.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}

/// Why the descriptor `fd` of `argument` was not duplicated: it is none, or the system has no room for another.
pub fn refusal(argument: &'static str, fd: RawFd, error: &io::Error) -> Error {
    match error.raw_os_error() {
        Some(libc::EBADF) => Error::invalid(argument, format!("{fd} is not an open descriptor")),
        _ => Error::system("duplicating the caller's descriptor", error),
    }
}

/// Reads a file whose content another program wrote, such as a profile. `None` if there is no file. An error, a text
/// without the path, if the file is not regular or longer than `most` bytes: a FIFO would block, and a device or a huge
/// file would fill the memory.
pub fn read_small(path: &Path, most: u64) -> Result<Option<Vec<u8>>, String> {
    // Does not wait for the other end of a FIFO.
    let file = match open(OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK), path) {
        Ok(file) if !file.metadata().is_ok_and(|found| found.is_file()) => {
            return Err("it is not a regular file".to_string());
        }
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.to_string()),
    };
    let mut bytes = Vec::new();
    file.take(most + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    if bytes.len() as u64 <= most { Ok(Some(bytes)) } else { Err(format!("it is longer than {most} bytes")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::event::EventFd;
    use crate::sys::fork::in_forked_child;
    use crate::sys::private_files::{GivenDirectory, OpenFlags};
    use crate::sys::{file, shared_memory};

    #[test]
    fn no_descriptor_of_the_library_is_that_of_a_standard_stream() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let access = file::Access::Write { mode: 0o600 };
        let flags = OpenFlags { write: true, make: true, ..OpenFlags::default() };
        assert!(in_forked_child(|| {
            // SAFETY: this child uses none of its standard streams.
            (0..3).for_each(|fd| drop(unsafe { OwnedFd::from_raw_fd(fd) }));
            let opened = file::open(&path, access, false).unwrap();
            let given = GivenDirectory::open(folder.path()).unwrap();
            let memory = shared_memory::anonymous("spillway-test", 4096, false).unwrap().file;
            let kept = [
                file::reopen_buffered(&opened, true).unwrap(),
                file::duplicate(opened.as_raw_fd()).unwrap().0,
                file::in_memory().unwrap(),
                given.open("other", flags).unwrap(),
                shared_memory::reopen(memory.as_raw_fd(), true).unwrap(),
                made(|| File::open("/proc/self/exe")).unwrap(),
                opened,
                memory,
            ];
            let event = EventFd::new().unwrap();
            let free = (0..3).all(|fd| Errno::result(flags_of(fd)) == Err(Errno::EBADF));
            free && event.fd() >= LEAST && kept.iter().all(|file| file.as_raw_fd() >= LEAST)
        }));
    }

    fn flags_of(fd: RawFd) -> i32 {
        // SAFETY: fcntl on any number is safe.
        unsafe { libc::fcntl(fd, libc::F_GETFD) }
    }
}
