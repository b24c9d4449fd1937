//! Mounted file systems, as the kernel lists them.
#![forbid(unsafe_code)]

use std::fmt;
use std::path::{Path, PathBuf};

use super::sysfs::Root;

/// A mounted file system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// Its device number, as `MAJOR:MINOR`.
    pub number: String,
    /// The directory where it is mounted.
    pub point: PathBuf,
    /// Its type, such as `ext4`.
    pub kind: String,
    /// The device, or what else it was mounted from.
    pub source: String,
}

impl fmt::Display for Mount {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let device =
            if self.source.starts_with('/') { format!(" of {}", self.source) } else { String::new() };
        write!(out, "{}{device}, mounted on {}", self.kind, self.point.display())
    }
}

/// All mounted file systems.
pub fn all(root: &Root) -> Vec<Mount> {
    root.text("proc/self/mountinfo").map_or_else(Vec::new, |text| text.lines().filter_map(parse).collect())
}

/// The file system on which a file or directory is; `None`: it is not there, or the kernel does not tell.
pub fn of(path: &Path) -> Option<Mount> {
    let whole = path.canonicalize().ok()?;
    let above = all(&Root::live()).into_iter().filter(|mount| whole.starts_with(&mount.point));
    // Of two on one directory, the later one covers the other.
    above.max_by_key(|mount| mount.point.components().count())
}

/// "36 35 98:0 /root /mount options - type source options"
fn parse(line: &str) -> Option<Mount> {
    let (own, rest) = line.split_once(" - ")?;
    let (mut own, mut rest) = (own.split_whitespace().skip(2), rest.split_whitespace());
    Some(Mount {
        number: own.next()?.to_string(),
        point: PathBuf::from(plain(own.nth(1)?)),
        kind: rest.next()?.to_string(),
        source: plain(rest.next()?),
    })
}

/// The kernel writes spaces, tabs, newlines and backslashes as octal numbers.
fn plain(text: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .iter()
        .fold(text.to_string(), |text, (code, letter)| text.replace(code, letter))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_kernel_is_a_mount() {
        let found =
            parse(r"36 35 98:0 /mnt1 /mnt\040two rw,noatime master:1 - ext3 /dev/root rw,errors=continue");
        let found = found.unwrap();
        assert_eq!((found.number.as_str(), found.point.as_path()), ("98:0", Path::new("/mnt two")));
        assert_eq!(found.to_string(), "ext3 of /dev/root, mounted on /mnt two");
        assert_eq!(parse("36 35 98:0 /mnt1"), None);
    }

    #[test]
    fn a_directory_is_on_the_nearest_mount_above_it() {
        let found = of(Path::new("/proc/self/task")).unwrap();
        assert_eq!((found.kind.as_str(), found.point.as_path()), ("proc", Path::new("/proc")));
        assert_eq!(found.to_string(), "proc, mounted on /proc");
        assert_eq!(of(Path::new("/no/such/directory")), None);
    }
}
