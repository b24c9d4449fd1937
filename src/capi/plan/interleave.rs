//! Plans of the interleaved update and their predictions.

use crate::capi::interleave::plan::{
    parse_transfer_dtype, placements_of, read_rates, shape_of, spw_interleave_rates,
};
use crate::capi::prelude::*;
use spillway_planner::interleave::choose::{self, Mode};
use spillway_planner::interleave::memory::bytes;
use spillway_planner::interleave::model::Prediction;
use spillway_planner::interleave::placements::{Placement, Plan};
use spillway_planner::interleave::share;
use spillway_planner::interleave::{MAX_SUBGROUPS, Rates, Shape};

/// The rule that makes a plan. Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_plan_mode {
    /// The number of GPU subgroups with the shortest step in the model, evenly spaced.
    SPW_PLAN_MODE_MODEL = 0,
    /// Deep Optimizer States Eq. 1: every (1 + k)-th subgroup, k rounded.
    SPW_PLAN_MODE_EQ1 = 1,
    /// Every `parameter`-th subgroup; 0: no GPU subgroups.
    SPW_PLAN_MODE_STRIDE = 2,
    /// `parameter` subgroups, evenly spaced.
    SPW_PLAN_MODE_COUNT = 3,
}

c_struct! { first 48;
/// The subgroups of a rank, in the order in which their gradients arrive, and how gradients and state are transferred.
pub struct spw_plan_shape {
    /// An `spw_transfer_dtype`.
    pub transfer_dtype: u32,
    /// 1 if gradients of GPU subgroups wait in host memory and are fetched with the state, 0 if they stay on the GPU.
    pub fetch_gradients: u32,
    /// Number of state buffers on the GPU, at most 8; 0: 3. See `spw_interleave_options`.
    pub slots: u32,
    /// Number of subgroups, at most 65536.
    pub count: u64,
    /// Parameters of each subgroup; NULL if all have `size`.
    pub sizes: In<u64>,
    /// Parameters of every subgroup, if `sizes` is NULL.
    pub size: u64,
    /// Parameters per copy; 0: 16 Mi.
    pub chunk: u64,
}
}

c_struct! { first 32;
/// Options of a plan.
pub struct spw_plan_options {
    /// An `spw_plan_mode`.
    pub mode: u32,
    /// Argument of SPW_PLAN_MODE_STRIDE or SPW_PLAN_MODE_COUNT.
    pub parameter: u64,
    /// Number of residents: subgroups at the end whose state stays on the GPU.
    pub residents: u64,
    /// Seconds of the backward pass that overlaps with the step. With 0, all gradients are already where the plan needs
    /// them.
    pub backward: f64,
}
}

c_struct! { first 112;
/// Predictions of the model for one step of a plan.
pub struct spw_plan_result {
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
    /// Number of SPW_PLACEMENT_GPU subgroups.
    pub gpu: u64,
    /// Number of SPW_PLACEMENT_RESIDENT subgroups.
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
}

/// Plans an interleaved update (Deep Optimizer States section 4). `placements_out` receives an `spw_placement` for each
/// subgroup, and `result_out` the model's prediction. Either may be NULL. The model simulates the commands of
/// `spw_interleave_begin` on engines that each process one operation at a time.
#[unsafe(no_mangle)]
pub extern "C" fn spw_plan_interleave(
    rates: In<spw_interleave_rates>,
    shape: In<spw_plan_shape>,
    options: In<spw_plan_options>,
    placements_out: Out<u32>,
    result_out: Out<spw_plan_result>,
) -> spw_status {
    guard(|| {
        let (rates, shape, raw) = (read_rates(rates)?, read_shape(shape)?, options.read("options")?);
        let number = usize::try_from(raw.parameter).unwrap_or(usize::MAX);
        let modes = [Mode::Model, Mode::Eq1, Mode::Stride(number), Mode::Count(number)];
        let mode = choice("options.mode", raw.mode, "spw_plan_mode", &modes)?;
        let residents = usize::try_from(raw.residents).unwrap_or(usize::MAX);
        rates.check()?;
        let chosen = choose::choose(&shape, &rates, residents, raw.backward, mode)
            .map_err(|error| error.within("options."))?;
        write_result(&rates, &shape, &chosen.plan, &chosen.prediction, result_out)?;
        placements_out.put_all(placements_of(&chosen.plan));
        Ok(())
    })
}

fn read_shape(shape: In<spw_plan_shape>) -> Result<Shape> {
    let raw = shape.read("shape")?;
    let count = usize::try_from(raw.count).ok().filter(|count| *count <= MAX_SUBGROUPS);
    let count = count.ok_or_else(|| {
        Error::invalid("shape.count", format!("is {}, but the limit is {MAX_SUBGROUPS}", raw.count))
    })?;
    let sizes = match raw.sizes.is_null() {
        true => vec![raw.size; count],
        false => raw.sizes.array(raw.count, "shape.sizes")?.to_vec(),
    };
    let transfer_dtype = parse_transfer_dtype("shape.transfer_dtype", raw.transfer_dtype)?;
    let fetch = abi_struct::flag("shape.fetch_gradients", raw.fetch_gradients)?;
    shape_of(sizes, transfer_dtype, fetch, raw.slots, raw.chunk).map_err(|error| error.within("shape."))
}

fn write_result(
    rates: &Rates,
    shape: &Shape,
    plan: &Plan,
    prediction: &Prediction,
    result_out: Out<spw_plan_result>,
) -> Result<()> {
    if result_out.is_null() {
        return Ok(());
    }
    let found = bytes(shape, plan);
    let [cpu_seconds, h2d_seconds, d2h_seconds, gpu_seconds] = prediction.busy;
    let values = report!(spw_plan_result with {
        reserved: 0, exposed_seconds: prediction.exposed, home_seconds: prediction.home,
        serial_seconds: shape.total() as f64 / share::serial_throughput(rates), cpu_seconds, h2d_seconds,
        d2h_seconds, gpu_seconds, gpu: plan.count_on(Placement::Gpu) as u64,
        residents: plan.count_on(Placement::Resident) as u64, gpu_bytes: found.gpu(), host_bytes: found.host(),
        to_device_bytes: found.to_device, to_host_bytes: found.to_host
    });
    result_out.write(&values, "result_out")
}
