//! Paths that do not respond. Every request and every other call on a path hangs once, and once with all later ones, in
//! every operation of a tier.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::Instant;

use super::*;
use crate::error::{Doing, Error, IoKind, TierKind};
use crate::io::sim::Stop;
use crate::tier::Health;
use crate::tier::select::Selection;

/// The I/O timeout of the tests. A busy machine may reach it without a hang.
const SHORT: Duration = Duration::from_millis(250);
/// An I/O timeout that is reached only by a hang.
const LONG: Duration = Duration::from_secs(6);

/// What the second path does, and the I/O timeout.
#[derive(Clone, Copy)]
struct Conditions {
    stop: Option<Stop>,
    io_timeout: Duration,
}

/// Nothing hangs, so a long timeout takes no time: an export syncs files of a disk that others may keep busy.
const HEALTHY: Conditions = Conditions { stop: None, io_timeout: Duration::from_secs(60) };

impl Conditions {
    /// Longest time of an operation: it may meet the hang once on each path, and machines may be slow.
    fn limit(self) -> Duration {
        20 * self.io_timeout
    }

    /// The timeout of a close that may meet the hang.
    fn close_timeout(self) -> Option<Duration> {
        Some(self.io_timeout * 2 / 5)
    }
}

/// An operation on a tier of two paths, which has step 1 and an uncommitted write on each path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operation {
    Open,
    Reopen,
    Steps,
    Write,
    Read,
    Commit,
    CommitBeside,
    CommitClean,
    Rollback,
    Evacuate,
    Verify,
    Export,
    Close,
    Destroy,
}

const ALL: [Operation; 14] = [
    Operation::Open,
    Operation::Reopen,
    Operation::Steps,
    Operation::Write,
    Operation::Read,
    Operation::Commit,
    Operation::CommitBeside,
    Operation::CommitClean,
    Operation::Rollback,
    Operation::Evacuate,
    Operation::Verify,
    Operation::Export,
    Operation::Close,
    Operation::Destroy,
];

fn options(disks: &[Disk], Conditions { stop, io_timeout }: Conditions) -> TierOptions {
    let mut options = on_disks(disks, &[Faults::default(), Faults { stop, ..Faults::default() }]);
    options.durability = Durability::Full;
    options.io.io_timeout = Some(io_timeout);
    options
}

/// A tier with step 1.
fn prepared(disks: &[Disk], conditions: Conditions) -> Result<Tier> {
    let tier = Tier::open(options(disks, conditions))?;
    step(&tier, 1)?;
    Ok(tier)
}

/// Does the operation. Returns the tier if it is still open, and the outcome.
fn run(
    operation: Operation,
    disks: &[Disk],
    conditions: Conditions,
    tier: Option<Tier>,
) -> (Option<Tier>, Result<()>) {
    let on = |number: usize| ExtentPlacement::On(number as u32 % 2);
    let dirty = |tier: &Tier| (0..STREAMS.len()).try_for_each(|n| write(tier, n, seed_of(2, n), &on(n)));
    let Some(tier) = tier else {
        return match operation {
            Operation::Steps => (None, Tier::steps(&options(disks, conditions)).map(drop)),
            _ => match Tier::open(options(disks, conditions)) {
                Ok(tier) => (Some(tier), Ok(())),
                Err(error) => (None, Err(error)),
            },
        };
    };
    let outcome = match operation {
        Operation::Open | Operation::Reopen | Operation::Steps => Ok(()),
        Operation::Write => dirty(&tier),
        Operation::Read => (0..STREAMS.len()).try_for_each(|n| read(&tier, n, seed_of(1, n)).map(drop)),
        Operation::Commit => dirty(&tier).and_then(|()| tier.commit(2, &2_u64.to_le_bytes())),
        Operation::CommitClean => tier.commit(2, &1_u64.to_le_bytes()),
        Operation::Rollback => dirty(&tier).and_then(|()| tier.rollback()),
        Operation::Evacuate => tier.evacuate(1).and_then(|()| tier.commit(2, &1_u64.to_le_bytes())),
        Operation::Verify => {
            tier.verify().and_then(|found| found.damage.into_iter().next().map_or(Ok(()), Err))
        }
        Operation::Export => {
            let base = tempfile::tempdir().unwrap();
            tier.export(&base.path().join("export")).map(drop)
        }
        Operation::CommitBeside => {
            let tier = Arc::new(tier);
            let begun = dirty(&tier).and_then(|()| tier.commit_beside(2, &2_u64.to_le_bytes()));
            let outcome = begun.and_then(|commit| commit.wait(None));
            return (Some(Arc::into_inner(tier).unwrap()), outcome);
        }
        Operation::Close => return (None, tier.close(conditions.close_timeout())),
        Operation::Destroy => return (None, tier.destroy()),
    };
    (Some(tier), outcome)
}

