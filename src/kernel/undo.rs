//! Exact undo of a step by the differences to its inverse.
//!
//! A step is almost invertible by algebra: the inverse formula misses the old value by a few units in the last place.
//! The log of a chunk holds, for each group of one vector, those differences between bit patterns (old - estimate,
//! wrapping), each stream in the narrowest of 4, 8, 16 or 32 bits that holds the group. 32 bits hold any
//! difference, so that Inf, NaN, the first step and gradient spikes come back exactly, too; they only take more
//! room. The estimate depends on stored values and the gradient alone, which must be unchanged when it is undone.
//!
//! ```text
//! chunk  := bytes used (8 bytes), groups
//! group  := control (1 byte: two bits of width per stream, in the order in which the rule settles them)
//!           differences of the first stream, of the second, of the third
//! ```
//!
//! The log lives in memory, for the process and the kernel that wrote it.

use std::marker::PhantomData;

use super::element::{Element, WithTypes, with_types};
use super::float_mode::IeeeMode;
use super::rules::{Rule, Settle, Values};
use super::select::Kernel;
use super::tensor::{Spans, StateSpans, Tensor, no_kernel};
use super::vector::{Vector, Width};
use super::walk::{Access, CHUNK, MAX_LANES, Op, Walk};
use crate::error::Result;

/// Most bytes of the log of `n` elements, on any kernel: one control byte and three raw words for each lane of whole
/// vectors. A kernel may read a vector past the end, hence the slack.
pub const fn log_capacity(n: usize) -> usize {
    if n == 0 {
        return 0;
    }
    (HEADER + n.next_multiple_of(MAX_LANES) * (1 + 3 * 4) + SLACK).next_multiple_of(ALIGNMENT)
}

/// Bytes in use of the log of one chunk, or of what follows it.
pub fn log_used(log: &[u8]) -> u64 {
    log.first_chunk::<HEADER>().map_or(0, |used| u64::from_ne_bytes(*used))
}

pub(super) const HEADER: usize = size_of::<u64>();
const SLACK: usize = 64;
const ALIGNMENT: usize = 64;

/// Takes one chunk's step back: exactly if the tensor carries the log of that step, else by the inverse formula. With a
/// factor `again`, the step is done anew in the same pass, its gradient multiplied by that instead.
pub fn undo<R: Rule>(kernel: Kernel, rule: R, mut tensor: Tensor<'_>, again: Option<f32>) -> Result<()> {
    assert!(tensor.len() <= CHUNK, "a chunk is at most {CHUNK} elements");
    let dtypes = tensor.dtypes()?;
    #[cfg(target_arch = "aarch64")]
    if let (Some(adam), Some(rule)) = (kernel.adam(), rule.as_adam())
        && super::sve_undo::undo(adam, rule, &mut tensor, again)
    {
        return Ok(());
    }
    with_types(dtypes, UndoStep { kernel, rule, tensor: &mut tensor, again }).ok_or_else(|| no_kernel(dtypes))
}

struct UndoStep<'t, 'a, R> {
    kernel: Kernel,
    rule: R,
    tensor: &'t mut Tensor<'a>,
    again: Option<f32>,
}

impl<R: Rule> WithTypes for UndoStep<'_, '_, R> {
    type Output = ();
    fn with<P: Element, S: Element, G: Element, C: Element>(self) {
        let UndoStep { kernel, rule, tensor, again } = self;
        let n = tensor.len();
        let spans = Spans::<P, S, G, C>::of(tensor);
        let log = tensor.log_address();
        let again = again.map(|scale| rule.with_grad_scale(scale));
        // SAFETY: a log begins with its header.
        let log = log.map_or(std::ptr::null_mut(), |log| unsafe { log.add(HEADER) });
        let op = Undo { rule, spans, log, again };
        let _mode = IeeeMode::enter();
        // SAFETY: the tensor's dtypes chose these types, its constructor checked that every span has n elements; a log
        // holds the step of exactly these elements.
        unsafe { kernel.run(Walk::<_, false> { op, n }) };
    }
}

/// A step that records what its inverse will miss.
pub(super) struct Log<R, P: Element, S: Element, G: Element, C: Element> {
    rule: R,
    spans: Spans<P, S, G, C>,
    start: *mut u8,
    cursor: *mut u8,
}

impl<R, P: Element, S: Element, G: Element, C: Element> Log<R, P, S, G, C> {
    /// # Safety
    /// `log` has [`log_capacity`] bytes for the elements that will be walked.
    pub unsafe fn new(rule: R, spans: Spans<P, S, G, C>, log: *mut u8) -> Self {
        // SAFETY: a log begins with its header.
        Log { rule, spans, start: log, cursor: unsafe { log.add(HEADER) } }
    }
}

