//! Files for direct I/O: open, alignment, preallocation, positional reads and writes of spans, device limits.
//!
//! System calls go through nix. Two are called directly: pread and pwrite, since another thread may change the bytes of
//! a span, which a slice forbids; statx, which nix lacks.

use std::fmt;
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{self, FallocateFlags, FcntlArg, PosixFadviseAdvice};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::statfs::{FsType, TMPFS_MAGIC, fstatfs, statfs};
use nix::sys::statvfs::{Statvfs, fstatvfs, statvfs};
use nix::unistd::{self, Whence, lseek};

use super::span::Span;
use super::{descriptor, memory};

/// What a file is opened for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Access {
    /// Reading.
    Read,
    /// Writing. The file is created with this mode if it does not exist, and is never truncated.
    Write {
        /// Permission bits of a new file, before the umask.
        mode: u32,
    },
}

/// Opens `path`; bypasses the page cache if `direct`.
pub fn open(path: &Path, access: Access, direct: bool) -> io::Result<File> {
    let mut options = OpenOptions::new();
    match access {
        Access::Read => options.read(true),
        Access::Write { mode } => options.write(true).create(true).truncate(false).mode(mode),
    };
    let direct = if direct { libc::O_DIRECT } else { 0 };
    descriptor::open(options.custom_flags(direct | libc::O_NOCTTY), path)
}

/// Opens a second descriptor of an open file, which uses the page cache.
pub fn reopen_buffered(fd: &impl AsRawFd, writable: bool) -> io::Result<File> {
    let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
    descriptor::open(OpenOptions::new().read(!writable).write(writable).custom_flags(libc::O_NOCTTY), link)
}

/// Duplicates the caller's descriptor, so that the copy lives as long as the operation. Also returns whether it is
/// direct.
pub fn duplicate(fd: i32) -> io::Result<(File, bool)> {
    let file = File::from(descriptor::duplicate(fd)?);
    let direct = flags(&file).is_ok_and(|flags| flags & libc::O_DIRECT != 0);
    Ok((file, direct))
}

/// Renames a directory to a name that must not exist.
pub fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    use fcntl::{AT_FDCWD, RenameFlags, renameat2};
    match renameat2(AT_FDCWD, from, AT_FDCWD, to, RenameFlags::RENAME_NOREPLACE) {
        // The file system cannot refuse an existing name. A new directory takes the name first, and is then replaced.
        Err(Errno::EINVAL | Errno::ENOSYS) => {
            std::fs::DirBuilder::new().mode(0o700).create(to)?;
            std::fs::rename(from, to).inspect_err(|_| drop(std::fs::remove_dir(to)))
        }
        renamed => Ok(renamed?),
    }
}

fn flags(file: &File) -> nix::Result<i32> {
    fcntl::fcntl(file, FcntlArg::F_GETFL)
}

/// True if writes append to the file and ignore their offset (O_APPEND).
pub fn appends(file: &File) -> bool {
    flags(file).is_ok_and(|flags| flags & libc::O_APPEND != 0)
}

/// Offset of the first data at `from` or later, skipping holes if the file system reports them; `None` at the end.
pub fn next_data(file: &File, from: u64) -> Option<u64> {
    // No code uses the file position: reads and writes pass an explicit offset.
    match lseek(file, from as libc::off_t, Whence::SeekData) {
        Ok(found) => Some(found as u64),
        Err(Errno::ENXIO) => None,
        // The file system does not report holes: the rest counts as data.
        Err(_) => Some(from),
    }
}

/// Creates an empty file in memory (memfd).
pub fn in_memory() -> io::Result<File> {
    Ok(descriptor::moved(memfd_create(c"spillway", MFdFlags::MFD_CLOEXEC)?)?.into())
}

/// Disables readahead, so that a read of an unaligned edge does not fetch the bytes behind it.
pub fn no_readahead(file: &File) {
    // Advice that the file system refuses changes nothing.
    let _ = fcntl::posix_fadvise(file, 0, 0, PosixFadviseAdvice::POSIX_FADV_RANDOM);
}

