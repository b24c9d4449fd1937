//! The C interface. Each function converts its arguments, calls one function of a layer below, and converts the result
//! back.
//!
//! Each public module becomes the header `include/spillway/NAME.h`. The header begins with the `//!` text of the
//! module, followed by its items in the order of its files. Run `SPILLWAY_BLESS=1 cargo test -p spillway-header` after
//! a change.

#![allow(non_camel_case_types)]

mod abi_struct;
mod guard;
mod handle;
mod pointer;

pub mod base;

pub mod optim;

pub mod undo;

pub mod memory;

pub mod io;

pub mod tier;

pub mod swap;

pub mod gpu;

pub mod speculate;

pub mod interleave;

pub mod deepspeed;

pub mod plan;

pub mod arena;

pub mod stage;

pub mod topo;

pub mod window;

/// What the files of the interface have in common.
mod prelude {
    pub(in crate::capi) use super::abi_struct::{self, c_struct, choice, parsed, report, timeout};
    pub(in crate::capi) use super::base::spw_status;
    pub(in crate::capi) use super::guard::{guard, guard_step};
    pub(in crate::capi) use super::handle::{self, handle};
    pub(in crate::capi) use super::pointer::{In, Out};
    pub(in crate::capi) use crate::error::{Error, Result};
    pub(in crate::capi) use crate::sys::fork::OpeningProcess;
}

pub use abi_struct::AbiStruct;
pub use pointer::{In, Out};

/// Name, offset and size of each field of a struct.
pub type Fields = &'static [(&'static str, usize, usize)];

/// A struct of the header.
pub struct CStruct {
    /// Its name.
    pub name: &'static str,
    /// Its size.
    pub size: usize,
    /// Its size in the first release.
    pub first_size: usize,
    /// Its fields.
    pub fields: Fields,
    /// Its bytes as its initialiser makes them.
    pub initial: Vec<u8>,
}

impl CStruct {
    fn of<T: AbiStruct>() -> CStruct {
        let (value, size) = (T::initial(), size_of::<T>());
        // SAFETY: a live struct without padding.
        let initial = unsafe { std::slice::from_raw_parts((&raw const value).cast::<u8>(), size) }.to_vec();
        CStruct { name: T::NAME, size, first_size: T::FIRST_SIZE, fields: T::FIELDS, initial }
    }
}

