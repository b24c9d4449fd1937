//! State with a split master is bitwise equal to the whole form for a caller with the matching 16-bit copy. With any
//! other copy, it is refused.
#![forbid(unsafe_code)]

use super::*;
use crate::io::sim::{Crash, Disk, Faults, Journal};
use sampled::Sample;

/// The 16-bit weights of all subgroups.
pub(super) type Weights = Vec<Vec<bf16>>;

/// Subgroup 4 starts with masters that do not fit any exception table.
fn start(subgroup: usize, state: SubgroupState<'_>) -> Result<()> {
    let SubgroupState { param, exp_avg, exp_avg_sq, .. } = state;
    first_state(subgroup, SubgroupState { param: &mut *param, low: &mut [], exp_avg, exp_avg_sq })?;
    if subgroup == 4 {
        param.fill(f32::from_bits(0x3f81_8000));
    }
    Ok(())
}

fn split_options(buffers: u64) -> SwapOptions {
    options_of(Encoding::SPLIT, buffers)
}

fn memory_tier() -> Arc<Tier> {
    tier_in(vec![PathLocation::Memory(None), PathLocation::Memory(None)], Mode::Create)
}

/// The expected state after `steps` steps, and the 16-bit weights that belong to it.
fn expected(steps: u64) -> (Everything, Weights) {
    let mut all: Everything = SIZES.iter().map(|n| std::array::from_fn(|_| vec![0.0; *n as usize])).collect();
    let mut weights = Weights::new();
    for (subgroup, all) in all.iter_mut().enumerate() {
        with(Moments::F32, all, |state| start(subgroup, state)).unwrap();
        let mut copy = all[0].iter().map(|x| bf16::from_f32(*x)).collect();
        for step in 1..=steps {
            copy = with(Moments::F32, all, |state| adam_step(subgroup, step, state)).unwrap();
        }
        weights.push(copy);
    }
    (all, weights)
}

/// Runs one step from these weights, and returns the new weights.
fn advance(swap: &mut Swap, step: u64, from: &Weights) -> Result<Weights> {
    let mut published = vec![Vec::new(); SIZES.len()];
    step_with(swap, from, |subgroup, state| {
        published[subgroup] = adam_step(subgroup, step, state)?;
        Ok(())
    })?;
    Ok(published)
}

fn holds(swap: &mut Swap, steps: u64) -> bool {
    let (state, weights) = expected(steps);
    same_bits(&everything_with(swap, |subgroup| Some(&weights[subgroup])), &state)
}

#[test]
fn a_split_run_has_the_bits_of_a_run_in_memory() {
    for buffers in [3, 5, 7, 100] {
        let mut swap = Swap::open(memory_tier(), &split_options(buffers)).unwrap();
        swap.fill(start).unwrap();
        swap.commit(0, b"").unwrap();
        let mut weights = expected(0).1;
        for step in 1..=STEPS {
            assert!(holds(&mut swap, step - 1), "{buffers} buffers, step {step}");
            weights = advance(&mut swap, step, &weights).unwrap();
            assert_eq!(weights, expected(step).1);
            if step % 3 == 0 {
                swap.commit(step, b"").unwrap();
            }
        }
        assert!(holds(&mut swap, STEPS));
    }
}

#[test]
fn ten_bytes_are_stored_and_twelve_only_while_the_table_has_no_room() {
    let tier = memory_tier();
    let mut swap = Swap::open(Arc::clone(&tier), &split_options(3)).unwrap();
    swap.fill(start).unwrap();
    swap.commit(0, b"").unwrap();
    let stored = || -> Vec<(String, u64)> {
        let written = tier.extents().into_iter().filter(|extent| extent.generation > 0);
        written.map(|extent| (extent.name, extent.streams.iter().sum())).collect()
    };
    let whole: Vec<_> = stored().into_iter().filter(|(name, _)| !name.ends_with("-split")).collect();
    assert_eq!(whole, [("subgroup-000004".to_string(), 12 * SIZES[4])]);
    advance(&mut swap, 1, &expected(0).1).unwrap();
    swap.commit(1, b"").unwrap();
    assert!(stored().len() == SIZES.len() && stored().iter().all(|(name, _)| name.ends_with("-split")));
    let bytes: u64 = stored().iter().map(|(_, bytes)| bytes).sum();
    let parameters: u64 = SIZES.iter().sum();
    assert!(bytes < 10 * parameters + 300 * SIZES.len() as u64, "{bytes} for {parameters}");
}

/// A master that is an exception, different for each step.
fn ties(step: u64) -> f32 {
    f32::from_bits((0x3f81 + 2 * step as u32) << 16 | 0x8000)
}

pub(super) fn copies(all: &Everything) -> Weights {
    all.iter().map(|[param, ..]| param.iter().map(|x| bf16::from_f32(*x)).collect()).collect()
}

