//! What the log is told: `SPILLWAY_LOG` names a level and the messages go to stderr; without it nothing is written.
//!
//! The point of it: a program that never looks at an event's `res` loses data in silence, so every failed or short
//! transfer is named here with path, offset, bytes and errno.

use std::io::{Error, Write};
use std::sync::atomic::{AtomicI32, Ordering};

use libc::c_int;

use crate::abi::{CMD_FDSYNC, CMD_FSYNC, CMD_POLL, CMD_PREAD, CMD_PREADV, CMD_PWRITE, CMD_PWRITEV};
use crate::request::Request;

/// How much a message matters; the numbers are those of `spw_log_level`.
#[derive(Clone, Copy)]
#[repr(i32)]
pub enum Level {
    /// Data may be lost, and the program may not see it.
    Error = 1,
    /// Something works worse than it could, or may not be what the program wanted.
    Warn = 2,
}

/// Writes `message()` if the level is wanted.
pub fn say(level: Level, message: impl FnOnce() -> String) {
    if level as i32 <= wanted() {
        // One write, so that lines of several threads do not mix; a closed stderr is no reason to fail.
        let _ = std::io::stderr().write_all(format!("spillway: preload: {}\n", message()).as_bytes());
    }
}

/// `SPILLWAY_LOG`, read once. A plain atomic, because a lock caught half-way by fork would never open.
fn wanted() -> i32 {
    const UNREAD: i32 = -1;
    static LEVEL: AtomicI32 = AtomicI32::new(UNREAD);
    let known = LEVEL.load(Ordering::Relaxed);
    if known != UNREAD {
        return known;
    }
    let level = match std::env::var("SPILLWAY_LOG").unwrap_or_default().trim().to_ascii_lowercase().as_str() {
        "error" => 1,
        "warn" => 2,
        "info" | "1" => 3,
        "debug" => 4,
        _ => 0,
    };
    LEVEL.store(level, Ordering::Relaxed);
    level
}

/// Names a completion that is not what was asked for.
pub fn completion(request: &Request, res: i32) {
    if res < 0 {
        let level = if request.iocb.opcode == CMD_POLL { Level::Warn } else { Level::Error };
        say(level, || format!("{} failed: {}", operation(request), Error::from_raw_os_error(-res)));
    } else if request.is_write() && (res as u64) < request.bytes {
        say(Level::Error, || format!("{} stored only {res} bytes", operation(request)));
    } else if request.is_read() && (res as u64) < request.bytes {
        say(Level::Warn, || format!("{} returned only {res} bytes", operation(request)));
    }
}

/// Names what a context still held when its program let go of it.
pub fn unreaped(completions: usize, when: &str) {
    if completions > 0 {
        say(Level::Warn, || {
            format!("{completions} completions were never fetched with io_getevents before {when}")
        });
    }
}

/// A failed event of a context that libaio serves, where only the request's address is known.
pub fn forwarded_failure(obj: u64, errno: c_int) {
    say(Level::Error, || {
        format!("libaio completed request {obj:#x} with: {}", Error::from_raw_os_error(errno))
    });
}

fn operation(request: &Request) -> String {
    let iocb = &request.iocb;
    let place = path(iocb.fd);
    match iocb.opcode {
        CMD_PREAD | CMD_PREADV => {
            format!("read of {} bytes at offset {} from {place}", request.bytes, iocb.offset)
        }
        CMD_PWRITE | CMD_PWRITEV => {
            format!("write of {} bytes at offset {} to {place}", request.bytes, iocb.offset)
        }
        CMD_FSYNC | CMD_FDSYNC => format!("sync of {place}"),
        _ => format!("poll of {place}"),
    }
}

fn path(fd: c_int) -> String {
    match std::fs::read_link(format!("/proc/self/fd/{fd}")) {
        Ok(path) => path.display().to_string(),
        Err(_) => format!("descriptor {fd}, closed since"),
    }
}
