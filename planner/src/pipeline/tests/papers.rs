//! Figures of SysX: Equations 1 to 4, Figures 1, 2, 5, 7 and 8, section 5.6.
#![forbid(unsafe_code)]

use super::super::closed;
use super::super::graph::{Kind, NONE, Operation};
use super::super::memory::Category;
use super::*;

const AFAB: Schedule = Schedule::AllForwardAllBackward;
const ONE_ONE: Schedule = Schedule::OneForwardOneBackward;
const SYSX: Schedule = Schedule::Decoupled;

fn near(left: f64, right: f64) -> bool {
    (left - right).abs() < 1e-9
}

/// Start and end of all passes of a device, in order, as (letter, stage, micro-batch, start, end).
fn timeline(plan: &Plan, device: u32) -> Vec<(char, u32, u32, f64, f64)> {
    let of = |o: &Operation| {
        let letter = if o.kind == Kind::Forward { 'f' } else { 'b' };
        (letter, o.first_unit / o.units, o.micro_batch, o.start, o.end)
    };
    let kept = |o: &&Operation| o.device == device && matches!(o.kind, Kind::Forward | Kind::Backward);
    plan.operations.iter().filter(kept).map(of).collect()
}

/// Figure 1, Equations 1 to 3: 3 of 7 steps are bubbles, in GPipe and in DAPPLE.
#[test]
fn figure_1_gpipe_and_dapple_have_the_ratio_of_equation_3() {
    for schedule in [AFAB, ONE_ONE] {
        let shape = shape(schedule, 4, 4, 4, 1);
        let plan = planned(&shape, passes(1.0, 2.0));
        assert!(near(plan.summary.passes_seconds, 21.0), "{schedule:?}: {:?}", plan.summary);
        assert!(near(plan.summary.passes_bubble_ratio, 3.0 / 7.0));
        let closed = closed::passes(&shape, 1.0, 2.0).unwrap();
        assert!(near(closed.bubble_seconds, 9.0) && near(closed.passes_seconds, 21.0));
        assert!(near(closed.bubble_ratio(), 3.0 / 7.0));
    }
}

/// Section 2.1: DAPPLE keeps the activations of N_g micro-batches, GPipe those of N_m.
#[test]
fn dapple_keeps_fewer_activations_than_gpipe() {
    let peak = |schedule, micro_batches| {
        let shape = Shape { recompute: false, ..shape(schedule, 4, micro_batches, 4, 1) };
        let unit = Unit { activation_bytes: 10, ..passes(1.0, 2.0) };
        planned(&shape, unit).summary.devices[0].peaks[Category::Activations as usize]
    };
    assert_eq!((peak(AFAB, 12), peak(ONE_ONE, 12)), (120, 40));
    assert_eq!((peak(AFAB, 3), peak(ONE_ONE, 3)), (30, 30));
}

/// Figure 5: two devices, two stages, two micro-batches, T_b = 2 T_f.
#[test]
fn figure_5_the_three_timelines() {
    let a = planned(&shape(AFAB, 2, 2, 2, 1), passes(1.0, 2.0));
    assert!(near(a.summary.passes_seconds, 9.0) && near(a.summary.passes_bubble_ratio, 3.0 / 9.0));
    let b = planned(&shape(SYSX, 2, 2, 2, 1), passes(1.0, 2.0));
    assert!(near(b.summary.passes_seconds, 8.0) && near(b.summary.passes_bubble_ratio, 2.0 / 8.0));
    let c = planned(&shape(SYSX, 2, 2, 2, 2), passes(0.5, 1.0));
    assert!(near(c.summary.passes_seconds, 7.0) && near(c.summary.passes_bubble_ratio, 1.0 / 7.0));
    assert_eq!(
        timeline(&a, 0),
        [('f', 0, 0, 0., 1.), ('f', 0, 1, 1., 2.), ('b', 0, 0, 5., 7.), ('b', 0, 1, 7., 9.)]
    );
    // b_1 is on device 0, and begins when its forward passes end.
    assert_eq!(
        timeline(&b, 0),
        [('f', 0, 0, 0., 1.), ('f', 0, 1, 1., 2.), ('b', 1, 0, 2., 4.), ('b', 1, 1, 4., 6.)]
    );
    // b_1,0 is unit 2, and begins at t_3 on device 1.
    assert_eq!(
        timeline(&c, 1)[2..],
        [('b', 2, 0, 3., 4.), ('b', 2, 1, 4., 5.), ('b', 0, 0, 5., 6.), ('b', 0, 1, 6., 7.)]
    );
}

