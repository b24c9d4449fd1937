//! Crash-safe storage of optimizer state over several paths: local disks, file systems, object stores, memory
//! (MLP-Offload section 3.2).
//!
//! An extent is a named object with a few byte streams, for example the master weights and moments of a subgroup; the
//! docs call them fields. Puts replace contents, a commit makes all of them durable as one step, and the next open
//! finds the last committed step.
//!
//!     spw_tier_path path = SPW_TIER_PATH_INIT;
//!     path.directory = "/nvme0";
//!     spw_tier_options options = SPW_TIER_OPTIONS_INIT;
//!     options.job = "example";
//!     options.paths = &path;
//!     options.path_count = 1;
//!     spw_tier *tier;
//!     spw_tier_open(&options, &tier);
//!
//!     uint32_t extent;
//!     uint64_t bytes = sizeof state, ticket;
//!     const void *streams[1] = {state};
//!     spw_tier_define(tier, "state", &bytes, 1, &extent);
//!     spw_tier_put(tier, extent, streams, NULL, &ticket);
//!     spw_tier_wait(tier, ticket, -1, NULL);
//!     spw_tier_commit(tier, 1, NULL, 0);
//!
//!     spw_tier_close(tier, -1);
//!
//! A complete example is examples_c/tier.c.

pub mod options;

pub mod steps;

pub mod open;

pub mod extents;

pub mod task;

pub mod commit;

pub mod report;

pub mod export;

pub use {commit::*, export::*, extents::*, open::*, options::*, report::*, steps::*, task::*};
