//! The memory spans that one step reads and writes. They are borrowed and checked once, at construction.

use super::chunk_loop::CHUNK;
use super::coded::{BLOCK, Codes, Moments};
use super::element::{Dtypes, supported, supports_split};
use super::log::{LINE, log_bytes};
use super::rules::Arithmetic;
use super::squares::TILE;
use crate::dtype::{Dtype, Floats, FloatsMut};
use crate::error::{Error, Result};

/// The spans that a step updates: the parameter and the optimizer states.
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

    /// Types and lengths of the three spans; `None` for an absent state.
    fn shape(&self) -> [Option<(Dtype, usize)>; 3] {
        let of = |span: &FloatsMut<'_>| (span.dtype(), span.len());
        [Some(of(&self.param)), self.exp_avg.as_ref().map(of), self.exp_avg_sq.as_ref().map(of)]
    }
}

/// One tensor of a step: states, gradient, and the optional outputs (parameter copy, shadow, log).
#[derive(Debug)]
pub struct Tensor<'a> {
    pub(super) states: States<'a>,
    pub(super) grad: Floats<'a>,
    pub(super) param_copy: Option<FloatsMut<'a>>,
    beside: Beside<'a>,
    /// What other code has written to `param_copy` counts (see `take`).
    takes_copy: bool,
    /// Low bits of the master of a bf16 parameter (see `split`).
    low: Option<&'a mut [u16]>,
    /// Sums of the tiles of such a parameter (see `word_sum`).
    low_sums: Option<&'a mut [u64]>,
    log: Option<&'a mut [u8]>,
    pub(super) streams: Streams,
    /// Number of the first element, counted from the start of the tensor that this one is a part of.
    first: u64,
}

/// What few tensors have, and none has two of. One field for all keeps the tensor small: a call of many small tensors
/// spends much of its time on moving them.
#[derive(Debug)]
enum Beside<'a> {
    Nothing,
    /// The new states; the old ones stay.
    Shadow(States<'a>),
    /// 8-bit exp_avg and exp_avg_sq in place of those of `states` (see `codes`).
    Codes(Moments<'a>),
}

impl<'a> Beside<'a> {
    fn split_at(self, mid: usize) -> (Self, Self) {
        match self {
            Beside::Nothing => (Beside::Nothing, Beside::Nothing),
            Beside::Shadow(states) => {
                let (states, rest) = states.split_at(mid);
                (Beside::Shadow(states), Beside::Shadow(rest))
            }
            Beside::Codes(codes) => {
                let [first, second] = codes.map(|codes| codes.map(|codes| codes.split_at(mid)).unzip());
                (Beside::Codes([first.0, second.0]), Beside::Codes([first.1, second.1]))
            }
        }
    }

    fn reborrow(&mut self) -> Beside<'_> {
        match self {
            Beside::Nothing => Beside::Nothing,
            Beside::Shadow(states) => Beside::Shadow(states.reborrow()),
            Beside::Codes(codes) => {
                Beside::Codes(codes.each_mut().map(|codes| codes.as_mut().map(Codes::reborrow)))
            }
        }
    }
}

/// Which outputs are written with non-temporal stores.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Streams {
    pub(super) written: bool,
    log: bool,
}

/// Calls of at least this number of elements write shadow and param_copy (`STREAMED`) or the log (`STREAMED_LOG`) with
/// non-temporal stores. ffi_tests/bench/records/undo_break_even.json has the break-even points. In smaller calls the
/// caches still hold most of the output for the next reader.
const STREAMED: usize = 2 << 20;
const STREAMED_LOG: usize = 32 << 20;

impl<'a> Tensor<'a> {
    /// Checks that all spans have the same length and that a kernel exists for their element types. `param_copy`, if
    /// given, receives the new parameter in 16 bits.
    #[inline]
    pub fn new(states: States<'a>, grad: Floats<'a>, param_copy: Option<FloatsMut<'a>>) -> Result<Self> {
        let n = states.param.len();
        // One comparison each: a list of lengths in memory costs more than all other checks.
        let check = |name, length: Option<usize>| match length {
            Some(length) if length != n => Err(wrong_length(name, length, n)),
            _ => Ok(()),
        };
        check("grad", Some(grad.len()))?;
        check("exp_avg", states.exp_avg.as_ref().map(FloatsMut::len))?;
        check("exp_avg_sq", states.exp_avg_sq.as_ref().map(FloatsMut::len))?;
        check("param_copy", param_copy.as_ref().map(FloatsMut::len))?;
        let tensor = Tensor::of_checked(states, grad, param_copy, None, None, false);
        tensor.dtypes()?.check()?;
        Ok(tensor)
    }

