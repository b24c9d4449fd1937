//! Bytes that a plan allocates on GPU and host, and bytes that a step transfers.
#![forbid(unsafe_code)]

use super::placements::{Placement, Plan};
use super::schedule::PAIR;
use super::{GpuGrads, Shape, TransferDtype};

/// The part of the device's memory that residents leave to the framework: one in this number.
pub const RESERVE: u64 = 10;
/// Bytes per parameter of param, exp_avg and exp_avg_sq in f32.
pub const STATE: u64 = 12;
const WORD: u64 = 4;
/// Bytes per parameter of a 16-bit gradient.
pub const HALF: u64 = 2;

/// Bytes of a plan. Does not count the 16-bit parameters of the framework, nor the gradients that it holds in any case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Bytes {
    /// GPU memory of the slots.
    pub slots: u64,
    /// GPU memory of the chunk buffers, in which gradients are widened.
    pub chunks: u64,
    /// GPU memory of resident states.
    pub residents: u64,
    /// GPU memory of 16-bit gradients that are kept for GPU updates.
    pub kept_grads: u64,
    /// Pinned host memory of states.
    pub host_states: u64,
    /// Pinned host memory of gradients.
    pub host_grads: u64,
    /// Pinned host memory of the staging buffers.
    pub stages: u64,
    /// Bytes that a step transfers to the device.
    pub to_device: u64,
    /// Bytes that a step transfers to the host. Excludes gradients that the caller delivers.
    pub to_host: u64,
}

impl Bytes {
    /// Total GPU memory.
    pub fn gpu(&self) -> u64 {
        self.slots + self.chunks + self.residents + self.kept_grads
    }

    /// Total pinned host memory.
    pub fn host(&self) -> u64 {
        self.host_states + self.host_grads + self.stages
    }
}

/// Computes the bytes that `plan` allocates and transfers. `shape` must pass [`Shape::check`], so that no sum
/// overflows.
pub fn bytes(shape: &Shape, plan: &Plan) -> Bytes {
    let of = |placement| plan.on(placement).map(|subgroup| shape.sizes[subgroup]).sum::<u64>();
    let (cpu, gpu, resident) = (of(Placement::Cpu), of(Placement::Gpu), of(Placement::Resident));
    let grad_bytes = match shape.transfer_dtype {
        TransferDtype::Native => HALF,
        TransferDtype::F32 | TransferDtype::Delivered => WORD,
    };
    let fetched = if shape.gpu_grads == GpuGrads::Fetched { gpu } else { 0 };
    let used_slots = (plan.count_on(Placement::Gpu) as u64).min(shape.slots as u64);
    // A slot and a staging buffer are as large as the largest subgroup, since a later plan may need that.
    let staged = if cpu > 0 { shape.largest() } else { 0 };
    let grad_slot = if fetched > 0 { grad_bytes } else { 0 };
    let leaving = cpu + fetched;
    let widened = if shape.transfer_dtype == TransferDtype::F32 && leaving > 0 {
        shape.chunk.min(shape.largest())
    } else {
        0
    };
    let delivered = if shape.transfer_dtype == TransferDtype::Delivered { 0 } else { grad_bytes };
    Bytes {
        slots: used_slots * (STATE + grad_slot) * shape.largest(),
        chunks: PAIR as u64 * WORD * widened,
        residents: STATE * resident,
        kept_grads: HALF * (gpu - fetched + resident),
        host_states: STATE * (cpu + gpu),
        host_grads: grad_bytes * leaving,
        stages: PAIR as u64 * HALF * staged,
        to_device: STATE * gpu + HALF * cpu + grad_bytes * fetched,
        to_host: STATE * gpu + delivered * leaving,
    }
}

/// Number of subgroups, counted from the last one, that fit in `bytes` of GPU memory as residents with `each` bytes per
/// parameter.
pub fn residents_in(shape: &Shape, bytes: u64, each: u64) -> usize {
    let mut left = bytes;
    let fits = |size: &&u64| {
        let rest = each.checked_mul(**size).and_then(|state| left.checked_sub(state));
        rest.inspect(|rest| left = *rest).is_some()
    };
    shape.sizes.iter().rev().take_while(fits).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 100_000_000;

    #[test]
    fn bytes_are_those_of_the_written_budget() {
        let shape = Shape { chunk: 16 << 20, ..Shape::uniform(10, S) };
        let found = bytes(&shape, &Plan::even(10, 4, 2).unwrap());
        assert_eq!((found.slots, found.chunks), (3 * 12 * S, 2 * 4 * (16 << 20)));
        assert_eq!((found.residents, found.kept_grads), (2 * 12 * S, 6 * 2 * S));
        assert_eq!((found.host_states, found.host_grads), (8 * 12 * S, 4 * 4 * S));
        assert_eq!(found.stages, 2 * 2 * S);
        assert_eq!((found.to_device, found.to_host), (4 * 12 * S + 4 * 2 * S, 4 * 12 * S + 4 * 4 * S));
        assert_eq!(found.gpu(), found.slots + found.chunks + found.residents + found.kept_grads);
    }

    #[test]
    fn fetched_gradients_take_room_on_the_host_and_in_the_slots() {
        let shape = Shape {
            gpu_grads: GpuGrads::Fetched,
            transfer_dtype: TransferDtype::Native,
            ..Shape::uniform(4, S)
        };
        let found = bytes(&shape, &Plan::even(4, 1, 0).unwrap());
        assert_eq!((found.slots, found.kept_grads, found.chunks), (14 * S, 0, 0));
        assert_eq!((found.host_grads, found.to_host), (4 * 2 * S, 12 * S + 4 * 2 * S));
        assert_eq!(found.to_device, 12 * S + 3 * 2 * S + 2 * S);
    }

    #[test]
    fn slots_and_staging_buffers_have_the_size_of_the_largest_subgroup() {
        let shape = Shape { sizes: vec![5, 9, 2], slots: 2, ..Shape::uniform(0, 0) };
        let found = bytes(&shape, &Plan::of(vec![Placement::Cpu, Placement::Resident, Placement::Gpu]));
        assert_eq!((found.slots, found.stages), (12 * 9, 2 * 2 * 9));
    }

    #[test]
    fn the_last_subgroups_fit_first() {
        let shape = Shape { sizes: vec![5, 9, 2], ..Shape::uniform(0, 0) };
        let fits = [0, 23, 24, 131, 132, 191, 192, u64::MAX].map(|bytes| residents_in(&shape, bytes, STATE));
        assert_eq!(fits, [0, 0, 1, 1, 2, 2, 3, 3]);
    }

    #[test]
    fn a_plan_without_the_gpu_needs_none_of_its_memory() {
        let found =
            bytes(&Shape { transfer_dtype: TransferDtype::Delivered, ..Shape::uniform(3, S) }, &Plan::cpu(3));
        assert_eq!((found.gpu(), found.to_host, found.to_device), (0, 0, 3 * 2 * S));
        assert_eq!(bytes(&Shape::uniform(0, S), &Plan::cpu(0)), Bytes::default());
    }
}
