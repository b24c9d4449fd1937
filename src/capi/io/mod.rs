//! Asynchronous reads and writes of files, through io_uring or threads.
//!
//! An operation starts at once and has a handle. `spw_io_wait` reports its end, its status and its bytes; the buffer
//! stays in use until then. Any buffer, offset and length is allowed; pinned memory is fastest (memory.h).
//!
//!     spw_io *io;
//!     spw_io_open(NULL, &io);
//!
//!     spw_io_request request = SPW_IO_REQUEST_INIT;
//!     request.path = "weights.bin";
//!     request.buffer = buffer;
//!     request.bytes = bytes;
//!     uint64_t handle;
//!     spw_io_write(io, &request, &handle);
//!     spw_status status = spw_io_wait(io, &handle, 1, -1, NULL);
//!
//!     spw_io_close(io, -1);

pub mod engine;

pub mod wait;

pub use {engine::*, wait::*};
