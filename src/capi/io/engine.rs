//! The I/O engine: asynchronous reads and writes of files.

use std::ffi::{c_char, c_void};
use std::time::Duration;

use crate::capi::prelude::*;
use crate::io::engine::Engine;
use crate::io::options::{
    BackendChoice, Options, Request, Target, TurnOptions, given_or, turns_of_environment,
};
use crate::pool::transfer_buffer::TransferBuffer;
use crate::sys::span::Span;

/// The system interface for transfers. Passed as `uint32_t`. The environment variable `SPILLWAY_IO`, "uring" or
/// "threads", overrides it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_io_backend {
    /// io_uring. Threads where io_uring is unavailable or the profile selects threads; `spw_io_describe` gives the
    /// reason.
    SPW_IO_BACKEND_AUTO = 0,
    /// io_uring; an error where it is unavailable.
    SPW_IO_BACKEND_URING = 1,
    /// pread and pwrite on threads.
    SPW_IO_BACKEND_THREADS = 2,
}

/// Flags of an engine, combined by addition.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_io_flag {
    /// Use the page cache, even if the file system supports O_DIRECT.
    SPW_IO_FLAG_NO_DIRECT = 1,
    /// Do not preallocate the file for a write of 256 KiB or more that extends it.
    SPW_IO_FLAG_NO_PREALLOCATE = 2,
}

c_struct! { first 40;
/// Settings of an engine. Zero is the default of every field.
///
/// Some defaults come from the profile of the file system, which `spillway tune` measured. The profile file is the path
/// in the environment variable `SPILLWAY_PROFILE`, else `spillway/io-profile` in `XDG_CACHE_HOME` or `~/.cache`. An
/// empty variable disables profiles. An invalid profile, or one of another file system, is one warning in the log.
pub struct spw_io_options {
    /// `spw_io_backend`
    pub backend: u32,
    /// Sum of `spw_io_flag`.
    pub flags: u32,
    /// Maximum reads in flight, and also the maximum writes, at most 4096; 0: the profile's value, or 32.
    pub queue_depth: u32,
    /// Maximum bytes of one request, at most 1 GiB, rounded up to whole pages; 0: the profile's value for each file
    /// system, or 1 MiB. The device's own limits may reduce it.
    pub block_bytes: u64,
    /// Maximum threads of SPW_IO_BACKEND_THREADS for reads, and also for writes, at most 1024; 0: the depth of a profile
    /// that selects threads, or 8.
    pub workers: u32,
    /// Number of processes of one user on this machine that transfer to a device at a time, as in `spw_tier_options`; 0: the
    /// number in the environment variable SPILLWAY_IO_TURNS, or any number. The wait for a turn counts toward a deadline.
    pub turns: u32,
    /// Milliseconds that a process waits for its turn on a device before it proceeds without the turn; 0: 30000.
    pub turn_timeout_ms: u64,
}
}

c_struct! { first 48;
/// One operation.
pub struct spw_io_request {
    /// File descriptor above 0, used if path is NULL. It is duplicated for the operation and keeps its O_DIRECT setting.
    pub fd: i32,
    /// Path of the file, or NULL.
    pub path: In<c_char>,
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// Memory of the transfer. Any alignment is allowed; pinned memory (spw_pinned_alloc) is fastest. It stays in
    /// use until the operation ends.
    pub buffer: *mut c_void,
    /// Bytes to transfer. Any number is allowed.
    pub bytes: u64,
    /// Deadline of the operation in milliseconds; 0: none.
    pub deadline_ms: u64,
}
}

c_struct! { first 112;
/// Counters of an engine.
pub struct spw_io_stats {
    /// 0
    pub reserved: u32,
    /// Reads that succeeded.
    pub reads: u64,
    /// Writes that succeeded.
    pub writes: u64,
    /// Bytes of successful reads.
    pub read_bytes: u64,
    /// Bytes of successful writes.
    pub written_bytes: u64,
    /// Operations that failed.
    pub failed: u64,
    /// Requests submitted to the system.
    pub requests: u64,
    /// Bytes transferred with O_DIRECT.
    pub direct_bytes: u64,
    /// Bytes transferred through the page cache.
    pub buffered_bytes: u64,
    /// Bytes of direct_bytes that were copied through bounce buffers, since their memory was not aligned.
    pub bounced_bytes: u64,
    /// Short transfers that were resumed.
    pub resumed: u64,
    /// Interrupted requests that were retried.
    pub retried: u64,
    /// Operations in flight.
    pub pending: u64,
    /// Operations past their deadline whose memory the system may still use.
    pub stuck: u64,
    /// Maximum reads in flight, and also the maximum writes.
    pub queue_depth: u64,
    /// Maximum bytes of one request, for the last file.
    pub block_bytes: u64,
}
}

