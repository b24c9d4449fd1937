//! The state machine of a round alone, and the engine with fake buckets that record their tasks.
#![forbid(unsafe_code)]

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::round::Round;
use super::{Bucket, Clip, Engine, Progress, Publish, Recording, Task, Verdict};
use crate::error::{Error, Result, RoundError, RoundKind, Rounds};
use crate::optim::StepStats;
use crate::sys::event::{Event, EventFd};

fn seen(sum_squares: f64) -> StepStats {
    StepStats { nonfinite: !sum_squares.is_finite(), sum_squares }
}

fn clip() -> Clip {
    Clip::new(1.0, 1.0).unwrap()
}

/// A round of three buckets, of which the given ones have arrived with these sums of squares.
fn round(arrived: &[(usize, f64)]) -> (Round, Vec<Task>) {
    let mut round = Round::new(3, Rounds::Speculation).unwrap();
    round.begin(clip(), false).unwrap();
    let mut tasks = Vec::new();
    for (index, sum) in arrived {
        round.submit(*index as u32).unwrap();
        tasks.push(round.start(*index, Task::Speculate));
        round.done(*index, seen(*sum));
    }
    (round, tasks)
}

fn refused(outcome: Result<()>, wanted: RoundKind) {
    assert_eq!(outcome, Err(Rounds::Speculation.error(wanted)));
}

#[test]
fn calls_out_of_order_are_refused_and_change_nothing() {
    let mut round = Round::new(2, Rounds::Speculation).unwrap();
    refused(round.submit(0), RoundKind::NotBegun);
    refused(round.resolve(Verdict::Commit), RoundKind::NotBegun);
    round.begin(clip(), false).unwrap();
    refused(round.begin(clip(), false), RoundKind::Open);
    assert!(matches!(round.submit(2), Err(Error::InvalidArgument { .. })));
    round.submit(0).unwrap();
    refused(round.submit(0), RoundKind::Submitted(0));
    refused(round.local().map(drop), RoundKind::Missing(1));
    refused(round.resolve(Verdict::Commit), RoundKind::Missing(1));
    round.submit(1).unwrap();
    assert_eq!(round.local(), Ok(None));
    refused(round.resolve(Verdict::Commit), RoundKind::Unmeasured);
    for index in 0..2 {
        assert_eq!(round.start(index, Task::Speculate), Task::Speculate);
        round.done(index, seen(0.1));
    }
    round.resolve(Verdict::Skip).unwrap();
    refused(round.resolve(Verdict::Skip), RoundKind::Resolved);
    refused(round.submit(0), RoundKind::Resolved);
    refused(round.begin(clip(), false), RoundKind::Unfinished);
    assert_eq!(round.due().collect::<Vec<_>>(), [1, 0], "the last submitted comes first");
    for index in [1, 0] {
        assert_eq!(round.start(index, Task::Speculate), Task::Rollback);
        round.done(index, StepStats::default());
    }
    refused(round.submit(0), RoundKind::Resolved);
    round.begin(clip(), false).unwrap();
    assert_eq!(round.progress(0), Ok(Progress::Missing));
}

#[test]
fn the_sum_does_not_depend_on_the_order_of_arrival() {
    let sums = [(0, 1.0), (1, 1e16), (2, 1.0)];
    let expected = (1.0 + 1e16) + 1.0;
    assert_ne!(expected, (1.0 + 1.0) + 1e16, "the order matters to these");
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let (round, _) = round(&order.map(|index| sums[index]));
        assert_eq!(round.local(), Ok(Some(seen(expected))));
    }
}

#[test]
fn once_the_verdict_is_certain_buckets_are_spared() {
    let (mut round, tasks) = round(&[(2, 0.5), (0, 0.6), (1, 0.1)]);
    assert_eq!(tasks, [Task::Speculate, Task::Speculate, Task::Measure]);
    round.resolve(Verdict::Redo(0.5)).unwrap();
    assert_eq!(round.rolled_back_buckets(), [0, 2]);
    let due: Vec<Task> = (0..3).map(|index| round.due_task(index).unwrap()).collect();
    assert_eq!(due, [Task::Redo(0.5), Task::Step(0.5), Task::Redo(0.5)]);
    let counts = round.counts();
    assert_eq!((counts.speculated, counts.redone, counts.spared, counts.redos), (2, 2, 1, 1));
}

