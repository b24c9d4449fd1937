//! The log. Messages wait for a sink, to which the program's own calls deliver them. Without a sink they go to stderr if
//! `SPILLWAY_LOG` names a level, else nowhere.
//!
//! Invariants:
//! - Only [`deliver`] calls a sink, at the end of calls of the C interface. So a sink runs on no thread of the library, and
//!   under no lock of the library.
//! - When [`set_sink`] returns, no thread is inside the previous sink, and none enters it again. The only exception is
//!   a caller that is itself inside a sink: it cannot wait for its own return.
//! - No lock is held across a fork, so a forked child can always log. Calls in flight and waiting messages of the parent
//!   do not count in the child.
#![forbid(unsafe_code)]

pub mod recent;

use std::cell::Cell;
use std::io::Write;
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::Duration;

use arc_swap::ArcSwapOption;

use crate::environment;
use recent::Recent;

/// Severity of a message. A sink receives the messages of its level and of the more severe ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(i32)]
pub enum Level {
    /// A call failed, possibly unnoticed by the caller.
    Error = 1,
    /// Performance or safety is reduced; the message says what to change.
    Warn = 2,
    /// A decision made once, with its reason.
    Info = 3,
    /// Details for a bug report.
    Debug = 4,
}

impl Level {
    /// The level with this number; `None` if there is none.
    pub fn from_number(number: i32) -> Option<Level> {
        [Level::Error, Level::Warn, Level::Info, Level::Debug]
            .into_iter()
            .find(|level| *level as i32 == number)
    }
}

/// A program's function for messages.
pub type Called = Box<dyn Fn(Level, &str) + Send + Sync>;

/// The destination of messages.
pub enum Sink {
    /// They wait for [`next`].
    Kept,
    /// [`deliver`] passes them to this function.
    Called(Called),
}

struct Installed {
    limit: Level,
    sink: Sink,
    calls: Calls,
}

static SINK: ArcSwapOption<Installed> = ArcSwapOption::const_empty();

/// Messages for the sink. If more wait, the oldest are lost.
const WAITING: usize = 256;
static MESSAGES: Recent<(Level, String), WAITING> = Recent::empty();
/// Serial number of the first message that waits.
static FIRST: AtomicU64 = AtomicU64::new(0);
/// The process whose messages wait.
static OWNER: AtomicU32 = AtomicU32::new(0);

