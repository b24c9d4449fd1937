//! Optimizer steps over parameters and states in host memory: Adam, AdamW, Adagrad, Lion, Signum.
//!
//! A step is one call for any number of tensors. It uses the fastest vector unit of the processor and gives the same
//! bits on every processor. The caller owns all memory, and counts the steps in `options.step`:
//!
//!     spw_adam_options options = SPW_ADAM_OPTIONS_INIT;
//!     options.lr = 1e-4;
//!
//!     spw_tensor tensor = SPW_TENSOR_INIT;
//!     tensor.n = n;
//!     tensor.param_dtype = tensor.state_dtype = SPW_DTYPE_F32;
//!     tensor.grad_dtype = tensor.copy_dtype = SPW_DTYPE_BF16;
//!     tensor.param = master_weight;
//!     tensor.grad = grad;
//!     tensor.exp_avg = exp_avg;
//!     tensor.exp_avg_sq = exp_avg_sq;
//!     tensor.param_copy = model_weight;
//!
//!     for (options.step = 1; options.step <= steps; options.step++)
//!         spw_adam_step(&options, &tensor, 1, NULL);

pub(in crate::capi) mod overlap;

pub(in crate::capi) mod table;

pub mod tensor;

pub mod adam;

pub mod optimizers;

pub mod grad;

pub mod checksum;

pub mod low_bits;

pub mod codes;

pub use {adam::*, checksum::*, codes::*, grad::*, low_bits::*, optimizers::*, tensor::*};
