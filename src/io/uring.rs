//! The io_uring backend: one ring, driven by one thread.
//!
//! Invariants:
//! - Only regions of this library are registered, by their id: new memory mapped at an old address never uses the old
//!   registration. Regions are unregistered when they retire.
//! - Everything is unregistered before the ring closes. The kernel destroys a ring asynchronously; until then it would
//!   hold files open, and with them a mounted file system or the space of deleted files.

use std::collections::HashMap;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use io_uring::squeue::{Entry, Flags};
use io_uring::{IoUring, Probe, opcode, types};

use super::backend::{Action, Backend, Completion, DIRECTIONS, Piece, Sleep, Wake};
use super::plan::Route;
use crate::log::{self, Level};
use crate::pool::region::Region;
use crate::sys::descriptor;
use crate::sys::event::EventFd;
use crate::sys::span::Span;

/// Most bytes that the kernel accepts per registered buffer.
const CHUNK: usize = 1 << 30;
/// Size of the buffer table; each entry costs the kernel 16 bytes.
const BUFFER_SLOTS: usize = 256;
const FILE_SLOTS: usize = u64::BITS as usize;
/// Registering a smaller region costs more than it saves.
const SMALLEST_REGION: usize = 64 << 10;
const WAKE_TOKEN: u64 = u64::MAX;
/// How long to retry ENOMEM. The kernel returns the memlock charge of closed rings late; after this time the memory is
/// in use elsewhere.
const MEMLOCK_RETRY: Duration = Duration::from_millis(50);

pub(super) struct Uring {
    ring: IoUring,
    waker: Arc<EventFd>,
    armed: bool,
    /// True if the wait accepts a timeout (Linux 5.11).
    knows_time: bool,
    buffers: Option<RegisteredBuffers>,
    files: Option<RegisteredFiles>,
}

impl Uring {
    /// A ring for `depth` pieces of each direction. The calling thread must be the one that drives the ring.
    pub(super) fn open(depth: u32) -> io::Result<Uring> {
        let ring = build(depth)?;
        // A filter of system calls may allow a ring and refuse its use.
        // SAFETY: the call submits nothing, waits for nothing, and has no argument in memory.
        unsafe { ring.submitter().enter::<()>(0, 0, 0, None) }?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        let needed = [opcode::Read::CODE, opcode::Write::CODE, opcode::Fsync::CODE, opcode::PollAdd::CODE];
        if !needed.into_iter().all(|code| probe.is_supported(code)) {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "this kernel's io_uring has no READ or WRITE; Linux 5.6 or newer is needed",
            ));
        }
        let buffers = ring.submitter().register_buffers_sparse(BUFFER_SLOTS as u32).is_ok();
        let files = ring.submitter().register_files(&[-1; FILE_SLOTS]).is_ok();
        Ok(Uring {
            waker: Arc::new(EventFd::new()?),
            armed: false,
            knows_time: ring.params().is_feature_ext_arg(),
            buffers: buffers.then(RegisteredBuffers::default),
            files: files.then(|| RegisteredFiles {
                slots: [None; FILE_SLOTS],
                used: 0,
                by_token: Vec::new(),
            }),
            ring,
        })
    }

    fn entry(&mut self, piece: &Piece) -> Entry {
        let submitter = self.ring.submitter();
        let slot = self.files.as_mut().and_then(|files| files.slot(&submitter, piece));
        let fd = types::Fd(slot.map_or(piece.file.fd(piece.route).as_raw_fd(), |slot| slot as i32));
        let fixed = match (&piece.region, self.buffers.as_mut()) {
            (Some(region), Some(buffers)) => buffers.index(&submitter, region, piece.span),
            _ => None,
        };
        let (memory, len, offset) = (piece.span.as_ptr(), piece.span.len() as u32, piece.offset);
        let entry = match (piece.action, fixed) {
            (Action::Read, Some(index)) => {
                opcode::ReadFixed::new(fd, memory, len, index).offset(offset).build()
            }
            (Action::Read, None) => opcode::Read::new(fd, memory, len).offset(offset).build(),
            (Action::Write, Some(index)) => {
                opcode::WriteFixed::new(fd, memory, len, index).offset(offset).build()
            }
            (Action::Write, None) => opcode::Write::new(fd, memory, len).offset(offset).build(),
            (Action::Sync, _) => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
            (Action::Allocate { bytes }, _) => opcode::Fallocate::new(fd, bytes).offset(offset).build(),
        };
        let entry = entry.user_data(piece.token);
        if slot.is_some() { entry.flags(Flags::FIXED_FILE) } else { entry }
    }

    fn push_entry(&mut self, entry: &Entry) {
        loop {
            // SAFETY: the piece's memory stays valid until its completion: it is leased, or the caller promised it.
            // The driver keeps the file open equally long.
            if unsafe { self.ring.submission().push(entry) }.is_ok() {
                return;
            }
            // The ring has room for every piece of the driver: only an interrupted submission leaves it full.
            let _ = self.ring.submit();
        }
    }

    fn enter(&mut self, sleep: Sleep) -> io::Result<usize> {
        let Some(until) = sleep.until.filter(|_| sleep.completions > 0 && self.knows_time) else {
            return self.ring.submit_and_wait(sleep.completions.min(1));
        };
        let left = until.saturating_duration_since(Instant::now());
        let time = types::Timespec::from(left);
        self.ring.submitter().submit_with_args(sleep.completions, &types::SubmitArgs::new().timespec(&time))
    }

    fn reap(&mut self, done: &mut Vec<Completion>) {
        let from = done.len();
        let mut woken = false;
        for entry in self.ring.completion() {
            match entry.user_data() {
                WAKE_TOKEN => woken = true,
                token => done.push(Completion::of(token, entry.result())),
            }
        }
        if woken {
            self.armed = false;
            self.waker.clear();
        }
        if let Some(files) = &mut self.files {
            let submitter = self.ring.submitter();
            done[from..].iter().for_each(|completion| files.release(&submitter, completion.token));
        }
    }
}

