//! Files of /sys and /proc below a root that tests and recordings can set.
//!
//! Invariants:
//! - A read never waits: only regular files are read, opened with O_NONBLOCK.
//! - A file longer than [`MOST_BYTES`] and a directory with more than [`MOST_ENTRIES`] entries count as missing.
#![forbid(unsafe_code)]

use std::fs::{self, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::error::{Error, Result};
use crate::sys::bitmap::Bitmap;
use crate::sys::descriptor;

const MOST_BYTES: u64 = 1 << 20;
const MOST_ENTRIES: usize = 1 << 17;

/// The directory that stands for "/".
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Root(PathBuf);

impl Root {
    /// This machine.
    pub fn live() -> Root {
        Root(PathBuf::from("/"))
    }

    /// A tree with `sys` and `proc` below `path`. Nothing is checked: see [`Root::recorded`].
    pub fn at(path: impl Into<PathBuf>) -> Root {
        Root(path.into())
    }

    /// A recorded tree that a caller names: its directory `sys` must exist. "/" is this machine.
    pub fn recorded(path: impl Into<PathBuf>) -> Result<Root> {
        let root = Root::at(path);
        let reason = match fs::metadata(root.path("sys")) {
            _ if root.is_live() => return Ok(root),
            Ok(found) if found.is_dir() => return Ok(root),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                "has no directory sys that this user may read"
            }
            _ => "has no directory sys",
        };
        let advice = "name the directory of a recorded tree, with sys and proc below it";
        Err(Error::invalid("root", format!("{:?} {reason}; {advice}", root.0)))
    }

    /// True if the tree is this machine's.
    pub fn is_live(&self) -> bool {
        self.0 == Path::new("/")
    }

    /// A path of this tree.
    pub fn path(&self, path: &str) -> PathBuf {
        self.0.join(path)
    }

    /// A whole file; `None` if it cannot be read.
    pub fn text(&self, path: &str) -> Option<String> {
        let file =
            descriptor::open(OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK), self.path(path))
                .ok()?;
        file.metadata().ok().filter(fs::Metadata::is_file)?;
        let mut bytes = Vec::new();
        file.take(MOST_BYTES + 1).read_to_end(&mut bytes).ok()?;
        // Some kernels end a mask with a NUL.
        let end = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        (bytes.len() as u64 <= MOST_BYTES).then(|| String::from_utf8_lossy(&bytes[..end]).into_owned())
    }

    /// A file with one number.
    pub fn number<T: FromStr>(&self, path: &str) -> Option<T> {
        self.text(path)?.trim().parse().ok()
    }

    /// A file with one hexadecimal number after "0x".
    pub fn hex(&self, path: &str) -> Option<u32> {
        u32::from_str_radix(self.text(path)?.trim().strip_prefix("0x")?, 16).ok()
    }

    /// A file with a list such as "0-3,8".
    pub fn list(&self, path: &str) -> Option<Bitmap> {
        Bitmap::parse_list(&self.text(path)?)
    }

    /// A file with a mask of hexadecimal words.
    pub fn mask(&self, path: &str) -> Option<Bitmap> {
        Bitmap::parse_mask(&self.text(path)?)
    }

    /// Names in a directory, sorted; none if it cannot be read.
    pub fn names(&self, path: &str) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.path(path)) else { return Vec::new() };
        let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        let mut names: Vec<String> = names.take(MOST_ENTRIES + 1).collect();
        if names.len() > MOST_ENTRIES {
            return Vec::new();
        }
        names.sort();
        names
    }

    /// The numbers N of the entries PREFIXn of a directory, in ascending order.
    pub fn numbered(&self, path: &str, prefix: &str) -> Bitmap {
        let number = |name: &String| name.strip_prefix(prefix)?.parse::<u32>().ok();
        self.names(path).iter().filter_map(number).collect()
    }

    /// The path behind all links; `None` if it leads to nothing.
    pub fn resolved(&self, path: &str) -> Option<PathBuf> {
        fs::canonicalize(self.path(path)).ok()
    }
}