    /// A tensor of spans that [`Tensor::new`], [`Tensor::new_split`] and [`Tensor::with_shadow`] have checked before.
    #[inline]
    pub(super) fn of_checked(
        states: States<'a>,
        grad: Floats<'a>,
        param_copy: Option<FloatsMut<'a>>,
        shadow: Option<States<'a>>,
        low: Option<&'a mut [u16]>,
        takes_copy: bool,
    ) -> Self {
        Tensor {
            states,
            grad,
            param_copy,
            beside: shadow.map_or(Beside::Nothing, Beside::Shadow),
            takes_copy,
            low,
            low_sums: None,
            log: None,
            streams: Streams::default(),
            first: 0,
        }
    }

    /// A bf16 parameter whose f32 master is split: `low` holds the low bits of the master, one word per element.
    pub fn new_split(states: States<'a>, grad: Floats<'a>, low: &'a mut [u16]) -> Result<Self> {
        let n = states.param.len();
        let lengths = [
            ("grad", grad.len()),
            ("exp_avg", states.exp_avg.as_ref().map_or(n, FloatsMut::len)),
            ("exp_avg_sq", states.exp_avg_sq.as_ref().map_or(n, FloatsMut::len)),
            ("param_low", low.len()),
        ];
        if let Some((name, length)) = lengths.into_iter().find(|(_, length)| *length != n) {
            return Err(wrong_length(name, length, n));
        }
        let tensor = Tensor::of_checked(states, grad, None, None, Some(low), false);
        let dtypes = tensor.dtypes()?;
        if supports_split(dtypes) { Ok(tensor) } else { Err(no_split_kernel(dtypes)) }
    }

    /// Makes a step of a split master compare the parameter with the sums of its tiles, and store new ones: low bits of
    /// tiles that other code has written count as zero (see `word_sum`). Fails for other tensors, and if `sums` has not one
    /// word for each tile.
    pub fn with_low_sums(self, sums: &'a mut [u64]) -> Result<Self> {
        let tiles = self.len().div_ceil(TILE);
        match (self.is_split(), sums.len() == tiles) {
            (true, true) => Ok(self.of_checked_sums(sums)),
            (false, _) => Err(Error::invalid("low_sums", "is set, but param_low is NULL")),
            (true, false) => Err(Error::invalid(
                "low_sums",
                format!("has {} words, but param has {tiles} tiles", sums.len()),
            )),
        }
    }

    /// As [`Tensor::with_low_sums`], of sums that it has checked before.
    pub(super) fn of_checked_sums(self, sums: &'a mut [u64]) -> Self {
        Tensor { low_sums: Some(sums), ..self }
    }

    /// Gives the tensor 8-bit moments, `[exp_avg, exp_avg_sq]`. Fails if it has other moments or shadow spans, or if the
    /// codes do not fit the parameter.
    pub fn with_codes(self, codes: Moments<'a>) -> Result<Self> {
        let n = self.len();
        let has_moments = self.states.exp_avg.is_some() || self.states.exp_avg_sq.is_some();
        if has_moments || self.has_shadow() {
            return Err(codes_stand_alone());
        }
        for (name, codes) in [("exp_avg", &codes[0]), ("exp_avg_sq", &codes[1])] {
            let lengths = codes
                .as_ref()
                .map_or((n, n.div_ceil(BLOCK)), |codes| (codes.codes.len(), codes.scales.len()));
            if lengths != (n, n.div_ceil(BLOCK)) {
                let (codes, scales) = lengths;
                let reason = format!("has {codes} codes and {scales} scales, but param has {n} elements");
                return Err(Error::invalid(name, reason));
            }
        }
        Ok(self.of_checked_codes(codes))
    }

    /// As [`Tensor::with_codes`], of codes that it has checked before.
    pub(super) fn of_checked_codes(self, codes: Moments<'a>) -> Self {
        Tensor { beside: Beside::Codes(codes), ..self }
    }

    /// True if the moments are codes of 8 bits.
    pub fn has_codes(&self) -> bool {
        matches!(self.beside, Beside::Codes(_))
    }

    /// True if the step writes its new states to a shadow.
    pub(super) fn has_shadow(&self) -> bool {
        matches!(self.beside, Beside::Shadow(_))
    }

