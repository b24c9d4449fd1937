//! Progress of a measurement, on standard error: a bar on a terminal, otherwise a line per stage.
#![forbid(unsafe_code)]

use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use super::stdout;

/// Stages of one command, whose number is known when the command begins. The bar disappears when this is dropped.
pub struct Progress {
    /// Without a terminal there is no bar.
    bar: Option<ProgressBar>,
}

impl Progress {
    pub fn new(stages: usize) -> Progress {
        // The template is a constant, and the default style only looks different.
        let style = ProgressStyle::with_template("{elapsed_precise} [{bar:30}] {pos}/{len} {msg}")
            .unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = std::io::stderr()
            .is_terminal()
            .then(|| ProgressBar::new(stages as u64).with_style(style.progress_chars("=> ")));
        Progress { bar }
    }

    /// Names the stage that begins now.
    pub fn begin(&self, stage: &str) {
        match &self.bar {
            Some(bar) => {
                bar.set_message(stage.to_string());
                bar.tick();
            }
            None => stdout::note(&format!("spillway: {stage}")),
        }
    }

    /// Names a part of the stage, on a terminal alone.
    pub fn detail(&self, part: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(part.to_string());
            bar.tick();
        }
    }

    /// Shows that so much of a command's time limit has passed, where stages are seconds.
    pub fn reach(&self, elapsed: Duration) {
        if let Some(bar) = &self.bar {
            bar.set_position(elapsed.as_secs());
        }
    }

    /// Ends a stage.
    pub fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.inc(1);
        }
    }

    /// Hides the bar while `print` writes to the terminal.
    pub fn suspend<T>(&self, print: impl FnOnce() -> T) -> T {
        match &self.bar {
            Some(bar) => bar.suspend(print),
            None => print(),
        }
    }

    /// Removes the bar.
    pub fn clear(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}
