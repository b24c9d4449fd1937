//! Memory for buffers: 2 MiB pages if possible, populated, locked, bound to a NUMA node. [`super::shared_memory`] maps
//! memory that other processes share.

use std::io;
use std::os::fd::AsRawFd;
use std::ptr;

use super::cgroup_memory;
use super::mapping_table::MappingId;
use super::node_memory;
use super::span::Span;
use super::topology::Root;

/// Size of a base page; allocations are rounded up to it.
pub const BASE_PAGE: usize = 4096;
/// Size of a huge page.
pub const HUGE_PAGE: usize = 2 << 20;

/// Pages that back a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageKind {
    /// Base pages.
    Base,
    /// Transparent huge pages; verified after the mapping was populated.
    Transparent,
    /// Huge pages that the administrator reserved (hugetlbfs pool).
    Reserved,
}

impl PageKind {
    /// Bytes that are contiguous in physical memory.
    pub fn bytes(self) -> usize {
        match self {
            PageKind::Base => BASE_PAGE,
            PageKind::Transparent | PageKind::Reserved => HUGE_PAGE,
        }
    }
}

/// Memory that this process mapped, unmapped on drop: private and zeroed, unless another module mapped it.
#[derive(Debug)]
pub struct Mapping {
    span: Span,
    kind: PageKind,
    id: MappingId,
}

impl Mapping {
    /// Takes ownership of a fresh mapping of base pages, which no other code unmaps. On failure the range is unmapped.
    pub(super) fn of(span: Span) -> io::Result<Mapping> {
        // SAFETY: whole pages that were just mapped, and that no other code unmaps.
        match unsafe { MappingId::begin(span.address(), span.len()) } {
            Some(id) => Ok(Mapping { span: span.of(id), kind: PageKind::Base, id }),
            None => {
                // SAFETY: as above.
                unsafe { libc::munmap(span.as_ptr().cast(), span.len()) };
                Err(io::Error::from_raw_os_error(libc::ENOMEM))
            }
        }
    }

    /// Maps `bytes`, rounded up to whole pages, without touching them. From 2 MiB on transparent huge pages are
    /// requested.
    pub fn untouched(bytes: usize) -> io::Result<Mapping> {
        let mapping = Mapping::of(map(round_up(bytes, BASE_PAGE)?, 0)?)?;
        if mapping.span.len() >= HUGE_PAGE {
            mapping.advise(libc::MADV_HUGEPAGE).ok();
        }
        Ok(mapping)
    }

    /// Maps `bytes`, rounded up to whole pages, of which only those that are touched ever take memory.
    pub fn sparse(bytes: usize) -> io::Result<Mapping> {
        let mapping = Mapping::of(map(round_up(bytes, BASE_PAGE)?, libc::MAP_NORESERVE)?)?;
        // Huge pages would take memory that is never written. Without the advice the mapping still works.
        let _ = mapping.advise(libc::MADV_NOHUGEPAGE);
        Ok(mapping)
    }

    /// Maps one zeroed page. In a forked child the page reads as zeros again.
    pub fn emptied_by_fork() -> io::Result<Mapping> {
        const NO_ADVICE: libc::c_int = -1;
        let mapping = Mapping::of(map(BASE_PAGE, 0)?)?;
        // Emulators accept every madvise request and ignore it: this invalid one detects them.
        if mapping.advise(NO_ADVICE).is_ok() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        mapping.advise(libc::MADV_WIPEONFORK)?;
        Ok(mapping)
    }

    /// Maps `bytes`, rounded up to whole base or reserved pages, for the pages asked for, and binds them to `node` if given.
    /// [`Mapping::populate`] takes the pages. A refused node is not an error; the reason is the second value.
    ///
    /// A request larger than the available memory without the `promised` bytes is refused. An overcommitting system might
    /// grant the addresses, and end this process or another one when they are touched.
    pub fn unpopulated(
        bytes: usize,
        pages: PageKind,
        node: Option<u32>,
        promised: u64,
    ) -> io::Result<(Mapping, Option<io::Error>)> {
        if available_bytes().is_some_and(|available| promised.saturating_add(bytes as u64) > available) {
            return Err(io::Error::from_raw_os_error(libc::ENOMEM));
        }
        let mapping = match pages {
            PageKind::Base => Mapping::of(map(round_up(bytes, BASE_PAGE)?, 0)?)?,
            PageKind::Transparent => Mapping::of(aligned(round_up(bytes, BASE_PAGE)?)?)?,
            PageKind::Reserved => reserved(round_up(bytes, HUGE_PAGE)?)?,
        };
        let bound = mapping.bind(node).err();
        if pages == PageKind::Transparent {
            mapping.advise(libc::MADV_HUGEPAGE).ok();
        }
        Ok((mapping, bound))
    }

