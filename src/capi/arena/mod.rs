//! EXPERIMENTAL: arenas, parameters that several processes of one machine share. This header is not part of spillway.h,
//! and its ABI is not frozen: functions and structs may change with any release.
//!
//! One process creates an arena with named regions, and is its owner. Other processes map it by name, or by the
//! descriptor of a memfd. Each region has a generation: the number of the step whose values it holds. A reader gets the
//! values of one whole step, waits, or gets an error (SysX section 4, "Offloading").
//!
//!     spw_arena_region regions[2] = {SPW_ARENA_REGION_INIT, SPW_ARENA_REGION_INIT};
//!     regions[0].name = "embedding";
//!     regions[0].bytes = 4096;
//!     regions[1].name = "layers";
//!     regions[1].bytes = 65536;
//!     spw_arena_options options = SPW_ARENA_OPTIONS_INIT;
//!     options.name = "job-17";
//!     options.regions = regions;
//!     options.region_count = 2;
//!     spw_arena *arena;
//!     spw_arena_create(&options, &arena);
//!
//!     spw_arena_write_begin(arena, 0, 1, NULL);
//!     // ... write every byte of the region ...
//!     spw_arena_write_end(arena, 0);
//!
//! Another process:
//!
//!     spw_arena *shared;
//!     uint64_t generation;
//!     spw_arena_open("job-17", 0, 1000, &shared);
//!     spw_arena_read(shared, 0, 1, 0, buffer, 4096, 1000, &generation);
//!     spw_arena_close(shared);
//!
//! docs/arenas.md explains arenas.

pub mod open;

pub mod regions;

pub mod verdict;

pub use {open::*, regions::*, verdict::*};
