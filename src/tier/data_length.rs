//! Length of a path's data file, which another process may truncate.
//!
//! Invariants:
//! - A commit succeeds only if every data file reaches the last written byte of the chunks that the commit names.
//! - A file that lacks only bytes behind the last written one is extended with zeros. Written bytes are never extended
//!   over: a file that lacks some of them is an error of the commit, and of the next open.
#![forbid(unsafe_code)]

use super::extent::{Chunk, Shape};
use super::health::Health;
use super::layout::PAGE;
use super::path::TierPath;
use super::store::Tier;
use crate::error::{Error, Result, TierError, TierKind};

/// Space of a chunk in a data file, in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct UsedSpace {
    /// Offset of the chunk, and its length with the padding of the last page.
    pub(super) range: (u64, u64),
    /// End of the last byte that was written.
    pub(super) written_end: u64,
}

impl UsedSpace {
    /// Space of a chunk.
    pub(super) fn of(chunk: &Chunk, shape: &Shape) -> UsedSpace {
        let last = shape.runs(chunk.first, chunk.count).into_iter().map(|run| run.at + run.len).max();
        let range = (chunk.offset, chunk.stored(shape));
        UsedSpace { range, written_end: chunk.data() + last.unwrap_or(0) }
    }
}

/// Length of the data file at an open. Extends a file that lacks only the padding of its last page.
pub(super) fn opened(path: &TierPath, used: &[UsedSpace]) -> Result<u64> {
    let len = path.data_len()?;
    let written = used.iter().map(|space| space.written_end).max().unwrap_or(0);
    let padded = written.next_multiple_of(PAGE);
    if len >= padded || len < written {
        return Ok(len);
    }
    path.allocate(len, padded)?;
    Ok(padded)
}

impl Tier {
    /// Extends data files that were truncated behind the last written byte of the next commit. Fails with `Corrupt` if
    /// written bytes are missing, and names an extent to which they belong.
    pub(super) fn complete_lengths(&self) -> Result<()> {
        for (number, path) in self.paths.iter().enumerate() {
            let Some(path) = path.as_ref().filter(|_| !self.state.lock().paths[number].gone) else {
                continue;
            };
            let end = self.state.lock().paths[number].space.end();
            // An error of the device is that of the sync which follows.
            let Some(len) = path.data_len().ok().filter(|len| *len < end) else { continue };
            if let Some((extent, written_end)) = self.beyond(number as u32, len) {
                return Err(truncated(path, extent, len, written_end));
            }
            // The next open extends the file of a path that failed.
            if self.state.lock().paths[number].health as u8 <= Health::Draining as u8 {
                path.allocate(len, end)?;
                self.state.lock().paths[number].dirty = true;
            }
        }
        Ok(())
    }

    /// An extent of the next commit with bytes on `path` behind offset `len`, and the end of these bytes.
    fn beyond(&self, path: u32, len: u64) -> Option<(String, u64)> {
        let state = self.state.lock();
        state.extents.iter().flatten().filter(|extent| !extent.removed).find_map(|extent| {
            let chunks = &extent.current.as_ref()?.version.chunks;
            let ends = chunks.iter().filter(|chunk| chunk.path == path);
            let end = ends.map(|chunk| UsedSpace::of(chunk, &extent.shape).written_end).max()?;
            (end > len).then(|| (extent.name.clone(), end))
        })
    }
}

fn truncated(path: &TierPath, extent: String, len: u64, written_end: u64) -> Error {
    let detail = format!(
        "the file was truncated to {len} bytes while the tier was open, and this extent has data up to byte \
         {written_end}; nothing was committed; write the extent again before the next commit"
    );
    let path = path.data_name().to_string();
    TierError { kind: TierKind::Corrupt, path, extent, block: None, detail }.into()
}
