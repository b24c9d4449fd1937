//! A pool of equal blocks in one region; all memory is taken at open.
//!
//! Invariants:
//! - A block is free, in use, or quarantined (freed while leased). Only a free block is handed out.
//! - A call that returns an error changes nothing.
//! - A child made by fork gets an error; it never waits for a lock that its parent held at the fork.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::region::{Backing, Region};
use crate::error::{Error, Result};
use crate::log::{self, Level};
use crate::sys::memory::{BASE_PAGE, PageKind};
use crate::sys::per_process::PerProcess;
use crate::sys::span::Span;
use crate::sys::sync::{Guard, Lock};
use crate::sys::try_vec;

/// Sizes and memory of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolOptions {
    /// Bytes of a block, rounded up to whole pages.
    pub block_bytes: usize,
    /// Number of blocks.
    pub block_count: usize,
    /// The kind of memory to take.
    pub backing: Backing,
}

/// Statistics of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolStats {
    /// Bytes of a block, rounded up to whole pages.
    pub block_bytes: usize,
    /// Number of blocks.
    pub block_count: usize,
    /// Blocks in use.
    pub in_use: usize,
    /// Most blocks in use at one time.
    pub high_water: usize,
    /// Blocks freed while the kernel still used them.
    pub quarantined: usize,
    /// Total bytes of the pool.
    pub bytes: usize,
    /// Locked bytes of the pool.
    pub locked_bytes: usize,
    /// The page size of the memory.
    pub kind: PageKind,
}

/// A pool of pinned blocks.
#[derive(Debug)]
pub struct Pool {
    region: Arc<Region>,
    block_bytes: usize,
    state: PerProcess<Lock<PoolState>>,
}

#[derive(Debug)]
struct PoolState {
    free: Vec<usize>,
    allocated: Vec<bool>,
    in_use: usize,
    high_water: usize,
    quarantined: Vec<usize>,
}

impl Pool {
    /// Opens a pool and takes all its memory. The error is `InvalidArgument` for sizes of 0 or beyond the address
    /// space.
    pub fn open(options: PoolOptions) -> Result<Pool> {
        let PoolOptions { block_bytes, block_count, backing } = options;
        if block_bytes == 0 || block_count == 0 {
            let argument = if block_bytes == 0 { "options.block_bytes" } else { "options.block_count" };
            return Err(Error::invalid(argument, "is 0, but must be at least 1"));
        }
        let rounded = block_bytes.checked_next_multiple_of(BASE_PAGE);
        let total = rounded.and_then(|bytes| bytes.checked_mul(block_count));
        let (Some(block_bytes), Some(total)) = (rounded, total) else {
            let reason = format!("{block_count} blocks of {block_bytes} bytes exceed the address space");
            return Err(Error::invalid("options.block_count", reason));
        };
        // The memory first: an impossible number of blocks is refused before their lists are allocated.
        let region = Region::open(total, backing)?;
        let state = PoolState::new(block_count).inspect_err(|_| region.retire())?;
        Ok(Pool { region, block_bytes, state: PerProcess::new(Lock::new(state)) })
    }

    /// Hands out a block with unspecified contents. The error is `LimitReached` if no block is free.
    pub fn alloc(&self) -> Result<Span> {
        let mut state = self.lock()?;
        state.reclaim(|block| self.region.leased(self.block(block)));
        let Some(block) = state.free.pop() else {
            let (count, stuck) = (state.allocated.len(), state.quarantined.len());
            let message = format!(
                "all {count} blocks of the pool are in use, {stuck} of them by operations that timed out; \
                 free a block"
            );
            return Err(Error::LimitReached(message));
        };
        state.allocated[block] = true;
        state.in_use += 1;
        state.high_water = state.high_water.max(state.in_use);
        Ok(self.block(block))
    }

    /// Frees the block that begins at `address`. A block under a lease is quarantined until the lease ends.
    pub fn free(&self, address: usize) -> Result<()> {
        let block = self.block_at(address)?;
        let mut state = self.lock()?;
        if !state.allocated[block] {
            return Err(Error::invalid("block", format!("{address:#x} was freed already")));
        }
        state.allocated[block] = false;
        state.in_use -= 1;
        match self.region.leased(self.block(block)) {
            true => state.quarantined.push(block),
            false => state.free.push(block),
        }
        Ok(())
    }

    /// Statistics of the pool.
    pub fn stats(&self) -> Result<PoolStats> {
        let mut state = self.lock()?;
        state.reclaim(|block| self.region.leased(self.block(block)));
        let bytes = self.region.span().len();
        Ok(PoolStats {
            block_bytes: self.block_bytes,
            block_count: state.allocated.len(),
            in_use: state.in_use,
            high_water: state.high_water,
            quarantined: state.quarantined.len(),
            bytes,
            locked_bytes: if self.region.locked() { bytes } else { 0 },
            kind: self.region.kind(),
        })
    }

    /// False in a forked child of the process that opened the pool.
    pub fn is_own(&self) -> bool {
        self.state.is_here()
    }

