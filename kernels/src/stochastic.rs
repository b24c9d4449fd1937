//! Adam with stochastic rounding of bf16 moments.
//!
//! A value between two neighbouring bf16 numbers becomes the upper one with a probability proportional to its distance
//! from the lower one. The expected result is the value itself. Round to nearest would lose every term that is smaller
//! than half a unit in the last place, such as 0.001 * g * g of a second moment.
//!
//! The random bits are a hash of the key of the step and of the element's number in its tensor. They are the same for
//! every kernel, number of threads and split of the work. The sum of a value's bits and 16 random bits, without its lower
//! 16 bits, is the rounded value.

use super::chunk_loop::MAX_LANES;
use super::dispatch::Kernel;
use super::rules::{AdamRule, Arithmetic, Corrector, ElementState};
use super::vector::{Body, Vector};

/// The rule of one chunk.
#[derive(Clone, Copy)]
pub struct Stochastic {
    rule: AdamRule,
    random: RandomBits,
}

/// The random bits of the elements of one chunk.
#[derive(Debug, Clone, Copy)]
pub struct RandomBits {
    keys: [u32; 2],
    /// Lower half of the number of the chunk's first element. No chunk crosses a multiple of 2^32.
    first: u32,
}

/// The key of a step with this seed.
pub fn stochastic_key(seed: u64, step: u64) -> u64 {
    mix(seed ^ mix(step))
}

/// A bijection in which every bit of the argument changes half of the bits of the result (SplitMix64).
const fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Lane numbers of the widest vector.
static LANES: [u32; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

impl Stochastic {
    /// The rule for a chunk that begins with element number `first` of its tensor.
    pub fn new(rule: AdamRule, key: u64, first: u64) -> Stochastic {
        Stochastic { rule, random: RandomBits::new(key, first) }
    }
}

impl RandomBits {
    /// The bits of a chunk that begins with element number `first` of its tensor.
    pub fn new(key: u64, first: u64) -> RandomBits {
        let keys = mix(key ^ (first >> 32));
        RandomBits { keys: [keys as u32, (keys >> 32) as u32], first: first as u32 }
    }

    /// Writes the bits of the first elements of the chunk.
    pub fn fill(self, kernel: Kernel, to: &mut [u32]) {
        // SAFETY: `to` has room for its words.
        unsafe { kernel.run(Fill { random: self, to: to.as_mut_ptr(), n: to.len() }) };
    }

    /// 32 random bits for each lane of the group at element `at` of the chunk. The multipliers and shifts are those of
    /// triple32, an integer hash without measurable bias; the second key is added after its first multiplication.
    #[inline(always)]
    pub(super) unsafe fn bits<V: Vector>(&self, at: usize) -> V::Bits {
        // SAFETY: the caller upholds the callees' contracts; LANES has the lanes of the widest vector.
        unsafe {
            let shifted = |x, by| V::bits_xor(x, V::bits_shr(x, V::bits_splat(by)));
            let number = V::bits_splat(self.first.wrapping_add(at as u32));
            let x = V::bits_add(number, V::load_bits32(LANES.as_ptr()));
            let x = V::bits_xor(x, V::bits_splat(self.keys[0]));
            let x = V::bits_mul(shifted(x, 17), V::bits_splat(0xed5a_d4bb));
            let x = V::bits_add(x, V::bits_splat(self.keys[1]));
            let x = V::bits_mul(shifted(x, 11), V::bits_splat(0xac4c_1b51));
            let x = V::bits_mul(shifted(x, 15), V::bits_splat(0x3184_8bab));
            shifted(x, 14)
        }
    }
}

struct Fill {
    random: RandomBits,
    to: *mut u32,
    n: usize,
}

impl Body for Fill {
    #[inline(always)]
    unsafe fn run<V: Vector>(self) -> f64 {
        let Fill { random, to, n } = self;
        let whole = n - n % V::LANES;
        // SAFETY: each group lies below n; the last one is written through a buffer.
        unsafe {
            for at in (0..whole).step_by(V::LANES) {
                V::store_bits32(random.bits::<V>(at), to.add(at));
            }
            let mut last = [0; MAX_LANES];
            V::store_bits32(random.bits::<V>(whole), last.as_mut_ptr());
            std::ptr::copy_nonoverlapping(last.as_ptr(), to.add(whole), n - whole);
        }
        0.0
    }
}

/// Rounds to a value that bf16 holds exactly, by random bits below 2^16. Inf and NaN stay as they are.
#[inline(always)]
unsafe fn round<V: Vector>(value: V, random: V::Bits) -> V {
    // SAFETY: the caller upholds the callees' contracts.
    unsafe {
        const EXPONENT: u32 = 0x7f80_0000;
        let bits = value.to_bits();
        // 1 for Inf and NaN, whose exponent has all bits set, else 0.
        let exponent = V::bits_and(bits, V::bits_splat(EXPONENT));
        let special = V::bits_shr(V::bits_add(exponent, V::bits_splat(0x0080_0000)), V::bits_splat(31));
        let finite = V::bits_sub(special, V::bits_splat(1));
        let sum = V::bits_add(bits, V::bits_and(random, finite));
        // A NaN that arithmetic returned keeps its highest fraction bit.
        V::from_bits(V::bits_and(sum, V::bits_splat(0xffff_0000)))
    }
}

impl Arithmetic for Stochastic {
    const EXP_AVG: bool = true;
    const EXP_AVG_SQ: bool = true;

    #[inline(always)]
    fn grad_scale(&self) -> f32 {
        self.rule.grad_scale
    }

    fn with_grad_scale(self, grad_scale: f32) -> Self {
        Self { rule: self.rule.with_grad_scale(grad_scale), ..self }
    }

    #[inline(always)]
    unsafe fn forward<V: Vector>(&self, old: ElementState<V>, grad: V) -> ElementState<V> {
        // SAFETY: the caller upholds the callee's contract.
        unsafe { self.rule.forward(old, grad) }
    }

    #[inline(always)]
    unsafe fn inverse<V: Vector, S: Corrector<V>>(&self, new: ElementState<V>, grad: V, corrector: &mut S) {
        // SAFETY: the caller upholds the callee's contract.
        unsafe { self.rule.inverse(new, grad, corrector) }
    }

    #[inline(always)]
    unsafe fn round<V: Vector>(&self, at: usize, new: ElementState<V>) -> ElementState<V> {
        // SAFETY: the caller upholds the callees' contracts.
        unsafe {
            let random = self.random.bits::<V>(at);
            let low = V::bits_and(random, V::bits_splat(0xffff));
            let high = V::bits_shr(random, V::bits_splat(16));
            ElementState {
                param: new.param,
                exp_avg: round(new.exp_avg, low),
                exp_avg_sq: round(new.exp_avg_sq, high),
            }
        }
    }
}
