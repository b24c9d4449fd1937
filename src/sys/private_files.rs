//! Safe use of files and directories at fixed names in places that other users may write to.
//!
//! Invariants:
//! - [`open_private`] opens every file at a fixed name. It follows no link in the last component and does not wait for
//!   the other end of a FIFO. It checks the open descriptor: a regular file with one name, owned by the effective user.
//! - A directory below a given one is opened without following a link, and is owned by the effective user. Files in it
//!   are named relative to its descriptor, so renaming or replacing the directory later cannot redirect them.
//! - Own files that group or others may access, and own directories that group or others may write to, are restricted
//!   at open and logged. An umask or a volume manager may have left such modes.

use std::ffi::{CString, OsStr};
use std::fmt;
use std::fs::{File, Permissions};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use super::descriptor;
use super::file::Identity;
use crate::log::{self, Level};

/// Permission bits of a new file: owner only.
const FILE_MODE: libc::mode_t = 0o600;
/// Permission bits of a new directory.
const DIRECTORY_MODE: libc::mode_t = 0o700;
/// Permission bits that a file must not have.
const FILE_FORBIDDEN: u32 = 0o077;
/// Permission bits that let other users change a file or a directory.
const OTHERS_WRITE: u32 = 0o022;

/// Access that an open asks for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OpenFlags {
    /// Reading.
    pub read: bool,
    /// Writing.
    pub write: bool,
    /// Create the file, with mode 0600, if it does not exist. Files are never truncated.
    pub make: bool,
    /// Bypass the page cache (O_DIRECT).
    pub direct: bool,
}

/// Metadata of a directory entry, without following a link.
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    /// Which file.
    pub identity: Identity,
    /// Length.
    pub len: u64,
    /// True if it is a regular file.
    pub regular: bool,
    /// True if it is owned by the effective user.
    pub own: bool,
    /// True if the file has several names (hard links).
    pub shared: bool,
}

/// Why this module refused a file or a directory that exists.
#[derive(Debug)]
struct Refused(String);

impl fmt::Display for Refused {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

impl std::error::Error for Refused {}

fn refused(words: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, Refused(words.into()))
}

/// True if this module refused a file or a directory; false for the system's own errors.
pub fn is_refusal(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<Refused>())
}

/// Id of the effective user.
pub fn user() -> u32 {
    // SAFETY: takes nothing and cannot fail.
    unsafe { libc::geteuid() }
}

/// Opens the file at a fixed name, relative to `directory` if given. The caller is responsible for the directories of
/// `path`.
fn open_private(directory: Option<BorrowedFd>, path: &Path, wanted: OpenFlags) -> io::Result<File> {
    let at = directory.map_or(libc::AT_FDCWD, |directory| directory.as_raw_fd());
    let flag = |wanted: bool, flag: i32| if wanted { flag } else { 0 };
    let access = match (wanted.read, wanted.write) {
        (true, true) => libc::O_RDWR,
        (false, true) => libc::O_WRONLY,
        _ => libc::O_RDONLY,
    };
    let flags =
        access | libc::O_NONBLOCK | flag(wanted.make, libc::O_CREAT) | flag(wanted.direct, libc::O_DIRECT);
    let name = c_string(path.as_os_str())?;
    let file = open_at(at, &name, flags).map_err(|error| explain(error, at, &name, "a regular file"))?;
    check_file(&file, path)?;
    if wanted.make {
        allow_owner(&file)?;
    }
    make_blocking(&file)?;
    Ok(file)
}

/// Opens a file of any owner to read and check it: a regular file, without following a link in the last component or
/// waiting for the other end of a FIFO.
pub fn open_to_check(path: &Path) -> io::Result<File> {
    let name = c_string(path.as_os_str())?;
    let file = open_at(libc::AT_FDCWD, &name, libc::O_RDONLY | libc::O_NONBLOCK)
        .map_err(|error| explain(error, libc::AT_FDCWD, &name, "a regular file"))?;
    let found = file.metadata()?;
    match found.mode() & libc::S_IFMT {
        libc::S_IFREG => Ok(file),
        _ => Err(wrong_kind(found.mode(), found.uid(), "a regular file")),
    }
}

/// Refuses a path whose last component is a link of another user than this one and root.
pub fn check_link(path: &Path) -> io::Result<()> {
    let found = std::fs::symlink_metadata(path)?;
    match found.is_symlink() && ![user(), 0].contains(&found.uid()) {
        true => Err(refused(format!(
            "it is a symbolic link of user {}, which is not followed; pass the path that it leads to",
            found.uid()
        ))),
        false => Ok(()),
    }
}

/// An open directory.
#[derive(Debug)]
pub struct PrivateDirectory {
    file: File,
}

