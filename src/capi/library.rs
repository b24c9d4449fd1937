//! The library as a whole: version, kernel, log, counters.
#![allow(non_camel_case_types)]

use std::ffi::{CString, c_char, c_void};

use super::guard::guard;
use super::record::{self, Record};
use super::status::spw_status;
use crate::error::{Error, Result};
use crate::log::{self, Level};
use crate::optim::processor;
use crate::stats;

/// Version of the binary interface; the SONAME contains it. Within one version, functions and fields are only added.
pub const SPW_ABI_VERSION: u32 = 1;

/// Returns the `SPW_ABI_VERSION` of the loaded library. Compare it with the macro before any other call.
#[unsafe(no_mangle)]
pub extern "C" fn spw_abi_version() -> u32 {
    SPW_ABI_VERSION
}

/// Returns the release version, for example "0.1.0". The string is constant.
#[unsafe(no_mangle)]
pub extern "C" fn spw_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// Writes the name of the kernel that runs steps: "avx512", "avx2", "sve_bf16", "sve", "neon" or "scalar". The
/// environment variable `SPILLWAY_KERNEL` selects a kernel. If this processor lacks it, this call and every step are
/// SPW_ERR_UNSUPPORTED. The string is constant.
///
/// # Safety
/// `name_out` points to a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_kernel_name(name_out: *mut *const c_char) -> spw_status {
    guard(|| {
        let name = match processor::kernel()?.name() {
            "avx512" => c"avx512",
            "avx2" => c"avx2",
            "sve_bf16" => c"sve_bf16",
            "sve" => c"sve",
            "neon" => c"neon",
            _ => c"scalar",
        };
        // SAFETY: not NULL, and valid by the caller's promise.
        unsafe { out(name_out, "name_out")?.write(name.as_ptr()) };
        Ok(())
    })
}

/// Severity of a log message. A level includes the levels before it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_log_level {
    /// No messages.
    SPW_LOG_OFF = 0,
    /// A failure that no status reports to the caller.
    SPW_LOG_ERROR = 1,
    /// Reduced performance or function. The message says what to change.
    SPW_LOG_WARN = 2,
    /// A choice that the library made once, with its reason.
    SPW_LOG_INFO = 3,
    /// Details for a bug report.
    SPW_LOG_DEBUG = 4,
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

/// Optimizer work of this process since the library was loaded.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct spw_stats {
    /// `sizeof(spw_stats)`
    pub struct_size: u32,
    /// 0
    pub reserved: u32,
    /// Successful Adam and AdamW calls.
    pub adam_calls: u64,
    /// Elements that these calls updated.
    pub adam_elements: u64,
    /// Successful Adagrad calls.
    pub adagrad_calls: u64,
    /// Elements that these calls updated.
    pub adagrad_elements: u64,
    /// Successful Lion calls.
    pub lion_calls: u64,
    /// Elements that these calls updated.
    pub lion_elements: u64,
}

// SAFETY: integers without padding.
unsafe impl Record for spw_stats {
    const FIRST_SIZE: usize = 56;
    const NAME: &'static str = "spw_stats";
}

/// Reads the counters. Set `stats->struct_size` first. Thread-safe.
///
/// # Safety
/// `stats` points to a struct of `struct_size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_stats_get(stats: *mut spw_stats) -> spw_status {
    guard(|| {
        let (adam_calls, adam_elements) = stats::ADAM.get();
        let (adagrad_calls, adagrad_elements) = stats::ADAGRAD.get();
        let (lion_calls, lion_elements) = stats::LION.get();
        let values = spw_stats {
            struct_size: 0,
            reserved: 0,
            adam_calls,
            adam_elements,
            adagrad_calls,
            adagrad_elements,
            lion_calls,
            lion_elements,
        };
        // SAFETY: the caller meets the callee's requirements.
        unsafe { record::write(&values, stats, "stats") }
    })
}

/// Returns an output pointer that is not NULL, or an error that names the argument.
pub(super) fn out<T>(pointer: *mut T, argument: &'static str) -> Result<*mut T> {
    match pointer.is_null() {
        true => Err(Error::invalid(argument, "is NULL")),
        false => Ok(pointer),
    }
}

/// Panics inside the guard. Tests use it to see what a C caller receives.
#[cfg(feature = "probe")]
#[unsafe(no_mangle)]
pub extern "C" fn spw_probe_panic() -> spw_status {
    guard(|| panic!("probe"))
}
