//! Constructors and conversions that make an [`Error`] of an error of one subject.
#![forbid(unsafe_code)]

use std::any::Any;

use crate::environment::NotText;

use super::{
    ArenaError, ArenaKind, Doing, Error, GpuError, IoError, IoKind, RoundError, RoundKind, Rounds, TierError,
    TierKind,
};

impl TierError {
    /// An error about a whole file or directory.
    pub fn at(kind: TierKind, path: impl Into<String>, detail: impl Into<String>) -> Error {
        let (path, detail) = (path.into(), detail.into());
        TierError { kind, path, extent: String::new(), block: None, detail }.into()
    }

    /// An error about block number `block` of an extent, which is stored at `offset` of the file `path`, and does not
    /// match its checksum.
    pub fn corrupt_block(path: &str, extent: &str, (block, offset): (u32, u64), detail: String) -> Error {
        let (path, extent) = (path.to_string(), extent.to_string());
        let block = Some((block.into(), offset));
        TierError { kind: TierKind::Corrupt, path, extent, block, detail }.into()
    }
}

impl ArenaError {
    /// An error of this kind.
    pub fn of(kind: ArenaKind, what: impl Into<String>, detail: impl Into<String>) -> Error {
        Error::Arena(Box::new(ArenaError { kind, what: what.into(), detail: detail.into() }))
    }
}

impl IoError {
    /// A caller's wait timed out; `detail` names the operations that are still in flight.
    pub fn wait_timeout(detail: impl Into<String>) -> Error {
        IoError::about(IoKind::Timeout, Doing::Waiting, "").because(detail).into()
    }
}

impl Rounds {
    /// The error of a call that does not fit the state.
    pub fn error(self, kind: RoundKind) -> Error {
        Error::Round(RoundError { of: self, kind })
    }
}

impl From<IoError> for Error {
    fn from(error: IoError) -> Self {
        Error::Io(Box::new(error))
    }
}

impl From<TierError> for Error {
    fn from(error: TierError) -> Self {
        Error::Tier(Box::new(error))
    }
}

impl From<GpuError> for Error {
    fn from(error: GpuError) -> Self {
        Error::Gpu(Box::new(error))
    }
}

impl From<spillway_kernels::Error> for Error {
    fn from(error: spillway_kernels::Error) -> Self {
        match error {
            spillway_kernels::Error::Argument { argument, reason } => Error::invalid(argument, reason),
            spillway_kernels::Error::Unsupported(what) => Error::Unsupported(what),
        }
    }
}

impl From<spillway_planner::error::Error> for Error {
    fn from(error: spillway_planner::error::Error) -> Self {
        use spillway_planner::error::Error as Planner;
        match error {
            Planner::InvalidArgument { argument, reason } => Error::InvalidArgument { argument, reason },
            Planner::NoRoom(reason) => Error::LimitReached(reason),
            Planner::OutOfMemory { what, reason } => Error::System { what, reason },
            Planner::Internal(reason) => Error::Internal(reason),
        }
    }
}

impl From<spillway_stores::Error> for Error {
    fn from(error: spillway_stores::Error) -> Self {
        match error {
            spillway_stores::Error::Invalid { argument, reason } => Error::invalid(argument, reason),
            spillway_stores::Error::NoClient => {
                let message = "a path s3://... needs object stores, but this library was built without them; build it \
                               with the feature s3: `make lib`, or SPILLWAY_CARGO_FEATURES=spillway/s3 for the wheel";
                Error::Unsupported(message.to_string())
            }
        }
    }
}

impl Error {
    /// The error of a call in which a panic was caught.
    pub fn of_panic(panic: &(dyn Any + Send)) -> Error {
        let text = panic.downcast_ref::<&str>().map(|text| text.to_string());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
        Error::Internal(text.unwrap_or_else(|| "no panic message".to_string()))
    }
}

impl From<NotText> for Error {
    fn from(NotText(name): NotText) -> Error {
        Error::invalid(name, "its value is not UTF-8; correct or unset the variable")
    }
}
