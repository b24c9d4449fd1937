//! `spillway draw`: the trace of a step as an SVG. It has a row of bars for each row of the trace. If the trace says how many
//! bytes its transfers moved, a chart below shows the throughput of each of them over time.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Deserialize;
use serde_json::{Map, Value};
use spillway::error::{Error, Result};
use spillway_planner::picture::Picture;

use super::chart::{Area, Legend, Levels, Rows, color};
use super::stdout;

/// Pixels: area of the bars, a row, the names of the rows, a place of the legend, the chart of throughputs.
const WIDTH: u32 = 900;
const ROW: u32 = 24;
const NAMES: u32 = 110;
const PLACE: u32 = 250;
const CHART: u32 = 200;
const FONT: u32 = 13;
/// More bars are too narrow to see.
const MAX_DRAWN: usize = 1 << 16;

#[derive(clap::Args)]
#[group(skip)]
pub struct Options {
    /// A trace, as `Swap.trace()`, `Interleave.trace()` and `spillway trace` write it.
    trace: PathBuf,
    /// Output file.
    #[arg(long, default_value = "step.svg")]
    output: PathBuf,
}

pub fn run(options: &Options) -> Result<()> {
    let invalid = |reason| Error::invalid(options.trace.display().to_string(), reason);
    let text = std::fs::read_to_string(&options.trace).map_err(|error| invalid(error.to_string()))?;
    let step = Drawing::of(&text).map_err(invalid)?;
    std::fs::write(&options.output, svg(&step))
        .map_err(|error| Error::invalid(options.output.display().to_string(), error.to_string()))?;
    stdout::say(&format!("{}: {} bars, {:.3} s", options.output.display(), step.bars.len(), step.seconds))
}

#[derive(Deserialize)]
struct Document {
    #[serde(rename = "traceEvents")]
    events: Vec<Event>,
}

/// An event of the trace event format; times are in microseconds.
#[derive(Deserialize)]
struct Event {
    ph: String,
    name: String,
    tid: Option<u64>,
    ts: Option<f64>,
    dur: Option<f64>,
    #[serde(default)]
    args: Map<String, Value>,
}

/// A bar in a row. `bytes` is 0 if it is no transfer.
struct Bar {
    row: usize,
    name: String,
    kind: usize,
    start: f64,
    end: f64,
    bytes: f64,
}

impl Bar {
    /// Bytes per second; none for other work than a transfer, or without a duration.
    fn throughput(&self) -> Option<f64> {
        (self.bytes > 0.0 && self.end > self.start).then(|| self.bytes / (self.end - self.start))
    }
}

/// What is drawn. Times are in seconds from the first one on.
struct Drawing {
    rows: Vec<String>,
    kinds: Vec<String>,
    bars: Vec<Bar>,
    seconds: f64,
}

impl Drawing {
    fn of(text: &str) -> std::result::Result<Drawing, String> {
        let document: Document =
            serde_json::from_str(text).map_err(|error| format!("is no trace of a step: {error}"))?;
        let mut rows: BTreeMap<u64, String> = BTreeMap::new();
        for event in document.events.iter().filter(|event| event.ph == "M" && event.name == "thread_name") {
            if let (Some(row), Some(Value::String(name))) = (event.tid, event.args.get("name")) {
                rows.insert(row, name.clone());
            }
        }
        let (mut bars, mut kinds) = (Vec::new(), Vec::<String>::new());
        for event in document.events.iter().filter(|event| event.ph == "X") {
            let (Some(row), Some(start), Some(lasts)) = (event.tid, event.ts, event.dur) else {
                return Err(format!("the span {:?} lacks tid, ts or dur", event.name));
            };
            let row = rows.keys().position(|known| *known == row);
            let row = row.ok_or_else(|| format!("the span {:?} is in a row without a name", event.name))?;
            if !(lasts >= 0.0 && (start + lasts).is_finite()) {
                return Err(format!("the span {:?} begins at {start} us and lasts {lasts} us", event.name));
            }
            let work = kind_of(&event.name);
            let kind = kinds.iter().position(|known| known == work).unwrap_or_else(|| {
                kinds.push(work.to_string());
                kinds.len() - 1
            });
            let paths = event.args.iter().filter(|(name, _)| name.starts_with("bytes on path "));
            let bytes = paths.filter_map(|(_, bytes)| bytes.as_f64()).sum();
            let (start, end) = (start / 1e6, (start + lasts) / 1e6);
            bars.push(Bar { row, name: event.name.clone(), kind, start, end, bytes });
        }
        if bars.is_empty() || bars.len() > MAX_DRAWN {
            return Err(format!("has {} spans, and 1 to {MAX_DRAWN} can be drawn", bars.len()));
        }
        let first = bars.iter().map(|bar| bar.start).fold(f64::INFINITY, f64::min);
        bars.iter_mut().for_each(|bar| (bar.start, bar.end) = (bar.start - first, bar.end - first));
        let seconds = bars.iter().map(|bar| bar.end).fold(0.0, f64::max);
        Ok(Drawing { rows: rows.into_values().collect(), kinds, bars, seconds })
    }

