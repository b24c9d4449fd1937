//! States with bf16 moments have the bits of the same states in memory, on 8 or 6 bytes per parameter.
#![forbid(unsafe_code)]

use super::*;
use crate::kernel::{AdamRule, CHUNK};
use crate::offload::swap::adam::{Part, Parts};
use crate::tier::ExtentPlacement;

#[test]
fn a_run_with_bf16_moments_has_the_bits_of_a_run_in_memory() {
    for (usual, buffers, bytes) in
        [(BF16, 3, 8), (BF16, 6, 8), (BF16, 100, 8), (BF16_SPLIT, 4, 6), (BF16_SPLIT, 100, 6)]
    {
        let tier = tier_in(vec![PathLocation::Memory(None), PathLocation::Memory(None)], Mode::Create);
        let mut swap = Swap::open(Arc::clone(&tier), &options_of(usual, buffers)).unwrap();
        swap.fill(first_state).unwrap();
        let (mut weights, parameters) = (split::copies(&in_memory(&SIZES, 0).0), SIZES.iter().sum::<u64>());
        for step in 1..=STEPS {
            let from = weights.clone();
            step_with(&mut swap, &from, |subgroup, state| {
                weights[subgroup] = adam_step(subgroup, step, state)?;
                Ok(())
            })
            .unwrap();
        }
        let (expected, published) = in_memory_with(Moments::Bf16, &SIZES, STEPS);
        assert_eq!(weights, published);
        let found = everything_with(&mut swap, |subgroup| Some(&published[subgroup]));
        assert!(same_bits(&found, &expected), "{usual:?}, {buffers} buffers");
        swap.commit(STEPS, b"").unwrap();
        let stored: u64 = tier.extents().iter().flat_map(|extent| &extent.streams).sum();
        let table = 300 * SIZES.len() as u64;
        assert!((bytes * parameters..bytes * parameters + table).contains(&stored), "{stored}");
        let pages = 4 * 4096 * SIZES.len() as u64;
        assert!(swap.budget().state_bytes < bytes * parameters + pages, "{:?}", swap.budget());
    }
}

#[test]
fn a_tier_with_moments_of_another_type_is_refused_with_both_names_and_left_as_it_was() {
    for (usual, other, names) in [
        (BF16, Encoding::FULL, ["ask for f32", "stored with bf16"]),
        (Encoding::SPLIT, BF16, ["ask for bf16", "stored with f32"]),
    ] {
        let tier = tier_in(vec![PathLocation::Memory(None), PathLocation::Memory(None)], Mode::Create);
        let open = |usual| Swap::open(Arc::clone(&tier), &options_of(usual, 4));
        drop(open(other).unwrap());
        let mut swap = open(usual).unwrap();
        swap.fill(first_state).unwrap();
        swap.commit(1, b"").unwrap();
        drop(swap);
        let before = tier.extents().len();
        let error = open(other).unwrap_err().to_string();
        assert!(names.iter().all(|name| error.contains(name)), "{error}");
        assert_eq!(tier.extents().len(), before);
        assert!(open(usual).unwrap().filled().unwrap());
    }
}

/// What an import of states with the other moments leaves: the newest ones count, and the next commit removes the others.
#[test]
fn the_newest_moments_count() {
    let tier = tier_in(vec![PathLocation::Memory(None), PathLocation::Memory(None)], Mode::Create);
    let open = |usual| Swap::open(Arc::clone(&tier), &options_of(usual, 4));
    for (step, usual) in [(1, BF16), (2, Encoding::FULL), (3, BF16)] {
        // The states of an import are put by their names.
        for (number, elements) in SIZES.iter().enumerate() {
            let sizes = encoding::streams(usual, *elements);
            let extent = tier.define(&usual.extent(number), &sizes).unwrap();
            let memory = sizes.iter().map(|bytes| Buffer::open(*bytes as usize, Default::default()));
            let memory: Vec<Buffer> = memory.collect::<Result<_>>().unwrap();
            let spans: Vec<_> = memory
                .iter()
                .zip(&sizes)
                .map(|(memory, bytes)| memory.transfer(0, *bytes as usize))
                .collect();
            let ticket = tier.write(extent, &spans, &ExtentPlacement::On(0), None).unwrap();
            tier.wait(ticket, None).unwrap();
        }
        tier.commit(step, b"").unwrap();
        let other = Encoding { moments: usual.moments.other(), ..usual };
        assert!(open(other).is_err());
        let mut swap = open(usual).unwrap();
        assert!(swap.filled().unwrap());
        swap.commit(step, b"").unwrap();
        drop(swap);
        let stored = tier.extents().into_iter().filter(|extent| extent.generation > 0);
        assert!(stored.map(|extent| extent.name).eq((0..SIZES.len()).map(|number| usual.extent(number))));
    }
}

/// One part from this element of a parameter on, on a subgroup of its own.
fn stepped(rule: AdamRule, numbers: &[(u64, usize)]) -> Everything {
    let elements = numbers.iter().map(|(_, elements)| elements).sum::<usize>();
    let tier = tier_in(vec![PathLocation::Memory(None)], Mode::Create);
    let usual = SwapOptions { usual: BF16, ..options(&[elements as u64], 1 << 26) };
    let mut swap = Swap::open(tier, &usual).unwrap();
    swap.fill(first_state).unwrap();
    let (grad, mut parts, mut first) = (grads(0, 1, elements), Parts::new(1).unwrap(), 0);
    for (number, elements) in numbers {
        let grad = Floats::Bf16(&grad[first..][..*elements]);
        parts.push(0, Part { first, grad, copy: None, weights: None, rule, number: *number });
        first += elements;
    }
    swap.adam_step(parts, false, &mut |_, _| Ok(())).unwrap();
    everything(&mut swap)
}

#[test]
fn random_bits_are_those_of_the_element_in_its_parameter() {
    let options = AdamOptions { stochastic_seed: Some(3), ..Default::default() };
    let rule = options.rule().unwrap();
    let edge = 1 << 32;
    for (numbers, cut) in [
        (vec![(0, CHUNK + 5000)], vec![(0, 777), (777, CHUNK - 700), (CHUNK as u64 + 77, 4923)]),
        (vec![(edge - 100, 5000)], vec![(edge - 100, 100), (edge, 4900)]),
        (vec![(edge - CHUNK as u64, 2 * CHUNK)], vec![(edge - CHUNK as u64, CHUNK), (edge, CHUNK)]),
        (vec![(3 * edge - 1, 3)], vec![(3 * edge - 1, 1), (3 * edge, 1), (3 * edge + 1, 1)]),
    ] {
        assert!(same_bits(&stepped(rule, &numbers), &stepped(rule, &cut)), "{numbers:?}");
    }
    assert!(!same_bits(&stepped(rule, &[(edge, 5000)]), &stepped(rule, &[(0, 5000)])));
    let grad = [bf16::ONE];
    let part = Part { first: 0, grad: Floats::Bf16(&grad), copy: None, weights: None, rule, number: 0 };
    part.check(Moments::Bf16).unwrap();
    assert!(part.check(Moments::F32).unwrap_err().to_string().contains("stochastic rounding"));
}
