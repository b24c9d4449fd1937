//! Page-locked memory through which small copies to the device pass.
//!
//! Invariants:
//! - Bytes are written again only when the copy that reads them is over.
//! - No call waits for a copy. If all memory is in use, more is taken; it stays until the end.

use std::collections::VecDeque;
use std::sync::Arc;

use super::device::Device;
use super::memory::{HostSpan, Registry};
use super::stream::GpuEvent;
use crate::error::Result;
use crate::pool::buffer::Buffer;
use crate::sys::sync::Lock;

/// Bytes at the start: the tables of two lists of about 10,000 tensors.
const BYTES: usize = 2 << 20;
/// Parts begin at multiples of this.
const ALIGNMENT: usize = 64;

/// Rings of page-locked memory. All copies from them run in order on one stream.
#[derive(Debug)]
pub(super) struct Staging {
    device: Arc<Device>,
    registry: Registry,
    rings: Lock<Vec<Ring>>,
}

/// Memory for one copy.
#[derive(Debug)]
pub(super) struct Staged {
    pub(super) memory: HostSpan,
    /// The caller records it behind the copy, and then drops this object.
    pub(super) copied: Arc<GpuEvent>,
}

impl Staging {
    pub(super) fn new(device: &Arc<Device>) -> Result<Staging> {
        let registry = Registry::new(device);
        let rings = Lock::new(vec![Ring::new(device, &registry, BYTES)?]);
        Ok(Staging { device: Arc::clone(device), registry, rings })
    }

    /// Takes `bytes` bytes, more than 0.
    pub(super) fn take(&self, bytes: usize) -> Result<Staged> {
        let copied = Arc::new(GpuEvent::new(&self.device)?);
        if let Some(memory) = self.rings.lock().iter_mut().find_map(|ring| ring.take(bytes, &copied)) {
            return Ok(Staged { memory, copied });
        }
        // Without the lock: the driver registers the memory, and may wait for the device.
        let mut ring = Ring::new(&self.device, &self.registry, (2 * bytes).next_power_of_two().max(BYTES))?;
        let memory = ring.take(bytes, &copied).unwrap_or_else(|| ring.host.part(0, bytes));
        self.rings.lock().push(ring);
        Ok(Staged { memory, copied })
    }
}

#[derive(Debug)]
struct Ring {
    host: HostSpan,
    _memory: Buffer,
    /// Where the next part begins, if there is room.
    next: usize,
    /// The parts in use, oldest first.
    busy: VecDeque<Busy>,
}

#[derive(Debug)]
struct Busy {
    from: usize,
    copied: Arc<GpuEvent>,
}

impl Busy {
    /// False while a caller still has the event, which it may not have recorded yet.
    fn is_over(&self) -> bool {
        Arc::strong_count(&self.copied) == 1 && matches!(self.copied.done(), Ok(true))
    }
}

impl Ring {
    fn new(device: &Arc<Device>, registry: &Registry, bytes: usize) -> Result<Ring> {
        let memory = Buffer::open(bytes, device.backing())?;
        let host = registry.host(memory.transfer(0, bytes), "staging")?;
        Ok(Ring { host, _memory: memory, next: 0, busy: VecDeque::new() })
    }

    fn take(&mut self, bytes: usize, copied: &Arc<GpuEvent>) -> Option<HostSpan> {
        // Copies end in their order, so only the oldest one is queried.
        while self.busy.front().is_some_and(Busy::is_over) {
            self.busy.pop_front();
        }
        let all = self.host.span().len();
        let from = match self.busy.front().map(|oldest| oldest.from) {
            None => 0,
            Some(oldest) if self.next > oldest && bytes <= all - self.next => self.next,
            Some(oldest) if self.next > oldest => 0,
            Some(_) => self.next,
        };
        // Up to the oldest part in use behind `from`, or else to the end.
        let oldest = self.busy.front().map(|oldest| oldest.from).filter(|oldest| *oldest >= from);
        if bytes > oldest.unwrap_or(all) - from {
            return None;
        }
        self.next = (from + bytes).next_multiple_of(ALIGNMENT).min(all);
        self.busy.push_back(Busy { from, copied: Arc::clone(copied) });
        Some(self.host.part(from, bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::stream::Stream;
    use crate::gpu::tests::device;

    #[test]
    fn a_part_is_used_again_after_its_copy_and_never_before() {
        let device = device(62);
        let stream = Stream::new(&device).unwrap();
        let registry = Registry::new(&device);
        let mut ring = Ring::new(&device, &registry, 1024).unwrap();
        let start = ring.host.span().address();
        let all = ring.host.span().len();
        let take = |ring: &mut Ring, bytes| {
            let copied = Arc::new(GpuEvent::new(&device).unwrap());
            ring.take(bytes, &copied).map(|memory| (memory.span().address() - start, copied))
        };
        fakecuda::with(62, |gpu| gpu.stalled = true);
        let (first, one) = take(&mut ring, all / 2).unwrap();
        let (second, other) = take(&mut ring, all / 2).unwrap();
        assert_eq!((first, second), (0, all / 2));
        // Neither recorded.
        assert!(take(&mut ring, 1).is_none());
        [one, other].iter().for_each(|copied| stream.record(copied).unwrap());
        // Recorded, and not reached.
        assert!(take(&mut ring, 1).is_none());
        fakecuda::resume(62);
        stream.synchronize().unwrap();
        let (third, _copied) = take(&mut ring, all / 2 + 1).unwrap();
        assert_eq!(third, 0);
        assert!(take(&mut ring, all / 2).is_none());
        assert!(take(&mut ring, all / 4).is_some());
    }

    #[test]
    fn more_memory_is_taken_when_all_is_in_use() {
        let device = device(63);
        let staging = Staging::new(&device).unwrap();
        let taken = [BYTES, 100, 3 * BYTES].map(|bytes| staging.take(bytes).unwrap());
        let mut spans = taken.each_ref().map(|staged| staged.memory.span());
        assert_eq!(spans.map(|span| span.len()), [BYTES, 100, 3 * BYTES]);
        spans.sort_by_key(|span| span.address());
        assert!(spans.windows(2).all(|pair| pair[0].address() + pair[0].len() <= pair[1].address()));
    }
}
