//! The profile file of a machine's measurements, as JSON.
//!
//! `SPILLWAY_PROFILE` names one file for the settings of file systems (`io::profile`) and the speeds of GPU links
//! (`gpu::profile`). Without the variable each of them has a file of its own, and if the variable is empty, none:
//!
//! ```json
//! {
//!   "version": 2,
//!   "filesystems": { "ef53-7": { "backend": "io_uring", "block_bytes": 1048576, "queue_depth": 12 } },
//!   "links": { "NAME": { "out_f32": 1.3e10 } }
//! }
//! ```
//!
//! Each writer keeps the entries of the other, and sections that neither knows. A file in another format is an
//! error for its reader: one warning, and the figures are measured again.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwapOption;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{descriptor, host};
use crate::environment;
use crate::log::{self, Level};

const VERSION: u32 = 2;
/// Size limit of a profile, which normally has a few hundred bytes; larger files are rejected.
pub const MOST_BYTES: u64 = 64 << 10;

/// Path of a profile: `SPILLWAY_PROFILE`, else `spillway/NAME` in `XDG_CACHE_HOME`, else in `HOME`/.cache. `None` if
/// `SPILLWAY_PROFILE` is empty, or if there is no cache directory.
pub fn path(name: &str) -> Option<PathBuf> {
    match environment::value("SPILLWAY_PROFILE") {
        Some(named) => Some(PathBuf::from(named)).filter(|path| !path.as_os_str().is_empty()),
        None => {
            let cache = environment::path("XDG_CACHE_HOME")
                .or_else(|| Some(environment::path("HOME")?.join(".cache")))?;
            Some(cache.join("spillway").join(name))
        }
    }
}

/// Contents of a profile.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Contents {
    version: u32,
    /// Entries by file system, as `io::profile` defines them.
    #[serde(default)]
    pub filesystems: BTreeMap<String, Value>,
    /// Entries by link, as `gpu::profile` defines them.
    #[serde(default)]
    pub links: BTreeMap<String, Value>,
    #[serde(flatten)]
    other: BTreeMap<String, Value>,
}

impl Default for Contents {
    fn default() -> Contents {
        Contents {
            version: VERSION,
            filesystems: BTreeMap::new(),
            links: BTreeMap::new(),
            other: BTreeMap::new(),
        }
    }
}

impl Contents {
    /// The contents of the file at `path`; `None` if there is no file; an error text if the file is invalid.
    pub fn read(path: &Path) -> Result<Option<Contents>, String> {
        let Some(bytes) = descriptor::read_small(path, MOST_BYTES)? else { return Ok(None) };
        Contents::parse(&bytes).map(Some)
    }

    /// Parses a profile; the error text names the line.
    pub fn parse(bytes: &[u8]) -> Result<Contents, String> {
        let contents: Contents = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        match contents.version {
            VERSION => Ok(contents),
            other => Err(format!("it has version {other}, but this library reads version {VERSION}")),
        }
    }

    /// The text of the file.
    pub fn text(&self) -> io::Result<String> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }

    /// Atomically replaces `path` by a file with these contents. Readers see the old file or the new one; of two
    /// concurrent writers the later one wins.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        let text = self.text()?;
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        fs::create_dir_all(folder)?;
        let mut name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_os_string();
        name.push(format!(".{:016x}.part", host::random()? as u64));
        let beside = folder.join(name);
        // Exclusive creation: an existing file or link is never written to.
        let mut options = fs::OpenOptions::new();
        options.write(true).create_new(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        let mut file = descriptor::open(&options, &beside)?;
        let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
        written.and_then(|()| fs::rename(&beside, path)).inspect_err(|_| {
            let _ = fs::remove_file(&beside);
        })
    }
}

/// Warns that the profile at `path` is ignored.
pub fn warn_ignored(path: &Path, reason: &str) {
    warn(&format!("profile {} is ignored: {reason}", path.display()));
}

/// Logs a warning unless it repeats the previous one: a job opens thousands of engines.
pub fn warn(message: &str) {
    // Lock-free: the log callback may open an engine, or fork.
    static LAST: ArcSwapOption<String> = ArcSwapOption::const_empty();
    let last = LAST.swap(Some(Arc::new(message.to_string())));
    if last.is_none_or(|last| *last != message) {
        log::write(Level::Warn, message);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_section_is_kept_and_nothing_is_left_beside_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/profile");
        let text = r#"{"version": 2, "links": {"a": {"x": 0.1}}, "tiers": [1, {"b": null}]}"#;
        let contents = Contents::parse(text.as_bytes()).unwrap();
        assert!(contents.filesystems.is_empty());
        contents.write(&path).unwrap();
        assert_eq!(Contents::read(&path), Ok(Some(contents)));
        let kept: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        assert_eq!((&kept["tiers"][1]["b"], &kept["links"]["a"]["x"]), (&Value::Null, &Value::from(0.1)));
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        assert_eq!(Contents::read(&folder.path().join("absent")), Ok(None));
    }

    #[test]
    fn a_fifo_is_refused_at_once() {
        let path = tempfile::tempdir().unwrap().keep().join("fifo");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(Contents::read(&path), Err("it is not a regular file".to_string()));
        fs::remove_dir_all(path.parent().unwrap()).unwrap();
    }

    #[test]
    fn what_is_no_profile_is_refused_with_its_reason() {
        for (text, words) in [
            ("", "line 1"),
            ("{}", "missing field `version`"),
            (r#"{"version": 3, "filesystems": {}}"#, "it has version 3"),
            (r#"{"version": 2, "links": 7}"#, "line 1"),
            ("queue_depth = 3\n", "line 1"),
        ] {
            let error = Contents::parse(text.as_bytes()).unwrap_err();
            assert!(error.contains(words), "{text:?}: {error}");
        }
        assert!(Contents::parse(&[0xFF; 100]).is_err());
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("profile");
        fs::write(&path, vec![b' '; MOST_BYTES as usize + 1]).unwrap();
        assert!(Contents::read(&path).unwrap_err().contains("longer"));
        assert!(Contents::read(folder.path()).is_err());
    }
}
