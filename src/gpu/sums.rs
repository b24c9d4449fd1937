//! Buffers for the sums of one call.

use std::sync::Arc;

use super::device::Device;
use super::memory::{DeviceMemory, DeviceSpan, HostSpan, Registry};
use crate::error::Result;
use crate::pool::buffer::Buffer;

/// How many sums a call has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Count {
    pub(super) tiles: u64,
    pub(super) segments: usize,
}

impl Count {
    fn words(self) -> u64 {
        self.tiles + self.segments as u64
    }
}

/// One sum per tile and then one per segment on the device; the latter also on the host.
#[derive(Debug)]
pub(super) struct Sums {
    device: DeviceMemory,
    host: HostSpan,
    _memory: Buffer,
}

const WORD: usize = size_of::<f64>();

impl Sums {
    /// Buffers for `count` sums. Registers memory with the driver, which may wait for the device.
    pub(super) fn new(device: &Arc<Device>, registry: &Registry, count: Count) -> Result<Sums> {
        let bytes = count.segments.max(1) * WORD;
        let memory = Buffer::open(bytes, device.backing())?;
        let host = registry.host(memory.transfer(0, bytes), "sums")?;
        Ok(Sums { device: DeviceMemory::new(device, count.words() * WORD as u64)?, host, _memory: memory })
    }

    /// True if the buffers have room for `count` sums.
    pub(super) fn fit(&self, count: Count) -> bool {
        count.words() * WORD as u64 <= self.device.span().bytes()
            && count.segments * WORD <= self.host.span().len()
    }

    /// Address of the sums of the tiles.
    pub(super) fn tiles(&self) -> u64 {
        self.device.span().address()
    }

    /// The sums of the segments on the device.
    pub(super) fn segments(&self, count: Count) -> DeviceSpan {
        let word = WORD as u64;
        self.device.span().part(count.tiles * word, count.segments as u64 * word)
    }

    /// The sums of the segments on the host.
    pub(super) fn host(&self, count: Count) -> HostSpan {
        self.host.part(0, count.segments * WORD)
    }

    /// The sums of the segments, whose download is over.
    pub(super) fn read(&self, count: Count) -> Vec<f64> {
        self.host(count).span().with_bytes(|bytes| {
            let words = bytes.chunks_exact(WORD);
            words.map(|word| f64::from_ne_bytes(word.try_into().unwrap_or_default())).collect()
        })
    }
}