/// The first task of a bucket in the next round, which then gets this verdict; `None`: it is aborted.
fn next_task(round: &mut Round, verdict: Option<Verdict>, always_early: bool) -> Task {
    round.begin(clip(), always_early).unwrap();
    round.submit(0).unwrap();
    let task = round.start(0, Task::Speculate);
    round.done(0, seen(0.1));
    match verdict {
        Some(verdict) => round.resolve(verdict).unwrap(),
        None => assert!(round.abort()),
    }
    if round.due_task(0).is_some() {
        round.start(0, Task::Speculate);
        round.done(0, StepStats::default());
    }
    task
}

#[test]
fn after_two_rounds_in_vain_buckets_are_measured_until_a_round_would_have_kept_their_steps() {
    let (kept, redone, skipped) = (Some(Verdict::Commit), Some(Verdict::Redo(0.5)), Some(Verdict::Skip));
    let (early, late) = (Task::Speculate, Task::Measure);
    let mut round = Round::new(1, Rounds::Speculation).unwrap();
    let rounds = [
        (redone, early),
        (kept, early),
        (redone, early),
        (skipped, early),
        (redone, late),
        (kept, late),
        (redone, early),
    ];
    for (number, (verdict, wanted)) in rounds.into_iter().enumerate() {
        assert_eq!(next_task(&mut round, verdict, false), wanted, "round {number}");
    }
    let mut round = Round::new(1, Rounds::Speculation).unwrap();
    for _ in 0..3 {
        assert_eq!(next_task(&mut round, redone, true), early, "readers use what it writes");
    }
    assert_eq!(next_task(&mut round, kept, false), late);
}

#[test]
fn a_step_that_is_repeated_after_an_abort_does_not_show_that_early_steps_are_kept() {
    let mut round = Round::new(1, Rounds::Speculation).unwrap();
    let kept = Some(Verdict::Commit);
    for wanted in [Task::Speculate, Task::Speculate, Task::Measure, Task::Measure] {
        assert_eq!(next_task(&mut round, None, false), wanted);
        next_task(&mut round, kept, false);
    }
    assert_eq!(next_task(&mut round, kept, false), Task::Measure);
    assert_eq!(next_task(&mut round, kept, false), Task::Speculate);
    round.begin(clip(), false).unwrap();
    round.submit(0).unwrap();
    assert!(round.abort(), "before a step, which says nothing");
    for wanted in [Task::Speculate, Task::Speculate, Task::Measure] {
        assert_eq!(next_task(&mut round, Some(Verdict::Redo(0.5)), false), wanted);
    }
}

#[test]
fn a_bucket_that_does_not_speculate_steps_once_after_the_verdict() {
    for (verdict, wanted) in [(Verdict::Commit, Task::Step(1.0)), (Verdict::Redo(0.5), Task::Step(0.5))] {
        let mut round = Round::new(1, Rounds::Speculation).unwrap();
        round.begin(clip(), false).unwrap();
        round.submit(0).unwrap();
        assert_eq!(round.start(0, Task::Measure), Task::Measure);
        round.done(0, seen(0.1));
        assert_eq!(round.progress(0), Ok(Progress::Pending));
        round.resolve(verdict).unwrap();
        assert_eq!((round.start(0, Task::Measure), round.rolled_back_buckets().len()), (wanted, 0));
    }
}

#[test]
fn after_an_overflow_the_rest_is_not_even_measured() {
    for bad in [f64::INFINITY, f64::NAN] {
        let (mut round, tasks) = round(&[(0, 0.1), (2, bad), (1, 0.1)]);
        assert_eq!(tasks, [Task::Speculate, Task::Speculate, Task::Pass]);
        let local = round.local().unwrap().unwrap();
        assert!(local.nonfinite && local.sum_squares.is_nan());
        round.resolve(Verdict::Skip).unwrap();
        assert_eq!(round.progress(1), Ok(Progress::Final), "it was never touched");
    }
    // A caller with its own clip rule may still commit.
    let (mut round, _) = round(&[(0, f64::INFINITY), (1, 0.1), (2, 0.1)]);
    round.resolve(Verdict::Commit).unwrap();
    let due: Vec<Task> = (0..3).map(|index| round.due_task(index).unwrap()).collect();
    assert_eq!(due, [Task::Commit, Task::Step(1.0), Task::Step(1.0)]);
}

