//! Proves that speculation changes no bit. Random rounds through the C functions end with the parameters, states,
//! 16-bit copies and sums of "wait for the norm of all buckets, then step once". This holds for every order of arrival,
//! rate of clipping, number of threads, way of publishing and place of an overflow.

mod early;
mod model;

use std::ptr;

use spillway::capi::base::{spw_set_threads, spw_thread_options};
use spillway::capi::optim::spw_adam_options;
use spillway::capi::optim::{spw_step_stats, spw_tensor};
use spillway::capi::speculate::{
    spw_spec, spw_spec_begin_adam, spw_spec_close, spw_spec_open, spw_spec_options, spw_spec_stats,
};
use spillway::capi::speculate::{
    spw_spec_finish, spw_spec_get_rolled_back, spw_spec_local_result, spw_spec_outcome, spw_spec_resolve,
};
use spillway::capi::speculate::{spw_spec_get_bucket, spw_spec_submit, spw_spec_wait};
use spillway::capi::{In, Out};

use model::{Buckets, Random, Tensor, adam, adam_defaults, ok, shared, stats_of, table, zeros};

const RUNS: u64 = 1000;
const STEPS: u64 = 20;
const COMMIT: u32 = 0;
const SKIP: u32 = 1;

#[test]
fn every_run_ends_with_the_bits_of_waiting_for_the_norm() {
    let mut total = [0; 5];
    for seed in 0..RUNS {
        // The pool belongs to the process: a new number of workers every 50 runs.
        if seed % 50 == 0 {
            let options = spw_thread_options { struct_size: 8, num_threads: 1 + (seed / 50 % 4) as u32 };
            // SAFETY: the options live until the call returns.
            ok(spw_set_threads(unsafe { In::new(&raw const options) }));
        }
        let stats = Run::new(seed).all();
        let counts = [
            stats.buckets_speculated,
            stats.buckets_committed,
            stats.buckets_redone,
            stats.buckets_rolled_back,
            stats.buckets_spared,
        ];
        total.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
    }
    println!("{RUNS} runs of {STEPS} steps; speculated, committed, redone, rolled back, spared: {total:?}");
    assert!(total.iter().all(|count| *count > 100), "a path was hardly taken: {total:?}");
}

/// The spans of the tensors do not move and belong to the engine until the bucket is final.
struct Sent<T>(T);
// SAFETY: one thread submits each bucket, and the engine is thread-safe.
unsafe impl<T> Send for Sent<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Sent<T> {}

impl<T> Sent<T> {
    fn get(&self) -> &T {
        &self.0
    }
}

/// One run: a model, its twin that steps serially, and an engine.
struct Run {
    random: Random,
    spec: *mut spw_spec,
    clip_percent: u64,
    publish: u32,
    mine: Buckets,
    twin: Buckets,
}

impl Run {
    fn new(seed: u64) -> Run {
        let mut random = Random(seed * 7919);
        let buckets = 1 + random.below(6) as u32;
        let bucket = |random: &mut Random| -> Vec<Tensor> {
            // Some are large enough for the pool to share.
            let most = if random.chance(1) { 150_000 } else { 300 };
            let tensors = 1 + random.below(3);
            (0..tensors)
                .map(|_| {
                    let n = 1 + random.below(most);
                    Tensor::random(random, n)
                })
                .collect()
        };
        let mut mine: Buckets = (0..buckets).map(|_| bucket(&mut random)).collect();
        let publish = random.below(3) as u32;
        let undo_mode = 2 * random.below(2) as u32;
        let options = spw_spec_options { struct_size: 16, buckets, undo_mode, publish };
        let twin = mine.clone();
        for tensor in mine.iter_mut().flatten().filter(|_| undo_mode == 2) {
            let n = tensor.param.len();
            tensor.shadow = Some([vec![9.0; n], vec![9.0; n], vec![9.0; n]]);
        }
        let mut spec = ptr::null_mut();
        // SAFETY: both pointers are valid for the call.
        ok(unsafe { spw_spec_open(In::new(&raw const options), Out::new(&raw mut spec)) });
        let clip_percent = [0, 1, 50, 100][(seed % 4) as usize];
        Run { random, spec, clip_percent, publish, twin, mine }
    }

    fn all(mut self) -> spw_spec_stats {
        let mut options = spw_adam_options { struct_size: 72, ..adam_defaults() };
        options.weight_decay_mode = self.random.below(2) as u32;
        options.weight_decay = [0.0, 0.1][self.random.below(2)];
        options.grad_scale = [1.0, 1.0 / 1024.0][self.random.below(2)];
        for step in 1..=STEPS {
            options.step = step;
            self.step(&options);
        }
        let stats = stats_of(self.spec);
        // SAFETY: the engine is open, and it is closed only here.
        ok(unsafe { spw_spec_close(Some(Box::from_raw(self.spec))) });
        assert_eq!(stats.commits + stats.redos + stats.skips, STEPS);
        assert_eq!(stats.buckets_speculated + stats.buckets_spared, STEPS * self.mine.len() as u64);
        let ends = stats.buckets_committed + stats.buckets_redone + stats.buckets_rolled_back;
        assert_eq!(stats.buckets_speculated, ends);
        stats
    }

