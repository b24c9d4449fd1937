//! One GPU, through its primary context: the one that the framework uses, so that streams, events and addresses are
//! common property.
//!
//! Invariants:
//! - The context is current on a thread only while a call of ours runs there; then the caller's own is current again.
//! - Its flags are never changed, and it is released as often as it was retained.
//! - Calls of ours do not break a graph that any thread captures: meanwhile the thread's capture mode is relaxed. None of
//!   them touches what is captured.
//! - After an error that the driver calls sticky every call fails with that error's name: results in device memory, and
//!   in host memory that was being written, are worth nothing.

use std::ffi::{CStr, c_char, c_int};
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use super::driver::{Driver, failure};
use super::table::{Code, Handle, Table, code};
use crate::error::{Error, GpuKind, Result};

/// A GPU in use by this process.
#[derive(Debug)]
pub struct Device {
    driver: Arc<Driver>,
    ordinal: c_int,
    device: c_int,
    context: usize,
    /// The sticky error that ended the context, 0 while there is none.
    lost: AtomicI32,
}

/// What a GPU is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// As the driver calls it.
    pub name: String,
    /// "0000:17:00.0", lower case: the name that its NUMA node is filed under.
    pub pci: String,
    /// Compute capability, 90 for 9.0.
    pub capability: u32,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Copies that can run at the same time; with 2, one in each direction.
    pub copy_engines: u32,
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Those of them that are free.
    pub free_bytes: u64,
}

const ATTRIBUTE_MULTIPROCESSORS: c_int = 16;
const ATTRIBUTE_COPY_ENGINES: c_int = 40;
const ATTRIBUTE_CAPABILITY_MAJOR: c_int = 75;
const ATTRIBUTE_CAPABILITY_MINOR: c_int = 76;
/// CU_STREAM_CAPTURE_MODE_RELAXED.
const CAPTURE_MODE_RELAXED: c_int = 2;
/// What the kernels' PTX asks for.
const OLDEST_CAPABILITY: u32 = 70;

impl Device {
    /// Uses GPU `ordinal` of `driver`.
    pub fn open(driver: Arc<Driver>, ordinal: u32) -> Result<Arc<Device>> {
        let count = driver.device_count()?;
        if ordinal >= count {
            return Err(Error::invalid("ordinal", format!("is {ordinal}; {count} devices are visible")));
        }
        let ordinal = ordinal as c_int;
        let mut opened = Device { driver, ordinal, device: 0, context: 0, lost: AtomicI32::new(0) };
        // SAFETY: initialised; the pointer is good.
        let found = unsafe { (opened.table().cuDeviceGet)(&raw mut opened.device, ordinal) };
        opened.check(found, || format!("finding GPU {ordinal}"))?;
        let capability = opened.capability()?;
        if capability < OLDEST_CAPABILITY {
            let (major, minor) = (capability / 10, capability % 10);
            let message = format!("GPU {ordinal} has compute capability {major}.{minor}; 7.0 is needed");
            return Err(Error::Unsupported(message));
        }
        let mut context: Handle = std::ptr::null_mut();
        // SAFETY: a device of this driver; the pointer is good.
        let retained = unsafe { (opened.table().cuDevicePrimaryCtxRetain)(&raw mut context, opened.device) };
        opened.check(retained, || format!("retaining the primary context of GPU {ordinal}"))?;
        opened.context = context as usize;
        Ok(Arc::new(opened))
    }

    /// Which of the visible GPUs it is.
    pub fn ordinal(&self) -> u32 {
        self.ordinal as u32
    }

    /// The newest CUDA that its driver speaks: 12040 for 12.4.
    pub fn cuda_version(&self) -> u32 {
        self.driver.version()
    }

    /// False in a forked child of the process that opened it.
    pub fn is_own(&self) -> bool {
        self.driver.check_process().is_ok()
    }

    /// The driver's functions.
    pub(super) fn table(&self) -> &Table {
        &self.driver.table
    }

