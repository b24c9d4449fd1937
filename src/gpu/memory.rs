//! Device memory, and host memory that the GPU may access.
//!
//! Invariants:
//! - A [`HostSpan`] exists only for memory that the driver has page-locked, for Spillway or for the memory's owner. The
//!   types therefore exclude copies through pageable memory, which are slow and synchronous.
//! - A [`Lockable`] becomes a [`HostSpan`] by a call that may wait for the device: cuMemHostRegister waits for kernels
//!   that run. A thread that must not wait passes it on. No lock is held meanwhile that another region needs.
//! - Memory that Spillway registered is unregistered before it is unmapped.
//! - Memory that Spillway registered is not mapped in a forked child. Since Linux 5.9 fork copies pinned pages at once;
//!   on older kernels the parent may move to new pages while the GPU keeps accessing the old ones.

use std::collections::HashMap;
use std::ffi::{c_uint, c_void};
use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys::{CU_MEMHOSTREGISTER_PORTABLE, CUdeviceptr, CUmemorytype, CUpointer_attribute};

use super::device::Device;
use super::stream::Stream;
use super::table::code;
use crate::error::{Error, Result};
use crate::pool::pinned;
use crate::pool::region::{self, Lease, Reach, Region};
use crate::pool::transfer_buffer::TransferBuffer;
use crate::sys::deferred::Deferred;
use crate::sys::span::Span;
use crate::sys::sync::Lock;

/// A range of device memory: Spillway's, or the framework's (`tensor.data_ptr()`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceSpan {
    address: CUdeviceptr,
    bytes: u64,
}

impl DeviceSpan {
    /// No bytes.
    pub const EMPTY: DeviceSpan = DeviceSpan { address: 0, bytes: 0 };

    /// # Safety
    /// The bytes are device memory of the primary context. All other accesses to them are ordered by the
    /// events that are passed to the calls that use this span.
    pub unsafe fn new(address: u64, bytes: u64, argument: &'static str) -> Result<DeviceSpan> {
        if address == 0 && bytes > 0 {
            return Err(Error::invalid(argument, "is NULL"));
        }
        if address.checked_add(bytes).is_none() {
            return Err(Error::invalid(argument, format!("{bytes} bytes exceed the address space")));
        }
        Ok(DeviceSpan { address, bytes })
    }

    /// Address of the first byte.
    pub fn address(self) -> u64 {
        self.address
    }

    /// Number of bytes.
    pub fn bytes(self) -> u64 {
        self.bytes
    }

    /// The `bytes` bytes that begin `from` bytes into the span.
    pub fn part(self, from: u64, bytes: u64) -> DeviceSpan {
        assert!(from <= self.bytes && bytes <= self.bytes - from, "part {from}+{bytes} of {}", self.bytes);
        DeviceSpan { address: self.address + from, bytes }
    }
}

/// Device memory that Spillway allocated; freed on drop.
#[derive(Debug)]
pub struct DeviceMemory {
    device: Arc<Device>,
    span: DeviceSpan,
}

impl DeviceMemory {
    /// Allocates `bytes` bytes, not zeroed. Errors: `OutOfMemory`.
    pub fn new(device: &Arc<Device>, bytes: u64) -> Result<DeviceMemory> {
        let _current = device.enter()?;
        let mut address = 0;
        if bytes > 0 {
            // SAFETY: the context is current; the pointer is valid.
            let taken = unsafe { (device.table().cuMemAlloc_v2)(&raw mut address, bytes as usize) };
            device
                .check(taken, || format!("allocating {bytes} bytes of memory on GPU {}", device.ordinal()))?;
        }
        Ok(DeviceMemory { device: Arc::clone(device), span: DeviceSpan { address, bytes } })
    }

    /// The whole allocation.
    pub fn span(&self) -> DeviceSpan {
        self.span
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.span.address != 0
            && let Ok(_current) = self.device.enter()
        {
            // SAFETY: allocated in `new`. The driver waits for work that uses the memory.
            unsafe { (self.device.table().cuMemFree_v2)(self.span.address) };
        }
    }
}

/// Page-locked host memory: the only kind that copies accept.
#[derive(Debug, Clone)]
pub struct HostSpan {
    memory: TransferBuffer,
    _registration: Option<Arc<Registration>>,
}

impl HostSpan {
    /// The bytes.
    pub fn span(&self) -> Span {
        self.memory.span()
    }

    /// The `len` bytes that begin `from` bytes into the span.
    pub fn part(&self, from: usize, len: usize) -> HostSpan {
        HostSpan { memory: self.memory.part(from, len), _registration: self._registration.clone() }
    }
}

