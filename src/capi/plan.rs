//! Plans and predictions: pure computations that measure nothing and keep nothing.
#![allow(non_camel_case_types)]

use std::ffi::c_char;

use super::guard::guard;
use super::library::out;
use super::record::{self, Record};
use super::status::spw_status;
use super::text::hand_out;
use crate::error::{Error, Result};
use crate::offload::interleave::trace;
use crate::plan::interleave::choose::{self, Mode};
use crate::plan::interleave::memory::bytes;
use crate::plan::interleave::model::{self, Prediction};
use crate::plan::interleave::share::{self, Balance};
use crate::plan::interleave::sites::{Plan, Site};
use crate::plan::interleave::{GpuGrads, MAX_SUBGROUPS, Rates, Shape, Wire};

/// Where a subgroup is updated, and where its state is stored. Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_plan_site {
    /// Updated on the CPU; the state is in host memory.
    SPW_SITE_CPU = 0,
    /// Updated on the GPU; each step fetches the state from host memory and flushes it back.
    SPW_SITE_GPU = 1,
    /// Updated on the GPU (a resident); the state stays in GPU memory.
    SPW_SITE_RESIDENT = 2,
}

/// The type in which gradients are transferred to the host. Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_plan_wire {
    /// The type of the gradient. 16-bit gradients are converted in the registers of the CPU step.
    SPW_WIRE_NATIVE = 0,
    /// f32, converted on the GPU.
    SPW_WIRE_F32 = 1,
    /// The caller transfers gradients to the host.
    SPW_WIRE_DELIVERED = 2,
}

/// The rule that makes a plan. Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_plan_mode {
    /// The number of GPU subgroups with the shortest step in the model, evenly spaced.
    SPW_PLAN_MODEL = 0,
    /// Deep Optimizer States Eq. 1: every (1 + k)-th subgroup, k rounded.
    SPW_PLAN_EQ1 = 1,
    /// Eq. 1 as that paper applies it: every k-th subgroup, at least every second.
    SPW_PLAN_PAPER = 2,
    /// Every `parameter`-th subgroup; 0: no GPU subgroups.
    SPW_PLAN_STRIDE = 3,
    /// `parameter` subgroups, evenly spaced.
    SPW_PLAN_COUNT = 4,
}

/// Rates of one GPU, its link and its share of the host, in parameters per second.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct spw_plan_rates {
    /// `sizeof(spw_plan_rates)`
    pub struct_size: u32,
    /// 1 if the link transfers in one direction at a time, else 0.
    pub half_duplex: u32,
    /// Step on the CPU, measured while copies run.
    pub cpu: f64,
    /// Rounding to 16 bits in a separate pass on the CPU; 0 if the step includes it.
    pub downscale: f64,
    /// Step on the GPU.
    pub gpu: f64,
    /// Transfer from host to device, as f32.
    pub h2d: f64,
    /// Transfer from device to host, as f32.
    pub d2h: f64,
    /// Converting gradients to f32 on the GPU; 0 if its time is negligible.
    pub cast: f64,
    /// Bandwidth of host memory, in bytes per second; 0 if it is not a limit.
    pub dram: f64,
}

// SAFETY: numbers without padding.
unsafe impl Record for spw_plan_rates {
    const FIRST_SIZE: usize = 64;
    const NAME: &'static str = "spw_plan_rates";
}

/// The subgroups of a rank, in the order in which their gradients arrive, and how gradients and state are transferred.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct spw_plan_shape {
    /// `sizeof(spw_plan_shape)`
    pub struct_size: u32,
    /// An `spw_plan_wire`.
    pub wire: u32,
    /// 1 if gradients of GPU subgroups wait in host memory and are fetched with the state, 0 if they stay on the GPU.
    pub fetch_gradients: u32,
    /// Number of state buffers on the GPU; 0: 2.
    pub slots: u32,
    /// Number of subgroups.
    pub count: u64,
    /// Parameters of each subgroup; NULL if all have `size`.
    pub sizes: *const u64,
    /// Parameters of every subgroup, if `sizes` is NULL.
    pub size: u64,
    /// Parameters per copy; 0: 16 Mi.
    pub chunk: u64,
}

// SAFETY: integers and a pointer without padding; a null pointer is valid.
unsafe impl Record for spw_plan_shape {
    const FIRST_SIZE: usize = 48;
    const NAME: &'static str = "spw_plan_shape";
}

