//! The virtual tier: exports beside steps, snapshots among them, and imports of parts.

use std::ffi::c_char;

use super::open::spw_tier;
use crate::capi::prelude::*;
use crate::offload::swap::exported_tensors;
use crate::tier::export::{Form, Pace};
use crate::tier::select::Selection;
use crate::tier::snapshot::TierSnapshot;

/// An export of the last commit that a thread of the library writes, while the tier is put, got and committed.
pub struct spw_tier_snapshot(TierSnapshot, OpeningProcess);

impl spw_tier_snapshot {
    fn of(begun: Result<TierSnapshot>) -> Result<spw_tier_snapshot> {
        Ok(spw_tier_snapshot(begun?, OpeningProcess::current()))
    }
}

handle!(spw_tier_snapshot, "snapshot", 1, "the snapshot");

c_struct! { first 32;
/// How far a snapshot is.
pub struct spw_tier_snapshot_info {
    /// 1 once the snapshot has ended, with or without success, else 0.
    pub ended: u32,
    /// The committed step that it holds.
    pub step: u64,
    /// Bytes written so far.
    pub written: u64,
    /// Bytes of the whole state.
    pub bytes: u64,
}
}

/// Holds the last commit, and starts to write it to `directory`, which must not exist. Puts and commits may continue: the
/// snapshot keeps the space of its own versions. The directory is as of `spw_tier_export`, and `spw_tier_import` reads it.
/// It appears complete or not at all. `bytes_per_second` limits the speed; 0: no limit. The tier stays locked until the
/// snapshot has ended, also if it is closed before. Errors are those of `spw_tier_export`.
#[unsafe(no_mangle)]
pub extern "C" fn spw_tier_snapshot_begin(
    tier: Option<&spw_tier>,
    directory: In<c_char>,
    bytes_per_second: u64,
    snapshot_out: Out<*mut spw_tier_snapshot>,
) -> spw_status {
    guard(|| {
        let tier = &handle::get(tier)?.0;
        let directory = directory.path("directory")?;
        let speed = (bytes_per_second > 0).then_some(bytes_per_second);
        snapshot_out.open(|| spw_tier_snapshot::of(TierSnapshot::begin(tier, directory, speed)))
    })
}

c_struct! { first 40;
/// What an export to a safetensors file takes. Zero is the default of every field but struct_size.
pub struct spw_tier_selection {
    /// 0
    pub reserved: u32,
    /// One pattern per line; an extent is taken if its name matches one. `*` stands for any letters, `?` for one. NULL:
    /// every extent.
    pub names: In<c_char>,
    /// Number of the first element that is taken of each tensor.
    pub first: u64,
    /// Number of the first element that is not taken any more; 0: all from `first` on.
    pub end: u64,
    /// Type of the elements of extents that are no optimizer states, as safetensors names it; NULL: "U8".
    pub dtype: In<c_char>,
}
}

/// Holds the last commit, and starts to write it to `file`, a new safetensors file, as `spw_tier_snapshot_begin` does. A
/// subgroup of `spw_swap_open` becomes the tensors NAME.param, NAME.exp_avg and NAME.exp_avg_sq; another extent becomes
/// NAME, or NAME.0 and so on if it has several streams. `selection` may be NULL. A file with a range of elements has no
/// step, and `spw_tier_import` takes its tensors for extents. Without `bytes_per_second` the export reads all paths at once.
/// SPW_ERR_INVALID_ARGUMENT: no extent is taken, or the type does not fit one.
#[unsafe(no_mangle)]
pub extern "C" fn spw_tier_export_begin(
    tier: Option<&spw_tier>,
    file: In<c_char>,
    selection: In<spw_tier_selection>,
    bytes_per_second: u64,
    snapshot_out: Out<*mut spw_tier_snapshot>,
) -> spw_status {
    guard(|| {
        let tier = &handle::get(tier)?.0;
        let file = file.path("file")?;
        let raw = selection.read_optional("selection")?;
        let (taken, dtype) = match &raw {
            Some(raw) => (selection_of(raw)?, dtype_of(raw)?),
            None => (Selection::default(), DTYPE),
        };
        let tensors = |extent: &str, streams: usize| exported_tensors(extent, streams, dtype);
        let form = Form::Safetensors(&tensors);
        let (pace, speed) = match bytes_per_second {
            0 => (Pace::Fast, None),
            speed => (Pace::Gentle, Some(speed)),
        };
        snapshot_out
            .open(|| spw_tier_snapshot::of(TierSnapshot::export(tier, file, form, &taken, pace, speed)))
    })
}

