//! Buffers for the sums of one call.

use std::sync::Arc;

use super::device::Device;
use super::list::List;
use super::memory::{DeviceMemory, DeviceSpan, HostSpan, Registry};
use crate::error::Result;
use crate::pool::buffer::Buffer;

/// One sum per tile and then one per segment on the device; the latter also on the host.
#[derive(Debug)]
pub(super) struct Sums {
    device: DeviceMemory,
    host: HostSpan,
    _memory: Buffer,
}

const WORD: usize = size_of::<f64>();

impl Sums {
    /// Buffers for `list`. Registers memory with the driver, which may wait for the device.
    pub(super) fn new(device: &Arc<Device>, registry: &Registry, list: &List) -> Result<Sums> {
        let bytes = list.segments().max(1) * WORD;
        let memory = Buffer::open(bytes, device.backing())?;
        let host = registry.host(memory.transfer(0, bytes), "sums")?;
        Ok(Sums { device: DeviceMemory::new(device, words(list) * WORD as u64)?, host, _memory: memory })
    }

    /// True if the buffers have room for `list`.
    pub(super) fn fit(&self, list: &List) -> bool {
        words(list) * WORD as u64 <= self.device.span().bytes()
            && list.segments() * WORD <= self.host.span().len()
    }

    /// Address of the sums of the tiles.
    pub(super) fn tiles(&self) -> u64 {
        self.device.span().address()
    }

    /// The sums of the segments of `list` on the device.
    pub(super) fn segments(&self, list: &List) -> DeviceSpan {
        let word = WORD as u64;
        self.device.span().part(list.tiles() * word, list.segments() as u64 * word)
    }

    /// The sums of the segments of `list` on the host.
    pub(super) fn host(&self, list: &List) -> HostSpan {
        self.host.part(0, list.segments() * WORD)
    }

    /// The sums of the segments of `list`, whose download is over.
    pub(super) fn read(&self, list: &List) -> Vec<f64> {
        self.host(list).span().with_bytes(|bytes| {
            let words = bytes.chunks_exact(WORD);
            words.map(|word| f64::from_ne_bytes(word.try_into().unwrap_or_default())).collect()
        })
    }
}

fn words(list: &List) -> u64 {
    list.tiles() + list.segments() as u64
}
