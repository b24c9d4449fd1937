//! An update that runs beside the caller: subgroups are stepped as their gradients arrive, by a thread of the library.
//!
//! | state | calls |
//! |---|---|
//! | at rest | all but those of an open update; they wait for the writes of the last update |
//! | open | `submit`, `verdict`, `finish`, and `rollback`, which abandons the update |
//! | finished | as at rest; the thread still writes, and ends with the last write. `commit` and the next begin do not wait |
//!
//! Invariants:
//! - Either the thread or [`Inner::swap`] has the update. Only the thread reads gradients, and it has none left when an
//!   update has its outcome, was abandoned, or was closed.
//! - An update without a verdict is speculative: its steps are final with [`Verdict::Commit`] only.
//! - After an error in the background only a rollback makes the state usable again.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::adam::{AdamUpdate, Part, Parts};
use super::extents;
use super::{Advance, Closure, Layout, Source, SubgroupState, Swap, SwapStats, Update, stuck};
use crate::error::{Error, Result, RoundKind, Rounds};
use crate::offload::speculate::Verdict;
use crate::optim::StepStats;
use crate::sys::bell::Bell;
use crate::sys::promise::{Outcome, Promise, promise};
use crate::sys::sync::{Guard, Lock, Signal, deadline_after};
use crate::sys::{threads, try_vec};
use crate::tier::UpdateClaim;
use crate::tier::commit::CommitBeside;

/// Settings of an update beside the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BesideOptions {
    /// The caller will give a verdict.
    pub speculative: bool,
    /// Sum the squares of the scaled gradients.
    pub squares: bool,
    /// After a skip, copies that were written receive the param from before the step.
    pub restores: bool,
}

/// A tiered update whose steps may run beside the caller.
#[derive(Debug)]
pub struct Beside {
    layout: Layout,
    /// Told when an update begins and ends.
    claim: Arc<UpdateClaim>,
    shared: Arc<ThreadLink>,
}

/// What the callers and the thread share.
#[derive(Debug)]
struct ThreadLink {
    inner: Lock<Inner>,
    /// Signalled when an update has its outcome, and when the thread ends.
    changed: Signal,
    /// Wakes the thread.
    bell: Arc<Bell>,
}

#[derive(Debug)]
struct Inner {
    /// `None` while the thread has it.
    swap: Option<Box<Swap>>,
    /// A commit that was begun after the last finish, until the thread takes it up.
    commit: Option<Commit>,
    /// An update that was begun, until the thread takes it up.
    begun: Option<BesideOptions>,
    /// The update between its begin and its finish.
    open: Option<Open>,
    /// The thread must give the update up.
    abandon: bool,
    /// Counts at the last outcome of an update in the background.
    stats: SwapStats,
    /// Time that callers waited for the thread.
    exposed: Duration,
}

/// A commit for the thread.
#[derive(Debug)]
struct Commit {
    begun: CommitBeside,
    step: u64,
    payload: Vec<u8>,
    promise: Promise<()>,
}

#[derive(Debug)]
struct Open {
    submitted: Vec<bool>,
    verdict: Option<Verdict>,
    letters: Vec<Letter>,
    /// Stepped subgroups that no caller was told of, in the order of their steps.
    published: VecDeque<usize>,
    /// The steps so far are final.
    decided: bool,
    outcome: Option<Result<StepStats>>,
}

/// What a caller tells the thread.
#[derive(Debug)]
enum Letter {
    Arrived(usize, Vec<Part<'static>>),
    Verdict(Verdict),
}

impl Beside {
    /// An update at rest.
    pub fn new(swap: Swap) -> Beside {
        let (layout, bell) = (swap.layout().clone(), swap.tier.bell());
        let claim = Arc::clone(&swap.claim);
        let inner = Inner {
            commit: None,
            begun: None,
            open: None,
            abandon: false,
            stats: swap.stats(),
            exposed: Duration::ZERO,
            swap: Some(Box::new(swap)),
        };
        let shared = Arc::new(ThreadLink { inner: Lock::new(inner), changed: Signal::default(), bell });
        Beside { layout, claim, shared }
    }

