//! Statuses and error messages, versions, the log, the thread pool.
//!
//! Check the version of the loaded library before any other call:
//!
//!     if (spw_abi_version() != SPW_ABI_VERSION)
//!         return 1;
//!
//! Every call that can fail returns an `spw_status`, and `spw_last_error` returns the message of the thread's last
//! failed call:
//!
//!     spw_info info = SPW_INFO_INIT;
//!     if (spw_get_info(&info) != SPW_OK)
//!         fprintf(stderr, "%s\n", spw_last_error());

mod failure;

pub mod status;

pub mod message;

pub mod version;

pub mod log;

pub use {log::*, message::*, status::*, version::*};
