//! The driver library of this process: opened at first use, never at load, and what is wrong with it if it is not good.
//!
//! Invariants:
//! - A [`Driver`] exists only after `cuInit` succeeded and every function was found.
//! - It belongs to the process that made it. CUDA does not survive fork: a child gets an error instead of a crash.
//! - Nothing here takes a lock, and nothing is ever closed: the framework may use the same library.

use std::ffi::{CStr, CString, c_int, c_void};
use std::sync::Arc;

use arc_swap::ArcSwapOption;

use super::table::{Code, Table, code};
use crate::error::{Error, GpuError, GpuKind, Result};
use crate::log::{self, Level};
use crate::sys::process;

/// Names another library than the system's. For tests, and for drivers in unusual places.
pub const LIBRARY_VARIABLE: &str = "SPILLWAY_CUDA_LIBRARY";
/// The name that drivers install. Toolkits install stubs as `libcuda.so`, which is therefore never asked for.
const LIBRARY: &str = "libcuda.so.1";
/// CUDA 12.0, driver 525: the first that takes the PTX of the kernels.
const OLDEST: c_int = 12_000;

/// A driver that works.
#[derive(Debug)]
pub struct Driver {
    /// Its functions.
    pub(super) table: Table,
    version: c_int,
    process: u32,
    library: String,
}

static CURRENT: ArcSwapOption<Driver> = ArcSwapOption::const_empty();

impl Driver {
    /// The driver of this process, opened and initialised if it is not yet.
    pub fn get() -> Result<Arc<Driver>> {
        if let Some(driver) = CURRENT.load_full() {
            driver.check_process()?;
            return Ok(driver);
        }
        let named = std::env::var(LIBRARY_VARIABLE).ok().filter(|name| !name.is_empty());
        // Two threads may both come here: opening and initialising again is harmless.
        let driver = Arc::new(Driver::open(named.as_deref().unwrap_or(LIBRARY))?);
        CURRENT.store(Some(Arc::clone(&driver)));
        log::write(Level::Info, &format!("CUDA {} by {}", driver.version_text(), driver.library));
        Ok(driver)
    }

    /// Opens and initialises the library of this name.
    pub fn open(library: &str) -> Result<Driver> {
        let handle = open_library(library)?;
        // SAFETY: the library is never closed; whatever it exports under a driver function's name is that function.
        let table = unsafe {
            Table::resolve(|name| {
                // SAFETY: an open library and a string with a NUL.
                libc::dlsym(handle, name.as_ptr())
            })
        };
        let table = table.map_err(|missing| {
            let detail = format!("it has no {missing}; driver 525 or newer is needed");
            failure(GpuKind::DriverTooOld, format!("opening {library}"), detail)
        })?;
        Driver::initialise(table, library)
    }

    /// Initialises a driver by its functions.
    pub(super) fn initialise(table: Table, library: &str) -> Result<Driver> {
        let mut version = 0;
        // SAFETY: both may be called before anything else; the pointer is good.
        let found = unsafe { (table.cuDriverGetVersion)(&raw mut version) };
        let driver = Driver { table, version, process: process::id(), library: library.to_string() };
        let doing = || format!("asking {library} for its version");
        driver.check_init(found, &doing)?;
        if version < OLDEST {
            let detail = format!("it is CUDA {}; 12.0, driver 525, is needed", driver.version_text());
            return Err(failure(GpuKind::DriverTooOld, format!("opening {library}"), detail));
        }
        // SAFETY: takes no pointer; 0 is the only flag there is.
        let outcome = unsafe { (driver.table.cuInit)(0) };
        driver.check_init(outcome, &|| format!("initialising {library}"))?;
        Ok(driver)
    }