    /// The subgroups.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Counts since open; those of an update beside the caller are included once it has its outcome.
    pub fn stats(&self) -> SwapStats {
        let inner = self.shared.inner.lock();
        let mut stats = inner.swap.as_ref().map_or_else(|| inner.stats.clone(), |swap| swap.stats());
        stats.exposed_seconds += inner.exposed.as_secs_f64();
        stats
    }

    /// Makes a call between updates. Waits for the writes of the last update. Errors: an update is open.
    pub fn at_rest<T>(&self, call: impl FnOnce(&mut Swap) -> Result<T>) -> Result<T> {
        let inner = self.shared.inner.lock();
        if inner.open.is_some() {
            return Err(Rounds::Update.error(RoundKind::Open));
        }
        let mut inner = self.wait_while(inner, None, |inner| !inner.is_at_rest());
        inner.swap.as_mut().map_or_else(|| Err(Rounds::Update.error(RoundKind::Open)), |swap| call(swap))
    }

    /// Opens an update and returns at once: reads begin, in the order in which the last update's gradients arrived.
    /// Errors: an update is open; the last one failed; no thread.
    pub fn begin(&self, options: BesideOptions) -> Result<()> {
        let submitted = try_vec::from_fn("listing the subgroups", self.layout.len(), |_| false)?;
        let mut inner = self.shared.inner.lock();
        if inner.open.is_some() {
            return Err(Rounds::Update.error(RoundKind::Open));
        }
        self.start_thread(&inner)?;
        self.claim.begin()?;
        let verdict = (!options.speculative).then_some(Verdict::Commit);
        inner.begun = Some(options);
        inner.open = Some(Open {
            submitted,
            verdict,
            letters: Vec::new(),
            published: VecDeque::new(),
            decided: !options.speculative,
            outcome: None,
        });
        self.shared.bell.ring();
        Ok(())
    }

    /// Begins a commit of the states as they are now, and returns at once. Subgroups that are only in memory are written
    /// first; the next update begins after that. Errors: an update is open; the last one failed; no thread.
    pub fn commit(&self, step: u64, payload: &[u8]) -> Result<Outcome<()>> {
        // Without the lock, which the thread needs to continue with the commit before.
        self.claim.after_commit();
        let mut inner = self.shared.inner.lock();
        if inner.open.is_some() {
            return Err(Rounds::Update.error(RoundKind::Open));
        }
        // It finds the commit once the lock is free.
        self.start_thread(&inner)?;
        let begun = self.claim.begin_commit(payload, &extents::all(self.claim.tier(), self.layout.len()))?;
        let (promise, outcome) = promise("the commit");
        inner.commit = Some(Commit { begun, step, payload: payload.to_vec(), promise });
        self.shared.bell.ring();
        Ok(outcome)
    }

    /// Starts the thread, unless it has the update.
    fn start_thread(&self, inner: &Inner) -> Result<()> {
        let Some(swap) = &inner.swap else { return Ok(()) };
        swap.ready()?;
        // A thread that was started and has not run yet takes up everything.
        let theirs = Arc::clone(&self.shared);
        threads::spawn_quiet("spillway-swap", move || run(&theirs))
            .map_err(|error| Error::system("starting the thread that steps in the background", &error))
    }

    /// Returns Ok if `submit` would accept this subgroup now, and its error otherwise.
    pub fn may_submit(&self, subgroup: usize) -> Result<()> {
        self.layout.elements(subgroup)?;
        open(&mut self.shared.inner.lock())?.may_submit(subgroup)
    }

    /// True if the open update is speculative and has no verdict. Errors: no update is open.
    pub fn is_speculative(&self) -> Result<bool> {
        Ok(open(&mut self.shared.inner.lock())?.verdict.is_none())
    }

    /// True if the open update is skipped.
    pub fn is_skipped(&self) -> bool {
        let inner = self.shared.inner.lock();
        inner.open.as_ref().is_some_and(|open| open.verdict == Some(Verdict::Skip))
    }

    /// The first subgroup that was submitted. Errors: no update is open.
    pub fn first_submitted(&self) -> Result<Option<usize>> {
        Ok(open(&mut self.shared.inner.lock())?.submitted.iter().position(|submitted| *submitted))
    }

