//! Measures the bandwidth of one GPU's link in each transfer type, and the speed of CPU steps from each type. The
//! results are stored in the profile.
//!
//! The measurement uses the production code: [`Transfers`] with its own chunks, pinned memory, and the threaded step.
//! Each figure is the best of a few rounds, since a copy slowed by another process says nothing about the link. The
//! device times the copies: a waiting host thread sleeps longer than a copy takes.
#![forbid(unsafe_code)]

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::device::{Device, DeviceInfo};
use super::kernels::DeviceFloats;
use super::memory::{DeviceMemory, Registry};
use super::profile;
use super::speeds::Link;
use super::transfer::{After, Copy, Direction, Transfers};
use crate::dtype::{Dtype, Floats, FloatsMut, bf16};
use crate::error::Result;
use crate::kernel::{States, Tensor};
use crate::optim;
use crate::optim::adam::AdamOptions;
use crate::optim::parallel::Job;
use crate::pool::buffer::Buffer;
use crate::sys::threads;

/// Parameters of the first copy; doubled until a copy takes [`LONG`].
const LEAST: u64 = 1 << 18;
/// Parameters of the largest copy: 128 MiB of f32.
const MOST: u64 = 32 << 20;
/// Duration beside which the fixed cost of starting a copy is negligible.
const LONG: Duration = Duration::from_millis(2);
/// Parameters of one step: more than the caches hold.
const STEPPED: usize = 8 << 20;
const ROUNDS: usize = 3;

impl Link {
    /// The speeds of this device from the profile at `path`, or else measured and stored there. `again` always
    /// measures.
    pub fn get(
        device: &Arc<Device>,
        transfers: &Transfers,
        path: Option<&Path>,
        again: bool,
    ) -> Result<Link> {
        let name = Link::name(device)?;
        let known = path.filter(|_| !again).and_then(|path| profile::find(path, &name));
        if let Some(known) = known {
            return Ok(known);
        }
        let link = Link::measure(device, transfers)?;
        if let Some(path) = path {
            profile::keep(path, &name, &link);
        }
        Ok(link)
    }

    /// A name with everything that the speeds depend on.
    fn name(device: &Device) -> Result<String> {
        let DeviceInfo { name, pci, .. } = device.info()?;
        let (kernel, threads) = (optim::kernel()?.name(), threads::count()?);
        Ok(format!("{name} at {pci}, CUDA {}, {kernel}, {threads} threads", device.cuda_version()))
    }

    /// Measures the speeds. Takes 128 MiB of pinned memory, 64 MiB of device memory and about one second.
    pub fn measure(device: &Arc<Device>, transfers: &Transfers) -> Result<Link> {
        let [d2h_f32, d2h_native, h2d_f32, h2d_native] = copy_speeds(device, transfers)?;
        let (step_f32, step_native) = step_speeds()?;
        Ok(Link { d2h_f32, d2h_native, h2d_f32, h2d_native, step_f32, step_native })
    }
}

fn copy_speeds(device: &Arc<Device>, transfers: &Transfers) -> Result<[f64; 4]> {
    let mut block = Buffer::open((MOST * 4) as usize, device.backing())?;
    block.floats()?.fill(0.0);
    let memory = DeviceMemory::new(device, MOST * 2)?;
    let registry = Registry::new(device);
    let speed = |direction, host_dtype: Dtype| -> Result<f64> {
        let mut n = LEAST;
        loop {
            let device = DeviceFloats::new(memory.span().part(0, n * 2), Dtype::Bf16, "device")?;
            let host = registry.host(block.transfer(0, n as usize * host_dtype.size()), "host")?;
            let copy = Copy { direction, device, host: host.into(), host_dtype, after: After::Now };
            let seconds = best(|| transfers.measure(&copy))?;
            if seconds >= LONG.as_secs_f64() || n == MOST {
                return Ok(n as f64 / seconds);
            }
            n *= 2;
        }
    };
    // Uploads first: downloads would otherwise read uninitialised device memory.
    let (h2d_f32, h2d_native) = (speed(Direction::H2d, Dtype::F32)?, speed(Direction::H2d, Dtype::Bf16)?);
    let (d2h_f32, d2h_native) = (speed(Direction::D2h, Dtype::F32)?, speed(Direction::D2h, Dtype::Bf16)?);
    Ok([d2h_f32, d2h_native, h2d_f32, h2d_native])
}

fn step_speeds() -> Result<(f64, f64)> {
    let mut states: [Vec<f32>; 3] = std::array::from_fn(|_| vec![0.01; STEPPED]);
    let mut model = vec![bf16::ZERO; STEPPED];
    let wide = vec![0.01_f32; STEPPED];
    let narrow = vec![bf16::from_f32(0.01); STEPPED];
    let rule = AdamOptions { weight_decay: 0.01, ..AdamOptions::default() }.rule()?;
    let mut step = |grad: Floats<'_>| -> Result<f64> {
        let [p, m, v] = &mut states;
        let seconds = best(|| {
            let states = States {
                param: FloatsMut::F32(p),
                exp_avg: Some(FloatsMut::F32(m)),
                exp_avg_sq: Some(FloatsMut::F32(v)),
            };
            let tensor = Tensor::new(states, grad, Some(FloatsMut::Bf16(&mut model)))?;
            let start = Instant::now();
            optim::step(&mut [Job { optimizer: rule, tensor }], false)?;
            Ok(start.elapsed().as_secs_f64())
        })?;
        Ok(STEPPED as f64 / seconds)
    };
    Ok((step(Floats::F32(&wide))?, step(Floats::Bf16(&narrow))?))
}

/// Seconds of the fastest round, after one warm-up round.
fn best(mut work: impl FnMut() -> Result<f64>) -> Result<f64> {
    work()?;
    let mut fastest = f64::INFINITY;
    for _ in 0..ROUNDS {
        fastest = fastest.min(work()?);
    }
    // A lower bound, in case the clock shows no time.
    Ok(fastest.max(1e-9))
}
