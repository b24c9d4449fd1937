//! Tests of the interleaved update: order, bits equal to the all-CPU update, and no wait that never ends.
#![forbid(unsafe_code)]

mod bits;
mod blocked;
mod cuda;
mod order;
mod races;
mod residents;
mod room;
