//! The spans that one step reads and writes, borrowed and checked once.

use super::element::{Dtypes, supported};
use super::log::{LINE, log_bytes};
use super::rules::Arithmetic;
use super::walk::CHUNK;
use crate::dtype::{Dtype, Floats, FloatsMut};
use crate::error::{Error, Result};

/// What a step changes: the parameter and the states that the optimizer keeps.
#[derive(Debug)]
pub struct States<'a> {
    /// The parameter.
    pub param: FloatsMut<'a>,
    /// First moment.
    pub exp_avg: Option<FloatsMut<'a>>,
    /// Second moment.
    pub exp_avg_sq: Option<FloatsMut<'a>>,
}

impl<'a> States<'a> {
    fn split_at(self, mid: usize) -> (Self, Self) {
        let (param, param_rest) = self.param.split_at_mut(mid);
        let (exp_avg, exp_avg_rest) = self.exp_avg.map(|span| span.split_at_mut(mid)).unzip();
        let (exp_avg_sq, exp_avg_sq_rest) = self.exp_avg_sq.map(|span| span.split_at_mut(mid)).unzip();
        (
            States { param, exp_avg, exp_avg_sq },
            States { param: param_rest, exp_avg: exp_avg_rest, exp_avg_sq: exp_avg_sq_rest },
        )
    }

    fn reborrow(&mut self) -> States<'_> {
        States {
            param: self.param.reborrow(),
            exp_avg: self.exp_avg.as_mut().map(FloatsMut::reborrow),
            exp_avg_sq: self.exp_avg_sq.as_mut().map(FloatsMut::reborrow),
        }
    }

    /// Types and lengths of the three spans; the types say what is absent.
    fn shape(&self) -> [Option<(Dtype, usize)>; 3] {
        let of = |span: &FloatsMut<'_>| (span.dtype(), span.len());
        [Some(of(&self.param)), self.exp_avg.as_ref().map(of), self.exp_avg_sq.as_ref().map(of)]
    }
}

/// One tensor of a step: the states, the gradient, and what else the step writes.
#[derive(Debug)]
pub struct Tensor<'a> {
    pub(super) states: States<'a>,
    pub(super) grad: Floats<'a>,
    pub(super) param_copy: Option<FloatsMut<'a>>,
    pub(super) shadow: Option<States<'a>>,
    log: Option<&'a mut [u8]>,
    pub(super) streams: Streams,
}

/// What goes past the caches.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Streams {
    pub(super) written: bool,
    log: bool,
}

/// Elements of one call from which on its shadow and its param_copy, or its log, are streamed: where that began to pay
/// in ffi_tests/bench/undo-x86_64.md. Below, the caches still hold most of it for whoever reads it next.
const STREAMED: usize = 2 << 20;
const STREAMED_LOG: usize = 32 << 20;

impl<'a> Tensor<'a> {
    /// Checks that all spans have one length and that their element types have a kernel. A `param_copy` receives the
    /// new parameter in 16 bits.
    pub fn new(states: States<'a>, grad: Floats<'a>, param_copy: Option<FloatsMut<'a>>) -> Result<Self> {
        let n = states.param.len();
        let lengths = [
            ("grad", Some(grad.len())),
            ("exp_avg", states.exp_avg.as_ref().map(FloatsMut::len)),
            ("exp_avg_sq", states.exp_avg_sq.as_ref().map(FloatsMut::len)),
            ("param_copy", param_copy.as_ref().map(FloatsMut::len)),
        ];
        for (name, length) in lengths {
            if let Some(length) = length.filter(|length| *length != n) {
                return Err(Error::invalid(name, format!("has {length} elements, param has {n}")));
            }
        }
        let tensor =
            Tensor { states, grad, param_copy, shadow: None, log: None, streams: Streams::default() };
        let dtypes = tensor.dtypes()?;
        if !supported(dtypes) {
            return Err(no_kernel(dtypes));
        }
        Ok(tensor)
    }

    /// The step writes its new states to `shadow` and leaves the old ones as they are.
    pub fn with_shadow(self, shadow: States<'a>) -> Result<Self> {
        match shadow.shape() == self.states.shape() {
            true => Ok(Tensor { shadow: Some(shadow), ..self }),
            false => Err(Error::invalid("shadow", "has other spans, types or lengths than the states")),
        }
    }

    /// The step is recorded in `log`; or the step to undo was. It has [`log_bytes`] bytes.
    pub fn with_log(self, log: &'a mut [u8]) -> Result<Self> {
        match log.len() == log_bytes(self.len()) {
            true => Ok(Tensor { log: Some(log), ..self }),
            false => {
                Err(Error::invalid("log", format!("has {} bytes for {} elements", log.len(), self.len())))
            }
        }
    }

    /// A call steps so many elements in all: what it writes without having read it goes past the caches if they could
    /// not hold it.
    pub fn part_of(&mut self, elements: usize) {
        self.streams = Streams { written: elements >= STREAMED, log: elements >= STREAMED_LOG };
    }

    /// True if the log is to go past the caches, and can.
    pub(super) fn streams_log(&self) -> bool {
        self.streams.log && self.log.as_ref().is_some_and(|log| log.as_ptr().addr().is_multiple_of(LINE))
    }

