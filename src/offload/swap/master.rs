//! Lossless split of the f32 master weight into the bf16 copy that the model holds anyway and its low 16 bits. The tier
//! then stores 2 bytes per parameter instead of 4.
//!
//! The copy is the master rounded to nearest even. Its bits are the upper half of the master, plus one if the lower
//! half is above one half. Two cases are ambiguous: at exactly one half the copy does not show the rounding
//! direction, and every NaN becomes the same quiet NaN. Masters that cannot be rebuilt are stored in full, as
//! exceptions; of random weights that is one in 2^17.
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
/// Number of elements checked together.
const BLOCK: usize = 1024;

/// The upper half that follows from a copy and a low half, exceptions aside.
#[inline]
fn upper(copy: u16, low: u16) -> u16 {
    copy.wrapping_sub(u16::from(low > TIE))
}

/// The bf16 bits that every kernel stores for this master.
#[inline]
pub fn rounded(bits: u32) -> u16 {
    let nan = bits & 0x7fff_ffff > 0x7f80_0000;
    let even = (bits >> 16) & 1;
    let nearest = (bits.wrapping_add(0x7fff + even) >> 16) as u16;
    if nan { 0x7fc0 } else { nearest }
}

/// The masters that copy and low halves do not determine. `None` if there are more than `most`: such state is better
/// stored whole.
pub fn exceptions(master: &[f32], most: usize) -> Option<Vec<Exception>> {
    let mut found = Vec::new();
    for (number, master) in master.chunks(BLOCK).enumerate() {
        let open = |master: &f32| {
            let bits = master.to_bits();
            upper(rounded(bits), bits as u16) ^ (bits >> 16) as u16
        };
        // No branch per element, since exceptions are rare.
        if master.iter().fold(0, |any, master| any | open(master)) == 0 {
            continue;
        }
        for (index, master) in master.iter().enumerate().filter(|(_, master)| open(master) != 0) {
            if found.len() == most {
                return None;
            }
            let element = (number * BLOCK + index) as u64;
            found.push(Exception { element, bits: master.to_bits() });
        }
    }
    Some(found)
}

/// True if `copy` is the bf16 copy of these masters.
pub fn is_copy(copy: &[bf16], master: &[f32]) -> bool {
    let differs = |(copy, master): (&bf16, &f32)| copy.to_bits() ^ rounded(master.to_bits());
    copy.len() == master.len()
        && copy
            .chunks(BLOCK)
            .zip(master.chunks(BLOCK))
            .all(|(copy, master)| copy.iter().zip(master).fold(0, |any, pair| any | differs(pair)) == 0)
}

/// The low halves of masters.
pub fn pack(master: &[f32], low: &mut [u16]) {
    master.iter().zip(low).for_each(|(master, low)| *low = master.to_bits() as u16);
}

/// Rebuilds the masters from the model's copy, their low halves and the exceptions. False if an exception's index is
/// out of range, or if the copy of an exception is not its own.
pub fn unpack(copy: &[bf16], low: &[u16], exceptions: &[Exception], master: &mut [f32]) -> bool {
    for ((master, low), copy) in master.iter_mut().zip(low).zip(copy) {
        *master = f32::from_bits(u32::from(upper(copy.to_bits(), *low)) << 16 | u32::from(*low));
    }
    exceptions.iter().all(|exception| {
        let Ok(place) = usize::try_from(exception.element) else { return false };
        let Some((master, copy)) = master.get_mut(place).zip(copy.get(place)) else { return false };
        *master = f32::from_bits(exception.bits);
        copy.to_bits() == rounded(exception.bits)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::threads;
    use sampled::Sample;

    /// The bits of masters after a split and a join.
    fn there_and_back(master: &[f32], exceptions: &[Exception]) -> Vec<u32> {
        let copy: Vec<bf16> = master.iter().map(|x| bf16::from_bits(rounded(x.to_bits()))).collect();
        let mut low = vec![0xdead; master.len()];
        pack(master, &mut low);
        let mut back = vec![f32::NAN; master.len()];
        assert!(unpack(&copy, &low, exceptions, &mut back));
        bits(&back)
    }

    fn bits(master: &[f32]) -> Vec<u32> {
        master.iter().map(|x| x.to_bits()).collect()
    }

    /// Splits and joins all masters with these upper halves, and returns the number of exceptions.
    fn round_trip(uppers: std::ops::Range<u32>) -> u64 {
        let mut count = 0;
        for upper in uppers {
            let master: Vec<f32> = (0..1 << 16).map(|low| f32::from_bits(upper << 16 | low)).collect();
            let exceptions = exceptions(&master, 1 << 16).unwrap();
            assert!(there_and_back(&master, &exceptions) == bits(&master), "upper half {upper:#06x}");
            count += exceptions.len() as u64;
        }
        count
    }

    #[test]
    fn all_patterns_come_back_and_few_numbers_are_exceptions() {
        const PART: u32 = 1 << 6;
        let parts = Sample::new().of(40, (0..1 << 10).map(|part| part * PART));
        // With the parts of infinities and NaNs.
        let mut parts: Vec<u32> = parts.into_iter().chain([0x7f80, 0x7fc0, 0xff80, 0xffc0]).collect();
        // Ties at odd upper halves of finite numbers, and all NaNs except the 2^16 that a copy of 0x7fc0 determines: low halves
        // to 0x8000 with this upper half, and those above with the upper half before it.
        let expected = |upper: u32| match (upper & 0x7fff, upper) {
            (finite, _) if finite < 0x7f80 => u64::from(upper % 2),
            (0x7f80, _) => (1 << 16) - 1,
            (_, 0x7fbf) => (1 << 15) + 1,
            (_, 0x7fc0) => (1 << 15) - 1,
            _ => 1 << 16,
        };
        threads::each(&mut parts, |first| {
            let uppers = *first..*first + PART;
            assert_eq!(round_trip(uppers.clone()), uppers.map(expected).sum::<u64>(), "{first:#06x}");
        })
        .unwrap();
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
        assert!(exceptions(&ties, 9).is_none() && exceptions(&ties, 10).unwrap().len() == 10);
        let outside = [Exception { element: 3, bits: 0 }];
        assert!(!unpack(&[bf16::ZERO; 3], &[0; 3], &outside, &mut [0.0; 3]));
    }

    #[test]
    fn every_length_comes_back() {
        for elements in [0, 1, 2, 1023, 1024, 1025, 2048, 3000, 70_001] {
            let masters: Vec<f32> = (0..elements).map(|i| (i as f32 * 0.37).sin()).collect();
            let exceptions = exceptions(&masters, elements).unwrap();
            assert!(there_and_back(&masters, &exceptions) == bits(&masters), "{elements} elements");
        }
    }
}