/// Asks the file system to overwrite the data of an empty file in place, where it would write to new blocks (btrfs). A
/// refusal changes nothing.
pub fn write_in_place(file: &File) {
    const NO_COPY_ON_WRITE: libc::c_long = 0x0080_0000;
    let mut flags: libc::c_long = 0;
    // SAFETY: an open descriptor, and a long that outlives the calls, which access a part of it or all.
    unsafe {
        if libc::ioctl(file.as_raw_fd(), libc::FS_IOC_GETFLAGS, &raw mut flags) == 0 {
            flags |= NO_COPY_ON_WRITE;
            libc::ioctl(file.as_raw_fd(), libc::FS_IOC_SETFLAGS, &raw const flags);
        }
    }
}

/// Lets `len` bytes of a file, from `from` on, also be the bytes of another file at `to`, without a copy (FICLONERANGE). All
/// three are whole blocks of the file system. An error, and no change, if the file system cannot share blocks, or the files
/// are on different ones.
pub fn share_blocks(source: BorrowedFd, from: u64, target: BorrowedFd, to: u64, len: u64) -> io::Result<()> {
    let source = i64::from(source.as_raw_fd());
    let range = libc::file_clone_range { src_fd: source, src_offset: from, src_length: len, dest_offset: to };
    // SAFETY: open descriptors, and a struct of the kernel's that outlives the call, which reads it.
    match unsafe { libc::ioctl(target.as_raw_fd(), libc::FICLONERANGE as _, &raw const range) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The name that an open file or directory has now.
pub fn name_of(file: &File) -> io::Result<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Drops clean pages of a file from the page cache, so that the next read asks the device or the server.
pub fn drop_cache(file: &File) {
    // Advice that the file system refuses changes nothing.
    let _ = fcntl::posix_fadvise(file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
}

/// Identity of a file: paths with equal device and inode name the same file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Identity {
    /// Device that holds it.
    pub device: u64,
    /// Inode number on the device.
    pub inode: u64,
}

/// Metadata of a file.
#[derive(Debug, Clone, Copy)]
pub struct FileInfo {
    /// Which file.
    pub identity: Identity,
    /// Length when queried.
    pub len: u64,
    /// True for a regular file or block device: only these have meaningful offsets.
    pub seekable: bool,
    /// Number of its names (hard links).
    pub links: u64,
}

/// Metadata of the file that `path` names now.
pub fn info_of_path(path: &Path) -> io::Result<FileInfo> {
    std::fs::metadata(path).map(|found| to_info(&found))
}

/// Metadata of an open file.
pub fn info(file: &File) -> io::Result<FileInfo> {
    file.metadata().map(|found| to_info(&found))
}

fn to_info(found: &Metadata) -> FileInfo {
    let kind = found.mode() & libc::S_IFMT;
    FileInfo {
        identity: Identity { device: found.dev(), inode: found.ino() },
        len: found.len(),
        seekable: kind == libc::S_IFREG || kind == libc::S_IFBLK,
        links: found.nlink(),
    }
}

/// Alignment that direct I/O on a file requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DirectAlignment {
    /// The file system states the alignment, in bytes.
    Stated {
        /// Alignment of addresses.
        memory: u64,
        /// Alignment of offsets and lengths.
        offset: u64,
    },
    /// The file system states that this file does not support direct I/O.
    Refused,
    /// The file system or an older kernel does not state the alignment.
    Unknown,
}

/// Queries the alignment for direct I/O on an open file (STATX_DIOALIGN, Linux 6.1).
pub fn direct_alignment(file: &File) -> DirectAlignment {
    // SAFETY: statx is plain integers, for which zero is valid.
    let mut found: libc::statx = unsafe { std::mem::zeroed() };
    let mask = libc::STATX_DIOALIGN;
    // SAFETY: an open descriptor, an empty path, a live struct.
    let outcome =
        unsafe { libc::statx(file.as_raw_fd(), c"".as_ptr(), libc::AT_EMPTY_PATH, mask, &mut found) };
    match (found.stx_dio_mem_align, found.stx_dio_offset_align) {
        _ if outcome != 0 || found.stx_mask & mask == 0 => DirectAlignment::Unknown,
        (0, _) | (_, 0) => DirectAlignment::Refused,
        (memory, offset) => DirectAlignment::Stated { memory: memory.into(), offset: offset.into() },
    }
}

/// Allocates the bytes from `from` to `end` on the device, so that writing them never extends the file. No error if the
/// file system does not support allocation.
pub fn preallocate(file: &File, from: u64, end: u64) -> io::Result<()> {
    check_size_limit(end)?;
    check_free_space(file, from, end)?;
    loop {
        match -allocate_at(file.as_fd(), from, end - from) {
            0 => return Ok(()),
            libc::EINTR => {}
            errno if cannot_allocate(errno) => return Ok(()),
            errno => return Err(io::Error::from_raw_os_error(errno)),
        }
    }
}

/// Allocates `bytes` at `offset` on the device: 0, or minus an errno.
pub fn allocate_at(fd: BorrowedFd, offset: u64, bytes: u64) -> i32 {
    let (offset, bytes) = (offset as libc::off_t, bytes as libc::off_t);
    minus_errno(fcntl::fallocate(fd, FallocateFlags::empty(), offset, bytes))
}

/// True for an errno that means that this file or its file system does not support allocation.
pub fn cannot_allocate(errno: i32) -> bool {
    matches!(errno, libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL | libc::ENODEV | libc::ESPIPE)
}

/// Refuses an end of file past this process's limit (RLIMIT_FSIZE). A system call past the limit would raise SIGXFSZ,
/// which by default kills the program.
pub fn check_size_limit(end: u64) -> io::Result<()> {
    match memory::file_size_limit().is_some_and(|limit| end > limit) {
        true => Err(io::Error::from_raw_os_error(libc::EFBIG)),
        false => Ok(()),
    }
}

/// Refuses an allocation larger than the free space: a file system would fill up before it fails, and keep what it
/// allocated. Amounts up to 64 MiB are not checked, to save the system call.
pub fn check_free_space(file: &File, from: u64, end: u64) -> io::Result<()> {
    const WORTH_ASKING: u64 = 64 << 20;
    if end.saturating_sub(from) <= WORTH_ASKING {
        return Ok(());
    }
    let grows = end - file.metadata()?.len().clamp(from, end);
    match grows > WORTH_ASKING && free_bytes_of(file).is_some_and(|free| grows > free) {
        true => Err(io::Error::from_raw_os_error(libc::ENOSPC)),
        false => Ok(()),
    }
}

/// One positional read into `span`: number of bytes read, or minus an errno.
pub fn read_at(fd: BorrowedFd, span: Span, offset: u64) -> i32 {
    let Some(_pin) = span.pin() else { return -libc::EFAULT };
    // SAFETY: the span's bytes are good by the promise of Span::new, or pinned.
    count(unsafe { libc::pread(fd.as_raw_fd(), span.as_ptr().cast(), span.len(), offset as libc::off_t) })
}

/// One positional write from `span`: number of bytes written, or minus an errno.
pub fn write_at(fd: BorrowedFd, span: Span, offset: u64) -> i32 {
    let Some(_pin) = span.pin() else { return -libc::EFAULT };
    // SAFETY: the span's bytes are good by the promise of Span::new, or pinned.
    count(unsafe { libc::pwrite(fd.as_raw_fd(), span.as_ptr().cast(), span.len(), offset as libc::off_t) })
}

/// Makes earlier writes durable (fdatasync): 0, or minus an errno.
pub fn sync_data(fd: BorrowedFd) -> i32 {
    minus_errno(unistd::fdatasync(fd))
}

fn count(result: isize) -> i32 {
    // Fits: the spans of one call are far below 2 GiB.
    Errno::result(result).map_or_else(|errno| -(errno as i32), |bytes| bytes as i32)
}

fn minus_errno(result: nix::Result<()>) -> i32 {
    result.map_or_else(|errno| -(errno as i32), |()| 0)
}

/// Limits of one request to a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestLimits {
    /// Most bytes.
    pub bytes: u64,
    /// Most ranges of physical memory.
    pub segments: u64,
}