/// Pinned host memory which the driver may not have page-locked yet.
#[derive(Debug, Clone)]
pub struct Lockable {
    memory: TransferBuffer,
    lock: PageLock,
}

#[derive(Debug, Clone)]
enum PageLock {
    /// The memory is page-locked: by its owner, or by the registration.
    Held(Option<Arc<Registration>>),
    /// The first use registers the region.
    AtUse(Arc<Known>),
}

impl Lockable {
    /// The bytes.
    pub fn span(&self) -> Span {
        self.memory.span()
    }

    /// Prevents the reuse of pinned memory until the lease is dropped.
    pub(super) fn lease(&self) -> Lease {
        self.memory.lease()
    }

    /// Page-locks the memory if it is not yet; waits for the device then.
    pub(super) fn page_lock(&self) -> Result<HostSpan> {
        let registration = match &self.lock {
            PageLock::Held(registration) => registration.clone(),
            PageLock::AtUse(known) => Some(known.register()?),
        };
        Ok(HostSpan { memory: self.memory.clone(), _registration: registration })
    }
}

impl From<HostSpan> for Lockable {
    fn from(span: HostSpan) -> Lockable {
        Lockable { memory: span.memory, lock: PageLock::Held(span._registration) }
    }
}

/// A region of pinned memory, registered with the driver while this object lives.
#[derive(Debug)]
struct Registration {
    device: Arc<Device>,
    region: Arc<Region>,
    /// `None` if another owner had registered the region, and after it is unregistered.
    ours: Option<Reach>,
}

impl Registration {
    fn new(device: &Arc<Device>, region: Arc<Region>) -> Result<Registration> {
        let _current = device.enter()?;
        let all = region.span();
        let start = all.as_ptr().cast::<c_void>();
        // SAFETY: whole pages of a live mapping, which the registration keeps alive.
        let outcome =
            unsafe { (device.table().cuMemHostRegister_v2)(start, all.len(), CU_MEMHOSTREGISTER_PORTABLE) };
        let doing = || format!("registering {} bytes of pinned memory", all.len());
        let ours = match outcome {
            code::HOST_MEMORY_ALREADY_REGISTERED if is_locked(device, all)? => None,
            outcome => {
                device.check(outcome, doing)?;
                Some(Reach::begin(&region))
            }
        };
        Ok(Registration { device: Arc::clone(device), region, ours })
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let Some(reach) = self.ours.take() else { return };
        match self.device.enter() {
            Ok(_current) => {
                // SAFETY: registered in `new`. No copy is in flight: copies hold the registration until they are done.
                unsafe { (self.device.table().cuMemHostUnregister)(self.region.span().as_ptr().cast()) };
            }
            // The device can still access the region, so the region is leaked.
            Err(_) => std::mem::forget(reach),
        }
    }
}

/// The regions that are registered with one device. A region whose owner releases it is removed automatically.
pub struct Registry {
    device: Arc<Device>,
    regions: Arc<Lock<Regions>>,
    _watcher: Arc<dyn Fn() + Send + Sync>,
}

type Regions = HashMap<u64, Arc<Known>>;

/// A region that a copy has named. Its registration waits in the driver, and no other region waits for it.
#[derive(Debug)]
struct Known {
    device: Arc<Device>,
    region: Arc<Region>,
    registration: Deferred<Registration>,
}

impl Known {
    fn register(&self) -> Result<Arc<Registration>> {
        // Checks for a forked child before locking: another thread of the parent may have held the lock during the
        // fork.
        self.device.usable()?;
        self.registration.get(|| Registration::new(&self.device, Arc::clone(&self.region)))
    }
}

impl Registry {
    /// An empty registry, which is notified when regions are released.
    pub fn new(device: &Arc<Device>) -> Registry {
        let regions = Arc::new(Lock::new(Regions::new()));
        let watched = Arc::downgrade(&regions);
        let owner = Arc::clone(device);
        let watcher: Arc<dyn Fn() + Send + Sync> = Arc::new(move || {
            // In a forked child the lock may stay held forever, and there is nothing to unregister.
            if let Some(regions) = watched.upgrade().filter(|_| owner.is_own()) {
                let retired: Vec<_> = regions.lock().extract_if(|_, known| known.region.retired()).collect();
                // Dropped outside the lock: unregistering may wait for copies.
                drop(retired);
            }
        });
        region::watch(&watcher);
        Registry { device: Arc::clone(device), regions, _watcher: watcher }
    }

