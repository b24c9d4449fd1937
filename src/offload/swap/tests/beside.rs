//! Updates beside the caller have the bits of updates in memory, for every order of arrival and every verdict. Errors, and
//! a crash at any request.
#![forbid(unsafe_code)]

use super::*;
use crate::error::{RoundKind, Rounds};
use crate::io::sim::{Crash, Journal};
use crate::offload::speculate::Verdict;
use crate::offload::swap::adam::Part;
use crate::offload::swap::beside::{Beside, BesideOptions};
use crate::offload::swap::extents;
use crate::sys::promise::{Outcome, promise};
use crate::tier::Health;
use crate::tier::options::Durability;

const FINAL: BesideOptions = BesideOptions { speculative: false, squares: true, restores: true };
const SPECULATIVE: BesideOptions = BesideOptions { speculative: true, squares: true, restores: true };

/// The error of a call that the state of the update does not allow.
fn not_now(kind: RoundKind) -> Error {
    Rounds::Update.error(kind)
}

/// States in memory that take the steps of a [`Beside`], and their 16-bit copies.
struct Reference {
    moments: Moments,
    states: Everything,
    steps: u64,
}

fn rule(moments: Moments, step: u64) -> crate::kernel::AdamRule {
    let stochastic_seed = (moments == Moments::Bf16).then_some(7);
    AdamOptions { step, weight_decay: 0.01, stochastic_seed, ..Default::default() }.rule().unwrap()
}

impl Reference {
    fn new(sizes: &[u64]) -> Reference {
        Reference { moments: Moments::F32, states: in_memory(sizes, 0).0, steps: 0 }
    }

    /// One step of all subgroups with this factor on the gradients.
    fn step(&mut self, factor: f32) {
        use crate::kernel::Arithmetic;
        self.steps += 1;
        for (subgroup, state) in self.states.iter_mut().enumerate() {
            with(self.moments, state, |SubgroupState { param, exp_avg, exp_avg_sq, .. }| {
                let grad = grads(subgroup, self.steps, param.len());
                let (param, grad) = (FloatsMut::F32(param), Floats::Bf16(&grad));
                let tensor = adam::tensor_of(param, [exp_avg, exp_avg_sq], grad, None).unwrap();
                let optimizer = rule(self.moments, self.steps).with_grad_scale(factor);
                optim::step(&mut [Job { optimizer, tensor }], false).unwrap();
            });
        }
    }
}

/// Lends memory until the process ends.
fn lent<T>(values: Vec<T>) -> &'static mut [T] {
    values.leak()
}

/// The gradients of a step for one subgroup, and with split masters the weights of the step before. With narrow moments and
/// full masters there are two parts, whose elements have the random bits of one.
fn part(usual: Encoding, subgroup: usize, step: u64, before: &[f32]) -> Vec<Part<'static>> {
    let split = usual.master == Master::Split;
    let weights = || before.iter().map(|x| bf16::from_f32(*x)).collect::<Vec<_>>();
    let part = Part {
        first: 0,
        grad: Floats::Bf16(lent(grads(subgroup, step, before.len()))),
        copy: split.then(|| FloatsMut::Bf16(lent(vec![bf16::ZERO; before.len()]))),
        weights: split.then(|| Floats::Bf16(lent(weights()))),
        sums: None,
        rule: rule(usual.moments, step),
        number: 0,
    };
    part.check(usual).unwrap();
    match (before.len(), part.grad) {
        (0, _) => Vec::new(),
        (2.., Floats::Bf16(grad)) if !split && usual.moments != Moments::F32 => {
            let cut = grad.len() / 3;
            let cut = if usual.moments == Moments::Codes { cut - cut % BLOCK } else { cut };
            let (left, right) = grad.split_at(cut);
            let other = Part { grad: Floats::Bf16(left), copy: None, sums: None, ..part };
            let first = left.len();
            vec![other, Part { first, grad: Floats::Bf16(right), copy: None, number: first as u64, ..part }]
        }
        _ => vec![part],
    }
}