/// One step of a subgroup; every third (by subgroup and step) gets masters that cannot be split.
fn move_on(subgroup: usize, step: u64, state: SubgroupState<'_>) -> Result<()> {
    if (subgroup as u64 + step).is_multiple_of(3) {
        state.param.fill(ties(step));
        fill(state.exp_avg, step as f32);
        return Ok(());
    }
    adam_step(subgroup, step, state).map(drop)
}

/// Steps all subgroups in `swap`, and the same states in memory.
pub(super) fn all_move_on(swap: &mut Swap, now: &mut Everything, step: u64) {
    let from = copies(now);
    step_with(swap, &from, |subgroup, state| move_on(subgroup, step, state)).unwrap();
    let moments = swap.layout().usual().moments;
    for (subgroup, now) in now.iter_mut().enumerate() {
        with(moments, now, |state| move_on(subgroup, step, state)).unwrap();
    }
}

/// True if everything in `swap` equals the state in memory.
fn is_now(swap: &mut Swap, now: &Everything) -> bool {
    let from = copies(now);
    same_bits(&everything_with(swap, |subgroup| Some(&from[subgroup])), now)
}

/// Random sequences of calls, for budgets in which masters stay whole, are split, or must leave.
#[test]
fn steps_writes_commits_and_rollbacks_in_any_order_have_the_bits_of_memory() {
    let trainings = (1..=36).zip([3, 4, 5, 7, 9, 20].into_iter().cycle());
    for (seed, buffers) in Sample::new().of(9, trainings) {
        let usual = [Encoding::SPLIT, Encoding::SPLIT, BF16_SPLIT, BF16][seed % 4];
        let mut swap = Swap::open(memory_tier(), &options_of(usual, buffers)).unwrap();
        let mut random = fastrand::Rng::with_seed(seed as u64);
        let mut below = |limit: u64| random.u64(..limit);
        swap.fill(start).unwrap();
        swap.commit(0, b"").unwrap();
        let mut now = expected(0).0;
        let mut committed = now.clone();
        for step in 1..=20 {
            match below(8) {
                0..=2 => all_move_on(&mut swap, &mut now, step),
                3..=5 => {
                    let (subgroup, given) = (below(SIZES.len() as u64) as usize, below(7) + 1);
                    let elements = SIZES[subgroup] as usize;
                    let value = if below(2) == 0 { ties(step) } else { 0.1 * step as f32 };
                    let mut lent = Buffer::open(4 * elements, backing()).unwrap();
                    lent.floats().unwrap()[..elements].fill(value);
                    let streams = (0..STREAMS).filter(|stream| given >> stream & 1 == 1);
                    let mut from = [Span::empty(); STREAMS];
                    streams.for_each(|stream| {
                        from[stream] = lent.span().part(0, 4 * elements);
                        let rounds = stream > 0 && usual.moments == Moments::Bf16;
                        now[subgroup][stream].fill(if rounds {
                            bf16::from_f32(value).to_f32()
                        } else {
                            value
                        });
                    });
                    swap.write(subgroup, from).unwrap();
                }
                6 => {
                    swap.commit(step, b"").unwrap();
                    committed = now.clone();
                }
                _ => {
                    swap.rollback().unwrap();
                    now = committed.clone();
                }
            }
            assert!(is_now(&mut swap, &now), "seed {seed}, {usual:?}, {buffers} buffers, step {step}");
        }
    }
}

/// A master that cannot be split is read from a path whose turn must be waited for, while other transfers are in
/// flight.
#[test]
fn whole_masters_are_read_and_written_turn_by_turn() {
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm").unwrap()];
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let dirs = &dirs;
            scope.spawn(move || {
                let owner = Owner { rank, ..owner() };
                let mut tier = TierOptions::new(owner, dirs.iter().map(|dir| dir.path().to_path_buf()));
                tier.world = 2;
                tier.block_bytes = 16 << 10;
                tier.io.turns = TurnOptions::of(1);
                let options = SwapOptions { ratio: Some(vec![1.0, 3.0]), ..split_options(3 + rank as u64) };
                let mut swap = Swap::open(Arc::new(Tier::open(tier).unwrap()), &options).unwrap();
                let mut now = expected(0).0;
                swap.fill(start).unwrap();
                for step in 1..=30 {
                    all_move_on(&mut swap, &mut now, step);
                }
                assert!(is_now(&mut swap, &now), "rank {rank}");
            });
        }
    });
}

