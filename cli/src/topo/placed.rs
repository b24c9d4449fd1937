//! A rank of the plan, for the drawing and the text.
#![forbid(unsafe_code)]

use spillway::sys::topology::placement::Rank;

/// A rank with what is near to it.
#[derive(serde::Serialize)]
pub(super) struct Placed<'a> {
    #[serde(flatten)]
    pub(super) rank: &'a Rank,
    pub(super) drives: Vec<&'a str>,
}
