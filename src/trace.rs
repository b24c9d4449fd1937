//! Spans and counters over time, written as the JSON that Perfetto and chrome://tracing read.
//!
//! The format is the trace event format: complete events ("X") on named tracks, counters ("C"), times in microseconds.
//! The JSON is generated here, so the library needs no serializer.
#![forbid(unsafe_code)]

use std::fmt::Write;

/// Microseconds per second.
const MICROS: f64 = 1e6;

/// A row of spans, shown under its own name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Track(usize);

/// A recording of spans and counters.
#[derive(Debug, Default, Clone)]
pub struct Trace {
    tracks: Vec<String>,
    spans: Vec<Span>,
    counters: Vec<Sample>,
}

#[derive(Debug, Clone)]
struct Span {
    track: usize,
    name: String,
    start: f64,
    end: f64,
    arguments: Vec<(&'static str, u64)>,
}

#[derive(Debug, Clone)]
struct Sample {
    name: &'static str,
    at: f64,
    value: f64,
}

impl Trace {
    /// Adds a row; rows are shown in the order in which they were added.
    pub fn track(&mut self, name: impl Into<String>) -> Track {
        self.tracks.push(name.into());
        Track(self.tracks.len() - 1)
    }

    /// Adds a span from `start` to `end`, in seconds; viewers show `arguments` when it is selected. Non-finite times
    /// are ignored.
    pub fn span(
        &mut self,
        track: Track,
        name: impl Into<String>,
        start: f64,
        end: f64,
        arguments: &[(&'static str, u64)],
    ) {
        if start.is_finite() && end.is_finite() {
            let (name, arguments) = (name.into(), arguments.to_vec());
            self.spans.push(Span { track: track.0, name, start, end, arguments });
        }
    }

    /// Sets a counter's value from the time `at`, in seconds, on. Non-finite numbers are ignored.
    pub fn counter(&mut self, name: &'static str, at: f64, value: f64) {
        if at.is_finite() && value.is_finite() {
            self.counters.push(Sample { name, at, value });
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
        let mut events = Vec::with_capacity(2 * self.tracks.len() + self.spans.len() + self.counters.len());
        for (index, name) in self.tracks.iter().enumerate() {
            let about = |what: &str, value: String| {
                let id = index + 1;
                format!(r#"{{"ph":"M","pid":1,"tid":{id},"name":"{what}","args":{{{value}}}}}"#)
            };
            events.push(about("thread_name", format!(r#""name":{}"#, quoted(name))));
            events.push(about("thread_sort_index", format!(r#""sort_index":{index}"#)));
        }
        events.extend(self.spans.iter().map(Span::event));
        events.extend(self.counters.iter().map(Sample::event));
        format!("{{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n{}\n]}}\n", events.join(",\n"))
    }
}

impl Span {
    fn event(&self) -> String {
        let Span { track, name, start, end, arguments } = self;
        let arguments: Vec<String> =
            arguments.iter().map(|(name, value)| format!("{}:{value}", quoted(name))).collect();
        format!(
            r#"{{"ph":"X","pid":1,"tid":{},"ts":{:.3},"dur":{:.3},"name":{},"args":{{{}}}}}"#,
            track + 1,
            start * MICROS,
            (end - start).max(0.0) * MICROS,
            quoted(name),
            arguments.join(",")
        )
    }
}

impl Sample {
    fn event(&self) -> String {
        let Sample { name, at, value } = self;
        let (name, at) = (quoted(name), at * MICROS);
        format!(r#"{{"ph":"C","pid":1,"ts":{at:.3},"name":{name},"args":{{"value":{value}}}}}"#)
    }
}

/// A quoted and escaped JSON string.
fn quoted(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for letter in text.chars() {
        match letter {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            control if control < ' ' => {
                // Writing to a string cannot fail.
                let _ = write!(quoted, "\\u{:04x}", u32::from(control));
            }
            other => quoted.push(other),
        }
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_is_json_whatever_the_names_and_numbers() {
        let mut trace = Trace::default();
        let odd = "a \"quoted\\ name\"\n\u{1}\t– ünï";
        let track = trace.track(odd);
        trace.span(track, odd, 0.5, 0.75, &[("subgroup", 3), ("bytes", u64::MAX)]);
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
