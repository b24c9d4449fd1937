//! Status codes, and the error message that each thread keeps.

use std::ffi::{CStr, c_char};

use super::failure::{self, Failure};
use crate::error::{ArenaKind, Error, GpuKind, IoError, IoKind, RoundKind, TierKind};
use spillway_stores::secrets::printable;

/// Declares the statuses, and the name of each.
macro_rules! statuses {
    ($(#[$about:meta])* pub enum $enum:ident { $($(#[$doc:meta])* $name:ident = $number:literal,)* }) => {
        $(#[$about])*
        pub enum $enum {
            $($(#[$doc])* $name = $number,)*
        }

        fn name_of(status: i32) -> &'static CStr {
            match status {
                $($number => const { c_name(concat!(stringify!($name), "\0")) },)*
                _ => c"SPW_ERR_UNKNOWN",
            }
        }
    };
}

const fn c_name(name: &str) -> &CStr {
    match CStr::from_bytes_with_nul(name.as_bytes()) {
        Ok(name) => name,
        Err(_) => panic!("a name ends with its only NUL"),
    }
}

statuses! {
/// Outcome of a call. Values are never renumbered or reused. Newer libraries may add values: treat an unknown value as
/// a failure.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum spw_status {
    /// The call succeeded.
    SPW_OK = 0,
    /// An argument violates the requirements of the function. The message names the argument and the reason.
    SPW_ERR_INVALID_ARGUMENT = 1,
    /// This build or this machine does not support the operation.
    SPW_ERR_UNSUPPORTED = 2,
    /// No DeepSpeed optimizer with this id exists: it was never created, or it was destroyed.
    SPW_ERR_UNKNOWN_ID = 3,
    /// A limit that was set at open, or one of the process, is reached. Or a commit would exceed what an open accepts.
    /// Nothing changed.
    SPW_ERR_LIMIT_REACHED = 4,
    /// The object is still in use. Nothing changed.
    SPW_ERR_BUSY = 5,
    /// A bug inside Spillway was caught. Tensors of the call may be partly updated.
    SPW_ERR_INTERNAL = 9,
    /// A system call failed. The message contains the system's error text.
    SPW_ERR_SYSTEM = 11,
    /// Reading or writing a file failed. The message contains path, offset, bytes and errno.
    SPW_ERR_IO = 20,
    /// The device has no free space, the quota is used up, or the limits of a tier's paths leave no room.
    SPW_ERR_NO_SPACE = 21,
    /// The file ends before the requested bytes.
    SPW_ERR_SHORT_FILE = 22,
    /// The timeout of a wait expired. The operation stays in flight, and the caller may wait for it again.
    SPW_ERR_TIMEOUT = 23,
    /// The operation was cancelled.
    SPW_ERR_CANCELLED = 24,
    /// The file, or a directory of its path, does not exist.
    SPW_ERR_NOT_FOUND = 25,
    /// The operation's own deadline passed, or the I/O timeout. The system may use its memory until the operation ends.
    SPW_ERR_DEADLINE = 26,
    /// Earlier operations on the same device are still unfinished after their deadline. Or no usable path is left for a
    /// commit.
    SPW_ERR_PATH_FAILED = 27,
    /// Stored bytes do not match their checksum, or are not in the form in which the library writes them. The message names the
    /// file, and for a block its extent, number and offset.
    SPW_ERR_CORRUPT = 30,
    /// The files are not a tier, have a format version that this library does not read, or lost their superblocks.
    SPW_ERR_FORMAT = 31,
    /// What was found does not match the request. The message names the cause:
    ///
    /// - Another job, rank, host or number of ranks wrote the tier: pass those of the run.
    /// - The state of this rank is under another host name: set that name, or remove the state by `spw_tier_collect`.
    /// - A path belongs to another tier, or is a copy of another path: pass the paths of one tier, each once.
    /// - Paths were opened without each other and differ: open one of them alone with SPW_TIER_FLAG_DEGRADED.
    /// - A tier exists and the mode is SPW_TIER_MODE_CREATE: resume it, or remove it by `spw_tier_collect`.
    /// - The extent has other streams: define it with the lengths that it has.
    /// - A file or directory belongs to another user, is a link, has a second name or the wrong type: mend that file.
    SPW_ERR_FOREIGN = 32,
    /// A live process holds the lock. The message names the process.
    SPW_ERR_LOCKED = 33,
    /// A path of the last open, which may hold a part of the tier, is missing, or its files were moved or replaced.
    SPW_ERR_PATH_MISSING = 34,
    /// The extent had a part on a missing path.
    SPW_ERR_LOST = 35,
    /// There is no committed state.
    SPW_ERR_NO_STATE = 36,
    /// A committed state exists, but not of the requested step, or that step was overwritten since.
    SPW_ERR_NO_STEP = 37,
    /// Another process claimed the tier while this one had it open. Nothing was committed. Close the tier and open it
    /// again.
    SPW_ERR_FENCED = 38,
    /// No speculation round or update on a tier was opened, or the last round ended without a bucket.
    SPW_ERR_NO_ROUND = 40,
    /// A speculation round or an update on a tier is open. Resolve it, finish it or abort it first.
    SPW_ERR_ROUND_OPEN = 41,
    /// The last round, or the open update on a tier, already has its verdict.
    SPW_ERR_ROUND_RESOLVED = 42,
    /// A bucket of the round, or a subgroup of the update on a tier, was not submitted.
    SPW_ERR_BUCKET_MISSING = 43,
    /// The bucket or the subgroup was already submitted in this round.
    SPW_ERR_BUCKET_SUBMITTED = 44,
    /// The event that a bucket waits for can never happen.
    SPW_ERR_EVENT_BROKEN = 45,
    /// There is no GPU: the driver library is missing, or it sees no device.
    SPW_ERR_NO_DEVICE = 50,
    /// The CUDA driver library that was found is a toolkit's stub.
    SPW_ERR_DRIVER_STUB = 51,
    /// The CUDA driver is older than 525, or does not match its kernel module.
    SPW_ERR_DRIVER_TOO_OLD = 52,
    /// The driver could not compile the GPU kernels. The message contains the driver's log.
    SPW_ERR_GPU_JIT = 53,
    /// The device has no free memory, or the driver could not register host memory.
    SPW_ERR_GPU_OUT_OF_MEMORY = 54,
    /// An earlier error destroyed the CUDA context. Results of operations in flight are invalid. Only a new process
    /// gets a new context.
    SPW_ERR_GPU_LOST = 55,
    /// This process was forked after CUDA was used.
    SPW_ERR_GPU_FORKED = 56,
    /// A driver call failed. The message contains the driver's error text.
    SPW_ERR_GPU = 57,
    /// The writer of a region of an arena ended in the middle of a write. The bytes are a mixture until a new writer has
    /// written all of them.
    SPW_ERR_ARENA_TORN = 60,
    /// The region of an arena was written while it was read. Read it again.
    SPW_ERR_ARENA_CHANGED = 61,
    /// A process that the call depends on has ended: the owner of an arena, or one that has not posted its local
    /// result. Or a process left the round, which is aborted for all.
    SPW_ERR_ARENA_PEER_ENDED = 62,
    /// The memory is not an arena, has a format version that this library does not read, or is truncated or damaged.
    SPW_ERR_ARENA_FORMAT = 63,
    /// The memory belongs to another user, is a link, or has a second name.
    SPW_ERR_ARENA_FOREIGN = 64,
    /// An arena of this name exists. The message says whether its owner lives.
    SPW_ERR_ARENA_EXISTS = 65,
    /// There is no arena of this name, or its owner has not completed it.
    SPW_ERR_ARENA_MISSING = 66,
}
}

/// The status of an error.
pub(in crate::capi) fn of(error: &Error) -> spw_status {
    match error {
        Error::InvalidArgument { .. } => spw_status::SPW_ERR_INVALID_ARGUMENT,
        Error::Unsupported(_) => spw_status::SPW_ERR_UNSUPPORTED,
        Error::UnknownId(_) => spw_status::SPW_ERR_UNKNOWN_ID,
        Error::System { .. } => spw_status::SPW_ERR_SYSTEM,
        Error::LimitReached(_) => spw_status::SPW_ERR_LIMIT_REACHED,
        Error::Busy(_) => spw_status::SPW_ERR_BUSY,
        Error::NotFound(_) => spw_status::SPW_ERR_NOT_FOUND,
        Error::Timeout(_) => spw_status::SPW_ERR_TIMEOUT,
        Error::Internal(_) => spw_status::SPW_ERR_INTERNAL,
        Error::Round(error) => match error.kind {
            RoundKind::NotBegun => spw_status::SPW_ERR_NO_ROUND,
            RoundKind::Open => spw_status::SPW_ERR_ROUND_OPEN,
            RoundKind::Resolved => spw_status::SPW_ERR_ROUND_RESOLVED,
            RoundKind::Unfinished | RoundKind::Unmeasured => spw_status::SPW_ERR_BUSY,
            RoundKind::Missing(_) => spw_status::SPW_ERR_BUCKET_MISSING,
            RoundKind::Submitted(_) => spw_status::SPW_ERR_BUCKET_SUBMITTED,
            RoundKind::Event { .. } => spw_status::SPW_ERR_EVENT_BROKEN,
        },
        Error::Io(error) => match error.kind {
            IoKind::Failed => spw_status::SPW_ERR_IO,
            IoKind::NoSpace => spw_status::SPW_ERR_NO_SPACE,
            IoKind::ShortFile => spw_status::SPW_ERR_SHORT_FILE,
            IoKind::Timeout => spw_status::SPW_ERR_TIMEOUT,
            IoKind::Cancelled => spw_status::SPW_ERR_CANCELLED,
            IoKind::NotFound => spw_status::SPW_ERR_NOT_FOUND,
            IoKind::Deadline => spw_status::SPW_ERR_DEADLINE,
            IoKind::PathFailed => spw_status::SPW_ERR_PATH_FAILED,
        },
        Error::Tier(error) => match error.kind {
            TierKind::Corrupt => spw_status::SPW_ERR_CORRUPT,
            TierKind::Format => spw_status::SPW_ERR_FORMAT,
            TierKind::Foreign => spw_status::SPW_ERR_FOREIGN,
            TierKind::Locked => spw_status::SPW_ERR_LOCKED,
            TierKind::Fenced => spw_status::SPW_ERR_FENCED,
            TierKind::PathMissing => spw_status::SPW_ERR_PATH_MISSING,
            TierKind::Lost => spw_status::SPW_ERR_LOST,
            TierKind::NoState => spw_status::SPW_ERR_NO_STATE,
            TierKind::NoStep => spw_status::SPW_ERR_NO_STEP,
        },
        Error::Gpu(error) => match error.kind {
            GpuKind::NoDevice => spw_status::SPW_ERR_NO_DEVICE,
            GpuKind::DriverStub => spw_status::SPW_ERR_DRIVER_STUB,
            GpuKind::DriverTooOld => spw_status::SPW_ERR_DRIVER_TOO_OLD,
            GpuKind::Jit => spw_status::SPW_ERR_GPU_JIT,
            GpuKind::OutOfMemory => spw_status::SPW_ERR_GPU_OUT_OF_MEMORY,
            GpuKind::Lost => spw_status::SPW_ERR_GPU_LOST,
            GpuKind::Forked => spw_status::SPW_ERR_GPU_FORKED,
            GpuKind::Refused => spw_status::SPW_ERR_GPU,
        },
        Error::Arena(error) => match error.kind {
            ArenaKind::Torn => spw_status::SPW_ERR_ARENA_TORN,
            ArenaKind::Changed | ArenaKind::Forgotten => spw_status::SPW_ERR_ARENA_CHANGED,
            ArenaKind::PeerEnded => spw_status::SPW_ERR_ARENA_PEER_ENDED,
            ArenaKind::Format => spw_status::SPW_ERR_ARENA_FORMAT,
            ArenaKind::Foreign => spw_status::SPW_ERR_ARENA_FOREIGN,
            ArenaKind::Exists => spw_status::SPW_ERR_ARENA_EXISTS,
            ArenaKind::Missing => spw_status::SPW_ERR_ARENA_MISSING,
        },
    }
}

/// Keeps an error as this thread's last one, leaves its number in errno, and returns its status.
pub(in crate::capi) fn record(error: &Error) -> spw_status {
    let io = match error {
        Error::Io(error) => Some(IoError::clone(error)),
        _ => None,
    };
    // A file name may contain control characters, which would change what a terminal shows.
    let message = printable(&error.to_string()).replace('\0', "");
    nix::errno::Errno::set_raw(failure::keep(Failure { message, io }));
    of(error)
}

/// Returns the name of a status, or "SPW_ERR_UNKNOWN" for a value that this version does not define. The string is
/// constant.
#[unsafe(no_mangle)]
pub extern "C" fn spw_status_name(status: i32) -> *const c_char {
    name_of(status).as_ptr()
}

/// Returns the message of this thread's last failed call: which argument or operation failed, and why. The text is empty
/// if no call failed, and truncated after 4095 bytes. The pointer is never NULL, and valid until the thread ends. The next
/// failing call of this thread changes the text.
#[unsafe(no_mangle)]
pub extern "C" fn spw_last_error() -> *const c_char {
    failure::last_text()
}

#[cfg(test)]
pub(in crate::capi) fn last_message() -> String {
    failure::find(0).map_or(String::new(), |last| last.1.message.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Doing;

    #[test]
    fn a_message_shows_no_control_character_of_a_file_name_and_the_path_keeps_them() {
        let name = "a\u{1b}[2J\nerror: b";
        record(&IoError::about(IoKind::NotFound, Doing::Opening, name).into());
        assert!(last_message().contains("error: b") && !last_message().contains(char::is_control));
        assert_eq!(failure::find(0).unwrap().1.io.as_ref().map(|error| error.path.as_str()), Some(name));
    }
}