/// Begins an update, and submits the subgroups in random order.
fn submit_all(beside: &Beside, options: BesideOptions, random: &mut fastrand::Rng, reference: &Reference) {
    beside.begin(options).unwrap();
    let mut order: Vec<usize> = (0..beside.layout().len()).collect();
    random.shuffle(&mut order);
    for subgroup in order {
        let before = &reference.states[subgroup][0];
        let parts = part(beside.layout().usual(), subgroup, reference.steps + 1, before);
        beside.submit(subgroup, parts).unwrap();
        if random.u32(..3) == 0 {
            std::thread::sleep(Duration::from_micros(300));
        }
    }
}

fn open_on(tier: Arc<Tier>, sizes: &[u64], usual: Encoding, buffers: u64) -> Beside {
    let plan = budget::plan(sizes, usual, 2, 1 << 30).unwrap();
    let masters = if usual.master == Master::Split { 3 * plan.master_bytes } else { 0 };
    let options = SwapOptions { usual, ..options(sizes, buffers * plan.buffer_bytes + masters) };
    let beside = Beside::new(Swap::open(tier, &options).unwrap());
    beside.at_rest(|swap| if swap.filled()? { Ok(()) } else { swap.fill(first_state) }).unwrap();
    beside
}

fn check(beside: &Beside, reference: &Reference, message: &str) {
    let copies = split::copies(&reference.states);
    let found = beside.at_rest(|swap| Ok(everything_with(swap, |subgroup| Some(&copies[subgroup])))).unwrap();
    assert!(same_bits(&found, &reference.states), "{message}");
}

fn two_disks(faults: [Faults; 2]) -> (TierOptions, [Disk; 2]) {
    let disks = [Disk::default(), Disk::default()];
    (on_disks(&disks, faults), disks)
}

/// Two disks of a tier that is filled, committed and closed, and the number of requests of the second one so far. It varies,
/// because a fill divides the subgroups by the speed of the disks.
fn filled_disks() -> ([Disk; 2], u64) {
    let (options, disks) = two_disks(Default::default());
    let filled = open_on(Arc::new(Tier::open(options).unwrap()), &SIZES, Encoding::FULL, 3);
    filled.at_rest(|swap| swap.commit(0, b"")).unwrap();
    drop(filled);
    let requests = disks[1].requests();
    (disks, requests)
}

fn reorder(seed: u64) -> [Faults; 2] {
    [seed, seed + 1].map(|seed| Faults { seed, reorder: true, ..Faults::default() })
}

