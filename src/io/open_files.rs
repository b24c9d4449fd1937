//! Cache of the files that operations in flight have open: a thousand operations on one path open it once.
//!
//! An entry lives as long as an operation uses it. An idle engine therefore holds no file open, so it retains no
//! deleted file's space and blocks no unmount.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use super::file::{File, failure};
use crate::error::{Doing, Error, Result};
use crate::sys::file::{self, Access};
use crate::sys::sync::Lock;

/// From this number of entries on, dead entries are removed.
const SWEEP_AT: usize = 64;

#[derive(Debug, Default)]
pub(super) struct OpenFiles {
    files: Lock<HashMap<(PathBuf, Access), Weak<File>>>,
}

impl OpenFiles {
    /// The file that `path` names now, opened if necessary.
    pub(super) fn get(&self, path: &Path, access: Access, direct: bool) -> Result<Arc<File>> {
        let now = match file::info_of_path(path) {
            Ok(info) if !info.seekable => {
                let reason = format!("{} is neither a regular file nor a block device", path.display());
                return Err(Error::invalid("path", reason));
            }
            Ok(info) => Some(info),
            Err(error) if error.kind() == io::ErrorKind::NotFound && access != Access::Read => None,
            Err(error) => return Err(failure(Doing::Opening, &path.to_string_lossy(), 0, 0, &error)),
        };
        let key = (path.to_path_buf(), access);
        let open = self.files.lock().get(&key).and_then(Weak::upgrade);
        if let (Some(open), Some(now)) = (open, now)
            && open.identity() == now.identity
        {
            open.note_length(now.len);
            return Ok(open);
        }
        let opened = Arc::new(File::open(path, access, direct)?);
        let mut files = self.files.lock();
        if files.len() >= SWEEP_AT {
            files.retain(|_, file| file.strong_count() > 0);
        }
        files.insert(key, Arc::downgrade(&opened));
        Ok(opened)
    }
}