/// Section 3.1: Figure 5(c) sends as many checkpoints as Figure 5(b), and needs half the parameters per stage.
#[test]
fn fine_grained_stages_send_no_more_checkpoints_and_hold_half_the_parameters() {
    let unit = Unit { param_bytes: 100, grad_bytes: 100, input_bytes: 8, ..passes(0.5, 1.0) };
    let whole = Unit { param_bytes: 200, grad_bytes: 200, input_bytes: 8, ..passes(1.0, 2.0) };
    let (b, c) = (planned(&shape(SYSX, 2, 2, 2, 1), whole), planned(&shape(SYSX, 2, 2, 2, 2), unit));
    let sent = |plan: &Plan| {
        plan.operations
            .iter()
            .filter(|o| o.kind == Kind::SendCheckpoint)
            .map(|o| (o.first_unit, o.device))
            .collect()
    };
    let (mut of_b, mut of_c): (Vec<_>, Vec<_>) = (sent(&b), sent(&c));
    of_b.sort_unstable();
    of_c.sort_unstable();
    assert_eq!(of_b, [(0, 0), (0, 0), (1, 1), (1, 1)]);
    // c_0,0 and c_1,1.
    assert_eq!(of_c, [(0, 0), (0, 0), (3, 1), (3, 1)]);
    let gradients = |plan: &Plan| plan.summary.devices[0].peaks[Category::Gradients as usize];
    assert_eq!((gradients(&b), gradients(&c)), (200, 100));
}

/// Equation 4 and Figure 8: the backward stages of a device, in their order.
#[test]
fn figure_8_assigns_the_backward_stages_of_the_caption() {
    let plan = planned(&shape(SYSX, 4, 4, 8, 2), passes(0.5, 1.0));
    let mut stages: Vec<u32> =
        timeline(&plan, 0).iter().filter(|pass| pass.0 == 'b').map(|pass| pass.1).collect();
    stages.dedup();
    // S_7,1, S_5,1, S_3,1 and S_1,1.
    assert_eq!(stages, [15, 11, 7, 3]);
}

/// A unit is half a forward stage. It is fetched in 1 and offloaded in 1, if a forward pass of a stage takes 1; its
/// optimizer step takes 2.
const FIGURES_2_AND_8: Unit = Unit {
    forward: 0.5,
    backward: 1.0,
    recompute: 0.0,
    fetch: 1.0,
    offload: 1.0,
    optimizer: 2.0,
    param_bytes: 0,
    grad_bytes: 0,
    activation_bytes: 0,
    input_bytes: 0,
};

/// Figures 2 and 8: 47 % and 25 % are bubbles of the whole iteration, from the first fetch to the last optimizer step.
/// The bubbles of the passes alone are 27 % and 11 %.
#[test]
fn figures_2_and_8_have_the_papers_ratios_in_the_accounting_of_the_iteration() {
    let mobius = planned(&shape(AFAB, 4, 4, 8, 2), FIGURES_2_AND_8);
    let sysx = planned(&shape(SYSX, 4, 4, 8, 2), FIGURES_2_AND_8);
    assert!(near(mobius.summary.passes_seconds, 33.0) && near(mobius.summary.iteration_seconds, 45.0));
    assert!(near(sysx.summary.passes_seconds, 27.0) && near(sysx.summary.iteration_seconds, 32.0));
    assert_eq!((mobius.summary.iteration_bubble_ratio * 100.0).round(), 47.0);
    assert!(near(sysx.summary.iteration_bubble_ratio, 0.25));
    assert!(near(mobius.summary.passes_bubble_ratio, 9.0 / 33.0));
    assert!(near(sysx.summary.passes_bubble_ratio, 3.0 / 27.0));
}

