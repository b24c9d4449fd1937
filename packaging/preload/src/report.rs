//! The messages of this library. `SPILLWAY_LOG` names a level, and the messages go to stderr; without
//! it nothing is written.
//!
//! A program that never checks an event's `res` loses data silently. The log therefore lists every failed or short
//! transfer with path, offset, bytes and errno.

use std::io::{Error, Write};

use libc::c_int;

use crate::abi::{CMD_FDSYNC, CMD_FSYNC, CMD_POLL, CMD_PREAD, CMD_PREADV, CMD_PWRITE, CMD_PWRITEV};
use crate::environment;
use crate::request::Request;

/// The severity of a message; the numbers are those of `spw_log_level`.
#[derive(Clone, Copy)]
#[repr(i32)]
pub enum Level {
    /// Data may be lost, and the program may not notice.
    Error = 1,
    /// Reduced performance, or behaviour that the program may not expect.
    Warn = 2,
    /// What is served.
    Info = 3,
}

/// Writes `message()` if the level is enabled.
pub fn say(level: Level, message: impl FnOnce() -> String) {
    if level as i32 <= environment::log_level() {
        // One write call, so that lines of several threads do not mix; an error of a closed stderr is ignored.
        let _ = std::io::stderr().write_all(format!("spillway: preload: {}\n", message()).as_bytes());
    }
}

/// Reports a completion whose result differs from the request.
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

/// Reports the completions that a context still held when its program released it.
pub fn unreaped(completions: usize, when: &str) {
    if completions > 0 {
        say(Level::Warn, || {
            format!("{completions} completions were never fetched with io_getevents before {when}")
        });
    }
}

/// Reports a failed event of a context that libaio serves; only the request's address is known.
pub fn forwarded_failure(obj: u64, errno: c_int) {
    say(Level::Error, || format!("request {obj:#x} failed in libaio: {}", Error::from_raw_os_error(errno)));
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
        Err(_) => format!("descriptor {fd} (closed since)"),
    }
}
