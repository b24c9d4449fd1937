//! One GPU, through its primary context. The framework uses the same context, so streams, events and addresses can be
//! shared.
//!
//! Invariants:
//! - The context is current on a thread only during a Spillway call; then the caller's context is current again.
//! - The context's flags are never changed, and the context is released as often as it was retained.
//! - Spillway calls do not break a graph capture of any thread: during the call the thread's capture mode is relaxed,
//!   and no call touches what is captured.
//! - After a sticky driver error every call fails with that error's name. The contents of device memory, and of host
//!   memory that was being written, are then undefined.

use std::ffi::{CStr, c_char, c_int};
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{CUcontext, CUdevice, CUdevice_attribute, CUstreamCaptureMode};

use super::driver::{Driver, failure};
use super::table::{Code, Table, code};
use super::waiters::Waiters;
use crate::error::{Error, GpuKind, Result};
use crate::pool::region::Backing;
use crate::sys::sync::Lock;
use crate::sys::topology::{Root, Topology};

/// A GPU in use by this process.
#[derive(Debug)]
pub struct Device {
    driver: Arc<Driver>,
    ordinal: c_int,
    device: CUdevice,
    context: usize,
    /// The sticky error that ended the context; 0 if none.
    lost: AtomicI32,
    /// The NUMA node whose memory the GPU reaches best; `None` if it is not known or the only one.
    node: Option<u32>,
    waiters: Waiters,
    patience: Lock<Patience>,
}

/// How long a wait lasts whose caller gives no limit.
#[derive(Debug)]
struct Patience {
    limit: Duration,
    /// The last such wait ended at the limit: the next ones only ask.
    ended: bool,
}

/// Longer than the timeouts of the collective operations that a stream may wait for.
const PATIENCE: Duration = Duration::from_secs(30 * 60);

/// Properties of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The driver's name of the GPU.
    pub name: String,
    /// PCI address in lower case, for example "0000:17:00.0": the key of the GPU's NUMA node in sysfs.
    pub pci: String,
    /// Compute capability: 90 for 9.0.
    pub capability: u32,
    /// Number of multiprocessors.
    pub multiprocessors: u32,
    /// Number of copies that can run at the same time; with 2, one in each direction.
    pub copy_engines: u32,
    /// Bytes of device memory.
    pub memory_bytes: u64,
    /// Bytes of free device memory.
    pub free_bytes: u64,
}

const MULTIPROCESSORS: CUdevice_attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
const COPY_ENGINES: CUdevice_attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT;
const CAPABILITY_MAJOR: CUdevice_attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
const CAPABILITY_MINOR: CUdevice_attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR;
const CAPTURE_MODE_RELAXED: c_int = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as c_int;
/// The compute capability that the kernels' PTX requires: 7.0.
const OLDEST_CAPABILITY: u32 = 70;

impl Device {
    /// Opens GPU `ordinal` of `driver`. Errors: no such device, or a compute capability below 7.0.
    pub fn open(driver: Arc<Driver>, ordinal: u32) -> Result<Arc<Device>> {
        let count = driver.device_count()?;
        if ordinal >= count {
            return Err(Error::invalid(
                "ordinal",
                format!("is {ordinal}, but {count} devices are visible; see CUDA_VISIBLE_DEVICES"),
            ));
        }
        let ordinal = ordinal as c_int;
        let node = node_of(&driver, ordinal as usize);
        let mut opened = Device {
            driver,
            ordinal,
            device: 0,
            context: 0,
            lost: AtomicI32::new(0),
            node,
            waiters: Waiters::default(),
            patience: Lock::new(Patience { limit: PATIENCE, ended: false }),
        };
        // SAFETY: the driver is initialised; the pointer is valid.
        let found = unsafe { (opened.table().cuDeviceGet)(&raw mut opened.device, ordinal) };
        opened.check(found, || format!("opening GPU {ordinal}"))?;
        let capability = opened.capability()?;
        if capability < OLDEST_CAPABILITY {
            let (major, minor) = (capability / 10, capability % 10);
            let message =
                format!("GPU {ordinal} has compute capability {major}.{minor}; 7.0 or higher is needed");
            return Err(Error::Unsupported(message));
        }
        let mut context: CUcontext = std::ptr::null_mut();
        // SAFETY: a device of this driver; the pointer is valid.
        let retained = unsafe { (opened.table().cuDevicePrimaryCtxRetain)(&raw mut context, opened.device) };
        opened.check(retained, || format!("retaining the primary context of GPU {ordinal}"))?;
        opened.context = context as usize;
        Ok(Arc::new(opened))
    }

