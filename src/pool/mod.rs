//! Pinned memory: buffers of the library, and allocations of callers.
//!
//! Both take their memory from a [`region::Region`]: touched, in 2 MiB pages where possible, locked where the limit
//! allows; several threads touch a large one. The request of a transfer owns its memory as a [`transfer_buffer::TransferBuffer`]. While the kernel accesses a
//! part of a region, a [`region::Lease`] exists. A leased part is neither unmapped nor handed out again before the lease
//! ends, even if its owner frees it.

pub mod buffer;
pub mod pinned;
mod population;
pub mod region;
pub mod transfer_buffer;
