//! The profile: settings that `spillway tune` measured for each file system.
//!
//! A profile is a text file:
//! - The first line is `spillway-io-profile 1`.
//! - Each section `[filesystem KIND-ID]` holds lines `name = value` for one file system.
//! - Sections `[link NAME]` describe GPU links and are preserved unchanged.
//! - Unknown names of values are preserved.
//!
//! Any other defect, including another version, causes one warning, and the file is treated as absent. Missing settings
//! only reduce bandwidth, so they are no reason to fail.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwapOption;

use super::options::{Choice, DEPTH, MAX_BLOCK, MAX_DEPTH, Options, WORKERS};
use crate::error::{Error, Result};
use crate::log::{self, Level};
use crate::sys::file::FileSystem;
use crate::sys::memory::BASE_PAGE;
use crate::sys::profile::{self as shared, FIRST_LINE, LINKS_FIRST, link_section};

/// Size limit of a profile, which normally has a few hundred bytes; larger files are rejected.
const MOST_BYTES: u64 = 64 << 10;

/// The best settings on one file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// The backend.
    pub backend: Choice,
    /// Bytes of a piece.
    pub block_bytes: u64,
    /// Most pieces in flight; for the thread backend also the number of workers.
    pub depth: u32,
}

/// The settings of all known file systems.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Profile {
    /// Path of the file; empty for a profile that was not read from a file.
    pub path: PathBuf,
    entries: BTreeMap<FileSystem, (Settings, String)>,
    /// The lines of each GPU link section.
    links: BTreeMap<String, String>,
}

/// A section during parsing.
enum Section<'a> {
    FileSystem(FileSystem, BTreeMap<&'a str, &'a str>),
    Link(&'a str, String),
}

/// Path of the profile: `SPILLWAY_PROFILE`, or `spillway/io-profile` in the user's cache directory. `None` if the
/// variable is empty or there is no cache directory.
pub fn path() -> Option<PathBuf> {
    let not_empty = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    match std::env::var_os("SPILLWAY_PROFILE") {
        Some(named) => Some(PathBuf::from(named)).filter(|path| !path.as_os_str().is_empty()),
        None => {
            let cache = not_empty("XDG_CACHE_HOME").or_else(|| Some(not_empty("HOME")?.join(".cache")))?;
            Some(cache.join("spillway/io-profile"))
        }
    }
}

/// The profile at [`path`]; `None` if it is absent or invalid. An invalid profile causes a warning.
pub fn current() -> Option<Profile> {
    let path = path()?;
    match Profile::read(&path) {
        Ok(profile) => profile,
        Err(reason) => {
            warn(&format!("profile {} is ignored: {reason}", path.display()));
            None
        }
    }
}

/// Logs a warning unless it repeats the previous one: a job opens thousands of engines.
pub(super) fn warn(message: &str) {
    // Lock-free: the log callback may open an engine, or fork.
    static LAST: ArcSwapOption<String> = ArcSwapOption::const_empty();
    let last = LAST.swap(Some(Arc::new(message.to_string())));
    if last.is_none_or(|last| *last != message) {
        log::write(Level::Warn, message);
    }
}

/// Fills in options that the caller left open. `block_bytes` stays 0: it is resolved for each file.
pub(super) fn with_profile(options: Options, profile: Option<&Profile>) -> Options {
    let (backend, depth) = profile.and_then(Profile::of_an_engine).unwrap_or((options.backend, DEPTH));
    let threads = backend == Choice::Threads && options.backend == Choice::Auto;
    let or = |given: u32, other: u32| if given == 0 { other } else { given };
    Options {
        backend: if options.backend == Choice::Auto { backend } else { options.backend },
        depth: or(options.depth, depth),
        workers: or(options.workers, if threads { depth } else { WORKERS }),
        ..options
    }
}

