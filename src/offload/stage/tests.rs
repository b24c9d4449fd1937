//! Stages with fake work, and the write of a region around each task.
#![forbid(unsafe_code)]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::target::Published;
use super::{Options, Stage, Target};
use crate::arena::{Arena, Create, Open, RegionSpec};
use crate::error::{ArenaKind, Error, Result, RoundError, RoundKind, Rounds};
use crate::offload::speculate::{Bucket, Progress, Publish, Recording, Task, Verdict};
use crate::optim::StepStats;
use crate::optim::lent::LentCopy;
use crate::sys::event::{Event, EventFd};

const SOON: Option<Duration> = Some(Duration::from_secs(60));
const AT_ONCE: Option<Duration> = Some(Duration::ZERO);

fn arena() -> Arc<Arena> {
    let regions = vec![RegionSpec { name: "copies".to_string(), bytes: 100 }];
    Arc::new(Arena::create(&Create { regions, ..Create::default() }).unwrap())
}

fn target(arena: &Arc<Arena>, generation: u64) -> Target {
    Target::new(arena, 0, generation, Vec::new()).unwrap()
}

fn lent_copies(places: &[(usize, usize)]) -> Vec<LentCopy> {
    let copy = |(index, (address, bytes)): (usize, &(usize, usize))| LentCopy {
        index,
        address: *address,
        bytes: *bytes,
    };
    places.iter().enumerate().map(copy).collect()
}

/// Tasks, each with whether the region was in a write.
type Told = Arc<Mutex<Vec<(Task, bool)>>>;

/// Notes its tasks, and whether the region was in a write at each.
struct Fake {
    arena: Option<Arc<Arena>>,
    told: Told,
    fails: Option<Task>,
}

impl Bucket for Fake {
    fn run(&mut self, task: Task, _: &mut Recording) -> Result<StepStats> {
        let in_write = self.arena.as_ref().is_some_and(|arena| arena.region(0).unwrap().in_write);
        self.told.lock().unwrap().push((task, in_write));
        assert_ne!(self.fails, Some(task), "a task that panics");
        Ok(StepStats { nonfinite: false, sum_squares: 1.0 })
    }
}

fn fake(arena: Option<&Arc<Arena>>) -> (Box<Fake>, Told) {
    let told = Told::default();
    (Box::new(Fake { arena: arena.cloned(), told: Arc::clone(&told), fails: None }), told)
}

#[test]
fn copies_are_written_only_in_a_write_and_every_end_has_its_generation() {
    let redo = Task::Redo(0.5);
    let cases: [(Publish, &[Task], &[bool], u64); 7] = [
        (Publish::Final, &[Task::Speculate, Task::Commit], &[false, true], 3),
        (Publish::Final, &[Task::Speculate, Task::Rollback], &[false, false], 0),
        (Publish::Final, &[Task::Speculate, redo], &[false, true], 3),
        (Publish::Final, &[Task::Measure, Task::Step(1.0)], &[false, true], 3),
        (Publish::Staged, &[Task::Speculate, Task::Commit], &[true, true], 3),
        (Publish::Staged, &[Task::Speculate, Task::Rollback], &[true, true], 0),
        (Publish::Staged, &[Task::Speculate, redo], &[true, true], 3),
    ];
    for (publish, tasks, in_write, generation) in cases {
        let arena = arena();
        let (work, told) = fake(Some(&arena));
        let mut bucket = Published::new(work, publish, target(&arena, 3).reserve().unwrap());
        for task in tasks {
            bucket.run(*task, &mut Recording::default()).unwrap();
        }
        drop(bucket);
        let wanted: Vec<_> = tasks.iter().copied().zip(in_write.iter().copied()).collect();
        assert_eq!(*told.lock().unwrap(), wanted, "{publish:?}");
        let seen = arena.read_begin(0, 0, AT_ONCE).map(|seen| seen.generation);
        assert_eq!(seen, Ok(generation), "{publish:?} {tasks:?}");
    }
}

#[test]
fn a_task_that_panics_in_a_write_leaves_the_region_torn() {
    let arena = arena();
    let (mut work, _) = fake(Some(&arena));
    work.fails = Some(Task::Speculate);
    let stage = Stage::open(Options { priority: 0, cores: 0, publish: Publish::Staged }).unwrap();
    stage.begin(1.0).unwrap();
    stage.submit(work, None, Some(target(&arena, 1))).unwrap();
    assert!(matches!(stage.wait(SOON), Err(Error::Internal(_))));
    assert!(matches!(stage.finish(None), Err(Error::Internal(_))), "a failed job waits for no verdict");
    let torn = arena.read_begin(0, 0, SOON).unwrap_err();
    assert_eq!(torn.arena_kind(), Some(ArenaKind::Torn));
    stage.begin(1.0).unwrap();
}

