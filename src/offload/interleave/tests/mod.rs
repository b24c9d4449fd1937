//! What the interleaved update promises: order, the bits of the all-CPU update, and an end to every wait.
#![forbid(unsafe_code)]

mod bits;
mod cuda;
mod order;
mod room;
