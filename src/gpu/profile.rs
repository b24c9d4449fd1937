//! Stored measurements of this machine, so that they are made only once: a text file, one line per link.
//!
//! ```text
//! spillway profile 1
//! link NAME = FIGURE=NUMBER ...
//! ```
//!
//! The name of a link contains everything that its speeds depend on. Lines of other kinds and of other links are kept
//! unchanged. In a file that `spillway tune` wrote, each link is a section (see `sys::profile`).
//!
//! If the file cannot be read, the link is measured again. If it cannot be written, one warning is logged.
#![forbid(unsafe_code)]

use std::fs;
use std::path::{Path, PathBuf};

use super::speeds::Link;
use crate::log::{self, Level};
use crate::sys::profile::{self as shared, FIRST_LINE, LINKS_FIRST as HEAD};

/// The user's profile: `SPILLWAY_PROFILE`, else `spillway/profile` in `XDG_CACHE_HOME`, else in `HOME`/.cache.
pub fn default_path() -> Option<PathBuf> {
    let named = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    named("SPILLWAY_PROFILE").or_else(|| {
        let cache = named("XDG_CACHE_HOME").or_else(|| named("HOME").map(|home| home.join(".cache")));
        cache.map(|cache| cache.join("spillway/profile"))
    })
}

/// The stored speeds of the link `name`, if the profile has them.
pub fn find(path: &Path, name: &str) -> Option<Link> {
    let text = fs::read_to_string(path).ok()?;
    let mut lines = text.lines();
    match lines.next() {
        Some(HEAD) => lines.find_map(|line| parse(line.strip_prefix(&prefix(name))?)),
        Some(FIRST_LINE) => {
            let header = section(name);
            let inside = lines.skip_while(|line| line.trim() != header).skip(1);
            let inside = inside.take_while(|line| !line.starts_with('['));
            parse(&inside.map(|line| line.replace(' ', "")).collect::<Vec<_>>().join(" "))
        }
        _ => None,
    }
}

/// Stores the speeds of the link `name`. A failure is logged as a warning.
pub fn keep(path: &Path, name: &str, link: &Link) {
    if let Err(error) = write(path, name, link) {
        log::write(Level::Warn, &format!("the profile {} is not written: {error}", path.display()));
    }
}

fn write(path: &Path, name: &str, link: &Link) -> std::io::Result<()> {
    let known = fs::read_to_string(path).unwrap_or_default();
    let figures = Link::NAMES.iter().zip(link.figures());
    let text = match known.lines().next() {
        Some(FIRST_LINE) => {
            let figures = figures.map(|(name, value)| format!("{name} = {value:e}\n"));
            format!("{}\n{}\n{}", without_section(&known, name), section(name), figures.collect::<String>())
        }
        _ => {
            let known = known.strip_prefix(HEAD).unwrap_or_default();
            let others = known.lines().filter(|line| !line.is_empty() && !line.starts_with(&prefix(name)));
            let others = others.fold(format!("{HEAD}\n"), |text, line| text + line + "\n");
            let figures: Vec<String> = figures.map(|(name, value)| format!("{name}={value:e}")).collect();
            format!("{others}{}{}\n", prefix(name), figures.join(" "))
        }
    };
    shared::write(path, &text)
}

/// The text without the section of a link, and without trailing empty lines.
fn without_section(text: &str, name: &str) -> String {
    let (header, mut inside, mut kept) = (section(name), false, String::new());
    for line in text.lines() {
        if line.starts_with('[') {
            inside = line.trim() == header;
        }
        if !inside {
            kept.push_str(line);
            kept.push('\n');
        }
    }
    kept.trim_end().to_string() + "\n"
}

fn section(name: &str) -> String {
    format!("[link {}]", one_line(name).trim())
}

fn prefix(name: &str) -> String {
    format!("link {} = ", one_line(name))
}

fn one_line(name: &str) -> String {
    name.chars().map(|c| if c.is_control() || c == '=' { ' ' } else { c }).collect()
}

fn parse(figures: &str) -> Option<Link> {
    let mut values = [f64::NAN; 6];
    for pair in figures.split_whitespace() {
        let (name, value) = pair.split_once('=')?;
        let place = Link::NAMES.iter().position(|known| *known == name)?;
        values[place] = value.parse().ok()?;
    }
    values.iter().all(|value| value.is_finite() && *value > 0.0).then(|| Link::of_figures(values))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINK: Link = Link {
        out_f32: 13e9,
        out_native: 26.5e9,
        in_f32: 1.0 / 3.0,
        in_native: 1e-300,
        step_f32: 2e9,
        step_native: 2.1e9,
    };

    #[test]
    fn what_is_kept_is_found_again_to_the_bit_beside_what_others_keep() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/profile");
        assert_eq!(find(&path, "a"), None);
        keep(&path, "a", &LINK);
        let other = Link { out_f32: 7.0, ..LINK };
        keep(&path, "b = c\n", &other);
        fs::write(&path, fs::read_to_string(&path).unwrap() + "tier x = y\n").unwrap();
        keep(&path, "a", &other);
        keep(&path, "a", &LINK);
        assert_eq!((find(&path, "a"), find(&path, "b = c\n")), (Some(LINK), Some(other)));
        assert_eq!(find(&path, "c"), None);
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains("tier x = y\n") && text.lines().count() == 4, "{text}");
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "nothing beside it");
    }

    #[test]
    fn a_file_that_is_something_else_counts_as_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("profile");
        for text in [
            "",
            "spillway profile 2\nlink a = out_f32=1",
            "spillway profile 1\nlink a = out_f32=1",
            "spillway profile 1\nlink a = out_f32=0 out_native=1 in_f32=1 in_native=1 step_f32=1 step_native=1",
            "spillway profile 1\nlink a = out_f32=x",
        ] {
            fs::write(&path, text).unwrap();
            assert_eq!(find(&path, "a"), None, "{text}");
        }
        keep(&path, "a", &LINK);
        assert_eq!(find(&path, "a"), Some(LINK));
        // A folder at the profile's path cannot be replaced: a warning, no error.
        let blocked = folder.path().join("folder");
        fs::create_dir_all(blocked.join("x")).unwrap();
        keep(&blocked, "a", &LINK);
        assert_eq!(find(&blocked, "a"), None);
    }
}