    /// Passes the gradients of a subgroup to the open update, sorted by their first element. Elements without a part do
    /// not change.
    pub fn submit(&self, subgroup: usize, parts: Vec<Part<'static>>) -> Result<()> {
        self.layout.elements(subgroup)?;
        let mut inner = self.shared.inner.lock();
        let open = open(&mut inner)?;
        open.may_submit(subgroup)?;
        open.submitted[subgroup] = true;
        open.letters.push(Letter::Arrived(subgroup, parts));
        self.shared.bell.ring();
        Ok(())
    }

    /// Gives a speculative update its verdict, before or after any submit. After a skip no subgroup is submitted.
    pub fn verdict(&self, verdict: Verdict) -> Result<()> {
        let mut inner = self.shared.inner.lock();
        let open = open(&mut inner)?;
        if open.verdict.is_some() {
            return Err(Rounds::Update.error(RoundKind::Resolved));
        }
        open.verdict = Some(verdict);
        open.letters.push(Letter::Verdict(verdict));
        self.shared.bell.ring();
        Ok(())
    }

    /// Waits until every subgroup is stepped, and ends the update: its gradients and copies belong to the caller again.
    /// Writes continue. After a skip, reads in flight wait for no turn. Errors: a subgroup was not submitted, or there is no
    /// verdict (the update stays open); a timeout (the update stays open); the error that ended the update.
    pub fn finish(&self, timeout: Option<Duration>) -> Result<StepStats> {
        let until = deadline_after(timeout);
        let mut inner = self.shared.inner.lock();
        let open = open(&mut inner)?;
        open.may_finish()?;
        let skipped = open.verdict == Some(Verdict::Skip);
        let _without_turns = skipped.then(|| self.claim.tier().without_turns());
        let pending = |inner: &mut Inner| inner.open.as_ref().is_some_and(|open| open.outcome.is_none());
        let mut inner = self.wait_while(inner, until, pending);
        match inner.open.take_if(|open| open.outcome.is_some()).and_then(|open| open.outcome) {
            Some(outcome) => {
                self.claim.finish();
                outcome
            }
            None => Err(Error::Timeout("the update is still in progress; finish it again".to_string())),
        }
    }

    /// Waits for the next subgroup whose step is final and whose copies are written; `None`: there is none left. Errors: no
    /// update is open; a timeout; the error that ended the update.
    pub fn next_published(&self, timeout: Option<Duration>) -> Result<Option<usize>> {
        let until = deadline_after(timeout);
        let mut inner = self.shared.inner.lock();
        open(&mut inner)?;
        let pending = |inner: &mut Inner| inner.open.as_ref().is_some_and(Open::may_publish);
        let mut inner = self.wait_while(inner, until, pending);
        let open = open(&mut inner)?;
        match (&open.outcome, open.may_publish()) {
            (_, true) => Err(Error::Timeout("no further subgroup is stepped yet; ask again".to_string())),
            (Some(Err(error)), _) => Err(error.clone()),
            _ => Ok(open.published.pop_front()),
        }
    }

    /// Abandons an open update, and rolls back to the last commit. Transfers in flight do not wait for turns meanwhile.
    pub fn rollback(&self) -> Result<()> {
        let _without_turns = self.claim.tier().without_turns();
        match &mut self.abandon().swap {
            Some(swap) => swap.rollback(),
            None => Err(Error::Internal("the thread of an update has not returned it".to_string())),
        }
    }

    /// Ends what the thread does, and waits for the thread.
    fn abandon(&self) -> Guard<'_, Inner> {
        // A commit that was begun before takes place.
        let mut inner =
            self.shared.changed.wait_while(self.shared.inner.lock(), None, |inner| inner.commit.is_some());
        (inner.begun, inner.abandon) = (None, true);
        self.shared.bell.ring();
        inner = self.shared.changed.wait_while(inner, None, |inner| !inner.is_at_rest());
        (inner.open, inner.abandon) = (None, false);
        self.claim.finish();
        inner
    }

    fn wait_while<'a>(
        &self,
        inner: Guard<'a, Inner>,
        until: Option<Instant>,
        condition: impl FnMut(&mut Inner) -> bool,
    ) -> Guard<'a, Inner> {
        let began = Instant::now();
        let mut inner = self.shared.changed.wait_while(inner, until, condition);
        inner.exposed += began.elapsed();
        inner
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        let _without_turns = self.claim.tier().without_turns();
        // The thread may hold the rest for a moment longer; the tier must not be in use after a close.
        let swap = self.abandon().swap.take();
        drop(swap);
    }
}

