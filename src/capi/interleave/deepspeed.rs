//! DeepSpeed's Adam in an interleaved update.

use super::update::{check_count, spw_interleave, subgroups_of, with_stream};
use crate::capi::deepspeed::call::{rules_of, spw_ds_adam_call};
use crate::capi::prelude::*;
use crate::optim::deepspeed::ADAM;

/// Does `spw_interleave_begin` with the arithmetic of `spw_ds_adam_update`, one call per subgroup, applied in the order
/// of `calls`. The id advances if the step starts.
///
/// # Safety
/// `calls` points to `count` structs, `struct_size` bytes apart; `stream` as for `spw_interleave_begin`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_interleave_begin_ds_adam(
    interleave: Option<&spw_interleave>,
    id: i32,
    calls: In<spw_ds_adam_call>,
    count: u64,
    stream: u64,
) -> spw_status {
    guard(|| {
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            let (engine, stream) = with_stream(interleave, stream)?;
            let subgroups = subgroups_of(engine)?;
            check_count(count, [subgroups, subgroups])?;
            let (kept, rules) = rules_of(id, calls, count)?;
            engine.begin(rules, stream)?;
            ADAM.create(id, kept);
            Ok(())
        }
    })
}
