//! Proves that speculation changes no bit: random rounds through the C functions end with the parameters, states, 16-bit
//! copies and sums of "wait for the norm of all buckets, then step once", for every order of arrival, rate of clipping,
//! number of threads, way of publishing and place of an overflow.

use std::ffi::c_void;
use std::ptr;

use spillway::capi::adam::{spw_adam_options, spw_adam_options_init, spw_adam_step};
use spillway::capi::spec_bucket::{spw_spec_ready, spw_spec_submit, spw_spec_wait};
use spillway::capi::spec_verdict::{
    spw_spec_finish, spw_spec_local_result, spw_spec_outcome, spw_spec_resolve, spw_spec_withdrawn,
};
use spillway::capi::speculate::{
    spw_spec, spw_spec_begin_adam, spw_spec_close, spw_spec_open, spw_spec_options, spw_spec_stats,
    spw_spec_stats_get,
};
use spillway::capi::status::spw_status;
use spillway::capi::tensor::{spw_step_stats, spw_tensor};
use spillway::capi::threads::{spw_thread_options, spw_threads_configure};

const RUNS: u64 = 1000;
const STEPS: u64 = 20;
const F32: u32 = 1;
const BF16: u32 = 3;
const COMMIT: u32 = 0;
const SKIP: u32 = 1;

fn ok(status: spw_status) {
    assert_eq!(status, spw_status::SPW_OK, "{}", last_error());
}

fn last_error() -> String {
    // SAFETY: the message is a C string that lives until the next error of this thread.
    unsafe { std::ffi::CStr::from_ptr(spillway::capi::status::spw_last_error()) }
        .to_string_lossy()
        .into_owned()
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    fn below(&mut self, end: u64) -> usize {
        (self.next() % end) as usize
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.next() % 100 < percent
    }

    /// From -1 to 1.
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / 8_388_608.0 - 1.0
    }
}

fn bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

#[derive(Clone)]
struct Tensor {
    param: Vec<f32>,
    exp_avg: Vec<f32>,
    exp_avg_sq: Vec<f32>,
    copy: Vec<u16>,
    grad: Vec<f32>,
    grad_half: Vec<u16>,
    half: bool,
    /// Where steps write instead, for an engine that undoes by shadows: param, exp_avg, exp_avg_sq.
    shadow: Option<[Vec<f32>; 3]>,
}

impl Tensor {
    fn random(random: &mut Random, length: usize) -> Tensor {
        let param: Vec<f32> = (0..length).map(|_| random.unit()).collect();
        Tensor {
            copy: param.iter().map(|value| bf16(*value)).collect(),
            param,
            exp_avg: vec![0.0; length],
            exp_avg_sq: vec![0.0; length],
            grad: vec![0.0; length],
            grad_half: vec![0; length],
            half: random.chance(50),
            shadow: None,
        }
    }

    /// After a step that stood the shadow is the state.
    fn flip(&mut self) {
        if let Some([param, exp_avg, exp_avg_sq]) = &mut self.shadow {
            std::mem::swap(&mut self.param, param);
            std::mem::swap(&mut self.exp_avg, exp_avg);
            std::mem::swap(&mut self.exp_avg_sq, exp_avg_sq);
        }
    }

    fn raw(&mut self) -> spw_tensor {
        let shadow = |at: usize, of: &mut Option<[Vec<f32>; 3]>| -> *mut c_void {
            of.as_mut().map_or(ptr::null_mut(), |spans| spans[at].as_mut_ptr().cast())
        };
        let grad: *const c_void =
            if self.half { self.grad_half.as_ptr().cast() } else { self.grad.as_ptr().cast() };
        spw_tensor {
            struct_size: size_of::<spw_tensor>() as u32,
            param_dtype: F32,
            state_dtype: F32,
            grad_dtype: if self.half { BF16 } else { F32 },
            copy_dtype: BF16,
            reserved: 0,
            n: self.param.len() as u64,
            param: self.param.as_mut_ptr().cast(),
            grad,
            exp_avg: self.exp_avg.as_mut_ptr().cast(),
            exp_avg_sq: self.exp_avg_sq.as_mut_ptr().cast(),
            param_copy: self.copy.as_mut_ptr().cast(),
            options: ptr::null(),
            shadow_param: shadow(0, &mut self.shadow),
            shadow_exp_avg: shadow(1, &mut self.shadow),
            shadow_exp_avg_sq: shadow(2, &mut self.shadow),
        }
    }

