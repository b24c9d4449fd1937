//! EXPERIMENTAL: the weight window (weight-flow: SuperOffload section 4.2). This header is not part of spillway.h, and its
//! ABI is not frozen: functions and structs may change with any release.
//!
//! A window has a few slots in device memory for units, such as the weights of a layer, whose home is host memory or a
//! tier. A unit is on the device while it is used, and the units that were used after it in an earlier iteration are
//! fetched meanwhile. A slot is overwritten only after the work of its last reader.
//!
//!     spw_window_unit units[24];
//!     for (uint32_t i = 0; i < 24; i++) {
//!         const spw_window_unit unit = SPW_WINDOW_UNIT_INIT;
//!         units[i] = unit;
//!         units[i].bytes = bytes;
//!         units[i].host = weights[i];
//!     }
//!     spw_window_options options = SPW_WINDOW_OPTIONS_INIT;
//!     options.gpu = gpu;
//!     spw_window *window;
//!     spw_window_open(&options, units, 24, &window);
//!
//!     spw_window_begin(window);
//!     for (uint32_t i = 0; i < 24; i++) {
//!         uint64_t address;
//!         spw_window_use(window, i, stream, -1, &address);
//!         forward(i, address, stream);
//!         spw_window_release(window, i, stream);
//!     }
//!     for (uint32_t i = 0; i < 24; i++) {
//!         spw_window_changed(window, i);
//!         optimize(weights[i]);
//!     }
//!
//!     spw_window_close(window);
//!
//! On a GPU, a window over host memory ran on one H100.

use std::ffi::c_void;
use std::sync::Arc;

use crate::capi::gpu::device::spw_gpu;
use crate::capi::prelude::*;
use crate::capi::tier::open::spw_tier;
use crate::gpu::stream::ForeignStream;
use crate::offload::window::device::{Device, Gpu, Host, Reader};
use crate::offload::window::engine::{Home, Unit, Window};
use crate::pool::transfer_buffer::TransferBuffer;
use crate::sys::span::Span;

/// Where a unit is while it is not on the device. Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_window_home {
    /// Host memory, `host`.
    SPW_WINDOW_HOME_HOST = 0,
    /// The stream `stream` of the extent `extent` of the window's tier. A thread reads it into pinned memory of the
    /// window, twice as much as the largest such unit has.
    SPW_WINDOW_HOME_TIER = 1,
}

c_struct! { first 24;
/// Options of a window. Zero is a good default for every field but struct_size.
pub struct spw_window_options {
    /// Number of slots; 0: 2. One holds the unit that is used, the others those that are fetched before their use.
    pub slots: u32,
    /// The GPU whose memory has the slots, or NULL: host memory takes its place, for tests and machines without a GPU.
    /// It may be closed before the window.
    pub gpu: *const spw_gpu,
    /// The tier of units with SPW_WINDOW_HOME_TIER, or NULL if there are none. The library frees it only after the window
    /// is closed.
    pub tier: *const spw_tier,
}
}

c_struct! { first 40;
/// A unit: bytes that are on the device together.
pub struct spw_window_unit {
    /// An `spw_window_home`.
    pub home: u32,
    /// 1: the unit has a place of its own beside the slots, where it stays after its first use.
    pub keep: u32,
    /// Number of the extent, for SPW_WINDOW_HOME_TIER. Once the extent is removed the unit has none, also if another
    /// extent has its number.
    pub extent: u32,
    /// Index of the stream in the extent, for SPW_WINDOW_HOME_TIER.
    pub stream: u32,
    /// 0
    pub reserved: u32,
    /// Number of bytes; may be 0.
    pub bytes: u64,
    /// Host memory, for SPW_WINDOW_HOME_HOST; for a GPU pinned memory (`spw_pinned_alloc`, cudaHostAlloc). It stays in place
    /// until the window is closed. NULL for SPW_WINDOW_HOME_TIER.
    pub host: *const c_void,
}
}