impl Profile {
    /// The profile at `path`; `None` if there is no file; an error text if the file is invalid.
    pub fn read(path: &Path) -> std::result::Result<Option<Profile>, String> {
        let file = match std::fs::File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.to_string()),
        };
        let mut bytes = Vec::new();
        file.take(MOST_BYTES + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
        if bytes.len() as u64 > MOST_BYTES {
            return Err(format!("it is longer than {MOST_BYTES} bytes"));
        }
        let text = String::from_utf8(bytes).map_err(|_| "it is not text".to_string())?;
        Profile::parse(path, &text).map(Some)
    }

    /// Parses the text of a profile; the error text names the line.
    pub fn parse(path: &Path, text: &str) -> std::result::Result<Profile, String> {
        let mut lines = text.lines().enumerate();
        match lines.next() {
            Some((_, FIRST_LINE)) => {}
            Some((_, LINKS_FIRST)) => return Ok(of_links(path, text)),
            Some((_, first)) if first.starts_with("spillway-io-profile ") => {
                return Err(format!("its first line is {first:?}, this version reads {FIRST_LINE:?}"));
            }
            _ => return Err(format!("it does not begin with {FIRST_LINE:?}")),
        }
        let mut profile = Profile { path: path.to_path_buf(), ..Profile::default() };
        let mut section: Option<Section> = None;
        for (index, line) in lines.map(|(index, line)| (index, line.trim())) {
            let wrong = |what: &str| format!("line {}: {what}", index + 1);
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
                profile.add(section.take())?;
                let system = name.strip_prefix("filesystem ").and_then(FileSystem::parse);
                let system = system.map(|system| Section::FileSystem(system, BTreeMap::new()));
                let link = || link_section(name).map(|link| Section::Link(link, String::new()));
                section = Some(system.or_else(link).ok_or_else(|| wrong("is not [filesystem KIND-ID]"))?);
                continue;
            }
            let (name, value) = line.split_once('=').ok_or_else(|| wrong("is not NAME = VALUE"))?;
            match section.as_mut().ok_or_else(|| wrong("stands before the first section"))? {
                Section::FileSystem(_, values) => drop(values.insert(name.trim(), value.trim())),
                Section::Link(_, lines) => {
                    let _ = writeln!(lines, "{line}");
                }
            }
        }
        profile.add(section)?;
        Ok(profile)
    }

    fn add(&mut self, section: Option<Section>) -> std::result::Result<(), String> {
        let (system, values) = match section {
            None => return Ok(()),
            Some(Section::FileSystem(system, values)) => (system, values),
            Some(Section::Link(name, lines)) => {
                self.links.insert(name.to_string(), lines);
                return Ok(());
            }
        };
        let number = |name: &str, most: u64| {
            let text = values.get(name).ok_or_else(|| format!("[filesystem {system}] lacks {name}"))?;
            let number = text.parse().ok().filter(|number| (1..=most).contains(number));
            number.ok_or_else(|| format!("[filesystem {system}] {name}: {text:?} is not in 1..{most}"))
        };
        let settings = Settings {
            backend: match values.get("backend").copied() {
                Some("io_uring") => Choice::Auto,
                Some("threads") => Choice::Threads,
                other => {
                    return Err(format!(
                        "[filesystem {system}] backend: {other:?} is neither io_uring nor threads"
                    ));
                }
            },
            block_bytes: number("block_bytes", MAX_BLOCK)?.next_multiple_of(BASE_PAGE as u64),
            depth: number("queue_depth", MAX_DEPTH.into())? as u32,
        };
        let known = ["backend", "block_bytes", "queue_depth"];
        let rest = values.iter().filter(|(name, _)| !known.contains(name));
        let notes = rest.fold(String::new(), |text, (name, value)| text + &format!("{name} = {value}\n"));
        self.entries.insert(system, (settings, notes));
        Ok(())
    }

    /// The settings for a file system; `None` if the profile has none.
    pub fn get(&self, system: FileSystem) -> Option<Settings> {
        self.entries.get(&system).map(|(settings, _)| *settings)
    }

    /// Backend and depth of an engine that may use any of the file systems: the largest depth, and threads only if all
    /// file systems use threads. `None` if the profile is empty.
    pub fn of_an_engine(&self) -> Option<(Choice, u32)> {
        let all = || self.entries.values().map(|(settings, _)| settings);
        let depth = all().map(|settings| settings.depth).max()?;
        let threads = all().all(|settings| settings.backend == Choice::Threads);
        Some((if threads { Choice::Threads } else { Choice::Auto }, depth))
    }

    /// Adds or replaces the settings of a file system. `notes` are lines `name = value` for the reader of the file.
    pub fn put(&mut self, system: FileSystem, settings: Settings, notes: String) {
        self.entries.insert(system, (settings, notes));
    }

    /// The text of the profile.
    pub fn text(&self) -> String {
        let mut text =
            format!("{FIRST_LINE}\n# Written by `spillway tune`; delete it, or a section, to forget it.\n");
        for (system, (Settings { backend, block_bytes, depth }, notes)) in &self.entries {
            let backend = if *backend == Choice::Threads { "threads" } else { "io_uring" };
            let _ =
                write!(text, "\n[filesystem {system}]\nbackend = {backend}\nblock_bytes = {block_bytes}\n");
            let _ = write!(text, "queue_depth = {depth}\n{notes}");
        }
        for (name, lines) in &self.links {
            let _ = write!(text, "\n[link {name}]\n{lines}");
        }
        text
    }

    /// Writes the profile to `path` atomically.
    pub fn write(&self, path: &Path) -> Result<()> {
        shared::write(path, &self.text()).map_err(|error| Error::system("writing the profile", &error))
    }
}

