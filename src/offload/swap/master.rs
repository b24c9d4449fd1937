//! The f32 master weight split without loss into the bf16 copy that the model holds anyway and its low 16 bits, so that
//! the tier stores 2 bytes for it instead of 4.
//!
//! The copy is the master rounded to nearest even, so its pattern is the upper half, or one more if the lower half is
//! above one half. At exactly one half the even neighbour was taken, and the copy does not say from which side; a NaN
//! becomes the one quiet NaN. Those masters are listed whole, as exceptions: of random weights one in 2^17.
#![forbid(unsafe_code)]

use crate::dtype::bf16;

/// A master that its copy and low half do not determine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exception {
    /// Index of the element.
    pub element: u64,
    /// Its 32 bits.
    pub bits: u32,
}

const TIE: u16 = 0x8000;
/// Elements that are looked at together.
const BLOCK: usize = 1024;

/// The upper half that a copy and a low half mean, exceptions apart.
#[inline]
fn upper(copy: u16, low: u16) -> u16 {
    copy.wrapping_sub(u16::from(low > TIE))
}

/// The pattern that every kernel stores for this master's bf16 copy.
#[inline]
fn rounded(bits: u32) -> u16 {
    let nan = bits & 0x7fff_ffff > 0x7f80_0000;
    let even = (bits >> 16) & 1;
    let nearest = (bits.wrapping_add(0x7fff + even) >> 16) as u16;
    if nan { 0x7fc0 } else { nearest }
}

/// Writes the low halves, and appends what they leave open to `exceptions`.
///
/// False if there would be more than `most` exceptions in the list: such state is better stored whole.
pub fn split(master: &[f32], low: &mut [u16], exceptions: &mut Vec<Exception>, most: usize) -> bool {
    let blocks = master.chunks(BLOCK).zip(low.chunks_mut(BLOCK));
    for (number, (master, low)) in blocks.enumerate() {
        // Without a branch for each element: exceptions are rare.
        let mut open = 0;
        for (master, low) in master.iter().zip(low) {
            let bits = master.to_bits();
            *low = bits as u16;
            open |= upper(rounded(bits), *low) ^ (bits >> 16) as u16;
        }
        if open == 0 {
            continue;
        }
        for (index, master) in master.iter().enumerate() {
            let bits = master.to_bits();
            if upper(rounded(bits), bits as u16) != (bits >> 16) as u16 {
                if exceptions.len() == most {
                    return false;
                }
                exceptions.push(Exception { element: (number * BLOCK + index) as u64, bits });
            }
        }
    }
    true
}

/// The masters from the model's copy, their low halves, and the exceptions in the order in which [`split`] listed them.
/// False if an exception lies outside.
pub fn join(copy: &[bf16], low: &[u16], exceptions: &[Exception], master: &mut [f32]) -> bool {
    for ((copy, low), master) in copy.iter().zip(low).zip(master.iter_mut()) {
        *master = f32::from_bits(u32::from(upper(copy.to_bits(), *low)) << 16 | u32::from(*low));
    }
    for exception in exceptions {
        match usize::try_from(exception.element).ok().and_then(|index| master.get_mut(index)) {
            Some(master) => *master = f32::from_bits(exception.bits),
            None => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::threads;

    /// All masters with these upper halves, copied as the kernels copy; the number of exceptions.
    fn round_trip(uppers: std::ops::Range<u32>) -> u64 {
        let mut count = 0;
        let (mut low, mut back) = (vec![0; 1 << 16], vec![0.0; 1 << 16]);
        let mut exceptions = Vec::new();
        for upper in uppers {
            let master: Vec<f32> = (0..1 << 16).map(|low| f32::from_bits(upper << 16 | low)).collect();
            let copy: Vec<bf16> = master.iter().map(|x| bf16::from_bits(rounded(x.to_bits()))).collect();
            exceptions.clear();
            assert!(split(&master, &mut low, &mut exceptions, 1 << 16));
            assert!(join(&copy, &low, &exceptions, &mut back));
            let same = master.iter().zip(&back).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "upper half {upper:#06x}");
            count += exceptions.len() as u64;
        }
        count
    }

    #[test]
    fn all_patterns_come_back_and_few_numbers_are_exceptions() {
        let mut parts: Vec<(u32, u64)> = (0..1 << 6).map(|part| (part << 10, 0)).collect();
        threads::each(&mut parts, |(first, count)| *count = round_trip(*first..*first + (1 << 10))).unwrap();
        let count: u64 = parts.iter().map(|(_, count)| count).sum();
        // NaNs of both signs but the 2^16 that 0x7fc0 and its low half give; ties at odd upper halves of numbers.
        let nans = 2 * ((1 << 23) - 1) - (1 << 16);
        let ties = 2 * (0x7f80 / 2);
        assert_eq!(count, nans + ties);
    }

    #[test]
    fn the_copy_is_what_the_kernels_store() {
        for bits in (0..=u32::MAX).step_by(4099) {
            let x = f32::from_bits(bits);
            let expected = if x.is_nan() { 0x7fc0 } else { bf16::from_f32(x).to_bits() };
            assert_eq!(rounded(bits), expected, "{bits:#010x}");
        }
    }

    #[test]
    fn too_many_exceptions_and_foreign_ones_are_said() {
        let ties = vec![f32::from_bits(0x3f81_8000); 10];
        let (mut low, mut exceptions) = (vec![0; 10], Vec::new());
        assert!(!split(&ties, &mut low, &mut exceptions, 9));
        let outside = [Exception { element: 3, bits: 0 }];
        assert!(!join(&[bf16::ZERO; 3], &[0; 3], &outside, &mut [0.0; 3]));
    }
}
