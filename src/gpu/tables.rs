//! Tables in device memory, one per list of tensors, which stay while the list stays the same.
//!
//! Invariants:
//! - A call has its table for itself until all its kernels are queued.
//! - All uploads and all kernels that read tables run in order on one stream, so a table is replaced only after the
//!   kernels that read it.
//! - Only words that differ from those that the device has are copied, and nothing if none does.
//! - No table is freed before the end: the driver would wait for the device.

use std::ops::Range;
use std::sync::Arc;

use super::device::Device;
use super::list::List;
use super::memory::DeviceMemory;
use super::staging::{Staged, Staging};
use super::stream::Stream;
use crate::error::Result;
use crate::sys::sync::Lock;

/// Lists whose tables are kept. With more, the list that was used longest ago makes room.
const KEPT: usize = 16;
/// Bytes of the smallest table.
const LEAST: u64 = 4096;
const WORD: usize = size_of::<u64>();

/// The tables of one stream.
#[derive(Debug)]
pub(super) struct Tables {
    device: Arc<Device>,
    staging: Staging,
    /// Tables that no call has, the one that was used longest ago first.
    idle: Lock<Vec<Table>>,
}

/// A table in device memory.
#[derive(Debug)]
pub(super) struct Table {
    key: (usize, u64),
    memory: DeviceMemory,
    /// What the device has in order on the stream. Empty if that is unknown.
    known: Vec<u64>,
}

impl Table {
    /// Address of the first word.
    pub(super) fn address(&self) -> u64 {
        self.memory.span().address()
    }
}

impl Tables {
    pub(super) fn new(device: &Arc<Device>) -> Result<Tables> {
        Ok(Tables { device: Arc::clone(device), staging: Staging::new(device)?, idle: Lock::default() })
    }

    /// A table for `list` with room for `words` words: the one that held the list before, if there is one.
    pub(super) fn take(&self, list: &List, words: usize) -> Result<Table> {
        let (key, bytes) = (list.key(), (words * WORD) as u64);
        let fits = |table: &Table| table.memory.span().bytes() >= bytes;
        let mut idle = self.idle.lock();
        let mut found = idle.iter().position(|table| table.key == key && fits(table));
        if found.is_none() && idle.len() >= KEPT {
            found = idle.iter().position(fits);
        }
        if let Some(found) = found {
            return Ok(Table { key, ..idle.remove(found) });
        }
        drop(idle);
        let memory = DeviceMemory::new(&self.device, bytes.next_power_of_two().max(LEAST))?;
        Ok(Table { key, memory, known: Vec::new() })
    }

    /// Keeps a table for the next call. All kernels that read it are queued.
    pub(super) fn give(&self, table: Table) {
        self.idle.lock().push(table);
    }

    /// Gives the table its `words`, in order on `stream`.
    pub(super) fn upload(&self, table: &mut Table, words: Vec<u64>, stream: &Stream) -> Result<()> {
        let Some(changed) = changed(&table.known, &words) else { return Ok(()) };
        table.known.clear();
        let bytes = bytes_of(&words[changed.clone()]);
        let Staged { memory, copied } = self.staging.take(bytes.len())?;
        memory.span().write(bytes);
        let to = table.memory.span().part((changed.start * WORD) as u64, bytes.len() as u64);
        if let Err(error) = stream.upload(&memory, to).and_then(|()| stream.record(&copied)) {
            // The copy, if it is queued, ends before the memory is used again.
            let _ = stream.synchronize();
            return Err(error);
        }
        table.known = words;
        Ok(())
    }
}

/// From the first to the last word of `wanted` that `known` does not have.
fn changed(known: &[u64], wanted: &[u64]) -> Option<Range<usize>> {
    let differs = |at: &usize| known.get(*at) != Some(&wanted[*at]);
    let first = (0..wanted.len()).find(differs)?;
    let last = (first..wanted.len()).rfind(differs)?;
    Some(first..last + 1)
}

fn bytes_of(words: &[u64]) -> &[u8] {
    // SAFETY: the memory of the words, borrowed with them; every byte of a word is initialised.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), size_of_val(words)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_words_that_changed_are_copied() {
        assert_eq!(changed(&[1, 2, 3], &[1, 2, 3]), None);
        assert_eq!(changed(&[1, 2, 3], &[1, 2]), None);
        assert_eq!(changed(&[], &[1, 2]), Some(0..2));
        assert_eq!(changed(&[1, 2], &[1, 2, 3, 4]), Some(2..4));
        assert_eq!(changed(&[1, 2, 3, 4, 5], &[1, 9, 3, 8, 5]), Some(1..4));
    }
}