/// Options of a plan.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct spw_plan_options {
    /// `sizeof(spw_plan_options)`
    pub struct_size: u32,
    /// An `spw_plan_mode`.
    pub mode: u32,
    /// Argument of SPW_PLAN_STRIDE or SPW_PLAN_COUNT.
    pub parameter: u64,
    /// Number of residents: subgroups at the end whose state stays on the GPU.
    pub residents: u64,
    /// Seconds of the backward pass that overlaps with the step. With 0, all gradients are already where the plan needs
    /// them.
    pub backward: f64,
}

// SAFETY: numbers without padding.
unsafe impl Record for spw_plan_options {
    const FIRST_SIZE: usize = 32;
    const NAME: &'static str = "spw_plan_options";
}

/// Predictions of the model for one step of a plan.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct spw_plan_result {
    /// `sizeof(spw_plan_result)`
    pub struct_size: u32,
    /// 0
    pub reserved: u32,
    /// Seconds from the end of backward until the GPU has all new parameters.
    pub exposed_seconds: f64,
    /// Seconds until host memory has the last flushed state, possibly in the next iteration.
    pub home_seconds: f64,
    /// Seconds of step, rounding and upload if the CPU does all of them, one after the other.
    pub serial_seconds: f64,
    /// Seconds in which the CPU is busy.
    pub cpu_seconds: f64,
    /// Seconds in which the link to the GPU is busy.
    pub h2d_seconds: f64,
    /// Seconds in which the link to the host is busy.
    pub d2h_seconds: f64,
    /// Seconds in which the GPU is busy.
    pub gpu_seconds: f64,
    /// Number of SPW_SITE_GPU subgroups.
    pub gpu: u64,
    /// Number of SPW_SITE_RESIDENT subgroups.
    pub residents: u64,
    /// Bytes of GPU memory in addition to the model's.
    pub gpu_bytes: u64,
    /// Bytes of pinned host memory.
    pub host_bytes: u64,
    /// Bytes transferred to the GPU per step.
    pub to_device_bytes: u64,
    /// Bytes transferred to the host per step.
    pub to_host_bytes: u64,
}

// SAFETY: numbers without padding.
unsafe impl Record for spw_plan_result {
    const FIRST_SIZE: usize = 112;
    const NAME: &'static str = "spw_plan_result";
}

/// Plans an interleaved update (Deep Optimizer States section 4). `sites` receives an `spw_plan_site` for each
/// subgroup, and `result` the model's prediction. Either may be NULL. The model simulates the commands of
/// `spw_interleave_begin` on engines that each process one operation at a time.
///
/// # Safety
/// The structs have `struct_size` bytes, `shape->sizes` is NULL or has `count` entries, `sites` is NULL or has room for
/// `count`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_plan_interleave(
    rates: *const spw_plan_rates,
    shape: *const spw_plan_shape,
    options: *const spw_plan_options,
    sites: *mut u32,
    result: *mut spw_plan_result,
) -> spw_status {
    guard(|| {
        // SAFETY: the caller meets the callees' requirements.
        let (rates, shape, raw) =
            unsafe { (read_rates(rates)?, read_shape(shape)?, record::read(options, "options")?) };
        let number = usize::try_from(raw.parameter).unwrap_or(usize::MAX);
        let mode = match raw.mode {
            0 => Mode::Model,
            1 => Mode::Eq1,
            2 => Mode::Paper,
            3 => Mode::Stride(number),
            4 => Mode::Count(number),
            mode => return Err(Error::invalid("options.mode", format!("{mode} is not an spw_plan_mode"))),
        };
        let residents = usize::try_from(raw.residents).unwrap_or(usize::MAX);
        let chosen = choose::choose(&shape, &rates, residents, raw.backward, mode)?;
        // SAFETY: as above.
        unsafe {
            write_result(&rates, &shape, &chosen.plan, &chosen.prediction, result)?;
            write_sites(&chosen.plan, sites);
        }
        Ok(())
    })
}

