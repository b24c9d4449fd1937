//! The optimizers of this library, one row each.
#![forbid(unsafe_code)]

use super::lent::Lent;
use crate::error::Result;
use crate::kernel::{AdagradRule, AdamRule, LionRule, Optimizer};
use crate::stats::OptimizerCounter;

/// An optimizer of this library: its kernels, its counter, and the record of its steps.
pub trait Family: Optimizer + 'static {
    /// Counts the elements of its steps.
    const COUNTER: &'static OptimizerCounter;
    /// A recorded step of these tensors.
    const RECORDED: fn(Lent<Self>) -> RecordedStep;
}

/// Work on the tensors of a recorded step, whatever its optimizer is.
pub trait WithTensors {
    /// Does the work.
    fn with<R: Optimizer>(self, tensors: &mut Lent<R>) -> Result<()>;
}

macro_rules! families {
    ($($(#[$doc:meta])* $name:ident: $rule:ty;)*) => {
        /// The tensors of a recorded step, with their coefficients.
        pub enum RecordedStep {
            $($(#[$doc])* $name(Lent<$rule>),)*
        }

        impl RecordedStep {
            /// Elements of each tensor.
            pub fn lengths(&self) -> Vec<usize> {
                match self {
                    $(RecordedStep::$name(tensors) => tensors.lengths().collect(),)*
                }
            }

            /// Does `work` on the tensors.
            pub fn with(&mut self, work: impl WithTensors) -> Result<()> {
                match self {
                    $(RecordedStep::$name(tensors) => work.with(tensors),)*
                }
            }
        }

        $(impl Family for $rule {
            const COUNTER: &'static OptimizerCounter = {
                static COUNTER: OptimizerCounter = OptimizerCounter::new();
                &COUNTER
            };
            const RECORDED: fn(Lent<Self>) -> RecordedStep = RecordedStep::$name;
        })*
    };
}

families! {
    /// A step of Adam.
    Adam: AdamRule;
    /// A step of Adagrad.
    Adagrad: AdagradRule;
    /// A step of Lion.
    Lion: LionRule;
}
