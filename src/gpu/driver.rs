//! The driver library of this process: opened at first use, never at load time; errors say what is wrong with it.
//!
//! Invariants:
//! - A [`Driver`] exists only after `cuInit` succeeded and every function was found.
//! - A [`Driver`] belongs to the process that created it. CUDA does not survive fork: a child gets an error, not a
//!   crash.
//! - This file takes no lock and never closes the library: the framework may use the same library.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::Arc;

use arc_swap::ArcSwapOption;

use super::table::{Code, Table, code};
use crate::environment;
use crate::error::{Error, GpuError, GpuKind, Result};
use crate::log::{self, Level};
use crate::sys::fork::OpeningProcess;

/// Environment variable with the library to load instead of the system's; for tests and unusual installations.
const LIBRARY_VARIABLE: &str = "SPILLWAY_CUDA_LIBRARY";
/// The library name that drivers install. `libcuda.so` is never opened: CUDA toolkits install stubs under that name.
const LIBRARY: &str = "libcuda.so.1";
/// CUDA 12.0 (driver 525), the first version that accepts the PTX of the kernels.
const OLDEST: c_int = 12_000;

/// An initialised driver.
#[derive(Debug)]
pub struct Driver {
    /// The driver's functions.
    pub(super) table: Table,
    version: c_int,
    opener: OpeningProcess,
    library: String,
}

static CURRENT: ArcSwapOption<Driver> = ArcSwapOption::const_empty();

impl Driver {
    /// The driver of this process; opens and initialises it at the first call. Errors: no library, no GPU, or the
    /// driver is older than CUDA 12.0.
    pub fn get() -> Result<Arc<Driver>> {
        if let Some(driver) = CURRENT.load_full() {
            driver.check_process()?;
            return Ok(driver);
        }
        let named = environment::text(LIBRARY_VARIABLE)?;
        // Two threads may get here at once: a second initialisation is harmless.
        let driver = Arc::new(Driver::open(named.as_deref().unwrap_or(LIBRARY))?);
        CURRENT.store(Some(Arc::clone(&driver)));
        log::write(Level::Info, &format!("CUDA {} from {}", driver.version_text(), driver.library));
        Ok(driver)
    }

    /// The driver of this process if a call of this library has opened it already.
    pub fn opened() -> Option<Arc<Driver>> {
        CURRENT.load_full().filter(|driver| driver.opener.is_current())
    }

    /// Opens and initialises the library `library`.
    pub fn open(library: &str) -> Result<Driver> {
        let handle = open_library(library)?;
        // SAFETY: the library is never closed; a symbol with a driver function's name is that function.
        let table = unsafe {
            Table::resolve(|name| {
                // SAFETY: `handle` is an open library, `name` is NUL-terminated.
                libc::dlsym(handle, name.as_ptr())
            })
        };
        let table = table.map_err(|missing| {
            let detail = format!("the library has no {missing}; install driver 525 or newer");
            failure(GpuKind::DriverTooOld, format!("opening {library}"), detail)
        })?;
        Driver::initialise(table, library)
    }

    /// Initialises a driver, given its functions.
    pub(super) fn initialise(table: Table, library: &str) -> Result<Driver> {
        let mut version = 0;
        // SAFETY: `cuDriverGetVersion` may be called before `cuInit`; the pointer is valid.
        let found = unsafe { (table.cuDriverGetVersion)(&raw mut version) };
        let driver =
            Driver { table, version, opener: OpeningProcess::current(), library: library.to_string() };
        let doing = || format!("reading the version of {library}");
        driver.check_init(found, &doing)?;
        if version < OLDEST {
            let detail = format!(
                "the driver supports CUDA {}; install driver 525 (CUDA 12.0) or newer",
                driver.version_text()
            );
            return Err(failure(GpuKind::DriverTooOld, format!("opening {library}"), detail));
        }
        // SAFETY: `cuInit` takes no pointer; 0 is its only valid flag.
        let outcome = unsafe { (driver.table.cuInit)(0) };
        driver.check_init(outcome, &|| format!("initialising {library}"))?;
        Ok(driver)
    }

    /// Number of devices visible to this process, after `CUDA_VISIBLE_DEVICES`. Errors: no device.
    pub fn device_count(&self) -> Result<u32> {
        let mut count = 0;
        // SAFETY: the driver is initialised; the pointer is valid.
        let outcome = unsafe { (self.table.cuDeviceGetCount)(&raw mut count) };
        self.check_init(outcome, &|| "counting GPUs".to_string())?;
        match count {
            0 => Err(failure(
                GpuKind::NoDevice,
                "counting GPUs".to_string(),
                "no GPU is visible to this process; see CUDA_VISIBLE_DEVICES".to_string(),
            )),
            some => Ok(some.max(0) as u32),
        }
    }