/// If fetch and offload of a unit take equally long, the printed percentages leave a small range of costs, in which one pair
/// is whole: 1 and 2. Without transfers, no optimizer step gives both percentages.
#[test]
fn the_costs_behind_figures_2_and_8_are_known_within_a_small_range() {
    let prints_both = |transfer: f64, optimizer: f64| {
        let unit = Unit { fetch: transfer, offload: transfer, optimizer, ..FIGURES_2_AND_8 };
        let ratio = |schedule| planned(&shape(schedule, 4, 4, 8, 2), unit).summary.iteration_bubble_ratio;
        (ratio(AFAB) * 100.0).round() == 47.0 && (ratio(SYSX) * 100.0).round() == 25.0
    };
    let grid = (0..=40).flat_map(|t| (0..=120).map(move |o| (f64::from(t) / 20.0, f64::from(o) / 20.0)));
    let found: Vec<(f64, f64)> =
        grid.filter(|(transfer, optimizer)| prints_both(*transfer, *optimizer)).collect();
    let near = |pair: &(f64, f64)| (0.8..1.15).contains(&pair.0) && (1.8..2.4).contains(&pair.1);
    assert!(found.len() > 10 && found.iter().all(near), "{found:?}");
    let whole: Vec<_> = found.iter().filter(|pair| pair.0.fract() == 0.0 && pair.1.fract() == 0.0).collect();
    assert_eq!(whole, [&(1.0, 2.0)]);
}

/// Figure 7, in the setting of Figure 5(c): an optimizer of one backward stage is as long as its backward passes. The
/// synchronous optimizers begin at t_3 = 7, the asynchronous ones with their own gradients; only the last is exposed.
#[test]
fn figure_7_asynchronous_optimizers_are_hidden_but_for_the_last() {
    let unit = Unit { optimizer: 2.0, ..passes(0.5, 1.0) };
    let synchronous = Shape { async_optimizer: false, ..shape(SYSX, 2, 2, 2, 2) };
    let a = planned(&synchronous, unit);
    let b = planned(&shape(SYSX, 2, 2, 2, 2), unit);
    let begins = |plan: &Plan| {
        let mut found: Vec<f64> =
            plan.operations.iter().filter(|o| o.kind == Kind::Optimize).map(|o| o.start).collect();
        found.sort_by(f64::total_cmp);
        found
    };
    assert_eq!(begins(&a), [7.0, 7.0, 9.0, 9.0]);
    assert_eq!(begins(&b), [4.0, 5.0, 6.0, 7.0]);
    assert!(near(a.summary.exposed_seconds, 4.0) && near(b.summary.exposed_seconds, 2.0));
}

/// Figure 6: an early checkpoint hides its transfer; a late one is on the critical path.
#[test]
fn figure_6_early_checkpoints_hide_their_transfer() {
    let slow = |early| {
        let shape = Shape { early_checkpoints: early, latency: 0.25, ..shape(SYSX, 2, 4, 2, 2) };
        planned(&shape, Unit { input_bytes: 8, ..passes(0.5, 1.0) }).summary.passes_seconds
    };
    assert!(slow(true) < slow(false), "{} {}", slow(true), slow(false));
}

/// Section 2.3: Megatron's interleaved schedule has the bubble time of one chunk's passes.
#[test]
fn interleaved_one_forward_one_backward_divides_the_bubble_by_the_chunks() {
    for (micro_batches, chunks) in [(4, 2), (8, 2), (16, 3), (12, 4)] {
        let shape = shape(ONE_ONE, 4, micro_batches, 4 * chunks, 1);
        let plan = planned(&shape, passes(1.0, 2.0));
        let bubbles = plan.summary.passes_seconds - plan.summary.devices[0].busy;
        assert!(near(bubbles, 9.0), "{micro_batches} {chunks}: {bubbles}");
    }
}

#[test]
fn the_next_parameters_are_fetched_while_the_present_ones_compute() {
    let plan = planned(&shape(SYSX, 4, 4, 8, 2), FIGURES_2_AND_8);
    let first: Vec<&Operation> =
        plan.operations.iter().filter(|o| o.device == 0 && o.kind == Kind::Fetch).collect();
    assert_eq!(first.iter().map(|o| o.start).collect::<Vec<_>>(), [0.0, 2.0, 6.0, 10.0, 14.0, 18.0]);
    assert!(first.iter().all(|o| o.micro_batch == NONE && o.peer == NONE));
    // One slot hides nothing.
    let one = planned(&Shape { slots: 1, ..shape(SYSX, 4, 4, 8, 2) }, FIGURES_2_AND_8);
    assert!(one.summary.passes_seconds > plan.summary.passes_seconds);
    // With a slot for each set, each is fetched once, and the last forward stage is not fetched again.
    let all = planned(&Shape { slots: 99, ..shape(AFAB, 4, 4, 8, 2) }, FIGURES_2_AND_8);
    assert_eq!(all.summary.counts[Kind::Fetch as usize], 8);
    let two = planned(&shape(AFAB, 4, 4, 12, 2), FIGURES_2_AND_8);
    assert_eq!(two.summary.counts[Kind::Fetch as usize], 12 + 4);
}

