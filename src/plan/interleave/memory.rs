//! Bytes that a plan needs on both sides, and that a step moves.
#![forbid(unsafe_code)]

use super::schedule::PAIR;
use super::sites::{Plan, Site};
use super::{GpuGrads, Shape, Wire};

/// Bytes of param, exp_avg and exp_avg_sq, per parameter.
const STATE: u64 = 12;
const WORD: u64 = 4;
const HALF: u64 = 2;

/// Bytes of a plan. The framework's own 16-bit parameters and the gradients it would hold anyway are not counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Bytes {
    /// GPU memory of the slots.
    pub slots: u64,
    /// GPU memory of the buffers in which gradients are widened.
    pub chunks: u64,
    /// GPU memory of resident states.
    pub residents: u64,
    /// GPU memory of 16-bit gradients that wait for the GPU's update.
    pub kept_grads: u64,
    /// Pinned host memory of states.
    pub host_states: u64,
    /// Pinned host memory of gradients.
    pub host_grads: u64,
    /// Pinned host memory of the staging buffers.
    pub stages: u64,
    /// Bytes of a step over the link to the device.
    pub to_device: u64,
    /// Bytes of a step over the link to the host.
    pub to_host: u64,
}

impl Bytes {
    /// GPU memory in all.
    pub fn gpu(&self) -> u64 {
        self.slots + self.chunks + self.residents + self.kept_grads
    }

    /// Pinned host memory in all.
    pub fn host(&self) -> u64 {
        self.host_states + self.host_grads + self.stages
    }
}

/// Bytes that `plan` needs and moves. Sizes are those of [`Shape::check`], so that nothing overflows.
pub fn bytes(shape: &Shape, plan: &Plan) -> Bytes {
    let of = |site| plan.on(site).map(|subgroup| shape.sizes[subgroup]).sum::<u64>();
    let (cpu, gpu, resident) = (of(Site::Cpu), of(Site::Gpu), of(Site::Resident));
    let wire = match shape.wire {
        Wire::Native => HALF,
        Wire::F32 | Wire::Delivered => WORD,
    };
    let fetched = if shape.gpu_grads == GpuGrads::Fetched { gpu } else { 0 };
    let used_slots = (plan.count_on(Site::Gpu) as u64).min(shape.slots as u64);
    let largest_on = |site| plan.on(site).map(|subgroup| shape.sizes[subgroup]).max().unwrap_or(0);
    let grad_slot = if fetched > 0 { wire } else { 0 };
    let leaving = cpu + fetched;
    let widened = if shape.wire == Wire::F32 && leaving > 0 { shape.chunk.min(shape.largest()) } else { 0 };
    let delivered = if shape.wire == Wire::Delivered { 0 } else { wire };
    Bytes {
        slots: used_slots * (STATE + grad_slot) * largest_on(Site::Gpu),
        chunks: PAIR as u64 * WORD * widened,
        residents: STATE * resident,
        kept_grads: HALF * (gpu - fetched + resident),
        host_states: STATE * (cpu + gpu),
        host_grads: wire * leaving,
        stages: PAIR as u64 * HALF * largest_on(Site::Cpu),
        to_device: STATE * gpu + HALF * cpu + wire * fetched,
        to_host: STATE * gpu + delivered * leaving,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 100_000_000;

    #[test]
    fn bytes_are_those_of_the_written_budget() {
        let shape = Shape { chunk: 16 << 20, ..Shape::uniform(10, S) };
        let found = bytes(&shape, &Plan::even(10, 4, 2).unwrap());
        assert_eq!((found.slots, found.chunks), (2 * 12 * S, 2 * 4 * (16 << 20)));
        assert_eq!((found.residents, found.kept_grads), (2 * 12 * S, 6 * 2 * S));
        assert_eq!((found.host_states, found.host_grads), (8 * 12 * S, 4 * 4 * S));
        assert_eq!(found.stages, 2 * 2 * S);
        assert_eq!((found.to_device, found.to_host), (4 * 12 * S + 4 * 2 * S, 4 * 12 * S + 4 * 4 * S));
        assert_eq!(found.gpu(), found.slots + found.chunks + found.residents + found.kept_grads);
    }

    #[test]
    fn fetched_gradients_take_room_on_the_host_and_in_the_slots() {
        let shape = Shape { gpu_grads: GpuGrads::Fetched, wire: Wire::Native, ..Shape::uniform(4, S) };
        let found = bytes(&shape, &Plan::even(4, 1, 0).unwrap());
        assert_eq!((found.slots, found.kept_grads, found.chunks), (14 * S, 0, 0));
        assert_eq!((found.host_grads, found.to_host), (4 * 2 * S, 12 * S + 4 * 2 * S));
        assert_eq!(found.to_device, 12 * S + 3 * 2 * S + 2 * S);
    }

    #[test]
    fn a_plan_without_the_gpu_needs_none_of_its_memory() {
        let found = bytes(&Shape { wire: Wire::Delivered, ..Shape::uniform(3, S) }, &Plan::cpu(3));
        assert_eq!((found.gpu(), found.to_host, found.to_device), (0, 0, 3 * 2 * S));
        assert_eq!(bytes(&Shape::uniform(0, S), &Plan::cpu(0)), Bytes::default());
    }
}