#[test]
fn every_order_of_arrival_and_every_verdict_has_the_bits_of_steps_in_memory() {
    for (usual, buffers) in [
        (Encoding::FULL, 3),
        (Encoding::FULL, 5),
        (Encoding::FULL, 100),
        (Encoding::SPLIT, 4),
        (Encoding::SPLIT, 100),
        (BF16, 3),
        (BF16, 6),
        (BF16_SPLIT, 4),
        (BF16_SPLIT, 7),
        (CODES, 3),
        (CODES, 6),
        (CODES_SPLIT, 5),
    ] {
        let mut random = fastrand::Rng::with_seed(buffers);
        let beside =
            open_on(Arc::new(Tier::open(two_disks(reorder(buffers)).0).unwrap()), &SIZES, usual, buffers);
        let mut reference = Reference { moments: usual.moments, ..Reference::new(&SIZES) };
        for turn in 0..16 {
            let options = if turn % 4 == 3 { FINAL } else { SPECULATIVE };
            submit_all(&beside, options, &mut random, &reference);
            if turn % 2 == 0 {
                std::thread::sleep(Duration::from_millis(random.u64(..30)));
            }
            let verdict = match (options == SPECULATIVE, random.u32(..3)) {
                (false, _) | (true, 0) => Verdict::Commit,
                (true, 1) => Verdict::Skip,
                (true, _) => Verdict::Redo(0.25),
            };
            if options == SPECULATIVE {
                assert!(beside.finish(None).is_err_and(|error| error == not_now(RoundKind::Open)));
                let early = beside.next_published(Some(Duration::ZERO));
                assert!(matches!(early, Err(Error::Timeout(_))), "{early:?}");
                beside.verdict(verdict).unwrap();
            }
            let twice = beside.verdict(verdict);
            assert_eq!(twice, Err(not_now(RoundKind::Resolved)));
            if turn % 3 != 0 {
                let mut published: Vec<_> =
                    std::iter::from_fn(|| beside.next_published(None).unwrap()).collect();
                published.sort_unstable();
                let all = if verdict == Verdict::Skip { 0 } else { SIZES.len() };
                assert_eq!(published, (0..all).collect::<Vec<_>>());
            }
            let stats = beside.finish(None).unwrap();
            match verdict {
                Verdict::Commit => reference.step(1.0),
                Verdict::Redo(factor) => reference.step(factor),
                Verdict::Skip => {}
            }
            assert!(verdict == Verdict::Skip || stats.sum_squares > 0.0);
            if turn % 3 == 1 {
                check(
                    &beside,
                    &reference,
                    &format!("{usual:?}, {buffers} buffers, turn {turn}, {verdict:?}"),
                );
            }
            if turn % 5 == 2 {
                beside.at_rest(|swap| swap.commit(reference.steps, b"")).unwrap();
            }
        }
        check(&beside, &reference, &format!("{usual:?}, {buffers} buffers"));
    }
}

#[test]
fn the_statistics_and_hits_are_those_of_a_blocking_update() {
    let tier = || Arc::new(Tier::open(two_disks(reorder(3)).0).unwrap());
    let [beside, blocking] = [(); 2].map(|()| open_on(tier(), &SIZES, Encoding::FULL, 6));
    let (mut random, mut reference) = (fastrand::Rng::with_seed(4), Reference::new(&SIZES));
    for _ in 0..4 {
        submit_all(&beside, FINAL, &mut random, &reference);
        let seen = beside.finish(None).unwrap();
        let mut parts = crate::offload::swap::adam::Parts::new(SIZES.len()).unwrap();
        for (subgroup, [param, ..]) in reference.states.iter().enumerate() {
            let of_subgroup = part(Encoding::FULL, subgroup, reference.steps + 1, param);
            of_subgroup.into_iter().for_each(|part| parts.push(subgroup, part));
        }
        let expected = blocking.at_rest(|swap| swap.adam_step(parts, true, &mut |_, _| Ok(()))).unwrap();
        assert_eq!(seen, expected);
        reference.step(1.0);
    }
    check(&blocking, &reference, "blocking");
    check(&beside, &reference, "beside");
    let [beside, blocking] = [beside, blocking].map(|one| one.stats().pipeline);
    assert!(beside.hits > 0 && beside == blocking, "{beside:?}, {blocking:?}");
}

/// What another caller committed or rolled back would be of two steps.
#[test]
fn only_the_update_commits_and_rolls_back_what_it_changed() {
    let tier = tier_in(vec![PathLocation::Memory(None)], Mode::Create);
    let beside = open_on(Arc::clone(&tier), &SIZES, Encoding::FULL, 4);
    let reference = Reference::new(&SIZES);
    let refused = |refused: fn(&Error) -> bool| {
        for outcome in [tier.commit(9, b""), tier.rollback()] {
            assert!(outcome.as_ref().is_err_and(refused), "{outcome:?}");
        }
    };
    let open = |error: &Error| *error == not_now(RoundKind::Open);
    let changed = |error: &Error| matches!(error, Error::Busy(_));
    refused(changed);
    beside.at_rest(|swap| swap.commit(0, b"")).unwrap();
    tier.commit(1, b"").and_then(|()| tier.rollback()).unwrap();
    for options in [FINAL, SPECULATIVE] {
        beside.begin(options).unwrap();
        beside.submit(0, part(Encoding::FULL, 0, 1, &reference.states[0][0])).unwrap();
        refused(open);
        beside.rollback().unwrap();
        tier.rollback().unwrap();
    }
    beside.begin(SPECULATIVE).unwrap();
    beside.verdict(Verdict::Skip).and_then(|()| beside.finish(None)).unwrap();
    refused(changed);
    drop(beside);
    assert!(matches!(tier.commit(2, b""), Err(Error::Busy(_))));
    // The next update would commit what this one left.
    for _ in 0..2 {
        let error = UpdateClaim::new(&tier).unwrap_err().to_string();
        assert!(error.contains("roll the tier back first"), "{error}");
    }
    tier.rollback().and_then(|()| tier.commit(2, b"")).unwrap();
    check(&open_on(tier, &SIZES, Encoding::FULL, 4), &reference, "after all");
}

