//! Memory that several processes map: files of tmpfs, and anonymous files (memfd).
//!
//! Invariants:
//! - An anonymous file cannot change its size (F_SEAL_SHRINK, F_SEAL_GROW). A file of tmpfs can be truncated by other
//!   processes of its owner; an access beyond its end then raises SIGBUS.
//! - Memory is allocated before it is mapped for use, so a full tmpfs is an error here and no SIGBUS later.
//! - Words that processes share are accessed atomically. Bytes that another process may write at the same time are
//!   copied in words, atomically each: the copy may be mixed, and the caller finds out.

use std::fs::{File, Permissions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use super::memory::{BASE_PAGE, HUGE_PAGE, Mapping};
use super::node_memory;
use super::span::Span;
use super::{descriptor, futex};

/// The directory of POSIX shared memory.
pub const DIRECTORY: &str = "/dev/shm";

/// An anonymous file.
#[derive(Debug)]
pub struct AnonymousFile {
    /// The file.
    pub file: File,
    /// True if reserved huge pages back it.
    pub huge: bool,
    /// Why huge pages were wanted and do not back it.
    pub refused: Option<io::Error>,
}

/// Makes an anonymous file of `bytes` bytes, which are not allocated yet. With `huge` it tries reserved huge pages;
/// `bytes` is then a multiple of their size. A file of reserved pages may still fail to be mapped: the system reserves
/// the pages then.
pub fn anonymous(name: &str, bytes: usize, huge: bool) -> io::Result<AnonymousFile> {
    let base = |refused| Ok(AnonymousFile { file: sized(memfd(name, 0)?, bytes)?, huge: false, refused });
    if !huge {
        return base(None);
    }
    match memfd(name, libc::MFD_HUGETLB | libc::MFD_HUGE_2MB).and_then(|file| sized(file, bytes)) {
        Ok(file) => Ok(AnonymousFile { file, huge: true, refused: None }),
        Err(error) => base(Some(error)),
    }
}

fn memfd(name: &str, flags: libc::c_uint) -> io::Result<File> {
    let name = std::ffi::CString::new(name).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
    // SAFETY: a C string and flags.
    let fd =
        unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | flags) };
    // SAFETY: the call just returned it.
    let file = File::from(unsafe { descriptor::returned(fd) }?);
    // A process of another user that receives the descriptor cannot open the file anew.
    file.set_permissions(Permissions::from_mode(0o600))?;
    Ok(file)
}

fn sized(file: File, bytes: usize) -> io::Result<File> {
    file.set_len(bytes as u64)?;
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: an open descriptor and flags.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(file),
    }
}

/// Allocates the first `bytes` bytes of a file, which has at least that length.
pub fn allocate(file: &File, bytes: usize) -> io::Result<()> {
    let bytes = libc::off_t::try_from(bytes).map_err(|_| io::Error::from_raw_os_error(libc::ENOSPC))?;
    loop {
        // SAFETY: an open descriptor and numbers.
        if unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, bytes) } == 0 {
            return Ok(());
        }
        match io::Error::last_os_error() {
            error if error.kind() == io::ErrorKind::Interrupted => {}
            error => return Err(error),
        }
    }
}

/// Opens the file of a descriptor anew: the result shares no locks and no position with the descriptor.
pub fn reopen(fd: RawFd, write: bool) -> io::Result<File> {
    descriptor::open(File::options().read(true).write(write), format!("/proc/self/fd/{fd}"))
}

/// Number of bytes, if the descriptor is a file of shared memory that this user owns and that cannot shrink; else why
/// it is refused.
pub fn checked_size(file: &File, sealed: bool) -> io::Result<Result<u64, String>> {
    let found = file.metadata()?;
    if found.mode() & libc::S_IFMT != libc::S_IFREG || (!is_tmpfs(file)? && !is_hugetlb(file)?) {
        return Ok(Err("the file is not shared memory (a file of tmpfs or a memfd)".to_string()));
    }
    // SAFETY: an open descriptor.
    let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    if sealed && (seals < 0 || seals & libc::F_SEAL_SHRINK == 0) {
        return Ok(Err("the memfd is not sealed with F_SEAL_SHRINK, so its pages could vanish".to_string()));
    }
    Ok(Ok(found.len()))
}

fn is_tmpfs(file: &File) -> io::Result<bool> {
    Ok(file_system(file)? == libc::TMPFS_MAGIC)
}

fn is_hugetlb(file: &File) -> io::Result<bool> {
    Ok(file_system(file)? == libc::HUGETLBFS_MAGIC)
}

