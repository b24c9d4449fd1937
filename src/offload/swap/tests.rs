//! The tiered update compared bitwise with the same update in memory; errors and rollbacks on a simulated disk.
#![forbid(unsafe_code)]

mod beside;
mod moments;
mod split;

use std::time::{Duration, Instant};

use super::encoding::{Moments, STREAMS};
use super::*;
use crate::dtype::{Floats, FloatsMut, bf16};
use crate::error::IoKind;
use crate::io::options::TurnOptions;
use crate::io::sim::{Disk, Faults, short_io_timeout};
use crate::kernel::{BLOCK, Codes, Moment};
use crate::optim;
use crate::optim::adam::AdamOptions;
use crate::optim::parallel::Job;
use crate::pool::buffer::Buffer;
use crate::pool::region::Backing;
use crate::sys::span::Span;
use crate::tier::directory::Owner;
use crate::tier::options::{Mode, PathLocation, PathOptions, TierOptions};

const STEPS: u64 = 7;

fn backing() -> Backing {
    Backing { huge: false, lock: false, node: None }
}

fn options(subgroups: &[u64], host_memory: u64) -> SwapOptions {
    SwapOptions {
        subgroups: subgroups.to_vec(),
        usual: Encoding::FULL,
        host_memory,
        backing: backing(),
        ratio: None,
        speeds: Vec::new(),
    }
}

/// Options for this number of buffers over two paths.
fn options_of(usual: Encoding, buffers: u64) -> SwapOptions {
    let plan = budget::plan(&SIZES, usual, 2, 1 << 30).unwrap();
    let masters = if usual.master == Master::Split { 3 * plan.master_bytes } else { 0 };
    SwapOptions { usual, ..options(&SIZES, buffers * plan.buffer_bytes + masters) }
}

const LOW: Encoding = Encoding { master: Master::Low, moments: Moments::F32 };
const BF16: Encoding = Encoding { master: Master::Full, moments: Moments::Bf16 };
const BF16_SPLIT: Encoding = Encoding { master: Master::Split, moments: Moments::Bf16 };
const CODES: Encoding = Encoding { master: Master::Full, moments: Moments::Codes };
const CODES_SPLIT: Encoding = Encoding { master: Master::Split, moments: Moments::Codes };

fn owner() -> Owner {
    Owner { job: "test".to_string(), host: "here".to_string(), rank: 0 }
}

fn tier_in(places: Vec<PathLocation>, mode: Mode) -> Arc<Tier> {
    let mut options = TierOptions::new(owner(), []);
    options.paths =
        places.into_iter().map(|place| PathOptions { location: place, limit: None, reserve: 0 }).collect();
    options.mode = mode;
    options.block_bytes = 16 << 10;
    Arc::new(Tier::open(options).unwrap())
}

fn on_disks(disks: &[Disk], faults: [Faults; 2]) -> TierOptions {
    let mut tier = TierOptions::new(owner(), []);
    let path = |(disk, faults): (&Disk, Faults)| PathOptions {
        location: PathLocation::Simulated(disk.clone(), faults),
        limit: None,
        reserve: 0,
    };
    tier.paths = disks.iter().zip(faults).map(path).collect();
    tier.block_bytes = 16 << 10;
    tier
}

#[test]
fn a_tier_has_one_update_at_a_time() {
    let tier = tier_in(vec![PathLocation::Memory(None)], Mode::Create);
    let open = || Swap::open(Arc::clone(&tier), &options(&SIZES, 1 << 24));
    let first = open().unwrap();
    assert!(matches!(open(), Err(Error::Busy(_))));
    drop(first);
    // A failed open leaves the tier free.
    assert!(Swap::open(Arc::clone(&tier), &options(&SIZES, 1)).is_err());
    open().unwrap();
}

