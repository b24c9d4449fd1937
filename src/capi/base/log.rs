//! Log messages.

use std::ffi::{CString, c_char, c_void};

use crate::capi::prelude::*;
use crate::log::{self, Level};

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

/// Receives log messages. The library may call it from any thread, and from several threads at once. `message` is valid
/// during the call.
pub type spw_log_fn = Option<unsafe extern "C" fn(user: *mut c_void, level: i32, message: *const c_char)>;

/// Sends messages up to `level` (an `spw_log_level`) to `log`, which receives `user`. `log` NULL restores the default:
/// stderr if the environment variable `SPILLWAY_LOG` is "error", "warn", "info" or "debug", else no output.
///
/// The call waits until calls of the previous function in flight return. After it, the previous `user` may be freed. A
/// call from inside `log` does not wait. The caller must hold no lock that the previous function takes.
///
/// # Safety
/// The library may call `log` with `user`, from any thread, until a later call of this function returns.
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
        match (log, limit) {
            (None, _) => log::set_sink(None),
            (Some(_), None) => log::set_sink(Some((Level::Error, Box::new(|_, _| {})))),
            (Some(log), Some(limit)) => log::set_sink(Some((
                limit,
                Box::new(move |level, message| {
                    let text = CString::new(message.replace('\0', " ")).unwrap_or_default();
                    // SAFETY: the caller of spw_set_log allowed calls with `user` from any thread.
                    unsafe { log(user.get(), level as i32, text.as_ptr()) }
                }),
            ))),
        }
        Ok(())
    })
}

#[derive(Clone, Copy)]
struct User(*mut c_void);

impl User {
    fn get(self) -> *mut c_void {
        self.0
    }
}

// SAFETY: `user` is only passed to its `log` function, and the caller of spw_set_log allowed any thread.
unsafe impl Send for User {}
// SAFETY: as above.
unsafe impl Sync for User {}
