//! Reads files whose content another program wrote, such as profiles and descriptions of models.
//!
//! A file that is not regular, or that is longer than its limit, is an error: a FIFO would block, and a device or a huge
//! file would fill the memory.
#![forbid(unsafe_code)]

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use super::descriptor;

/// The content of the file at `path`; `None` if there is no file. The error is a text without the path.
pub fn read(path: &Path, most: u64) -> Result<Option<Vec<u8>>, String> {
    // Does not wait for the other end of a FIFO.
    let file = match descriptor::open(OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK), path) {
        Ok(file) if !file.metadata().is_ok_and(|found| found.is_file()) => {
            return Err("it is not a regular file".to_string());
        }
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.to_string()),
    };
    let mut bytes = Vec::new();
    file.take(most + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    match bytes.len() as u64 <= most {
        true => Ok(Some(bytes)),
        false => Err(format!("it is longer than {most} bytes")),
    }
}
