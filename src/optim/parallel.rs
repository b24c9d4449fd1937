//! Splits tensors into parts and distributes the parts over the worker threads.
//!
//! Invariants:
//! - The split points and the order of additions depend only on the tensors, never on threads or kernels. One
//!   recursion, `Cut::tree`, makes the parts and later adds the results of the parts.
//! - A sum does not depend on the size of the parts: each part is a power-of-two number of tiles (see `squares`).
//! - Work of at most one chunk wakes no worker, because that would cost more than it saves: it is shared only with
//!   workers that are awake.
#![forbid(unsafe_code)]

pub use super::job::{Job, elements};
use super::optimizers::Family;
use super::step_stats::StepStats;
use crate::error::Result;
use crate::kernel::squares::{self, TILE, split};
use crate::kernel::{self, CHUNK, Kernel, Optimizer, Tensor};
use crate::sys::{threads, try_vec};

/// Work on each chunk of a tensor.
pub trait Work<O>: Sync {
    /// True if the result depends on where a tensor is cut: then it is cut only between chunks.
    const WHOLE_CHUNKS: bool = false;

    /// Processes at most one chunk, and returns its term of the total sum.
    fn chunk(&self, job: Job<'_, O>) -> Result<f64>;
}

/// Steps and counts all tensors, each with its own coefficients. Sums squares only if `squares` is true.
pub fn step<O: Family>(jobs: &mut [Job<'_, O>], squares: bool) -> Result<StepStats> {
    let stats = step_all(jobs, squares)?;
    O::COUNTER.add(elements(jobs));
    Ok(stats)
}

/// Steps all tensors in one pass over their memory. Sums the squares of the scaled gradients if `squares` is true.
pub fn step_all<O: Optimizer>(jobs: &mut [Job<'_, O>], squares: bool) -> Result<StepStats> {
    step_on(super::kernel()?, jobs, squares)
}

/// [`step_all`] with the kernel that the caller chooses.
pub fn step_on<O: Optimizer>(kernel: Kernel, jobs: &mut [Job<'_, O>], squares: bool) -> Result<StepStats> {
    run_parallel(jobs, &ChunkStep { kernel, squares }).map(StepStats::of)
}

/// Returns the statistics that a step would return, with the same bits. Changes nothing.
pub fn measure<O: Optimizer>(jobs: &mut [Job<'_, O>]) -> Result<StepStats> {
    run_parallel(jobs, &Measure { kernel: super::kernel()? }).map(StepStats::of)
}

/// Writes the 16-bit parameter copies that a step withheld.
pub fn publish<O: Optimizer>(jobs: &mut [Job<'_, O>]) -> Result<()> {
    run_parallel(jobs, &Publish { kernel: super::kernel()? }).map(drop)
}

/// Does `work` on all chunks of all tensors, and returns the sum of the results. Fails if a tensor lacks a state that
/// the optimizer keeps.
pub fn run_parallel<O: Optimizer, W: Work<O>>(jobs: &mut [Job<'_, O>], work: &W) -> Result<f64> {
    let elements = elements(jobs);
    let mut whole_chunks = W::WHOLE_CHUNKS;
    for job in jobs.iter_mut() {
        job.tensor.require_states(O::EXP_AVG, O::EXP_AVG_SQ)?;
        job.optimizer.check_types(&job.tensor)?;
        job.tensor.set_total_elements(elements);
        // A log is written and read in whole chunks.
        whole_chunks |= job.tensor.has_log();
    }
    let mut cut = Cut { most: CHUNK, group: true };
    if elements <= CHUNK {
        if whole_chunks || elements < SHARED || !threads::awake()? {
            return Cut { group: false, ..cut }.tree(jobs, &mut |part| part.run(work));
        }
        cut.most = part_elements(elements);
    }
    if let [job] = jobs {
        // The sum of equal parts is the tree's, without a second recursion.
        let parts = cut.list(job.optimizer, job.tensor.reborrow())?;
        let sums: Result<Vec<f64>> = run_parts(parts, work)?.into_iter().collect();
        return Ok(squares::sum(&sums?));
    }
    let mut parts = Vec::new();
    cut.tree(jobs, &mut |part| {
        parts.push((Some(part), Ok(0.0)));
        Ok(0.0)
    })?;
    let mut sums = run_parts(parts, work)?.into_iter();
    cut.tree(jobs, &mut |_| sums.next().unwrap_or(Ok(0.0)))
}

/// Adds the sums of tensors as [`run_parallel`] adds those of its jobs: by halves of the list.
pub fn sum_of(sums: &[f64]) -> f64 {
    match sums {
        [] => 0.0,
        [one] => *one,
        many => {
            let (left, right) = many.split_at(many.len() / 2);
            squares::add(sum_of(left), sum_of(right))
        }
    }
}

/// A part until its work begins, and then its result.
type Running<'p, 'a, O> = (Option<WorkUnit<'p, 'a, O>>, Result<f64>);

/// Does the parts of a call, and returns their results in order.
fn run_parts<O: Optimizer, W: Work<O>>(
    mut parts: Vec<Running<'_, '_, O>>,
    work: &W,
) -> Result<Vec<Result<f64>>> {
    let run = |(part, sum): &mut Running<'_, '_, O>| {
        if let Some(part) = part.take() {
            *sum = part.run(work);
        }
    };
    threads::each(&mut parts, run)?;
    Ok(parts.into_iter().map(|(_, sum)| sum).collect())
}

/// Elements of a call from which two threads are faster than one, if the second is awake.
const SHARED: usize = 32 << 10;

/// Most elements of a part, for a call of `elements`: a power of two. Eight parts balance the load. Stepping a part
/// takes ten times as long as dequeuing it.
fn part_elements(elements: usize) -> usize {
    (elements / 8).next_power_of_two().clamp(TILE, CHUNK)
}

/// Steps each chunk.
pub(super) struct ChunkStep {
    pub kernel: Kernel,
    /// If true, the result is the sum of squares of the scaled gradients.
    pub squares: bool,
}

impl<O: Optimizer> Work<O> for ChunkStep {
    fn chunk(&self, job: Job<'_, O>) -> Result<f64> {
        Ok(job.optimizer.step(self.kernel, job.tensor, self.squares)?)
    }
}

struct Measure {
    kernel: Kernel,
}

impl<O: Optimizer> Work<O> for Measure {
    fn chunk(&self, job: Job<'_, O>) -> Result<f64> {
        Ok(kernel::grad_squares(self.kernel, job.tensor.grad(), job.optimizer.grad_scale()))
    }
}

struct Publish {
    kernel: Kernel,
}

impl<O: Optimizer> Work<O> for Publish {
    fn chunk(&self, job: Job<'_, O>) -> Result<f64> {
        kernel::publish(self.kernel, job.tensor);
        Ok(0.0)
    }
}

/// The unit of work of one thread.
#[expect(clippy::large_enum_variant, reason = "almost all parts of a call are of the large kind")]
enum WorkUnit<'p, 'a, O> {
    /// Adjacent small tensors with at most [`CHUNK`] elements in total.
    Few(&'p mut [Job<'a, O>]),
    /// At most [`CHUNK`] elements of one tensor.
    Chunk(Job<'p, O>),
}

impl<O: Optimizer> WorkUnit<'_, '_, O> {
    fn run<W: Work<O>>(self, work: &W) -> Result<f64> {
        match self {
            WorkUnit::Few(jobs) => Cut { most: CHUNK, group: false }.tree(jobs, &mut |part| part.run(work)),
            WorkUnit::Chunk(job) => work.chunk(job),
        }
    }
}

/// How a list of tensors is cut into parts.
#[derive(Clone, Copy)]
struct Cut {
    /// Most elements of a part: a power of two from [`TILE`] to [`CHUNK`].
    most: usize,
    /// True if adjacent small tensors form one part.
    group: bool,
}

impl Cut {
    /// Recursively halves the list of tensors, then cuts each tensor. Calls `part` on each leaf and returns the sum of
    /// the results, or the error of the first leaf that failed.
    fn tree<'p, 'a, O: Optimizer>(
        self,
        jobs: &'p mut [Job<'a, O>],
        part: &mut impl FnMut(WorkUnit<'p, 'a, O>) -> Result<f64>,
    ) -> Result<f64> {
        match jobs {
            [] => Ok(0.0),
            [job] => self.cut(job.optimizer, job.tensor.reborrow(), part),
            many if self.group && elements(many) <= self.most => part(WorkUnit::Few(many)),
            many => {
                let (left, right) = many.split_at_mut(many.len() / 2);
                combine(self.tree(left, part), self.tree(right, part))
            }
        }
    }

    /// The parts of one tensor, in order.
    fn list<'p, 'a: 'p, O: Optimizer + 'p>(
        self,
        optimizer: O,
        tensor: Tensor<'p>,
    ) -> Result<Vec<Running<'p, 'a, O>>> {
        let count = tensor.len().div_ceil(self.most);
        let mut parts = try_vec::with_capacity("listing the parts of a tensor", count)?;
        let mut rest = tensor;
        while rest.len() > self.most {
            let (first, after) = rest.split_at(self.most);
            parts.push((Some(WorkUnit::Chunk(Job { optimizer, tensor: first })), Ok(0.0)));
            rest = after;
        }
        parts.push((Some(WorkUnit::Chunk(Job { optimizer, tensor: rest })), Ok(0.0)));
        Ok(parts)
    }

    fn cut<'p, 'a: 'p, O: Optimizer + 'p>(
        self,
        optimizer: O,
        tensor: Tensor<'p>,
        part: &mut impl FnMut(WorkUnit<'p, 'a, O>) -> Result<f64>,
    ) -> Result<f64> {
        if tensor.len() <= self.most {
            return part(WorkUnit::Chunk(Job { optimizer, tensor }));
        }
        let parts = tensor.len().div_ceil(self.most);
        let (left, right) = tensor.split_at(split(parts) * self.most);
        combine(self.cut(optimizer, left, part), self.cut(optimizer, right, part))
    }
}

fn combine(left: Result<f64>, right: Result<f64>) -> Result<f64> {
    Ok(squares::add(left?, right?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::{Floats, FloatsMut};
    use crate::kernel::{AdamRule, States};
    use crate::optim::adam::AdamOptions;

    /// Steps tensors of these lengths by `run`. Returns the sum of squares, and all parameters and states.
    fn stepped(
        lengths: &[usize],
        run: impl FnOnce(&mut [Job<'_, AdamRule>]) -> Result<f64>,
    ) -> (u64, Vec<u32>) {
        let value = |index: usize| ((index * 2_654_435_761) % 1009) as f32 / 1009.0 - 0.5;
        let all = lengths.iter().sum();
        let grad: Vec<f32> = (0..all).map(|index| value(index + 7)).collect();
        let mut arrays = [(0..all).map(value).collect::<Vec<f32>>(), vec![0.0; all], vec![0.0; all]];
        let [param, exp_avg, exp_avg_sq] = &mut arrays;
        let mut rest = (&mut param[..], &mut exp_avg[..], &mut exp_avg_sq[..], &grad[..]);
        let mut jobs = Vec::new();
        for n in lengths {
            let (param, exp_avg, exp_avg_sq, grad) = (
                rest.0.split_at_mut(*n),
                rest.1.split_at_mut(*n),
                rest.2.split_at_mut(*n),
                rest.3.split_at(*n),
            );
            rest = (param.1, exp_avg.1, exp_avg_sq.1, grad.1);
            let states = States {
                param: FloatsMut::F32(param.0),
                exp_avg: Some(FloatsMut::F32(exp_avg.0)),
                exp_avg_sq: Some(FloatsMut::F32(exp_avg_sq.0)),
            };
            let tensor = Tensor::new(states, Floats::F32(grad.0), None).unwrap();
            jobs.push(Job { optimizer: AdamOptions::default().rule().unwrap(), tensor });
        }
        let sum = run(&mut jobs).unwrap();
        (sum.to_bits(), arrays.iter().flatten().map(|value| value.to_bits()).collect())
    }

    #[test]
    fn bits_do_not_depend_on_the_cuts() {
        let kernel = crate::optim::kernel().unwrap();
        let work = ChunkStep { kernel, squares: true };
        let lists: [&[usize]; 8] = [
            &[SHARED - 1],
            &[SHARED],
            &[40_001],
            &[CHUNK],
            &[CHUNK + 1],
            &[5 * CHUNK - 3],
            &[300, 40_000, 1, 9000],
            &[70_001, 5, 4096, 131_073],
        ];
        for lengths in lists {
            let whole = Cut { most: CHUNK, group: false };
            let serial = stepped(lengths, |jobs| whole.tree(jobs, &mut |part| part.run(&work)));
            for _ in 0..20 {
                assert_eq!(stepped(lengths, |jobs| run_parallel(jobs, &work)), serial, "{lengths:?}");
            }
        }
    }
}
