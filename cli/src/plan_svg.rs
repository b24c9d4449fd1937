//! The timeline of a step as an SVG: a row per engine, a bar per work, and a legend.
#![forbid(unsafe_code)]

use spillway_planner::model::report::{Outcome, Plan};
use spillway_planner::model::step::{ROWS, Span, StepTimes};
use spillway_planner::picture::Picture;

use super::chart::{Area, Legend, Rows, color};

/// Pixels: area of the bars, a row, the names of the rows, a place of the legend.
const WIDTH: u32 = 900;
const ROW: u32 = 34;
const NAMES: u32 = 100;
const PLACE: u32 = 160;
const FONT: u32 = 14;
/// Bars of the same work become one if the gap between them is smaller than this fraction of the step.
const GAP: f64 = 1.0 / 600.0;

/// The text of the SVG. `outcome` has a step.
pub fn svg(plan: &Plan, outcome: &Outcome) -> Result<String, String> {
    let step = outcome.step.as_ref().ok_or("the strategy has no timeline")?;
    let title = format!("{}: a step of {}, {:.3} s", plan.model.name, outcome.strategy.name(), step.total);
    let bars = merged(step);
    let mut kinds: Vec<&str> = Vec::new();
    for bar in &bars {
        if !kinds.contains(&bar.work) {
            kinds.push(bar.work);
        }
    }
    let (width, rows) = (NAMES + WIDTH + 20, ROWS.len() as u32);
    let legend = Legend { place: PLACE, width, size: FONT };
    let color = |work: &str| color(kinds.iter().position(|kind| *kind == work).unwrap_or(0));
    let mut picture = Picture::new(width, 40 + rows * ROW + 50 + legend.height(kinds.len()));
    picture.write(&title, (10.0, 10.0), FONT);
    let area =
        Area { left: f64::from(NAMES), top: 36.0, width: f64::from(WIDTH), height: f64::from(rows * ROW) };
    let most = step.total.max(f64::MIN_POSITIVE);
    let chart = Rows::new(&mut picture, area, &ROWS.map(String::from), most, "seconds", FONT);
    for bar in &bars {
        let row = ROWS.iter().position(|name| *name == bar.row).unwrap_or(0);
        // At least a pixel, so that no work is invisible.
        let end = bar.end.max(bar.start + step.total / f64::from(WIDTH));
        picture.fill(chart.at(bar.start, row, -0.35), chart.at(end, row, 0.35), color(bar.work));
    }
    legend.draw(&mut picture, f64::from(40 + rows * ROW + 50), &kinds);
    Ok(picture.finish())
}

/// The bars, with neighbours of the same work joined: thousands of buckets are a few rectangles.
fn merged(step: &StepTimes) -> Vec<Span> {
    let mut spans = step.spans.clone();
    spans.sort_by(|a, b| (a.row, a.work).cmp(&(b.row, b.work)).then(a.start.total_cmp(&b.start)));
    let mut bars: Vec<Span> = Vec::new();
    for span in spans {
        match bars.last_mut() {
            Some(last)
                if last.row == span.row
                    && last.work == span.work
                    && span.start - last.end < GAP * step.total =>
            {
                last.end = last.end.max(span.end);
            }
            _ => bars.push(span),
        }
    }
    bars.sort_by(|a, b| a.start.total_cmp(&b.start));
    bars
}