    fn fill_grad(&mut self, random: &mut Random, size: f32) {
        for (grad, half) in self.grad.iter_mut().zip(&mut self.grad_half) {
            *grad = random.unit() * size;
            *half = bf16(*grad);
        }
    }

    fn overflow(&mut self, random: &mut Random) {
        let at = random.below(self.grad.len() as u64);
        self.grad[at] = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN][random.below(3)];
        self.grad_half[at] = [0x7f80, 0xff80, 0x7fc1][random.below(3)];
    }

    fn same(&self, other: &Tensor) -> bool {
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<u32>>();
        bits(&self.param) == bits(&other.param)
            && bits(&self.exp_avg) == bits(&other.exp_avg)
            && bits(&self.exp_avg_sq) == bits(&other.exp_avg_sq)
            && self.copy == other.copy
    }
}

type Buckets = Vec<Vec<Tensor>>;

fn table(bucket: &mut [Tensor]) -> Vec<spw_tensor> {
    bucket.iter_mut().map(Tensor::raw).collect()
}

fn adam(options: &spw_adam_options, bucket: &mut [Tensor]) -> spw_step_stats {
    let tensors = table(bucket);
    let mut stats = spw_step_stats { struct_size: 16, nonfinite: 0, sum_squares: 0.0 };
    // SAFETY: the tensors are this test's own.
    ok(unsafe { spw_adam_step(options, tensors.as_ptr(), tensors.len(), &mut stats) });
    stats
}

/// Wait for the norm, then step. Returns this rank's numbers.
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

/// The spans behind the tensors lie still and belong to the engine until the bucket is final.
struct Sent<T>(T);
// SAFETY: each bucket is submitted by one thread, and the engine is made for several.
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
            // Some are large enough to be spread over the pool.
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
        let undo_mode = 1 + random.below(2) as u32;
        let options = spw_spec_options { struct_size: 16, buckets, undo_mode, publish };
        let twin = mine.clone();
        for tensor in mine.iter_mut().flatten().filter(|_| undo_mode == 2) {
            let n = tensor.param.len();
            tensor.shadow = Some([vec![9.0; n], vec![9.0; n], vec![9.0; n]]);
        }
        let mut spec = ptr::null_mut();
        // SAFETY: both point to what they should.
        ok(unsafe { spw_spec_open(&options, &mut spec) });
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
        let mut stats = spw_spec_stats { struct_size: 88, ..zeros() };
        // SAFETY: the engine is open, and closed once.
        unsafe {
            ok(spw_spec_stats_get(self.spec, &mut stats));
            ok(spw_spec_close(self.spec));
        }
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
            ok(spw_spec_begin_adam(*spec.get(), options, max_norm));
            let (spec, tables) = (&spec, &tables);
            std::thread::scope(|scope| {
                for part in order.chunks(order.len().div_ceil(threads)) {
                    scope.spawn(move || {
                        for bucket in part {
                            let tensors = &tables.get()[*bucket as usize];
                            let (first, count) = (tensors.as_ptr(), tensors.len());
                            ok(spw_spec_submit(*spec.get(), *bucket, first, count, ptr::null()));
                        }
                    });
                }
            });
            ok(spw_spec_local_result(self.spec, -1, &mut local));
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
            ok(spw_spec_resolve(self.spec, &global, &mut outcome));
            ok(spw_spec_wait(self.spec, self.random.below(u64::from(count)) as u32, -1));
            ok(spw_spec_finish(self.spec, -1));
            let mut state = 0;
            ok(spw_spec_ready(self.spec, 0, &mut state));
            assert_eq!(state, 3);
            let (mut withdrawn, mut found) = ([0; 8], 0);
            ok(spw_spec_withdrawn(self.spec, withdrawn.as_mut_ptr(), withdrawn.len(), &mut found));
            assert_eq!(found as u32, outcome.withdrawn);
            assert!(outcome.verdict != COMMIT || found == 0);
        }
        outcome
    }
}

fn adam_defaults() -> spw_adam_options {
    let mut options = zeros();
    // SAFETY: the struct has the size that is passed.
    ok(unsafe { spw_adam_options_init(&mut options, size_of::<spw_adam_options>()) });
    options
}

fn zeros<T: Copy>() -> T {
    // SAFETY: used for structs of the C face only, for which all bytes zero are a valid value.
    unsafe { std::mem::zeroed() }
}

