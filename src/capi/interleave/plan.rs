//! Placements of subgroups, and the rates that plans are made from.

use crate::capi::prelude::*;
use spillway_planner::interleave::placements::{Placement, Plan};
use spillway_planner::interleave::{DEFAULT_SLOTS, GpuGrads, Rates, Shape, TransferDtype};

/// Where a subgroup is updated, and where its state is stored. Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_placement {
    /// Updated on the CPU; the state is in host memory.
    SPW_PLACEMENT_CPU = 0,
    /// Updated on the GPU; each step fetches the state from host memory and flushes it back.
    SPW_PLACEMENT_GPU = 1,
    /// Updated on the GPU (a resident); the state stays in GPU memory.
    SPW_PLACEMENT_RESIDENT = 2,
}

c_struct! { first 64;
/// Rates of one GPU, its link and its share of the host, in parameters per second.
pub struct spw_interleave_rates {
    /// 1 if the link transfers in one direction at a time, else 0.
    pub half_duplex: u32,
    /// Step on the CPU: alone if `dram` is given, else beside copies.
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
}

pub(in crate::capi) fn read_rates(rates: In<spw_interleave_rates>) -> Result<Rates> {
    let raw = rates.read("rates")?;
    let unlimited = |rate: f64| if rate == 0.0 { f64::INFINITY } else { rate };
    Ok(parsed!(Rates from raw {
        cpu, gpu, h2d, d2h
    } with {
        downscale: unlimited(raw.downscale), cast: unlimited(raw.cast), dram: unlimited(raw.dram),
        duplex: !abi_struct::flag("rates.half_duplex", raw.half_duplex)?
    }))
}

pub(in crate::capi) fn parse_transfer_dtype(argument: &'static str, dtype: u32) -> Result<TransferDtype> {
    let all = [TransferDtype::Native, TransferDtype::F32, TransferDtype::Delivered];
    choice(argument, dtype, "spw_transfer_dtype", &all)
}

/// Default of parameters per copy: 64 MiB of f32.
const CHUNK: u64 = 16 << 20;

/// A shape with defaults in place of zeros.
pub(in crate::capi) fn shape_of(
    sizes: Vec<u64>,
    transfer_dtype: TransferDtype,
    fetch_gradients: bool,
    slots: u32,
    chunk: u64,
) -> Result<Shape> {
    let shape = Shape {
        sizes,
        chunk: if chunk == 0 { CHUNK } else { chunk },
        slots: if slots == 0 { DEFAULT_SLOTS } else { slots as usize },
        transfer_dtype,
        gpu_grads: if fetch_gradients { GpuGrads::Fetched } else { GpuGrads::Kept },
    };
    shape.check()?;
    Ok(shape)
}

pub(in crate::capi) fn read_placements(placements: In<u32>, count: u64) -> Result<Plan> {
    let given = placements.array(count, "placements")?.iter().enumerate();
    let all = [Placement::Cpu, Placement::Gpu, Placement::Resident];
    let placements = given.map(|(index, placement)| {
        choice("", *placement, "spw_placement", &all)
            .map_err(|error| error.within(&format!("placements[{index}]")))
    });
    placements.collect::<Result<Vec<Placement>>>().map(Plan::of)
}

/// The plan's placements as numbers of `spw_placement`.
pub(in crate::capi) fn placements_of(plan: &Plan) -> impl Iterator<Item = u32> {
    plan.placements().iter().map(|placement| *placement as u32)
}
