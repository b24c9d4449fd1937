//! Memory of a fake GPU, and the host memory that it may reach.

use crate::gpu::{ALREADY_REGISTERED, Code, Gpu, INVALID_VALUE, NOT_REGISTERED};
use crate::order::Access;
use crate::ptx::Memory;

const MEMORY_BYTES: u64 = 1 << 34;
const OUT_OF_MEMORY: Code = 2;

impl Gpu {
    /// Page-locks memory as its owner would, with cudaHostAlloc.
    pub fn page_lock(&mut self, start: usize, bytes: usize) {
        self.locked.insert(start as u64, bytes as u64);
    }

    pub(crate) fn allocate(&mut self, bytes: usize) -> Result<u64, Code> {
        let used: usize = self.allocations.values().map(|words| words.len() * 8).sum();
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        if (used + bytes) as u64 > MEMORY_BYTES {
            return Err(OUT_OF_MEMORY);
        }
        // The driver aligns to 256 bytes; what was there before is never zero.
        let memory = vec![0xa5a5_a5a5_a5a5_a5a5_u64; bytes.div_ceil(8) + 32].into_boxed_slice();
        let start = (memory.as_ptr() as u64).next_multiple_of(256);
        self.allocations.insert(start, memory);
        Ok(start)
    }

    pub(crate) fn free(&mut self, start: u64) -> Result<(), Code> {
        if !self.allocations.contains_key(&start) {
            return Err(INVALID_VALUE);
        }
        let streams: Vec<usize> = self.streams.keys().copied().collect();
        streams.into_iter().try_for_each(|stream| self.stream_synchronize(stream))?;
        if let Some(words) = self.allocations.remove(&start) {
            self.checker.forget(start, start + words.len() as u64 * 8);
        }
        Ok(())
    }

    pub(crate) fn memory_free(&self) -> (u64, u64) {
        let used: usize = self.allocations.values().map(|words| words.len() * 8).sum();
        (MEMORY_BYTES - used as u64, MEMORY_BYTES)
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

    /// 1 for page-locked host memory, 2 for device memory, 0 for what the driver does not know.
    pub(crate) fn kind(&self, address: u64) -> u32 {
        let within = |(start, len): (&u64, u64)| address < start + len;
        let device = self.allocations.range(..=address).next_back();
        if device.is_some_and(|(start, words)| within((start, words.len() as u64 * 8 - 256))) {
            return 2;
        }
        let host = self.locked.range(..=address).next_back();
        u32::from(host.is_some_and(|(start, len)| within((start, *len))))
    }
}

/// Memory of the device and page-locked memory of the host; a kernel that touches any other byte is ended.
pub(crate) struct Guarded<'a> {
    pub(crate) gpu: &'a Gpu,
    pub(crate) accesses: Vec<Access>,
}

impl Guarded<'_> {
    fn check(&mut self, address: u64, bytes: usize, write: bool) -> Result<(), String> {
        let last = address + bytes as u64 - 1;
        if self.gpu.kind(address) == 0 || self.gpu.kind(last) == 0 {
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
        // SAFETY: inside an allocation, as just checked.
        unsafe { std::ptr::copy(address as *const u8, to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    fn store(&mut self, address: u64, from: &[u8]) -> Result<(), String> {
        self.check(address, from.len(), true)?;
        // SAFETY: inside an allocation, as just checked.
        unsafe { std::ptr::copy(from.as_ptr(), address as *mut u8, from.len()) };
        Ok(())
    }
}
