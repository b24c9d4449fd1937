//! States with narrow moments have the bits of the same states in memory, on 4 to 8 bytes per parameter.
#![forbid(unsafe_code)]

use super::*;
use crate::kernel::{AdamRule, CHUNK};
use crate::offload::swap::adam::{Part, Parts};
use crate::tier::ExtentPlacement;

#[test]
fn a_run_with_narrow_moments_has_the_bits_of_a_run_in_memory() {
    for (usual, buffers, bytes) in [
        (BF16, 3, 128),
        (BF16, 6, 128),
        (BF16, 100, 128),
        (BF16_SPLIT, 4, 96),
        (BF16_SPLIT, 100, 96),
        (CODES, 3, 98),
        (CODES, 100, 98),
        (CODES_SPLIT, 4, 66),
        (CODES_SPLIT, 100, 66),
    ] {
        // Sixteenths of a byte for each parameter.
        let of_parameters = |parameters: u64| (bytes * parameters).div_ceil(16);
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
        let (expected, published) = in_memory_with(usual.moments, &SIZES, STEPS);
        assert_eq!(weights, published);
        let found = everything_with(&mut swap, |subgroup| Some(&published[subgroup]));
        assert!(same_bits(&found, &expected), "{usual:?}, {buffers} buffers");
        swap.commit(STEPS, b"").unwrap();
        let stored: u64 = tier.extents().iter().flat_map(|extent| &extent.streams).sum();
        let table = 300 * SIZES.len() as u64;
        assert!((of_parameters(parameters)..of_parameters(parameters) + table).contains(&stored), "{stored}");
        let pages = 4 * 4096 * SIZES.len() as u64;
        assert!(swap.budget().state_bytes < of_parameters(parameters) + pages, "{:?}", swap.budget());
    }
}

#[test]
fn a_tier_with_states_of_another_type_is_refused_with_names_and_left_as_it_was() {
    for (usual, other, names) in [
        (BF16, Encoding::FULL, ["ask for f32", "stored with bf16"]),
        (Encoding::SPLIT, BF16, ["ask for bf16", "stored with f32"]),
        (CODES, BF16, ["ask for bf16", "stored with 8-bit"]),
        (BF16, CODES_SPLIT, ["ask for 8-bit", "stored with bf16"]),
        (LOW, Encoding::FULL, ["stored with low bits of master", "open it with low bits of master"]),
        (LOW, Encoding::SPLIT, ["subgroup 0 is stored with", "low bits of master"]),
        (Encoding::FULL, LOW, ["stored with full master", "open it with full master"]),
        (Encoding::SPLIT, LOW, ["stored with split master", "open it with split master"]),
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
    for (step, usual) in [(1, BF16), (2, Encoding::FULL), (3, BF16), (4, CODES), (5, Encoding::FULL)] {
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
        for moments in Moments::ALL.into_iter().filter(|moments| *moments != usual.moments) {
            assert!(open(Encoding { moments, ..usual }).is_err());
        }
        let mut swap = open(usual).unwrap();
        assert!(swap.filled().unwrap());
        swap.commit(step, b"").unwrap();
        drop(swap);
        let stored = tier.extents().into_iter().filter(|extent| extent.generation > 0);
        assert!(stored.map(|extent| extent.name).eq((0..SIZES.len()).map(|number| usual.extent(number))));
    }
}

/// One part from this element of a parameter on, on a subgroup of its own.
fn stepped(usual: Encoding, rule: AdamRule, numbers: &[(u64, usize)]) -> Everything {
    let elements = numbers.iter().map(|(_, elements)| elements).sum::<usize>();
    let tier = tier_in(vec![PathLocation::Memory(None)], Mode::Create);
    let usual = SwapOptions { usual, ..options(&[elements as u64], 1 << 26) };
    let mut swap = Swap::open(tier, &usual).unwrap();
    swap.fill(first_state).unwrap();
    let (grad, mut parts, mut first) = (grads(0, 1, elements), Parts::new(1).unwrap(), 0);
    for (number, elements) in numbers {
        let grad = Floats::Bf16(&grad[first..][..*elements]);
        let part = Part { first, grad, copy: None, weights: None, sums: None, rule, number: *number };
        part.check(usual.usual).unwrap();
        parts.push(0, part);
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
        assert!(same_bits(&stepped(BF16, rule, &numbers), &stepped(BF16, rule, &cut)), "{numbers:?}");
    }
    for (numbers, cut) in [
        (vec![(0, CHUNK + 5000)], vec![(0, 96), (96, CHUNK - 64), (CHUNK as u64 + 32, 4968)]),
        (vec![(edge - 128, 5000)], vec![(edge - 128, 128), (edge, 4872)]),
    ] {
        assert!(same_bits(&stepped(CODES, rule, &numbers), &stepped(CODES, rule, &cut)), "{numbers:?}");
    }
    for usual in [BF16, CODES] {
        let [one, other] = [edge, 0].map(|number| stepped(usual, rule, &[(number, 5000)]));
        assert!(!same_bits(&one, &other));
    }
    let grad = [bf16::ONE];
    let part =
        Part { first: 0, grad: Floats::Bf16(&grad), copy: None, weights: None, sums: None, rule, number: 0 };
    part.check(BF16).unwrap();
    assert!(part.check(Encoding::FULL).unwrap_err().to_string().contains("stochastic rounding"));
}

/// Blocks without a part keep their codes, and a part that begins within a block is refused.
#[test]
fn parts_of_codes_begin_with_a_block() {
    let rule = AdamOptions::default().rule().unwrap();
    let tier = tier_in(vec![PathLocation::Memory(None)], Mode::Create);
    let mut swap = Swap::open(tier, &SwapOptions { usual: CODES, ..options(&[400], 1 << 20) }).unwrap();
    swap.fill(|subgroup, mut state| {
        first_state(
            subgroup,
            SubgroupState {
                param: &mut *state.param,
                low: &mut [],
                exp_avg: state.exp_avg.reborrow(),
                exp_avg_sq: state.exp_avg_sq.reborrow(),
            },
        )?;
        fill(state.exp_avg, 0.25);
        Ok(())
    })
    .unwrap();
    let before = everything(&mut swap);
    let grad = grads(0, 1, 400);
    let part = |first: usize, elements: usize| {
        let grad = Floats::Bf16(&grad[first..][..elements]);
        Part { first, grad, copy: None, weights: None, sums: None, rule, number: 0 }
    };
    let mut parts = Parts::new(1).unwrap();
    for (first, elements) in [(32, 5), (64, 1), (96, 33), (160, 32), (192, 64), (288, 112)] {
        part(first, elements).check(CODES).unwrap();
        parts.push(0, part(first, elements));
    }
    swap.adam_step(parts, false, &mut |_, _| Ok(())).unwrap();
    let after = everything(&mut swap);
    for element in 0..400 {
        let stepped = matches!(element, 32..37 | 64 | 96..129 | 160..256 | 288..);
        // The last block of a part is its own: a new scale changes what other codes of the block stand for.
        let shares_block = matches!(element, 37..96 | 129..160);
        for stream in 0..if shares_block { 1 } else { 2 } {
            let [old, new] = [&before, &after].map(|all| all[0][stream][element].to_bits());
            assert_eq!(old != new, stepped, "element {element}, stream {stream}");
        }
    }
    for first in [1, 16, 33] {
        let error = part(first, 5).check(CODES).unwrap_err().to_string();
        assert!(error.contains("multiple of 32"), "{error}");
        part(first, 5).check(BF16).unwrap();
    }
}