    /// Number of devices, as `CUDA_VISIBLE_DEVICES` leaves them.
    pub fn device_count(&self) -> Result<u32> {
        self.check_process()?;
        let mut count = 0;
        // SAFETY: initialised; the pointer is good.
        let outcome = unsafe { (self.table.cuDeviceGetCount)(&raw mut count) };
        self.check_init(outcome, &|| "counting devices".to_string())?;
        match count {
            0 => Err(failure(GpuKind::NoDevice, "counting devices".to_string(), "there is none".to_string())),
            some => Ok(some.max(0) as u32),
        }
    }

    /// The newest CUDA that this driver speaks, as 12040 for 12.4.
    pub fn version(&self) -> u32 {
        self.version.max(0) as u32
    }

    fn version_text(&self) -> String {
        format!("{}.{}", self.version / 1000, self.version % 1000 / 10)
    }

    /// The driver's name of a code.
    pub(super) fn name_of(&self, outcome: Code) -> String {
        let mut name = std::ptr::null();
        // SAFETY: the pointer is good.
        let known = unsafe { (self.table.cuGetErrorName)(outcome, &raw mut name) };
        if known != code::SUCCESS || name.is_null() {
            return format!("CUDA error {outcome}");
        }
        // SAFETY: the driver gave a constant string.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        format!("{name} ({outcome})")
    }

    /// Refuses to go on in a child of the process that initialised the driver.
    pub(super) fn check_process(&self) -> Result<()> {
        if self.process == process::id() {
            return Ok(());
        }
        let detail = format!(
            "process {} used CUDA before this child was forked; start such children with spawn",
            self.process
        );
        Err(failure(GpuKind::Forked, "using CUDA".to_string(), detail))
    }

    /// What a code means before there is a context.
    fn check_init(&self, outcome: Code, doing: &dyn Fn() -> String) -> Result<()> {
        let (kind, advice) = match outcome {
            code::SUCCESS => return Ok(()),
            code::NO_DEVICE => (GpuKind::NoDevice, "no GPU is visible to this process"),
            code::UNKNOWN | code::SYSTEM_NOT_READY => (
                GpuKind::NoDevice,
                "the kernel driver does not answer; see its log, or restart the fabric manager",
            ),
            code::STUB_LIBRARY => {
                (GpuKind::DriverStub, "it is the stub of a CUDA toolkit; take its folder off LD_LIBRARY_PATH")
            }
            code::INSUFFICIENT_DRIVER | code::SYSTEM_DRIVER_MISMATCH | code::COMPAT_NOT_SUPPORTED => (
                GpuKind::DriverTooOld,
                "library and kernel driver do not fit; update the driver, or reboot after an update",
            ),
            code::NOT_INITIALIZED => (GpuKind::Forked, "CUDA was used before this child was forked"),
            code::OUT_OF_MEMORY => (GpuKind::OutOfMemory, "no memory to begin with"),
            _ => (GpuKind::Refused, "the driver refused"),
        };
        Err(failure(kind, doing(), format!("{}: {advice}", self.name_of(outcome))))
    }
}

pub(super) fn failure(kind: GpuKind, doing: String, detail: String) -> Error {
    GpuError { kind, doing, detail }.into()
}

fn open_library(library: &str) -> Result<*mut c_void> {
    let doing = || format!("opening {library}");
    let name = CString::new(library)
        .map_err(|_| failure(GpuKind::NoDevice, doing(), "the name holds a NUL".to_string()))?;
    // SAFETY: a string with a NUL. The library's own start-up code runs, as it does for every CUDA program.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if !handle.is_null() {
        return Ok(handle);
    }
    // SAFETY: this thread's own message, good until its next call of this family; or null.
    let words = unsafe { libc::dlerror() };
    let reason = match words.is_null() {
        true => "unknown reason".to_string(),
        // SAFETY: a string of the dynamic linker.
        false => unsafe { CStr::from_ptr(words) }.to_string_lossy().into_owned(),
    };
    Err(failure(GpuKind::NoDevice, doing(), format!("there is no CUDA driver: {reason}")))
}