impl PrivateDirectory {
    /// Opens a subdirectory that only the effective user may change; created with mode 0700 if `make`.
    pub fn enter(&self, name: &str, make: bool) -> io::Result<PrivateDirectory> {
        let found = match self.peek(name) {
            Err(error) if make && error.kind() == io::ErrorKind::NotFound => {
                self.make(name)?;
                self.peek(name)?
            }
            other => other?,
        };
        found.check(name)?;
        Ok(found)
    }

    /// Opens a subdirectory of any owner, for inspection only.
    pub fn peek(&self, name: &str) -> io::Result<PrivateDirectory> {
        let (at, name) = (self.file.as_raw_fd(), c_string(name.as_ref())?);
        let file = open_at(at, &name, libc::O_RDONLY | libc::O_DIRECTORY)
            .map_err(|error| explain(error, at, &name, "a directory"))?;
        Ok(PrivateDirectory { file })
    }

    fn make(&self, name: &str) -> io::Result<()> {
        let name = c_string(name.as_ref())?;
        // SAFETY: an open descriptor and a C string.
        match unsafe { libc::mkdirat(self.file.as_raw_fd(), name.as_ptr(), DIRECTORY_MODE) } {
            0 => Ok(()),
            _ => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
                error => Err(error),
            },
        }
    }

    /// Refuses a directory of another user, and removes write access for group and others.
    fn check(&self, name: &str) -> io::Result<()> {
        check_owner(&self.file, "directory")?;
        restrict_mode(&self.file, OTHERS_WRITE, Path::new(name))
    }

    /// A second descriptor of the directory.
    pub fn try_clone(&self) -> io::Result<PrivateDirectory> {
        Ok(PrivateDirectory { file: self.file.try_clone()? })
    }

    /// Opens a file of this directory.
    pub fn open(&self, name: &str, flags: OpenFlags) -> io::Result<File> {
        open_private(Some(self.file.as_fd()), Path::new(name), flags)
    }

    /// The entry `name`; `None` if there is none.
    pub fn entry(&self, name: &str) -> io::Result<Option<Entry>> {
        let name = c_string(name.as_ref())?;
        match stat_at(self.file.as_raw_fd(), &name) {
            Ok(found) => Ok(Some(Entry {
                identity: Identity { device: found.st_dev, inode: found.st_ino },
                len: u64::try_from(found.st_size).unwrap_or(0),
                regular: found.st_mode & libc::S_IFMT == libc::S_IFREG,
                own: found.st_uid == user(),
                shared: found.st_nlink > 1,
            })),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Identity of the directory.
    pub fn identity(&self) -> io::Result<Identity> {
        self.file.metadata().map(|found| Identity { device: found.dev(), inode: found.ino() })
    }

    /// Removes an entry, never the target of a link. A missing entry is no error.
    pub fn remove_file(&self, name: &str) -> io::Result<()> {
        match self.unlink(name, 0) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => {
                Err(explain(error, self.file.as_raw_fd(), &c_string(name.as_ref())?, "a regular file"))
            }
            Ok(()) => Ok(()),
        }
    }

    /// Removes an empty directory.
    pub fn remove_directory(&self, name: &str) -> io::Result<()> {
        self.unlink(name, libc::AT_REMOVEDIR)
    }

    fn unlink(&self, name: &str, flags: i32) -> io::Result<()> {
        let name = c_string(name.as_ref())?;
        // SAFETY: an open descriptor and a C string.
        match unsafe { libc::unlinkat(self.file.as_raw_fd(), name.as_ptr(), flags) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Makes the directory's entries durable.
    pub fn sync(&self) -> io::Result<()> {
        self.file.sync_all()
    }
}

fn c_string(text: &OsStr) -> io::Result<CString> {
    CString::new(text.as_bytes()).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

fn open_at(at: i32, name: &CString, flags: i32) -> io::Result<File> {
    let flags = flags | libc::O_CLOEXEC | libc::O_NOCTTY | libc::O_NOFOLLOW;
    loop {
        // SAFETY: a descriptor or AT_FDCWD, a C string, flags and a mode.
        let fd = unsafe { libc::openat(at, name.as_ptr(), flags, FILE_MODE) };
        // SAFETY: the call just returned it.
        match unsafe { descriptor::returned(fd) } {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other.map(File::from),
        }
    }
}

fn stat_at(at: i32, name: &CString) -> io::Result<libc::stat> {
    let mut found = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: a descriptor or AT_FDCWD, a C string, and room for a stat.
    match unsafe { libc::fstatat(at, name.as_ptr(), found.as_mut_ptr(), libc::AT_SYMLINK_NOFOLLOW) } {
        // SAFETY: the call succeeded and filled the struct.
        0 => Ok(unsafe { found.assume_init() }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Replaces the error of a failed open by one that names the file that is in the way, if the errno does not.
fn explain(error: io::Error, at: i32, name: &CString, wanted: &str) -> io::Error {
    let explained =
        [libc::ELOOP, libc::ENOTDIR, libc::ENXIO, libc::EISDIR, libc::EACCES, libc::EPERM, libc::ENODEV];
    if !error.raw_os_error().is_some_and(|errno| explained.contains(&errno)) {
        return error;
    }
    let Ok(found) = stat_at(at, name) else { return error };
    let (kind, mode) = (found.st_mode & libc::S_IFMT, found.st_mode & 0o7777);
    match kind {
        libc::S_IFLNK => refused(format!(
            "it is a symbolic link of user {}, and links are not followed; remove the link",
            found.st_uid
        )),
        libc::S_IFDIR | libc::S_IFREG if found.st_uid != user() => {
            wrong_owner(if kind == libc::S_IFDIR { "directory" } else { "file" }, found.st_uid, mode)
        }
        libc::S_IFDIR if wanted == "a directory" => error,
        libc::S_IFREG if wanted == "a regular file" => error,
        _ => wrong_kind(found.st_mode, found.st_uid, wanted),
    }
}

fn wrong_owner(what: &str, owner: u32, mode: u32) -> io::Error {
    refused(format!(
        "the {what} belongs to user {owner} (mode {mode:04o}), but this process runs as user {}; run as its \
         owner, remove it, or choose another name or directory",
        user()
    ))
}

fn wrong_kind(mode: libc::mode_t, owner: u32, wanted: &str) -> io::Error {
    let kind = match mode & libc::S_IFMT {
        libc::S_IFIFO => "a FIFO",
        libc::S_IFSOCK => "a socket",
        libc::S_IFDIR => "a directory",
        libc::S_IFREG => "a regular file",
        _ => "a device",
    };
    let mode = mode & 0o7777;
    refused(format!("it is {kind} of user {owner} (mode {mode:04o}), but must be {wanted}; remove it"))
}

fn check_file(file: &File, path: &Path) -> io::Result<()> {
    let found = file.metadata()?;
    if found.mode() & libc::S_IFMT != libc::S_IFREG {
        return Err(wrong_kind(found.mode(), found.uid(), "a regular file"));
    }
    check_owner(file, "file")?;
    if found.nlink() > 1 {
        let links = found.nlink();
        return Err(refused(format!(
            "the file has {links} hard links, but must have one; remove the others"
        )));
    }
    restrict_mode(file, FILE_FORBIDDEN, path)
}

/// Gives the owner access to the file by its name: an umask may have left it out, and the file could not be opened again.
fn allow_owner(file: &File) -> io::Result<()> {
    let mode = file.metadata()?.mode() & 0o7777;
    match mode & FILE_MODE == FILE_MODE {
        true => Ok(()),
        false => file.set_permissions(Permissions::from_mode(mode | FILE_MODE)),
    }
}

fn check_owner(file: &File, what: &str) -> io::Result<()> {
    let found = file.metadata()?;
    if found.uid() == user() { Ok(()) } else { Err(wrong_owner(what, found.uid(), found.mode() & 0o7777)) }
}

/// Removes the permission bits `forbidden`. A file system without modes may keep them; an error only if other users may
/// still write.
fn restrict_mode(file: &File, forbidden: u32, path: &Path) -> io::Result<()> {
    let mode = file.metadata()?.mode() & 0o7777;
    if mode & forbidden == 0 {
        return Ok(());
    }
    let changed = file.set_permissions(Permissions::from_mode(mode & !forbidden));
    let now = file.metadata()?.mode() & 0o7777;
    if now & OTHERS_WRITE != 0 {
        let why = changed.err().map_or(String::new(), |error| format!(" ({error})"));
        return Err(refused(format!(
            "other users may write to it (mode {now:04o}), and changing the mode had no effect{why}"
        )));
    }
    // The whole path if the system reports it: a name alone does not identify the directory.
    let whole = super::file::name_of(file);
    let path = whole.as_deref().unwrap_or(path).display();
    log::write(
        Level::Warn,
        &format!("{path}: mode {mode:04o} gave other users access; it was changed to {now:04o}"),
    );
    Ok(())
}

/// Clears O_NONBLOCK: with it io_uring returns EAGAIN where a regular file has to wait.
fn make_blocking(file: &File) -> io::Result<()> {
    // SAFETY: fcntl on an open descriptor.
    let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
    // SAFETY: the same.
    if flags < 0 || unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags & !libc::O_NONBLOCK) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

mod given;
pub use given::GivenDirectory;

#[cfg(test)]
pub mod tests;