    /// Populates the `len` bytes that begin `from` bytes into the mapping, whole pages. Returns an error where a plain write
    /// would raise SIGBUS.
    pub fn populate(&self, from: usize, len: usize) -> io::Result<()> {
        let part = self.span.part(from, len);
        match advise(part, libc::MADV_POPULATE_WRITE) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                touch(part);
                Ok(())
            }
            other => other,
        }
    }

    /// Notes which pages back the mapping, after all of it was populated.
    pub fn note_kind(&mut self) {
        let bytes = self.span.len();
        if self.kind == PageKind::Base && bytes >= HUGE_PAGE && huge_bytes(self.span) >= bytes / 10 * 9 {
            self.kind = PageKind::Transparent;
        }
    }

    /// The memory.
    pub fn span(&self) -> Span {
        self.span
    }

    /// The pages that back the mapping.
    pub fn kind(&self) -> PageKind {
        self.kind
    }

    /// Keeps the memory from being paged out.
    pub fn lock(&self) -> io::Result<()> {
        // SAFETY: the range is mapped.
        check(unsafe { libc::mlock(self.span.as_ptr().cast(), self.span.len()) })
    }

    /// Excludes the memory from children forked from now on (MADV_DONTFORK), or includes it again.
    pub fn hide_from_children(&self, hide: bool) -> io::Result<()> {
        self.advise(if hide { libc::MADV_DONTFORK } else { libc::MADV_DOFORK })
    }

    fn bind(&self, node: Option<u32>) -> io::Result<()> {
        node.map_or(Ok(()), |node| match self.kind {
            PageKind::Reserved => node_memory::bind_reserved(self.span, node),
            _ => node_memory::bind(self.span, node, self.span.len() as u64),
        })
    }

    fn advise(&self, advice: i32) -> io::Result<()> {
        advise(self.span, advice)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is dropped, and every span of it pins it before a use.
        unsafe { self.id.end() };
    }
}

/// Advice that discards no contents of this process, for a mapped range.
fn advise(span: Span, advice: i32) -> io::Result<()> {
    // SAFETY: the range is mapped; the advice used here discards no contents of this process.
    check(unsafe { libc::madvise(span.as_ptr().cast(), span.len(), advice) })
}

fn touch(span: Span) {
    for at in (0..span.len()).step_by(BASE_PAGE) {
        // SAFETY: inside a mapping, in a part that no other code uses yet.
        unsafe { span.as_ptr().add(at).write_volatile(0) };
    }
}

fn reserved(bytes: usize) -> io::Result<Mapping> {
    let mut mapping = Mapping::of(map(bytes, libc::MAP_HUGETLB | libc::MAP_HUGE_2MB)?)?;
    mapping.kind = PageKind::Reserved;
    Ok(mapping)
}

/// Maps bytes that begin at a multiple of a huge page.
fn aligned(bytes: usize) -> io::Result<Span> {
    let room = map(bytes.checked_add(HUGE_PAGE).ok_or(io::ErrorKind::OutOfMemory)?, 0)?;
    let head = room.address().next_multiple_of(HUGE_PAGE) - room.address();
    let tail = room.len() - head - bytes;
    for (from, len) in [(0, head), (head + bytes, tail)] {
        if len > 0 {
            // SAFETY: whole pages of the range just mapped, outside the part that is kept.
            unsafe { libc::munmap(room.part(from, len).as_ptr().cast(), len) };
        }
    }
    Ok(room.part(head, bytes))
}

