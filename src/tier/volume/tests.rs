//! Scratch memory, and the gate of a volume.
#![forbid(unsafe_code)]

use super::*;
use crate::error::Error;

/// Only safe code: a span is a copy and may outlive its memory.
#[test]
fn a_span_that_outlived_its_memory_writes_to_nothing() {
    use crate::io::engine::Engine;
    use crate::io::options::{Options, Request, Target};
    let span = Scratch::new(8).unwrap().span();
    let others: Vec<Scratch> = (0..8).map(|_| Scratch::new(8).unwrap()).collect();
    assert!(std::panic::catch_unwind(|| span.write(b"anything")).is_err());
    assert!(others.iter().all(|other| other.span().to_vec() == [0; 8]));
    let engine = Engine::open(Options::default()).unwrap();
    let zeros = std::path::Path::new("/proc/self/exe");
    let request = Request { target: Target::Path(zeros), offset: 0, buffer: span.into(), deadline: None };
    let refused = engine.read(request).unwrap_err().to_string();
    assert!(refused.contains("was freed"), "{refused}");
}

#[test]
fn small_memory_comes_back_empty_and_never_while_a_transfer_has_it() {
    let pool = Arc::default();
    let take = || Scratch::from_pool(&pool, 5000).unwrap();
    let first = take();
    let address = first.span().address();
    first.span().write(&[7; 5000]);
    let lease = first.transfer().lease();
    drop(first);
    let second = take();
    assert_ne!(second.span().address(), address);
    let address = second.span().address();
    second.span().write(&[8; 5000]);
    drop((second, lease));
    let third = take();
    assert_eq!((third.span().address(), third.span().to_vec()), (address, vec![0; 5000]));
}

/// A turn that never comes.
#[derive(Debug)]
struct Never;

impl Turn for Never {
    fn poll(&self) {}
}

fn nobody() -> Weak<dyn Turn> {
    Weak::<Never>::new()
}

fn transfer(offset: u64) -> DataTransfer {
    DataTransfer { write: false, offset, buffer: TransferBuffer::empty() }
}

#[test]
fn what_comes_to_a_closed_gate_begins_when_it_opens_and_in_its_order() {
    let gate = Gate::default();
    assert!(gate.hold(&transfer(7)).is_none());
    gate.close(nobody());
    let held: Vec<u64> = (0..3).map(|offset| gate.hold(&transfer(offset)).unwrap()).collect();
    assert_eq!((gate.waiting(), gate.handle(held[0], Some(Instant::now())).unwrap()), (3, None));
    gate.release_held(true, |transfer| match transfer.offset {
        1 => Err(Error::Unsupported("this one".to_string())),
        offset => Ok(100 + offset),
    });
    assert_eq!(gate.handle(held[2], None).unwrap(), Some(102));
    assert!(gate.handle(held[1], None).is_err() && gate.hold(&transfer(7)).is_some());
    gate.forget(held[2]);
    assert_eq!(gate.handle(held[2], Some(Instant::now())).unwrap(), None);
    gate.release_held(false, |_| Ok(5));
    assert!(gate.waiting() == 0 && gate.hold(&transfer(7)).is_none());
    assert_eq!(gate.handle(17, None).unwrap(), Some(17), "the engine's own handles pass");
}

#[test]
fn the_begin_of_a_held_transfer_may_use_the_gate() {
    let gate = Gate::default();
    gate.close(nobody());
    let held: Vec<u64> = (0..2).map(|offset| gate.hold(&transfer(offset)).unwrap()).collect();
    assert!(gate.withdraw(held[1]) && !gate.withdraw(held[1]) && !gate.withdraw(17));
    gate.release_held(true, |transfer| {
        assert!(gate.hold(&transfer).is_some(), "a transfer from the log callback");
        Ok(0)
    });
    assert_eq!(gate.waiting(), 1);
}

#[test]
fn a_waiter_is_woken_by_the_opening() {
    let gate = Gate::default();
    gate.close(nobody());
    let held = gate.hold(&transfer(7)).unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| gate.handle(held, None).unwrap());
        gate.release_held(false, |_| Ok(9));
        assert_eq!(waiter.join().unwrap(), Some(9));
    });
}

/// A turn that comes at the third look.
#[derive(Debug)]
struct Third {
    gate: Arc<Gate>,
    looks: AtomicU64,
}

impl Turn for Third {
    fn poll(&self) {
        if self.looks.fetch_add(1, Ordering::Relaxed) == 2 {
            self.gate.release_held(false, |_| Ok(11));
        }
    }
}

#[test]
fn whoever_waits_opens_the_gate_when_the_turn_comes() {
    let gate = Arc::<Gate>::default();
    let turn = Arc::new(Third { gate: Arc::clone(&gate), looks: AtomicU64::new(0) });
    gate.close(Arc::downgrade(&turn) as Weak<dyn Turn>);
    let held = gate.hold(&transfer(7)).unwrap();
    assert_eq!(gate.handle(held, Some(Instant::now())).unwrap(), None, "a wait of no time asks nobody");
    assert_eq!(gate.handle(held, None).unwrap(), Some(11));
}
