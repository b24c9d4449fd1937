//! Locks on single bytes of a file, which end with the process that holds them.
//!
//! Invariants:
//! - A lock belongs to an open file description (F_OFD_SETLK). The system releases it when the last descriptor of that
//!   description is closed: also when the process is killed.
//! - A description that takes locks has one descriptor, which forked children close ([`super::fork_closed`]) and which
//!   is never sent to another process. Otherwise a lock would outlive its process.
//! - A description does not see its own locks as locks of another.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Locks byte `at`; false if another description holds the lock. The file is open for writing.
pub fn take(file: &File, at: u64) -> io::Result<bool> {
    match change(file, at, libc::F_WRLCK) {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EACCES | libc::EAGAIN)) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Unlocks byte `at`. A byte that is not locked stays as it is.
pub fn release(file: &File, at: u64) {
    // The lock ends with the descriptor at the latest.
    let _ = change(file, at, libc::F_UNLCK);
}

/// True if another description holds the lock of byte `at`. The file may be open for reading only.
pub fn is_held_elsewhere(file: &File, at: u64) -> io::Result<bool> {
    let mut range = byte(at, libc::F_WRLCK)?;
    call(file, libc::F_OFD_GETLK, &mut range)?;
    Ok(i32::from(range.l_type) != libc::F_UNLCK)
}

fn change(file: &File, at: u64, to: i32) -> io::Result<()> {
    call(file, libc::F_OFD_SETLK, &mut byte(at, to)?)
}

fn byte(at: u64, kind: i32) -> io::Result<libc::flock> {
    Ok(libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: libc::off_t::try_from(at).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?,
        l_len: 1,
        l_pid: 0,
    })
}

fn call(file: &File, command: i32, range: &mut libc::flock) -> io::Result<()> {
    loop {
        // SAFETY: an open descriptor and a struct that lives during the call.
        if unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut *range) } != -1 {
            return Ok(());
        }
        match io::Error::last_os_error() {
            error if error.kind() == io::ErrorKind::Interrupted => {}
            error => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::shared_memory;

    #[test]
    fn a_byte_has_one_holder_and_its_neighbours_have_others() {
        let first = shared_memory::anonymous("locks", 4096, false).unwrap().file;
        let second = shared_memory::reopen(first.as_raw_fd(), true).unwrap();
        let reader = shared_memory::reopen(first.as_raw_fd(), false).unwrap();
        assert!(take(&first, 7).unwrap() && take(&second, 8).unwrap());
        assert!(!take(&second, 7).unwrap());
        assert!(!is_held_elsewhere(&first, 7).unwrap() && is_held_elsewhere(&second, 7).unwrap());
        assert!(is_held_elsewhere(&reader, 7).unwrap() && is_held_elsewhere(&reader, 8).unwrap());
        release(&first, 7);
        assert!(!is_held_elsewhere(&reader, 7).unwrap() && take(&second, 7).unwrap());
        drop(second);
        assert!(!is_held_elsewhere(&reader, 7).unwrap() && !is_held_elsewhere(&reader, 8).unwrap());
        assert!(take(&first, u64::MAX).is_err());
    }
}