/// The request limits of a device; `None` if it is not a block device with a queue.
pub fn request_limits(device: u64) -> Option<RequestLimits> {
    let device = device as libc::dev_t;
    let node = format!("/sys/dev/block/{}:{}", libc::major(device), libc::minor(device));
    // A partition has no queue; the queue of its disk is in the parent directory.
    let queue = [format!("{node}/queue"), format!("{node}/../queue")];
    queue.iter().find_map(|queue| {
        let number = |name: &str| -> Option<u64> {
            std::fs::read_to_string(format!("{queue}/{name}")).ok()?.trim().parse().ok()
        };
        Some(RequestLimits { bytes: number("max_sectors_kb")? * 1024, segments: number("max_segments")? })
    })
}

/// Identity of a file system. It survives a restart if the file system has an id of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct FileSystem {
    /// The kernel's number of the file system type.
    pub kind: u64,
    /// The file system's id, or the device number if it has none.
    pub id: u64,
}

/// Types of file systems that one kernel has to itself. Their locks exclude every process that can write to them.
const LOCAL: [u64; 19] = [
    0xEF53,      // ext2, ext3, ext4
    0x5846_5342, // XFS
    0x9123_683E, // btrfs
    0x0102_1994, // tmpfs
    0x8584_58F6, // ramfs
    0x794C_7630, // overlayfs
    0xF2F5_2010, // F2FS
    0x2FC1_2FC1, // ZFS
    0xCA45_1A4E, // bcachefs
    0x3153_464A, // JFS
    0x5265_4973, // ReiserFS
    0x3434,      // NILFS
    0x4D44,      // FAT
    0x2011_BAB0, // exFAT
    0x7366_746E, // NTFS
    0x4244,      // HFS
    0x482B,      // HFS+
    0x24051905,  // UBIFS
    0x9584_58F6, // hugetlbfs
];

