//! A timeline of one step: one row per lane, and a counter of the lanes that work at the same time.
#![forbid(unsafe_code)]

use super::Timing;
use crate::trace::{Trace, Track};
use spillway_planner::interleave::model::{Prediction, Span};
use spillway_planner::interleave::schedule::{Lane, Work};

/// The timeline that the model predicts for a step, with its backward pass.
pub fn of_prediction(prediction: &Prediction) -> Trace {
    let span = |span: &Span| (span.lane, span.work, span.ran.start, span.ran.end);
    draw(prediction.spans.iter().map(span))
}

/// The timeline of a measured step, from the start of its first work.
pub fn of_timings(timings: &[Timing]) -> Trace {
    let first = timings.iter().map(|timing| timing.start).fold(f64::INFINITY, f64::min);
    let span = |timing: &Timing| (timing.lane, Some(timing.work), timing.start - first, timing.end - first);
    draw(timings.iter().map(span))
}

fn draw(spans: impl Iterator<Item = (Lane, Option<Work>, f64, f64)>) -> Trace {
    let mut trace = Trace::default();
    let rows: Vec<Track> = Lane::ALL.iter().map(|lane| trace.track(lane.name())).collect();
    let mut changes = Vec::new();
    for (lane, work, start, end) in spans.filter(|(_, _, start, end)| end > start) {
        let row = rows[lane as usize];
        match work {
            Some(work) => {
                let subgroup = work.subgroup() as u64;
                trace.span(
                    row,
                    format!("{} {subgroup}", work.name()),
                    start,
                    end,
                    &[("subgroup".into(), subgroup)],
                );
                changes.extend([(start, 1), (end, -1)]);
            }
            None => trace.span(row, "backward", start, end, &[]),
        }
    }
    changes.sort_by(|left, right| left.0.total_cmp(&right.0).then(left.1.cmp(&right.1)));
    let mut working = 0;
    for (at, change) in changes {
        working += change;
        trace.counter("busy lanes", at, f64::from(working));
    }
    trace
}

#[cfg(test)]
mod tests {
    use super::*;
    use spillway_planner::interleave::choose::{Mode, choose};
    use spillway_planner::interleave::{Rates, Shape};

    /// The timeline shows the overlap: prefetch, flush, CPU and GPU at the same time, flushes after the last update.
    #[test]
    fn a_step_of_the_model_shows_its_overlap() {
        let rates = Rates {
            cpu: 2e9,
            downscale: f64::INFINITY,
            gpu: 25e9,
            h2d: 13.75e9,
            d2h: 13.75e9,
            cast: 300e9,
            dram: f64::INFINITY,
            duplex: true,
        };
        let shape = Shape { chunk: 16 << 20, ..Shape::uniform(20, 100_000_000) };
        let chosen = choose(&shape, &rates, 2, 0.5, Mode::Count(9)).unwrap();
        let trace = of_prediction(&chosen.prediction);
        let value: serde_json::Value = serde_json::from_str(&trace.to_json()).unwrap();
        let events = value["traceEvents"].as_array().unwrap();
        let named =
            |part: &str| events.iter().filter(|event| event["name"].as_str().unwrap().contains(part)).count();
        for part in [
            "backward",
            "widen",
            "gradient out",
            "prefetch",
            "flush",
            "GPU step",
            "CPU step",
            "upload",
            "resident step",
        ] {
            assert!(named(part) > 0, "{part}");
        }
        let most = events.iter().filter(|event| event["ph"] == "C").map(|event| &event["args"]["value"]);
        assert!(most.filter_map(|value| value.as_f64()).fold(0.0, f64::max) >= 4.0);
    }
}