c_struct! { first 56;
/// Counters of a window.
pub struct spw_window_stats {
    /// 0
    pub reserved: u32,
    /// Bytes of device memory that the window has: slots as large as the largest unit without `keep`, and the units
    /// with it. Each begins at a multiple of 512 bytes.
    pub device_bytes: u64,
    /// Most bytes of units in slots at one time.
    pub peak_bytes: u64,
    /// Bytes that were copied to the device.
    pub fetched_bytes: u64,
    /// Copies of units to the device.
    pub fetches: u64,
    /// Uses that found a slot, those whose copy failed among them.
    pub uses: u64,
    /// Uses that had to wait for a copy which no earlier call had begun.
    pub late: u64,
}
}

/// A window. Any thread may use a unit.
pub struct spw_window {
    window: Window,
    has_streams: bool,
    opener: OpeningProcess,
}

handle!(spw_window, "window", opener, "the window");

/// Creates a window of `count` units, and allocates its device memory, once.
///
/// - SPW_ERR_GPU_OUT_OF_MEMORY: the device has not enough memory. Open the window with fewer slots.
/// - SPW_ERR_INVALID_ARGUMENT: for a GPU, `host` is not pinned, or reaches past its allocation; or `bytes` is not the
///   length of the stream.
///
/// # Safety
/// `options` points to a struct of `struct_size` bytes, `units` to `count` structs, `window_out` to a pointer. The host
/// memory of the units stays valid until the window is closed, and it is written only as `spw_window_changed` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_window_open(
    options: In<spw_window_options>,
    units: In<spw_window_unit>,
    count: u64,
    window_out: Out<*mut spw_window>,
) -> spw_status {
    guard(|| {
        let options = options.read("options")?;
        let within = |error: Error| error.within("options.");
        // SAFETY: NULL, or open handles by the caller's promise.
        let (gpu, tier) = unsafe { (options.gpu.as_ref(), options.tier.as_ref()) };
        let gpu = gpu.map(|gpu| handle::get(Some(gpu)).map_err(within)).transpose()?;
        let tier = tier.map(|tier| handle::get(Some(tier)).map_err(within)).transpose()?;
        let at = |index: usize, error: Error| error.within(&format!("units[{index}]."));
        // SAFETY: the caller lends the memory of the units until the window is closed.
        let unit = |(index, raw)| unsafe { unit_of(raw) }.map_err(|error| at(index, error));
        let units = units.read_all(count, "units")?;
        let units = units.iter().enumerate().map(unit).collect::<Result<Vec<Unit>>>()?;
        let slots = if options.slots == 0 { DEFAULT_SLOTS } else { options.slots as usize };
        let tier = tier.map(|tier| Arc::clone(&tier.0));
        window_out.open(|| {
            let window = Window::open(&units, slots, tier, |layout| -> Result<Box<dyn Device>> {
                Ok(match gpu {
                    Some(gpu) => Box::new(Gpu::new(&gpu.device, &gpu.registry, layout)?),
                    None => Box::new(Host::new(layout)?),
                })
            })?;
            Ok(spw_window { window, has_streams: gpu.is_some(), opener: OpeningProcess::current() })
        })
    })
}

const DEFAULT_SLOTS: usize = 2;

/// Begins an iteration, such as a forward and its backward. The order of its uses is recorded, and the order recorded
/// before says what is fetched ahead. With another order, as in a model with branches, units are fetched late, and
/// nothing else changes. Without this call iterations follow each other as one.
#[unsafe(no_mangle)]
pub extern "C" fn spw_window_begin(window: Option<&spw_window>) -> spw_status {
    guard(|| {
        handle::get(window)?.window.begin();
        Ok(())
    })
}

/// Has a unit on the device for work queued later on `stream`, and writes its device address. The work waits, on the
/// device, for the copy. The address is valid until `spw_window_release`, which follows each use once. Without a GPU
/// `stream` is 0, and the unit is there when the call returns. The call itself waits while a unit is read from a tier,
/// for up to `timeout_ms` milliseconds (0: polls; negative: until the end of the read).
///
/// - SPW_ERR_TIMEOUT: there is no use to release. The read continues; use the unit again.
/// - SPW_ERR_BUSY: all slots have unreleased uses, or the unit has changed and is still used. Release one.
/// - Errors of the tier and of the GPU are those of this unit's copy, also if an earlier call had begun it. A later use
///   tries again.
///
/// # Safety
/// `stream` is 0 or a live stream of the device's primary context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_window_use(
    window: Option<&spw_window>,
    unit: u32,
    stream: u64,
    timeout_ms: i64,
    address_out: Out<u64>,
) -> spw_status {
    guard(|| {
        address_out.required("address_out")?;
        // SAFETY: the caller meets the callee's requirements.
        let (window, stream) = unsafe { with_stream(window, stream) }?;
        address_out.put(window.enter(unit as usize, stream, timeout(timeout_ms))?, "address_out")
    })
}