    /// Index of the GPU among the visible devices.
    pub fn ordinal(&self) -> u32 {
        self.ordinal as u32
    }

    /// Pages for memory that this GPU transfers: on its NUMA node.
    pub fn backing(&self) -> Backing {
        Backing { node: self.node, ..Backing::default() }
    }

    /// The newest CUDA version that the driver supports: 12040 for 12.4.
    pub fn cuda_version(&self) -> u32 {
        self.driver.version()
    }

    /// False in a forked child of the process that opened the device.
    pub fn is_own(&self) -> bool {
        self.driver.check_process().is_ok()
    }

    /// Fails in a forked child of the process that opened the device.
    pub fn check_process(&self) -> Result<()> {
        self.driver.check_process()
    }

    pub(super) fn waiters(&self) -> &Waiters {
        &self.waiters
    }

    /// The end of a wait whose caller gives no limit. A GPU that works needs no such end: after the first wait that
    /// reaches it, later ones end at once until the GPU has ended something.
    pub(super) fn patience(&self) -> Instant {
        let patience = self.patience.lock();
        let limit = if patience.ended { Duration::ZERO } else { patience.limit };
        Instant::now() + limit
    }

    /// Takes note of whether a wait until [`Device::patience`] reached what it waited for.
    pub(super) fn waited(&self, reached: bool) {
        self.patience.lock().ended = !reached;
    }

    /// The error of a wait that ended at [`Device::patience`].
    pub(super) fn hangs(&self) -> Error {
        let limit = self.patience.lock().limit.as_secs();
        Error::Timeout(format!(
            "GPU {} has not ended its work within {limit} s; it may still use the memory: look for a kernel or a \
             collective operation that hangs",
            self.ordinal
        ))
    }

    /// Sets the limit of waits whose caller gives none.
    #[cfg(test)]
    pub(crate) fn set_patience(&self, limit: Duration) {
        *self.patience.lock() = Patience { limit, ended: false };
    }

    /// The driver's functions.
    pub(super) fn table(&self) -> &Table {
        &self.driver.table
    }

    /// Fails as [`Device::enter`] does in a forked child and after a sticky error, without a call of the driver.
    pub(super) fn usable(&self) -> Result<()> {
        self.driver.check_process()?;
        match self.lost.load(Ordering::Acquire) {
            0 => Ok(()),
            lost => Err(self.gone(lost, "using the GPU".to_string())),
        }
    }