fn open(inner: &mut Inner) -> Result<&mut Open> {
    inner.open.as_mut().ok_or(Rounds::Update.error(RoundKind::NotBegun))
}

impl Open {
    fn may_submit(&self, subgroup: usize) -> Result<()> {
        match &self.outcome {
            Some(Err(error)) => Err(error.clone()),
            _ if self.verdict == Some(Verdict::Skip) => Err(Rounds::Update.error(RoundKind::Resolved)),
            _ if self.submitted[subgroup] => Err(Rounds::Update.error(RoundKind::Submitted(subgroup as u32))),
            _ => Ok(()),
        }
    }

    /// True if no published subgroup is there, and one may come.
    fn may_publish(&self) -> bool {
        self.outcome.is_none() && (self.published.is_empty() || !self.decided)
    }

    fn may_finish(&self) -> Result<()> {
        if self.outcome.is_some() || self.verdict == Some(Verdict::Skip) {
            return Ok(());
        }
        match self.submitted.iter().position(|submitted| !submitted) {
            Some(missing) => Err(Rounds::Update.error(RoundKind::Missing(missing as u32))),
            None if self.verdict.is_none() => Err(Rounds::Update.error(RoundKind::Open)),
            None => Ok(()),
        }
    }
}

fn abandoned() -> Error {
    Error::Busy("the update was abandoned".to_string())
}

/// The thread: runs updates until none is begun.
fn run(shared: &ThreadLink) {
    loop {
        let mut inner = shared.inner.lock();
        // A thread that starts late finds that another one runs the update, or that it was abandoned.
        if !inner.has_work() {
            return;
        }
        let Some(mut swap) = inner.swap.take() else { return };
        let commit = inner.commit.take();
        let options = if commit.is_none() { inner.begun.take() } else { None };
        drop(inner);
        shared.changed.notify_all();
        let outcome = catch_unwind(AssertUnwindSafe(|| match (commit, options) {
            (Some(Commit { begun, step, payload, promise }), _) => {
                swap.commit_beside(begun, step, &payload, promise)
            }
            (None, Some(options)) => swap.serve(shared, options),
            (None, None) => Ok(()),
        }));
        let outcome = swap.note(outcome.unwrap_or_else(|panic| Err(Error::of_panic(&*panic))));
        let mut inner = shared.inner.lock();
        inner.stats = swap.stats();
        inner.swap = Some(swap);
        if let Err(error) = outcome {
            inner.begun = None;
            inner.fail(error);
        }
        if !inner.has_work() {
            shared.changed.notify_all();
            return;
        }
    }
}

impl Inner {
    fn has_work(&self) -> bool {
        self.commit.is_some() || self.begun.is_some()
    }

    fn is_at_rest(&self) -> bool {
        self.swap.is_some() && self.commit.is_none()
    }

    fn fail(&mut self, error: Error) {
        if let Some(Commit { begun, promise, .. }) = self.commit.take() {
            drop(begun);
            promise.keep(Err(error.clone()));
        }
        if let Some(open) = &mut self.open {
            open.letters.clear();
            open.outcome.get_or_insert(Err(error));
        }
    }
}

impl ThreadLink {
    /// What callers told the thread since the last call. Errors: the update was abandoned.
    fn letters(&self) -> Result<Vec<Letter>> {
        let mut inner = self.inner.lock();
        match inner.abandon {
            true => Err(abandoned()),
            false => Ok(inner.open.as_mut().map_or_else(Vec::new, |open| std::mem::take(&mut open.letters))),
        }
    }

    /// A subgroup was stepped.
    fn stepped(&self, subgroup: usize) {
        let mut inner = self.inner.lock();
        if let Some(open) = inner.open.as_mut().filter(|open| open.verdict != Some(Verdict::Skip)) {
            open.published.push_back(subgroup);
            if open.decided {
                self.changed.notify_all();
            }
        }
    }

