//! The profile: settings that `spillway tune` measured for each file system.
//!
//! Each file system has an entry `KIND-ID` in the section `filesystems` of the profile file (see `sys::profile`).
//! Unknown names of values are kept, as are the other sections.
//!
//! An invalid file or entry causes one warning, and the file is treated as absent. Missing settings only reduce
//! bandwidth, so they are no reason to fail.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::options::{BackendChoice, DEPTH, MAX_BLOCK, MAX_DEPTH, Options, WORKERS, given_or};
use crate::error::{Error, Result};
use crate::sys::file::FileSystem;
use crate::sys::memory::BASE_PAGE;
use crate::sys::profile::{self as shared, Contents};

/// The best settings on one file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// The backend.
    pub backend: BackendChoice,
    /// Bytes of a piece.
    pub block_bytes: u64,
    /// Most pieces in flight; for the thread backend also the number of workers.
    pub depth: u32,
}

/// Values of an entry for the reader of the file.
pub type Notes = Map<String, Value>;

/// The settings of all known file systems.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Profile {
    /// Path of the file; empty for a profile that was not read from a file.
    pub path: PathBuf,
    entries: BTreeMap<FileSystem, Settings>,
    contents: Contents,
}

/// An entry as the file has it.
#[derive(Debug, Serialize, Deserialize)]
struct Entry {
    backend: Backend,
    block_bytes: u64,
    queue_depth: u32,
    #[serde(flatten)]
    notes: Notes,
}

#[derive(Debug, Serialize, Deserialize)]
enum Backend {
    #[serde(rename = "io_uring")]
    Uring,
    #[serde(rename = "threads")]
    Threads,
}

/// Path of the profile; its default name is `io-profile`.
pub fn path() -> Option<PathBuf> {
    shared::path("io-profile")
}

/// The profile at [`path`]; `None` if it is absent or invalid. An invalid profile causes a warning.
pub fn current() -> Option<Profile> {
    let path = path()?;
    match Profile::read(&path) {
        Ok(profile) => profile,
        Err(reason) => {
            shared::warn_ignored(&path, &reason);
            None
        }
    }
}

/// Fills in options that the caller left open. `block_bytes` stays 0: it is resolved for each file.
pub(super) fn with_profile(options: Options, profile: Option<&Profile>) -> Options {
    let (backend, depth) = profile.and_then(Profile::for_engine).unwrap_or((options.backend, DEPTH));
    let threads = backend == BackendChoice::Threads && options.backend == BackendChoice::Auto;
    Options {
        backend: if options.backend == BackendChoice::Auto { backend } else { options.backend },
        depth: given_or(options.depth, depth),
        workers: given_or(options.workers, if threads { depth } else { WORKERS }),
        ..options
    }
}

impl Profile {
    /// The profile at `path`; `None` if there is no file; an error text if the file is invalid.
    pub fn read(path: &Path) -> std::result::Result<Option<Profile>, String> {
        Contents::read(path)?.map(|contents| Profile::of(path, contents)).transpose()
    }

    fn of(path: &Path, contents: Contents) -> std::result::Result<Profile, String> {
        let entry = |(name, value): (&String, &Value)| {
            let system = FileSystem::parse(name);
            let system = system.ok_or_else(|| format!("file system {name:?} is not KIND-ID"))?;
            let settings = settings(value).map_err(|reason| format!("file system {name}: {reason}"))?;
            Ok((system, settings))
        };
        let entries = contents.filesystems.iter().map(entry).collect::<std::result::Result<_, String>>()?;
        Ok(Profile { path: path.to_path_buf(), entries, contents })
    }

    /// The settings for a file system; `None` if the profile has none.
    pub fn get(&self, system: FileSystem) -> Option<Settings> {
        self.entries.get(&system).copied()
    }

    /// Backend and depth of an engine that may use any of the file systems: the largest depth, and threads only if all
    /// file systems use threads. `None` if the profile is empty.
    fn for_engine(&self) -> Option<(BackendChoice, u32)> {
        let all = || self.entries.values();
        let depth = all().map(|settings| settings.depth).max()?;
        let threads = all().all(|settings| settings.backend == BackendChoice::Threads);
        Some((if threads { BackendChoice::Threads } else { BackendChoice::Auto }, depth))
    }