/// Predicts the step of a given plan. `sites` has `shape->count` values of `spw_plan_site`; `backward` is in seconds,
/// as in `spw_plan_options`.
///
/// # Safety
/// As `spw_plan_interleave`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_plan_predict(
    rates: *const spw_plan_rates,
    shape: *const spw_plan_shape,
    sites: *const u32,
    backward: f64,
    result: *mut spw_plan_result,
) -> spw_status {
    guard(|| {
        let result = out(result, "result")?;
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            let (rates, shape) = (read_rates(rates)?, read_shape(shape)?);
            let plan = read_sites(sites, shape.count())?;
            let prediction = model::predict(&shape, &rates, &plan, backward)?;
            write_result(&rates, &shape, &plan, &prediction, result)
        }
    })
}

/// Writes the predicted step of a plan as a trace for Perfetto. `text` receives JSON and a NUL, and `needed_out` their
/// number of bytes. With `text` NULL the call writes only the number. A `size` below the number is an error.
///
/// # Safety
/// As `spw_plan_interleave`; `text` is NULL or points to `size` bytes, `needed_out` to a u64.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_plan_trace(
    rates: *const spw_plan_rates,
    shape: *const spw_plan_shape,
    sites: *const u32,
    backward: f64,
    text: *mut c_char,
    size: usize,
    needed_out: *mut u64,
) -> spw_status {
    guard(|| {
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            let (rates, shape) = (read_rates(rates)?, read_shape(shape)?);
            let plan = read_sites(sites, shape.count())?;
            let prediction = model::predict(&shape, &rates, &plan, backward)?;
            hand_out(&trace::of_prediction(&prediction).to_json(), text, size, needed_out)
        }
    })
}

/// Computes the balance of Deep Optimizer States Eq. 1, corrected for the number of state buffers.
///
/// - `cpu_per_gpu_out` receives the CPU parameters per GPU parameter at which both sides take equally long. It is
///   infinite
///   if the CPU is as fast as the link.
/// - `share_out` receives the GPU's fraction of all parameters, from 0 to 1.
/// - `one_slot` 1 is the equation as printed: the GPU's step adds to the link's time. 0 is for two state buffers, where
///   the
///   two overlap.
/// - `fetched_words` is the number of 4-byte words per parameter that fetching a gradient adds: 0, 0.5 or 1.
///
/// # Safety
/// `rates` points to a struct of `struct_size` bytes, the outputs to a double each.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_plan_share(
    rates: *const spw_plan_rates,
    fetched_words: f64,
    one_slot: u32,
    cpu_per_gpu_out: *mut f64,
    share_out: *mut f64,
) -> spw_status {
    guard(|| {
        let cpu_per_gpu_out = out(cpu_per_gpu_out, "cpu_per_gpu_out")?;
        let share_out = out(share_out, "share_out")?;
        // SAFETY: the caller meets the callee's requirements.
        let rates = unsafe { read_rates(rates) }?;
        rates.check()?;
        if !(0.0..=1.0).contains(&fetched_words) {
            return Err(Error::invalid("fetched_words", format!("{fetched_words} is not in 0..=1")));
        }
        let balance = if record::flag("one_slot", one_slot)? { Balance::OneSlot } else { Balance::TwoSlots };
        let ratio = share::cpu_per_gpu(&rates, fetched_words, balance).unwrap_or(f64::INFINITY);
        // SAFETY: not NULL, and valid by the caller's promise.
        unsafe {
            cpu_per_gpu_out.write(ratio);
            share_out.write(share::gpu_share(&rates, fetched_words, balance));
        }
        Ok(())
    })
}

/// # Safety
/// `rates` is NULL or points to a struct of `struct_size` bytes.
pub(super) unsafe fn read_rates(rates: *const spw_plan_rates) -> Result<Rates> {
    // SAFETY: the caller meets the callee's requirements.
    let raw = unsafe { record::read(rates, "rates") }?;
    let unlimited = |rate: f64| if rate == 0.0 { f64::INFINITY } else { rate };
    Ok(Rates {
        cpu: raw.cpu,
        downscale: unlimited(raw.downscale),
        gpu: raw.gpu,
        h2d: raw.h2d,
        d2h: raw.d2h,
        cast: unlimited(raw.cast),
        dram: unlimited(raw.dram),
        duplex: !record::flag("rates.half_duplex", raw.half_duplex)?,
    })
}

pub(super) fn parse_wire(argument: &'static str, wire: u32) -> Result<Wire> {
    match wire {
        0 => Ok(Wire::Native),
        1 => Ok(Wire::F32),
        2 => Ok(Wire::Delivered),
        _ => Err(Error::invalid(argument, format!("{wire} is not an spw_plan_wire"))),
    }
}

