//! The virtual tier: the steps at which it can be opened.

use crate::capi::prelude::*;
use crate::capi::tier::options::{parse, spw_tier_options};
use crate::tier::Tier;
use crate::tier::recover::{Before, Steps};

c_struct! { first 32;
/// The steps at which a tier can be opened.
pub struct spw_tier_steps_info {
    /// 1 if there is a committed step, else 0.
    pub committed: u32,
    /// The last committed step.
    pub last: u64,
    /// The step of the commit before it, if there is one: the same step if it was committed twice.
    pub before: u64,
    /// 1 if there is a step before it, else 0.
    pub has_before: u32,
    /// 1 if the last step is the tier's first commit, so that no state existed before it, else 0.
    pub first: u32,
    /// 1 if a tier exists, committed or not; 0 if its directories are missing or hold no tier.
    pub exists: u32,
    /// 0
    pub reserved: u32,
    /// Tag of the last commit: a checksum of the first 48 bytes of its payload; 0 without a payload. Ranks that begin their
    /// payloads with the same bytes can tell commits of one step apart.
    pub last_tag: u64,
    /// Tag of the commit before it.
    pub before_tag: u64,
}
}

/// Inspects a tier without opening it: its last committed step and the step before it, at which SPW_TIER_FLAG_AT_STEP
/// can open. The steps stay unchanged, and a missing tier is no error. The tier's locks are held during the call.
/// Errors are those of `spw_tier_open`.
///
/// An open keeps only the step that it resumes. Ranks that commit independently therefore call this function first, and
/// all open at the last step that every rank has, with the tag of the commit that all have.
#[unsafe(no_mangle)]
pub extern "C" fn spw_tier_get_steps(
    options: In<spw_tier_options>,
    info_out: Out<spw_tier_steps_info>,
) -> spw_status {
    guard(|| {
        let Steps { last, before, tags, exists } = Tier::steps(&parse(&options.read("options")?)?)?;
        let values = report!(spw_tier_steps_info with {
            committed: last.is_some().into(), last: last.unwrap_or(0),
            before: if let Before::Step(step) = before { step } else { 0 },
            has_before: matches!(before, Before::Step(_)).into(), first: (before == Before::Empty).into(),
            exists: exists.into(), reserved: 0, last_tag: tags[0], before_tag: tags[1]
        });
        info_out.write(&values, "info_out")
    })
}
