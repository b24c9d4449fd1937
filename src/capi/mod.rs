//! The C interface. Each function converts its arguments, calls one function of a layer below, and converts the result
//! back.
//!
//! Each public module becomes the header `include/spillway/NAME.h`. The header begins with the `//!` text of the
//! module, followed by its items in the order of its files. Run `SPILLWAY_BLESS=1 cargo test -p spillway-header` after
//! a change.

mod abi_struct;
mod guard;
mod handle;
mod input;
mod output;

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

pub use abi_struct::AbiStruct;

/// Name, offset and size of each field of a struct.
pub type Fields = &'static [(&'static str, usize, usize)];

/// Calls `visit` with each struct of the header: its name, its size, the smallest `struct_size` that calls accept, and its
/// fields.
pub fn visit_structs(mut visit: impl FnMut(&'static str, usize, usize, Fields)) {
    macro_rules! visit_all {
        ($($name:path),* $(,)?) => {
            $(visit(
                <$name as AbiStruct>::NAME,
                size_of::<$name>(),
                <$name as AbiStruct>::FIRST_SIZE,
                <$name as AbiStruct>::FIELDS,
            );)*
        };
    }
    visit_all!(
        base::spw_stats,
        base::spw_thread_options,
        optim::spw_tensor,
        optim::spw_step_stats,
        optim::spw_grad_tensor,
        optim::spw_adam_options,
        optim::spw_adagrad_options,
        optim::spw_lion_options,
        undo::spw_undo_options,
        memory::spw_pool_options,
        memory::spw_pool_stats,
        memory::spw_pinned_stats,
        io::spw_io_options,
        io::spw_io_request,
        io::spw_io_stats,
        io::spw_io_failure,
        tier::spw_tier_path,
        tier::spw_tier_options,
        tier::spw_tier_steps_info,
        tier::spw_tier_opened_info,
        tier::spw_tier_target,
        tier::spw_tier_extent_info,
        tier::spw_tier_path_info,
        tier::spw_tier_verify_info,
        swap::spw_swap_options,
        swap::spw_swap_budget,
        swap::spw_swap_stats,
        gpu::spw_gpu_driver,
        gpu::spw_gpu_options,
        gpu::spw_gpu_info,
        gpu::spw_gpu_copy,
        gpu::spw_gpu_link,
        speculate::spw_spec_options,
        speculate::spw_spec_stats,
        speculate::spw_spec_event,
        speculate::spw_spec_outcome,
        interleave::spw_interleave_rates,
        interleave::spw_interleave_options,
        interleave::spw_interleave_subgroup,
        deepspeed::spw_ds_adam_call,
        deepspeed::spw_ds_adam_state,
        plan::spw_plan_shape,
        plan::spw_plan_options,
        plan::spw_plan_result,
        plan::spw_pipeline_options,
        plan::spw_pipeline_unit,
        plan::spw_pipeline_result,
        plan::spw_pipeline_operation,
        plan::spw_pipeline_change,
        plan::spw_pipeline_device,
        arena::spw_arena_region,
        arena::spw_arena_options,
        arena::spw_arena_info,
        arena::spw_arena_region_info,
        arena::spw_arena_snapshot,
        arena::spw_arena_verdict,
        stage::spw_stage_options,
        stage::spw_stage_target,
        stage::spw_stage_cores,
        topo::spw_topo_options,
        topo::spw_topo_info,
        topo::spw_topo_node,
        topo::spw_topo_gpu,
        topo::spw_topo_rank_options,
        topo::spw_topo_pages,
    );
}
