//! Many tensors in few launches: how many, what is uploaded for them, and that their bits are the processor's.

use super::bits::{Bench, Placed, bits, states};
use super::sample::{Span, adam_rule, all_dtypes, start_of, tensor_of};
use super::{foreign, until};
use crate::dtype::Dtype;
use crate::gpu::kernels::{DeviceFloats, DeviceStates, DeviceTensor};
use crate::gpu::list::Job;
use crate::gpu::memory::DeviceMemory;
use crate::kernel::squares::TILE;
use crate::kernel::{AdamRule, Dtypes, WeightDecay};
use crate::optim::parallel;
use crate::optim::{self, StepStats};

/// Elements of the tensors of a [`Grid`].
const ELEMENTS: u64 = 40;

/// Tensors of f32 in one allocation, of which each has four arrays.
struct Grid {
    memory: DeviceMemory,
}

impl Grid {
    fn new(bench: &Bench, tensors: usize) -> Grid {
        let memory = DeviceMemory::new(&bench.device, tensors as u64 * 4 * ELEMENTS * 4).unwrap();
        bench.upload(&vec![0x3c; memory.span().bytes() as usize], memory.span());
        Grid { memory }
    }

    fn array(&self, index: u64) -> DeviceFloats {
        let span = self.memory.span().part(index * ELEMENTS * 4, ELEMENTS * 4);
        DeviceFloats::new(span, Dtype::F32, "array").unwrap()
    }

    fn jobs(&self, rule: AdamRule) -> Vec<Job> {
        let tensors = self.memory.span().bytes() / (4 * ELEMENTS * 4);
        let job = |index: u64| {
            let [param, exp_avg, exp_avg_sq, grad] = [0, 1, 2, 3].map(|array| self.array(index * 4 + array));
            let states = DeviceStates { param, exp_avg, exp_avg_sq };
            Job { rule, tensor: DeviceTensor::new(states, grad, None) }
        };
        (0..tensors).map(job).collect()
    }
}

/// The same elements as bf16, in the first half of their memory.
fn half(floats: DeviceFloats) -> DeviceFloats {
    DeviceFloats::new(floats.span().part(0, floats.len() * 2), Dtype::Bf16, "array").unwrap()
}

