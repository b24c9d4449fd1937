//! Standard output and standard error, whose reader may end early and whose device may be full. On standard output both are
//! errors. What cannot be written to standard error is lost, and changes neither the work nor the exit status.
#![forbid(unsafe_code)]

use std::io::{self, Write};

use spillway::error::{Error, Result};

/// Prints `text` with one newline at its end.
pub fn say(text: &str) -> Result<()> {
    write(&mut io::stdout().lock(), text)
}

/// Prints one JSON object.
pub fn say_json(value: &impl serde::Serialize) -> Result<()> {
    say(&serde_json::to_string_pretty(value).map_err(|error| Error::system("writing JSON", &error.into()))?)
}

/// Prints a line on standard error.
pub fn note(line: &str) {
    let _ = writeln!(io::stderr().lock(), "{line}");
}

fn write(out: &mut impl Write, text: &str) -> Result<()> {
    let written = writeln!(out, "{}", text.trim_end_matches('\n')).and_then(|()| out.flush());
    written.map_err(|error| Error::system("writing to standard output", &error))
}