impl<R, P: Element, S: Element, G: Element, C: Element> Drop for Log<R, P, S, G, C> {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: both point into the log, whose header is free for the length.
        unsafe { self.start.cast::<u64>().write_unaligned(self.cursor.offset_from(self.start) as u64) };
    }
}

impl<R: Rule, P: Element, S: Element, G: Element, C: Element> Op for Log<R, P, S, G, C> {
    #[inline(always)]
    unsafe fn apply<V: Vector, A: Access>(&mut self, at: usize, access: A) -> V {
        // SAFETY: the caller's promise covers every line; the log has room for every group at its widest.
        unsafe {
            let old = load_bits::<P, S, V, A>(access, at, &self.spans.before());
            let grad = access.load::<G, V>(self.spans.grad.add(at)).mul(V::splat(self.rule.grad_scale()));
            let new = encode::<P, S, V>(self.rule.forward(decode::<P, S, V>(old), grad));
            let stored = decode::<P, S, V>(new);
            store_bits::<P, S, V, A>(access, at, new, &self.spans.after());
            access.store::<C, V>(stored.param, self.spans.param_copy.add(at));

            let mut writer = Writer::<P, S, V>::new(old, self.cursor);
            self.rule.inverse(stored, grad, &mut writer);
            self.cursor = writer.finish();
            grad
        }
    }
}

/// Settles by known old values, and writes down the differences.
struct Writer<P, S, V: Vector> {
    old: Values<V::Bits>,
    control: *mut u8,
    next: *mut u8,
    widths: u8,
    shift: u32,
    elements: PhantomData<(P, S)>,
}

impl<P: Element, S: Element, V: Vector> Writer<P, S, V> {
    #[inline(always)]
    unsafe fn new(old: Values<V::Bits>, control: *mut u8) -> Self {
        // SAFETY: the log has room for this group.
        let next = unsafe { control.add(1) };
        Writer { old, control, next, widths: 0, shift: 0, elements: PhantomData }
    }

    #[inline(always)]
    unsafe fn write<E: Element>(&mut self, old: V::Bits, estimate: V) -> V {
        // SAFETY: the log has room for this group.
        unsafe {
            let difference = V::bits_sub(old, E::encode(estimate.nan_to_zero()));
            let width = V::width(difference);
            V::pack(difference, width, self.next);
            self.next = self.next.add(width.bytes(V::LANES));
            self.widths |= (width as u8) << self.shift;
            self.shift += 2;
            E::decode(old)
        }
    }

    #[inline(always)]
    unsafe fn finish(self) -> *mut u8 {
        // SAFETY: the log has room for this group.
        unsafe { self.control.write(self.widths) };
        self.next
    }
}

impl<P: Element, S: Element, V: Vector> Settle<V> for Writer<P, S, V> {
    #[inline(always)]
    unsafe fn param(&mut self, estimate: V) -> V {
        // SAFETY: the caller's promise is the callee's.
        unsafe { self.write::<P>(self.old.param, estimate) }
    }
    #[inline(always)]
    unsafe fn exp_avg(&mut self, estimate: V) -> V {
        // SAFETY: the caller's promise is the callee's.
        unsafe { self.write::<S>(self.old.exp_avg, estimate) }
    }
    #[inline(always)]
    unsafe fn exp_avg_sq(&mut self, estimate: V) -> V {
        // SAFETY: the caller's promise is the callee's.
        unsafe { self.write::<S>(self.old.exp_avg_sq, estimate) }
    }
}

/// Settles by the differences that a [`Writer`] wrote; without a log, by believing the estimates.
struct Reader<P, S, V: Vector> {
    old: Values<V::Bits>,
    next: *const u8,
    widths: u8,
    elements: PhantomData<(P, S)>,
}

impl<P: Element, S: Element, V: Vector> Reader<P, S, V> {
    #[inline(always)]
    unsafe fn read<E: Element>(&mut self, estimate: V) -> V::Bits {
        if self.next.is_null() {
            // SAFETY: the caller's promise is the callee's.
            return unsafe { E::encode(estimate) };
        }
        // SAFETY: the writer wrote this group.
        unsafe {
            let width = Width::from_code(self.widths);
            let difference = V::unpack(width, self.next);
            self.next = self.next.add(width.bytes(V::LANES));
            self.widths >>= 2;
            V::bits_add(E::encode(estimate.nan_to_zero()), difference)
        }
    }
}