    fn step(&mut self, options: &spw_adam_options) {
        let random = &mut self.random;
        let clipped = random.chance(self.clip_percent);
        let max_norm = if self.clip_percent == 0 { 0.0 } else { 1.0 };
        let elements: usize = self.mine.iter().flatten().map(|tensor| tensor.param.len()).sum();
        // The norm of numbers that are uniform from -size to size is size * sqrt(elements / 3).
        let norm = if clipped { 4.0 } else { 0.25 };
        let size = norm / (elements as f64 / 3.0).sqrt() / options.grad_scale;
        self.mine.iter_mut().flatten().for_each(|tensor| tensor.fill_grad(random, size as f32));
        if random.chance(5) {
            let bucket = random.below(self.mine.len() as u64);
            self.mine[bucket][0].overflow(random);
        }
        for (mine, twin) in self.mine.iter().flatten().zip(self.twin.iter_mut().flatten()) {
            twin.grad.clone_from(&mine.grad);
            twin.grad_half.clone_from(&mine.grad_half);
        }
        let remote = match random.below(20) {
            0 => f64::INFINITY,
            1 => 3.0,
            _ => 0.01,
        };
        let expected = serial(options, max_norm, &mut self.twin, remote);
        let outcome = self.round(options, max_norm, remote, &expected);
        let finite = expected.nonfinite == 0 && remote.is_finite();
        assert_eq!(outcome.verdict == SKIP, !finite);
        if outcome.verdict != SKIP {
            self.mine.iter_mut().flatten().for_each(Tensor::flip);
        }
        for (mine, twin) in self.mine.iter().flatten().zip(self.twin.iter().flatten()) {
            assert!(mine.same(twin), "step {}: the bits differ", options.step);
        }
    }

    fn round(
        &mut self,
        options: &spw_adam_options,
        max_norm: f64,
        remote: f64,
        expected: &spw_step_stats,
    ) -> spw_spec_outcome {
        let count = self.mine.len() as u32;
        let mut order: Vec<u32> = (0..count).collect();
        (1..order.len()).rev().for_each(|at| order.swap(at, self.random.below(at as u64 + 1)));
        let tables: Vec<Vec<spw_tensor>> = self.mine.iter_mut().map(|bucket| table(bucket)).collect();
        let (spec, tables, threads) = (Sent(self.spec), Sent(tables), 1 + self.random.below(4));
        let mut local = spw_step_stats { struct_size: 16, nonfinite: 0, sum_squares: 0.0 };
        let mut outcome = spw_spec_outcome { struct_size: 32, ..zeros() };
        // SAFETY: the spans live, unmoved and untouched, until `spw_spec_finish` returned.
        unsafe {
            ok(spw_spec_begin_adam(shared(*spec.get()), In::new(options), max_norm));
            let (spec, tables) = (&spec, &tables);
            std::thread::scope(|scope| {
                for part in order.chunks(order.len().div_ceil(threads)) {
                    scope.spawn(move || {
                        for bucket in part {
                            let tensors = &tables.get()[*bucket as usize];
                            let (first, count) = (In::new(tensors.as_ptr()), tensors.len() as u64);
                            let none = In::new(ptr::null());
                            ok(spw_spec_submit(shared(*spec.get()), *bucket, first, count, none));
                        }
                    });
                }
            });
            ok(spw_spec_local_result(shared(self.spec), -1, Out::new(&raw mut local)));
            assert_eq!(local.nonfinite, expected.nonfinite);
            assert!(local.nonfinite == 1 || local.sum_squares.to_bits() == expected.sum_squares.to_bits());
            if self.publish == 0 {
                let mut untouched = self.mine.iter().flatten().zip(self.twin.iter().flatten());
                let kept = |(mine, twin): (&Tensor, &Tensor)| local.nonfinite == 0 || mine.copy == twin.copy;
                assert!(untouched.all(kept), "a copy was written before the verdict");
            }
            let global = spw_step_stats {
                nonfinite: local.nonfinite,
                sum_squares: local.sum_squares + remote,
                ..local
            };
            ok(spw_spec_resolve(shared(self.spec), In::new(&raw const global), Out::new(&raw mut outcome)));
            ok(spw_spec_wait(shared(self.spec), self.random.below(u64::from(count)) as u32, -1));
            ok(spw_spec_finish(shared(self.spec), -1));
            let mut state = 0;
            ok(spw_spec_get_bucket(shared(self.spec), 0, Out::new(&raw mut state)));
            assert_eq!(state, 3);
            let (mut buckets, mut found) = ([0; 8], 0);
            let (numbers, count) = (Out::new(buckets.as_mut_ptr()), Out::new(&raw mut found));
            ok(spw_spec_get_rolled_back(shared(self.spec), numbers, 8, count));
            assert_eq!(found as u32, outcome.rolled_back);
            assert!(outcome.verdict != COMMIT || found == 0);
        }
        outcome
    }
}

/// The serial rule: wait for the norm, then step. Returns this rank's numbers.
fn serial(options: &spw_adam_options, max_norm: f64, buckets: &mut Buckets, remote: f64) -> spw_step_stats {
    let mut local = spw_step_stats { struct_size: 16, nonfinite: 0, sum_squares: 0.0 };
    for bucket in buckets.iter() {
        let seen = adam(options, &mut bucket.clone());
        local.sum_squares += seen.sum_squares;
        local.nonfinite |= seen.nonfinite;
    }
    if local.nonfinite == 0 && remote.is_finite() {
        let norm = (local.sum_squares + remote).sqrt();
        let clip = if max_norm > 0.0 { (max_norm / (norm + 1e-6)).min(1.0) } else { 1.0 };
        let options = spw_adam_options { grad_scale: options.grad_scale * clip, ..*options };
        for bucket in buckets.iter_mut() {
            adam(&options, bucket);
        }
    }
    local
}
