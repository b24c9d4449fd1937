//! The bytes that each strategy allocates and moves.
//!
//! Bytes per parameter of a rank's shard: 2 for a 16-bit weight, 2 for its gradient, 12 for the f32 master and Adam's
//! moments (SuperOffload section 2.2: 16 together). Gradients in host memory have 16 bits, or 32 where the host adds up
//! micro-batches.
#![forbid(unsafe_code)]

use super::super::interleave::choose::{self, Choice, Mode};
use super::super::interleave::memory;
use super::super::interleave::placements::Placement as Where;
use super::super::interleave::{DEFAULT_SLOTS, GpuGrads, Rates, Shape, TransferDtype};
use super::super::tail;
use super::bytes::size;
pub use super::bytes::{GpuBytes, HostBytes, Residents, TierBudget, TierNeed, Traffic};
pub use super::case::{Case, Placement, Strategy};
use super::config::Model;
use super::flow;
use super::machine::{Machine, PathSpec, Workload};
use crate::error::{Error, Result};

const HALF: u64 = 2;
const WORD: u64 = 4;
/// Master and moments in f32.
const STATE: u64 = 12;
/// Master in f32, moments in bf16.
const BF16_STATE: u64 = 8;
/// Low bits of a split master, and moments in bf16.
const SPLIT_STATE: u64 = 6;
/// Low bits of a split master, and moments of a byte each.
const INT8_STATE: u64 = 4;
/// Elements that share the scale of an 8-bit moment, which has 16 bits.
const CODES: u64 = 32;
/// The undo log of a second step, its largest in usual training (docs/speculation.md), rounded up; about 1.2 later.
const UNDO: u64 = 4;
/// Parameters of a bucket: 64 MB of 16-bit gradients (SuperOffload section 4.3).
const BUCKET: u64 = 32 << 20;
/// Most buckets that are simulated one by one; larger shards have larger buckets.
const MOST_BUCKETS: u64 = 1 << 10;
/// Most subgroups of a plan.
const MOST_SUBGROUPS: u64 = 1 << 12;
/// Buffers through which 16-bit copies pass.
const PAIR: u64 = 2;
/// Bytes of a layer's activations per token and channel, in 16 bits and without attention's scores (Korthikanti et al.
/// 2022, Eq. 2).
const ACTIVATION: u64 = 34;
/// Bytes of a logit: 16 bits, and f32 for the loss.
const LOGIT: u64 = 6;