#[test]
fn an_open_that_fails_leaves_the_tier_as_it_was() {
    let tier = tier_in(vec![PathLocation::Memory(None)], Mode::Auto);
    let bad = SwapOptions { ratio: Some(vec![f64::NAN]), ..options(&[1000, 2000], 1 << 20) };
    let error = Swap::open(Arc::clone(&tier), &bad).err().unwrap().to_string();
    assert!(error.starts_with("ratio"), "{error}");
    assert_eq!(tier.extents().len(), 0);
    drop(Swap::open(Arc::clone(&tier), &options(&[1000], 1 << 20)).unwrap());
    // The second subgroup is new; the first has a different size.
    let before = tier.extents().len();
    assert!(Swap::open(Arc::clone(&tier), &options(&[2000, 500], 1 << 20)).is_err());
    assert_eq!(tier.extents().len(), before);
    // The first subgroup is unchanged and is kept; the second exceeds the size limit.
    assert!(Swap::open(Arc::clone(&tier), &options(&[1000, u64::MAX / 8], 1 << 20)).is_err());
    assert_eq!(tier.extents().len(), before);
}

#[test]
fn an_update_without_room_names_the_paths_and_what_they_lack() {
    let tier_with = |limit: u64| {
        let mut options =
            on_disks(&[Disk::default(), Disk::default()], [Faults::default(), Faults::default()]);
        options.paths.iter_mut().for_each(|path| path.limit = Some(limit));
        Arc::new(Tier::open(options).unwrap())
    };
    let refused = |error: Error, parts: &[&str]| {
        assert_eq!(error.io_kind(), Some(IoKind::NoSpace), "{error}");
        let message = error.to_string();
        assert_eq!(parts.iter().find(|part| !message.contains(**part)), None, "{message}");
    };
    let open = |tier: &Arc<Tier>| Swap::open(Arc::clone(tier), &options(&[10_000; 5], 400_000));
    let tier = tier_with(128 << 10);
    let free = ["disk-0 has 131072 bytes free, disk-1 has 131072 bytes free", "limit_bytes"];
    let error = open(&tier).err().unwrap();
    refused(error.clone(), &free);
    refused(error, &["preallocating 1199940 bytes", "2 versions of the states"]);
    // The words are those of a put that finds no room.
    let extent = tier.define("large", &[1 << 20]).unwrap();
    let memory = Buffer::open(1 << 20, backing()).unwrap();
    let put = tier.write(extent, &[memory.transfer(0, 1 << 20)], &crate::tier::ExtentPlacement::Auto, None);
    refused(put.unwrap_err(), &free);

    let tier = tier_with(1 << 20);
    let mut swap = open(&tier).unwrap();
    swap.fill(first_state).unwrap();
    tier.set_health(0, crate::tier::Health::Draining, "").unwrap();
    refused(
        step_by(&mut swap, |_, _| Ok(())).unwrap_err(),
        &["disk-0 is draining", "disk-1 has", "2 versions"],
    );
}

/// Gradients that differ by subgroup, step and element.
fn grads(subgroup: usize, step: u64, elements: usize) -> Vec<bf16> {
    let value = |i: usize| ((i * 31 + subgroup * 7 + step as usize * 13) % 1009) as f32 / 100.0 - 5.0;
    (0..elements).map(|i| bf16::from_f32(value(i))).collect()
}

fn fill(to: MomentMut<'_>, value: f32) {
    let values = vec![value; to.len()];
    to.store(crate::sys::span::bytes_of(&values)).unwrap();
}

