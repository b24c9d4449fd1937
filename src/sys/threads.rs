//! The process-wide thread pool.
//!
//! Invariants:
//! - The pool is created at first use, never at load. A process that only updates small tensors has no worker threads.
//! - A forked child has none of its parent's threads. The child leaves its parent's pool untouched (dropping it would
//!   signal threads that do not exist) and creates its own.
//! - No lock is taken that another thread could hold during a fork.
//! - The caller's CPU affinity is read, never changed. A binding applies to threads that this library started.
#![forbid(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::Scope;

use arc_swap::ArcSwapOption;
use nix::sys::signal::{SigSet, SigmaskHow};

use super::affinity;
use super::bitmap::Bitmap;
use super::cancellation::NoCancellation;
use super::cap;
use super::fork::{PerProcessStatic, Shared};
use super::openmp;
use super::team::{STACK_BYTES, Team};
use crate::environment;
use crate::error::{Error, Result};
use crate::log;

/// Most threads; a larger number is taken for a configuration mistake.
const MAX_THREADS: usize = 4096;

/// The workers; `None` for one thread, which is the caller.
static POOL: PerProcessStatic<Option<Team>> = PerProcessStatic::empty();
/// The number of threads that `configure` set; 0 decides automatically.
static CONFIGURED: AtomicUsize = AtomicUsize::new(0);

/// Where the workers run; `None`: where the thread that started them may run.
static BINDING: ArcSwapOption<Binding> = ArcSwapOption::const_empty();
/// Number of changes of the binding.
static BINDINGS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// True on threads that this library started.
    static IS_OWN: Cell<bool> = const { Cell::new(false) };
    /// True on those that follow a changed binding: all but workers.
    static FOLLOWS: Cell<bool> = const { Cell::new(false) };
    /// Value of [`BINDINGS`] that this thread follows, and its affinity before the first binding.
    static FOLLOWED: RefCell<(usize, Option<Bitmap>)> = const { RefCell::new((0, None)) };
}

/// Processors of the workers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Binding {
    /// The processors.
    pub cpus: Bitmap,
    /// Their number of cores.
    pub cores: usize,
}

/// The number of threads when the settings were last read; 0 until then.
static DECIDED: AtomicUsize = AtomicUsize::new(0);

/// Applies `work` to every item, on the calling thread and on the workers that wake in time: on as many threads as
/// [`cap::within`] allows.
pub fn each<T: Send>(items: &mut [T], work: impl Fn(&mut T) + Sync) -> Result<()> {
    let limit = cap::limit();
    follow_binding();
    match &*current()? {
        Some(team) if limit.is_none() => team.each(usize::MAX, items, work),
        Some(team) if limit > Some(1) => {
            team.each(limit.unwrap_or(1), items, |item| cap::counted(item, &work));
        }
        _ => items.iter_mut().for_each(work),
    }
    Ok(())
}

/// True if OpenMP's threads are awake, and take part in the next call. Work that takes less time than to wake a worker is
/// shared only then.
pub fn awake() -> Result<bool> {
    if DECIDED.load(Ordering::Relaxed) == 0 {
        let _no_cancellation = NoCancellation::enter();
        read_settings(decide()?.0)?;
    }
    let threads = DECIDED.load(Ordering::Relaxed);
    Ok(threads > 1 && BINDING.load().is_none() && openmp::is_awake(threads))
}

/// Number of threads that [`each`] uses, including the caller.
pub fn count() -> Result<usize> {
    match POOL.get() {
        Some(team) => Ok(team.as_ref().map_or(1, |team| team.workers() + 1)),
        None => {
            let _no_cancellation = NoCancellation::enter();
            Ok(decide()?.0)
        }
    }
}

/// Sets the number of threads, 0 for automatic. Work in flight finishes on its present workers.
pub fn configure(threads: usize) -> Result<()> {
    if threads > MAX_THREADS {
        return Err(Error::invalid(
            "options.num_threads",
            format!("is {threads}, but the limit is {MAX_THREADS}"),
        ));
    }
    CONFIGURED.store(threads, Ordering::Relaxed);
    DECIDED.store(0, Ordering::Relaxed);
    POOL.clear();
    Ok(())
}