#[test]
fn calls_that_an_update_does_not_allow_change_nothing() {
    let beside = open_on(tier_in(vec![PathLocation::Memory(None)], Mode::Create), &SIZES, Encoding::FULL, 4);
    let mut reference = Reference::new(&SIZES);
    beside.at_rest(|swap| swap.commit(0, b"")).unwrap();
    let is = |outcome: Result<()>, expected: RoundKind| {
        assert_eq!(outcome, Err(not_now(expected)));
    };
    let of = |subgroup: usize| part(Encoding::FULL, subgroup, 1, &reference.states[subgroup][0]);
    is(beside.submit(0, of(0)), RoundKind::NotBegun);
    is(beside.verdict(Verdict::Commit), RoundKind::NotBegun);
    is(beside.finish(None).map(drop), RoundKind::NotBegun);
    beside.begin(SPECULATIVE).unwrap();
    is(beside.begin(SPECULATIVE), RoundKind::Open);
    is(beside.at_rest(|swap| swap.commit(1, b"")), RoundKind::Open);
    beside.submit(1, of(1)).unwrap();
    is(beside.submit(1, of(1)), RoundKind::Submitted(1));
    is(beside.finish(None).map(drop), RoundKind::Missing(0));
    assert!(matches!(beside.submit(9, Vec::new()), Err(Error::InvalidArgument { .. })));
    (0..9)
        .filter(|subgroup| *subgroup != 1)
        .for_each(|subgroup| beside.submit(subgroup, of(subgroup)).unwrap());
    is(beside.finish(None).map(drop), RoundKind::Open);
    beside.verdict(Verdict::Commit).unwrap();
    beside.finish(None).unwrap();
    reference.step(1.0);
    check(&beside, &reference, "after refusals");
    // A skip needs no submits, and an update that is abandoned leads back to the commit.
    beside.begin(SPECULATIVE).unwrap();
    beside.verdict(Verdict::Skip).unwrap();
    is(beside.submit(0, Vec::new()), RoundKind::Resolved);
    beside.finish(None).unwrap();
    check(&beside, &reference, "after a skip");
    beside.begin(FINAL).unwrap();
    let waited = beside.submit(4, Vec::new()).and_then(|()| beside.rollback());
    waited.unwrap();
    check(&beside, &Reference::new(&SIZES), "after a rollback");
    // A drop ends an update that is open.
    beside.begin(FINAL).unwrap();
    drop(beside);
}

