//! Pinned host memory: pools of equal blocks, and single allocations.
//!
//! Transfers of the other headers take memory of any kind. Pinned memory avoids a copy through a bounce buffer: it is
//! page-aligned, locked as far as the system allows, and registered with io_uring and the GPU at its first use. A pool
//! takes all its memory at open; a block is free again after `spw_pool_free`:
//!
//!     spw_pool_options options = SPW_POOL_OPTIONS_INIT;
//!     options.block_bytes = 64 << 20;
//!     options.block_count = 8;
//!     spw_pool *pool;
//!     spw_pool_open(&options, &pool);
//!
//!     void *block;
//!     spw_pool_alloc(pool, &block);
//!     spw_pool_free(pool, block);
//!
//!     spw_pool_close(pool);

pub mod pool;

pub mod pinned;

pub use {pinned::*, pool::*};