thread_local! {
    /// True while this thread is inside a sink.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Sets the sink for messages up to a level; `None` returns to `SPILLWAY_LOG`. Messages that wait are delivered to the
/// previous sink before, or dropped. Waits for calls in flight in it, unless this thread is inside a sink.
pub fn set_sink(sink: Option<(Level, Sink)>) {
    forget_parent();
    deliver();
    let sink = sink.map(|(limit, sink)| Arc::new(Installed { limit, sink, calls: Calls::default() }));
    let before = SINK.swap(sink);
    FIRST.store(MESSAGES.end(), Ordering::SeqCst);
    // Pairs with the fence in `deliver`: `wait` sees a call as counted, or that call sees the new sink.
    fence(Ordering::SeqCst);
    if let Some(before) = before {
        before.calls.wait();
    }
}

/// True if a message of this level would be written.
pub fn enabled(level: Level) -> bool {
    match SINK.load().as_ref() {
        Some(sink) => level <= sink.limit,
        None => is_for_stderr(level),
    }
}

fn is_for_stderr(level: Level) -> bool {
    Level::from_number(environment::log_level()).is_some_and(|limit| level <= limit)
}

/// Writes one message.
pub fn write(level: Level, message: &str) {
    match SINK.load().as_ref() {
        Some(sink) if level <= sink.limit => {
            forget_parent();
            MESSAGES.push((level, message.to_string()));
        }
        // A closed stderr must not fail the operation that logs.
        None if is_for_stderr(level) => drop(writeln!(std::io::stderr(), "spillway: {message}")),
        _ => {}
    }
}

/// Passes the waiting messages to the sink, if it is a function. A thread that is inside a sink leaves them to others.
pub fn deliver() {
    while has_waiting() && !INSIDE.get() {
        let Some(installed) = SINK.load_full() else { return };
        let Sink::Called(call) = &installed.sink else { return };
        let _counted = installed.calls.enter();
        fence(Ordering::SeqCst);
        // The sink may have been replaced, and its user data freed, before this call was counted.
        if !SINK.load().as_ref().is_some_and(|now| Arc::ptr_eq(now, &installed)) {
            continue;
        }
        let Some((level, message)) = next(true) else { return };
        call(level, &message);
    }
}

/// The oldest waiting message. It stays if it is not `taken`. A message of its own says how many were lost.
pub fn next(taken: bool) -> Option<(Level, String)> {
    loop {
        let (first, end) = waiting();
        let oldest = end.saturating_sub(WAITING as u64);
        let (level, text, after) = match MESSAGES.get(first) {
            _ if first >= end => return None,
            Some(kept) => (kept.1.0, kept.1.1.clone(), first + 1),
            None if first < oldest => {
                let text = format!("{} messages before this one were lost: too many waited", oldest - first);
                (Level::Warn, text, oldest)
            }
            // The thread that writes this message has not stored it yet.
            None => return None,
        };
        if !taken || FIRST.compare_exchange(first, after, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            return Some((level, text));
        }
    }
}

fn has_waiting() -> bool {
    FIRST.load(Ordering::Relaxed) != MESSAGES.end()
}

/// The serial numbers of the first waiting message, and behind the last one.
fn waiting() -> (u64, u64) {
    forget_parent();
    (FIRST.load(Ordering::SeqCst), MESSAGES.end())
}

/// In a forked child, drops the messages that waited in the parent.
fn forget_parent() {
    let (owner, now) = (OWNER.load(Ordering::SeqCst), process::id());
    if owner != now
        && OWNER.compare_exchange(owner, now, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        && owner != 0
    {
        FIRST.store(MESSAGES.end(), Ordering::SeqCst);
    }
}

/// Number of calls of one sink in flight (lower half), and the id of the process they belong to (upper half).
#[derive(Default)]
struct Calls(AtomicU64);

/// Guard that counts one call.
struct Counted<'a> {
    calls: &'a Calls,
    outer: bool,
}

impl Calls {
    fn enter(&self) -> Counted<'_> {
        self.change(|count| count + 1);
        Counted { calls: self, outer: INSIDE.replace(true) }
    }

    /// Waits until no call is in flight, unless this thread is inside a sink.
    fn wait(&self) {
        while self.in_flight() && !INSIDE.get() {
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    fn in_flight(&self) -> bool {
        count_of(self.0.load(Ordering::SeqCst)) > 0
    }

    fn change(&self, change: impl Fn(u64) -> u64) {
        let next = |word| Some(u64::from(process::id()) << 32 | change(count_of(word)));
        let _ = self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next);
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        INSIDE.set(self.outer);
        self.calls.change(|count| count.saturating_sub(1));
    }
}

/// Number of calls in flight in this process.
fn count_of(word: u64) -> u64 {
    if word >> 32 == u64::from(process::id()) { word & u64::from(u32::MAX) } else { 0 }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    #[test]
    fn after_a_change_of_sink_no_thread_is_inside_the_one_before() {
        let (entered, leave) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let calls = Arc::new(Calls::default());
        let changed = Arc::new(AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _call = calls.enter();
                entered.store(true, Ordering::SeqCst);
                while !leave.load(Ordering::SeqCst) {
                    std::thread::yield_now();
                }
                assert!(!changed.load(Ordering::SeqCst), "the change did not wait");
            });
            while !entered.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
            scope.spawn(|| {
                calls.wait();
                changed.store(true, Ordering::SeqCst);
            });
            std::thread::sleep(Duration::from_millis(20));
            leave.store(true, Ordering::SeqCst);
        });
        assert!(changed.load(Ordering::SeqCst) && !calls.in_flight());
    }

    #[test]
    fn a_call_inside_a_call_counts_until_the_outer_one_returns() {
        let calls = Calls::default();
        let outer = calls.enter();
        drop(calls.enter());
        assert!(calls.in_flight() && INSIDE.get());
        // A thread inside a sink does not wait for its own return.
        calls.wait();
        drop(outer);
        assert!(!calls.in_flight() && !INSIDE.get());
    }
}