#[test]
fn an_abort_takes_back_what_was_stepped_also_what_is_being_stepped() {
    let mut round = Round::new(4, Rounds::Speculation).unwrap();
    round.begin(clip(), false).unwrap();
    for bucket in 0..3 {
        round.submit(bucket).unwrap();
    }
    round.start(0, Task::Speculate);
    round.done(0, seen(0.1));
    round.start(1, Task::Speculate);
    round.abort();
    assert_eq!((round.progress(2), round.progress(3)), (Ok(Progress::Final), Ok(Progress::Final)));
    assert_eq!(round.due_task(1), None, "it is still being stepped");
    round.done(1, seen(0.1));
    for index in [0, 1] {
        assert_eq!(round.start(index, Task::Speculate), Task::Rollback);
        round.done(index, StepStats::default());
    }
    assert!(round.is_idle());
    assert_eq!((round.counts().aborts, round.counts().rolled_back), (1, 2));
}

/// A bucket that records the tasks it is given.
struct Fake {
    index: u32,
    sum: f64,
    told: Arc<Mutex<Vec<(u32, Task)>>>,
}

impl Bucket for Fake {
    fn run(&mut self, task: Task, _: &mut Recording) -> Result<StepStats> {
        self.told.lock().unwrap().push((self.index, task));
        assert!(self.sum >= 0.0, "a bucket that panics");
        Ok(seen(self.sum))
    }
}

struct Stage {
    engine: Engine,
    told: Arc<Mutex<Vec<(u32, Task)>>>,
}

impl Stage {
    fn new(buckets: u32, publish: Publish) -> Stage {
        let engine = Engine::open(buckets, publish, Rounds::Speculation).unwrap();
        engine.begin(clip()).unwrap();
        Stage { engine, told: Arc::default() }
    }

    fn submit(&self, index: u32, sum: f64, event: Option<Event>) -> Result<()> {
        self.engine.submit(index, Box::new(Fake { index, sum, told: Arc::clone(&self.told) }), event)
    }

    fn told(&self) -> Vec<(u32, Task)> {
        self.told.lock().unwrap().clone()
    }
}

const SOON: Option<Duration> = Some(Duration::from_secs(60));

#[test]
fn a_bucket_that_panics_fails_alone_and_the_next_round_works() {
    let stage = Stage::new(2, Publish::Staged);
    stage.submit(0, 0.1, None).unwrap();
    stage.submit(1, -1.0, None).unwrap();
    let error = stage.engine.local_result(SOON).unwrap_err();
    assert!(matches!(&error, Error::Internal(words) if words.contains("a bucket that panics")), "{error}");
    assert_eq!(stage.engine.resolve_as(Verdict::Commit).unwrap_err(), error);
    // The round is open, and no verdict can end it: a wait without a timeout would never return.
    assert_eq!(stage.engine.finish(None).unwrap_err(), error);
    stage.engine.abort().unwrap();
    assert_eq!(stage.engine.finish(SOON).unwrap_err(), error);
    assert_eq!(stage.engine.progress(0), Ok(Progress::Final));
    assert_eq!(stage.told(), [(0, Task::Speculate), (1, Task::Speculate), (0, Task::Rollback)]);

    stage.engine.begin(clip()).unwrap();
    stage.submit(1, 0.1, None).unwrap();
    stage.submit(0, 0.1, None).unwrap();
    stage.engine.local_result(SOON).unwrap();
    stage.engine.resolve(seen(0.2)).unwrap();
    assert_eq!(stage.engine.progress(1), Ok(Progress::Final), "a step that stands is final at once");
    stage.engine.finish(SOON).unwrap();
}

#[test]
fn a_bucket_waits_for_its_event_and_the_others_do_not_wait_for_it() {
    let stage = Stage::new(3, Publish::Final);
    let flag = EventFd::new().unwrap();
    stage.submit(0, 0.1, Some(Event::readable(flag.fd()).unwrap())).unwrap();
    stage.submit(2, 0.1, None).unwrap();
    stage.submit(1, 0.1, None).unwrap();
    // The other two may take longer than one wait.
    let error = || stage.engine.local_result(Some(Duration::from_millis(20))).unwrap_err();
    let only_0 =
        |error: &Error| matches!(error, Error::Timeout(words) if words.ends_with("still pending: 0"));
    assert!((0..500).map(|_| error()).any(|error| only_0(&error)));
    while stage.told().len() < 2 {
        std::thread::yield_now();
    }
    flag.set();
    assert_eq!(stage.engine.local_result(SOON).map(|local| local.nonfinite), Ok(false));
    assert_eq!(stage.told()[..2], [(2, Task::Speculate), (1, Task::Speculate)]);
    stage.engine.resolve(seen(0.3)).unwrap();
    stage.engine.finish(SOON).unwrap();
    assert!(stage.engine.stats().unwrap().exposed >= Duration::from_millis(20));
}