/// The profile of a file that holds only links: `link NAME = FIGURE=NUMBER ...`.
fn of_links(path: &Path, text: &str) -> Profile {
    let mut profile = Profile { path: path.to_path_buf(), ..Profile::default() };
    for line in text.lines().filter_map(|line| line.strip_prefix("link ")) {
        let Some((name, figures)) = line.split_once(" = ") else { continue };
        let lines = figures.split_whitespace().filter_map(|figure| figure.split_once('='));
        let lines = lines.fold(String::new(), |text, (name, value)| text + &format!("{name} = {value}\n"));
        profile.links.insert(name.to_string(), lines);
    }
    profile
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTINGS: Settings = Settings { backend: Choice::Auto, block_bytes: 256 << 10, depth: 12 };

    fn system(id: u64) -> FileSystem {
        FileSystem { kind: 0xef53, id }
    }

    #[test]
    fn what_is_written_is_read_back_and_other_file_systems_are_not_known() {
        let mut profile = Profile::default();
        profile.put(system(7), SETTINGS, "directory = /data\n".to_string());
        profile.put(system(8), Settings { backend: Choice::Threads, depth: 3, ..SETTINGS }, String::new());
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/profile");
        profile.write(&path).unwrap();
        let found = Profile::read(&path).unwrap().unwrap();
        assert_eq!((found.get(system(7)), found.get(system(9))), (Some(SETTINGS), None));
        assert_eq!(found.of_an_engine(), Some((Choice::Auto, 12)));
        assert_eq!(found.text(), profile.text());
        assert!(found.text().contains("directory = /data"));
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "no part is left behind");
        assert_eq!(Profile::read(&folder.path().join("absent")), Ok(None));
    }

    #[test]
    fn nonsense_is_refused_with_its_place() {
        let mut profile = Profile::default();
        profile.put(system(7), SETTINGS, String::new());
        let good = profile.text();
        let parse = |text: &str| Profile::parse(Path::new("profile"), text);
        assert!(parse(&good).is_ok() && parse(FIRST_LINE).is_ok_and(|empty| empty.of_an_engine().is_none()));
        for (from, to, words) in [
            ("profile 1", "profile 2", "this version reads"),
            ("spillway-io-profile 1", "{}", "does not begin"),
            ("[filesystem ef53-7]", "[filesystem x]", "line 4"),
            ("[filesystem ef53-7]", "", "before the first section"),
            ("queue_depth = 12", "queue_depth", "line 7"),
            ("queue_depth = 12", "", "lacks queue_depth"),
            ("queue_depth = 12", "queue_depth = 0", "queue_depth"),
            ("queue_depth = 12", "queue_depth = 99999999999999999999", "queue_depth"),
            ("block_bytes = 262144", "block_bytes = -1", "block_bytes"),
            ("backend = io_uring", "backend = magic", "magic"),
        ] {
            let error = parse(&good.replace(from, to)).unwrap_err();
            assert!(error.contains(words), "{to:?}: {error}");
        }
        // Every prefix and every changed byte is read or refused, never a panic.
        for at in 0..good.len() {
            let _ = parse(&good[..at]);
            for byte in [0, b'=', b'[', b'9', b'\n'] {
                let mut bytes = good.clone().into_bytes();
                bytes[at] = byte;
                let _ = parse(&String::from_utf8_lossy(&bytes));
            }
        }
    }

    #[test]
    fn a_file_that_is_no_text_or_endless_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("profile");
        std::fs::write(&path, [0xFF; 100]).unwrap();
        assert_eq!(Profile::read(&path), Err("it is not text".to_string()));
        std::fs::write(&path, vec![b'#'; MOST_BYTES as usize + 1]).unwrap();
        assert!(Profile::read(&path).unwrap_err().contains("longer"));
        assert!(Profile::read(folder.path()).is_err());
    }
}
