//! Groups of resctrl: directories that the kernel fills with control files.
//!
//! Invariants:
//! - Only the two directories of [`NAMES`] are made or removed, whatever a file says.
//! - Processors are taken from the default group alone. The kernel gives them back to it when a group is removed.
//! - Each written line is read back and compared.
#![forbid(unsafe_code)]

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;

use super::partition::{NAMES, Partition, line};
use super::support::MOUNT;
use crate::error::{Error, Result};
use crate::sys::descriptor;
use crate::sys::topology::Root;

/// Control files that the groups need.
const FILES: [&str; 2] = ["cpus_list", "schemata"];

pub(super) fn check_absent(root: &Root) -> Result<()> {
    match NAMES.iter().map(|name| root.path(&format!("{MOUNT}/{name}"))).find(|path| path.exists()) {
        None => Ok(()),
        Some(path) => {
            let path = path.display();
            Err(Error::Busy(format!(
                "{path} exists, and no run of this tool has made it; remove it with rmdir first"
            )))
        }
    }
}

pub(super) fn make(root: &Root, partitions: &[Partition]) -> Result<()> {
    let free = root.list(&format!("{MOUNT}/cpus_list")).unwrap_or_default();
    for partition in partitions {
        let taken = partition.cpus.minus(&free);
        if !taken.is_empty() {
            return Err(Error::Busy(format!("processors {taken} belong to another group of resctrl")));
        }
    }
    for partition in partitions {
        let folder = format!("{MOUNT}/{}", partition.name);
        fs::create_dir(root.path(&folder)).map_err(|error| failed(root, "making", &folder, &error))?;
        write(root, &format!("{folder}/cpus_list"), &partition.cpus.to_string())?;
        if root.list(&format!("{folder}/cpus_list")).as_ref() != Some(&partition.cpus) {
            return Err(differs(root, &folder, "processors"));
        }
        write(root, &format!("{folder}/schemata"), &partition.schemata.join("\n"))?;
        let found = root.text(&format!("{folder}/schemata")).unwrap_or_default();
        for wanted in partition.schemata.iter().filter_map(|wanted| line(wanted)) {
            let holds = |(domain, value): &(u32, &str)| {
                let same = |other: &(u32, &str)| other.0 == *domain && value_of(other.1) == value_of(value);
                let mut lines = found.lines().filter_map(line).filter(|found| found.0 == wanted.0);
                lines.any(|found| found.1.iter().any(same))
            };
            if !wanted.1.iter().all(holds) {
                return Err(differs(root, &folder, wanted.0));
            }
        }
    }
    Ok(())
}

/// A value without its leading zeros, with which the kernel fills masks.
fn value_of(text: &str) -> &str {
    text.trim_start_matches('0')
}

/// Removes the groups. Missing groups are not an error.
pub(super) fn remove(root: &Root) -> Result<()> {
    for name in NAMES {
        let folder = format!("{MOUNT}/{name}");
        let path = root.path(&folder);
        match fs::remove_dir(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            // A tree of plain files; the kernel removes its control files with the directory.
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {
                FILES.iter().for_each(|file| drop(fs::remove_file(path.join(file))));
                fs::remove_dir(&path)
            }
            other => other,
        }
        .map_err(|error| failed(root, "removing", &folder, &error))?;
    }
    Ok(())
}

fn write(root: &Root, path: &str, text: &str) -> Result<()> {
    let mut options = OpenOptions::new();
    let options = options
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o644)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let written = descriptor::open(options, root.path(path))
        .and_then(|mut file| file.write_all(format!("{text}\n").as_bytes()));
    written.map_err(|error| failed(root, "writing", path, &error))
}

fn differs(root: &Root, folder: &str, what: &str) -> Error {
    let path = root.path(folder);
    Error::System {
        what: "checking a resctrl group",
        reason: format!("{}: the kernel changed {what}", path.display()),
    }
}

/// An error with the kernel's own words, and what to do.
fn failed(root: &Root, doing: &str, path: &str, error: &io::Error) -> Error {
    let status = root.text(&format!("{MOUNT}/info/last_cmd_status")).unwrap_or_default();
    let status = status.trim();
    let more = match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM | libc::EROFS) => String::new(),
        Some(libc::ENOSPC) => {
            "; other groups use all that the hardware distinguishes (num_closids): remove one with rmdir"
                .to_string()
        }
        _ if !status.is_empty() && status != "ok" => format!("; the kernel says: {status}"),
        _ => String::new(),
    };
    let reason = format!("{doing} {}: {}{more}", root.path(path).display(), super::words(error));
    Error::System { what: "changing resctrl", reason }
}