    /// Makes the context current on this thread until the guard goes; refuses in a forked child, and after a sticky error.
    pub(super) fn enter(&self) -> Result<Current<'_>> {
        self.driver.check_process()?;
        match self.lost.load(Ordering::Acquire) {
            0 => {}
            lost => return Err(self.gone(lost, "using the GPU".to_string())),
        }
        // SAFETY: retained, and released only when the device goes.
        let pushed = unsafe { (self.table().cuCtxPushCurrent_v2)(self.context as Handle) };
        self.check(pushed, || "entering the context".to_string())?;
        let mut current = Current { device: self, capture_mode: None, thread: PhantomData };
        current.capture_mode = Some(self.exchange_capture_mode(CAPTURE_MODE_RELAXED)?);
        Ok(current)
    }

    /// Sets the capture mode of this thread, and returns the one before.
    fn exchange_capture_mode(&self, mode: c_int) -> Result<c_int> {
        let mut mode = mode;
        // SAFETY: the pointer is good.
        let exchanged = unsafe { (self.table().cuThreadExchangeStreamCaptureMode)(&raw mut mode) };
        self.check(exchanged, || "setting the thread's capture mode".to_string())?;
        Ok(mode)
    }

    /// What a driver call came to.
    pub(super) fn check(&self, outcome: Code, doing: impl FnOnce() -> String) -> Result<()> {
        if outcome == code::SUCCESS {
            return Ok(());
        }
        if sticky(outcome) {
            let _ = self.lost.compare_exchange(0, outcome, Ordering::AcqRel, Ordering::Acquire);
            return Err(self.gone(outcome, doing()));
        }
        let kind = match outcome {
            code::OUT_OF_MEMORY => GpuKind::OutOfMemory,
            code::INVALID_PTX
            | code::NO_BINARY_FOR_GPU
            | code::JIT_COMPILER_NOT_FOUND
            | code::JIT_COMPILATION_DISABLED => GpuKind::Jit,
            code::UNSUPPORTED_PTX_VERSION => GpuKind::DriverTooOld,
            _ => GpuKind::Refused,
        };
        Err(failure(kind, doing(), self.driver.name_of(outcome)))
    }

    fn gone(&self, outcome: Code, doing: String) -> Error {
        let detail =
            format!("{}: the context is lost; results since are worth nothing", self.driver.name_of(outcome));
        failure(GpuKind::Lost, doing, detail)
    }

    /// What the GPU is, and how much memory is free now.
    pub fn info(&self) -> Result<DeviceInfo> {
        let _current = self.enter()?;
        let table = self.table();
        let text = |function: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> Code| -> Result<String> {
            let mut bytes = [0 as c_char; 256];
            // SAFETY: as many bytes as said, the last of which stays 0.
            let outcome = unsafe { function(bytes.as_mut_ptr(), bytes.len() as c_int - 1, self.device) };
            self.check(outcome, || format!("asking for the name of GPU {}", self.ordinal))?;
            // SAFETY: the last byte is 0.
            Ok(unsafe { CStr::from_ptr(bytes.as_ptr()) }.to_string_lossy().into_owned())
        };
        let (mut free, mut total) = (0, 0);
        // SAFETY: both pointers are good.
        let outcome = unsafe { (table.cuMemGetInfo_v2)(&raw mut free, &raw mut total) };
        self.check(outcome, || format!("asking for the memory of GPU {}", self.ordinal))?;
        Ok(DeviceInfo {
            name: text(table.cuDeviceGetName)?,
            pci: text(table.cuDeviceGetPCIBusId)?.to_ascii_lowercase(),
            capability: self.capability()?,
            multiprocessors: self.attribute(ATTRIBUTE_MULTIPROCESSORS)?,
            copy_engines: self.attribute(ATTRIBUTE_COPY_ENGINES)?,
            memory_bytes: total as u64,
            free_bytes: free as u64,
        })
    }

    fn capability(&self) -> Result<u32> {
        Ok(self.attribute(ATTRIBUTE_CAPABILITY_MAJOR)? * 10 + self.attribute(ATTRIBUTE_CAPABILITY_MINOR)?)
    }

    fn attribute(&self, attribute: c_int) -> Result<u32> {
        let mut value = 0;
        // SAFETY: a device of this driver; the pointer is good.
        let outcome = unsafe { (self.table().cuDeviceGetAttribute)(&raw mut value, attribute, self.device) };
        self.check(outcome, || format!("asking for attribute {attribute} of GPU {}", self.ordinal))?;
        Ok(value.max(0) as u32)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if self.context != 0 && self.is_own() {
            // SAFETY: retained once, in `open`. A refusal leaves nothing to be done.
            unsafe { (self.table().cuDevicePrimaryCtxRelease_v2)(self.device) };
        }
    }
}

/// Shows that the context is current on this thread.
#[derive(Debug)]
pub(super) struct Current<'a> {
    device: &'a Device,
    /// The thread's own, if it was changed.
    capture_mode: Option<c_int>,
    // The stack of contexts belongs to the thread.
    thread: PhantomData<*const ()>,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if let Some(mode) = self.capture_mode {
            // A refusal leaves nothing to be done.
            let _ = self.device.exchange_capture_mode(mode);
        }
        let mut popped = std::ptr::null_mut();
        // SAFETY: pushed on this thread by `enter`; the pointer is good.
        unsafe { (self.device.table().cuCtxPopCurrent_v2)(&raw mut popped) };
    }
}

/// True for errors after which a context does no more work.
fn sticky(outcome: Code) -> bool {
    matches!(
        outcome,
        code::ECC_UNCORRECTABLE
            | code::NVLINK_UNCORRECTABLE
            | code::CONTAINED
            | code::ILLEGAL_ADDRESS
            | code::LAUNCH_TIMEOUT
            | code::CONTEXT_IS_DESTROYED
            | code::ASSERT
            | code::HARDWARE_STACK_ERROR
            ..=code::LAUNCH_FAILED | code::TENSOR_MEMORY_LEAK | code::UNKNOWN
    )
}