/// Calls `work` with a state in f32, as it is with these moments.
fn with<R>(
    moments: Moments,
    [param, exp_avg, exp_avg_sq]: &mut [Vec<f32>; STREAMS],
    work: impl FnOnce(SubgroupState<'_>) -> R,
) -> R {
    let floats = |moment| MomentMut::Floats(moment);
    if moments == Moments::F32 {
        let [exp_avg, exp_avg_sq] = [exp_avg, exp_avg_sq].map(|moment| floats(FloatsMut::F32(moment)));
        return work(SubgroupState { param, low: &mut [], exp_avg, exp_avg_sq });
    }
    let mut both = [exp_avg, exp_avg_sq];
    if moments == Moments::Codes {
        let kinds = [Moment::First, Moment::Second];
        let (blocks, kernel) = (param.len().div_ceil(BLOCK), optim::kernel().unwrap());
        let mut codes = both.each_ref().map(|wide| (vec![0; wide.len()], vec![bf16::ZERO; blocks]));
        let mut lent = codes.each_mut().map(|(codes, scales)| Codes { codes, scales });
        (0..2).for_each(|i| lent[i].encode(kernel, kinds[i], both[i], None));
        let [exp_avg, exp_avg_sq] = lent;
        let (exp_avg, exp_avg_sq) =
            (MomentMut::Codes(kinds[0], exp_avg), MomentMut::Codes(kinds[1], exp_avg_sq));
        let result = work(SubgroupState { param, low: &mut [], exp_avg, exp_avg_sq });
        for ((wide, kind), (codes, scales)) in both.iter_mut().zip(kinds).zip(&mut codes) {
            Codes { codes, scales }.decode(kernel, kind, wide);
        }
        return result;
    }
    let mut stored = both.each_ref().map(|wide| wide.iter().map(|x| bf16::from_f32(*x)).collect::<Vec<_>>());
    let [exp_avg, exp_avg_sq] = stored.each_mut().map(|stored| floats(FloatsMut::Bf16(stored)));
    let result = work(SubgroupState { param, low: &mut [], exp_avg, exp_avg_sq });
    for (wide, stored) in both.iter_mut().zip(&stored) {
        wide.iter_mut().zip(stored).for_each(|(wide, stored)| *wide = stored.to_f32());
    }
    result
}

fn first_state(subgroup: usize, state: SubgroupState<'_>) -> Result<()> {
    for (i, param) in state.param.iter_mut().enumerate() {
        *param = (i % 77) as f32 * 0.01 + subgroup as f32;
    }
    fill(state.exp_avg, 0.0);
    fill(state.exp_avg_sq, 0.0);
    Ok(())
}

/// Runs one AdamW step on a state, which rounds bf16 moments stochastically, and returns the 16-bit weights that it publishes.
fn adam_step(subgroup: usize, step: u64, state: SubgroupState<'_>) -> Result<Vec<bf16>> {
    let grad = grads(subgroup, step, state.param.len());
    let mut copy = vec![bf16::ZERO; grad.len()];
    let random = matches!(state.exp_avg, MomentMut::Floats(FloatsMut::Bf16(_)));
    let stochastic_seed = random.then_some(subgroup as u64);
    let moments = [state.exp_avg, state.exp_avg_sq];
    let copy_to = Some(FloatsMut::Bf16(&mut copy));
    let tensor = adam::tensor_of(FloatsMut::F32(state.param), moments, Floats::Bf16(&grad), copy_to)?;
    let optimizer = AdamOptions { step, weight_decay: 0.01, stochastic_seed, ..Default::default() }.rule()?;
    optim::step(&mut [Job { optimizer, tensor }], false)?;
    Ok(copy)
}

/// One update of a swap without split masters.
fn step_by(swap: &mut Swap, step: impl FnMut(usize, SubgroupState<'_>) -> Result<()>) -> Result<()> {
    swap.update(&mut Closure(step))
}

/// One update from these weights.
fn step_with(
    swap: &mut Swap,
    weights: &[Vec<bf16>],
    step: impl FnMut(usize, SubgroupState<'_>) -> Result<()>,
) -> Result<()> {
    struct Weighted<'a, F>(&'a [Vec<bf16>], F);

    impl<F: FnMut(usize, SubgroupState<'_>) -> Result<()>> Update for Weighted<'_, F> {
        fn weights(&self, subgroup: usize) -> &[bf16] {
            &self.0[subgroup]
        }

        fn step(&mut self, subgroup: usize, state: SubgroupState<'_>) -> Result<()> {
            (self.1)(subgroup, state)
        }
    }

    swap.update(&mut Weighted(weights, step))
}

type Everything = Vec<[Vec<f32>; 3]>;

fn in_memory(subgroups: &[u64], steps: u64) -> (Everything, Vec<Vec<bf16>>) {
    in_memory_with(Moments::F32, subgroups, steps)
}

fn in_memory_with(moments: Moments, subgroups: &[u64], steps: u64) -> (Everything, Vec<Vec<bf16>>) {
    let mut all: Everything =
        subgroups.iter().map(|n| std::array::from_fn(|_| vec![0.0; *n as usize])).collect();
    let mut published = vec![Vec::new(); subgroups.len()];
    for (subgroup, all) in all.iter_mut().enumerate() {
        with(moments, all, |state| first_state(subgroup, state)).unwrap();
        for step in 1..=steps {
            published[subgroup] = with(moments, all, |state| adam_step(subgroup, step, state)).unwrap();
        }
    }
    (all, published)
}

fn everything(swap: &mut Swap) -> Everything {
    everything_with(swap, |_| None)
}

fn everything_with<'a>(swap: &mut Swap, copies: impl Fn(usize) -> Option<&'a [bf16]>) -> Everything {
    let mut all = Everything::new();
    for subgroup in 0..swap.layout().len() {
        let elements = swap.layout().elements(subgroup).unwrap();
        let mut lent = Buffer::open(12 * elements, backing()).unwrap();
        let part = |stream: usize| lent.span().part(stream * elements * 4, elements * 4);
        swap.read(subgroup, copies(subgroup), [part(0), part(1), part(2)]).unwrap();
        let floats = lent.floats().unwrap();
        all.push(std::array::from_fn(|stream| floats[stream * elements..][..elements].to_vec()));
    }
    all
}

fn same_bits(a: &Everything, b: &Everything) -> bool {
    let bits =
        |all: &Everything| -> Vec<u32> { all.iter().flatten().flatten().map(|x| x.to_bits()).collect() };
    bits(a) == bits(b)
}

const SIZES: [u64; 9] = [5000, 0, 1, 12_345, 70_000, 4096, 3, 33_333, 20_000];

#[test]
fn a_run_on_the_tier_has_the_bits_of_a_run_in_memory() {
    let buffer = budget::plan(&SIZES, Encoding::FULL, 2, 1 << 30).unwrap().buffer_bytes;
    for (host_memory, places) in [(3, 1), (4, 2), (7, 3), (100, 2)] {
        let tier = tier_in((0..places).map(|_| PathLocation::Memory(None)).collect(), Mode::Create);
        let mut swap = Swap::open(tier, &options(&SIZES, host_memory * buffer)).unwrap();
        assert!(!swap.filled().unwrap());
        swap.fill(first_state).unwrap();
        let mut published = vec![Vec::new(); SIZES.len()];
        for step in 1..=STEPS {
            step_by(&mut swap, |subgroup, state| {
                published[subgroup] = adam_step(subgroup, step, state)?;
                Ok(())
            })
            .unwrap();
            if step == 3 {
                swap.commit(step, b"").unwrap();
                assert!(swap.filled().unwrap());
            }
        }
        let (expected, expected_published) = in_memory(&SIZES, STEPS);
        assert!(same_bits(&everything(&mut swap), &expected), "{host_memory} buffers, {places} paths");
        assert_eq!(published, expected_published);
    }
}

#[test]
fn a_rollback_leads_to_the_last_commit_and_on_to_the_same_bits() {
    let buffer = budget::plan(&SIZES, Encoding::FULL, 2, 1 << 30).unwrap().buffer_bytes;
    let tier = tier_in(vec![PathLocation::Memory(None), PathLocation::Memory(None)], Mode::Create);
    let mut swap = Swap::open(tier, &options(&SIZES, 5 * buffer)).unwrap();
    swap.fill(first_state).unwrap();
    for step in 1..=3 {
        step_by(&mut swap, |subgroup, state| adam_step(subgroup, step, state).map(drop)).unwrap();
    }
    swap.commit(3, b"three").unwrap();
    step_by(&mut swap, |subgroup, state| adam_step(subgroup, 99, state).map(drop)).unwrap();
    let failed = step_by(&mut swap, |subgroup, state| match subgroup {
        4 => Err(Error::Unsupported("the caller's own error".to_string())),
        _ => adam_step(subgroup, 100, state).map(drop),
    });
    assert!(matches!(failed, Err(Error::Unsupported(_))));
    assert!(
        matches!(step_by(&mut swap, |_, _| Ok(())), Err(Error::Busy(_))),
        "half a step must not be taken for one"
    );
    assert!(matches!(swap.commit(5, b""), Err(Error::Busy(_))));
    swap.rollback().unwrap();
    for step in 4..=STEPS {
        step_by(&mut swap, |subgroup, state| adam_step(subgroup, step, state).map(drop)).unwrap();
    }
    assert!(same_bits(&everything(&mut swap), &in_memory(&SIZES, STEPS).0));
}

#[test]
fn a_process_that_ends_after_a_commit_is_taken_up_there() {
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let places = || dirs.iter().map(|dir| PathLocation::Directory(dir.path().to_path_buf())).collect();
    let buffer = budget::plan(&SIZES, Encoding::FULL, 2, 1 << 30).unwrap().buffer_bytes;
    {
        let mut swap = Swap::open(tier_in(places(), Mode::Create), &options(&SIZES, 4 * buffer)).unwrap();
        swap.fill(first_state).unwrap();
        for step in 1..=4 {
            step_by(&mut swap, |subgroup, state| adam_step(subgroup, step, state).map(drop)).unwrap();
            if step == 3 {
                swap.commit(step, b"lr 0.001").unwrap();
            }
        }
    }
    let tier = tier_in(places(), Mode::Resume);
    assert_eq!((tier.opened().step, &tier.opened().payload[..]), (Some(3), &b"lr 0.001"[..]));
    let mut swap = Swap::open(tier, &options(&SIZES, 3 * buffer)).unwrap();
    assert!(swap.filled().unwrap());
    for step in 4..=STEPS {
        step_by(&mut swap, |subgroup, state| adam_step(subgroup, step, state).map(drop)).unwrap();
    }
    assert!(same_bits(&everything(&mut swap), &in_memory(&SIZES, STEPS).0));
}

#[test]
fn few_subgroups_are_striped_and_the_cache_saves_what_it_promised() {
    let sizes = [100_000; 4];
    let tier = tier_in(vec![PathLocation::Memory(None), PathLocation::Memory(None)], Mode::Create);
    let mut options = options(&sizes, 3 * (1 << 30));
    options.ratio = Some(vec![3.0, 1.0]);
    options.host_memory = 3 * budget::plan(&sizes, Encoding::FULL, 2, 1 << 30).unwrap().buffer_bytes;
    let mut swap = Swap::open(Arc::clone(&tier), &options).unwrap();
    swap.fill(first_state).unwrap();
    swap.commit(0, b"").unwrap();
    let blocks: Vec<u32> = tier
        .extents()
        .iter()
        .fold(vec![0, 0], |sum, extent| sum.iter().zip(&extent.blocks).map(|(a, b)| a + b).collect());
    let share = f64::from(blocks[0]) / f64::from(blocks[0] + blocks[1]);
    assert!((share - 0.75).abs() < 0.05, "{blocks:?}");
}

#[test]
fn updates_of_one_process_share_its_turns() {
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm").unwrap()];
    let buffer = budget::plan(&SIZES, Encoding::FULL, 2, 1 << 30).unwrap().buffer_bytes;
    let expected = in_memory(&SIZES, STEPS).0;
    std::thread::scope(|scope| {
        for rank in 0..3 {
            let (dirs, expected) = (&dirs, &expected);
            scope.spawn(move || {
                let owner = Owner { rank, ..owner() };
                let mut tier = TierOptions::new(owner, dirs.iter().map(|dir| dir.path().to_path_buf()));
                tier.world = 3;
                tier.block_bytes = 16 << 10;
                tier.io.turns = TurnOptions::of(1);
                let tier = Arc::new(Tier::open(tier).unwrap());
                let mut swap = Swap::open(tier, &options(&SIZES, 4 * buffer)).unwrap();
                swap.fill(first_state).unwrap();
                for step in 1..=STEPS {
                    step_by(&mut swap, |subgroup, state| adam_step(subgroup, step, state).map(drop)).unwrap();
                }
                swap.commit(STEPS, b"").unwrap();
                assert!(same_bits(&everything(&mut swap), expected), "rank {rank}");
            });
        }
    });
}

/// While another process has the turn on one path, a step proceeds on the other path; it completes when the turn ends.
#[test]
fn whoever_waits_for_one_path_uses_the_other() {
    use std::os::unix::fs::MetadataExt;

    use crate::io::turns::queue::{TurnQueue, TurnRequest};
    const LONG: Duration = Duration::from_secs(600);
    const SIZES: [u64; 5] = [200_000; 5];
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm").unwrap()];
    let buffer = budget::plan(&SIZES, Encoding::FULL, 2, 1 << 30).unwrap().buffer_bytes;
    let mut tier = TierOptions::new(owner(), dirs.iter().map(|dir| dir.path().to_path_buf()));
    tier.block_bytes = 16 << 10;
    tier.io.turns = TurnOptions { most: 1, timeout: LONG };
    let tier = Arc::new(Tier::open(tier).unwrap());
    let mut options = options(&SIZES, 4 * buffer);
    options.ratio = Some(vec![1.0, 1.0]);
    let mut swap = Swap::open(Arc::clone(&tier), &options).unwrap();
    swap.fill(first_state).unwrap();
    swap.commit(0, b"").unwrap();
    let device = std::fs::metadata(dirs[0].path()).unwrap().dev();
    let mut other = TurnRequest::new(TurnQueue::join(device, "the first path", 1, None).unwrap());
    while !other.poll(LONG).unwrap() {
        std::thread::sleep(Duration::from_millis(1));
    }
    let read = |path: usize| tier.paths()[path].read_bytes;
    let before = [read(0), read(1)];
    std::thread::scope(|scope| {
        let step =
            scope.spawn(|| step_by(&mut swap, |subgroup, state| adam_step(subgroup, 1, state).map(drop)));
        while read(1) == before[1] || !other.others_wait().unwrap() {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(read(0), before[0], "the path was used in another's turn");
        assert!(!step.is_finished());
        other.release();
        step.join().unwrap().unwrap();
    });
    assert!(read(0) > before[0]);
    assert!(same_bits(&everything(&mut swap), &in_memory(&SIZES, 1).0));
}

#[test]
fn a_state_that_is_written_between_steps_counts_and_is_forgotten_by_a_rollback() {
    let buffer = budget::plan(&SIZES, Encoding::FULL, 2, 1 << 30).unwrap().buffer_bytes;
    for buffers in [3, 5, 100] {
        let tier = tier_in(vec![PathLocation::Memory(None), PathLocation::Memory(None)], Mode::Create);
        let mut swap = Swap::open(tier, &options(&SIZES, buffers * buffer)).unwrap();
        swap.fill(first_state).unwrap();
        let step = |swap: &mut Swap, step| {
            step_by(swap, |subgroup, state| adam_step(subgroup, step, state).map(drop)).unwrap();
        };
        step(&mut swap, 1);
        swap.commit(1, b"").unwrap();
        let committed = everything(&mut swap);
        let mut wanted = committed.clone();
        let mut lent = Buffer::open(4 * 70_000, backing()).unwrap();
        for (subgroup, stream) in [(0, 0), (4, 1), (8, 2), (4, 2), (8, 0)] {
            let elements = SIZES[subgroup] as usize;
            lent.floats().unwrap()[..elements].fill(subgroup as f32 + 0.5);
            wanted[subgroup][stream].fill(subgroup as f32 + 0.5);
            let mut from = [Span::empty(); STREAMS];
            from[stream] = lent.span().part(0, 4 * elements);
            swap.write(subgroup, from).unwrap();
            let wrong = [lent.span().part(0, 8), Span::empty(), Span::empty()];
            assert!(swap.write(subgroup, wrong).is_err());
        }
        assert!(same_bits(&everything(&mut swap), &wanted), "{buffers} buffers");
        step(&mut swap, 2);
        for (subgroup, wanted) in wanted.iter_mut().enumerate() {
            with(Moments::F32, wanted, |state| adam_step(subgroup, 2, state)).unwrap();
        }
        assert!(same_bits(&everything(&mut swap), &wanted), "{buffers} buffers, stepped");
        swap.rollback().unwrap();
        assert!(same_bits(&everything(&mut swap), &committed), "{buffers} buffers, rolled back");
    }
}

/// A transfer that its device never ends is given up, and its slot is quarantined. Every state from a step or a read is
/// correct, or the call returns an error that a rollback recovers from.
#[test]
fn a_transfer_that_hangs_takes_its_buffer_with_it_and_no_state() {
    let states: Vec<Everything> = (0..=4).map(|steps| in_memory(&SIZES, steps).0).collect();
    let weights: Vec<_> = states.iter().map(split::copies).collect();
    let run = |hang_nth: Option<u64>, usual: Encoding, buffers: u64| {
        let disks = [Disk::default(), Disk::default()];
        let faults = [Faults::default(), Faults { hang_nth, ..Faults::default() }];
        let mut tier = on_disks(&disks, faults);
        tier.io.io_timeout = hang_nth.and_then(|_| short_io_timeout());
        let tier = Arc::new(Tier::open(tier).unwrap());
        let mut swap = Swap::open(tier, &options_of(usual, buffers)).unwrap();
        swap.fill(first_state).unwrap();
        let (mut at, mut errors, began) = (0, 0, Instant::now());
        // The I/O engine chooses the order of requests, so the hanging request may be the first sync.
        if swap.commit(0, b"").is_err() {
            disks[1].release();
            return (0..0, 0);
        }
        let before = disks[1].requests();
        while at < 4 {
            let from = &weights[at as usize];
            let stepped =
                step_with(&mut swap, from, |subgroup, state| adam_step(subgroup, at + 1, state).map(drop));
            let Err(error) = stepped.and_then(|()| swap.commit(at + 1, b"")) else {
                at += 1;
                continue;
            };
            errors += 1;
            assert!(
                began.elapsed() < Duration::from_secs(60),
                "request {hang_nth:?}, {usual:?}, {buffers} buffers, {errors} errors: {error}"
            );
            swap.rollback().unwrap();
            // The hanging request completes late, while other requests are in flight.
            disks[1].release();
            std::thread::sleep(Duration::from_millis(2));
        }
        let after = disks[1].requests();
        let found = everything_with(&mut swap, |subgroup| Some(&weights[4][subgroup]));
        assert!(same_bits(&found, &states[4]), "request {hang_nth:?}, {usual:?}, {buffers} buffers");
        disks[1].release();
        (before..after, errors)
    };
    for (usual, buffers) in [(Encoding::FULL, 3), (Encoding::FULL, 5), (Encoding::SPLIT, 4)] {
        // Skips the last requests: their order varies, and the final check must not hang.
        let requests = run(None, usual, buffers).0;
        let errors: u64 =
            (requests.start..requests.end - 60).step_by(37).map(|nth| run(Some(nth), usual, buffers).1).sum();
        assert!(errors > 0, "no read hung");
    }
}

/// A read that its device never ends fails, and the caller's memory is not in use afterwards.
#[test]
fn a_read_that_hangs_leaves_the_callers_memory_alone() {
    let disks = [Disk::default(), Disk::default()];
    let open = |hang_nth: Option<u64>| {
        let mut tier = on_disks(&disks, [Faults::default(), Faults { hang_nth, ..Faults::default() }]);
        tier.io.io_timeout = hang_nth.and_then(|_| short_io_timeout());
        Swap::open(Arc::new(Tier::open(tier).unwrap()), &options_of(Encoding::FULL, 3)).unwrap()
    };
    let mut swap = open(None);
    swap.fill(first_state).unwrap();
    swap.commit(0, b"").unwrap();
    drop(swap);
    let before = disks[1].requests();
    drop(open(None));
    let opened = disks[1].requests() - before;
    let hung = (0..8).filter(|number| {
        let mut swap = open(Some(disks[1].requests() + opened + number));
        let mut errors = 0;
        for (subgroup, elements) in SIZES.iter().enumerate() {
            let bytes = 4 * *elements as usize;
            let mut memory = Buffer::open(3 * bytes.max(4), backing()).unwrap();
            memory.floats().unwrap().fill(1.0);
            let to = [0, 1, 2].map(|stream| memory.span().part(stream * bytes, bytes));
            if swap.read(subgroup, None, to).is_err() {
                disks[1].release();
                std::thread::sleep(Duration::from_millis(20));
                let unchanged = memory.floats().unwrap().iter().all(|x| *x == 1.0);
                assert!(unchanged, "subgroup {subgroup}");
                errors += 1;
            }
        }
        disks[1].release();
        errors > 0
    });
    assert!(hung.count() > 0, "no read hung");
}
