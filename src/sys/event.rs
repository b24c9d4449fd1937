//! Waits for events outside this process: descriptors that become readable, words of memory that another device or
//! thread increments, and events that a thread of this library waits for and reports.
//!
//! A word is read every `WORD_PERIOD`: a GPU that writes it cannot wake a thread. The other events cost nothing while they
//! are pending.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::eventfd::{self, EfdFlags};
use nix::sys::time::TimeSpec;

use super::descriptor;
use super::sync::Lock;

/// Polling period of words.
const WORD_PERIOD: Duration = Duration::from_micros(200);

/// An eventfd: one thread sets it, another polls it.
#[derive(Debug)]
pub struct EventFd(eventfd::EventFd);

impl EventFd {
    /// Makes one that is not set.
    pub fn new() -> io::Result<EventFd> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let made = OwnedFd::from(eventfd::EventFd::from_flags(flags)?);
        // SAFETY: an eventfd.
        Ok(EventFd(unsafe { eventfd::EventFd::from_owned_fd(descriptor::moved(made)?) }))
    }

    /// The descriptor.
    pub fn fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }

    /// Sets it, which wakes a thread that polls it.
    pub fn set(&self) {
        // The write fails only if the counter is full; then the eventfd is already set.
        let _ = self.0.write(1);
    }

    /// Clears every set so far.
    pub fn clear(&self) {
        // The read fails only if the counter is zero: an earlier `clear` consumed this set.
        let _ = self.0.read();
    }
}

/// A one-time event.
#[derive(Debug)]
pub enum Event {
    /// A descriptor becomes readable. Nothing is read from it.
    Descriptor(OwnedFd),
    /// A word of memory reaches a value.
    Word(Word),
    /// A thread of this library reports that the event happened.
    Reported(Arc<Report>),
}

/// The state of an event that another thread waits for.
#[derive(Debug, Default)]
pub struct Report(Lock<Reported>);

#[derive(Debug, Default)]
struct Reported {
    status: Option<Status>,
    /// Set by the report.
    waker: Option<Arc<EventFd>>,
}

impl Report {
    /// Reports the final state, and wakes the thread that polls it.
    pub fn give(&self, status: Status) {
        let mut reported = self.0.lock();
        reported.status = Some(status);
        if let Some(waker) = reported.waker.take() {
            waker.set();
        }
    }

    /// The state now. If it is pending, its report will set `waker`.
    fn status(&self, waker: &Arc<EventFd>) -> Status {
        let mut reported = self.0.lock();
        if reported.status.is_none() {
            reported.waker = Some(Arc::clone(waker));
        }
        reported.status.unwrap_or(Status::Pending)
    }
}

/// A word of memory and the value that ends the wait. The word only counts up, and may wrap around at 2^32.
#[derive(Debug)]
pub struct Word {
    address: NonNull<AtomicU32>,
    value: u32,
}

// SAFETY: the word is only read, atomically; the creator promised that any thread may read it.
unsafe impl Send for Word {}
// SAFETY: as above.
unsafe impl Sync for Word {}

impl Word {
    /// Waits until the word at `address` is `value`, or up to 2^31 - 1 past it. `None` for NULL or a misaligned
    /// address.
    ///
    /// # Safety
    /// The word stays readable from any thread as long as this value lives.
    pub unsafe fn new(address: *const u32, value: u32) -> Option<Word> {
        let address = NonNull::new(address.cast_mut().cast::<AtomicU32>())?;
        address.is_aligned().then_some(Word { address, value })
    }

    fn reached(&self) -> bool {
        // SAFETY: readable and aligned by the promise of `new`. Acquire: writes made before the word was stored are
        // visible.
        let now = unsafe { self.address.as_ref() }.load(Ordering::Acquire);
        now.wrapping_sub(self.value) < 1 << 31
    }
}

impl Event {
    /// The event that the descriptor `fd` becomes readable. The descriptor is duplicated: the caller may close its own
    /// at once.
    pub fn readable(fd: RawFd) -> io::Result<Event> {
        descriptor::duplicate(fd).map(Event::Descriptor)
    }
}

/// State of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// Not happened yet.
    Pending,
    /// Happened.
    Ready,
    /// Can never happen, with the reason.
    Broken(&'static str),
}

