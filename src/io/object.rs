//! Files of an object store as files of an engine: executes pieces on a volume of the crate in stores/.
#![forbid(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};

use spillway_stores::volume::ObjectVolume;
use spillway_stores::{StoreError, StoreResult};

use super::backend::{Action, Completion, Piece};
use super::file::File;

/// A file of a volume, whether it has objects or not.
pub fn file(volume: &ObjectVolume, name: &str) -> File {
    File::named(&format!("{}/{name}", volume.address()), 0, None)
}

/// Executes a piece. A panic becomes an error of the piece; the worker and the engine continue.
pub(super) fn serve(volume: &ObjectVolume, piece: &Piece) -> Completion {
    let failed = |errno, message: &str| StoreError { errno, message: message.to_string() };
    let bug = |_| Err(failed(libc::EIO, "internal error in spillway, please report it"));
    let foreign = || failed(libc::EBADF, "the file does not belong to this object volume");
    let serve = || -> StoreResult<usize> {
        let Piece { offset, span, .. } = *piece;
        let file = piece.file.name().strip_prefix(volume.address()).and_then(|rest| rest.strip_prefix('/'));
        let file = file.ok_or_else(foreign)?;
        match piece.action {
            Action::Read => volume.read(file, offset, span.len() as u64, &mut |at, bytes| {
                span.part(at, bytes.len()).write(bytes);
            }),
            // A copy, because a request may continue after its timeout, when the memory belongs to the caller again.
            Action::Write => volume.write(file, offset, span.to_vec()),
            // The store acknowledges only objects that are durable and visible to every reader.
            Action::Sync | Action::Allocate { .. } => Ok(0),
        }
    };
    match catch_unwind(AssertUnwindSafe(serve)).unwrap_or_else(bug) {
        Ok(moved) => Completion::of(piece.token, moved as i32),
        Err(StoreError { errno, message }) => {
            Completion { token: piece.token, result: -errno.max(1), message: Some(message.into()) }
        }
    }
}
