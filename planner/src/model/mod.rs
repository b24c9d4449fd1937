//! The planner: the memory of a model under each strategy on a machine, the bytes and seconds of a step, and the best
//! strategy.
//!
//! | file | holds |
//! |---|---|
//! | `config` | a model's size and shape, from a config.json or a description |
//! | `families` | the parameters of each family of transformers |
//! | `fields` | fields of JSON, with limits |
//! | `presets` | the models and machines of the papers |
//! | `machine` | the machine and the run |
//! | `bytes` | bytes of memory and traffic, by part |
//! | `case` | a model on a machine, the strategies, and how one places it |
//! | `flow` | the weights that do not fit on the GPU |
//! | `strategy` | the bytes of each strategy |
//! | `step` | the seconds of a step: its work on the simulator of `crate::interleave` |
//! | `report` | the plan: every strategy, and the best |
//!
//! Limits of the model:
//! - Forward and backward are the matrix products (SuperOffload section 4.2), without attention's products of queries
//!   and keys, and without collectives between ranks.
//! - Activations are estimates: one checkpoint per layer and the activations of one layer, or those of all layers.
//! - A path serves a read or a write at a time, at the measured bandwidth of each.
#![forbid(unsafe_code)]

pub mod bytes;
pub mod case;
pub mod config;
pub mod families;
pub mod fields;
mod flow;
pub mod machine;
pub mod presets;
pub mod report;
pub mod step;
pub mod strategy;

#[cfg(test)]
mod tests;