    /// The GPU whose memory is registered here.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns `memory` as page-locked memory: of spw_pinned_alloc (registered now if it is not yet), or memory that its
    /// owner page-locked through CUDA. Errors: any other memory, also if it reaches past an allocation.
    pub fn host(&self, memory: impl Into<TransferBuffer>, argument: &'static str) -> Result<HostSpan> {
        self.lockable(memory, argument)?.page_lock()
    }

    /// As [`Registry::host`], without a wait for the device: memory of spw_pinned_alloc is registered at its first use.
    pub fn lockable(&self, memory: impl Into<TransferBuffer>, argument: &'static str) -> Result<Lockable> {
        let memory = memory.into();
        if memory.is_empty() {
            return Ok(Lockable { memory, lock: PageLock::Held(None) });
        }
        let span = memory.span();
        let whole = pinned::is_whole(span);
        if let Some(region) = memory.region().filter(|_| whole) {
            let lock = PageLock::AtUse(self.known(region)?);
            return Ok(Lockable { memory, lock });
        }
        match whole && is_locked(&self.device, span)? {
            true => Ok(Lockable { memory, lock: PageLock::Held(None) }),
            false => Err(Error::invalid(
                argument,
                format!(
                    "{} bytes at {:#x} are not pinned; use memory from one pinned allocation",
                    span.len(),
                    span.address()
                ),
            )),
        }
    }

    fn known(&self, region: &Arc<Region>) -> Result<Arc<Known>> {
        // Checks for a forked child before locking, as above.
        self.device.usable()?;
        let new = || {
            let (device, region) = (Arc::clone(&self.device), Arc::clone(region));
            Arc::new(Known { device, region, registration: Deferred::new() })
        };
        Ok(Arc::clone(self.regions.lock().entry(region.id()).or_insert_with(new)))
    }
}

/// True if the driver knows this host memory as page-locked.
fn is_locked(device: &Device, span: Span) -> Result<bool> {
    const PAGE_LOCKED: c_uint = CUmemorytype::CU_MEMORYTYPE_HOST as c_uint;
    let _current = device.enter()?;
    let mut attributes = [CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE];
    // Checks the first and last byte only: callers do not pass a span over two allocations with a gap.
    for end in [span.address(), span.address() + span.len() - 1] {
        let mut kind: c_uint = 0;
        let mut values = [(&raw mut kind).cast::<c_void>()];
        // SAFETY: one attribute, and space for its value. For unknown addresses the driver returns 0.
        let outcome = unsafe {
            (device.table().cuPointerGetAttributes)(
                1,
                attributes.as_mut_ptr(),
                values.as_mut_ptr(),
                end as u64,
            )
        };
        device.check(outcome, || format!("reading the attributes of the memory at {end:#x}"))?;
        if kind != PAGE_LOCKED {
            return Ok(false);
        }
    }
    Ok(true)
}

impl fmt::Debug for Registry {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Registry").field("device", &self.device).finish_non_exhaustive()
    }
}

impl Stream {
    /// Enqueues a copy of `from` to the device. The caller keeps both spans alive until the copy is done.
    pub fn upload(&self, from: &HostSpan, to: DeviceSpan) -> Result<()> {
        assert_eq!(from.span().len() as u64, to.bytes, "copy between spans of different lengths");
        if to.bytes == 0 {
            return Ok(());
        }
        let device = self.device();
        let _current = device.enter()?;
        let source = from.span().as_ptr().cast::<c_void>().cast_const();
        // SAFETY: both spans are valid by the promises made at their construction.
        let outcome = unsafe {
            (device.table().cuMemcpyHtoDAsync_v2)(to.address, source, to.bytes as usize, self.handle())
        };
        device.check(outcome, || format!("copying {} bytes to GPU {}", to.bytes, device.ordinal()))
    }

    /// Enqueues a copy of `from` to the host. The caller keeps both spans alive until the copy is done.
    pub fn download(&self, from: DeviceSpan, to: &HostSpan) -> Result<()> {
        assert_eq!(to.span().len() as u64, from.bytes, "copy between spans of different lengths");
        if from.bytes == 0 {
            return Ok(());
        }
        let device = self.device();
        let _current = device.enter()?;
        let target = to.span().as_ptr().cast::<c_void>();
        // SAFETY: both spans are valid by the promises made at their construction.
        let outcome = unsafe {
            (device.table().cuMemcpyDtoHAsync_v2)(target, from.address, from.bytes as usize, self.handle())
        };
        device.check(outcome, || format!("copying {} bytes from GPU {}", from.bytes, device.ordinal()))
    }
}