/// An I/O engine: one queue with a thread that keeps it full across files and tensors.
pub struct spw_io(pub(in crate::capi) Engine, OpeningProcess);

handle!(spw_io, "io", 1, "the I/O engine");

/// Creates an engine. `options` may be NULL.
#[unsafe(no_mangle)]
pub extern "C" fn spw_io_open(options: In<spw_io_options>, io_out: Out<*mut spw_io>) -> spw_status {
    guard(|| {
        let raw = options.read_optional("options")?;
        let defaults = || Ok(Options { turns: turns(turns_of_environment()?, 0), ..Options::default() });
        let options = raw.as_ref().map_or_else(defaults, parse)?;
        io_out.open(|| Ok(spw_io(Engine::open(options)?, OpeningProcess::current())))
    })
}

/// Waits for all operations for up to `timeout_ms` milliseconds (0: polls; negative: without limit), and frees the engine. They
/// wait for no turns. The engine is freed whatever the status. After SPW_ERR_TIMEOUT the buffers of operations in flight must
/// stay allocated and unused for the rest of the process. An operation that no call waited for returns its error here.
#[unsafe(no_mangle)]
pub extern "C" fn spw_io_close(io: Option<Box<spw_io>>, timeout_ms: i64) -> spw_status {
    guard(|| handle::close(io).map_or(Ok(()), |io| io.0.close(timeout(timeout_ms))))
}

/// Starts to read `bytes` bytes at `offset` of the file into the buffer. The call opens the file, starts the operation
/// and returns a handle for `spw_io_wait`. A file that cannot be opened is an error of this call. The operation
/// succeeds only if every byte was read; a file that ends earlier is SPW_ERR_SHORT_FILE.
///
/// Kept: the buffer, until the wait for the operation returns.
///
/// # Safety
/// `request` points to a struct of `struct_size` bytes, `handle_out` to a u64. No other code uses the buffer until the
/// operation ends.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_io_read(
    io: Option<&spw_io>,
    request: In<spw_io_request>,
    handle_out: Out<u64>,
) -> spw_status {
    // SAFETY: the caller meets the callee's requirements.
    unsafe { submit(io, request, handle_out, Engine::read) }
}

/// Starts to write, as `spw_io_read`. A missing file is created. Bytes before and after the written range stay
/// unchanged. After success the kernel has accepted the data; `spw_io_sync` makes it durable.
///
/// Kept: the buffer, unchanged until the wait for the operation returns.
///
/// A write of 256 KiB or more that extends its file first sets the file's new length, before this call returns. That
/// about doubles the speed on ext4. After a crash or a kill the length therefore does not show how much was written:
/// unwritten bytes read as zeros. To replace a file safely, write a new file, wait, and rename it.
///
/// SPW_IO_FLAG_NO_PREALLOCATE avoids the early length, but gaps remain possible: the blocks of one write may reach the
/// device in any order.
///
/// # Safety
/// As `spw_io_read`, with a buffer that may be read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_io_write(
    io: Option<&spw_io>,
    request: In<spw_io_request>,
    handle_out: Out<u64>,
) -> spw_status {
    // SAFETY: the caller meets the callee's requirements.
    unsafe { submit(io, request, handle_out, Engine::write) }
}

/// Starts to make durable what was written to the request's file by operations that were waited for. Buffer, bytes and
/// offset are ignored. A file that is given by its path, and does not exist, is created empty.
///
/// # Safety
/// As `spw_io_read`, without a buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_io_sync(
    io: Option<&spw_io>,
    request: In<spw_io_request>,
    handle_out: Out<u64>,
) -> spw_status {
    let sync = |engine: &Engine, request: Request| engine.sync(request.target, request.deadline);
    // SAFETY: the caller meets the callee's requirements.
    unsafe { submit(io, request, handle_out, sync) }
}