#[test]
fn weights_of_another_step_are_told_and_change_nothing() {
    let mut swap = Swap::open(memory_tier(), &split_options(4)).unwrap();
    swap.fill(start).unwrap();
    let first = advance(&mut swap, 1, &expected(0).1).unwrap();
    swap.commit(1, b"").unwrap();
    let second = advance(&mut swap, 2, &first).unwrap();
    swap.rollback().unwrap();
    let error = advance(&mut swap, 2, &second).unwrap_err().to_string();
    assert!(
        error.contains("subgroup") && error.contains("weights") && error.contains("same step"),
        "{error}"
    );
    swap.rollback().unwrap();
    let mut damaged = first.clone();
    damaged[7][33_332] = bf16::from_bits(damaged[7][33_332].to_bits() ^ 1);
    assert!(advance(&mut swap, 2, &damaged).is_err());
    swap.rollback().unwrap();
    // A step without the 16-bit weights.
    assert!(step_by(&mut swap, |_, _| Ok(())).is_err());
    swap.rollback().unwrap();
    let lent = Buffer::open(20_000, backing()).unwrap();
    assert!(swap.read(0, None, [lent.span().part(0, 20_000), Span::empty(), Span::empty()]).is_err());
    assert_eq!(advance(&mut swap, 2, &first).unwrap(), second);
    assert!(holds(&mut swap, 2));
}

#[test]
fn a_read_checks_the_weights_of_cached_subgroups_too() {
    for buffers in [3, 100] {
        let mut swap = Swap::open(memory_tier(), &split_options(buffers)).unwrap();
        swap.fill(start).unwrap();
        let right = advance(&mut swap, 1, &expected(0).1).unwrap();
        let mut wrong = right.clone();
        wrong
            .iter_mut()
            .filter_map(|weights| weights.last_mut())
            .for_each(|last| *last = bf16::from_bits(last.to_bits() ^ 1));
        for (subgroup, n) in SIZES.iter().enumerate().filter(|(_, n)| **n > 0) {
            let bytes = 4 * *n as usize;
            let lent = Buffer::open(bytes, backing()).unwrap();
            let mut read = |weights| {
                swap.read(subgroup, weights, [lent.span().part(0, bytes), Span::empty(), Span::empty()])
            };
            assert!(read(None).is_err() && read(Some(&wrong[subgroup])).is_err(), "{buffers} {subgroup}");
            read(Some(&right[subgroup])).unwrap();
        }
        // A step checks them as well.
        assert!(advance(&mut swap, 2, &wrong).is_err(), "{buffers}");
    }
}

#[test]
fn a_tier_of_whole_state_is_taken_over_and_one_of_split_state_is_not_taken_for_whole() {
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let tier = |mode| {
        tier_in(dirs.iter().map(|dir| PathLocation::Directory(dir.path().to_path_buf())).collect(), mode)
    };
    let whole = SwapOptions { usual: Encoding::FULL, ..split_options(4) };
    {
        let mut swap = Swap::open(tier(Mode::Create), &whole).unwrap();
        swap.fill(start).unwrap();
        swap.commit(0, b"").unwrap();
    }
    {
        let mut swap = Swap::open(tier(Mode::Resume), &split_options(4)).unwrap();
        assert!(swap.filled().unwrap() && holds(&mut swap, 0));
        let weights = advance(&mut swap, 1, &expected(0).1).unwrap();
        swap.commit(1, b"").unwrap();
        advance(&mut swap, 2, &weights).unwrap();
    }
    let error = Swap::open(tier(Mode::Resume), &whole).unwrap_err().to_string();
    assert!(error.contains("split"), "{error}");
    let mut swap = Swap::open(tier(Mode::Resume), &split_options(5)).unwrap();
    assert!(holds(&mut swap, 1), "what was not committed is gone");
    advance(&mut swap, 2, &expected(1).1).unwrap();
    assert!(holds(&mut swap, 2));
}

/// After a power failure at any write, the weights of the step that `open` finds complete that step's state.
#[test]
fn a_crash_at_any_write_leaves_a_step_that_its_weights_complete() {
    let journal = Journal::default();
    let on = |disks: &[Disk], mode| {
        tier_in(
            disks.iter().map(|disk| PathLocation::Simulated(disk.clone(), Faults::default())).collect(),
            mode,
        )
    };
    let disks = [Disk::journaled(&journal, 0), Disk::journaled(&journal, 1)];
    let mut commits = Vec::new();
    {
        let mut swap = Swap::open(on(&disks, Mode::Create), &split_options(4)).unwrap();
        swap.fill(start).unwrap();
        swap.commit(0, b"").unwrap();
        commits.push(journal.len());
        let mut weights = expected(0).1;
        for step in 1..=3 {
            weights = advance(&mut swap, step, &weights).unwrap();
            swap.commit(step, b"").unwrap();
            commits.push(journal.len());
        }
    }
    for events in (commits[0]..=journal.len()).step_by(5) {
        for (crash, seed) in [(Crash::Dropped, 1), (Crash::Torn, 5 + events as u64)] {
            let image = journal.image(2, events, crash, seed);
            let tier = on(&image, Mode::Resume);
            let step = tier.opened().step.unwrap();
            let acknowledged = commits.iter().filter(|ended| **ended <= events).count() as u64 - 1;
            assert!(step == acknowledged || step == acknowledged + 1, "{events} events: step {step}");
            let mut swap = Swap::open(tier, &split_options(4)).unwrap();
            assert!(holds(&mut swap, step), "{events} events, {crash:?}: step {step}");
        }
    }
}
