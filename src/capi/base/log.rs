//! Log messages.

use std::ffi::{c_char, c_void};

use super::failure;
use crate::capi::prelude::*;
use crate::log::{self, Level, Sink};

/// Severity of a log message. A level includes the levels before it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_log_level {
    /// No messages.
    SPW_LOG_LEVEL_OFF = 0,
    /// A failure that no status reports to the caller.
    SPW_LOG_LEVEL_ERROR = 1,
    /// Reduced performance or function. The message says what to change.
    SPW_LOG_LEVEL_WARN = 2,
    /// A choice that the library made once, with its reason.
    SPW_LOG_LEVEL_INFO = 3,
    /// Details for a bug report.
    SPW_LOG_LEVEL_DEBUG = 4,
}

/// Receives log messages, on a thread that is in a call of the library: see `spw_set_log`. `message` is valid during
/// the call. The function may call the library.
pub type spw_log_fn = Option<unsafe extern "C" fn(user: *mut c_void, level: i32, message: *const c_char)>;

/// Chooses what becomes of messages up to `level` (an `spw_log_level`).
///
/// - `log` receives them with `user`, at the end of the calls that the program makes, on the thread of the call. Messages
///   of the library's own threads wait for such a call. So `log` runs on threads of the program only. It runs on several
///   of them at once if they call the library at once.
/// - `log` NULL keeps them for `spw_log_next`, which suits a program whose runtime calls the library from threads of its own.
/// - `log` NULL and SPW_LOG_LEVEL_OFF restore the default. The library then writes at once to stderr, if the environment
///   variable `SPILLWAY_LOG` is "error", "warn", "info" or "debug", else nowhere.
///
/// Up to 256 messages wait. If there are more, the oldest are lost, and a message says how many. The call returns after
/// calls of the previous function in flight have returned. Then the previous `user` may be freed. A call from inside `log`
/// does not wait; it drops the messages that wait for the previous function. The caller must hold no lock that the previous
/// function takes.
///
/// # Safety
/// The library may call `log` with `user`, from any thread that calls it, until a later call of this function returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_set_log(log: spw_log_fn, user: *mut c_void, level: i32) -> spw_status {
    guard(|| {
        let limit = match level {
            0 => None,
            known => Some(
                Level::from_number(known)
                    .ok_or_else(|| Error::invalid("level", format!("{level} is not an spw_log_level")))?,
            ),
        };
        let user = User(user);
        log::set_sink(match (log, limit) {
            (None, None) => None,
            (None, Some(limit)) => Some((limit, Sink::Kept)),
            (Some(_), None) => Some((Level::Error, Sink::Called(Box::new(|_, _| {})))),
            (Some(log), Some(limit)) => Some((
                limit,
                Sink::Called(Box::new(move |level, message| {
                    let text = failure::c_string(message);
                    // SAFETY: the caller of spw_set_log allowed calls with `user` from threads that call the library.
                    unsafe { log(user.get(), level as i32, text.as_ptr()) }
                })),
            )),
        });
        Ok(())
    })
}

/// Takes the oldest message that waits. Messages wait after `spw_set_log` with `log` NULL and a level. `level_out` receives
/// the `spw_log_level` of the message, or SPW_LOG_LEVEL_OFF with an empty text if there is none. With `text_out` NULL the
/// message stays, and `needed_out` receives the bytes of its text with the NUL. The call never waits.
#[unsafe(no_mangle)]
pub extern "C" fn spw_log_next(
    level_out: Out<i32>,
    text_out: Out<c_char>,
    size: u64,
    needed_out: Out<u64>,
) -> spw_status {
    guard(|| {
        level_out.required("level_out")?;
        let found = log::next(!text_out.is_null());
        let (level, text) = found.map_or((0, String::new()), |(level, text)| (level as i32, text));
        level_out.put_optional(level);
        text_out.put_text(&text, size, needed_out)
    })
}

#[derive(Clone, Copy)]
struct User(*mut c_void);

impl User {
    fn get(self) -> *mut c_void {
        self.0
    }
}

// SAFETY: `user` is only passed to its `log` function, and the caller of spw_set_log allowed threads that call the library.
unsafe impl Send for User {}
// SAFETY: as above.
unsafe impl Sync for User {}