/// Returns the state of each event. If `block`, first sleeps until an event or the waker may have changed.
pub fn poll(waker: &Arc<EventFd>, events: &[&Event], block: bool) -> io::Result<Vec<Status>> {
    let is_known = |event: &&Event| match event {
        Event::Reported(report) => report.status(waker) != Status::Pending,
        Event::Descriptor(_) | Event::Word(_) => false,
    };
    // If none is known, each has the waker before the sleep begins.
    let block = block && !events.iter().any(is_known);
    let descriptors = events.iter().filter_map(|event| match event {
        Event::Descriptor(fd) => Some(fd.as_fd()),
        Event::Word(_) | Event::Reported(_) => None,
    });
    let all = std::iter::once(waker.0.as_fd()).chain(descriptors);
    let mut polled: Vec<PollFd> = all.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
    let has_words = events.iter().any(|event| matches!(event, Event::Word(_)));
    let limit = match (block, has_words) {
        (false, _) => Some(Duration::ZERO),
        (true, true) => Some(WORD_PERIOD),
        (true, false) => None,
    };
    match ppoll(&mut polled, limit.map(TimeSpec::from_duration), None) {
        // An interrupted call reports no event; the caller polls again.
        Ok(_) | Err(Errno::EINTR) => {}
        Err(errno) => return Err(errno.into()),
    }
    // The descriptors in the order of their events, after the waker.
    let mut polled = polled[1..].iter();
    let status = |event: &&Event| match event {
        Event::Word(word) if word.reached() => Status::Ready,
        Event::Word(_) => Status::Pending,
        Event::Reported(report) => report.status(waker),
        Event::Descriptor(_) => polled.next().map_or(Status::Pending, status_of),
    };
    Ok(events.iter().map(status).collect())
}

fn status_of(polled: &PollFd) -> Status {
    // `None` is a state that nix does not know, which was not asked for.
    let seen = polled.revents().unwrap_or(PollFlags::empty());
    if seen.contains(PollFlags::POLLIN) {
        Status::Ready
    } else if seen.contains(PollFlags::POLLHUP) {
        Status::Broken("the other end of its descriptor was closed without a signal")
    } else if seen.intersects(PollFlags::POLLERR | PollFlags::POLLNVAL) {
        Status::Broken("the system reported an error on its descriptor")
    } else {
        Status::Pending
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn waker() -> Arc<EventFd> {
        Arc::new(EventFd::new().unwrap())
    }

    fn poll_once(events: &[&Event]) -> Vec<Status> {
        poll(&waker(), events, false).unwrap()
    }

    #[test]
    fn words_are_reached_at_their_value_and_past_it_and_through_zero() {
        let count = AtomicU32::new(0);
        let word = |value| {
            // SAFETY: the word outlives the events of this test.
            Event::Word(unsafe { Word::new(count.as_ptr(), value) }.unwrap())
        };
        let events = [&word(0), &word(1), &word(u32::MAX), &word(1 << 31)];
        let (yes, no) = (Status::Ready, Status::Pending);
        assert_eq!(poll_once(&events), [yes, no, yes, no]);
        count.store(1, Ordering::Release);
        assert_eq!(poll_once(&events), [yes, yes, yes, no]);
        // SAFETY: neither is ever read.
        let bad = [unsafe { Word::new(std::ptr::null(), 0) }, unsafe {
            Word::new(count.as_ptr().wrapping_byte_add(2), 0)
        }];
        assert!(bad.iter().all(Option::is_none));
    }

    #[test]
    fn a_descriptor_is_ready_broken_or_neither_and_a_closed_one_is_refused() {
        let (reader, mut writer) = io::pipe().unwrap();
        let event = Event::readable(reader.as_raw_fd()).unwrap();
        drop(reader);
        assert_eq!(poll_once(&[&event]), [Status::Pending]);
        writer.write_all(b"x").unwrap();
        assert_eq!(poll_once(&[&event, &event]), [Status::Ready; 2]);
        drop(writer);
        assert_eq!(poll_once(&[&event]), [Status::Ready], "what came before the end counts");
        let (reader, writer) = io::pipe().unwrap();
        let event = Event::readable(reader.as_raw_fd()).unwrap();
        drop(writer);
        assert!(matches!(poll_once(&[&event])[..], [Status::Broken(_)]));
        assert!(Event::readable(-1).is_err());
    }

    #[test]
    fn a_report_ends_the_sleep_of_the_thread_that_polls() {
        let (waker, report) = (waker(), Arc::<Report>::default());
        let event = Event::Reported(Arc::clone(&report));
        assert_eq!(poll(&waker, &[&event], false).unwrap(), [Status::Pending]);
        std::thread::scope(|scope| {
            scope.spawn(|| report.give(Status::Ready));
            while poll(&waker, &[&event], true).unwrap() == [Status::Pending] {
                waker.clear();
            }
        });
        // A report from before the poll is seen without a sleep.
        let broken = Arc::<Report>::default();
        broken.give(Status::Broken("a reason"));
        assert_eq!(poll(&waker, &[&Event::Reported(broken)], true).unwrap(), [Status::Broken("a reason")]);
    }

    #[test]
    fn a_blocking_poll_ends_when_the_waker_is_set() {
        let waker = waker();
        waker.set();
        waker.set();
        assert_eq!(poll(&waker, &[], true).unwrap(), []);
        waker.clear();
        let idle = AtomicU32::new(0);
        // SAFETY: the word outlives the event.
        let event = Event::Word(unsafe { Word::new(idle.as_ptr(), 1) }.unwrap());
        assert_eq!(poll(&waker, &[&event], true).unwrap(), [Status::Pending]);
    }
}