/// Binds the workers, and the library's other threads that compute, from now on; `None`: as before the first binding. Work
/// in flight finishes on its present workers.
pub(super) fn set_binding(binding: Option<Binding>) {
    BINDING.store(binding.map(Arc::new));
    BINDINGS.fetch_add(1, Ordering::Release);
    DECIDED.store(0, Ordering::Relaxed);
    POOL.clear();
}

/// Where the workers run.
pub fn binding() -> Option<Arc<Binding>> {
    BINDING.load_full()
}

/// Applies a changed binding to the calling thread, if this library started it.
fn follow_binding() {
    let changes = BINDINGS.load(Ordering::Acquire);
    if !FOLLOWS.get() || FOLLOWED.with_borrow(|followed| followed.0 == changes) {
        return;
    }
    FOLLOWED.with_borrow_mut(|(followed, before)| {
        *followed = changes;
        match (&*BINDING.load(), &before) {
            (Some(binding), None) => {
                *before = affinity::current();
                bind_or_warn(&binding.cpus);
            }
            (Some(binding), Some(_)) => bind_or_warn(&binding.cpus),
            (None, Some(before)) => bind_or_warn(before),
            (None, None) => {}
        }
    });
}

/// Binds the calling thread of this library. The processors were granted earlier; the cpuset may have changed since.
fn bind_or_warn(cpus: &Bitmap) {
    if let Err(error) = affinity::bind_own_thread(cpus) {
        log::write(log::Level::Warn, &format!("a thread is not bound to processors {cpus}: {error}"));
    }
}

#[cfg(test)]
thread_local! {
    /// True: this thread starts no thread of the library.
    static REFUSES: Cell<bool> = const { Cell::new(false) };
}

/// Calls `work`, during which this thread starts no other one, as at the limit of threads.
#[cfg(test)]
pub(crate) fn without_new_threads<R>(work: impl FnOnce() -> R) -> R {
    REFUSES.set(true);
    let result = work();
    REFUSES.set(false);
    result
}

/// Starts a thread of the library with [`quiet`] signals.
pub fn spawn_quiet(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    #[cfg(test)]
    if REFUSES.get() {
        return Err(io::ErrorKind::WouldBlock.into());
    }
    let thread = std::thread::Builder::new().name(name.to_string()).stack_size(STACK_BYTES);
    quiet(|| {
        thread.spawn(move || {
            IS_OWN.set(true);
            FOLLOWS.set(true);
            work();
        })
    })?;
    Ok(())
}

/// As [`spawn_quiet`], for a thread that ends before `scope` does.
pub fn spawn_scoped_quiet<'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &str,
    work: impl FnOnce() + Send + 'scope,
) -> io::Result<()> {
    let thread = std::thread::Builder::new().name(name.to_string()).stack_size(STACK_BYTES);
    quiet(|| {
        thread.spawn_scoped(scope, move || {
            IS_OWN.set(true);
            work();
        })
    })?;
    Ok(())
}

/// Calls `start`, which starts threads that block all signals from their first instruction. The program's handlers then
/// never run on them, and a write past `RLIMIT_FSIZE` returns an error instead of raising SIGXFSZ.
fn quiet<T>(start: impl FnOnce() -> T) -> T {
    // A thread inherits the signal mask of the thread that starts it. Blocking signals does not fail.
    let before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_BLOCK);
    let started = start();
    let _ = before.map(|before| before.thread_set_mask());
    started
}

/// True on threads that this library started.
pub fn is_own() -> bool {
    IS_OWN.get()
}

fn current() -> Result<Shared<Option<Team>>> {
    POOL.get_or_try(make)
}

fn make() -> Result<Option<Team>> {
    let _no_cancellation = NoCancellation::enter();
    let (threads, reason) = decide()?;
    if log::enabled(log::Level::Info) {
        log::write(log::Level::Info, &format!("{threads} worker threads: {reason}"));
    }
    read_settings(threads)?;
    let failed = |reason: String| Error::System { what: "starting worker threads", reason };
    match threads {
        1 => Ok(None),
        _ => quiet(|| Team::new(threads - 1, || IS_OWN.set(true), worker_binding()))
            .map(Some)
            .map_err(|error| failed(error.to_string())),
    }
}