    /// Returns `Busy` while blocks are in use, since closing would unmap memory that their users still access.
    pub fn closable(&self) -> Result<()> {
        match self.lock()?.in_use {
            0 => Ok(()),
            leaked => Err(Error::Busy(format!("{leaked} blocks of the pool are not freed"))),
        }
    }

    fn block(&self, index: usize) -> Span {
        self.region.span().part(index * self.block_bytes, self.block_bytes)
    }

    fn block_at(&self, address: usize) -> Result<usize> {
        let refuse = |reason: String| Err(Error::invalid("block", reason));
        let pool = self.region.span();
        match address.checked_sub(pool.address()) {
            Some(from) if from < self.block_bytes * self.lock()?.allocated.len() => {
                match from % self.block_bytes {
                    0 => Ok(from / self.block_bytes),
                    inside => refuse(format!(
                        "{address:#x} is not the start of a block, but {inside} bytes after it"
                    )),
                }
            }
            _ => refuse(format!("{address:#x} is not a block of this pool")),
        }
    }

    /// Fails in a forked child of the process that opened the pool.
    pub fn check_process(&self) -> Result<()> {
        self.state.check("the pool").map(|_| ())
    }

    fn lock(&self) -> Result<Guard<'_, PoolState>> {
        let state = self.state.check("the pool")?;
        Ok(state.lock())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if !self.is_own() {
            return;
        }
        if let Err(leak) = self.closable() {
            log::write(Level::Error, &format!("closing a pool with blocks in use: {leak}"));
        }
        self.region.retire();
    }
}

impl PoolState {
    fn new(blocks: usize) -> Result<PoolState> {
        Ok(PoolState {
            free: try_vec::from_fn("listing a pool's blocks", blocks, |index| blocks - 1 - index)?,
            allocated: try_vec::from_fn("listing a pool's blocks", blocks, |_| false)?,
            in_use: 0,
            high_water: 0,
            quarantined: Vec::new(),
        })
    }

    fn reclaim(&mut self, leased: impl Fn(usize) -> bool) {
        let (stuck, back) = self.quarantined.drain(..).partition(|block| leased(*block));
        self.quarantined = stuck;
        self.free.extend::<Vec<_>>(back);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::transfer_buffer::TransferBuffer;

    fn pool(block_bytes: usize, block_count: usize) -> Pool {
        Pool::open(PoolOptions { block_bytes, block_count, backing: Backing::default() }).unwrap()
    }

    #[test]
    fn blocks_are_aligned_disjoint_and_limited() {
        let pool = pool(5000, 3);
        let blocks: Vec<Span> = (0..3).map(|_| pool.alloc().unwrap()).collect();
        assert!(blocks.iter().all(|block| block.address() % BASE_PAGE == 0 && block.len() == 8192));
        blocks.iter().enumerate().for_each(|(n, block)| block.write(&[n as u8; 8192]));
        assert!(blocks.iter().enumerate().all(|(n, block)| block.to_vec() == [n as u8; 8192]));
        assert!(matches!(pool.alloc(), Err(Error::LimitReached(_))));
        let stats = pool.stats().unwrap();
        assert_eq!((stats.in_use, stats.high_water), (3, 3));
        assert!(matches!(pool.closable(), Err(Error::Busy(_))));
        blocks.iter().for_each(|block| pool.free(block.address()).unwrap());
        pool.closable().unwrap();
        assert_eq!(pool.stats().unwrap().in_use, 0);
    }

    #[test]
    fn double_and_foreign_frees_are_refused_and_change_nothing() {
        let pool = pool(4096, 2);
        let block = pool.alloc().unwrap();
        let other = pool.alloc().unwrap();
        pool.free(block.address()).unwrap();
        for wrong in [block.address(), other.address() + 8, 0, 4096, usize::MAX] {
            assert!(matches!(pool.free(wrong), Err(Error::InvalidArgument { .. })), "{wrong:#x}");
        }
        assert_eq!(pool.stats().unwrap().in_use, 1);
        pool.free(other.address()).unwrap();
    }

    #[test]
    fn a_block_freed_under_a_lease_is_not_handed_out_again_before_the_lease_ends() {
        let pool = pool(4096, 1);
        let block = pool.alloc().unwrap();
        let lease = TransferBuffer::at_address(block.part(10, 20)).lease();
        pool.free(block.address()).unwrap();
        assert_eq!(pool.stats().unwrap().quarantined, 1);
        assert!(pool.alloc().is_err());
        drop(lease);
        let again = pool.alloc().unwrap();
        assert_eq!(again.address(), block.address());
        pool.free(again.address()).unwrap();
    }

    #[test]
    fn sizes_that_cannot_be_are_errors() {
        for (block_bytes, block_count) in
            [(0, 1), (1, 0), (usize::MAX, 1), (1 << 62, 4), (1 << 50, 1 << 8), (4096, 1 << 40), (1, 1 << 51)]
        {
            let options = PoolOptions { block_bytes, block_count, backing: Backing::default() };
            assert!(Pool::open(options).is_err(), "{block_bytes} x {block_count}");
        }
    }
}