#[test]
fn the_age_of_a_round_counts_from_the_first_bucket_whose_event_happened() {
    let stage = Stage::new(2, Publish::Staged);
    let begun = || stage.engine.stats().unwrap().begun;
    let (flag, never) = (EventFd::new().unwrap(), EventFd::new().unwrap());
    stage.submit(0, 0.1, Some(Event::readable(flag.fd()).unwrap())).unwrap();
    stage.submit(1, 0.1, Some(Event::readable(never.fd()).unwrap())).unwrap();
    assert_eq!(begun(), None);
    flag.set();
    while stage.engine.progress(0) != Ok(Progress::Speculative) {
        std::thread::yield_now();
    }
    let age = begun().unwrap();
    never.set();
    stage.engine.local_result(SOON).unwrap();
    assert!(begun().unwrap() > age, "the age grows, also after the last bucket");
    stage.engine.resolve(seen(0.2)).unwrap();
    stage.engine.finish(SOON).unwrap();
    stage.engine.begin(clip()).unwrap();
    assert_eq!(begun(), None);
}

#[test]
fn a_dropped_round_is_taken_back_before_the_drop_returns() {
    let stage = Stage::new(3, Publish::Speculative);
    let never = EventFd::new().unwrap();
    stage.submit(1, 0.1, None).unwrap();
    stage.submit(2, 0.1, Some(Event::readable(never.fd()).unwrap())).unwrap();
    stage.engine.wait(1, SOON).unwrap();
    assert_eq!(stage.engine.progress(1), Ok(Progress::Speculative));
    let told = Arc::clone(&stage.told);
    drop(stage);
    assert_eq!(*told.lock().unwrap(), [(1, Task::Speculate), (1, Task::Rollback)]);
}

#[test]
fn an_event_that_can_never_come_is_an_error_that_names_the_bucket() {
    let stage = Stage::new(1, Publish::Staged);
    let (reader, writer) = std::io::pipe().unwrap();
    stage.submit(0, 0.1, Some(Event::readable(std::os::fd::AsRawFd::as_raw_fd(&reader)).unwrap())).unwrap();
    drop(writer);
    let error = stage.engine.wait(0, SOON).unwrap_err();
    assert!(
        matches!(error, Error::Round(RoundError { kind: RoundKind::Event { bucket: 0, .. }, .. })),
        "{error}"
    );
    stage.engine.abort().unwrap();
    assert!(stage.engine.finish(SOON).is_err());
    assert_eq!(stage.told(), []);
    stage.engine.begin(clip()).unwrap();
}

/// A bucket whose commit waits until another thread has used the engine.
struct Awaiting {
    commits: Sender<()>,
    used: Receiver<()>,
}

impl Bucket for Awaiting {
    fn run(&mut self, task: Task, _: &mut Recording) -> Result<StepStats> {
        if task == Task::Commit {
            self.commits.send(()).unwrap();
            self.used.recv_timeout(Duration::from_secs(60)).map_err(|_| Error::Timeout("it hangs".into()))?;
        }
        Ok(seen(0.1))
    }
}

/// A commit may call the driver, for uploads.
#[test]
fn other_calls_do_not_wait_for_the_commit_that_a_verdict_runs() {
    let engine = Engine::open(1, Publish::Staged, Rounds::Speculation).unwrap();
    engine.begin(clip()).unwrap();
    let ((commits, committing), (use_it, used)) = (channel(), channel());
    engine.submit(0, Box::new(Awaiting { commits, used }), None).unwrap();
    engine.local_result(SOON).unwrap();
    std::thread::scope(|scope| {
        let engine = &engine;
        scope.spawn(move || {
            committing.recv().unwrap();
            assert_eq!(engine.progress(0), Ok(Progress::Pending));
            use_it.send(()).unwrap();
        });
        engine.resolve(seen(0.1)).unwrap();
    });
    assert_eq!(engine.progress(0), Ok(Progress::Final));
}