    /// The kinds of work, and the mean throughput of transfers: their bytes by the sum of their times.
    fn legend(&self) -> Vec<String> {
        let text = |(number, kind): (usize, &String)| {
            let moves = |bar: &&Bar| bar.kind == number && bar.throughput().is_some();
            let moved: f64 = self.bars.iter().filter(moves).map(|bar| bar.bytes).sum();
            let time: f64 = self.bars.iter().filter(moves).map(|bar| bar.end - bar.start).sum();
            if time > 0.0 {
                format!("{kind}, {:.2} GB/s on average", moved / time / 1e9)
            } else {
                kind.clone()
            }
        };
        self.kinds.iter().enumerate().map(text).collect()
    }
}

/// The work of a span: its name without the number of the subgroup.
fn kind_of(name: &str) -> &str {
    let without = name.rsplit_once(' ').filter(|(_, number)| number.parse::<u64>().is_ok());
    without.map_or(name, |(work, _)| work)
}

fn svg(step: &Drawing) -> String {
    let (width, rows) = (NAMES + WIDTH + 30, step.rows.len() as u32);
    let most = step.seconds.max(f64::MIN_POSITIVE);
    let fastest = step.bars.iter().filter_map(Bar::throughput).fold(0.0, f64::max);
    let (legend, kinds) = (Legend { place: PLACE, width, size: FONT }, step.legend());
    let chart = if fastest > 0.0 { CHART + 90 } else { 0 };
    let mut picture = Picture::new(width, 20 + rows * ROW + 50 + legend.height(kinds.len()) + chart);
    let area = |top: u32, height: u32| Area {
        left: f64::from(NAMES),
        top: f64::from(top),
        width: f64::from(WIDTH),
        height: f64::from(height),
    };
    let chart = Rows::new(&mut picture, area(16, rows * ROW), &step.rows, most, "seconds", FONT);
    for bar in &step.bars {
        let title = match bar.throughput() {
            Some(moved) => {
                format!("{}: {:.6} to {:.6} s, {:.2} GB/s", bar.name, bar.start, bar.end, moved / 1e9)
            }
            None => format!("{}: {:.6} to {:.6} s", bar.name, bar.start, bar.end),
        };
        let (from, to) = (chart.at(bar.start, bar.row, -0.35), chart.at(seen(bar, most), bar.row, 0.35));
        picture.titled(from, to, color(bar.kind), &title);
    }
    let top = 20 + rows * ROW + 50;
    legend.draw(&mut picture, f64::from(top), &kinds);
    if fastest > 0.0 {
        let area = area(top + legend.height(kinds.len()) + 30, CHART);
        let chart = Rows::new(&mut picture, area, &[String::new()], most, "seconds", FONT);
        let levels = Levels::new(&mut picture, area, fastest / 1e9, "GB/s", FONT);
        for bar in &step.bars {
            let Some(throughput) = bar.throughput() else { continue };
            let (y, left) = (levels.at(throughput / 1e9), chart.at(bar.start, 0, 0.0).0);
            let right = chart.at(seen(bar, most), 0, 0.0).0;
            picture.fill((left, y - 1.5), (right, y + 1.5), color(bar.kind));
        }
    }
    picture.finish()
}

/// The end of a bar, which is at least a pixel wide.
fn seen(bar: &Bar, most: f64) -> f64 {
    bar.end.max(bar.start + most / f64::from(WIDTH))
}