    /// Adds or replaces the settings of a file system, with notes for the reader of the file.
    pub fn put(&mut self, system: FileSystem, settings: Settings, notes: Notes) -> Result<()> {
        let Settings { backend, block_bytes, depth } = settings;
        let backend = if backend == BackendChoice::Threads { Backend::Threads } else { Backend::Uring };
        let entry = serde_json::to_value(Entry { backend, block_bytes, queue_depth: depth, notes });
        let entry = entry.map_err(|error| Error::system("writing the profile", &error.into()))?;
        self.contents.filesystems.insert(system.to_string(), entry);
        self.entries.insert(system, settings);
        Ok(())
    }

    /// Writes the profile to `path` atomically.
    pub fn write(&self, path: &Path) -> Result<()> {
        self.contents.write(path).map_err(|error| Error::system("writing the profile", &error))
    }
}

fn settings(entry: &Value) -> std::result::Result<Settings, String> {
    let Entry { backend, block_bytes, queue_depth, .. } =
        Entry::deserialize(entry).map_err(|error| error.to_string())?;
    let range = |name: &str, number: u64, most: u64| match (1..=most).contains(&number) {
        true => Ok(()),
        false => Err(format!("{name} is {number}, but must be from 1 to {most}")),
    };
    range("block_bytes", block_bytes, MAX_BLOCK)?;
    range("queue_depth", queue_depth.into(), MAX_DEPTH.into())?;
    Ok(Settings {
        backend: match backend {
            Backend::Uring => BackendChoice::Auto,
            Backend::Threads => BackendChoice::Threads,
        },
        block_bytes: block_bytes.next_multiple_of(BASE_PAGE as u64),
        depth: queue_depth,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTINGS: Settings = Settings { backend: BackendChoice::Auto, block_bytes: 256 << 10, depth: 12 };

    fn system(id: u64) -> FileSystem {
        FileSystem { kind: 0xef53, id }
    }

    #[test]
    fn what_is_written_is_read_back_and_other_file_systems_are_not_known() {
        let mut profile = Profile::default();
        let notes = Notes::from_iter([("directory".to_string(), "/data".into())]);
        profile.put(system(7), SETTINGS, notes).unwrap();
        let threads = Settings { backend: BackendChoice::Threads, depth: 3, ..SETTINGS };
        profile.put(system(8), threads, Notes::new()).unwrap();
        let volume = tempfile::tempdir().unwrap();
        let path = volume.path().join("new/profile");
        profile.write(&path).unwrap();
        let found = Profile::read(&path).unwrap().unwrap();
        assert_eq!((found.get(system(7)), found.get(system(8))), (Some(SETTINGS), Some(threads)));
        assert_eq!((found.get(system(9)), found.for_engine()), (None, Some((BackendChoice::Auto, 12))));
        assert_eq!(found, Profile { path: path.clone(), ..profile });
        assert!(found.contents.text().unwrap().contains(r#""directory": "/data""#));
        assert_eq!(Profile::read(&volume.path().join("absent")), Ok(None));
    }

    #[test]
    fn nonsense_is_refused_with_its_place() {
        let mut profile = Profile::default();
        profile.put(system(7), SETTINGS, Notes::new()).unwrap();
        let good = profile.contents.text().unwrap();
        let parse = |text: &str| Profile::of(Path::new("profile"), Contents::parse(text.as_bytes())?);
        assert!(parse(&good).is_ok());
        assert!(parse(r#"{"version": 2}"#).is_ok_and(|empty| empty.for_engine().is_none()));
        for (from, to, words) in [
            (r#""version": 2"#, r#""version": 3"#, "version 3"),
            ("ef53-7", "x", "\"x\" is not KIND-ID"),
            (r#""queue_depth": 12"#, r#""depth": 12"#, "file system ef53-7: missing field `queue_depth`"),
            (r#""queue_depth": 12"#, r#""queue_depth": 0"#, "queue_depth is 0"),
            (r#""queue_depth": 12"#, r#""queue_depth": 99999999999999999999"#, "file system ef53-7: "),
            (r#""block_bytes": 262144"#, r#""block_bytes": -1"#, "file system ef53-7: "),
            (r#""backend": "io_uring""#, r#""backend": "magic""#, "magic"),
        ] {
            assert!(good.contains(from), "{from}");
            let error = parse(&good.replace(from, to)).unwrap_err();
            assert!(error.contains(words), "{to:?}: {error}");
        }
        // Every prefix and every changed byte is read or refused, never a panic.
        for at in 0..good.len() {
            let _ = parse(&good[..at]);
            for byte in [0, b'"', b'{', b'9', b'\n'] {
                let mut bytes = good.clone().into_bytes();
                bytes[at] = byte;
                let _ = parse(&String::from_utf8_lossy(&bytes));
            }
        }
    }
}