    /// The shadow, if there is one.
    pub(super) fn shadow_mut(&mut self) -> Option<&mut States<'a>> {
        match &mut self.beside {
            Beside::Shadow(states) => Some(states),
            _ => None,
        }
    }

    /// Takes the 8-bit moments out of the tensor.
    pub(super) fn take_codes(&mut self) -> Moments<'a> {
        match std::mem::replace(&mut self.beside, Beside::Nothing) {
            Beside::Codes(codes) => codes,
            other => {
                self.beside = other;
                [None, None]
            }
        }
    }

    /// The 8-bit moments, if the tensor has any.
    pub(super) fn codes_mut(&mut self) -> Option<&mut Moments<'a>> {
        match &mut self.beside {
            Beside::Codes(codes) => Some(codes),
            _ => None,
        }
    }

    /// Makes the step write its new states to `shadow` and leave the old states unchanged. Fails if the spans of
    /// `shadow` differ from the states in presence, type or length.
    pub fn with_shadow(self, shadow: States<'a>) -> Result<Self> {
        if self.has_codes() {
            return Err(codes_stand_alone());
        }
        match shadow.shape() == self.states.shape() {
            true => Ok(Tensor { beside: Beside::Shadow(shadow), ..self }),
            false => {
                Err(Error::invalid("shadow", "must have the same spans, types and lengths as the states"))
            }
        }
    }

    /// Makes a step begin with the values that other code has written to `param_copy`: an element of the parameter of
    /// which the copy is not the rounding becomes the copy (see `take`). Fails without a copy, and with shadow spans: after a step whose
    /// shadow is dropped, the copy would count although no code wrote it.
    pub fn with_copy_taken(self) -> Result<Self> {
        match (self.param_copy.is_some(), self.has_shadow()) {
            (true, false) => Ok(Tensor { takes_copy: true, ..self }),
            (false, _) => Err(Error::invalid("take_copy", "is 1, but there is no param_copy")),
            (true, true) => Err(Error::invalid("take_copy", "is 1, but the shadow spans are set")),
        }
    }

    /// Attaches the undo log: a step writes it, an undo reads it. `log` must have [`log_bytes`] bytes, else an error.
    pub fn with_log(self, log: &'a mut [u8]) -> Result<Self> {
        match log.len() == log_bytes(self.len()) {
            true => Ok(Tensor { log: Some(log), ..self }),
            false => Err(Error::invalid(
                "log",
                format!("has {} bytes, which is not the size of a log of {} elements", log.len(), self.len()),
            )),
        }
    }

    /// Sets the total number of elements of the call that this tensor is part of. Large calls write outputs that they
    /// do not read with non-temporal stores (see `STREAMED`).
    pub fn set_total_elements(&mut self, elements: usize) {
        self.streams = Streams { written: elements >= STREAMED, log: elements >= STREAMED_LOG };
    }

    /// True if the log is written with non-temporal stores: the call is large and the log is aligned to a cache line.
    pub(super) fn streams_log(&self) -> bool {
        self.streams.log && self.log.as_ref().is_some_and(|log| log.as_ptr().addr().is_multiple_of(LINE))
    }

    /// Takes the undo log out of the tensor.
    pub(super) fn take_log(&mut self) -> Option<&'a mut [u8]> {
        self.log.take().filter(|log| !log.is_empty())
    }

    /// Low bits and their sums; empty without.
    pub(super) fn low_mut(&mut self) -> (&mut [u16], &mut [u64]) {
        (self.low.as_deref_mut().unwrap_or_default(), self.low_sums.as_deref_mut().unwrap_or_default())
    }

    /// True if a recorded step keeps the old values: no formula inverts it.
    pub fn keeps_values(&self) -> bool {
        self.is_split() || self.has_codes()
    }

    /// The same tensor, whose step does not begin with the values of `param_copy`.
    pub(super) fn without_taking(self) -> Self {
        Tensor { takes_copy: false, ..self }
    }

    pub(super) fn log_address(&mut self) -> Option<*mut u8> {
        self.log.as_mut().filter(|log| !log.is_empty()).map(|log| log.as_mut_ptr())
    }

    /// True if a step takes the values of `param_copy`.
    pub(super) fn takes_copy(&self) -> bool {
        self.takes_copy
    }

    /// True if the master of the parameter is split.
    pub fn is_split(&self) -> bool {
        self.low.is_some()
    }

    /// The low bits of a split master; null for other tensors.
    pub(super) fn low_address(&mut self) -> *mut u16 {
        self.low.as_mut().map_or(std::ptr::null_mut(), |low| low.as_mut_ptr())
    }

    /// The sums of tiles; null without.
    pub(super) fn low_sums_address(&mut self) -> *mut u64 {
        self.low_sums.as_mut().map_or(std::ptr::null_mut(), |sums| sums.as_mut_ptr())
    }

    /// True if an undo log is attached.
    pub fn has_log(&self) -> bool {
        self.log.is_some()
    }

    /// Makes `first` the number of the first element: stochastic rounding gives the elements the random bits of a larger
    /// tensor. No chunk of this tensor crosses a multiple of 2^32 in it.
    pub fn numbered(self, first: u64) -> Self {
        Tensor { first, ..self }
    }

    /// Number of the first element in the tensor that this one is a part of.
    pub(super) fn first(&self) -> u64 {
        self.first
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

    /// Names and contents of the spans that an undo reads: parameter, states and gradient.
    pub fn spans(&self) -> impl Iterator<Item = (&'static str, Floats<'_>)> {
        let States { param, exp_avg, exp_avg_sq } = &self.states;
        let states =
            [("param", Some(param)), ("exp_avg", exp_avg.as_ref()), ("exp_avg_sq", exp_avg_sq.as_ref())];
        let states = states.into_iter().filter_map(|(name, state)| state.map(|state| (name, state.shared())));
        states.chain([("grad", self.grad)])
    }

    /// Splits into the first `mid` elements and the rest. Panics if `mid` is not a multiple of [`TILE`], or of
    /// [`CHUNK`] for a tensor with a log.
    pub fn split_at(self, mid: usize) -> (Self, Self) {
        // At any other cut the sums of squares would differ, or the rest of the log would be too short.
        let unit = if self.log.is_some() { CHUNK } else { TILE };
        assert!(mid.is_multiple_of(unit), "a tensor is split only between tiles, with a log between chunks");
        let (states, states_rest) = self.states.split_at(mid);
        let (grad, grad_rest) = self.grad.split_at(mid);
        let (param_copy, copy_rest) = self.param_copy.map(|span| span.split_at_mut(mid)).unzip();
        let (beside, beside_rest) = self.beside.split_at(mid);
        let (low, low_rest) = self.low.map(|low| low.split_at_mut(mid)).unzip();
        let (low_sums, sums_rest) = self.low_sums.map(|sums| sums.split_at_mut(mid / TILE)).unzip();
        let (log, log_rest) = self.log.map(|log| log.split_at_mut(log_bytes(mid))).unzip();
        (
            Tensor {
                states,
                grad,
                param_copy,
                beside,
                takes_copy: self.takes_copy,
                low,
                low_sums,
                log,
                streams: self.streams,
                first: self.first,
            },
            Tensor {
                states: states_rest,
                grad: grad_rest,
                param_copy: copy_rest,
                beside: beside_rest,
                takes_copy: self.takes_copy,
                low: low_rest,
                low_sums: sums_rest,
                log: log_rest,
                streams: self.streams,
                first: self.first + mid as u64,
            },
        )
    }

    /// The same tensor with a shorter lifetime.
    pub fn reborrow(&mut self) -> Tensor<'_> {
        Tensor {
            states: self.states.reborrow(),
            grad: self.grad,
            param_copy: self.param_copy.as_mut().map(FloatsMut::reborrow),
            beside: self.beside.reborrow(),
            takes_copy: self.takes_copy,
            low: self.low.as_deref_mut(),
            low_sums: self.low_sums.as_deref_mut(),
            log: self.log.as_deref_mut(),
            streams: self.streams,
            first: self.first,
        }
    }

    /// Drops the states that the optimizer does not keep. Returns an error that names a state which the optimizer keeps
    /// but the tensor lacks.
    pub fn require_states(&mut self, exp_avg: bool, exp_avg_sq: bool) -> Result<()> {
        let require_of = |first: &mut Option<FloatsMut<'a>>, second: &mut Option<FloatsMut<'a>>| {
            require([("exp_avg", exp_avg, first), ("exp_avg_sq", exp_avg_sq, second)])
        };
        match &mut self.beside {
            Beside::Nothing => {}
            Beside::Shadow(shadow) => require_of(&mut shadow.exp_avg, &mut shadow.exp_avg_sq)?,
            Beside::Codes([first, second]) => {
                return require([("exp_avg", exp_avg, first), ("exp_avg_sq", exp_avg_sq, second)]);
            }
        }
        require_of(&mut self.states.exp_avg, &mut self.states.exp_avg_sq)
    }

    /// Returns an error that names a state which this optimizer keeps but the tensor lacks.
    pub(super) fn check_states<R: Arithmetic>(&self) -> Result<()> {
        let States { exp_avg, exp_avg_sq, .. } = &self.states;
        let (first, second) = match &self.beside {
            Beside::Codes([first, second]) => (first.is_some(), second.is_some()),
            _ => (exp_avg.is_some(), exp_avg_sq.is_some()),
        };
        for (name, kept, there) in [("exp_avg", R::EXP_AVG, first), ("exp_avg_sq", R::EXP_AVG_SQ, second)] {
            if kept && !there {
                return Err(Error::invalid(name, "is missing, but this optimizer needs it"));
            }
        }
        Ok(())
    }

    /// The element types of the spans. A tensor without states counts as one with f32 states. Fails if the two states
    /// have different types.
    #[inline]
    pub fn dtypes(&self) -> Result<Dtypes> {
        let first = self.states.exp_avg.as_ref().map(FloatsMut::dtype);
        let second = self.states.exp_avg_sq.as_ref().map(FloatsMut::dtype);
        if let (Some(a), Some(b)) = (first, second)
            && a != b
        {
            return Err(Error::invalid(
                "exp_avg_sq",
                format!("is {}, but exp_avg is {}; both must have the same type", b.name(), a.name()),
            ));
        }
        Ok(Dtypes {
            param: self.states.param.dtype(),
            state: first.or(second).unwrap_or(Dtype::F32),
            grad: self.grad.dtype(),
            copy: self.copy_dtype(),
        })
    }
}

