//! The profile file of a machine's measurements: the format that its two writers share.
//!
//! `SPILLWAY_PROFILE` names one file for the settings of file systems (`io::profile`) and the speeds of GPU links
//! (`gpu::profile`). Each writer keeps the entries of the other. A file of links alone begins with [`LINKS_FIRST`] and
//! has one line per link. A file with file systems begins with [`FIRST_LINE`] and has one section per link:
//!
//! ```text
//! spillway-io-profile 1
//! [filesystem KIND-ID]
//! queue_depth = 12
//! [link NAME]
//! out_f32 = 1.3e10
//! ```
#![forbid(unsafe_code)]

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use super::host;

/// First line of a file with sections.
pub const FIRST_LINE: &str = "spillway-io-profile 1";
/// First line of a file of links alone.
pub const LINKS_FIRST: &str = "spillway profile 1";

/// The link name of a section header; `None` for another section.
pub fn link_section(header: &str) -> Option<&str> {
    header.strip_prefix("link ")
}

/// Atomically replaces `path` by a file with this text. Readers see the old file or the new one; of two concurrent
/// writers the later one wins.
pub fn write(path: &Path, text: &str) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let mut name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_os_string();
    name.push(format!(".{:016x}.part", host::random()? as u64));
    let beside = folder.join(name);
    // Exclusive creation: an existing file or link is never written to.
    let mut options = fs::OpenOptions::new();
    let mut file =
        options.write(true).create_new(true).mode(0o600).custom_flags(libc::O_NOFOLLOW).open(&beside)?;
    let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
    written.and_then(|()| fs::rename(&beside, path)).inspect_err(|_| {
        let _ = fs::remove_file(&beside);
    })
}