    /// Makes the context current on this thread until the guard is dropped. Errors: a forked child, or a sticky error.
    pub(super) fn enter(&self) -> Result<Current<'_>> {
        self.usable()?;
        // SAFETY: the context is retained, and released only when the device is dropped.
        let pushed = unsafe { (self.table().cuCtxPushCurrent_v2)(self.context as CUcontext) };
        self.check(pushed, || "making the CUDA context current".to_string())?;
        let mut current = Current { device: self, capture_mode: None, thread: PhantomData };
        current.capture_mode = Some(self.exchange_capture_mode(CAPTURE_MODE_RELAXED)?);
        Ok(current)
    }

    /// Sets the capture mode of this thread, and returns the previous mode.
    fn exchange_capture_mode(&self, mode: c_int) -> Result<c_int> {
        let mut mode = mode;
        // SAFETY: the pointer is valid.
        let exchanged = unsafe { (self.table().cuThreadExchangeStreamCaptureMode)(&raw mut mode) };
        self.check(exchanged, || "setting the thread's capture mode".to_string())?;
        Ok(mode)
    }

    /// Converts a driver call's result code; a sticky error marks the context as lost.
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
        let detail = format!(
            "{}: the CUDA context is lost and later results are invalid; restart the process",
            self.driver.name_of(outcome)
        );
        failure(GpuKind::Lost, doing, detail)
    }

    /// The GPU's properties, and its free memory now.
    pub fn info(&self) -> Result<DeviceInfo> {
        let _current = self.enter()?;
        let table = self.table();
        let text = |function: unsafe extern "C" fn(*mut c_char, c_int, CUdevice) -> Code| -> Result<String> {
            let mut bytes = [0 as c_char; 256];
            // SAFETY: the buffer has at least as many bytes as passed, and its last byte stays 0.
            let outcome = unsafe { function(bytes.as_mut_ptr(), bytes.len() as c_int - 1, self.device) };
            self.check(outcome, || format!("reading the name of GPU {}", self.ordinal))?;
            // SAFETY: the last byte is 0.
            Ok(unsafe { CStr::from_ptr(bytes.as_ptr()) }.to_string_lossy().into_owned())
        };
        let (free_bytes, memory_bytes) = self.memory()?;
        Ok(DeviceInfo {
            name: text(table.cuDeviceGetName)?,
            pci: text(table.cuDeviceGetPCIBusId)?.to_ascii_lowercase(),
            capability: self.capability()?,
            multiprocessors: self.attribute(MULTIPROCESSORS)?,
            copy_engines: self.attribute(COPY_ENGINES)?,
            memory_bytes,
            free_bytes,
        })
    }

    /// Bytes of device memory that are free now, and of all device memory.
    pub fn memory(&self) -> Result<(u64, u64)> {
        let _current = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both pointers are valid.
        let outcome = unsafe { (self.table().cuMemGetInfo_v2)(&raw mut free, &raw mut total) };
        self.check(outcome, || format!("reading the memory size of GPU {}", self.ordinal))?;
        Ok((free as u64, total as u64))
    }

    fn capability(&self) -> Result<u32> {
        Ok(self.attribute(CAPABILITY_MAJOR)? * 10 + self.attribute(CAPABILITY_MINOR)?)
    }

    fn attribute(&self, attribute: CUdevice_attribute) -> Result<u32> {
        let mut value = 0;
        // SAFETY: a device of this driver; the pointer is valid.
        let outcome = unsafe { (self.table().cuDeviceGetAttribute)(&raw mut value, attribute, self.device) };
        self.check(outcome, || format!("reading {attribute:?} of GPU {}", self.ordinal))?;
        Ok(value.max(0) as u32)
    }
}

/// Without an answer of the driver or of sysfs, memory is not bound.
fn node_of(driver: &Driver, ordinal: usize) -> Option<u32> {
    let address = driver.addresses().ok()?.get(ordinal)?.parse().ok()?;
    Topology::read(&Root::live()).bindable_node(address)
}

impl Drop for Device {
    fn drop(&mut self) {
        if self.is_own() {
            self.waiters.close();
        }
        if self.context != 0 && self.is_own() {
            // SAFETY: retained once, in `open`. An error cannot be handled here.
            unsafe { (self.table().cuDevicePrimaryCtxRelease_v2)(self.device) };
        }
    }
}

/// Proof that the context is current on this thread.
#[derive(Debug)]
pub(super) struct Current<'a> {
    device: &'a Device,
    /// The thread's previous mode, if it was changed.
    capture_mode: Option<c_int>,
    // The context stack is per thread, so the guard must not move to another thread.
    thread: PhantomData<*const ()>,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if let Some(mode) = self.capture_mode {
            // An error cannot be handled here.
            let _ = self.device.exchange_capture_mode(mode);
        }
        let mut popped = std::ptr::null_mut();
        // SAFETY: pushed on this thread by `enter`; the pointer is valid.
        unsafe { (self.device.table().cuCtxPopCurrent_v2)(&raw mut popped) };
    }
}

/// True for errors after which a context runs no more work.
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