/// An update does not end while a disk does not answer a read, although all gradients are there.
#[test]
fn a_finish_that_times_out_leaves_the_update_open() {
    let mut random = fastrand::Rng::with_seed(1);
    // `hang`: number of the request of the second disk that hangs, counted from the open of a filled tier.
    let mut run = |hang: Option<u64>| {
        let (disks, before) = filled_disks();
        let hang_nth = hang.map(|number| before + number);
        let options = on_disks(&disks, [Faults::default(), Faults { hang_nth, ..Faults::default() }]);
        let beside = open_on(Arc::new(Tier::open(options).unwrap()), &SIZES, Encoding::FULL, 3);
        let (opened, mut reference) = (disks[1].requests() - before, Reference::new(&SIZES));
        submit_all(&beside, FINAL, &mut random, &reference);
        let first = beside.finish(hang.map(|_| Duration::from_millis(100)));
        disks[1].release();
        let timed_out = matches!(first, Err(Error::Timeout(_)));
        assert!(timed_out || first.is_ok(), "{first:?}");
        if timed_out {
            beside.finish(None).unwrap();
        }
        reference.step(1.0);
        check(&beside, &reference, &format!("{hang:?}"));
        (opened, timed_out)
    };
    let (opened, _) = run(None);
    // A write that hangs does not keep the update from its end.
    assert!((0..8).any(|number| run(Some(opened + 7 * number)).1), "no read hung");
}

/// Each request fails in its turn: the update ends with the error, or a write goes to the other disk. After a rollback
/// the state is that of the commit, and the steps lead to the same bits.
#[test]
fn an_error_of_any_request_ends_the_update_and_a_rollback_leads_on() {
    // `fails`: number of the request of the second disk that fails, counted from the open of a filled tier.
    let run = |fails: Option<u64>| {
        let (disks, before) = filled_disks();
        let fail_nth = fails.map(|number| (before + number, libc::EIO));
        let options = on_disks(&disks, [Faults::default(), Faults { fail_nth, ..Faults::default() }]);
        let beside = open_on(Arc::new(Tier::open(options).unwrap()), &SIZES, Encoding::FULL, 4);
        let (mut random, mut reference) = (fastrand::Rng::with_seed(1), Reference::new(&SIZES));
        let opened = disks[1].requests() - before;
        let (mut errors, verdicts) =
            (0, [Verdict::Commit, Verdict::Redo(0.5), Verdict::Skip, Verdict::Commit]);
        for (number, verdict) in verdicts.into_iter().enumerate() {
            loop {
                let outcome = beside.begin(SPECULATIVE).and_then(|()| {
                    for subgroup in 0..SIZES.len() {
                        let parts = part(
                            Encoding::FULL,
                            subgroup,
                            reference.steps + 1,
                            &reference.states[subgroup][0],
                        );
                        beside.submit(subgroup, parts)?;
                    }
                    std::thread::sleep(Duration::from_millis(random.u64(..3)));
                    beside.verdict(verdict)?;
                    Ok(())
                });
                let finished = beside.finish(None);
                let committed = outcome
                    .and(finished.map(drop))
                    .and_then(|()| beside.at_rest(|swap| swap.commit(number as u64 + 1, b"")));
                let Err(error) = committed else { break };
                errors += 1;
                assert!(errors < 10, "{fails:?}: {error}");
                if !matches!(error, Error::Round(_)) {
                    let refused = beside.begin(FINAL);
                    assert!(refused.is_ok() || matches!(refused, Err(Error::Busy(_))), "{refused:?}");
                }
                beside.rollback().unwrap();
            }
            match verdict {
                Verdict::Commit => reference.step(1.0),
                Verdict::Redo(factor) => reference.step(factor),
                Verdict::Skip => {}
            }
        }
        let ended = disks[1].requests() - before;
        check(&beside, &reference, &format!("request {fails:?}"));
        (opened..ended, errors)
    };
    // The number of requests varies with the moment of a verdict, and the final check must not fail.
    let requests = run(None).0;
    let half = requests.start..requests.start + (requests.end - requests.start) / 2;
    // The first request after the open is a read.
    let errors: u32 = half.step_by(29).map(|number| run(Some(number)).1).sum();
    assert!(errors > 0, "no read failed");
}