/// Ends a use: only work already queued on `stream` reads the unit. Its slot is overwritten after that work. The stream
/// may be another one than that of the use.
///
/// # Safety
/// `stream` is 0 or a live stream of the device's primary context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_window_release(
    window: Option<&spw_window>,
    unit: u32,
    stream: u64,
) -> spw_status {
    guard(|| {
        // SAFETY: the caller meets the callee's requirements.
        let (window, stream) = unsafe { with_stream(window, stream) }?;
        window.leave(unit as usize, stream)
    })
}

/// Says that the host memory of a unit, or its extent, is going to change, or has changed: its next use fetches it again.
/// The call waits until no copy reads the old contents. No other copy of the unit begins before its next use or
/// `spw_window_begin`. So call it before an optimizer writes a unit or puts its extent, and begin the next iteration, or
/// use the unit, after that.
#[unsafe(no_mangle)]
pub extern "C" fn spw_window_changed(window: Option<&spw_window>, unit: u32) -> spw_status {
    guard(|| handle::get(window)?.window.changed(unit as usize))
}

/// Reads the counters.
#[unsafe(no_mangle)]
pub extern "C" fn spw_window_get_stats(
    window: Option<&spw_window>,
    stats_out: Out<spw_window_stats>,
) -> spw_status {
    guard(|| {
        let found = handle::get(window)?.window.stats();
        let values = report!(spw_window_stats from found {
            device_bytes, peak_bytes, fetched_bytes, fetches, uses, late
        } with {
            reserved: 0
        });
        stats_out.write(&values, "stats_out")
    })
}

/// Waits for reads and copies in flight, and frees the window and its device memory. Uses need not be released; the work
/// that reads units is queued already. NULL does nothing.
#[unsafe(no_mangle)]
pub extern "C" fn spw_window_close(window: Option<Box<spw_window>>) -> spw_status {
    guard(|| handle::end(window))
}

/// # Safety
/// `stream` is 0 or a live stream of the device's primary context.
unsafe fn with_stream(window: Option<&spw_window>, stream: u64) -> Result<(&Window, Reader)> {
    let window = handle::get(window)?;
    match (window.has_streams, stream) {
        // SAFETY: the caller meets the callee's requirements.
        (true, stream) => Ok((&window.window, Some(unsafe { ForeignStream::new(stream) }))),
        (false, 0) => Ok((&window.window, None)),
        (false, _) => Err(Error::invalid("stream", "must be 0: the window was opened without a GPU")),
    }
}

/// # Safety
/// The caller lends the unit's host memory until the window is closed.
unsafe fn unit_of(raw: &spw_window_unit) -> Result<Unit> {
    abi_struct::zero("reserved", raw.reserved)?;
    let keep = abi_struct::flag("keep", raw.keep)?;
    let exceeds = || Error::invalid("bytes", format!("{} bytes exceed the address space", raw.bytes));
    let bytes = isize::try_from(raw.bytes).map_err(|_| exceeds())?.unsigned_abs();
    let on_tier = Home::Tier { extent: raw.extent, stream: raw.stream };
    let home = match (raw.home, raw.host.is_null()) {
        (0, _) => {
            // SAFETY: the caller's promise.
            let span = unsafe { Span::new(raw.host.cast_mut().cast(), bytes) };
            let span = span.ok_or_else(|| Error::invalid("host", "is NULL"))?;
            Home::Memory(TransferBuffer::at_address(span))
        }
        (1, true) => on_tier,
        (1, false) => return Err(Error::invalid("host", "must be NULL: the home of the unit is a tier")),
        (other, _) => return Err(Error::invalid("home", format!("{other} is not an spw_window_home"))),
    };
    Ok(Unit { bytes: raw.bytes, home, keep })
}