impl<P: Element, S: Element, V: Vector> Settle<V> for Reader<P, S, V> {
    #[inline(always)]
    unsafe fn param(&mut self, estimate: V) -> V {
        // SAFETY: the caller's promise is the callee's.
        unsafe {
            self.old.param = self.read::<P>(estimate);
            P::decode(self.old.param)
        }
    }
    #[inline(always)]
    unsafe fn exp_avg(&mut self, estimate: V) -> V {
        // SAFETY: the caller's promise is the callee's.
        unsafe {
            self.old.exp_avg = self.read::<S>(estimate);
            S::decode(self.old.exp_avg)
        }
    }
    #[inline(always)]
    unsafe fn exp_avg_sq(&mut self, estimate: V) -> V {
        // SAFETY: the caller's promise is the callee's.
        unsafe {
            self.old.exp_avg_sq = self.read::<S>(estimate);
            S::decode(self.old.exp_avg_sq)
        }
    }
}

/// Takes a step back, and does it again with the rule `again` if there is one.
struct Undo<R, P: Element, S: Element, G: Element, C: Element> {
    rule: R,
    spans: Spans<P, S, G, C>,
    log: *const u8,
    again: Option<R>,
}

impl<R: Rule, P: Element, S: Element, G: Element, C: Element> Op for Undo<R, P, S, G, C> {
    #[inline(always)]
    unsafe fn apply<V: Vector, A: Access>(&mut self, at: usize, access: A) -> V {
        // SAFETY: the caller's promise covers every line; the log holds this group.
        unsafe {
            let new = load_bits::<P, S, V, A>(access, at, &self.spans.after());
            let raw_grad = access.load::<G, V>(self.spans.grad.add(at));
            let logged = !self.log.is_null();
            let mut reader = Reader::<P, S, V> {
                old: new,
                next: if logged { self.log.add(1) } else { self.log },
                widths: if logged { self.log.read() } else { 0 },
                elements: PhantomData,
            };
            let grad = raw_grad.mul(V::splat(self.rule.grad_scale()));
            self.rule.inverse(decode::<P, S, V>(new), grad, &mut reader);
            self.log = reader.next;

            let mut values = reader.old;
            if let Some(again) = &self.again {
                let grad = raw_grad.mul(V::splat(again.grad_scale()));
                values = encode::<P, S, V>(again.forward(decode::<P, S, V>(values), grad));
            }
            store_bits::<P, S, V, A>(access, at, values, &self.spans.before());
            access.store::<C, V>(P::decode(values.param), self.spans.param_copy.add(at));
            raw_grad
        }
    }
}

#[inline(always)]
unsafe fn decode<P: Element, S: Element, V: Vector>(bits: Values<V::Bits>) -> Values<V> {
    // SAFETY: the caller's promise is the callees'.
    unsafe {
        Values {
            param: P::decode(bits.param),
            exp_avg: S::decode(bits.exp_avg),
            exp_avg_sq: S::decode(bits.exp_avg_sq),
        }
    }
}

#[inline(always)]
unsafe fn encode<P: Element, S: Element, V: Vector>(values: Values<V>) -> Values<V::Bits> {
    // SAFETY: the caller's promise is the callees'.
    unsafe {
        Values {
            param: P::encode(values.param),
            exp_avg: S::encode(values.exp_avg),
            exp_avg_sq: S::encode(values.exp_avg_sq),
        }
    }
}

/// Patterns of a group; of a state that the rule does not keep, zeros.
#[inline(always)]
unsafe fn load_bits<P: Element, S: Element, V: Vector, A: Access>(
    access: A,
    at: usize,
    from: &StateSpans<P, S>,
) -> Values<V::Bits> {
    // SAFETY: the caller's promise is the callees'; a null span is not touched.
    unsafe {
        let zero = V::splat(0.0).to_bits();
        let state = |span: *mut S::Raw| match span.is_null() {
            true => zero,
            false => access.load_bits::<S, V>(span.add(at)),
        };
        Values {
            param: access.load_bits::<P, V>(from.param.add(at)),
            exp_avg: state(from.exp_avg),
            exp_avg_sq: state(from.exp_avg_sq),
        }
    }
}

#[inline(always)]
unsafe fn store_bits<P: Element, S: Element, V: Vector, A: Access>(
    access: A,
    at: usize,
    values: Values<V::Bits>,
    to: &StateSpans<P, S>,
) {
    // SAFETY: the caller's promise is the callees'; a null span is not touched.
    unsafe {
        access.store_bits::<P, V>(values.param, to.param.add(at));
        if !to.exp_avg.is_null() {
            access.store_bits::<S, V>(values.exp_avg, to.exp_avg.add(at));
        }
        if !to.exp_avg_sq.is_null() {
            access.store_bits::<S, V>(values.exp_avg_sq, to.exp_avg_sq.add(at));
        }
    }
}
