//! What was measured on this machine, so that it is measured once: a text file, one line for each link.
//!
//! ```text
//! spillway profile 1
//! link NAME = FIGURE=NUMBER ...
//! ```
//!
//! The name of a link holds all that its speeds hang on. Lines of other kinds, and of other links, are left as they are. A
//! file that cannot be read or written is one warning: what it would hold is measured again.
#![forbid(unsafe_code)]

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use super::link::Link;
use crate::log::{self, Level};

const HEAD: &str = "spillway profile 1";

/// The profile of this user: `SPILLWAY_PROFILE`, else spillway/profile in the cache of `XDG_CACHE_HOME` or `HOME`.
pub fn default_path() -> Option<PathBuf> {
    let named = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    named("SPILLWAY_PROFILE").or_else(|| {
        let cache = named("XDG_CACHE_HOME").or_else(|| named("HOME").map(|home| home.join(".cache")));
        cache.map(|cache| cache.join("spillway/profile"))
    })
}

/// The speeds of the link of this name, if the profile has them.
pub fn find(path: &Path, name: &str) -> Option<Link> {
    let text = fs::read_to_string(path).ok()?;
    let mut lines = text.lines();
    if lines.next() != Some(HEAD) {
        return None;
    }
    lines.find_map(|line| parse(line.strip_prefix(&prefix(name))?))
}

/// Keeps the speeds of the link of this name.
pub fn keep(path: &Path, name: &str, link: &Link) {
    if let Err(error) = write(path, name, link) {
        log::write(Level::Warn, &format!("the profile {} is not written: {error}", path.display()));
    }
}

fn write(path: &Path, name: &str, link: &Link) -> std::io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let known = fs::read_to_string(path).unwrap_or_default();
    let known = known.strip_prefix(HEAD).unwrap_or_default();
    let mut text = format!("{HEAD}\n");
    for line in known.lines().filter(|line| !line.is_empty() && !line.starts_with(&prefix(name))) {
        text.push_str(&format!("{line}\n"));
    }
    let figures = Link::NAMES.iter().zip(link.figures());
    let figures: Vec<String> = figures.map(|(name, value)| format!("{name}={value:e}")).collect();
    text.push_str(&format!("{}{}\n", prefix(name), figures.join(" ")));
    // Beside it first: another process sees the old file or the new one, and of two writers the later wins.
    let beside = path.with_extension(format!("{}.part", std::process::id()));
    let mut file = fs::File::create(&beside)?;
    let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
    let moved = written.and_then(|()| fs::rename(&beside, path));
    moved.inspect_err(|_| {
        let _ = fs::remove_file(&beside);
    })
}

fn prefix(name: &str) -> String {
    let one_line: String = name.chars().map(|c| if c.is_control() || c == '=' { ' ' } else { c }).collect();
    format!("link {one_line} = ")
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
        // A folder in its place cannot be replaced; that is a warning.
        let blocked = folder.path().join("folder");
        fs::create_dir_all(blocked.join("x")).unwrap();
        keep(&blocked, "a", &LINK);
        assert_eq!(find(&blocked, "a"), None);
    }
}