impl Backend for Uring {
    fn name(&self) -> &'static str {
        "io_uring"
    }

    fn push(&mut self, piece: Piece) {
        let entry = self.entry(&piece);
        self.push_entry(&entry);
    }

    fn wait(&mut self, sleep: Sleep, done: &mut Vec<Completion>) -> io::Result<()> {
        if !self.armed {
            let poll = opcode::PollAdd::new(types::Fd(self.waker.fd()), libc::POLLIN as u32).build();
            self.push_entry(&poll.user_data(WAKE_TOKEN));
            self.armed = true;
        }
        let outcome = self.enter(sleep);
        self.reap(done);
        match outcome.as_ref().map_err(io::Error::raw_os_error) {
            Ok(_) | Err(Some(libc::EINTR | libc::ETIME)) => Ok(()),
            // The kernel lacks request memory or completion room: pieces in flight must complete first.
            Err(Some(libc::EAGAIN | libc::EBUSY | libc::ENOMEM)) => {
                if done.is_empty() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Ok(())
            }
            Err(_) => outcome.map(|_| ()),
        }
    }

    fn trim(&mut self) {
        let submitter = self.ring.submitter();
        if let Some(buffers) = &mut self.buffers {
            buffers.trim(&submitter);
        }
    }

    fn waker(&self) -> Arc<dyn Wake> {
        Arc::clone(&self.waker) as Arc<dyn Wake>
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        let submitter = self.ring.submitter();
        if self.files.is_some() {
            let _ = submitter.unregister_files();
        }
        if self.buffers.is_some() {
            let _ = submitter.unregister_buffers();
        }
    }
}

/// Opens the best ring that this kernel supports; each attempt drops features that older kernels lack.
fn build(depth: u32) -> io::Result<IoUring> {
    // One more entry, for the poll on the wake descriptor.
    let entries = (DIRECTIONS as u32 * depth + 1).next_power_of_two().clamp(64, 16_384);
    let completions = 4 * entries;
    let attempts: [&dyn Fn(&mut io_uring::Builder); 4] = [
        &|builder| {
            builder
                .setup_single_issuer()
                .setup_defer_taskrun()
                .setup_taskrun_flag()
                .setup_cqsize(completions);
        },
        &|builder| {
            builder.setup_coop_taskrun().setup_cqsize(completions);
        },
        &|builder| {
            builder.setup_cqsize(completions);
        },
        &|_| {},
    ];
    let mut last = io::Error::from_raw_os_error(libc::EINVAL);
    for attempt in attempts {
        let mut builder = <IoUring>::builder();
        builder.dontfork();
        attempt(&mut builder);
        match retry_enomem(|| descriptor::made(|| builder.build(entries))) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => last = error,
            other => return other,
        }
    }
    Err(last)
}

fn retry_enomem<T>(mut attempt: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let pause = Duration::from_millis(2);
    for _ in 0..MEMLOCK_RETRY.as_millis() / pause.as_millis() {
        match attempt() {
            Err(error) if error.raw_os_error() == Some(libc::ENOMEM) => std::thread::sleep(pause),
            other => return other,
        }
    }
    attempt()
}

/// Wakes the ring, which polls the descriptor.
impl Wake for EventFd {
    fn wake(&self) {
        self.set();
    }
}

/// Registered regions, and their places in the table.
#[derive(Default)]
struct RegisteredBuffers {
    regions: HashMap<u64, Registered>,
    table: BufferTable,
}

#[derive(Default)]
struct BufferTable {
    used: Vec<bool>,
    refused: bool,
}

struct Registered {
    region: Weak<Region>,
    start: usize,
    first: usize,
    /// 0 if the kernel refused.
    chunks: usize,
}

