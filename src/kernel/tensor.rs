//! The spans that one step reads and writes, borrowed and checked once.

use super::element::{Dtypes, Element, supported};
use crate::dtype::{Dtype, Floats, FloatsMut};
use crate::error::{Error, Result};

/// One tensor of a step: the parameter, its gradient, its states, and a 16-bit copy of the parameter if wanted.
#[derive(Debug)]
pub struct Tensor<'a> {
    param: FloatsMut<'a>,
    grad: Floats<'a>,
    exp_avg: Option<FloatsMut<'a>>,
    exp_avg_sq: Option<FloatsMut<'a>>,
    param_copy: Option<FloatsMut<'a>>,
}

impl<'a> Tensor<'a> {
    /// Checks that all spans have one length and that their element types have a kernel.
    pub fn new(
        param: FloatsMut<'a>,
        grad: Floats<'a>,
        exp_avg: Option<FloatsMut<'a>>,
        exp_avg_sq: Option<FloatsMut<'a>>,
        param_copy: Option<FloatsMut<'a>>,
    ) -> Result<Self> {
        let n = param.len();
        let lengths = [
            ("grad", Some(grad.len())),
            ("exp_avg", exp_avg.as_ref().map(FloatsMut::len)),
            ("exp_avg_sq", exp_avg_sq.as_ref().map(FloatsMut::len)),
            ("param_copy", param_copy.as_ref().map(FloatsMut::len)),
        ];
        for (name, length) in lengths {
            if let Some(length) = length.filter(|length| *length != n) {
                return Err(Error::invalid(name, format!("has {length} elements, param has {n}")));
            }
        }
        let tensor = Tensor { param, grad, exp_avg, exp_avg_sq, param_copy };
        let dtypes = tensor.dtypes()?;
        if !supported(dtypes) {
            return Err(Error::Unsupported(no_kernel(dtypes)));
        }
        Ok(tensor)
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.param.len()
    }

    /// True for no elements.
    pub fn is_empty(&self) -> bool {
        self.param.is_empty()
    }

    /// The first `mid` elements and the rest.
    pub fn split_at(self, mid: usize) -> (Self, Self) {
        let halves = |span: Option<FloatsMut<'a>>| span.map(|span| span.split_at_mut(mid)).unzip();
        let (param, param_rest) = self.param.split_at_mut(mid);
        let (grad, grad_rest) = self.grad.split_at(mid);
        let (exp_avg, exp_avg_rest) = halves(self.exp_avg);
        let (exp_avg_sq, exp_avg_sq_rest) = halves(self.exp_avg_sq);
        let (param_copy, param_copy_rest) = halves(self.param_copy);
        (
            Tensor { param, grad, exp_avg, exp_avg_sq, param_copy },
            Tensor {
                param: param_rest,
                grad: grad_rest,
                exp_avg: exp_avg_rest,
                exp_avg_sq: exp_avg_sq_rest,
                param_copy: param_copy_rest,
            },
        )
    }

    /// The same tensor borrowed for less long.
    pub fn reborrow(&mut self) -> Tensor<'_> {
        Tensor {
            param: self.param.reborrow(),
            grad: self.grad,
            exp_avg: self.exp_avg.as_mut().map(FloatsMut::reborrow),
            exp_avg_sq: self.exp_avg_sq.as_mut().map(FloatsMut::reborrow),
            param_copy: self.param_copy.as_mut().map(FloatsMut::reborrow),
        }
    }

    /// Errors that name the state an optimizer needs and did not get.
    pub fn require(&self, exp_avg: bool, exp_avg_sq: bool) -> Result<()> {
        let missing = |name: &'static str| Err(Error::invalid(name, "is NULL, but this optimizer keeps it"));
        match () {
            () if exp_avg && self.exp_avg.is_none() => missing("exp_avg"),
            () if exp_avg_sq && self.exp_avg_sq.is_none() => missing("exp_avg_sq"),
            () => Ok(()),
        }
    }

    /// The combination of element types. Without any state the state counts as f32.
    pub fn dtypes(&self) -> Result<Dtypes> {
        let first = self.exp_avg.as_ref().map(FloatsMut::dtype);
        let second = self.exp_avg_sq.as_ref().map(FloatsMut::dtype);
        if let (Some(a), Some(b)) = (first, second)
            && a != b
        {
            return Err(Error::invalid("exp_avg_sq", format!("is {}, exp_avg is {}", b.name(), a.name())));
        }
        Ok(Dtypes {
            param: self.param.dtype(),
            state: first.or(second).unwrap_or(Dtype::F32),
            grad: self.grad.dtype(),
            copy: self.param_copy.as_ref().map(FloatsMut::dtype),
        })
    }
}

fn no_kernel(dtypes: Dtypes) -> String {
    let Dtypes { param, state, grad, copy } = dtypes;
    format!(
        "no kernel for param {}, state {}, grad {}, param_copy {}",
        param.name(),
        state.name(),
        grad.name(),
        copy.map_or("none", Dtype::name)
    )
}

/// A tensor's addresses with its element types known.
#[derive(Clone, Copy)]
pub struct Spans<P: Element, S: Element, G: Element, C: Element> {
    pub param: *mut P::Raw,
    pub grad: *const G::Raw,
    pub exp_avg: *mut S::Raw,
    pub exp_avg_sq: *mut S::Raw,
    pub param_copy: *mut C::Raw,
}

impl<P: Element, S: Element, G: Element, C: Element> Spans<P, S, G, C> {
    /// The addresses of `tensor`, whose dtypes must be these types; an absent span becomes a null pointer.
    pub fn of(tensor: &mut Tensor<'_>) -> Self {
        let state =
            |span: &mut Option<FloatsMut<'_>>| span.as_mut().map_or(std::ptr::null_mut(), FloatsMut::address);
        Spans {
            param: tensor.param.address().cast(),
            grad: tensor.grad.address().cast(),
            exp_avg: state(&mut tensor.exp_avg).cast(),
            exp_avg_sq: state(&mut tensor.exp_avg_sq).cast(),
            param_copy: state(&mut tensor.param_copy).cast(),
        }
    }
}
