//! The virtual tier: exports beside steps, and imports.

use std::ffi::c_char;

use super::open::spw_tier;
use super::task::spw_tier_task;
use crate::capi::prelude::*;
use crate::offload::swap::exported_tensors;
use crate::tier::export::{Form, Pace};
use crate::tier::select::Selection;
use crate::tier::snapshot::TierSnapshot;

/// Form and speed of an export, combined by addition.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_tier_export_flag {
    /// Write one safetensors file. A subgroup of `spw_swap_open` becomes the tensors NAME.param, NAME.exp_avg and
    /// NAME.exp_avg_sq. Another extent becomes NAME, or NAME.0 and so on if it has several streams.
    SPW_TIER_EXPORT_FLAG_SAFETENSORS = 1,
    /// Read all paths at once. Without this flag one part is read at a time, so that steps keep most of the bandwidth.
    SPW_TIER_EXPORT_FLAG_FAST = 2,
}

c_struct! { first 48;
/// What an export takes, its form and its speed. Zero is the default of every field but struct_size.
pub struct spw_tier_export_options {
    /// Sum of `spw_tier_export_flag`.
    pub flags: u32,
    /// Patterns, one per line. An extent is taken if its name matches a pattern. `*` matches any number of characters, `?` one
    /// character. NULL: every extent.
    pub names: In<c_char>,
    /// Number of the first element that is taken of each tensor. A directory has whole extents: 0.
    pub first: u64,
    /// Number of the first element that is not taken any more; 0: all from `first` on.
    pub end: u64,
    /// Type of the elements of extents that are no optimizer states, as safetensors names it; NULL: "U8". Used with
    /// SPW_TIER_EXPORT_FLAG_SAFETENSORS.
    pub dtype: In<c_char>,
    /// Maximum bytes per second; 0: no limit.
    pub bytes_per_second: u64,
}
}

/// Holds the last commit, and starts to write it to `path`, a new directory or file. A directory gets one file per stream
/// with the bytes as they were put, and manifest.json with names, sizes, checksums, step and payload. The directory or
/// file appears complete or not at all. Missing parent directories get mode 0700. `options` may be NULL.
///
/// Puts since the last commit are not in it. Puts and commits may continue: the export keeps the space of its own
/// versions. The tier stays locked until the export has ended, also if it is closed before.
///
/// `spw_tier_import` reads every export. A file with a range of elements has no step, and the import takes its tensors for
/// extents. SPW_ERR_INVALID_ARGUMENT: no extent is taken, or the type does not fit one. SPW_ERR_NO_STATE: nothing was
/// committed.
#[unsafe(no_mangle)]
pub extern "C" fn spw_tier_export(
    tier: Option<&spw_tier>,
    path: In<c_char>,
    options: In<spw_tier_export_options>,
    task_out: Out<*mut spw_tier_task>,
) -> spw_status {
    guard(|| {
        let tier = &handle::get(tier)?.0;
        let path = path.path("path")?;
        let raw = options.read_optional("options")?;
        let raw = raw.as_ref();
        let flags = abi_struct::flags("options.flags", raw.map_or(0, |raw| raw.flags), 3)?;
        let [safetensors, fast] = [1, 2].map(|flag| flags & flag != 0);
        let taken = raw.map_or_else(|| Ok(Selection::default()), selection_of)?;
        let dtype = raw.map_or(Ok(DTYPE), dtype_of)?;
        if taken.range.is_some() && !safetensors {
            let reason = "must be 0, and end too, without SPW_TIER_EXPORT_FLAG_SAFETENSORS";
            return Err(Error::invalid("options.first", reason));
        }
        let tensors = |extent: &str, streams: usize| exported_tensors(extent, streams, dtype);
        let form = if safetensors { Form::Safetensors(&tensors) } else { Form::Directory };
        let pace = if fast { Pace::Fast } else { Pace::Gentle };
        let speed = raw.map(|raw| raw.bytes_per_second).filter(|speed| *speed > 0);
        task_out
            .open(|| TierSnapshot::export(tier, path, form, &taken, pace, speed).map(spw_tier_task::export))
    })
}

/// Imports an export into the tier and commits it at the export's step; one that left out extents is committed at the step
/// of the tier, if it has one. An existing extent of the same name must have the same streams; extents that are not in the
/// export keep what they hold, and uncommitted puts to them are committed too. A file that is no safetensors file is
/// SPW_ERR_FORMAT, a truncated one too; an export with a damaged manifest or other sizes is SPW_ERR_CORRUPT, a directory
/// in which a file is missing SPW_ERR_NOT_FOUND, and nothing changes. After any other error the tier is at its last
/// commit. `step_out` (may be NULL) receives the step.
///
/// `names` has one pattern per line, as in `spw_tier_export_options`: only extents whose name matches one are imported,
/// and committed at the step of the tier. NULL: all.
///
/// Until it ends, commits and rollbacks of other threads, and steps of a tiered update, are SPW_ERR_BUSY. Afterwards the
/// calls of an open tiered update are SPW_ERR_BUSY until `spw_swap_rollback`, which takes the states over.
#[unsafe(no_mangle)]
pub extern "C" fn spw_tier_import(
    tier: Option<&spw_tier>,
    path: In<c_char>,
    names: In<c_char>,
    step_out: Out<u64>,
) -> spw_status {
    guard(|| {
        let tier = &handle::get(tier)?.0;
        let selection = Selection { names: patterns(names, "names")?, range: None };
        step_out.put_optional(tier.import(path.path("path")?, &selection)?);
        Ok(())
    })
}

/// The type of extents that are no optimizer states.
const DTYPE: &str = "U8";

fn selection_of(raw: &spw_tier_export_options) -> Result<Selection> {
    let names = patterns(raw.names, "options.names")?;
    let range = match (raw.first, raw.end) {
        (0, 0) => None,
        (first, 0) => Some(first..u64::MAX),
        (first, end) if first < end => Some(first..end),
        (first, end) => {
            return Err(Error::invalid(
                "options.end",
                format!("is {end}, which is not above first, {first}"),
            ));
        }
    };
    Ok(Selection { names, range })
}

fn dtype_of(raw: &spw_tier_export_options) -> Result<&str> {
    if raw.dtype.is_null() { Ok(DTYPE) } else { raw.dtype.text("options.dtype") }
}

fn patterns(names: In<c_char>, argument: &'static str) -> Result<Vec<String>> {
    if names.is_null() {
        return Ok(Vec::new());
    }
    match names.text(argument)?.lines().map(str::to_string).collect::<Vec<_>>() {
        empty if empty.is_empty() => {
            Err(Error::invalid(argument, "has no pattern; pass NULL for all".to_string()))
        }
        patterns => Ok(patterns),
    }
}
