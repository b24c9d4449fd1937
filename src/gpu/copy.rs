//! One copy between the framework's device memory and pinned host memory, and what it waits for.
#![forbid(unsafe_code)]

use super::kernels::DeviceFloats;
use super::memory::Lockable;
use super::stream::{ForeignEvent, ForeignStream};
use crate::dtype::Dtype;
use crate::error::{Error, Result};

/// Direction of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// To the host.
    D2h = 0,
    /// To the device.
    H2d = 1,
}

/// What a copy waits for on the device before it starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum After {
    /// Nothing.
    Now,
    /// The last record of an event of the framework.
    Event(ForeignEvent),
    /// All work queued on a stream of the framework.
    Stream(ForeignStream),
}

/// One copy.
#[derive(Debug, Clone)]
pub struct Copy {
    /// Direction.
    pub direction: Direction,
    /// The framework's device memory.
    pub device: DeviceFloats,
    /// Pinned memory with the same number of elements.
    pub host: Lockable,
    /// Element type on the host: the device's type, or f32.
    pub host_dtype: Dtype,
    /// What the copy waits for.
    pub after: After,
}

impl Direction {
    /// The streams that end the copies of this direction: copies to the host, to the device, and casts after them.
    pub(super) fn streams(self) -> &'static [usize] {
        match self {
            Direction::D2h => &[0],
            Direction::H2d => &[1, 2],
        }
    }
}

impl Copy {
    /// True if the GPU converts between types.
    pub(super) fn casts(&self) -> bool {
        self.host_dtype != self.device.dtype()
    }

    /// True if a cast is the end of the copy.
    pub(super) fn ends_in_casts(&self) -> bool {
        self.direction == Direction::H2d && self.casts()
    }

    /// The stream that ends the copy, see [`Direction::streams`].
    pub(super) fn last_stream(&self) -> usize {
        self.direction.streams()[usize::from(self.ends_in_casts())]
    }

    /// Checks types and lengths.
    pub fn check(&self) -> Result<()> {
        let (device, host) = (self.device.dtype(), self.host_dtype);
        if device != host && host != Dtype::F32 {
            let reason = format!(
                "is {}, but the device type is {}; use the same type, or f32 on the host",
                host.name(),
                device.name()
            );
            return Err(Error::invalid("host_dtype", reason));
        }
        let bytes = self.device.len() * host.size() as u64;
        match self.host.span().len() as u64 == bytes {
            true => Ok(()),
            false => Err(Error::invalid(
                "host",
                format!("has {} bytes, but {bytes} are needed", self.host.span().len()),
            )),
        }
    }
}