fn map(bytes: usize, flags: i32) -> io::Result<Span> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags;
    // SAFETY: a fresh anonymous mapping.
    let start =
        unsafe { libc::mmap(ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just mapped; the mapping made from this span pins it for every use.
    unsafe { Span::new(start.cast(), bytes) }.ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

fn round_up(bytes: usize, page: usize) -> io::Result<usize> {
    bytes.max(1).checked_next_multiple_of(page).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

fn check(outcome: i32) -> io::Result<()> {
    match outcome {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Number of bytes of the span that transparent huge pages back; 0 if unknown.
fn huge_bytes(span: Span) -> usize {
    scan_huge_bytes(span).or_else(|| smaps_huge_bytes(span)).unwrap_or(0)
}

/// Uses the PAGEMAP_SCAN request of Linux 6.7, which walks only this range.
fn scan_huge_bytes(span: Span) -> Option<usize> {
    const PAGE_IS_HUGE: u64 = 1 << 6;
    const REGIONS: usize = 64;
    #[repr(C)]
    #[derive(Default, Clone, Copy)]
    struct Found {
        start: u64,
        end: u64,
        categories: u64,
    }
    #[repr(C)]
    struct Request {
        size: u64,
        flags: u64,
        start: u64,
        end: u64,
        walk_end: u64,
        vec: u64,
        vec_len: u64,
        max_pages: u64,
        category_inverted: u64,
        category_mask: u64,
        category_anyof_mask: u64,
        return_mask: u64,
    }
    const PAGEMAP_SCAN: libc::c_ulong = 0xC060_6610;
    let pagemap = std::fs::File::open("/proc/self/pagemap").ok()?;
    let end = (span.address() + span.len()) as u64;
    let mut found = [Found::default(); REGIONS];
    let mut request = Request {
        size: size_of::<Request>() as u64,
        flags: 0,
        start: span.address() as u64,
        end,
        walk_end: 0,
        vec: found.as_mut_ptr() as u64,
        vec_len: REGIONS as u64,
        max_pages: 0,
        category_inverted: 0,
        category_mask: PAGE_IS_HUGE,
        category_anyof_mask: 0,
        return_mask: PAGE_IS_HUGE,
    };
    let mut bytes = 0;
    while request.start < end {
        // SAFETY: the request and its vector are live and have the sizes they state.
        let count = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut request) };
        let count = usize::try_from(count).ok()?;
        bytes += found[..count].iter().map(|range| (range.end - range.start) as usize).sum::<usize>();
        request.start = request.walk_end.max(request.start + BASE_PAGE as u64);
    }
    Some(bytes)
}

fn smaps_huge_bytes(span: Span) -> Option<usize> {
    let text = std::fs::read_to_string("/proc/self/smaps").ok()?;
    let mut inside = false;
    let mut kib = 0;
    for line in text.lines() {
        let first = line.split_whitespace().next()?;
        if let Some((start, end)) = first.split_once('-') {
            let range = (usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?);
            inside = range.0 < span.address() + span.len() && range.1 > span.address();
        } else if inside && first == "AnonHugePages:" {
            kib += line.split_whitespace().nth(1)?.parse::<usize>().ok()?;
        }
    }
    Some((kib * 1024).min(span.len()))
}

/// Bytes that the system can give now without ending a process: unused memory, free swap and free reserved huge pages.
/// Where /proc is missing, all memory and swap. `None` if that is unknown too.
pub fn available_bytes() -> Option<u64> {
    let read = || available_at(&Root::live()).or_else(machine_bytes);
    // Tests of crashes open thousands of tiers, and would spend half of their time on the system's files.
    #[cfg(test)]
    let read = || *std::sync::OnceLock::get_or_init(&tests::AVAILABLE, read);
    read()
}

/// Bytes of memory that this process can use without swap: the available memory, or less where a cgroup limits it.
/// `None` if the system does not say.
pub fn unused_bytes() -> Option<u64> {
    let root = Root::live();
    unused_at(&root, &root.text("proc/meminfo")?)
}

fn available_at(root: &Root) -> Option<u64> {
    let text = root.text("proc/meminfo")?;
    let huge = meminfo(&text, "HugePages_Free")
        .zip(meminfo(&text, "Hugepagesize"))
        .map_or(0, |(pages, kib)| pages.saturating_mul(kib));
    let beside = meminfo(&text, "SwapFree").unwrap_or(0).saturating_add(huge);
    Some(unused_at(root, &text)?.saturating_add(beside.saturating_mul(1024)))
}

fn unused_at(root: &Root, text: &str) -> Option<u64> {
    let available = meminfo(text, "MemAvailable")?.saturating_mul(1024);
    Some(available.min(cgroup_memory::room(root).unwrap_or(u64::MAX)))
}

/// A value of a text of /proc/meminfo.
fn meminfo(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.split(':').next() == Some(name))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

/// Bytes of the machine's memory and swap; `None` if the system call fails.
fn machine_bytes() -> Option<u64> {
    // SAFETY: integers, for which zeros are valid.
    let mut info: libc::sysinfo = unsafe { std::mem::zeroed() };
    // SAFETY: writes the struct.
    let found = unsafe { libc::sysinfo(&mut info) } == 0;
    let units = info.totalram.saturating_add(info.totalswap);
    found.then(|| units.saturating_mul(info.mem_unit.into()))
}

/// `RLIMIT_MEMLOCK` of this process in bytes; `None` for no limit.
pub fn lock_limit() -> Option<u64> {
    limit(libc::RLIMIT_MEMLOCK)
}

/// `RLIMIT_FSIZE` of this process in bytes; `None` for no limit.
pub fn file_size_limit() -> Option<u64> {
    limit(libc::RLIMIT_FSIZE)
}

fn limit(resource: libc::__rlimit_resource_t) -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: writes the struct.
    unsafe { libc::getrlimit(resource, &mut limit) };
    (limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

#[cfg(test)]
mod tests {
    /// The first answer of `available_bytes`.
    pub(super) static AVAILABLE: std::sync::OnceLock<Option<u64>> = std::sync::OnceLock::new();

    use super::*;

    #[test]
    fn huge_mappings_are_aligned_and_exact_and_say_truly_what_backs_them() {
        let (mut mapping, refused) =
            Mapping::unpopulated(3 * HUGE_PAGE + 5, PageKind::Transparent, None, 0).unwrap();
        let bytes = 3 * HUGE_PAGE + BASE_PAGE;
        assert!(refused.is_none() && mapping.kind() == PageKind::Base);
        assert_eq!((mapping.span().len(), mapping.span().address() % HUGE_PAGE), (bytes, 0));
        mapping.populate(0, HUGE_PAGE).unwrap();
        mapping.populate(HUGE_PAGE, bytes - HUGE_PAGE).unwrap();
        mapping.note_kind();
        if mapping.kind() == PageKind::Transparent {
            assert_eq!(smaps_huge_bytes(mapping.span()), Some(3 * HUGE_PAGE));
        }
    }

    #[test]
    fn available_memory_counts_swap_and_reserved_huge_pages() {
        let text = "MemTotal: 100 kB\nMemFree: 1 kB\nMemAvailable: 50 kB\nSwapFree: 7 kB\nHugePages_Free: 2\nHugepagesize: 2048 kB\n";
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        let write = |path: &str, text: &str| {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("proc/meminfo", text);
        assert_eq!(available_at(&root), Some((50 + 7 + 4096) * 1024));
        // A cgroup's limit replaces the memory, and neither swap nor reserved huge pages.
        write("proc/mounts", "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n");
        write("proc/self/cgroup", "0::/\n");
        write("sys/fs/cgroup/memory.max", "4096\n");
        write("sys/fs/cgroup/memory.current", "1024\n");
        assert_eq!(unused_at(&root, text), Some(3072));
        assert_eq!(available_at(&root), Some(3072 + (7 + 4096) * 1024));
        write("proc/meminfo", "MemTotal: 100 kB\n");
        assert_eq!(available_at(&root), None);
        assert!(available_bytes().unwrap() <= machine_bytes().unwrap());
    }

    #[test]
    fn impossible_sizes_and_nodes_are_errors_not_faults() {
        // The last is a size that an overcommitting system might grant.
        for bytes in [usize::MAX, usize::MAX / 4, machine_bytes().unwrap() as usize + 1] {
            for pages in [PageKind::Base, PageKind::Transparent, PageKind::Reserved] {
                assert!(Mapping::unpopulated(bytes, pages, None, 0).is_err(), "{bytes} {pages:?}");
            }
        }
        let (mapping, refused) = Mapping::unpopulated(BASE_PAGE, PageKind::Base, Some(900), 0).unwrap();
        assert!(refused.is_some());
        mapping.populate(0, BASE_PAGE).unwrap();
        mapping.span().write(&[1]);
    }
}