impl Dtypes {
    /// Fails if no kernel exists for these types.
    #[inline]
    pub fn check(self) -> Result<()> {
        if supported(self) { Ok(()) } else { Err(no_kernel(self)) }
    }
}

/// Drops the moments that are not kept. Returns an error that names one which is kept but missing.
#[inline(always)]
fn require<T>(moments: [(&'static str, bool, &mut Option<T>); 2]) -> Result<()> {
    for (name, kept, moment) in moments {
        if !kept {
            *moment = None;
        } else if moment.is_none() {
            return Err(Error::invalid(name, "is NULL, but this optimizer needs it"));
        }
    }
    Ok(())
}

#[cold]
fn wrong_length(name: &'static str, length: usize, n: usize) -> Error {
    Error::invalid(name, format!("has {length} elements, but param has {n}"))
}

/// The error for a step with stochastic rounding of other types than
/// [`with_bf16_moments`](super::element::with_bf16_moments) supports.
pub fn not_stochastic(dtypes: Dtypes) -> Error {
    Error::Unsupported(format!(
        "stochastic rounding needs an f32 param with bf16 states or 8-bit moments, a grad of f32 or bf16, and a param_copy of bf16 or none; \
         these are {}",
        named(dtypes)
    ))
}

/// The error for types that [`with_split_types`](super::element::with_split_types) does not support.
pub fn no_split_kernel(dtypes: Dtypes) -> Error {
    Error::Unsupported(format!(
        "param_low needs a bf16 param, states of f32 or bf16, a grad of bf16 or f32, and no param_copy; these are {}",
        named(dtypes)
    ))
}

/// The error for a tensor whose step no formula inverts, in an undo without a log.
#[cold]
pub fn needs_a_log() -> Error {
    Error::Unsupported(
        "split masters and 8-bit moments: their steps are undone from a log only; record with the delta mode"
            .to_string(),
    )
}

/// The error for a log without room for the values of its tensor.
#[cold]
pub fn log_too_small() -> Error {
    Error::invalid("log", "has no room for the values of the tensor")
}

/// The error for a tensor with 8-bit moments and shadow spans, or other moments.
#[cold]
pub fn codes_stand_alone() -> Error {
    Error::Unsupported(
        "8-bit moments: a tensor with them has neither other moments nor shadow spans".to_string(),
    )
}

/// The error for a tensor with a split master and shadow spans.
#[cold]
pub fn split_stands_alone() -> Error {
    Error::Unsupported("param_low: a tensor with a split master has no shadow spans".to_string())
}

/// The error for a type combination that [`with_types`](super::element::with_types) does not support.
pub fn no_kernel(dtypes: Dtypes) -> Error {
    Error::Unsupported(format!("unsupported combination of types: {}", named(dtypes)))
}

fn named(Dtypes { param, state, grad, copy }: Dtypes) -> String {
    let copy = copy.map_or("none", Dtype::name);
    format!("param {}, state {}, grad {}, param_copy {copy}", param.name(), state.name(), grad.name())
}