/// Launches, uploads and downloads of `work`.
fn calls(ordinal: u32, work: impl FnOnce() -> StepStats) -> [usize; 3] {
    let before = fakecuda::with(ordinal, |gpu| gpu.calls.len());
    work();
    fakecuda::with(ordinal, |gpu| {
        ["cuLaunchKernel", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"]
            .map(|name| gpu.calls[before..].iter().filter(|call| **call == name).count())
    })
}

#[test]
fn a_step_has_one_launch_and_with_sums_two_whatever_the_number_of_tensors() {
    let bench = Bench::new(58);
    let stream = foreign(&bench.stream);
    let rule = adam_rule(WeightDecay::Decoupled);
    let later = AdamRule { step_size: rule.step_size * 0.5, grad_scale: 0.25, ..rule };
    for tensors in [1, 3, 500] {
        let grid = Grid::new(&bench, tensors);
        let table = usize::from(tensors > 1);
        let step = |jobs: &[Job], squares| calls(58, || bench.steps.adam(jobs, stream, squares).unwrap());
        assert_eq!(step(&grid.jobs(rule), false), [1, table, 0], "the first step of {tensors}");
        // Neither other coefficients nor sums need another table.
        assert_eq!(step(&grid.jobs(rule), false), [1, 0, 0], "the second step of {tensors}");
        assert_eq!(step(&grid.jobs(later), false), [1, 0, 0], "other coefficients of {tensors}");
        assert_eq!(step(&grid.jobs(later), true), [2, 0, 1], "a step with sums of {tensors}");
        let measured = calls(58, || bench.steps.measure(&grid.jobs(later)).unwrap());
        assert_eq!(measured, [2, 0, 1], "sums of {tensors}");
        // One gradient elsewhere, and then again where it was.
        let mut moved = grid.jobs(rule);
        moved[tensors - 1].tensor.grad = grid.array(0);
        assert_eq!(step(&moved, false), [1, table, 0], "another address of {tensors}");
        assert_eq!(step(&moved, false), [1, 0, 0], "the same address of {tensors}");
        // Two kinds of coefficients, which change in each step.
        let mut two = grid.jobs(rule);
        two[0].rule = later;
        assert_eq!(step(&two, true), [2, table, 1], "two kinds of coefficients of {tensors}");
        // Two kernels, whose tensors alternate.
        if tensors > 1 {
            let mut kernels = grid.jobs(rule);
            for job in kernels.iter_mut().step_by(2) {
                let states = &mut job.tensor.states;
                (states.exp_avg, states.exp_avg_sq) = (half(states.exp_avg), half(states.exp_avg_sq));
            }
            let seen = step(&kernels, true);
            assert_eq!([seen[0], seen[2]], [3, 1], "two kernels of {tensors}");
        }
        two.iter_mut().for_each(|job| job.rule.step_size *= 0.5);
        assert_eq!(step(&two, true), [2, table, 1], "other coefficients of two kinds of {tensors}");
    }
    fakecuda::with(58, |gpu| {
        assert_eq!((gpu.races(), &gpu.queues.failures[..], gpu.pageable_copies), (&[][..], &[][..], 0));
    });
}

/// Two lists that are stepped in turn, as buckets are.
#[test]
fn each_list_keeps_its_table() {
    let bench = Bench::new(59);
    let stream = foreign(&bench.stream);
    let grids = [3, 3, 7].map(|tensors| Grid::new(&bench, tensors));
    let rule = adam_rule(WeightDecay::None);
    for round in 0..3 {
        for grid in &grids {
            let seen = calls(59, || bench.steps.adam(&grid.jobs(rule), stream, false).unwrap());
            assert_eq!(seen, [1, usize::from(round == 0), 0]);
        }
    }
}

/// The GPU does not run while gradients move from step to step: no call waits for it, and no upload overwrites another.
#[test]
fn steps_of_tensors_that_move_wait_for_nothing() {
    const STEPS: usize = 40;
    let bench = Bench::new(60);
    let stream = foreign(&bench.stream);
    let rule = adam_rule(WeightDecay::L2);
    let steps = |grid: &Grid, after: &dyn Fn()| {
        for step in 0..STEPS {
            let mut jobs = grid.jobs(AdamRule { step_size: -1e-3 * (step + 1) as f32, ..rule });
            jobs[0].rule.eps = 1e-3;
            jobs.iter_mut().for_each(|job| job.tensor.grad = grid.array(4 * 4 + step as u64 % 7));
            bench.steps.adam(&jobs[..4], stream, false).unwrap();
            after();
        }
        bench.stream.synchronize().unwrap();
        bench.download(grid.memory.span())
    };
    // Different values in the gradients.
    let values: Vec<u8> = (0..6 * 4 * ELEMENTS).flat_map(|n| (n as f32 * 1e-3).to_ne_bytes()).collect();
    let grids = [Grid::new(&bench, 6), Grid::new(&bench, 6)];
    grids.iter().for_each(|grid| bench.upload(&values, grid.memory.span()));
    let expected = steps(&grids[0], &|| bench.steps.finish().unwrap());
    std::thread::scope(|scope| {
        fakecuda::with(60, |gpu| gpu.stalled = true);
        let stalled =
            scope.spawn(|| steps(&grids[1], &|| fakecuda::with(60, |gpu| assert_eq!(gpu.waiting, 0))));
        // The thread waits once: at its end.
        until(|| fakecuda::with(60, |gpu| gpu.waiting == 1));
        fakecuda::with(60, |gpu| assert_eq!(gpu.queued_kernels(), STEPS));
        fakecuda::resume(60);
        assert!(stalled.join().unwrap() == expected);
    });
    assert_ne!(expected, values);
    fakecuda::with(60, |gpu| assert_eq!((gpu.races(), &gpu.queues.failures[..]), (&[][..], &[][..])));
}

/// A tensor on both sides.
struct Twin {
    dtypes: Dtypes,
    rule: AdamRule,
    host: ([Span; 4], Span),
    device: ([Span; 4], Span),
    placed: Vec<Placed>,
    grad: Placed,
}

impl Twin {
    fn new(bench: &Bench, dtypes: Dtypes, rule: AdamRule, n: usize, aligned: bool) -> Twin {
        let host = start_of(dtypes, n, false);
        let mut device = host.clone();
        let placed = device.0.iter_mut().map(|span| bench.place(span, aligned)).collect();
        let grad = bench.place(&mut device.1, aligned);
        Twin { dtypes, rule, host, device, placed, grad }
    }

    fn job(&self) -> Job {
        let param_copy = self.dtypes.copy.map(|_| self.placed[3].values);
        let states = states(&self.placed);
        let tensor = DeviceTensor::new(states, self.grad.values, param_copy);
        Job { rule: self.rule, tensor }
    }
}

#[test]
fn a_list_of_all_types_lengths_and_options_has_the_bits_of_the_processor() {
    const LENGTHS: [usize; 11] = [0, 1, 2, 333, 4096, 4097, 0, 8192, 9 * TILE + 5, 7, 33 * TILE - 1];
    let bench = Bench::new(61);
    let mut twins = Vec::new();
    let all = all_dtypes();
    for (index, n) in LENGTHS.into_iter().cycle().take(3 * all.len() + 2).enumerate() {
        let dtypes = all[index * 5 % all.len()];
        let decay = [WeightDecay::None, WeightDecay::L2, WeightDecay::Decoupled][index % 3];
        let rounded = dtypes.param == Dtype::F32 && dtypes.state == Dtype::Bf16 && index % 2 == 0;
        let rule = AdamRule { stochastic: rounded.then_some(0x1234_5678_9abc_def0), ..adam_rule(decay) };
        // The tensors of more than one segment are the rare case.
        let n = if index == 17 { 257 * TILE + 3 } else { n };
        twins.push(Twin::new(&bench, dtypes, rule, n, index % 4 != 3));
    }
    for many in [0, 1, 2, 5, twins.len()] {
        let twins = &mut twins[..many];
        let jobs: Vec<Job> = twins.iter().map(Twin::job).collect();
        let measured = bench.steps.measure(&jobs).unwrap();
        let found = bench.steps.adam(&jobs, foreign(&bench.stream), true).unwrap();
        let mut own: Vec<_> = twins
            .iter_mut()
            .map(|twin| {
                let (states, grad) = &mut twin.host;
                parallel::Job { optimizer: twin.rule, tensor: tensor_of(states, grad, twin.dtypes) }
            })
            .collect();
        let expected = optim::step(&mut own, true).unwrap();
        drop(own);
        assert_eq!(found.sum_squares.to_bits(), expected.sum_squares.to_bits(), "{many} tensors");
        assert_eq!(measured.sum_squares.to_bits(), expected.sum_squares.to_bits(), "{many} tensors");
        for (index, twin) in twins.iter_mut().enumerate() {
            let Twin { placed, device, .. } = twin;
            placed.iter().zip(&mut device.0).for_each(|(placed, span)| bench.fetch(placed, span));
            assert!(bits(&device.0) == bits(&twin.host.0), "tensor {index} of {many}: {:?}", twin.dtypes);
        }
    }
    fakecuda::with(61, |gpu| {
        assert_eq!((gpu.races(), &gpu.queues.failures[..], gpu.pageable_copies), (&[][..], &[][..], 0));
    });
}
