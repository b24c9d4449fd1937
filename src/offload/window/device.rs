//! The memory of the places of a window, and the copies into it: on a GPU, or in host memory in its place.
#![forbid(unsafe_code)]

use std::fmt::Debug;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::gpu::device::Device as GpuDevice;
use crate::gpu::memory::{DeviceMemory, HostSpan, Registry};
use crate::gpu::stream::{ForeignStream, GpuEvent, Stream};
use crate::pool::buffer::Buffer;
use crate::pool::region::Backing;
use crate::pool::transfer_buffer::TransferBuffer;
use crate::sys::span::Span;

/// The stream of a reader. `None` where there are no streams: a reader's work is then complete when it makes a call.
pub type Reader = Option<ForeignStream>;

/// A point in the work of a reader, or the end of a copy. Without an event it is reached.
#[derive(Debug, Clone, Default)]
pub struct Mark(Option<Arc<GpuEvent>>);

impl Mark {
    /// True if the work before the mark is done. An error counts as not done.
    pub fn is_reached(&self) -> bool {
        self.0.as_ref().is_none_or(|event| event.done().unwrap_or(false))
    }

    /// True if both are the same point.
    pub fn is(&self, other: &Mark) -> bool {
        match (&self.0, &other.0) {
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            (one, other) => one.is_none() && other.is_none(),
        }
    }

    /// Blocks until the work before the mark is done. Errors: `Timeout` after the device's patience.
    pub fn wait(&self) -> Result<()> {
        self.0.as_ref().map_or(Ok(()), GpuEvent::wait)
    }
}

/// Memory that copies read.
#[derive(Debug, Clone)]
pub struct Source {
    memory: Span,
    /// For a GPU.
    pinned: Option<HostSpan>,
}

/// First byte and length of each place, and of all together. Each begins at a multiple of [`ALIGNMENT`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    places: Vec<(u64, u64)>,
    /// Bytes of all places.
    pub bytes: u64,
}

/// Alignment of places: that of the allocations of frameworks.
pub const ALIGNMENT: u64 = 512;

impl Layout {
    /// Places of these lengths, one behind the other; `None` if they exceed the address space.
    pub fn new(lengths: impl Iterator<Item = u64>) -> Option<Layout> {
        let (mut places, mut bytes) = (Vec::new(), 0_u64);
        for length in lengths {
            places.push((bytes, length));
            bytes = bytes.checked_add(length.checked_next_multiple_of(ALIGNMENT)?)?;
        }
        isize::try_from(bytes).ok()?;
        Some(Layout { places, bytes })
    }
}

/// The memory of the places. Copies run one after the other.
pub trait Device: Send + Sync + Debug {
    /// Address of a place.
    fn address(&self, place: usize) -> u64;

    /// Memory as a source of copies. Errors: the device cannot reach it.
    fn source(&self, memory: &TransferBuffer, argument: &'static str) -> Result<Source>;

    /// Starts a copy to the start of a place, behind the marks, and returns its end.
    fn fill(&self, place: usize, from: &Source, after: &[Mark]) -> Result<Mark>;

    /// Makes later work of a reader wait for a copy.
    fn order(&self, copy: &Mark, reader: Reader) -> Result<()>;

    /// A mark behind all work of a reader so far.
    fn mark(&self, reader: Reader) -> Result<Mark>;

    /// Blocks until all copies are done. Errors: `Timeout` after the device's patience.
    fn finish(&self) -> Result<()>;

    /// Pages for memory that copies read.
    fn backing(&self) -> Backing;
}

/// Host memory. Each copy is done when its call returns.
#[derive(Debug)]
pub struct Host {
    layout: Layout,
    /// One buffer.
    memory: Vec<Buffer>,
}

impl Host {
    const BACKING: Backing = Backing { huge: true, lock: false, node: None };

    fn span(&self) -> Span {
        self.memory[0].span()
    }