/// Reads the counters of an engine.
#[unsafe(no_mangle)]
pub extern "C" fn spw_io_get_stats(io: Option<&spw_io>, stats_out: Out<spw_io_stats>) -> spw_status {
    guard(|| {
        let found = handle::get(io)?.0.stats()?;
        let values = report!(spw_io_stats from found {
            reads, writes, read_bytes, written_bytes, failed, direct_bytes, buffered_bytes, bounced_bytes,
            resumed, retried, pending, stuck, block_bytes
        } with {
            reserved: 0, requests: found.pieces, queue_depth: found.depth.into()
        });
        stats_out.write(&values, "stats_out")
    })
}

/// Writes a description of the engine for humans: the backend ("io_uring" or "threads"), why the other backend is
/// unavailable, why files go through the page cache, and the profile in use.
#[unsafe(no_mangle)]
pub extern "C" fn spw_io_describe(
    io: Option<&spw_io>,
    text_out: Out<c_char>,
    size: u64,
    needed_out: Out<u64>,
) -> spw_status {
    guard(|| {
        let stats = handle::get(io)?.0.stats()?;
        let named = |name: &str, text: String| if text.is_empty() { text } else { format!("; {name}{text}") };
        let text = format!(
            "{}{}{}{}",
            stats.backend,
            named("", stats.backend_reason),
            named("through the page cache: ", stats.buffered_reason),
            named("profile ", stats.profile),
        );
        text_out.put_text(&text, size, needed_out)
    })
}

unsafe fn submit(
    io: Option<&spw_io>,
    request: In<spw_io_request>,
    handle_out: Out<u64>,
    start: impl FnOnce(&Engine, Request) -> Result<u64>,
) -> spw_status {
    guard(|| {
        handle_out.required("handle_out")?;
        // SAFETY: the caller meets the callees' requirements; the buffer meets those of Span::new.
        unsafe {
            let engine = &handle::get(io)?.0;
            let raw = request.read("request")?;
            let len = usize::try_from(raw.bytes).ok().filter(|len| isize::try_from(*len).is_ok());
            let len = len.ok_or_else(|| Error::invalid("request.bytes", "exceeds the address space"))?;
            let span = Span::new(raw.buffer.cast(), len).ok_or_else(|| {
                Error::invalid("request.buffer", format!("is NULL, but request.bytes is {len}"))
            })?;
            let buffer = TransferBuffer::at_address(span);
            let target = match (raw.path.is_null(), raw.fd) {
                (false, _) => Target::Path(raw.path.path("request.path")?),
                (true, 0) => {
                    return Err(Error::invalid("request.path", "is NULL, and request.fd is 0; set one"));
                }
                (true, fd) => Target::Descriptor(fd),
            };
            let deadline = (raw.deadline_ms > 0).then(|| Duration::from_millis(raw.deadline_ms));
            let request = Request { target, offset: raw.offset, buffer, deadline };
            handle_out.put(start(engine, request)?, "handle_out")
        }
    })
}

/// The backend of an `spw_io_backend`; `field` is for messages.
pub(in crate::capi) fn backend(field: &'static str, value: u32) -> Result<BackendChoice> {
    let all = [BackendChoice::Auto, BackendChoice::Uring, BackendChoice::Threads];
    choice(field, value, "spw_io_backend", &all)
}

/// Turns of that number of processes; a timeout of 0 is the default.
pub(in crate::capi) fn turns(most: u32, timeout_ms: u64) -> TurnOptions {
    let default = TurnOptions::of(most);
    let timeout = if timeout_ms > 0 { Duration::from_millis(timeout_ms) } else { default.timeout };
    TurnOptions { timeout, ..default }
}

fn parse(raw: &spw_io_options) -> Result<Options> {
    let default = Options::default();
    abi_struct::flags("options.flags", raw.flags, 3)?;
    Ok(Options {
        backend: backend("options.backend", raw.backend)?,
        depth: given_or(raw.queue_depth, default.depth),
        block_bytes: given_or(raw.block_bytes, default.block_bytes),
        workers: given_or(raw.workers, default.workers),
        direct: raw.flags & spw_io_flag::SPW_IO_FLAG_NO_DIRECT as u32 == 0,
        preallocate: raw.flags & spw_io_flag::SPW_IO_FLAG_NO_PREALLOCATE as u32 == 0,
        io_timeout: None,
        turns: turns(given_or(raw.turns, turns_of_environment()?), raw.turn_timeout_ms),
    })
}
