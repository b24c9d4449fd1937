//! Adam over states that are stored on a tier (MLP-Offload section 3).
//!
//! The state of a rank is divided into subgroups. A step fetches each subgroup into a buffer of host memory, updates it
//! from its gradient, and writes it back; fetches, updates and writes of different subgroups overlap.
//!
//!     spw_swap_options options = SPW_SWAP_OPTIONS_INIT;
//!     options.host_memory = 4ull << 30;
//!     options.elements = elements;
//!     options.subgroups = count;
//!     spw_swap *swap;
//!     spw_swap_open(tier, &options, &swap);
//!     spw_swap_fill(swap, states);
//!
//!     spw_swap_adam_step(swap, &adam, tensors, count, NULL);
//!     spw_swap_commit(swap, adam.step, NULL, 0);
//!
//! A step beside backward takes each subgroup's gradient as it is complete, in any order:
//!
//!     spw_swap_begin(swap, &adam, SPW_SWAP_BEGIN_FLAG_SPECULATIVE);
//!     for (uint64_t i = 0; i < count; i++) spw_swap_submit(swap, i, &tensors[i], NULL, 1);
//!     spw_swap_verdict(swap, SPW_SPEC_VERDICT_COMMIT, 0);
//!     spw_swap_finish(swap, -1, NULL);
//!
//!     spw_swap_close(swap);

pub mod options;

pub(in crate::capi) mod inputs;

pub mod update;

pub mod beside;

pub use {beside::*, options::*, update::*};
