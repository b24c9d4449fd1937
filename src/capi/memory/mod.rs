//! Pinned host memory.
//!
//! Transfers of the other headers take memory of any kind. Pinned memory avoids a copy through a bounce buffer: it is
//! page-aligned, locked as far as the system allows, and registered with io_uring and the GPU at its first use.
//!
//!     spw_pinned_options options = SPW_PINNED_OPTIONS_INIT;
//!     options.flags = SPW_PINNED_FLAG_BIND_NODE;
//!     options.node = 1;
//!     void *start;
//!     spw_pinned_alloc(&options, 64 << 20, &start);
//!     spw_pinned_free(start);

pub mod pinned;

pub use pinned::*;
