//! Page-aligned memory of the tier for headers and superblocks. It stays mapped until the system no longer uses it.
//!
//! Invariants:
//! - Memory that a transfer still uses is not handed out again, even if its owner gave it up.
#![forbid(unsafe_code)]

use std::sync::Arc;

use crate::error::Result;
use crate::pool::region::{Backing, Region};
use crate::pool::transfer_buffer::TransferBuffer;
use crate::sys::span::Span;
use crate::sys::sync::Lock;

/// A memory region. When dropped, it is retired or returned to its pool; transfers in flight keep it mapped.
#[derive(Debug)]
pub struct Scratch {
    region: Arc<Region>,
    bytes: usize,
    pool: Option<Arc<ScratchPool>>,
}

/// Cache of small regions. Each chunk that is transferred needs memory for its header. Mapping and unmapping memory
/// interrupts each core that the process runs on, and retiring a region wakes every engine.
#[derive(Debug, Default)]
pub struct ScratchPool(Lock<Vec<Arc<Region>>>);

/// Length of each cached region in bytes, and maximum number of cached regions.
const CACHED_BYTES: usize = 8 << 10;
const MAX_CACHED: usize = 64;
const SMALL: Backing = Backing { huge: false, lock: false, node: None };

impl Scratch {
    /// Allocates zeroed memory of `bytes` bytes.
    pub fn new(bytes: usize) -> Result<Scratch> {
        let backing = Backing { huge: bytes >= 2 << 20, ..SMALL };
        Ok(Scratch { region: Region::open(bytes.max(1), backing)?, bytes, pool: None })
    }

    /// Zeroed memory of `bytes` bytes, from the pool if it is small.
    pub fn from_pool(pool: &Arc<ScratchPool>, bytes: usize) -> Result<Scratch> {
        if bytes > CACHED_BYTES {
            return Scratch::new(bytes);
        }
        let kept = pool.0.lock().pop();
        let region = match kept {
            Some(region) => region,
            None => Region::open(CACHED_BYTES, SMALL)?,
        };
        region.span().write(&[0; CACHED_BYTES]);
        Ok(Scratch { region, bytes, pool: Some(Arc::clone(pool)) })
    }

    /// Address and length of the whole memory.
    pub fn span(&self) -> Span {
        self.region.span().part(0, self.bytes)
    }

    /// The whole memory, for a transfer.
    pub fn transfer(&self) -> TransferBuffer {
        TransferBuffer::pinned(&self.region, 0, self.bytes)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A forked child must not take this lock: a thread of the parent may hold it.
        if let Some(pool) = self.pool.take()
            && self.region.is_own()
            && !self.region.leased(self.region.span())
        {
            let mut kept = pool.0.lock();
            if kept.len() < MAX_CACHED {
                return kept.push(Arc::clone(&self.region));
            }
        }
        self.region.retire();
    }
}

impl ScratchPool {}

impl Drop for ScratchPool {
    fn drop(&mut self) {
        let kept = self.0.get_mut();
        kept.drain(..).for_each(|region| region.retire());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Only safe code: a span is a copy and may outlive its memory.
    #[test]
    fn a_span_that_outlived_its_memory_writes_to_nothing() {
        use crate::io::engine::Engine;
        use crate::io::options::{Options, Request, Target};
        let span = Scratch::new(8).unwrap().span();
        let others: Vec<Scratch> = (0..8).map(|_| Scratch::new(8).unwrap()).collect();
        assert!(std::panic::catch_unwind(|| span.write(b"anything")).is_err());
        assert!(others.iter().all(|other| other.span().to_vec() == [0; 8]));
        let engine = Engine::open(Options::default()).unwrap();
        let zeros = std::path::Path::new("/proc/self/exe");
        let request = Request { target: Target::Path(zeros), offset: 0, buffer: span.into(), deadline: None };
        let refused = engine.read(request).unwrap_err().to_string();
        assert!(refused.contains("was freed"), "{refused}");
    }

    #[test]
    fn small_memory_comes_back_empty_and_never_while_a_transfer_has_it() {
        let pool = Arc::default();
        let take = || Scratch::from_pool(&pool, 5000).unwrap();
        let first = take();
        let address = first.span().address();
        first.span().write(&[7; 5000]);
        let lease = first.transfer().lease();
        drop(first);
        let second = take();
        assert_ne!(second.span().address(), address);
        let address = second.span().address();
        second.span().write(&[8; 5000]);
        drop((second, lease));
        let third = take();
        assert_eq!((third.span().address(), third.span().to_vec()), (address, vec![0; 5000]));
    }
}