impl FileSystem {
    /// True if one kernel has the file system to itself. Network, cluster and FUSE file systems have other writers, and
    /// so has every type that is not known.
    pub fn is_local(&self) -> bool {
        LOCAL.contains(&(self.kind & 0xFFFF_FFFF))
    }

    /// Parses the output of `Display`.
    pub fn parse(text: &str) -> Option<FileSystem> {
        let (kind, id) = text.split_once('-')?;
        let number = |text| u64::from_str_radix(text, 16).ok();
        Some(FileSystem { kind: number(kind)?, id: number(id)? })
    }
}

impl fmt::Display for FileSystem {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:x}-{:x}", self.kind, self.id)
    }
}

/// The file system of an open file or directory.
pub fn file_system(file: &File) -> io::Result<FileSystem> {
    let kind = fstatfs(file)?.filesystem_type().0 as u64;
    let id = match fstatvfs(file)?.filesystem_id() {
        0 => file.metadata()?.dev(),
        id => id,
    };
    Ok(FileSystem { kind, id })
}

/// Free bytes for this user on the file system of an open file; `None` if it does not say.
pub fn free_bytes_of(file: &File) -> Option<u64> {
    free(fstatvfs(file).ok()?, fstatfs(file).ok()?.filesystem_type())
}

/// Free bytes for this user on the file system of `path`, for messages; `None` if it does not say.
pub fn free_bytes(path: &Path) -> Option<u64> {
    free(statvfs(path).ok()?, statfs(path).ok()?.filesystem_type())
}

/// A file system without a size reports no blocks. Where it is in memory, as that of a memfd, the memory is its size.
fn free(found: Statvfs, kind: FsType) -> Option<u64> {
    match found.blocks() {
        0 if kind == TMPFS_MAGIC => memory::available_bytes(),
        0 => None,
        _ => Some(found.blocks_available().saturating_mul(found.fragment_size())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rename_to_a_new_name_never_replaces_an_empty_directory() {
        let base = tempfile::tempdir().unwrap();
        let (from, to) = (base.path().join("from"), base.path().join("to"));
        [&from, &to].iter().for_each(|path| std::fs::create_dir(path).unwrap());
        assert_eq!(rename_new(&from, &to).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        std::fs::remove_dir(&to).unwrap();
        rename_new(&from, &to).unwrap();
        assert!(to.exists() && !from.exists());
    }

    #[test]
    fn a_place_beyond_what_the_disk_has_is_refused_before_the_disk_is_full() {
        // The file system of anonymous memory has no size: what is free is the memory of the machine.
        for file in [tempfile::tempfile().unwrap(), in_memory().unwrap()] {
            let free = free_bytes_of(&file).unwrap();
            let error = preallocate(&file, 0, free + (1 << 40)).unwrap_err();
            assert_eq!((error.raw_os_error(), file.metadata().unwrap().len()), (Some(libc::ENOSPC), 0));
            preallocate(&file, 0, 65 << 20).unwrap();
        }
    }
}