#[test]
fn shapes_that_cannot_be_are_errors_that_name_the_field() {
    let good = shape(SYSX, 4, 4, 8, 2);
    for (bad, name) in [
        (Shape { devices: 0, ..good }, "devices"),
        (Shape { devices: u32::MAX, ..good }, "devices"),
        (Shape { micro_batches: 0, ..good }, "micro_batches"),
        (Shape { stages: 0, ..good }, "stages"),
        (Shape { split: 0, ..good }, "split"),
        (Shape { slots: 0, ..good }, "slots"),
        (Shape { stages: u32::MAX, split: u32::MAX, micro_batches: u32::MAX, ..good }, "stages"),
        (Shape { recompute: false, ..good }, "recompute"),
        (Shape { latency: -1.0, ..good }, "latency"),
        (Shape { seconds_per_byte: f64::NAN, ..good }, "seconds_per_byte"),
        (shape(ONE_ONE, 4, 4, 6, 1), "stages"),
        (shape(ONE_ONE, 4, 6, 8, 1), "micro_batches"),
    ] {
        let refused = plan(&bad, &[passes(1.0, 1.0)]).unwrap_err().to_string();
        assert!(refused.starts_with(name), "{refused}");
    }
    assert!(plan(&good, &[]).is_err() && plan(&good, &[passes(1.0, 1.0); 15]).is_err());
    let refused = plan(&good, &[Unit { fetch: f64::INFINITY, ..Unit::default() }]).unwrap_err().to_string();
    assert!(refused.starts_with("units[0].fetch"), "{refused}");
    assert!(plan(&good, &[Unit { param_bytes: 1 << 40, ..Unit::default() }]).is_err());
}

#[test]
fn a_picture_has_every_operation_that_takes_time() {
    let plan = planned(&shape(SYSX, 4, 4, 8, 2), FIGURES_2_AND_8);
    let text = super::super::svg::draw(&plan, 900).unwrap();
    let drawn = text.matches("<title>").count();
    let expected = plan.operations.iter().filter(|o| o.seconds > 0.0).count();
    assert_eq!(drawn, expected);
    assert!(text.contains("b 7,1, micro-batch 0: 10 to 11") && text.ends_with("</svg>\n"), "{text}");
    assert!(super::super::svg::draw(&plan, 0).is_err());
}

/// A recomputation begins before its gradient arrives, which the closed form does not cover.
#[test]
fn no_closed_form_is_given_for_recomputations_that_take_time() {
    let shape = shape(ONE_ONE, 2, 1, 2, 1);
    let unit = Unit { recompute: 3.0, ..passes(1.0, 2.0) };
    let plan = planned(&shape, unit);
    assert!(near(plan.summary.passes_seconds, 9.0), "{:?}", plan.summary);
    assert_eq!(plan.closed, None);
    let closed = planned(&Shape { recompute: false, ..shape }, unit).closed.unwrap();
    assert!(near(closed.passes_seconds, 6.0));
}

/// Each time is finite, but their sums are not. The smallest and zero times give a picture with finite numbers.
#[test]
fn times_beyond_a_double_are_refused_and_tiny_ones_are_drawn() {
    let shape = shape(AFAB, 2, 2, 2, 1);
    let refused = plan(&shape, &[passes(1e308, 1e308)]).unwrap_err().to_string();
    assert!(refused.starts_with("units: the times"), "{refused}");
    assert!(plan(&shape, &[passes(1e307, 1e307)]).is_ok());
    for seconds in [0.0, 5e-324, 1e307] {
        let text = super::super::svg::draw(&planned(&shape, passes(seconds, seconds)), 900).unwrap();
        assert!(!text.contains("=\"inf") && !text.contains("=\"NaN"), "{text}");
    }
}
