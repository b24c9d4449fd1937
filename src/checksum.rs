//! The checksum of stored blocks: XXH3 with 64 bits, which a processor computes faster than memory delivers the bytes.
#![forbid(unsafe_code)]

use std::hash::Hasher;

use twox_hash::XxHash3_64;

/// XXH3-64 of `bytes`, seed 0.
pub fn of(bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot(bytes)
}

/// A checksum of bytes that arrive in parts.
#[derive(Clone, Default)]
pub struct RunningChecksum(XxHash3_64);

impl RunningChecksum {
    /// Adds the next bytes.
    pub fn add(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    /// The checksum of all bytes added so far, equal to [`of`] of their concatenation.
    pub fn finish(&self) -> u64 {
        self.0.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected checksums of the C library xxHash 0.8.4, for every branch of the algorithm.
    #[test]
    fn the_sums_are_those_of_the_c_library() {
        let known: [(usize, u64); 13] = [
            (0, 0x2d06_8005_38d3_94c2),
            (1, 0xc44b_dff4_074e_ecdb),
            (8, 0x89b9_b111_1ecd_5976),
            (16, 0x3e09_4ab8_4274_d7e2),
            (17, 0xf023_ce20_6c53_cb88),
            (128, 0x74cc_793e_51cb_bf70),
            (129, 0x896b_c9b5_ee9a_02de),
            (240, 0x168a_c2ee_a338_1b59),
            (241, 0x5f15_f12e_172b_51fa),
            (1024, 0x6049_aded_bb22_283e),
            (4096, 0x4ac8_c138_2c1b_7837),
            (100_000, 0xca45_fdb4_5c81_1080),
            (1 << 20, 0x80a4_0c5a_9288_ffaa),
        ];
        for (len, sum) in known {
            let bytes: Vec<u8> = (0..len).map(|i| (i * i * 31 + i * 7 + (i >> 8)) as u8).collect();
            assert_eq!(of(&bytes), sum, "{len} bytes");
            let mut parts = RunningChecksum::default();
            bytes.chunks(777).for_each(|part| parts.add(part));
            assert_eq!(parts.finish(), sum, "{len} bytes in parts");
        }
    }
}