/// Every struct of the header. The test `abi` finds a struct that is missing here.
pub fn structs() -> Vec<CStruct> {
    let mut structs = Vec::new();
    macro_rules! add {
        ($($module:ident: $($name:ident)* $(, $more:ident)?;)*) => {
            $(
                structs.extend([$(CStruct::of::<$module::$name>()),*]);
                $(structs.extend($module::$more());)?
            )*
        };
    }
    add! {
        base: spw_info spw_thread_options;
        optim: spw_tensor spw_step_stats spw_grad_tensor spw_adam_options, option_structs;
        undo: spw_undo_options;
        memory: spw_pinned_options spw_pinned_stats;
        io: spw_io_options spw_io_request spw_io_stats spw_io_failure;
        tier: spw_tier_path spw_tier_options spw_tier_steps_info spw_tier_export_options spw_tier_progress spw_tier_opened_info
            spw_tier_target spw_tier_extent_info spw_tier_path_info spw_tier_verify_info;
        swap: spw_swap_options spw_swap_budget spw_swap_stats;
        gpu: spw_gpu_driver spw_gpu_options spw_gpu_info spw_gpu_copy spw_gpu_link;
        speculate: spw_spec_options spw_spec_stats spw_spec_event spw_spec_outcome;
        interleave: spw_interleave_rates spw_interleave_options spw_interleave_subgroup;
        deepspeed: spw_ds_adam_call spw_ds_adam_state;
        plan: spw_plan_shape spw_plan_options spw_plan_result spw_pipeline_options spw_pipeline_unit
            spw_pipeline_result spw_pipeline_operation spw_pipeline_change spw_pipeline_device;
        arena: spw_arena_region spw_arena_options spw_arena_info spw_arena_region_info spw_arena_snapshot
            spw_arena_verdict;
        stage: spw_stage_options spw_stage_target spw_stage_cores;
        topo: spw_topo_options spw_topo_info spw_topo_node spw_topo_gpu spw_topo_rank_options spw_topo_pages;
        window: spw_window_options spw_window_unit spw_window_stats;
    }
    structs
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{interleave, plan, speculate, tier, topo};
    use crate::offload::speculate::Progress;
    use crate::sys::topology::NodeKind;
    use crate::tier::Health;
    use spillway_planner::interleave::placements::Placement;
    use spillway_planner::pipeline::graph::Kind;
    use spillway_planner::pipeline::memory::Category;

    /// Each of them refuses zeros: ffi_tests/c/initialisers.c.
    #[test]
    fn in_all_other_structs_the_initial_values_are_zeros() {
        let others =
            super::structs().into_iter().filter(|one| one.initial[4..].iter().any(|byte| *byte != 0));
        let names: BTreeSet<&str> = others.map(|one| one.name).collect();
        let optimizers = super::optim::option_structs();
        let known = optimizers.iter().map(|one| one.name).chain(["spw_adam_options", "spw_ds_adam_call"]);
        assert_eq!(names, known.collect());
    }

    #[test]
    fn enums_that_are_passed_by_number_have_the_numbers_of_the_header() {
        macro_rules! same {
            ($($ours:ident $module:ident::$theirs:ident: $($one:ident $other:ident)*;)*) => {
                $($(assert_eq!($ours::$one as u32, $module::$theirs::$other as u32);)*)*
            };
        }
        same! {
            Progress speculate::spw_spec_state:
                Missing SPW_SPEC_STATE_MISSING Pending SPW_SPEC_STATE_PENDING
                Speculative SPW_SPEC_STATE_SPECULATIVE Final SPW_SPEC_STATE_FINAL;
            NodeKind topo::spw_topo_node_kind:
                Dram SPW_TOPO_NODE_KIND_DRAM HighBandwidth SPW_TOPO_NODE_KIND_HIGH_BANDWIDTH
                Cxl SPW_TOPO_NODE_KIND_CXL Persistent SPW_TOPO_NODE_KIND_PERSISTENT Gpu SPW_TOPO_NODE_KIND_GPU
                Slower SPW_TOPO_NODE_KIND_SLOWER Other SPW_TOPO_NODE_KIND_OTHER Empty SPW_TOPO_NODE_KIND_EMPTY;
            Placement interleave::spw_placement:
                Cpu SPW_PLACEMENT_CPU Gpu SPW_PLACEMENT_GPU Resident SPW_PLACEMENT_RESIDENT;
            Health tier::spw_tier_health:
                Healthy SPW_TIER_HEALTH_HEALTHY Draining SPW_TIER_HEALTH_DRAINING
                Failed SPW_TIER_HEALTH_FAILED Missing SPW_TIER_HEALTH_MISSING;
            Category plan::spw_pipeline_memory:
                Parameters SPW_PIPELINE_MEMORY_PARAMETERS Checkpoints SPW_PIPELINE_MEMORY_CHECKPOINTS
                Activations SPW_PIPELINE_MEMORY_ACTIVATIONS Gradients SPW_PIPELINE_MEMORY_GRADIENTS
                Messages SPW_PIPELINE_MEMORY_MESSAGES;
            Kind plan::spw_pipeline_kind:
                Forward SPW_PIPELINE_KIND_FORWARD Backward SPW_PIPELINE_KIND_BACKWARD
                Recompute SPW_PIPELINE_KIND_RECOMPUTE Fetch SPW_PIPELINE_KIND_FETCH
                Offload SPW_PIPELINE_KIND_OFFLOAD Optimize SPW_PIPELINE_KIND_OPTIMIZE
                SendActivation SPW_PIPELINE_KIND_SEND_ACTIVATION
                ReceiveActivation SPW_PIPELINE_KIND_RECEIVE_ACTIVATION
                SendGradient SPW_PIPELINE_KIND_SEND_GRADIENT ReceiveGradient SPW_PIPELINE_KIND_RECEIVE_GRADIENT
                SendCheckpoint SPW_PIPELINE_KIND_SEND_CHECKPOINT
                ReceiveCheckpoint SPW_PIPELINE_KIND_RECEIVE_CHECKPOINT Validate SPW_PIPELINE_KIND_VALIDATE;
        }
    }
}