/// Binds the worker that calls it; `None` if the workers are not bound.
fn worker_binding() -> Option<Box<dyn Fn() + Send + Sync>> {
    let binding = BINDING.load_full()?;
    Some(Box::new(move || bind_or_warn(&binding.cpus)))
}

/// Reads the settings for calls with this number of threads.
fn read_settings(threads: usize) -> Result<()> {
    openmp::configure()?;
    DECIDED.store(threads, Ordering::Relaxed);
    Ok(())
}

/// Number of threads that [`each`] would use, and the reason.
pub fn decide() -> Result<(usize, String)> {
    let configured = CONFIGURED.load(Ordering::Relaxed);
    if configured > 0 {
        return Ok((configured, "set by the program".to_string()));
    }
    if let Some(threads) = env_number("SPILLWAY_NUM_THREADS")? {
        return Ok((threads, "set by SPILLWAY_NUM_THREADS".to_string()));
    }
    if let Some(binding) = &*BINDING.load() {
        return Ok(decide_bound(binding));
    }
    let usable = usable_count();
    let affinity = affinity_count().unwrap_or(usable);
    let limit = if usable < affinity { "the cgroup quota" } else { "the affinity mask" };
    let local_ranks = env_number("LOCAL_WORLD_SIZE")?.unwrap_or(1);
    // A rank that its launcher has bound shares its processors with no other rank.
    if local_ranks > 1 && usable == affinity && affinity::is_narrower_than_parent() {
        return Ok((
            usable.max(1),
            format!("{usable} processors, to which the launcher has bound this rank"),
        ));
    }
    Ok((
        (usable / local_ranks).max(1),
        format!("{usable} processors allowed by {limit}, {local_ranks} local ranks"),
    ))
}

/// A worker for each core. The calling thread works too: it is one more if it may run on other processors.
fn decide_bound(binding: &Binding) -> (usize, String) {
    let caller = affinity::current().is_some_and(|own| !own.is_subset(&binding.cpus));
    let threads = binding.cores + usize::from(caller);
    (
        threads.clamp(1, MAX_THREADS),
        format!("{} cores of the bound processors {}", binding.cores, binding.cpus),
    )
}

/// Processors that the affinity mask and the cgroup quota allow.
fn usable_count() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn affinity_count() -> Option<usize> {
    affinity::current().map(|cpus| cpus.len())
}

fn env_number(name: &'static str) -> Result<Option<usize>> {
    match environment::word(name)? {
        None => Ok(None),
        Some(text) => parse_count(&text)
            .map(Some)
            .ok_or_else(|| Error::invalid(name, format!("{text:?} is not a number from 1 to {MAX_THREADS}"))),
    }
}

fn parse_count(text: &str) -> Option<usize> {
    text.parse().ok().filter(|count| (1..=MAX_THREADS).contains(count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_from_the_environment_are_numbers_in_range() {
        assert_eq!(parse_count("3"), Some(3));
        assert_eq!(parse_count("12"), Some(12));
        for refused in ["0", "-1", "4097", "two", ""] {
            assert_eq!(parse_count(refused), None, "{refused:?}");
        }
    }

    #[test]
    fn a_new_setting_replaces_the_pool_while_others_use_it() {
        let total: usize = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..4)
                .map(|_| {
                    scope.spawn(|| {
                        let mut items = [0; 9];
                        (0..50).for_each(|_| each(&mut items, |item| *item += 1).unwrap());
                        items.iter().sum::<usize>()
                    })
                })
                .collect();
            for threads in [2, 3, 1, 4, 2] {
                configure(threads).unwrap();
                assert_eq!(count(), Ok(threads));
            }
            workers.into_iter().map(|worker| worker.join().unwrap()).sum()
        });
        assert_eq!(total, 4 * 50 * 9);
        configure(0).unwrap();
        assert!(configure(MAX_THREADS + 1).is_err());
    }
}