    /// PCI addresses of the visible devices, in the driver's order. The devices of several MIG instances on one GPU have
    /// that GPU's address.
    pub fn addresses(&self) -> Result<Vec<String>> {
        let count = match self.device_count() {
            Err(Error::Gpu(error)) if error.kind == GpuKind::NoDevice => 0,
            count => count?,
        };
        let address = |ordinal| {
            let (mut device, mut text) = (0, [0 as c_char; 32]);
            // SAFETY: the driver is initialised; the pointer is valid.
            let found = unsafe { (self.table.cuDeviceGet)(&raw mut device, ordinal as c_int) };
            self.check_init(found, &|| format!("opening GPU {ordinal}"))?;
            // SAFETY: the buffer has one byte more than passed, which stays 0.
            let named = unsafe {
                (self.table.cuDeviceGetPCIBusId)(text.as_mut_ptr(), text.len() as c_int - 1, device)
            };
            self.check_init(named, &|| format!("reading the address of GPU {ordinal}"))?;
            // SAFETY: the last byte is 0.
            Ok(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
        };
        (0..count).map(address).collect()
    }

    /// The newest CUDA version that the driver supports: 12040 for 12.4.
    pub fn version(&self) -> u32 {
        self.version.max(0) as u32
    }

    fn version_text(&self) -> String {
        format!("{}.{}", self.version / 1000, self.version % 1000 / 10)
    }

    /// The driver's name of a result code.
    pub(super) fn name_of(&self, outcome: Code) -> String {
        let mut name = std::ptr::null();
        // SAFETY: the pointer is valid.
        let known = unsafe { (self.table.cuGetErrorName)(outcome, &raw mut name) };
        if known != code::SUCCESS || name.is_null() {
            return format!("CUDA error {outcome}");
        }
        // SAFETY: the driver returned a constant NUL-terminated string.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        format!("{name} ({outcome})")
    }

    /// Returns an error in a child of the process that initialised the driver. The driver is of the whole process: calls without
    /// a handle and drops of GPU objects reach it too.
    pub(super) fn check_process(&self) -> Result<()> {
        if self.opener.is_current() {
            return Ok(());
        }
        let detail = format!(
            "process {} used CUDA before it forked this process; start child processes with spawn",
            self.opener.id()
        );
        Err(failure(GpuKind::Forked, "using CUDA".to_string(), detail))
    }

    /// Converts a result code from before a context exists into an error.
    fn check_init(&self, outcome: Code, doing: &dyn Fn() -> String) -> Result<()> {
        let (kind, advice) = match outcome {
            code::SUCCESS => return Ok(()),
            code::NO_DEVICE => {
                (GpuKind::NoDevice, "no GPU is visible to this process; see CUDA_VISIBLE_DEVICES")
            }
            code::UNKNOWN | code::SYSTEM_NOT_READY => (
                GpuKind::NoDevice,
                "the kernel driver does not respond; see the kernel log, or restart the fabric manager",
            ),
            code::STUB_LIBRARY => (
                GpuKind::DriverStub,
                "the library is a CUDA toolkit's stub; remove its directory from LD_LIBRARY_PATH",
            ),
            code::INSUFFICIENT_DRIVER | code::SYSTEM_DRIVER_MISMATCH | code::COMPAT_NOT_SUPPORTED => (
                GpuKind::DriverTooOld,
                "the library does not match the kernel driver; update the driver, or reboot after an update",
            ),
            code::NOT_INITIALIZED => (
                GpuKind::Forked,
                "CUDA was used before this process was forked; start child processes with spawn",
            ),
            code::OUT_OF_MEMORY => {
                (GpuKind::OutOfMemory, "out of memory at initialisation; free host or GPU memory")
            }
            _ => (GpuKind::Refused, "the driver reported an error"),
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
        .map_err(|_| failure(GpuKind::NoDevice, doing(), "the name contains a NUL".to_string()))?;
    // SAFETY: `name` is NUL-terminated. The library's constructors run, as in every CUDA program.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if !handle.is_null() {
        return Ok(handle);
    }
    // SAFETY: the result is null, or this thread's own message, valid until its next `dl*` call.
    let words = unsafe { libc::dlerror() };
    let reason = match words.is_null() {
        true => "no reason was reported".to_string(),
        // SAFETY: a NUL-terminated string of the dynamic linker.
        false => unsafe { CStr::from_ptr(words) }.to_string_lossy().into_owned(),
    };
    Err(failure(
        GpuKind::NoDevice,
        doing(),
        format!(
            "cannot load the CUDA driver library: {reason}; install the driver, or set SPILLWAY_CUDA_LIBRARY"
        ),
    ))
}
