//! Scratch memory.
#![forbid(unsafe_code)]

use super::*;

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
