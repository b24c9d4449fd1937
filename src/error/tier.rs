//! Failures of the state that a tier stores.
#![forbid(unsafe_code)]

use std::fmt;

/// Kind of a tier failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TierKind {
    /// Stored bytes do not match their checksum, or are not in the form in which they are written.
    Corrupt,
    /// The files are no tier, have a format version that this library does not read, or lost their superblocks.
    Format,
    /// What was found does not match the request; `SPW_ERR_FOREIGN` lists the causes.
    Foreign,
    /// A live process holds the tier.
    Locked,
    /// Another process claimed the tier while this one had it open.
    Fenced,
    /// A path that stores a part of the tier is missing, or its files were moved or replaced.
    PathMissing,
    /// A part of the extent was stored on a path that is missing.
    Lost,
    /// There is no committed state.
    NoState,
    /// There is a committed state, but not of the requested step.
    NoStep,
}

/// A tier failure and its location.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TierError {
    /// Kind of the failure.
    pub kind: TierKind,
    /// The file or directory.
    pub path: String,
    /// Name of the extent; empty if the failure concerns no extent.
    pub extent: String,
    /// Number of the block in the extent, and the offset of the block in the file.
    pub block: Option<(u64, u64)>,
    /// Further details.
    pub detail: String,
}

impl fmt::Display for TierError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TierError { kind, path, extent, block, detail } = self;
        let what = match kind {
            TierKind::Corrupt => "stored bytes do not match their checksum or form",
            TierKind::Format => "not a tier, or not of a format that this version reads",
            TierKind::Foreign => "does not match the request",
            TierKind::Locked => "in use by a live process",
            TierKind::Fenced => "taken over by another process",
            TierKind::PathMissing => "a path of the tier is missing",
            TierKind::Lost => "lost: stored on a path that is missing",
            TierKind::NoState => "no committed state",
            TierKind::NoStep => "the requested step is not available",
        };
        write!(out, "{path}: {what}")?;
        if !extent.is_empty() {
            write!(out, ": extent {extent:?}")?;
        }
        if let Some((block, offset)) = block {
            write!(out, ", block {block} at offset {offset}")?;
        }
        if detail.is_empty() { Ok(()) } else { write!(out, ": {detail}") }
    }
}