#[test]
fn a_target_that_cannot_be_is_refused() {
    let arena = arena();
    let start = arena.region(0).unwrap().span.address();
    let new = |region, copy| Target::new(&arena, region, 1, lent_copies(&[copy])).map(drop);
    assert!(new(0, (start, 100)).is_ok());
    assert!(new(0, (start, 101)).is_err() && new(0, (start - 1, 1)).is_err());
    assert!(new(0, (start, usize::MAX)).is_err() && new(1, (start, 1)).is_err());
    let late = target(&arena, 0).reserve().unwrap_err().to_string();
    assert!(late.starts_with("target.generation"), "{late}");
}

#[test]
fn a_stage_has_its_region_from_the_submission_to_the_end_of_its_job() {
    for publish in [Publish::Final, Publish::Staged] {
        let (arena, flag) = (arena(), EventFd::new().unwrap());
        let elsewhere =
            Arena::open_fd(arena.info().unwrap().fd, Open { write: true, ..Open::default() }).unwrap();
        let first = Stage::open(Options { priority: 0, cores: 0, publish }).unwrap();
        let second = Stage::open(Options { priority: 0, cores: 0, publish }).unwrap();
        first.begin(1.0).unwrap();
        first
            .submit(fake(None).0, Some(Event::readable(flag.fd()).unwrap()), Some(target(&arena, 1)))
            .unwrap();
        for step in 0..2 {
            second.begin(1.0).unwrap();
            let refused = second.submit(fake(None).0, None, Some(target(&arena, 2)));
            assert!(matches!(refused, Err(Error::Busy(_))), "{refused:?}");
            second.rollback().unwrap();
            assert!(matches!(elsewhere.write_begin(0, 2), Err(Error::Busy(_))));
            for refused in [arena.write_end(0), arena.write_abort(0, true), arena.write_abort(0, false)] {
                let text = refused.unwrap_err().to_string();
                assert!(text.contains("belongs to a stage"), "{text}");
            }
            if step == 0 {
                assert_eq!(elsewhere.read_begin(0, 0, AT_ONCE).unwrap().generation, 0, "not in a write");
                flag.set();
                first.wait(SOON).unwrap();
            }
        }
        first.resolve(Verdict::Commit).unwrap();
        first.finish(SOON).unwrap();
        assert_eq!(elsewhere.read_begin(0, 1, AT_ONCE).unwrap().generation, 1);
        elsewhere.write_begin(0, 2).unwrap();
    }
}

#[test]
fn a_torn_region_goes_to_a_stage_only_if_its_copies_cover_all_of_it() {
    let arena = arena();
    arena.write_begin(0, 1).unwrap();
    arena.write_abort(0, false).unwrap();
    let start = arena.region(0).unwrap().span.address();
    let reserve = |copies: &[(usize, usize)]| {
        Target::new(&arena, 0, 1, lent_copies(copies)).unwrap().reserve().map(drop)
    };
    let parts: [&[(usize, usize)]; 4] =
        [&[], &[(start, 99)], &[(start + 1, 99)], &[(start + 60, 40), (start, 59), (start, 10)]];
    for copies in parts {
        assert_eq!(reserve(copies).unwrap_err().arena_kind(), Some(ArenaKind::Torn), "{copies:?}");
    }
    assert_eq!(reserve(&[(start + 60, 40), (start + 10, 0), (start, 60), (start + 5, 10)]), Ok(()));
    let torn = arena.read_begin(0, 0, AT_ONCE).unwrap_err();
    assert_eq!(torn.arena_kind(), Some(ArenaKind::Torn), "a reservation that ends changes nothing");
}

/// A job is submitted, not begun.
#[test]
fn a_stage_without_a_job_says_to_submit_one() {
    let none = stage().wait(AT_ONCE).unwrap_err();
    assert_eq!(none, Rounds::Job.error(RoundKind::NotBegun));
    assert_eq!(none.to_string(), "no job of the stage is open; submit one first");
}

fn stage() -> Stage {
    Stage::open(Options { priority: 0, cores: 0, publish: Publish::Staged }).unwrap()
}

