//! The file of what was measured on a machine, as far as its writers share it.
//!
//! `SPILLWAY_PROFILE` names one file for the settings of file systems (`io::profile`) and the speeds of links
//! (`gpu::profile`). Each writer keeps what the other wrote. A file of links alone begins with [`LINKS_FIRST`] and has a
//! line for each link; once there are file systems it begins with [`FIRST_LINE`] and each link is a section:
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

/// The name of a section for a link.
pub fn link_section(header: &str) -> Option<&str> {
    header.strip_prefix("link ")
}

/// Replaces `path` by a file of this text, in one piece: another process sees the old file or the new one, and of two
/// writers the later wins.
pub fn write(path: &Path, text: &str) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let mut name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_os_string();
    name.push(format!(".{:016x}.part", host::random()? as u64));
    let beside = folder.join(name);
    // Exclusive: neither a file nor a link that is there already is written to.
    let mut options = fs::OpenOptions::new();
    let mut file =
        options.write(true).create_new(true).mode(0o600).custom_flags(libc::O_NOFOLLOW).open(&beside)?;
    let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
    written.and_then(|()| fs::rename(&beside, path)).inspect_err(|_| {
        let _ = fs::remove_file(&beside);
    })
}
