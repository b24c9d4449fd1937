//! What a check has found.
#![forbid(unsafe_code)]

use std::path::PathBuf;

/// Outcome of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Verdict {
    /// Works at its best.
    Ok,
    /// Works, but slower or with fewer resources than possible.
    Worse,
    /// Does not work.
    Fails,
    /// Not present, which may be intended.
    None,
}

/// Result of a check.
#[derive(Debug, serde::Serialize)]
pub(super) struct Finding {
    pub(super) check: &'static str,
    /// The tested directory, if the check concerns one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) directory: Option<PathBuf>,
    pub(super) verdict: Verdict,
    pub(super) found: String,
    /// What the user should change.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) fix: Option<String>,
}

impl Finding {
    pub(super) fn new(check: &'static str, verdict: Verdict, found: impl Into<String>) -> Finding {
        Finding { check, directory: None, verdict, found: found.into(), fix: None }
    }

    pub(super) fn ok(check: &'static str, found: impl Into<String>) -> Finding {
        Finding::new(check, Verdict::Ok, found)
    }

    pub(super) fn fix(self, fix: impl Into<String>) -> Finding {
        Finding { fix: Some(fix.into()), ..self }
    }
}
