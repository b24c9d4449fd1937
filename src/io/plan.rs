//! Where an operation is split into pieces.
//!
//! Direct pieces cover whole pages of the file. The partial pages at the edges go through the page cache, on a second
//! descriptor. The alternative, a read-modify-write of the edge sectors, is not used for three reasons:
//! - It loses bytes when two operations share a sector, as tensors packed one after another do.
//! - At the end of the file it needs a truncation, which would cut off data that other writers appended.
//! - It is not faster.
//!
//! Disjoint operations never write the same page through both descriptors. The kernel's own rules therefore keep the
//! two descriptors coherent.
#![forbid(unsafe_code)]

use crate::sys::file::RequestLimits;
use crate::sys::memory::BASE_PAGE;

/// A descriptor of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Route {
    /// Bypasses the page cache (O_DIRECT).
    Direct,
    /// Through the page cache.
    Buffered,
}

/// The alignment that direct I/O on a file requires, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Alignment {
    /// Alignment of memory addresses.
    pub memory: u64,
    /// Alignment of file offsets and lengths; at least a page.
    pub offset: u64,
}

/// The properties of one operation that determine how it is split.
#[derive(Debug, Clone, Copy)]
pub struct Splitter {
    /// Byte offset in the file.
    pub offset: u64,
    /// Address of the first byte in memory.
    pub address: u64,
    /// Length in bytes.
    pub len: u64,
    /// Alignment for direct I/O; `None` sends everything through the page cache.
    pub direct: Option<Alignment>,
    /// Most bytes of a piece; a multiple of every alignment.
    pub piece: u64,
}

/// One piece of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PiecePlan {
    /// Length in bytes.
    pub len: u64,
    /// The descriptor to use.
    pub route: Route,
    /// True if the piece goes through a bounce block because its memory is not aligned.
    pub bounce: bool,
}

impl Splitter {
    /// The piece that begins `done` bytes into the operation; `done` must be less than `len`. Bounce blocks have
    /// `bounce_block` bytes. The piece has at least one byte: pieces too small for the alignment go through the page
    /// cache.
    pub fn piece_at(&self, done: u64, bounce_block: u64) -> PiecePlan {
        let left = self.len - done;
        let buffered = |len: u64| PiecePlan { len, route: Route::Buffered, bounce: false };
        let Some(Alignment { memory, offset }) = self.direct else { return buffered(left.min(self.piece)) };
        match (self.offset + done) % offset {
            0 if left >= offset => {
                let bounce = !(self.address + done).is_multiple_of(memory);
                let most = left.min(self.piece).min(if bounce { bounce_block } else { u64::MAX });
                match most - most % offset {
                    0 => buffered(offset),
                    len => PiecePlan { len, route: Route::Direct, bounce },
                }
            }
            into => buffered(left.min(offset - into)),
        }
    }

    /// True if the first or last piece needs the page cache.
    pub fn has_edges(&self) -> bool {
        match self.direct {
            Some(alignment) => {
                !self.offset.is_multiple_of(alignment.offset)
                    || !(self.offset + self.len).is_multiple_of(alignment.offset)
            }
            None => true,
        }
    }
}

/// Bytes of a piece: `block`, reduced so that the device does not split the request again.
///
/// Memory uses one segment per page of `page` bytes, and one more if it begins inside a page.
pub fn piece_bytes(block: u64, limits: Option<RequestLimits>, page: u64, aligned: bool) -> u64 {
    let base = BASE_PAGE as u64;
    let Some(limits) = limits else { return block };
    let segments = if aligned { limits.segments } else { limits.segments.saturating_sub(1) };
    let fits = limits.bytes.min(segments.saturating_mul(page));
    let fits = fits - fits % base;
    if fits < base { block } else { block.min(fits) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEED: Alignment = Alignment { memory: 512, offset: 4096 };

    fn cuts(splitter: Splitter) -> Vec<PiecePlan> {
        let mut done = 0;
        let mut cuts = Vec::new();
        while done < splitter.len {
            let cut = splitter.piece_at(done, 8192);
            assert!(cut.len > 0 && cut.len <= splitter.piece.max(NEED.offset));
            done += cut.len;
            cuts.push(cut);
        }
        assert_eq!(done, splitter.len);
        cuts
    }

    #[test]
    fn direct_pieces_are_aligned_for_every_offset_and_length() {
        for offset in [0, 1, 511, 512, 4095, 4096, 5000, 8191] {
            for len in (1..20_000).step_by(97).chain([4096, 8192, 12_288]) {
                for address in [0_u64, 64, 512, 4096] {
                    let splitter = Splitter { offset, address, len, direct: Some(NEED), piece: 8192 };
                    let mut at = offset;
                    let cuts = cuts(splitter);
                    for cut in &cuts {
                        if cut.route == Route::Direct {
                            assert!(at.is_multiple_of(4096) && cut.len.is_multiple_of(4096));
                            assert_eq!(cut.bounce, !(address + at - offset).is_multiple_of(512));
                        }
                        at += cut.len;
                    }
                    let buffered = cuts.iter().filter(|cut| cut.route == Route::Buffered).count();
                    assert!(buffered <= 2);
                    assert_eq!(splitter.has_edges(), buffered > 0);
                }
            }
        }
    }

    /// Covers devices whose sectors are larger than a piece, or larger than a bounce block.
    #[test]
    fn pieces_smaller_than_the_alignment_still_move() {
        let direct = Some(Alignment { memory: 512, offset: 65_536 });
        for (piece, bounce_block, address) in [(4096, 1 << 20, 0), (1 << 20, 4096, 1), (1 << 20, 98_304, 1)] {
            let splitter = Splitter { offset: 0, address, len: 1 << 20, direct, piece };
            let mut done = 0;
            while done < splitter.len {
                let cut = splitter.piece_at(done, bounce_block);
                assert!(cut.len > 0 && (!cut.bounce || cut.len <= bounce_block), "{cut:?}");
                assert!(cut.route == Route::Buffered || cut.len.is_multiple_of(65_536), "{cut:?}");
                done += cut.len;
            }
            assert_eq!(done, splitter.len);
        }
    }

    #[test]
    fn pieces_follow_segments_of_base_pages_and_sectors_of_huge_ones() {
        let limits = Some(RequestLimits { bytes: 4 << 20, segments: 254 });
        assert_eq!(piece_bytes(1 << 20, limits, 4096, true), 254 * 4096);
        assert_eq!(piece_bytes(1 << 20, limits, 4096, false), 253 * 4096);
        assert_eq!(piece_bytes(1 << 20, limits, 2 << 20, true), 1 << 20);
        assert_eq!(piece_bytes(8 << 20, limits, 2 << 20, true), 4 << 20);
        assert_eq!(piece_bytes(1 << 20, None, 4096, true), 1 << 20);
        let broken = Some(RequestLimits { bytes: 0, segments: 0 });
        assert_eq!(piece_bytes(1 << 20, broken, 4096, true), 1 << 20);
    }
}