/// Updates with any verdict run beside commits. A rollback finds the last commit, which it waits for, and so does an open.
#[test]
fn commits_beside_updates_hold_the_states_of_their_call() {
    for (seed, usual, buffers) in [
        (1, Encoding::FULL, 3),
        (2, Encoding::FULL, 6),
        (3, Encoding::SPLIT, 4),
        (4, BF16, 4),
        (5, CODES, 4),
        (6, CODES_SPLIT, 4),
    ] {
        let mut random = fastrand::Rng::with_seed(seed);
        let (options, disks) = two_disks(reorder(seed));
        let beside = open_on(Arc::new(Tier::open(options).unwrap()), &SIZES, usual, buffers);
        let mut reference = Reference { moments: usual.moments, ..Reference::new(&SIZES) };
        let mut outcomes = vec![beside.commit(0, b"").unwrap()];
        let mut committed = (reference.states.clone(), reference.steps);
        for number in 1..30 {
            let verdict = random.choice([Verdict::Commit, Verdict::Redo(0.5), Verdict::Skip]).unwrap();
            submit_all(&beside, SPECULATIVE, &mut random, &reference);
            beside.verdict(verdict).unwrap();
            beside.finish(None).unwrap();
            match verdict {
                Verdict::Commit => reference.step(1.0),
                Verdict::Redo(factor) => reference.step(factor),
                Verdict::Skip => {}
            }
            if random.bool() {
                outcomes.push(beside.commit(number, b"").unwrap());
                committed = (reference.states.clone(), reference.steps);
            }
            if random.u32(..5) == 0 {
                beside.begin(SPECULATIVE).unwrap();
                beside.rollback().unwrap();
                (reference.states, reference.steps) = committed.clone();
                check(&beside, &reference, &format!("seed {seed}, rolled back after {number}"));
            }
        }
        outcomes.iter().for_each(|outcome| outcome.wait(None).unwrap());
        drop(beside);
        let tier = Arc::new(Tier::open(on_disks(&disks, reorder(seed))).unwrap());
        reference.states = committed.0;
        check(&open_on(tier, &SIZES, usual, buffers), &reference, &format!("seed {seed}, opened again"));
    }
}

/// A device that fails a request of the commit: the outcome has the error, and the states are as they were.
#[test]
fn a_commit_that_fails_leaves_the_states_uncommitted() {
    let (options, _disks) = two_disks(Default::default());
    let tier = Arc::new(Tier::open(options).unwrap());
    let beside = open_on(Arc::clone(&tier), &SIZES, Encoding::FULL, 3);
    beside.at_rest(|swap| swap.commit(0, b"")).unwrap();
    let (mut random, mut reference) = (fastrand::Rng::with_seed(1), Reference::new(&SIZES));
    submit_all(&beside, FINAL, &mut random, &reference);
    beside.finish(None).unwrap();
    reference.step(1.0);
    // No path takes a superblock.
    [0, 1].into_iter().for_each(|path| tier.set_health(path, Health::Failed, "a test").unwrap());
    assert!(beside.commit(1, b"").and_then(|commit| commit.wait(None)).is_err());
    assert!(matches!(tier.commit(1, b""), Err(Error::Busy(_))), "the states are the update's");
    [0, 1].into_iter().for_each(|path| tier.set_health(path, Health::Healthy, "").unwrap());
    if beside.at_rest(|swap| swap.ready()).is_err() {
        // The subgroups in memory could not be written.
        beside.rollback().unwrap();
        reference = Reference::new(&SIZES);
    }
    check(&beside, &reference, "after the commit that failed");
    beside.commit(2, b"").unwrap().wait(None).unwrap();
    tier.commit(3, b"").unwrap();
}

