//! Stored measurements of this machine, so that they are made only once: an entry of the profile for each link (see
//! `sys::profile`). The name of a link contains everything that its speeds depend on.
//!
//! If the file cannot be read, one warning is logged, and the link is measured again. If it cannot be written, one
//! warning is logged.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::speeds::Link;
use crate::log::{self, Level};
use crate::sys::profile::{self as shared, Contents};

/// Path of the profile; its default name is `profile`.
pub fn default_path() -> Option<PathBuf> {
    shared::path("profile")
}

/// The stored speeds of the link `name`, if the profile has them.
pub fn find(path: &Path, name: &str) -> Option<Link> {
    let contents = match Contents::read(path) {
        Ok(contents) => contents?,
        Err(reason) => {
            shared::warn_ignored(path, &reason);
            return None;
        }
    };
    Link::deserialize(contents.links.get(name)?).ok().filter(Link::is_plausible)
}

/// Stores the speeds of the link `name`. A failure is logged as a warning.
pub fn keep(path: &Path, name: &str, link: &Link) {
    if let Err(error) = write(path, name, link) {
        log::write(
            Level::Warn,
            &format!(
                "cannot write the profile {}, so the link is measured again next time: {error}",
                path.display()
            ),
        );
    }
}

/// An invalid file is replaced.
fn write(path: &Path, name: &str, link: &Link) -> std::io::Result<()> {
    let mut contents = Contents::read(path).ok().flatten().unwrap_or_default();
    contents.links.insert(name.to_string(), serde_json::to_value(link)?);
    contents.write(path)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const LINK: Link = Link {
        d2h_f32: 13e9,
        d2h_native: 26.5e9,
        h2d_f32: 1.0 / 3.0,
        h2d_native: 1e-300,
        step_f32: 2e9,
        step_native: 2.1e9,
    };

    #[test]
    fn what_is_kept_is_found_again_to_the_bit_beside_what_others_keep() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/profile");
        assert_eq!(find(&path, "a"), None);
        keep(&path, "a", &LINK);
        let other = Link { d2h_f32: 7.0, ..LINK };
        keep(&path, "b \"=\" c\n", &other);
        let mut contents = Contents::read(&path).unwrap().unwrap();
        contents.filesystems.insert("1-2".to_string(), "theirs".into());
        contents.write(&path).unwrap();
        keep(&path, "a", &other);
        keep(&path, "a", &LINK);
        assert_eq!((find(&path, "a"), find(&path, "b \"=\" c\n")), (Some(LINK), Some(other)));
        assert_eq!(find(&path, "c"), None);
        let kept = Contents::read(&path).unwrap().unwrap();
        assert_eq!((kept.filesystems, kept.links.len()), (contents.filesystems, 2));
    }

    #[test]
    fn an_entry_that_makes_no_sense_counts_as_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("profile");
        let mut entry = serde_json::to_value(LINK).unwrap();
        for (name, wrong) in
            [("out_f32", 0.0.into()), ("in_f32", "x".into()), ("step_f32", serde_json::Value::Null)]
        {
            let right = std::mem::replace(&mut entry[name], wrong);
            let mut contents = Contents::default();
            contents.links.insert("a".to_string(), entry.clone());
            contents.write(&path).unwrap();
            assert_eq!(find(&path, "a"), None, "{name}");
            entry[name] = right;
        }
        keep(&path, "a", &LINK);
        assert_eq!(find(&path, "a"), Some(LINK));
        // A folder at the profile's path cannot be replaced: a warning, no error.
        let blocked = folder.path().join("folder");
        fs::create_dir_all(blocked.join("x")).unwrap();
        keep(&blocked, "a", &LINK);
        assert_eq!(find(&blocked, "a"), None);
    }

    #[test]
    fn a_file_in_another_format_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("profile");
        fs::write(&path, "link a = out_f32=1\n").unwrap();
        assert_eq!(find(&path, "a"), None);
        keep(&path, "a", &LINK);
        assert_eq!(find(&path, "a"), Some(LINK));
    }
}
