//! Progress of a measurement, on standard error: a bar on a terminal, otherwise a line per stage.
#![forbid(unsafe_code)]

use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::report::size;
use super::stdout;

/// Letters between the ends of the bar.
const WIDTH: usize = 30;

/// Stages of one command, whose number is known when the command begins. The bar disappears when this is dropped.
pub struct Progress {
    /// Without a terminal there is no bar.
    bar: Option<Mutex<Bar>>,
}

struct Bar {
    began: Instant,
    done: u64,
    stages: u64,
    message: String,
}

impl Bar {
    /// A line such as `00:00:12 [=====>      ] 2/5 reads`.
    fn line(&self) -> String {
        let filled =
            (self.done.min(self.stages) as usize * WIDTH).checked_div(self.stages as usize).unwrap_or(WIDTH);
        let head = if filled < WIDTH { ">" } else { "" };
        let seconds = self.began.elapsed().as_secs();
        let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
        let bar = format!("{}{head}", "=".repeat(filled));
        let Bar { done, stages, message, .. } = self;
        format!("{hours:02}:{minutes:02}:{seconds:02} [{bar:WIDTH$}] {done}/{stages} {message}")
    }

    fn draw(&self) {
        erase();
        eprint!("{}", self.line());
        let _ = std::io::stderr().flush();
    }
}

/// Empties the line of the cursor.
fn erase() {
    eprint!("\r\x1b[K");
}

impl Progress {
    pub fn new(stages: usize) -> Progress {
        let bar = Bar { began: Instant::now(), done: 0, stages: stages as u64, message: String::new() };
        Progress { bar: std::io::stderr().is_terminal().then(|| Mutex::new(bar)) }
    }

    /// Changes the bar and draws it, if there is one.
    fn change(&self, change: impl FnOnce(&mut Bar)) {
        if let Some(bar) = &self.bar {
            let mut bar = bar.lock().unwrap_or_else(PoisonError::into_inner);
            change(&mut bar);
            bar.draw();
        }
    }

    /// Names the stage that begins now.
    pub fn begin(&self, stage: &str) {
        match &self.bar {
            Some(_) => self.detail(stage),
            None => stdout::note(&format!("spillway: {stage}")),
        }
    }

    /// Names a part of the stage, on a terminal alone.
    pub fn detail(&self, part: &str) {
        self.change(|bar| bar.message = part.to_string());
    }

    /// Shows that so much of a command's time limit has passed, where stages are seconds.
    pub fn reach(&self, elapsed: Duration) {
        self.change(|bar| bar.done = elapsed.as_secs());
    }

    /// Shows the number of finished stages, of 100, and `detail`. Draws only if the number has changed.
    pub fn percent(&self, done: u64, detail: &str) {
        if let Some(bar) = &self.bar {
            let mut bar = bar.lock().unwrap_or_else(PoisonError::into_inner);
            if bar.done < done {
                (bar.done, bar.message) = (done, detail.to_string());
                bar.draw();
            }
        }
    }

    /// Ends a stage.
    pub fn end(&self) {
        self.change(|bar| bar.done += 1);
    }
}

impl Drop for Progress {
    /// Removes the bar.
    fn drop(&mut self) {
        if self.bar.is_some() {
            erase();
        }
    }
}

/// Shows how many bytes of a copy, or of another pass over bytes, have passed.
pub struct Copying {
    progress: Progress,
    bytes: u64,
    passed: AtomicU64,
    began: Instant,
}

impl Copying {
    pub fn begin(what: &str, bytes: u64) -> Copying {
        let progress = Progress::new(100);
        progress.begin(what);
        Copying { progress, bytes, passed: AtomicU64::new(0), began: Instant::now() }
    }

    /// Adds bytes.
    pub fn passed(&self, bytes: u64) {
        self.reached(self.passed.fetch_add(bytes, Ordering::Relaxed) + bytes);
    }

    /// Shows the number of bytes that have passed.
    pub fn reached(&self, passed: u64) {
        let speed = size((passed as f64 / self.began.elapsed().as_secs_f64().max(1e-3)) as u64);
        let percent = 100 * passed / self.bytes.max(1);
        self.progress.percent(percent, &format!("% of {}, {speed}/s", size(self.bytes)));
    }

    /// Seconds since the begin.
    pub fn seconds(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_fills_with_its_stages() {
        let mut bar = Bar { began: Instant::now(), done: 1, stages: 3, message: "reads".to_string() };
        assert_eq!(bar.line(), format!("00:00:00 [{:<WIDTH$}] 1/3 reads", "==========>"));
        bar.done = 3;
        assert!(bar.line().contains(&format!("[{}] 3/3", "=".repeat(WIDTH))), "{}", bar.line());
        (bar.done, bar.stages) = (0, 0);
        assert!(bar.line().contains("0/0"));
    }
}
