//! The loop over the elements of one chunk.
//!
//! A chunk is at most [`CHUNK`] elements. It is the unit of work of one thread. A call of at most one chunk runs on the
//! caller's thread. Each tile of a chunk is processed in whole vectors first; the remainder goes through a vector that
//! is padded with zeros. So every element gets the same instructions, and the results do not depend on the span's
//! length.

use super::element::Element;
use super::squares::{self, LANES, TILE};
use super::vector::{Body, Vector};

/// Maximal elements of one kernel call. A power-of-two number of tiles, so that sums do not depend on the split.
pub const CHUNK: usize = 16 * TILE;

/// Work on one group of elements.
pub trait Op {
    /// Does the work of the group at element `at`. Returns the gradient whose squares are summed.
    ///
    /// # Safety
    /// Same contract as [`Vector`], for the group that `access` reads and writes at `at`.
    unsafe fn apply<V: Vector, A: Access>(&mut self, at: usize, access: A) -> V;

    /// Called before the first group of the tile that begins at element `at`.
    ///
    /// # Safety
    /// Same contract as [`Vector`], for the elements of the chunk.
    #[inline(always)]
    unsafe fn begin_tile<V: Vector>(&mut self, _at: usize) {}

    /// Called after the last group of the tile of `count` elements that begins at element `at`.
    ///
    /// # Safety
    /// Same contract as [`Vector`], for the elements of the chunk.
    #[inline(always)]
    unsafe fn end_tile<V: Vector>(&mut self, _at: usize, _count: usize) {}

    /// Called once, after the last group of the chunk.
    ///
    /// # Safety
    /// Same contract as [`Vector`].
    #[inline(always)]
    unsafe fn finish<V: Vector>(&mut self) {}
}

/// A step of an optimizer, of which the caller may have the moments.
pub trait StepOp: Op {
    /// Steps the group at element `at`, all but its moments. Takes the old moments, and returns the gradient whose squares
    /// are summed and the new ones.
    ///
    /// # Safety
    /// Same contract as [`Op::apply`]. The moments in memory are not accessed.
    unsafe fn advance<V: Vector, A: Access>(&mut self, at: usize, access: A, moments: [V; 2]) -> (V, [V; 2]);
}

/// Walks an [`Op`] over `n` elements.
pub struct ChunkLoop<O, const SQUARES: bool> {
    /// The work per group.
    pub op: O,
    /// Number of elements, at most [`CHUNK`].
    pub n: usize,
}

/// How a group of elements is read and written: all lanes, or only the first lanes.
pub trait Access: Copy {
    /// True if the group has all lanes.
    const WHOLE: bool;
    /// Loads the group; lanes outside it are zero.
    ///
    /// # Safety
    /// Same contract as [`Vector`], for the elements inside the group.
    unsafe fn load<E: Element, V: Vector>(self, from: *const E::Raw) -> V;
    /// Stores the lanes inside the group.
    ///
    /// # Safety
    /// Same contract as [`Vector`], for the elements inside the group.
    unsafe fn store<E: Element, V: Vector>(self, value: V, to: *mut E::Raw);
    /// Loads a byte for each element of the group; lanes outside it are zero.
    ///
    /// # Safety
    /// Same contract as [`Vector`], for the elements inside the group.
    unsafe fn load_bytes<V: Vector>(self, from: *const u8) -> V::Bits;
    /// Loads the bit patterns of the group; lanes outside it are zero.
    ///
    /// # Safety
    /// Same contract as [`Vector`], for the elements inside the group.
    unsafe fn load_bits<E: Element, V: Vector>(self, from: *const E::Raw) -> V::Bits;
    /// Stores the bit patterns of the lanes inside the group.
    ///
    /// # Safety
    /// Same contract as [`Vector`], for the elements inside the group.
    unsafe fn store_bits<E: Element, V: Vector>(self, bits: V::Bits, to: *mut E::Raw);
    /// Stores the bit patterns of the lanes inside the group; with non-temporal stores if the group has all lanes.
    ///
    /// # Safety
    /// Same contract as [`Vector::stream_bits32`], for the elements inside the group.
    unsafe fn store_nt<E: Element, V: Vector>(self, bits: V::Bits, to: *mut E::Raw);
}

/// All lanes.
#[derive(Clone, Copy)]
struct Full;

/// The first `self.0` lanes.
#[derive(Clone, Copy)]
struct Partial(usize);

/// Number of lanes of the widest vector.
pub const MAX_LANES: usize = 16;