    pub(super) fn log_address(&mut self) -> Option<*mut u8> {
        self.log.as_mut().filter(|log| !log.is_empty()).map(|log| log.as_mut_ptr())
    }

    /// True if the step is, or was, recorded.
    pub fn has_log(&self) -> bool {
        self.log.is_some()
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.states.param.len()
    }

    /// True for no elements.
    pub fn is_empty(&self) -> bool {
        self.states.param.is_empty()
    }

    /// The gradient.
    pub fn grad(&self) -> Floats<'a> {
        self.grad
    }

    /// Element type of the 16-bit copy, if one is written.
    pub fn copy_dtype(&self) -> Option<Dtype> {
        self.param_copy.as_ref().map(FloatsMut::dtype)
    }

    /// Everything that its undo reads, by name.
    pub fn spans(&self) -> impl Iterator<Item = (&'static str, Floats<'_>)> {
        let States { param, exp_avg, exp_avg_sq } = &self.states;
        let states =
            [("param", Some(param)), ("exp_avg", exp_avg.as_ref()), ("exp_avg_sq", exp_avg_sq.as_ref())];
        let states = states.into_iter().filter_map(|(name, state)| state.map(|state| (name, state.shared())));
        states.chain([("grad", self.grad)])
    }

    /// The first `mid` elements and the rest; `mid` is a multiple of [`CHUNK`].
    pub fn split_at(self, mid: usize) -> (Self, Self) {
        // The rest of a log would be too short for the rest of the tensor.
        assert!(mid.is_multiple_of(CHUNK), "a tensor is cut between its chunks");
        let (states, states_rest) = self.states.split_at(mid);
        let (grad, grad_rest) = self.grad.split_at(mid);
        let (param_copy, copy_rest) = self.param_copy.map(|span| span.split_at_mut(mid)).unzip();
        let (shadow, shadow_rest) = self.shadow.map(|shadow| shadow.split_at(mid)).unzip();
        let (log, log_rest) = self.log.map(|log| log.split_at_mut(log_bytes(mid))).unzip();
        (
            Tensor { states, grad, param_copy, shadow, log, streams: self.streams },
            Tensor {
                states: states_rest,
                grad: grad_rest,
                param_copy: copy_rest,
                shadow: shadow_rest,
                log: log_rest,
                streams: self.streams,
            },
        )
    }

    /// The same tensor borrowed for less long.
    pub fn reborrow(&mut self) -> Tensor<'_> {
        Tensor {
            states: self.states.reborrow(),
            grad: self.grad,
            param_copy: self.param_copy.as_mut().map(FloatsMut::reborrow),
            shadow: self.shadow.as_mut().map(States::reborrow),
            log: self.log.as_deref_mut(),
            streams: self.streams,
        }
    }

    /// Leaves the states that an optimizer keeps; errors that name one it needs and did not get.
    pub fn keep(&mut self, exp_avg: bool, exp_avg_sq: bool) -> Result<()> {
        for states in [Some(&mut self.states), self.shadow.as_mut()].into_iter().flatten() {
            for (name, kept, span) in [
                ("exp_avg", exp_avg, &mut states.exp_avg),
                ("exp_avg_sq", exp_avg_sq, &mut states.exp_avg_sq),
            ] {
                if !kept {
                    *span = None;
                } else if span.is_none() {
                    return Err(Error::invalid(name, "is NULL, but this optimizer keeps it"));
                }
            }
        }
        Ok(())
    }

    /// An error that names a state which this optimizer keeps and the tensor lacks.
    pub(super) fn check_states<R: Arithmetic>(&self) -> Result<()> {
        let States { exp_avg, exp_avg_sq, .. } = &self.states;
        for (name, kept, there) in
            [("exp_avg", R::EXP_AVG, exp_avg.is_some()), ("exp_avg_sq", R::EXP_AVG_SQ, exp_avg_sq.is_some())]
        {
            if kept && !there {
                return Err(Error::invalid(name, "is missing, but this optimizer keeps it"));
            }
        }
        Ok(())
    }

    /// The combination of element types. Without any state the state counts as f32.
    pub fn dtypes(&self) -> Result<Dtypes> {
        let first = self.states.exp_avg.as_ref().map(FloatsMut::dtype);
        let second = self.states.exp_avg_sq.as_ref().map(FloatsMut::dtype);
        if let (Some(a), Some(b)) = (first, second)
            && a != b
        {
            return Err(Error::invalid("exp_avg_sq", format!("is {}, exp_avg is {}", b.name(), a.name())));
        }
        Ok(Dtypes {
            param: self.states.param.dtype(),
            state: first.or(second).unwrap_or(Dtype::F32),
            grad: self.grad.dtype(),
            copy: self.copy_dtype(),
        })
    }
}

/// The error for a combination of types that `element` does not list.
pub fn no_kernel(dtypes: Dtypes) -> Error {
    let Dtypes { param, state, grad, copy } = dtypes;
    Error::Unsupported(format!(
        "no kernel for param {}, state {}, grad {}, param_copy {}",
        param.name(),
        state.name(),
        grad.name(),
        copy.map_or("none", Dtype::name)
    ))
}