/// Number of events on the second path: before the operation, and after it.
fn events_of(operation: Operation) -> (u64, u64) {
    let disks = [Disk::default(), Disk::default()];
    let tier = match operation {
        Operation::Open => None,
        Operation::Reopen | Operation::Steps => {
            prepared(&disks, HEALTHY).unwrap().close(None).unwrap();
            None
        }
        _ => Some(prepared(&disks, HEALTHY).unwrap()),
    };
    let before = disks[1].events();
    let (tier, outcome) = run(operation, &disks, HEALTHY, tier);
    outcome.unwrap_or_else(|error| panic!("{operation:?} on healthy paths: {error}"));
    let after = disks[1].events();
    drop(tier);
    (before, after)
}

fn is_named(error: &Error) -> bool {
    let io = matches!(
        error.io_kind(),
        Some(IoKind::Deadline | IoKind::PathFailed | IoKind::NoSpace | IoKind::Timeout)
    );
    io || matches!(error, Error::Busy(_)) || error.tier_kind() == Some(TierKind::NoState)
}

/// Does the operation with a hang, and continues with the other path afterwards.
fn survives(operation: Operation, stop: Stop, io_timeout: Duration) {
    let conditions = Conditions { stop: Some(stop), io_timeout };
    let disks = [Disk::default(), Disk::default()];
    let tier = match operation {
        Operation::Open => None,
        Operation::Reopen | Operation::Steps => {
            prepared(&disks, conditions).unwrap().close(None).unwrap();
            None
        }
        _ => Some(prepared(&disks, conditions).unwrap()),
    };
    let what = format!("{operation:?}, {stop:?}");
    let began = Instant::now();
    let (tier, outcome) = run(operation, &disks, conditions, tier);
    assert!(began.elapsed() < conditions.limit(), "{what}");
    if let Err(error) = &outcome {
        assert!(is_named(error), "{what}: {error}");
    }
    if let Some(tier) = tier {
        // The other path takes everything: a repeated write goes there, and a commit succeeds.
        if outcome.is_err() {
            assert!(
                operation == Operation::Export || tier.paths()[1].health == Health::Failed,
                "{what}: {outcome:?}"
            );
        }
        (0..STREAMS.len()).for_each(|n| write(&tier, n, seed_of(3, n), &ExtentPlacement::On(0)).unwrap());
        tier.commit(3, &3_u64.to_le_bytes()).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert!((0..STREAMS.len()).all(|n| read(&tier, n, seed_of(3, n)).unwrap()), "{what}");
        let closed = tier.close(conditions.close_timeout());
        assert!(closed.is_ok() || is_named(closed.as_ref().unwrap_err()), "{what}: {closed:?}");
    }
    assert!(began.elapsed() < 3 * conditions.limit(), "{what}");
    disks.iter().for_each(Disk::release);
    if operation == Operation::Destroy {
        return;
    }
    // A reopen finds a whole state once the path responds again.
    let tier = loop {
        match Tier::open(options(&disks, Conditions { stop: None, io_timeout })) {
            Err(error)
                if error.io_kind() == Some(IoKind::Deadline) && began.elapsed() < 5 * conditions.limit() =>
            {
                std::thread::sleep(Duration::from_millis(1));
            }
            opened => break opened.unwrap_or_else(|error| panic!("{what}: {error}")),
        }
    };
    if let Some(step) = tier.opened().step {
        let payload = tier.opened().payload.clone();
        let seed = u64::from_le_bytes(payload.try_into().unwrap());
        assert!((0..STREAMS.len()).all(|n| read(&tier, n, seed_of(seed, n)).unwrap()), "{what}: step {step}");
        assert_eq!(tier.verify().unwrap().damage, [], "{what}");
    }
}

#[test]
fn every_operation_returns_in_time_and_goes_on_whatever_call_on_a_path_hangs() {
    let mut jobs = Vec::new();
    for operation in ALL {
        let (before, after) = events_of(operation);
        assert!(after > before || operation == Operation::Rollback, "{operation:?} uses its second path");
        jobs.extend((before..after).flat_map(|at| [true, false].map(|all| (operation, Stop { at, all }))));
    }
    assert!(jobs.len() > 200, "{}", jobs.len());
    // Each job spends its time in waits.
    let (next, failed) = (Mutex::new(jobs.into_iter()), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| {
                loop {
                    let Some((operation, stop)) = next.lock().unwrap().next() else { return };
                    let outcome = std::panic::catch_unwind(|| survives(operation, stop, SHORT));
                    if outcome.is_err() {
                        failed.lock().unwrap().push((operation, stop));
                    }
                }
            });
        }
    });
    // On a busy machine the healthy path may reach the short I/O timeout too. A job that fails for another reason fails
    // again.
    for (operation, stop) in failed.into_inner().unwrap() {
        survives(operation, stop, LONG);
    }
}

