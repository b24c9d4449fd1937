//! What a version of an extent holds; see `catalog` for its invariants.
#![forbid(unsafe_code)]

use std::sync::{Arc, OnceLock};

use crate::tier::extent::Version;

/// One version of an extent, and the checksums of its blocks once known.
#[derive(Debug)]
pub(in crate::tier) struct Contents {
    /// Increases with the begin of the write.
    pub(super) number: u64,
    pub(super) version: Version,
    pub(super) checksums: OnceLock<Arc<[u64]>>,
}

impl Contents {
    pub(in crate::tier) fn version(&self) -> &Version {
        &self.version
    }

    /// Checksums of the blocks, if they were written or read while the tier is open.
    pub(in crate::tier) fn checksums(&self) -> Option<&Arc<[u64]>> {
        self.checksums.get()
    }

    /// Keeps the checksums that were read.
    pub(in crate::tier) fn learn(&self, checksums: &Arc<[u64]>) {
        let _ = self.checksums.set(Arc::clone(checksums));
    }
}

/// True if both are of one version, or neither is there.
pub(super) fn same(one: Option<&Arc<Contents>>, other: Option<&Arc<Contents>>) -> bool {
    one.map(|one| one.number) == other.map(|other| other.number)
}