/// Default of parameters per copy: 64 MiB of f32.
const CHUNK: u64 = 16 << 20;

/// A shape with defaults in place of zeros.
pub(super) fn shape_of(
    sizes: Vec<u64>,
    wire: Wire,
    fetch_gradients: bool,
    slots: u32,
    chunk: u64,
) -> Result<Shape> {
    let shape = Shape {
        sizes,
        chunk: if chunk == 0 { CHUNK } else { chunk },
        slots: if slots == 0 { 2 } else { slots as usize },
        wire,
        gpu_grads: if fetch_gradients { GpuGrads::Fetched } else { GpuGrads::Kept },
    };
    shape.check()?;
    Ok(shape)
}

unsafe fn read_shape(shape: *const spw_plan_shape) -> Result<Shape> {
    // SAFETY: the caller meets the callee's requirements.
    let raw = unsafe { record::read(shape, "shape") }?;
    let count = usize::try_from(raw.count).ok().filter(|count| *count <= MAX_SUBGROUPS);
    let count = count
        .ok_or_else(|| Error::invalid("shape.count", format!("{} is over {MAX_SUBGROUPS}", raw.count)))?;
    let sizes = match raw.sizes.is_null() {
        true => vec![raw.size; count],
        // SAFETY: the caller's array has `count` entries.
        false => (0..count).map(|index| unsafe { raw.sizes.add(index).read() }).collect(),
    };
    let wire = parse_wire("shape.wire", raw.wire)?;
    let fetch = record::flag("shape.fetch_gradients", raw.fetch_gradients)?;
    shape_of(sizes, wire, fetch, raw.slots, raw.chunk).map_err(|error| error.within("shape."))
}

/// # Safety
/// `sites` is NULL or has `count` entries.
pub(super) unsafe fn read_sites(sites: *const u32, count: usize) -> Result<Plan> {
    if sites.is_null() && count > 0 {
        return Err(Error::invalid("sites", "is NULL"));
    }
    // SAFETY: the caller's array has `count` entries.
    let sites = (0..count).map(|index| match unsafe { sites.add(index).read() } {
        0 => Ok(Site::Cpu),
        1 => Ok(Site::Gpu),
        2 => Ok(Site::Resident),
        site => Err(Error::invalid(format!("sites[{index}]"), format!("{site} is not an spw_plan_site"))),
    });
    sites.collect::<Result<Vec<Site>>>().map(Plan::of)
}

/// # Safety
/// `to` is NULL or has room for the plan's sites.
pub(super) unsafe fn write_sites(plan: &Plan, to: *mut u32) {
    if to.is_null() {
        return;
    }
    for (index, site) in plan.sites().iter().enumerate() {
        let site = match site {
            Site::Cpu => spw_plan_site::SPW_SITE_CPU,
            Site::Gpu => spw_plan_site::SPW_SITE_GPU,
            Site::Resident => spw_plan_site::SPW_SITE_RESIDENT,
        };
        // SAFETY: the caller's promise.
        unsafe { to.add(index).write(site as u32) };
    }
}

unsafe fn write_result(
    rates: &Rates,
    shape: &Shape,
    plan: &Plan,
    prediction: &Prediction,
    result: *mut spw_plan_result,
) -> Result<()> {
    if result.is_null() {
        return Ok(());
    }
    let found = bytes(shape, plan);
    let [cpu_seconds, h2d_seconds, d2h_seconds, gpu_seconds] = prediction.busy;
    let values = spw_plan_result {
        struct_size: 0,
        reserved: 0,
        exposed_seconds: prediction.exposed,
        home_seconds: prediction.home,
        serial_seconds: shape.total() as f64 / share::serial_throughput(rates),
        cpu_seconds,
        h2d_seconds,
        d2h_seconds,
        gpu_seconds,
        gpu: plan.count_on(Site::Gpu) as u64,
        residents: plan.count_on(Site::Resident) as u64,
        gpu_bytes: found.gpu(),
        host_bytes: found.host(),
        to_device_bytes: found.to_device,
        to_host_bytes: found.to_host,
    };
    // SAFETY: the caller meets the callee's requirements.
    unsafe { record::write(&values, result, "result") }
}
