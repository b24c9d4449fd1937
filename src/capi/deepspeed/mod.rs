//! The optimizer ids of DeepSpeed's op module `cpu_adam`, with DeepSpeed's arithmetic.
//!
//! An id is created once and serves all parameters of an optimizer. All threads of the process share the ids. The ids of
//! `cpu_adagrad` and `cpu_lion` hold no state: call `spw_adagrad_step` and `spw_lion_step`. Up to version 0.19.6 DeepSpeed's
//! Adagrad omits weight decay in the numerator, and its Lion does not train on processors with AVX.
//!
//!     spw_ds_adam_create(7, 0.9f, 0.999f, 1);
//!
//!     spw_ds_adam_call call = SPW_DS_ADAM_CALL_INIT;
//!     call.step = 1;
//!     call.lr = 1e-3f;
//!     call.beta1 = 0.9f;
//!     call.beta2 = 0.999f;
//!     call.eps = 1e-8f;
//!     spw_ds_adam_update(NULL, 7, &call, &tensor);
//!
//!     spw_ds_adam_destroy(7);

pub mod call;

pub mod ids;

pub mod steps;

pub use {call::*, ids::*, steps::*};
