//! Waits for events outside this process: descriptors that become readable, and words of memory that another device or
//! thread increments.
//!
//! A word is polled every `WORD_PERIOD`: a GPU that writes it cannot wake a thread. Events that only answer a query
//! are polled too.

use std::fmt;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Polling period of words and queries.
const WORD_PERIOD: Duration = Duration::from_micros(200);

/// An eventfd: one thread sets it, another polls it.
#[derive(Debug)]
pub struct EventFd(File);

impl EventFd {
    /// Makes one that is not set.
    pub fn new() -> io::Result<EventFd> {
        // SAFETY: plain integers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a descriptor that this call just made.
        Ok(EventFd(unsafe { File::from_raw_fd(fd) }))
    }

    /// The descriptor.
    pub fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Sets it, which wakes a thread that polls it.
    pub fn set(&self) {
        // The write fails only if the counter is full; then the eventfd is already set.
        let _ = (&self.0).write(&1_u64.to_ne_bytes());
    }

    /// Clears every set so far.
    pub fn clear(&self) {
        // The read fails only if the counter is zero: an earlier `clear` consumed this set.
        let _ = (&self.0).read(&mut [0; 8]);
    }
}

/// A one-time event.
#[derive(Debug)]
pub enum Event {
    /// A descriptor becomes readable. Nothing is read from it.
    Descriptor(OwnedFd),
    /// A word of memory reaches a value.
    Word(Word),
    /// A query reports that the event happened.
    Asked(Box<dyn Question>),
}

/// An event that has to be queried.
pub trait Question: fmt::Debug + Send + Sync {
    /// The current state of the event.
    fn standing(&self) -> Standing;
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
        // SAFETY: plain integers; the system checks the descriptor.
        let copy = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) };
        if copy < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a descriptor that this call just made.
        Ok(Event::Descriptor(unsafe { OwnedFd::from_raw_fd(copy) }))
    }
}

/// State of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// Not happened yet.
    Pending,
    /// Happened.
    Ready,
    /// Can never happen, with the reason.
    Broken(&'static str),
}

/// Returns the state of each event. If `patient`, first sleeps until an event or the waker may have changed.
pub fn poll(waker: &EventFd, events: &[&Event], patient: bool) -> io::Result<Vec<Standing>> {
    let ask = |fd: RawFd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // ppoll skips a negative descriptor; the entry keeps both lists in the same order.
    let asked = events.iter().map(|event| match event {
        Event::Descriptor(fd) => ask(fd.as_raw_fd()),
        Event::Word(_) | Event::Asked(_) => ask(-1),
    });
    let mut descriptors: Vec<libc::pollfd> = std::iter::once(ask(waker.fd())).chain(asked).collect();
    let wakes_nobody = events.iter().any(|event| !matches!(event, Event::Descriptor(_)));
    let limit = match (patient, wakes_nobody) {
        (false, _) => Some(Duration::ZERO),
        (true, true) => Some(WORD_PERIOD),
        (true, false) => None,
    };
    sleep(&mut descriptors, limit)?;
    let standing = |(event, polled): (&&Event, &libc::pollfd)| match event {
        Event::Word(word) if word.reached() => Standing::Ready,
        Event::Word(_) => Standing::Pending,
        Event::Asked(question) => question.standing(),
        Event::Descriptor(_) => standing_of(polled.revents),
    };
    Ok(events.iter().zip(&descriptors[1..]).map(standing).collect())
}

fn standing_of(seen: libc::c_short) -> Standing {
    let has = |flag| seen & flag != 0;
    if has(libc::POLLIN) {
        Standing::Ready
    } else if has(libc::POLLHUP) {
        Standing::Broken("its other end was closed before anything came")
    } else if has(libc::POLLERR | libc::POLLNVAL) {
        Standing::Broken("the system reports an error on its descriptor")
    } else {
        Standing::Pending
    }
}

fn sleep(descriptors: &mut [libc::pollfd], limit: Option<Duration>) -> io::Result<()> {
    let limit = limit.map(|limit| libc::timespec {
        tv_sec: limit.as_secs() as libc::time_t,
        tv_nsec: limit.subsec_nanos().into(),
    });
    let limit = limit.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let count = descriptors.len() as libc::nfds_t;
    // SAFETY: the array has `count` entries; the limit is NULL or lives through the call.
    match unsafe { libc::ppoll(descriptors.as_mut_ptr(), count, limit, std::ptr::null()) } {
        0.. => Ok(()),
        _ => match io::Error::last_os_error() {
            // ppoll wrote nothing to the array; the caller polls again.
            interrupted if interrupted.kind() == io::ErrorKind::Interrupted => Ok(()),
            error => Err(error),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(events: &[&Event]) -> Vec<Standing> {
        poll(&EventFd::new().unwrap(), events, false).unwrap()
    }

    #[test]
    fn words_are_reached_at_their_value_and_past_it_and_through_zero() {
        let count = AtomicU32::new(0);
        let word = |value| {
            // SAFETY: the word outlives the events of this test.
            Event::Word(unsafe { Word::new(count.as_ptr(), value) }.unwrap())
        };
        let events = [&word(0), &word(1), &word(u32::MAX), &word(1 << 31)];
        let (yes, no) = (Standing::Ready, Standing::Pending);
        assert_eq!(look(&events), [yes, no, yes, no]);
        count.store(1, Ordering::Release);
        assert_eq!(look(&events), [yes, yes, yes, no]);
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
        assert_eq!(look(&[&event]), [Standing::Pending]);
        writer.write_all(b"x").unwrap();
        assert_eq!(look(&[&event, &event]), [Standing::Ready; 2]);
        drop(writer);
        assert_eq!(look(&[&event]), [Standing::Ready], "what came before the end counts");
        let (reader, writer) = io::pipe().unwrap();
        let event = Event::readable(reader.as_raw_fd()).unwrap();
        drop(writer);
        assert!(matches!(look(&[&event])[..], [Standing::Broken(_)]));
        assert!(Event::readable(-1).is_err());
    }

    #[test]
    fn a_question_is_asked_at_every_look() {
        #[derive(Debug)]
        struct Third(AtomicU32);
        impl Question for Third {
            fn standing(&self) -> Standing {
                match self.0.fetch_add(1, Ordering::Relaxed) {
                    2 => Standing::Ready,
                    _ => Standing::Pending,
                }
            }
        }
        let event = Event::Asked(Box::new(Third(AtomicU32::new(0))));
        let patient = || poll(&EventFd::new().unwrap(), &[&event], true).unwrap();
        assert_eq!(
            [patient(), patient(), patient()].concat(),
            [Standing::Pending, Standing::Pending, Standing::Ready]
        );
    }

    #[test]
    fn a_patient_poll_ends_when_the_waker_is_set() {
        let waker = EventFd::new().unwrap();
        waker.set();
        waker.set();
        assert_eq!(poll(&waker, &[], true).unwrap(), []);
        waker.clear();
        let idle = AtomicU32::new(0);
        // SAFETY: the word outlives the event.
        let event = Event::Word(unsafe { Word::new(idle.as_ptr(), 1) }.unwrap());
        assert_eq!(poll(&waker, &[&event], true).unwrap(), [Standing::Pending]);
    }
}