impl Access for Full {
    const WHOLE: bool = true;
    #[inline(always)]
    unsafe fn load<E: Element, V: Vector>(self, from: *const E::Raw) -> V {
        // SAFETY: the caller upholds the callee's contract.
        unsafe { E::load(from) }
    }
    #[inline(always)]
    unsafe fn store<E: Element, V: Vector>(self, value: V, to: *mut E::Raw) {
        // SAFETY: the caller upholds the callee's contract.
        unsafe { E::store(value, to) }
    }
    #[inline(always)]
    unsafe fn load_bytes<V: Vector>(self, from: *const u8) -> V::Bits {
        // SAFETY: the caller upholds the callee's contract.
        unsafe { V::load_bytes(from) }
    }
    #[inline(always)]
    unsafe fn load_bits<E: Element, V: Vector>(self, from: *const E::Raw) -> V::Bits {
        // SAFETY: the caller upholds the callee's contract.
        unsafe { E::load_bits::<V>(from) }
    }
    #[inline(always)]
    unsafe fn store_bits<E: Element, V: Vector>(self, bits: V::Bits, to: *mut E::Raw) {
        // SAFETY: the caller upholds the callee's contract.
        unsafe { E::store_bits::<V>(bits, to) }
    }
    #[inline(always)]
    unsafe fn store_nt<E: Element, V: Vector>(self, bits: V::Bits, to: *mut E::Raw) {
        // SAFETY: the caller upholds the callee's contract.
        unsafe { E::store_nt::<V>(bits, to) }
    }
}

impl Partial {
    /// Copies the elements of the group to the start of a zeroed vector.
    #[inline(always)]
    unsafe fn pad<T: Copy + Default>(self, from: *const T) -> [T; MAX_LANES] {
        let mut padded = [T::default(); MAX_LANES];
        // SAFETY: the group has self.0 <= MAX_LANES elements.
        unsafe { std::ptr::copy_nonoverlapping(from, padded.as_mut_ptr(), self.0) };
        padded
    }

    /// Copies the start of a vector to the elements of the group.
    #[inline(always)]
    unsafe fn store_prefix<T: Copy>(self, padded: [T; MAX_LANES], to: *mut T) {
        // SAFETY: the group has self.0 <= MAX_LANES elements.
        unsafe { std::ptr::copy_nonoverlapping(padded.as_ptr(), to, self.0) };
    }
}

impl Access for Partial {
    const WHOLE: bool = false;
    #[inline(always)]
    unsafe fn load<E: Element, V: Vector>(self, from: *const E::Raw) -> V {
        // SAFETY: the padded array holds a whole vector.
        unsafe { E::load(self.pad(from).as_ptr()) }
    }
    #[inline(always)]
    unsafe fn store<E: Element, V: Vector>(self, value: V, to: *mut E::Raw) {
        let mut padded = [E::Raw::default(); MAX_LANES];
        // SAFETY: the padded array holds a whole vector.
        unsafe {
            E::store(value, padded.as_mut_ptr());
            self.store_prefix(padded, to);
        }
    }
    #[inline(always)]
    unsafe fn load_bytes<V: Vector>(self, from: *const u8) -> V::Bits {
        // SAFETY: the padded array holds a whole vector.
        unsafe { V::load_bytes(self.pad(from).as_ptr()) }
    }
    #[inline(always)]
    unsafe fn load_bits<E: Element, V: Vector>(self, from: *const E::Raw) -> V::Bits {
        // SAFETY: the padded array holds a whole vector.
        unsafe { E::load_bits::<V>(self.pad(from).as_ptr()) }
    }
    #[inline(always)]
    unsafe fn store_bits<E: Element, V: Vector>(self, bits: V::Bits, to: *mut E::Raw) {
        let mut padded = [E::Raw::default(); MAX_LANES];
        // SAFETY: the padded array holds a whole vector.
        unsafe {
            E::store_bits::<V>(bits, padded.as_mut_ptr());
            self.store_prefix(padded, to);
        }
    }
    #[inline(always)]
    unsafe fn store_nt<E: Element, V: Vector>(self, bits: V::Bits, to: *mut E::Raw) {
        // SAFETY: the caller upholds the callee's contract.
        unsafe { self.store_bits::<E, V>(bits, to) }
    }
}

impl<O: Op, const SQUARES: bool> Body for ChunkLoop<O, SQUARES> {
    #[inline(always)]
    unsafe fn run<V: Vector>(self) -> f64 {
        let ChunkLoop { mut op, n } = self;
        let mut sums = [0.0; CHUNK / TILE];
        let mut lanes = [0.0; LANES];
        let mut at = 0;
        while at < n {
            let (tile, begin) = (at / TILE, at);
            let end = n.min(at + TILE);
            let whole = end - (end - at) % V::LANES;
            // SAFETY: every group lies below n; at % LANES is a multiple of V::LANES, which divides LANES.
            unsafe {
                op.begin_tile::<V>(begin);
                while at < whole {
                    let grad: V = op.apply(at, Full);
                    if SQUARES {
                        grad.add_squares(lanes.as_mut_ptr().add(at % LANES));
                    }
                    at += V::LANES;
                }
                if at < end {
                    let grad: V = op.apply(at, Partial(end - at));
                    if SQUARES {
                        grad.add_squares(lanes.as_mut_ptr().add(at % LANES));
                    }
                    at = end;
                }
                op.end_tile::<V>(begin, end - begin);
            }
            if SQUARES {
                sums[tile] = squares::tile_sum(&mut lanes);
                lanes = [0.0; LANES];
            }
        }
        // SAFETY: the caller upholds the callee's contract.
        unsafe { op.finish::<V>() };
        if SQUARES { squares::tree_sum(&sums[..n.div_ceil(TILE)]) } else { 0.0 }
    }
}