#[test]
fn every_run_ends_with_the_bits_of_waiting_for_the_norm() {
    let mut total = [0; 5];
    for seed in 0..RUNS {
        // The pool belongs to the process: a new number of workers every 50 runs.
        if seed % 50 == 0 {
            let options = spw_thread_options { struct_size: 8, num_threads: 1 + (seed / 50 % 4) as u32 };
            // SAFETY: the options live through the call.
            ok(unsafe { spw_threads_configure(&options) });
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

/// Norms of buckets' gradients, a line per step, in the order in which backward gave them: recorded from a training
/// run (its head says which).
const RECORDED: &str = include_str!("bench/gradient_norms.txt");

fn stats_of(spec: *mut spw_spec) -> spw_spec_stats {
    let mut stats = spw_spec_stats { struct_size: 88, ..zeros() };
    // SAFETY: the engine is open.
    ok(unsafe { spw_spec_stats_get(spec, &mut stats) });
    stats
}

/// What became of the buckets of a recorded run whose gradients are clipped to `max_norm`. Each bucket is done before the
/// next one comes, unless `burst`: then all come at once.
fn replay(norms: &[Vec<f32>], max_norm: f64, burst: bool) -> spw_spec_stats {
    let buckets = norms[0].len();
    let options = spw_spec_options { struct_size: 16, buckets: buckets as u32, undo_mode: 1, publish: 1 };
    let mut spec = ptr::null_mut();
    let mut random = Random(1);
    // One element whose gradient is the norm.
    let mut model: Vec<Tensor> = (0..buckets).map(|_| Tensor::random(&mut random, 1)).collect();
    let mut options_of_step = adam_defaults();
    // SAFETY: the spans live, unmoved and untouched, until `spw_spec_finish` returned.
    unsafe {
        ok(spw_spec_open(&options, &mut spec));
        let mut sent = 0;
        for step in norms {
            ok(spw_spec_begin_adam(spec, &options_of_step, max_norm));
            for (bucket, norm) in step.iter().enumerate() {
                (model[bucket].grad[0], model[bucket].half) = (*norm, false);
                ok(spw_spec_submit(spec, bucket as u32, &model[bucket].raw(), 1, ptr::null()));
                sent += 1;
                let done = |stats: spw_spec_stats| stats.buckets_speculated + stats.buckets_spared == sent;
                while !burst && !done(stats_of(spec)) {
                    std::thread::yield_now();
                }
            }
            let mut local = spw_step_stats { struct_size: 16, nonfinite: 0, sum_squares: 0.0 };
            ok(spw_spec_local_result(spec, -1, &mut local));
            ok(spw_spec_resolve(spec, &local, ptr::null_mut()));
            ok(spw_spec_finish(spec, -1));
            options_of_step.step += 1;
        }
        let stats = stats_of(spec);
        ok(spw_spec_close(spec));
        stats
    }
}

#[test]
fn the_early_decision_spares_most_of_what_would_be_taken_back() {
    let lines = RECORDED.lines().filter(|line| !line.starts_with('#'));
    let number = |text: &str| text.parse().expect("norms are numbers");
    let norms: Vec<Vec<f32>> = lines.map(|line| line.split(' ').map(number).collect()).collect();
    let norm = |step: &[f32]| step.iter().map(|norm| f64::from(*norm).powi(2)).sum::<f64>().sqrt();
    println!("max_norm  steps  clipped  bucket steps taken back: naive  spillway");
    for max_norm in [2.0, 1.0, 0.5, 0.25] {
        let clipped: Vec<&Vec<f32>> = norms.iter().filter(|step| norm(step) + 1e-6 > max_norm).collect();
        let naive: usize = clipped.iter().map(|step| step.len()).sum();
        // Up to and with the bucket that brings the sum past the limit.
        let until =
            |step: &&Vec<f32>| (1..).find(|n| norm(&step[..*n]) + 1e-6 > max_norm).expect("all of them do");
        let expected: usize = clipped.iter().map(until).sum();
        let stats = replay(&norms, max_norm, false);
        println!(
            "{max_norm:8}  {:5}  {:7}  {naive:30}  {:8}",
            norms.len(),
            stats.redos,
            stats.buckets_redone
        );
        assert_eq!((stats.redos as usize, stats.buckets_redone as usize), (clipped.len(), expected));
        assert_eq!(stats.buckets_committed as usize + naive, norms.len() * norms[0].len());
        assert_eq!(replay(&norms, max_norm, true).redos, stats.redos);
    }
}
