//! Memory of a fake GPU, and the host memory that it may reach.

use std::collections::BTreeMap;

use cudarc::driver::sys::CUresult;

use crate::code::{ALREADY_REGISTERED, Code, INVALID_VALUE, NOT_REGISTERED};
use crate::order::Access;
use crate::ptx::Memory;

const OUT_OF_MEMORY: Code = CUresult::CUDA_ERROR_OUT_OF_MEMORY as Code;

/// The memory that a device may reach.
#[derive(Debug, Default)]
pub(crate) struct Reach {
    allocations: BTreeMap<u64, Allocation>,
    /// Page-locked memory of the host: start and bytes of each range.
    locked: BTreeMap<u64, u64>,
    /// The largest number of bytes that were allocated at one time.
    pub(crate) most: u64,
}

impl Reach {
    /// Page-locks memory as its owner would, with cudaHostAlloc.
    pub(crate) fn lock(&mut self, start: u64, bytes: u64) {
        self.locked.insert(start, bytes);
    }

    /// Allocates memory of a device that has `capacity` bytes.
    pub(crate) fn allocate(&mut self, bytes: usize, capacity: u64) -> Result<u64, Code> {
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        let used = self.used() + bytes as u64;
        if used > capacity {
            return Err(OUT_OF_MEMORY);
        }
        self.most = self.most.max(used);
        // The driver aligns to 256 bytes; the initial contents are never zero.
        let memory = vec![0xa5a5_a5a5_a5a5_a5a5_u64; bytes.div_ceil(8) + 32].into_boxed_slice();
        let start = (memory.as_ptr() as u64).next_multiple_of(256);
        self.allocations.insert(start, Allocation { bytes: bytes as u64, _memory: memory });
        Ok(start)
    }

    /// The bytes of the allocation that begins here.
    pub(crate) fn bytes(&self, start: u64) -> Result<u64, Code> {
        self.allocations.get(&start).map(|allocation| allocation.bytes).ok_or(INVALID_VALUE)
    }

    pub(crate) fn free(&mut self, start: u64) {
        self.allocations.remove(&start);
    }

    /// Bytes that are allocated.
    pub(crate) fn used(&self) -> u64 {
        self.allocations.values().map(|allocation| allocation.bytes).sum()
    }

    /// Numbers of allocations and of page-locked ranges.
    pub(crate) fn ranges(&self) -> [usize; 2] {
        [self.allocations.len(), self.locked.len()]
    }

    pub(crate) fn register(&mut self, start: u64, bytes: u64) -> Result<(), Code> {
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        let clash = self.locked.iter().any(|(from, len)| *from < start + bytes && start < from + len);
        if clash {
            return Err(ALREADY_REGISTERED);
        }
        self.locked.insert(start, bytes);
        Ok(())
    }

    pub(crate) fn unregister(&mut self, start: u64) -> Result<(), Code> {
        self.locked.remove(&start).map(drop).ok_or(NOT_REGISTERED)
    }

    /// Returns 1 for page-locked host memory, 2 for device memory, and 0 for memory that the driver does not know.
    pub(crate) fn kind(&self, address: u64) -> u32 {
        match self.held(address, 1) {
            Held::Device => 2,
            Held::Locked => 1,
            Held::Nothing | Held::Partly => 0,
        }
    }

    /// The kind of memory of the whole range of `bytes` bytes.
    pub(crate) fn held(&self, address: u64, bytes: u64) -> Held {
        let end = address.saturating_add(bytes);
        // Ranges of one kind do not overlap, so only the last one that begins before the end can overlap.
        let device = self.allocations.range(..end).next_back().map(|(start, taken)| (*start, taken.bytes));
        let host = self.locked.range(..end).next_back().map(|(start, bytes)| (*start, *bytes));
        let touches = |range: &(u64, u64)| address < range.0 + range.1;
        let whole = |(start, bytes): (u64, u64)| start <= address && end <= start + bytes;
        match (device.filter(touches), host.filter(touches)) {
            (None, None) => Held::Nothing,
            (Some(range), None) if whole(range) => Held::Device,
            (None, Some(range)) if whole(range) => Held::Locked,
            _ => Held::Partly,
        }
    }
}

/// Memory of the device.
#[derive(Debug)]
pub(crate) struct Allocation {
    bytes: u64,
    _memory: Box<[u64]>,
}

/// The kinds of memory that the driver distinguishes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Held {
    /// The whole range lies in one allocation of this device.
    Device,
    /// The whole range lies in one page-locked registration of the host.
    Locked,
    /// The driver knows no part of the range.
    Nothing,
    /// The driver knows a part of the range, or the range spans several allocations.
    Partly,
}

/// Memory of the device and page-locked memory of the host; a kernel that touches any other byte is terminated.
pub(crate) struct Guarded<'a> {
    pub(crate) reach: &'a Reach,
    pub(crate) accesses: Vec<Access>,
}

impl Guarded<'_> {
    fn check(&mut self, address: u64, bytes: usize, write: bool) -> Result<(), String> {
        let last = address + bytes as u64 - 1;
        if ![Held::Device, Held::Locked].contains(&self.reach.held(address, bytes as u64)) {
            return Err(format!("{bytes} bytes at {address:#x} are outside of device memory"));
        }
        match self.accesses.last_mut() {
            Some(access) if access.write == write && access.end == address => access.end = last + 1,
            _ => self.accesses.push(Access { start: address, end: last + 1, write }),
        }
        Ok(())
    }
}

impl Memory for Guarded<'_> {
    fn load(&mut self, address: u64, to: &mut [u8]) -> Result<(), String> {
        self.check(address, to.len(), false)?;
        // SAFETY: the range lies inside an allocation, as checked above.
        unsafe { std::ptr::copy(address as *const u8, to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    fn store(&mut self, address: u64, from: &[u8]) -> Result<(), String> {
        self.check(address, from.len(), true)?;
        // SAFETY: the range lies inside an allocation, as checked above.
        unsafe { std::ptr::copy(from.as_ptr(), address as *mut u8, from.len()) };
        Ok(())
    }
}