impl RegisteredBuffers {
    /// Index of the registered buffer that holds all of `span`; registers its region on first use.
    fn index(&mut self, submitter: &io_uring::Submitter, region: &Arc<Region>, span: Span) -> Option<u16> {
        if region.retired() || region.span().len() < SMALLEST_REGION {
            return None;
        }
        let registered =
            self.regions.entry(region.id()).or_insert_with(|| self.table.register(submitter, region));
        let from = span.address() - registered.start;
        let chunk = from / CHUNK;
        let whole = chunk < registered.chunks && (from + span.len() - 1) / CHUNK == chunk;
        whole.then_some((registered.first + chunk) as u16)
    }

    fn trim(&mut self, submitter: &io_uring::Submitter) {
        let used = &mut self.table.used;
        self.regions.retain(|_, registered| {
            let live = registered.region.upgrade().is_some_and(|region| !region.retired());
            if !live {
                let nothing = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
                let nothings = vec![nothing; registered.chunks];
                // SAFETY: empty entries refer to no memory.
                let _ =
                    unsafe { submitter.register_buffers_update(registered.first as u32, &nothings, None) };
                used[registered.first..][..registered.chunks].fill(false);
            }
            live
        });
    }
}

impl BufferTable {
    fn register(&mut self, submitter: &io_uring::Submitter, region: &Arc<Region>) -> Registered {
        self.used.resize(BUFFER_SLOTS, false);
        let span = region.span();
        let chunks = span.len().div_ceil(CHUNK);
        let refused =
            Registered { region: Arc::downgrade(region), start: span.address(), first: 0, chunks: 0 };
        let Some(first) = self.used.windows(chunks).position(|window| window.iter().all(|used| !used)) else {
            return refused;
        };
        let vectors: Vec<libc::iovec> = (0..chunks)
            .map(|chunk| span.part(chunk * CHUNK, CHUNK.min(span.len() - chunk * CHUNK)))
            .map(|part| libc::iovec { iov_base: part.as_ptr().cast(), iov_len: part.len() })
            .collect();
        // SAFETY: the vectors cover the region's own memory. Pieces hold the region while they use it, and the kernel
        // holds its pages.
        let attempt = || unsafe { submitter.register_buffers_update(first as u32, &vectors, None) };
        match if self.refused { attempt() } else { retry_enomem(attempt) } {
            Ok(()) => {
                self.used[first..first + chunks].fill(true);
                Registered { first, chunks, ..refused }
            }
            Err(error) => {
                self.refused = true;
                log_refusal(span.len(), &error);
                refused
            }
        }
    }
}

/// Logs once per process: the limit is the same for every ring.
fn log_refusal(bytes: usize, error: &io::Error) {
    static LOGGED: AtomicBool = AtomicBool::new(false);
    if !LOGGED.swap(true, Ordering::Relaxed) {
        let message = format!(
            "cannot register {bytes} bytes with io_uring, so transfers use more CPU time: {error}; see \
             ulimit -l"
        );
        log::write(Level::Info, &message);
    }
}

/// Registered files, with the number of pieces that use each. A file leaves the table with its last piece.
struct RegisteredFiles {
    slots: [Option<FileSlot>; FILE_SLOTS],
    used: u64,
    /// The slot of each token in flight.
    by_token: Vec<Option<u8>>,
}

#[derive(Clone, Copy)]
struct FileSlot {
    key: (u64, bool),
    users: usize,
}

impl RegisteredFiles {
    fn slot(&mut self, submitter: &io_uring::Submitter, piece: &Piece) -> Option<usize> {
        let key = (piece.file.key(), piece.route == Route::Direct);
        let taken = FILE_SLOTS - self.used.leading_zeros() as usize;
        let known = self.slots[..taken].iter().position(|slot| slot.is_some_and(|slot| slot.key == key));
        let slot = known.or_else(|| self.register(submitter, piece, key))?;
        if let Some(found) = &mut self.slots[slot] {
            found.users += 1;
        }
        let token = piece.token as usize;
        if self.by_token.len() <= token {
            self.by_token.resize(token + 1, None);
        }
        self.by_token[token] = Some(slot as u8);
        Some(slot)
    }

    fn register(
        &mut self,
        submitter: &io_uring::Submitter,
        piece: &Piece,
        key: (u64, bool),
    ) -> Option<usize> {
        let slot = self.used.trailing_ones() as usize;
        if !piece.busy_file || slot >= FILE_SLOTS {
            return None;
        }
        let fd = piece.file.fd(piece.route).as_raw_fd();
        submitter.register_files_update(slot as u32, &[fd]).ok()?;
        self.used |= 1 << slot;
        self.slots[slot] = Some(FileSlot { key, users: 0 });
        Some(slot)
    }

    fn release(&mut self, submitter: &io_uring::Submitter, token: u64) {
        let Some(slot) = self.by_token.get_mut(token as usize).and_then(Option::take) else { return };
        let slot = usize::from(slot);
        let Some(found) = &mut self.slots[slot] else { return };
        found.users -= 1;
        if found.users == 0 {
            let _ = submitter.register_files_update(slot as u32, &[-1]);
            self.used &= !(1 << slot);
            self.slots[slot] = None;
        }
    }
}
