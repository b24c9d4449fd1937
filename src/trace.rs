//! Spans and counters over time, written as the JSON that Perfetto and chrome://tracing read.
//!
//! The format is the trace event format: complete events ("X") on named tracks, counters ("C"), names and order of the
//! tracks ("M"), times in microseconds.
#![forbid(unsafe_code)]

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::Serialize;

/// A row of spans, shown under its own name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Track(usize);

/// A recording of spans and counters.
#[derive(Debug, Default, Clone)]
pub struct Trace {
    tracks: Vec<String>,
    spans: Vec<Event>,
    counters: Vec<Event>,
}

/// An event of the format.
#[derive(Debug, Clone, Serialize)]
struct Event {
    #[serde(rename = "ph")]
    phase: &'static str,
    pid: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    tid: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ts: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    name: Cow<'static, str>,
    args: Arguments,
}

#[derive(Debug, Clone, Serialize)]
#[serde(untagged)]
enum Arguments {
    Name { name: String },
    Order { sort_index: usize },
    Value { value: f64 },
    Span(BTreeMap<Cow<'static, str>, u64>),
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Document<'a> {
    display_time_unit: &'static str,
    trace_events: Vec<&'a Event>,
}

impl Event {
    fn new(phase: &'static str, name: impl Into<Cow<'static, str>>, args: Arguments) -> Self {
        Event { phase, pid: 1, tid: None, ts: None, dur: None, name: name.into(), args }
    }
}

/// Microseconds with three digits behind the point.
fn micros(seconds: f64) -> Option<f64> {
    Some((seconds * 1e9).round() / 1e3)
}

impl Trace {
    /// Adds a row; rows are shown in the order in which they were added.
    pub fn track(&mut self, name: impl Into<String>) -> Track {
        self.tracks.push(name.into());
        Track(self.tracks.len())
    }

    /// Adds a span from `start` to `end`, in seconds; viewers show `arguments` when it is selected. Non-finite times
    /// are ignored.
    pub fn span(
        &mut self,
        track: Track,
        name: impl Into<String>,
        start: f64,
        end: f64,
        arguments: &[(Cow<'static, str>, u64)],
    ) {
        if start.is_finite() && end.is_finite() {
            let (dur, args) = (micros((end - start).max(0.0)), arguments.iter().cloned().collect());
            let event = Event::new("X", name.into(), Arguments::Span(args));
            self.spans.push(Event { tid: Some(track.0), ts: micros(start), dur, ..event });
        }
    }

    /// Sets a counter's value from the time `at`, in seconds, on. Non-finite numbers are ignored.
    pub fn counter(&mut self, name: impl Into<Cow<'static, str>>, at: f64, value: f64) {
        if at.is_finite() && value.is_finite() {
            self.counters.push(Event { ts: micros(at), ..Event::new("C", name, Arguments::Value { value }) });
        }
    }

    /// Number of spans.
    pub fn len(&self) -> usize {
        self.spans.len()
    }

    /// True if there are no spans and no counters.
    pub fn is_empty(&self) -> bool {
        self.spans.is_empty() && self.counters.is_empty()
    }

    /// The whole trace as one JSON object.
    pub fn to_json(&self) -> String {
        let about = |(index, name): (usize, &String)| {
            let name = Event::new("M", "thread_name", Arguments::Name { name: name.clone() });
            let order = Event::new("M", "thread_sort_index", Arguments::Order { sort_index: index });
            [name, order].map(|event| Event { tid: Some(index + 1), ..event })
        };
        let tracks: Vec<Event> = self.tracks.iter().enumerate().flat_map(about).collect();
        let trace_events = tracks.iter().chain(&self.spans).chain(&self.counters).collect();
        serde_json::to_string(&Document { display_time_unit: "ms", trace_events })
            .expect("the keys are text, and no part refuses to be written")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_is_json_whatever_the_names_and_numbers() {
        let mut trace = Trace::default();
        let odd = "a \"quoted\\ name\"\n\u{1}\t– ünï";
        let track = trace.track(odd);
        trace.span(track, odd, 0.5, 0.75, &[("subgroup".into(), 3), ("bytes".into(), u64::MAX)]);
        trace.span(track, "backwards", 2.0, 1.0, &[]);
        trace.span(track, "no time", f64::NAN, 1.0, &[]);
        trace.counter("busy", 0.5, 3.0);
        trace.counter("large", 1e-9, 1e300);
        trace.counter("no value", 0.0, f64::INFINITY);
        let value: serde_json::Value = serde_json::from_str(&trace.to_json()).unwrap();
        let events = value["traceEvents"].as_array().unwrap();
        assert_eq!(events.len(), 6);
        assert_eq!(events[0]["args"]["name"], odd);
        assert_eq!((&events[2]["name"], events[2]["ts"].as_f64()), (&odd.into(), Some(500_000.0)));
        assert_eq!(
            (events[2]["dur"].as_f64(), events[2]["args"]["bytes"].as_u64()),
            (Some(250_000.0), Some(u64::MAX))
        );
        assert_eq!(events[3]["dur"].as_f64(), Some(0.0));
        assert_eq!(events[5]["args"]["value"].as_f64(), Some(1e300));
    }

    #[test]
    fn an_empty_trace_is_json_too() {
        let trace = Trace::default();
        assert!(trace.is_empty());
        let value: serde_json::Value = serde_json::from_str(&trace.to_json()).unwrap();
        assert_eq!(value["traceEvents"].as_array().map(Vec::len), Some(0));
    }
}