#[test]
fn a_stage_that_waits_for_its_event_leaves_the_cores_to_another() {
    let (waiting, other, flag) = (stage(), stage(), EventFd::new().unwrap());
    let ((slow, slow_told), (quick, _)) = (fake(None), fake(None));
    waiting.begin(1.0).unwrap();
    waiting.submit(slow, Some(Event::readable(flag.fd()).unwrap()), None).unwrap();
    other.begin(1.0).unwrap();
    other.submit(quick, None, None).unwrap();
    assert_eq!(other.wait(SOON).unwrap().sum_squares, 1.0);
    assert!(slow_told.lock().unwrap().is_empty());
    assert!(matches!(waiting.wait(AT_ONCE), Err(Error::Timeout(_))));
    flag.set();
    waiting.wait(SOON).unwrap();
    for stage in [&waiting, &other] {
        stage.resolve(Verdict::Commit).unwrap();
        stage.finish(SOON).unwrap();
        assert_eq!(stage.progress(), Ok(Progress::Final));
    }
}

#[test]
fn a_job_is_rolled_back_in_any_state() {
    let (stage, flag) = (stage(), EventFd::new().unwrap());
    stage.rollback().unwrap();
    let (never, told) = fake(None);
    stage.begin(1.0).unwrap();
    stage.submit(never, Some(Event::readable(flag.fd()).unwrap()), None).unwrap();
    stage.rollback().unwrap();
    stage.finish(SOON).unwrap();
    assert!(told.lock().unwrap().is_empty());
    let (work, told) = fake(None);
    stage.begin(1.0).unwrap();
    stage.submit(work, None, None).unwrap();
    assert!(stage.begin(1.0).is_err());
    stage.wait(SOON).unwrap();
    drop(stage);
    assert_eq!(*told.lock().unwrap(), [(Task::Speculate, false), (Task::Rollback, false)]);
}

/// Waits until the thread, named by its folder below /proc, sleeps.
fn until_asleep(thread: &std::path::Path) {
    let state = || std::fs::read_to_string(thread.join("stat")).unwrap();
    while !state().rsplit(") ").next().unwrap().starts_with('S') {
        std::thread::yield_now();
    }
}

#[test]
fn a_job_that_fails_while_finish_waits_ends_the_wait_with_its_error() {
    let stage = stage();
    let (reader, writer) = std::io::pipe().unwrap();
    let (work, told) = fake(None);
    stage.begin(1.0).unwrap();
    let never = Event::readable(std::os::fd::AsRawFd::as_raw_fd(&reader)).unwrap();
    stage.submit(work, Some(never), None).unwrap();
    let (tell, thread) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let finished = scope.spawn(|| {
            let thread = std::fs::read_link("/proc/thread-self").unwrap();
            tell.send(std::path::Path::new("/proc").join(thread)).unwrap();
            stage.finish(SOON)
        });
        until_asleep(&thread.recv().unwrap());
        drop(writer);
        let failed = finished.join().unwrap();
        assert!(
            matches!(
                failed,
                Err(Error::Round(RoundError { of: Rounds::Job, kind: RoundKind::Event { .. } }))
            ),
            "{failed:?}"
        );
    });
    assert!(told.lock().unwrap().is_empty());
    stage.begin(1.0).unwrap();
}

#[test]
fn errors_speak_of_the_stage_and_not_of_buckets_and_rounds() {
    let (stage, flag) = (stage(), EventFd::new().unwrap());
    let never_begun = [stage.wait(AT_ONCE).map(drop), stage.resolve(Verdict::Commit)];
    stage.begin(1.0).unwrap();
    let not_submitted = stage.wait(AT_ONCE).map(drop);
    stage.submit(fake(None).0, Some(Event::readable(flag.fd()).unwrap()), None).unwrap();
    let pending = [
        stage.wait(AT_ONCE).map(drop),
        stage.finish(AT_ONCE),
        stage.resolve(Verdict::Skip),
        stage.begin(1.0),
        stage.submit(fake(None).0, None, None),
    ];
    flag.set();
    stage.wait(SOON).unwrap();
    stage.resolve(Verdict::Commit).unwrap();
    let resolved = [stage.resolve(Verdict::Commit), stage.wait(AT_ONCE).map(drop)];
    for refused in never_begun.into_iter().chain([not_submitted]).chain(pending).chain(resolved) {
        let text = refused.unwrap_err().to_string();
        assert!(!text.contains("bucket") && !text.contains("round"), "{text}");
        assert!(text.contains("stage") || text.contains("its event is still pending"), "{text}");
    }
}