#[test]
fn a_close_returns_at_its_timeout_however_many_paths_do_not_respond() {
    /// The time after which an engine that nobody closed gives its operations up.
    const GIVEN_UP: Duration = Duration::from_secs(30);
    let open = |disks: &[Disk; 3], stops: [Option<Stop>; 3]| {
        let faults = stops.map(|stop| Faults { stop, ..Faults::default() });
        let mut options = on_disks(disks, &faults);
        options.io.io_timeout = Some(20 * GIVEN_UP);
        let tier = Tier::open(options).unwrap();
        // Then the files have their space, so that a write waits for no allocation.
        for step in 1..=3 {
            (0..3).for_each(|n| write(&tier, n, step, &ExtentPlacement::On(n as u32)).unwrap());
            tier.commit(step, &step.to_le_bytes()).unwrap();
        }
        tier
    };
    let disks = [(); 3].map(|()| Disk::default());
    let tier = open(&disks, [None; 3]);
    let stops = disks.each_ref().map(|disk| Some(Stop { at: disk.events(), all: true }));
    drop(tier);
    let disks = [(); 3].map(|()| Disk::default());
    let tier = open(&disks, stops);
    let memories = [0, 1, 2].map(|n| Memory::filled(STREAMS[n], 7));
    for (n, memory) in memories.iter().enumerate() {
        let extent = tier.define(&name_of(n), STREAMS[n]).unwrap();
        tier.write(extent, &memory.buffers(), &ExtentPlacement::On(n as u32), None).unwrap();
    }
    let began = Instant::now();
    let error = tier.close(Some(Duration::ZERO)).unwrap_err();
    assert_eq!(error.io_kind(), Some(IoKind::Timeout), "{error}");
    assert!(began.elapsed() < GIVEN_UP, "{:?}", began.elapsed());
    disks.iter().for_each(Disk::release);
}

#[test]
fn an_export_into_a_directory_that_does_not_respond_fails_after_the_io_timeout() {
    let mut options = on_disks(&[Disk::default(), Disk::default()], &[]);
    options.io.io_timeout = short_io_timeout();
    let tier = Tier::open(options).unwrap();
    step(&tier, 1).unwrap();
    let base = tempfile::tempdir().unwrap();
    let path = base.path().join("hangs");
    let (release, held) = mpsc::channel::<()>();
    let hung = crate::tier::storage::within_timeout(Some(SHORT), Doing::Opening, &path, move || {
        let _ = held.recv();
        Ok(())
    });
    assert_eq!(hung.unwrap_err().io_kind(), Some(IoKind::Deadline));
    let error = tier.export(&path).unwrap_err();
    assert_eq!(error.io_kind(), Some(IoKind::Deadline), "{error}");
    assert_eq!(std::fs::read_dir(base.path()).unwrap().count(), 0);
    drop(release);
    let retried = || tier.export(&PathBuf::from(&path));
    while retried().is_err_and(|error| error.io_kind() == Some(IoKind::Deadline)) {}
    assert!(path.join("manifest.json").exists());
}

#[test]
fn an_export_holds_one_commit_while_another_thread_commits() {
    let disks = [Disk::default(), Disk::default()];
    let tier = Tier::open(on_disks(&disks, &[])).unwrap();
    step(&tier, 1).unwrap();
    let base = tempfile::tempdir().unwrap();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 2.. {
                if done.load(std::sync::atomic::Ordering::Relaxed) {
                    return;
                }
                step(&tier, number).unwrap();
            }
        });
        let mut exported = 0;
        for attempt in 0.. {
            let target = base.path().join(format!("export-{attempt}"));
            match tier.export(&target) {
                Err(Error::Busy(_)) => std::thread::yield_now(),
                found => {
                    let step = found.unwrap();
                    let fresh = [Disk::default()];
                    let copy = Tier::open(on_disks(&fresh, &[])).unwrap();
                    assert_eq!(copy.import(&target, &Selection::default()).unwrap(), step);
                    for n in 0..STREAMS.len() {
                        assert!(
                            read(&copy, n, seed_of(step, n)).unwrap(),
                            "extent {n} is of another step than {step}"
                        );
                    }
                    assert_eq!(copy.state.lock().catalog.last_commit().1, step.to_le_bytes());
                    exported += 1;
                }
            }
            if exported == 40 {
                break;
            }
        }
        done.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    assert_eq!(tier.verify().unwrap().damage, []);
}

#[test]
fn a_verification_and_an_export_keep_the_space_of_their_state_while_writes_go_on() {
    let disks = [Disk::default()];
    let tier = Tier::open(on_disks(&disks, &[])).unwrap();
    step(&tier, 1).unwrap();
    let held = crate::tier::store::snapshot(&&tier, crate::tier::catalog::View::Committed).unwrap();
    let used = |tier: &Tier| tier.paths()[0].file_bytes - tier.paths()[0].free;
    for number in 2..6 {
        step(&tier, number).unwrap();
    }
    let before = used(&tier);
    let mut verification = crate::tier::verify::Verification::begin(&tier, &|_| ()).unwrap();
    held.extents.iter().for_each(|extent| verification.read(&extent.held).unwrap());
    assert_eq!(verification.report.damage, []);
    drop(held);
    assert!(used(&tier) < before, "the space is free after the snapshot");
}
