//! What a commit in flight names; see `catalog` for its invariants.
#![forbid(unsafe_code)]

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::contents::Contents;
use crate::error::Error;

/// The commit in flight.
#[derive(Debug, Clone, Default)]
pub(super) enum Commit {
    #[default]
    None,
    /// Other writers are refused.
    Alone,
    /// Writes continue.
    Beside(Named),
}

/// What a commit beside writes names.
#[derive(Debug, Clone, Default)]
pub(super) struct Named {
    /// By number of the extent; `None` for an extent that was never written.
    pub(super) contents: HashMap<u32, Option<Arc<Contents>>>,
    /// Extents that were being written at the begin. What these writes install is named.
    pub(super) awaited: HashSet<u32>,
    /// Extents of a tiered update that [`Catalog::name_deferred`] names.
    pub(super) deferred: HashSet<u32>,
    /// The error of such a write.
    pub(super) failed: Option<Error>,
}