impl<'a> Case<'a> {
    /// Checks the numbers, and divides the model over ranks and subgroups.
    pub fn new(
        model: &'a Model,
        machine: &'a Machine,
        run: &'a Workload,
        budget: &'a TierBudget<'a>,
    ) -> Result<Case<'a>> {
        machine.check()?;
        run.check()?;
        let shard = model.parameters.div_ceil(run.ranks);
        let size = run.subgroup.min(shard);
        if shard.div_ceil(size) > MOST_SUBGROUPS {
            let reason = format!(
                "of {} divides a shard of {shard} parameters into {} subgroups, but the limit is {MOST_SUBGROUPS}",
                run.subgroup,
                shard.div_ceil(size)
            );
            return Err(Error::invalid("subgroup", reason));
        }
        let mut sizes = vec![size; (shard / size) as usize];
        if !shard.is_multiple_of(size) {
            sizes.push(shard % size);
        }
        Ok(Case { model, machine, run, budget, shard, sizes })
    }

    /// Parameters whose 16-bit weights each GPU needs.
    pub fn weights(&self) -> u64 {
        if self.run.stage == 3 { self.shard } else { self.model.parameters }
    }

    /// Rates of one rank.
    pub fn rates(&self) -> Rates {
        let (machine, ranks) = (self.machine, self.run.ranks as f64);
        Rates {
            cpu: machine.cpu / ranks,
            downscale: machine.downscale / ranks,
            gpu: machine.gpu,
            h2d: machine.h2d / WORD as f64,
            d2h: machine.d2h / WORD as f64,
            cast: f64::INFINITY,
            dram: f64::INFINITY,
            duplex: machine.duplex,
        }
    }

    /// Seconds of the forward pass of a micro-batch.
    pub fn forward(&self) -> f64 {
        2.0 * self.run.tokens() as f64 * self.model.active_parameters as f64 / self.machine.flops
    }

    /// Seconds of the backward pass of a micro-batch.
    pub fn backward(&self) -> f64 {
        let (parameters, tokens) = (self.model.active_parameters as f64, self.run.tokens() as f64);
        tail::backward_seconds(parameters, tokens, self.machine.flops, self.run.recompute)
    }

    /// Parameters of a bucket.
    pub fn bucket(&self) -> u64 {
        BUCKET.max(self.shard.div_ceil(MOST_BUCKETS)).min(self.shard)
    }

    /// The paths that a strategy uses.
    pub fn paths(&self, strategy: Strategy) -> Vec<&'a PathSpec> {
        let all = self.machine.paths.iter();
        match strategy {
            Strategy::TierOnePath => all.max_by(|a, b| a.speed().total_cmp(&b.speed())).into_iter().collect(),
            _ => all.collect(),
        }
    }

    /// True if the host adds up the gradients of several micro-batches.
    fn accumulates(&self) -> bool {
        self.run.accumulation > 1
    }

    fn activations(&self) -> Result<u64> {
        let (tokens, model) = (u128::from(self.run.tokens()), self.model);
        let (hidden, layers) = (u128::from(model.hidden), u128::from(model.layers));
        let layer = u128::from(ACTIVATION) * tokens * hidden;
        let kept = if self.run.recompute {
            u128::from(HALF) * tokens * hidden * layers + layer
        } else {
            layer * layers
        };
        let bytes = kept + u128::from(LOGIT) * tokens * u128::from(model.vocabulary);
        u64::try_from(bytes).ok().filter(|bytes| *bytes < 1 << 62).ok_or_else(|| {
            Error::invalid("micro_batch", format!("and sequence length need {bytes} bytes of activations"))
        })
    }

    /// Places states, gradients, weights and steps for a strategy. Fails where an argument is out of range, or where the
    /// buffers of a tiered update do not fit into the host memory beside gradients and weights.
    pub fn place(&self, strategy: Strategy) -> Result<Placement> {
        let run = self.run;
        let shard = self.shard;
        let gathers = run.stage == 3 && run.ranks > 1;
        let accumulates = self.accumulates();
        let in_flight = (PAIR * self.bucket()).max(self.model.largest_module.min(shard));
        let gradient = if accumulates { WORD } else { HALF };
        let staging = PAIR * HALF * self.bucket();
        let mut placed = Placement {
            gpu: GpuBytes {
                weights: 0,
                window: if gathers { PAIR * HALF * self.model.largest_module } else { 0 },
                gradients: HALF * in_flight,
                activations: self.activations()?,
                states: 0,
                reserve: run.gpu_reserve,
            },
            host: HostBytes {
                states: 0,
                gradients: gradient * shard + if accumulates { staging } else { 0 },
                weights: staging,
                undo: 0,
            },
            stored: 0,
            traffic: Traffic {
                h2d: HALF * shard,
                d2h: HALF * shard * run.accumulation,
                ..Traffic::default()
            },
            flow: 0.0,
            tier: None,
            tail: 0,
            interleaved: None,
            leaving: 0,
            residents: Residents::default(),
        };
        match strategy {
            Strategy::Gpu => {
                placed.gpu.gradients = HALF * shard;
                placed.gpu.states = STATE * shard;
                placed.host = HostBytes::default();
                placed.traffic = Traffic::default();
            }
            Strategy::Host => self.keep(&mut placed, STATE, shard),
            Strategy::HostBf16Moments => self.keep(&mut placed, BF16_STATE, shard),
            Strategy::HostSplitMaster => self.keep(&mut placed, SPLIT_STATE, shard),
            Strategy::HostInt8Moments => {
                self.keep(&mut placed, INT8_STATE, shard);
                placed.host.states += 2 * HALF * shard.div_ceil(CODES);
            }
            Strategy::Speculation => self.speculate(&mut placed),
            Strategy::Interleave => self.interleave(&mut placed)?,
            Strategy::InterleaveResidents => self.interleave_with_residents(&mut placed)?,
            Strategy::TierSplitMaster => placed.host.weights = HALF * shard,
            Strategy::TierOnePath | Strategy::Tier | Strategy::TierCache => {
                placed.host.weights = PAIR * HALF * self.sizes.iter().copied().max().unwrap_or(0);
            }
        }
        flow::place(self, &mut placed, strategy);
        if strategy.is_tiered() {
            self.tier(&mut placed, strategy)?;
        }
        Ok(placed)
    }

    /// States of `bytes` bytes per parameter in host memory, and the 16-bit weights that a step writes there.
    fn keep(&self, placed: &mut Placement, bytes: u64, parameters: u64) {
        placed.host.states = bytes * parameters;
        placed.host.weights = HALF * parameters;
    }

    /// States in host memory but for the last buckets, as many as hide the CPU and as fit beside all weights.
    fn speculate(&self, placed: &mut Placement) {
        let size = self.bucket();
        let count = self.shard.div_ceil(size);
        let seconds = |bytes: u64, speed: f64| (bytes * size) as f64 / speed;
        let rates = self.rates();
        let bucket = tail::Bucket {
            grad: seconds(HALF, self.machine.d2h),
            step_cpu: size as f64 * (1.0 / rates.cpu + 1.0 / rates.downscale),
            param: seconds(HALF, self.machine.h2d),
            step_gpu: size as f64 / rates.gpu,
            backward: self.backward() / count as f64,
        };
        let used = placed.gpu.total() + HALF * self.weights();
        let free = self.machine.gpu_memory.saturating_sub(used);
        let most = (free / ((STATE + HALF) * size)).min(count);
        // The numbers are checked: positive, and no more buckets on the GPU than there are.
        placed.tail = tail::buckets(&bucket, count as usize, most as usize).unwrap_or(0) as u64;
        let kept = (placed.tail * size).min(self.shard);
        let left = self.shard - kept;
        placed.gpu.states = STATE * kept;
        placed.gpu.gradients += HALF * kept;
        self.keep(placed, STATE, left);
        placed.host.gradients = placed.host.gradients / self.shard.max(1) * left;
        placed.host.undo = UNDO * left;
        placed.traffic.h2d = HALF * left;
        placed.traffic.d2h = HALF * left * self.run.accumulation;
    }

    /// The subgroups of an interleaved plan, and how they are transferred.
    fn interleaved_shape(&self, gpu_grads: GpuGrads) -> Shape {
        const CHUNK: u64 = 16 << 20;
        let parts = |chunk: u64| self.sizes.iter().map(|size| size.div_ceil(chunk)).sum::<u64>();
        Shape {
            sizes: self.sizes.clone(),
            chunk: if parts(CHUNK) <= MOST_SUBGROUPS { CHUNK } else { u64::MAX },
            slots: DEFAULT_SLOTS,
            transfer_dtype: if self.accumulates() { TransferDtype::F32 } else { TransferDtype::Native },
            gpu_grads,
        }
    }

    /// The interleaved plan; gradients of GPU subgroups stay on the GPU if they fit beside all weights.
    fn interleave(&self, placed: &mut Placement) -> Result<()> {
        let base = placed.gpu;
        for gpu_grads in [GpuGrads::Kept, GpuGrads::Fetched] {
            if gpu_grads == GpuGrads::Kept && self.accumulates() {
                continue;
            }
            let shape = self.interleaved_shape(gpu_grads);
            let chosen = choose::choose(&shape, &self.rates(), 0, 0.0, Mode::Model)?;
            self.interleaved(placed, base, &shape, chosen);
            if placed.gpu.total() + HALF * self.weights() <= self.machine.gpu_memory {
                break;
            }
        }
        Ok(())
    }

    /// The interleaved plan with as many residents as fit beside all weights. Without room for one, nothing is placed. So
    /// it is if the host adds up the gradients of several micro-batches: that of a resident must be on the GPU.
    fn interleave_with_residents(&self, placed: &mut Placement) -> Result<()> {
        let (base, memory) = (placed.gpu, self.machine.gpu_memory);
        let used = base.total() + HALF * self.weights() + memory / memory::RESERVE;
        let room = memory.saturating_sub(used);
        let least = (STATE + HALF) * self.sizes.last().copied().unwrap_or(0);
        if self.accumulates() || room < least {
            return Ok(());
        }
        for gpu_grads in [GpuGrads::Kept, GpuGrads::Fetched] {
            let shape = self.interleaved_shape(gpu_grads);
            let chosen = choose::within_with_grads(&shape, &self.rates(), room, 0.0)?;
            let shortest = placed.interleaved.as_ref().map_or(f64::INFINITY, |best| best.prediction.exposed);
            if chosen.plan.count_on(Where::Resident) > 0 && chosen.prediction.exposed < shortest {
                self.interleaved(placed, base, &shape, chosen);
            }
        }
        Ok(())
    }

    /// The bytes of an interleaved plan beside `base`.
    fn interleaved(&self, placed: &mut Placement, base: GpuBytes, shape: &Shape, chosen: Choice) {
        let bytes = memory::bytes(shape, &chosen.plan);
        placed.gpu = GpuBytes {
            states: bytes.slots + bytes.chunks + bytes.residents,
            gradients: base.gradients + bytes.kept_grads,
            ..base
        };
        placed.host = HostBytes {
            // Residents keep their place in host memory, for a checkpoint and for another plan.
            states: bytes.host_states + bytes.residents,
            gradients: bytes.host_grads,
            weights: bytes.stages,
            undo: 0,
        };
        let earlier = HALF * self.shard * (self.run.accumulation - 1);
        placed.traffic = Traffic { h2d: bytes.to_device, d2h: bytes.to_host + earlier, ..Traffic::default() };
        let on = |placement| chosen.plan.count_on(placement);
        placed.residents = Residents {
            subgroups: on(Where::Resident),
            parameters: bytes.residents / STATE,
            bytes: bytes.residents,
        };
        placed.leaving = match shape.gpu_grads {
            GpuGrads::Kept => on(Where::Cpu),
            GpuGrads::Fetched => shape.count() - on(Where::Resident),
        };
        placed.interleaved = Some(chosen);
    }

    /// The tiered update; its cache gets the host memory that gradients and weights leave.
    fn tier(&self, placed: &mut Placement, strategy: Strategy) -> Result<()> {
        let split = strategy == Strategy::TierSplitMaster;
        let caches = split || strategy == Strategy::TierCache;
        let (host, held) = (self.machine.host_memory, placed.host.total());
        let left = (host / self.run.ranks).checked_sub(held);
        if caches && left.is_none() {
            let held = held * self.run.ranks;
            let reason = format!(
                "the host has {}, but gradients and 16-bit weights alone need {} ({held} bytes)",
                size(host),
                size(held)
            );
            return Err(Error::invalid("host_memory", reason));
        }
        let paths = self.paths(strategy).len();
        let need = (self.budget)(&self.sizes, split, paths, left.filter(|_| caches));
        let need = need.map_err(|error| match error {
            Error::InvalidArgument { argument, reason } if argument == "host_memory" => {
                let reason =
                    format!("the host memory of a rank, beside gradients and 16-bit weights, {reason}");
                Error::invalid("host_memory", reason)
            }
            other => other,
        })?;
        placed.host.states = need.host_bytes;
        placed.stored = need.state_bytes;
        placed.traffic.path_read = need.step_bytes * self.run.ranks;
        placed.traffic.path_written = need.step_bytes * self.run.ranks;
        placed.tier = Some(need);
        Ok(())
    }
}

impl Placement {
    /// Host memory of all ranks.
    pub fn host_of_all(&self, ranks: u64) -> HostBytes {
        self.host.times(ranks)
    }
}