fn file_system(file: &File) -> io::Result<libc::__fsword_t> {
    // SAFETY: integers, for which zeros are valid.
    let mut found: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: an open descriptor, and a struct that the call fills.
    match unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut found) } {
        0 => Ok(found.f_type),
        _ => Err(io::Error::last_os_error()),
    }
}

/// How a file is mapped.
#[derive(Debug, Clone, Copy, Default)]
pub struct MapOptions {
    /// Map for reading and writing, else for reading only.
    pub write: bool,
    /// Ask for transparent huge pages.
    pub huge: bool,
    /// Bind the pages to this NUMA node.
    pub node: Option<u32>,
}

/// A shared mapping of a whole file. Unmapped on drop.
#[derive(Debug)]
pub struct SharedMapping {
    span: Span,
    write: bool,
    mapping: Arc<Mapping>,
}

impl SharedMapping {
    /// Maps the first `bytes` bytes of a file that has at least as many. A refused node is not an error: its reason is
    /// the second value.
    pub fn map(file: &File, bytes: usize, options: MapOptions) -> io::Result<(Self, Option<io::Error>)> {
        let access = libc::PROT_READ | if options.write { libc::PROT_WRITE } else { 0 };
        let fd = file.as_raw_fd();
        // SAFETY: a fresh mapping of an open file.
        let start = unsafe { libc::mmap(ptr::null_mut(), bytes, access, libc::MAP_SHARED, fd, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just mapped; the mapping made from this span pins it for every use.
        let span = unsafe { Span::new(start.cast(), bytes) }.ok_or(io::ErrorKind::OutOfMemory)?;
        let mapping = Arc::new(Mapping::of(span)?);
        if options.huge {
            // SAFETY: the range is mapped. Without the advice the mapping has base pages.
            unsafe { libc::madvise(start, bytes, libc::MADV_HUGEPAGE) };
        }
        let present = file.metadata().map_or(0, |found| found.blocks().saturating_mul(512));
        let absent = (bytes as u64).saturating_sub(present);
        let bound = options.node.and_then(|node| node_memory::bind(span, node, absent).err());
        Ok((SharedMapping { span: mapping.span(), write: options.write, mapping }, bound))
    }

    /// All bytes.
    pub fn span(&self) -> Span {
        self.span
    }

    /// The memory, which stays mapped as long as the result lives.
    pub fn memory(&self) -> Arc<Mapping> {
        Arc::clone(&self.mapping)
    }

    /// True if the mapping can be written.
    pub fn is_writable(&self) -> bool {
        self.write
    }

    /// The 64-bit word at `at`.
    pub fn load64(&self, at: usize, order: Ordering) -> u64 {
        self.word64(at).load(order)
    }

    /// The 32-bit word at `at`.
    pub fn load32(&self, at: usize, order: Ordering) -> u32 {
        self.word32(at).load(order)
    }

    /// Stores a 64-bit word. Panics if the mapping is read-only.
    pub fn store64(&self, at: usize, value: u64, order: Ordering) {
        self.check_write();
        self.word64(at).store(value, order);
    }

    /// Replaces the 64-bit word at `at` if it is `seen`; else returns its value. Panics if the mapping is read-only.
    pub fn exchange64(&self, at: usize, seen: u64, value: u64) -> Result<(), u64> {
        self.check_write();
        self.word64(at).compare_exchange(seen, value, Ordering::SeqCst, Ordering::SeqCst).map(drop)
    }

    /// Increments the 32-bit word at `at`, and wakes the threads of all processes that wait for it. Panics if the
    /// mapping is read-only.
    pub fn ring(&self, at: usize) {
        self.check_write();
        let word = self.word32(at);
        word.fetch_add(1, Ordering::AcqRel);
        futex::wake_all(word);
    }

    /// Sleeps while the 32-bit word at `at` is `seen`, at most for `limit`.
    pub fn wait(&self, at: usize, seen: u32, limit: Duration) {
        futex::wait(self.word32(at), seen, limit);
    }

    /// Stores bytes that no other process reads yet. Panics if the mapping is read-only.
    pub fn write(&self, at: usize, bytes: &[u8]) {
        self.check_write();
        self.span.part(at, bytes.len()).write(bytes);
    }

    /// Copies bytes that another process may write at the same time: the copy may be a mixture then.
    pub fn copy_out(&self, at: usize, to: &mut [u8]) {
        const WORD: usize = size_of::<u64>();
        let from = self.span.part(at, to.len());
        let head = (from.address().next_multiple_of(WORD) - from.address()).min(to.len());
        let (first, rest) = to.split_at_mut(head);
        let words = rest.len() / WORD;
        let (middle, last) = rest.split_at_mut(words * WORD);
        let (body, tail) = (from.part(head, words * WORD), from.part(head + words * WORD, last.len()));
        for (to, n) in middle.chunks_exact_mut(WORD).zip(0..) {
            // SAFETY: an aligned word inside the mapping, which lives as long as self.
            let word = unsafe { &*body.as_ptr().cast::<AtomicU64>().add(n) };
            to.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
        for (part, to) in [(from.part(0, head), first), (tail, last)] {
            for (to, n) in to.iter_mut().zip(0..) {
                // SAFETY: a byte inside the mapping, which lives as long as self.
                let byte = unsafe { &*part.as_ptr().cast::<std::sync::atomic::AtomicU8>().add(n) };
                *to = byte.load(Ordering::Relaxed);
            }
        }
    }

    fn word64(&self, at: usize) -> &AtomicU64 {
        let place = self.span.part(at, size_of::<AtomicU64>());
        assert!(at.is_multiple_of(align_of::<AtomicU64>()), "a misaligned word at {at}");
        // SAFETY: inside the mapping, which is page-aligned and lives as long as self; only atomic accesses use it.
        unsafe { &*place.as_ptr().cast() }
    }

    fn word32(&self, at: usize) -> &AtomicU32 {
        let place = self.span.part(at, size_of::<AtomicU32>());
        assert!(at.is_multiple_of(align_of::<AtomicU32>()), "a misaligned word at {at}");
        // SAFETY: as in `word64`.
        unsafe { &*place.as_ptr().cast() }
    }

    fn check_write(&self) {
        assert!(self.write, "a write to memory that is mapped for reading only");
    }
}

/// `bytes` rounded up to whole pages, huge ones if `huge`; `None` above the address space.
pub fn whole_pages(bytes: usize, huge: bool) -> Option<usize> {
    bytes.checked_next_multiple_of(if huge { HUGE_PAGE } else { BASE_PAGE })
}

/// Why tmpfs gives no transparent huge pages on request; `None` if it does.
pub fn no_huge_reason() -> Option<String> {
    const SETTING: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
    match std::fs::read_to_string(SETTING) {
        Ok(text)
            if ["[always]", "[within_size]", "[advise]", "[force]"].iter().any(|on| text.contains(on)) =>
        {
            None
        }
        Ok(text) => Some(format!("{SETTING} is \"{}\"", text.trim())),
        Err(error) => Some(format!("{SETTING}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_mappings_of_one_file_share_their_bytes() {
        let made = anonymous("spillway-test", 3 * BASE_PAGE, false).unwrap();
        let bytes = checked_size(&made.file, true).unwrap().unwrap() as usize;
        assert_eq!(bytes, 3 * BASE_PAGE);
        let (ours, _) =
            SharedMapping::map(&made.file, bytes, MapOptions { write: true, ..Default::default() }).unwrap();
        let again = reopen(made.file.as_raw_fd(), false).unwrap();
        let (theirs, _) = SharedMapping::map(&again, bytes, MapOptions::default()).unwrap();
        let text: Vec<u8> = (0..200).collect();
        for at in 0..17 {
            ours.write(at, &text);
            let mut seen = [0; 200];
            theirs.copy_out(at, &mut seen[..]);
            assert_eq!(seen[..], text[..], "from {at}");
            theirs.copy_out(at, &mut seen[..3]);
        }
        ours.store64(64, 7, Ordering::Release);
        assert_eq!(theirs.load64(64, Ordering::Acquire), 7);
        assert_eq!((ours.exchange64(64, 6, 9), ours.exchange64(64, 7, 7)), (Err(7), Ok(())));
        assert!(!theirs.is_writable());
        let written = std::panic::AssertUnwindSafe(|| theirs.store64(64, 8, Ordering::Release));
        assert!(std::panic::catch_unwind(written).is_err());
    }

    #[test]
    fn files_that_are_no_sealed_shared_memory_are_refused_and_sizes_cannot_shrink() {
        let made = anonymous("spillway-test", BASE_PAGE, false).unwrap();
        assert!(made.file.set_len(0).is_err());
        let plain = File::open("/proc/self/exe").unwrap();
        assert!(checked_size(&plain, false).unwrap().is_err());
        let unsealed = memfd("spillway-test", 0).unwrap();
        assert!(checked_size(&unsealed, true).unwrap().is_err());
        assert_eq!(checked_size(&unsealed, false).unwrap(), Ok(0));
    }

    #[test]
    fn huge_pages_that_are_not_reserved_are_replaced_with_a_reason() {
        let made = anonymous("spillway-test", HUGE_PAGE, true).unwrap();
        assert_eq!(made.huge, made.refused.is_none());
        assert!(anonymous("spillway-test", usize::MAX, false).is_err());
    }
}
