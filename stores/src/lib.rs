//! Files stored as objects of an S3-compatible store. Each object is written as a whole and never changed.
//!
//! | file | holds |
//! |---|---|
//! | `store` | the trait [`Store`] of a bucket, its addresses and errors |
//! | `volume` | the files of one prefix of a store: reads and writes as requests |
//! | `index` | which objects hold the bytes of a file |
//! | `client` | signed HTTP requests; with the feature `http` |
//! | `settings` | endpoint and credentials of a store |
//! | `secrets` | removes credentials and signatures from messages |
//! | `memory` | a store in memory, for tests |
//!
//! The crate knows nothing of the library, which gives it the variables of the environment and the place for a report.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "http")]
mod client;
mod index;
#[cfg(any(test, feature = "memory"))]
pub mod memory;
pub mod secrets;
#[cfg(any(test, feature = "http"))]
mod settings;
mod store;
pub mod volume;

pub use store::*;

/// Connects to the bucket of an address, with endpoint and credentials from `variable`, which reads a variable of the
/// environment. No request takes longer than `timeout`. Without the feature `http` it fails, and shows nothing of the
/// address, which may hold credentials.
pub fn connect<E: From<Error>>(
    address: &str,
    timeout: Option<Duration>,
    variable: impl Fn(&'static str) -> Result<Option<String>, E>,
) -> Result<(Address, Arc<dyn Store>), E> {
    #[cfg(feature = "http")]
    {
        let address = Address::parse(address)?;
        let settings = settings::StoreSettings::of(&address, variable)?;
        let client = client::Client::of(settings, &address, timeout)?;
        Ok((address, Arc::new(client)))
    }
    #[cfg(not(feature = "http"))]
    {
        let _ = (address, timeout, variable);
        Err(Error::NoClient.into())
    }
}