    /// The steps so far are final, or taken back.
    fn decided(&self, verdict: Verdict) {
        let mut inner = self.inner.lock();
        if let Some(open) = &mut inner.open {
            open.decided = true;
            if verdict != Verdict::Commit {
                open.published.clear();
            }
        }
        self.changed.notify_all();
    }

    fn report(&self, stats: StepStats, counts: SwapStats) {
        let mut inner = self.inner.lock();
        inner.stats = counts;
        if let Some(open) = &mut inner.open {
            open.outcome = Some(Ok(stats));
        }
        drop(inner);
        self.changed.notify_all();
    }

    /// True if the next update is begun, and no commit comes before it. Errors: the update was abandoned.
    fn is_begun(&self) -> Result<bool> {
        let inner = self.inner.lock();
        if inner.abandon { Err(abandoned()) } else { Ok(inner.begun.is_some() && inner.commit.is_none()) }
    }
}

impl Swap {
    /// Runs one update until its writes have ended, or until the next one is begun and all its own writes have started.
    fn serve(&mut self, shared: &ThreadLink, options: BesideOptions) -> Result<()> {
        let mut stepped = |subgroup: usize, _: &[f32]| {
            shared.stepped(subgroup);
            Ok(())
        };
        let mut work = AdamUpdate::new(Parts::new(self.layout.len())?, options.squares, &mut stepped)?;
        self.ready()?;
        self.refresh_slots();
        self.pipeline.begin_beside(&self.expected, options.speculative)?;
        self.timeline.begin();
        self.pins = options.speculative.then(Vec::new);
        let (mut order, mut decided) = (Vec::new(), !options.speculative);
        // Until its outcome, an update answers to its callers.
        let stats = loop {
            let seen = shared.bell.events();
            for letter in shared.letters()? {
                match letter {
                    Letter::Arrived(subgroup, parts) => {
                        work.put(subgroup, parts);
                        self.pipeline.arrive(subgroup);
                        order.push(subgroup);
                    }
                    Letter::Verdict(verdict) => {
                        self.decide(verdict, options.restores, &mut work)?;
                        shared.decided(verdict);
                        decided = true;
                    }
                }
            }
            let done = self.turn(&mut work)?;
            if decided && self.pipeline.is_stepped() {
                break work.stats();
            }
            let complete = decided && order.len() == self.layout.len();
            match done {
                Advance::Acted => {}
                Advance::Waits if complete && self.traffic.idle() => return Err(stuck()),
                Advance::Waits | Advance::Done => self.tier.wait_for_event(seen),
            }
        };
        if order.len() == self.layout.len() {
            self.expected = order;
        }
        // The gradients belong to the caller again.
        drop(work);
        self.traffic.end_round(&self.tier);
        shared.report(stats, self.stats());
        loop {
            let seen = shared.bell.events();
            let begun = shared.is_begun()?;
            match self.turn(&mut Closure(|_, _: SubgroupState<'_>| Ok(())))? {
                Advance::Acted => {}
                Advance::Done => return Ok(()),
                Advance::Waits if begun => return Ok(()),
                Advance::Waits if self.traffic.idle() => return Err(stuck()),
                Advance::Waits => self.tier.wait_for_event(seen),
            }
        }
    }

    /// Handles transfers that have ended, and does what the pipeline wants next.
    fn turn(&mut self, work: &mut dyn Update) -> Result<Advance> {
        self.collect(false)?;
        self.advance(Source::Tier, work)
    }

    /// Makes the steps so far final, or takes them back.
    fn decide(&mut self, verdict: Verdict, restores: bool, work: &mut AdamUpdate<'_, '_>) -> Result<()> {
        let pins = self.pins.take();
        if verdict == Verdict::Commit {
            self.pipeline.keep();
            return Ok(());
        }
        while !self.traffic.idle() {
            self.collect(true)?;
        }
        pins.iter().flatten().try_for_each(|pin| pin.revert())?;
        match verdict {
            Verdict::Redo(factor) => {
                work.redo(factor);
                self.pipeline.redo()?;
            }
            _ => {
                work.restore();
                self.pipeline.skip(|subgroup| restores && work.publishes(subgroup))?;
            }
        }
        self.refresh_slots();
        Ok(())
    }
}
