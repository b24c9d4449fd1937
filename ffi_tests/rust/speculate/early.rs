//! Proves, on recorded norms, that the early decision avoids most of the rollbacks of plain speculation.

use std::ptr;

use spillway::capi::optim::spw_step_stats;
use spillway::capi::speculate::spw_spec_submit;
use spillway::capi::speculate::{
    spw_spec_begin_adam, spw_spec_close, spw_spec_open, spw_spec_options, spw_spec_stats,
};
use spillway::capi::speculate::{spw_spec_finish, spw_spec_local_result, spw_spec_resolve};
use spillway::capi::{In, Out};

use crate::model::{Random, Tensor, adam_defaults, ok, shared, stats_of};

/// Norms of buckets' gradients, one line per step, in the order of the backward pass. They were recorded from a
/// training run, which the head of the file names.
const RECORDED: &str = include_str!("../../bench/gradient_norms.txt");

#[test]
fn the_early_decision_spares_most_of_what_would_be_taken_back() {
    let lines = RECORDED.lines().filter(|line| !line.starts_with('#'));
    let number = |text: &str| text.parse().expect("norms are numbers");
    let norms: Vec<Vec<f32>> = lines.map(|line| line.split(' ').map(number).collect()).collect();
    let norm = |step: &[f32]| step.iter().map(|norm| f64::from(*norm).powi(2)).sum::<f64>().sqrt();
    println!("max_norm  steps  clipped  bucket steps taken back: naive  spillway");
    for max_norm in [2.0, 1.0, 0.5, 0.25] {
        let clipped = norms.iter().filter(|step| norm(step) + 1e-6 > max_norm);
        let (clipped, naive) = (clipped.clone().count(), clipped.map(Vec::len).sum::<usize>());
        // The buckets up to the one whose gradient takes the sum past the limit, inclusive.
        let until =
            |step: &[f32]| (1..).find(|n| norm(&step[..*n]) + 1e-6 > max_norm).expect("it is clipped");
        // After two clipped steps in a row none is taken early until one is not clipped.
        let (mut in_vain, mut redone, mut committed) = (0, 0, 0);
        for step in &norms {
            let (early, is_clipped) = (in_vain < 2, norm(step) + 1e-6 > max_norm);
            redone += if early && is_clipped { until(step) } else { 0 };
            committed += if early && !is_clipped { step.len() } else { 0 };
            in_vain = if is_clipped { in_vain + 1 } else { 0 };
        }
        let stats = replay(&norms, max_norm, false);
        println!(
            "{max_norm:8}  {:5}  {:7}  {naive:30}  {:8}",
            norms.len(),
            stats.redos,
            stats.buckets_redone
        );
        assert_eq!((stats.redos as usize, stats.buckets_redone as usize), (clipped, redone));
        assert_eq!(stats.buckets_committed as usize, committed);
        assert_eq!(replay(&norms, max_norm, true).redos, stats.redos);
    }
}

/// Replays a recorded run whose gradients are clipped to `max_norm`, and returns the counts of its buckets. Each bucket
/// finishes before the next one arrives, unless `burst`: then all arrive at once.
fn replay(norms: &[Vec<f32>], max_norm: f64, burst: bool) -> spw_spec_stats {
    let buckets = norms[0].len();
    let options = spw_spec_options { struct_size: 16, buckets: buckets as u32, undo_mode: 0, publish: 1 };
    let mut spec = ptr::null_mut();
    let mut random = Random(1);
    // One element per bucket; its gradient is the norm.
    let mut model: Vec<Tensor> = (0..buckets).map(|_| Tensor::random(&mut random, 1)).collect();
    let mut options_of_step = adam_defaults();
    // SAFETY: the spans live, unmoved and untouched, until `spw_spec_finish` returned.
    unsafe {
        ok(spw_spec_open(In::new(&options), Out::new(&mut spec)));
        let mut sent = 0;
        for step in norms {
            ok(spw_spec_begin_adam(shared(spec), In::new(&options_of_step), max_norm));
            for (bucket, norm) in step.iter().enumerate() {
                (model[bucket].grad[0], model[bucket].half) = (*norm, false);
                let (tensor, none) = (model[bucket].raw(), In::new(ptr::null()));
                ok(spw_spec_submit(shared(spec), bucket as u32, In::new(&tensor), 1, none));
                sent += 1;
                let done = |stats: spw_spec_stats| stats.buckets_speculated + stats.buckets_spared == sent;
                while !burst && !done(stats_of(spec)) {
                    std::thread::yield_now();
                }
            }
            let mut local = spw_step_stats { struct_size: 16, nonfinite: 0, sum_squares: 0.0 };
            ok(spw_spec_local_result(shared(spec), -1, Out::new(&mut local)));
            ok(spw_spec_resolve(shared(spec), In::new(&local), Out::new(ptr::null_mut())));
            ok(spw_spec_finish(shared(spec), -1));
            options_of_step.step += 1;
        }
        let stats = stats_of(spec);
        ok(spw_spec_close(Some(Box::from_raw(spec))));
        stats
    }
}