    /// Allocates the places.
    pub fn new(layout: Layout) -> Result<Host> {
        // Of one buffer too it checks that there is so much memory.
        let memory = Buffer::open_many(1, layout.bytes as usize, Host::BACKING)?;
        Ok(Host { layout, memory })
    }
}

impl Device for Host {
    fn address(&self, place: usize) -> u64 {
        self.span().address() as u64 + self.layout.places[place].0
    }

    fn source(&self, memory: &TransferBuffer, _: &'static str) -> Result<Source> {
        Ok(Source { memory: memory.span(), pinned: None })
    }

    fn fill(&self, place: usize, from: &Source, _: &[Mark]) -> Result<Mark> {
        let start = self.layout.places[place].0 as usize;
        from.memory.copy_to(self.span().part(start, from.memory.len()));
        Ok(Mark::default())
    }

    fn order(&self, _: &Mark, _: Reader) -> Result<()> {
        Ok(())
    }

    fn mark(&self, _: Reader) -> Result<Mark> {
        Ok(Mark::default())
    }

    fn finish(&self) -> Result<()> {
        Ok(())
    }

    fn backing(&self) -> Backing {
        Host::BACKING
    }
}

/// A GPU, with a stream for the copies.
#[derive(Debug)]
pub struct Gpu {
    layout: Layout,
    device: Arc<GpuDevice>,
    registry: Arc<Registry>,
    memory: DeviceMemory,
    copies: Stream,
}

impl Gpu {
    /// Allocates the places.
    pub fn new(device: &Arc<GpuDevice>, registry: &Arc<Registry>, layout: Layout) -> Result<Gpu> {
        Ok(Gpu {
            memory: DeviceMemory::new(device, layout.bytes)?,
            copies: Stream::new(device)?,
            device: Arc::clone(device),
            registry: Arc::clone(registry),
            layout,
        })
    }

    fn enqueue(&self, place: usize, from: &HostSpan, after: &[Mark]) -> Result<Mark> {
        for event in after.iter().filter_map(|mark| mark.0.as_ref()) {
            self.copies.wait(event)?;
        }
        let to = self.memory.span().part(self.layout.places[place].0, from.span().len() as u64);
        self.copies.upload(from, to)?;
        let end = GpuEvent::new(&self.device)?;
        self.copies.record(&end)?;
        Ok(Mark(Some(Arc::new(end))))
    }
}

impl Device for Gpu {
    fn address(&self, place: usize) -> u64 {
        self.memory.span().address() + self.layout.places[place].0
    }

    fn source(&self, memory: &TransferBuffer, argument: &'static str) -> Result<Source> {
        let pinned = self.registry.host(memory.clone(), argument)?;
        Ok(Source { memory: memory.span(), pinned: Some(pinned) })
    }

    fn fill(&self, place: usize, from: &Source, after: &[Mark]) -> Result<Mark> {
        let unpinned = || Error::Internal("a copy from memory that the GPU does not reach".to_string());
        let from = from.pinned.as_ref().ok_or_else(unpinned)?;
        self.enqueue(place, from, after).inspect_err(|_| {
            // The copy may be queued although its end is not known. With a lost context there is none.
            let _ = self.copies.synchronize();
        })
    }

    fn order(&self, copy: &Mark, reader: Reader) -> Result<()> {
        match &copy.0 {
            Some(end) => reader.ok_or_else(no_stream)?.wait(end),
            None => Ok(()),
        }
    }

    fn mark(&self, reader: Reader) -> Result<Mark> {
        let there = GpuEvent::new(&self.device)?;
        reader.ok_or_else(no_stream)?.record(&there)?;
        Ok(Mark(Some(Arc::new(there))))
    }

    fn finish(&self) -> Result<()> {
        self.copies.finish()
    }

    fn backing(&self) -> Backing {
        self.device.backing()
    }
}

fn no_stream() -> Error {
    Error::invalid("stream", "is missing; pass the framework's stream")
}
