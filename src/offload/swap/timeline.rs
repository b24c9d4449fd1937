//! What the last update did with each buffer, and when.
//!
//! Invariants:
//! - A buffer does one work at a time.
//! - The number of spans has a limit: reads and writes between updates do not make it grow.
#![forbid(unsafe_code)]

use std::borrow::Cow;
use std::time::Instant;

use crate::sys::try_vec;
use crate::trace::{Trace, Track};

/// Work on a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    /// Tier to buffer.
    Fetch,
    /// Adam on the subgroup in the buffer.
    Step,
    /// Buffer to tier.
    Flush,
}

impl Work {
    fn name(self) -> &'static str {
        match self {
            Work::Fetch => "fetch",
            Work::Step => "step",
            Work::Flush => "flush",
        }
    }
}

#[derive(Debug)]
struct Span {
    work: Work,
    slot: usize,
    subgroup: usize,
    start: f64,
    end: f64,
    /// Bytes on each path; empty for a step.
    bytes: Vec<u64>,
}

/// The work of one update.
#[derive(Debug)]
pub(super) struct Timeline {
    began: Instant,
    /// The work of each buffer that has not ended.
    running: Vec<Option<Span>>,
    spans: Vec<Span>,
    most: usize,
}

impl Timeline {
    pub(super) fn new(slots: usize, subgroups: usize) -> crate::error::Result<Timeline> {
        let running = try_vec::from_fn("the timeline of buffers", slots, |_| None)?;
        // Fetch, step and flush; those of an update that is redone; and the flushes of a commit.
        let most = subgroups.saturating_mul(6).saturating_add(slots);
        Ok(Timeline { began: Instant::now(), running, spans: Vec::new(), most })
    }

    /// Forgets the update before.
    pub(super) fn begin(&mut self) {
        self.began = Instant::now();
        self.running.iter_mut().for_each(|running| *running = None);
        self.spans.clear();
    }

    pub(super) fn start(&mut self, work: Work, slot: usize, subgroup: usize, bytes: Vec<u64>) {
        let start = self.began.elapsed().as_secs_f64();
        self.running[slot] = Some(Span { work, slot, subgroup, start, end: start, bytes });
    }

    /// The work of a buffer has ended.
    pub(super) fn end(&mut self, slot: usize) {
        let end = self.began.elapsed().as_secs_f64();
        if let Some(span) = self.running[slot].take()
            && self.spans.len() < self.most
            && self.spans.try_reserve(1).is_ok()
        {
            self.spans.push(Span { end, ..span });
        }
    }

    /// A row for each buffer, and for each path the bytes in flight.
    pub(super) fn trace(&self) -> Trace {
        let mut trace = Trace::default();
        let rows: Vec<Track> =
            (0..self.running.len()).map(|slot| trace.track(format!("buffer {slot}"))).collect();
        let mut changes = Vec::new();
        for span in &self.spans {
            let mut arguments = vec![(Cow::from("subgroup"), span.subgroup as u64)];
            for (path, bytes) in span.bytes.iter().enumerate().filter(|(_, bytes)| **bytes > 0) {
                arguments.push((format!("bytes on path {path}").into(), *bytes));
                changes.extend([(span.start, path, *bytes as f64), (span.end, path, -(*bytes as f64))]);
            }
            let name = format!("{} {}", span.work.name(), span.subgroup);
            trace.span(rows[span.slot], name, span.start, span.end, &arguments);
        }
        changes.sort_by(|left, right| left.0.total_cmp(&right.0));
        let mut moving = vec![0.0; changes.iter().map(|change| change.1 + 1).max().unwrap_or(0)];
        for (at, path, bytes) in changes {
            moving[path] += bytes;
            trace.counter(format!("path {path}, bytes in flight"), at, moving[path]);
        }
        trace
    }
}