/// Imports the extents whose name matches one of `names`, and commits them at the step of the tier. `from` is a directory or
/// file as for `spw_tier_import`, and `names` has one pattern per line, as in `spw_tier_selection`; NULL: all, as
/// `spw_tier_import`. `step_out` (may be NULL) receives the step.
#[unsafe(no_mangle)]
pub extern "C" fn spw_tier_import_names(
    tier: Option<&spw_tier>,
    from: In<c_char>,
    names: In<c_char>,
    step_out: Out<u64>,
) -> spw_status {
    guard(|| {
        let tier = &handle::get(tier)?.0;
        let selection = Selection { names: patterns(names, "names")?, range: None };
        step_out.put_optional(tier.import(from.path("from")?, &selection)?);
        Ok(())
    })
}

/// The type of extents that are no optimizer states.
const DTYPE: &str = "U8";

fn selection_of(raw: &spw_tier_selection) -> Result<Selection> {
    abi_struct::zero("selection.reserved", raw.reserved)?;
    let names = patterns(raw.names, "selection.names")?;
    let range = match (raw.first, raw.end) {
        (0, 0) => None,
        (first, 0) => Some(first..u64::MAX),
        (first, end) if first < end => Some(first..end),
        (first, end) => {
            return Err(Error::invalid(
                "selection.end",
                format!("is {end}, which is not above first, {first}"),
            ));
        }
    };
    Ok(Selection { names, range })
}

fn dtype_of(raw: &spw_tier_selection) -> Result<&str> {
    if raw.dtype.is_null() { Ok(DTYPE) } else { raw.dtype.text("selection.dtype") }
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

/// Waits until the directory or file is complete, for up to `timeout_ms` milliseconds (0: poll; negative: without limit).
/// SPW_ERR_TIMEOUT: the snapshot continues. Any other status is that of the snapshot, and every later call returns it again.
/// `step_out` (may be NULL) receives the step.
#[unsafe(no_mangle)]
pub extern "C" fn spw_tier_snapshot_wait(
    snapshot: Option<&spw_tier_snapshot>,
    timeout_ms: i64,
    step_out: Out<u64>,
) -> spw_status {
    guard(|| {
        step_out.put_optional(handle::get(snapshot)?.0.wait(timeout(timeout_ms))?);
        Ok(())
    })
}

/// Returns how far the snapshot is.
#[unsafe(no_mangle)]
pub extern "C" fn spw_tier_snapshot_get_progress(
    snapshot: Option<&spw_tier_snapshot>,
    info_out: Out<spw_tier_snapshot_info>,
) -> spw_status {
    guard(|| {
        let found = handle::get(snapshot)?.0.progress();
        let values = report!(spw_tier_snapshot_info from found { step, written, bytes } with {
            ended: found.ended.into()
        });
        info_out.write(&values, "info_out")
    })
}

/// Frees the snapshot. One that has not ended is cancelled first, and nothing of it is left; this takes as long as the
/// write in flight, at most the I/O timeout of the tier.
#[unsafe(no_mangle)]
pub extern "C" fn spw_tier_snapshot_close(snapshot: Option<Box<spw_tier_snapshot>>) -> spw_status {
    guard(|| handle::end(snapshot))
}
