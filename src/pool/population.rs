//! Takes the pages of a new mapping, on all threads of the library where there are many.
//!
//! One thread clears pages at a part of the memory's speed. Pages of a mapping without a node are on the nodes of the
//! threads that take them.
#![forbid(unsafe_code)]

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::sys::fork::{PerProcessStatic, Shared};
use crate::sys::memory::{HUGE_PAGE, Mapping, PageKind, available_bytes};
use crate::sys::threads;

/// Bytes that a thread takes at once.
const PART: usize = 2 * HUGE_PAGE;
/// Bytes from which a mapping is worth the threads' start: a hundred times as long as to wake one.
const SHARED: usize = 4 * PART;

/// Maps `bytes`, rounded up to whole pages, binds them to `node` if given, and touches every page. If `huge` and from
/// 2 MiB on it tries reserved huge pages, then transparent ones, with base pages for the rest. A refused node is not an
/// error; the reason is the second value.
pub fn touched(bytes: usize, huge: bool, node: Option<u32>) -> io::Result<(Mapping, Option<io::Error>)> {
    if !huge || bytes < HUGE_PAGE {
        return populated(bytes, PageKind::Base, node);
    }
    populated(bytes, PageKind::Reserved, node).or_else(|_| populated(bytes, PageKind::Transparent, node))
}

fn populated(bytes: usize, pages: PageKind, node: Option<u32>) -> io::Result<(Mapping, Option<io::Error>)> {
    // What cannot be given is refused below: a promise of it would have others refused too.
    let can_be_given = available_bytes().is_none_or(|available| bytes as u64 <= available);
    let promise = Promise::of(if can_be_given { bytes as u64 } else { 0 });
    let (mut mapping, unbound) = Mapping::unpopulated(bytes, pages, node, promise.before)?;
    populate(&mapping, &promise)?;
    mapping.note_kind();
    Ok((mapping, unbound))
}

/// Bytes of a mapping whose pages have yet to be taken. Two mappings that are made at once do not both get the last memory: the
/// system would end the process.
struct Promise {
    all: Shared<AtomicU64>,
    left: AtomicU64,
    /// What was promised to others at that time.
    before: u64,
}

static PROMISED: PerProcessStatic<AtomicU64> = PerProcessStatic::empty();

impl Promise {
    fn of(bytes: u64) -> Promise {
        let all = PROMISED.get_or_make(AtomicU64::default);
        let before = all.fetch_add(bytes, Ordering::AcqRel);
        Promise { all, left: AtomicU64::new(bytes), before }
    }

    /// These bytes were taken.
    fn kept(&self, bytes: usize) {
        let keep = |left: u64| Some(left.saturating_sub(bytes as u64));
        if let Ok(left) = self.left.fetch_update(Ordering::AcqRel, Ordering::Acquire, keep) {
            self.all.fetch_sub(left.min(bytes as u64), Ordering::AcqRel);
        }
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        self.all.fetch_sub(*self.left.get_mut(), Ordering::AcqRel);
    }
}

fn populate(mapping: &Mapping, promise: &Promise) -> io::Result<()> {
    let bytes = mapping.span().len();
    if bytes < SHARED {
        return mapping.populate(0, bytes);
    }
    let part = |from| PagePart { from, outcome: None };
    let mut parts: Vec<PagePart> = (0..bytes).step_by(PART).map(part).collect();
    let take = |part: &mut PagePart| {
        let size = PART.min(bytes - part.from);
        part.outcome = Some(mapping.populate(part.from, size));
        promise.kept(size);
    };
    // Without threads, as at the limit of their number, the memory is needed all the same.
    let _ = threads::each(&mut parts, take);
    for part in &mut parts {
        if part.outcome.is_none() {
            take(part);
        }
    }
    parts.into_iter().filter_map(|part| part.outcome).collect()
}

struct PagePart {
    from: usize,
    /// `None`: no thread has taken it.
    outcome: Option<io::Result<()>>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use crate::sys::fork::in_forked_child;
    use crate::sys::memory::BASE_PAGE;
    use crate::sys::page_nodes;

    /// Every page of the mapping has memory. An emulator does not tell.
    fn is_whole(mapping: &Mapping) -> bool {
        let (address, bytes) = (mapping.span().address(), mapping.span().len());
        match page_nodes::query(address, bytes, 0) {
            Ok(found) => found.sampled > 0 && found.absent == 0,
            Err(error) => matches!(error, Error::Unsupported(_)),
        }
    }

    #[test]
    fn every_page_is_taken_whatever_the_size_the_pages_and_the_threads() {
        let sizes = [1, HUGE_PAGE, SHARED - 1, SHARED, SHARED + PART + 5];
        assert!(in_forked_child(|| {
            [1, 2, 5].into_iter().all(|count| {
                threads::configure(count).unwrap();
                sizes.iter().all(|bytes| {
                    [false, true].iter().all(|huge| {
                        let (mapping, unbound) = touched(*bytes, *huge, None).unwrap();
                        let exact = mapping.kind() == PageKind::Reserved
                            || mapping.span().len() == bytes.next_multiple_of(BASE_PAGE);
                        unbound.is_none() && exact && is_whole(&mapping)
                    })
                })
            })
        }));
    }

    #[test]
    fn what_is_promised_to_others_is_not_given_twice() {
        let half = available_bytes().unwrap() / 2;
        assert!(in_forked_child(|| {
            let promise = Promise::of(half);
            let all = || PROMISED.get().unwrap().load(Ordering::Relaxed);
            let refused = touched(half as usize + (64 << 20), true, None).is_err();
            let impossible = touched(usize::MAX / 4, false, None).is_err() && all() == half;
            promise.kept(PART);
            let rest = all() == half - PART as u64;
            drop(promise);
            refused && impossible && rest && all() == 0 && touched(SHARED, true, None).is_ok() && all() == 0
        }));
    }

    #[test]
    fn a_size_that_no_machine_has_is_an_error() {
        assert!(touched(usize::MAX, true, None).is_err() && touched(usize::MAX / 4, false, None).is_err());
    }
}
