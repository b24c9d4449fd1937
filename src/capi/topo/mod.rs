//! EXPERIMENTAL: the topology of the machine, and the processors and memory of a rank. This header is not part of
//! spillway.h, and its ABI is not frozen: functions and structs may change with any release.
//!
//! Processors and nodes are the system's numbers. Lists of processors are texts such as "0-71,144".
//!
//!     spw_topo *topo;
//!     spw_topo_open(NULL, &topo);
//!     spw_topo_gpu gpu = SPW_TOPO_GPU_INIT;
//!     spw_topo_get_gpu(topo, 0, &gpu);
//!     pinned_options.flags = SPW_PINNED_FLAG_BIND_NODE;
//!     pinned_options.node = gpu.node;
//!
//!     spw_topo_rank_options rank = SPW_TOPO_RANK_OPTIONS_INIT;
//!     rank.ranks = 4;
//!     rank.rank = local_rank;
//!     char workers[4096];
//!     spw_topo_get_rank_cpus(topo, &rank, SPW_TOPO_CPUS_WORKERS, workers, sizeof workers, NULL);
//!     spw_topo_bind_workers(topo, workers);
//!     spw_topo_close(topo);

pub mod machine;

pub mod ranks;

pub use {machine::*, ranks::*};