/// At the limit of threads a commit beside the caller fails, and says why. The states in memory are still those of the
/// last step, and a commit that needs no thread stores them.
#[test]
fn a_commit_that_gets_no_thread_fails_alone_and_says_so() {
    let (options, _disks) = two_disks(Default::default());
    let beside = open_on(Arc::new(Tier::open(options).unwrap()), &SIZES, Encoding::FULL, 3);
    let reference = Reference::new(&SIZES);
    let (kept, outcome) = promise("the commit");
    beside
        .at_rest(|swap| {
            let begun = swap.claim.begin_commit(b"", &extents::all(&swap.tier, SIZES.len()))?;
            crate::sys::threads::without_new_threads(|| swap.commit_beside(begun, 1, b"", kept))?;
            swap.ready()
        })
        .unwrap();
    let error = outcome.wait(None).unwrap_err();
    assert!(error.to_string().contains("starting the thread of a commit"), "{error}");
    check(&beside, &reference, "after the commit that got no thread");
    beside.at_rest(|swap| swap.commit(1, b"")).unwrap();
}

/// A power cut at any event of the disks: the tier opens at the last commit, or at the one in flight, and every subgroup
/// has the bits of that step.
#[test]
fn a_crash_at_any_request_leaves_one_whole_step() {
    [false, true].into_iter().for_each(crash_at_any_request);
}

/// `background`: each commit runs beside the next update.
fn crash_at_any_request(background: bool) {
    const SMALL: [u64; 5] = [5000, 1, 9000, 4096, 7000];
    let journal = Journal::default();
    let disks = [Disk::journaled(&journal, 0), Disk::journaled(&journal, 1)];
    let options = TierOptions { durability: Durability::Data, ..on_disks(&disks, reorder(7)) };
    let tier = Arc::new(Tier::open(options).unwrap());
    let beside = open_on(Arc::clone(&tier), &SMALL, Encoding::FULL, 3);
    let (mut random, mut reference) = (fastrand::Rng::with_seed(2), Reference::new(&SMALL));
    beside.at_rest(|swap| swap.commit(0, b"")).unwrap();
    // By committed number: events before and after the commit, and the states.
    let mut commits = vec![(0, journal.len(), reference.states.clone())];
    let mut open = None;
    let end = |open: &mut Option<(usize, Outcome<()>, Everything)>, commits: &mut Vec<_>| {
        if let Some((began, outcome, states)) = open.take() {
            outcome.wait(None).unwrap();
            commits.push((began, journal.len(), states));
        }
    };
    for (number, verdict) in
        (1..).zip([Verdict::Commit, Verdict::Redo(0.5), Verdict::Skip, Verdict::Commit, Verdict::Redo(0.25)])
    {
        submit_all(&beside, SPECULATIVE, &mut random, &reference);
        std::thread::sleep(Duration::from_millis(5));
        beside.verdict(verdict).unwrap();
        beside.finish(None).unwrap();
        match verdict {
            Verdict::Commit => reference.step(1.0),
            Verdict::Redo(factor) => reference.step(factor),
            Verdict::Skip => {}
        }
        if number != 2 {
            end(&mut open, &mut commits);
            open = Some((journal.len(), beside.commit(number, b"").unwrap(), reference.states.clone()));
            if !background {
                end(&mut open, &mut commits);
            }
        }
    }
    end(&mut open, &mut commits);
    drop((beside, tier));
    let steps = [0, 1, 3, 4, 5];
    for events in (commits[0].1..=journal.len()).step_by(3) {
        let (crash, seed) = [(Crash::Kept, 1), (Crash::Dropped, 1), (Crash::Torn, events as u64)][events % 3];
        let image = journal.image(2, events, crash, seed);
        let resumed = TierOptions { mode: Mode::Resume, ..on_disks(&image, reorder(1)) };
        let tier = Arc::new(Tier::open(resumed).unwrap());
        let found = steps.iter().position(|step| Some(*step) == tier.opened().step).unwrap();
        let (began, _, states) = &commits[found];
        let overdue = commits.get(found + 1).is_some_and(|(_, ended, _)| *ended <= events);
        assert!(*began <= events && !overdue, "{events} events, {crash:?}: found commit {found}");
        let beside = open_on(tier, &SMALL, Encoding::FULL, 3);
        let found = Reference { states: states.clone(), steps: 0, moments: Moments::F32 };
        check(&beside, &found, &format!("{events} events, {crash:?}"));
    }
}
