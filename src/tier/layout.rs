//! On-disk format of chunks. Every number is little endian on every machine.
//!
//! Invariants:
//! - Parsing arbitrary bytes returns a value or an error text. It never panics, and never allocates more memory than
//!   the input has bytes.
//! - A chunk header names its tier, extent, generation, path and offset, and holds the checksums of its blocks. A block
//!   that was written to the wrong place, or not written at all, fails its check.
//! - The superblock holds the checksum of each chunk header. A header of an older generation fails the checksum
//!   comparison, so its blocks are rejected.
//!
//! The directory of a path holds the file `data` with chunks, and the files `superblock.0` and `superblock.1`, which
//! are written alternately:
//!
//! | part of a chunk | bytes | content |
//! |---|---|---|
//! | fixed part | 128 | magic, version, byte order, the fields of [`ChunkHeader`], number of blocks, checksum |
//! | checksums | 8 per block | XXH3-64 of the block's bytes |
//! | zeros | | padding to a whole number of pages |
//! | blocks | | each padded to a whole number of pages |
#![forbid(unsafe_code)]

use super::wire::{Decoder, Encoder};
use crate::checksum;
use crate::sys::memory::BASE_PAGE;

/// Format version. Files with another version are refused.
pub const FORMAT_VERSION: u32 = 1;
/// Alignment and unit of allocations on disk, in bytes.
pub const PAGE: u64 = BASE_PAGE as u64;

const CHUNK_MAGIC: [u8; 8] = *b"SPWCHUNK";
/// Byte order mark: a file written in the opposite byte order has another value here.
const BYTE_ORDER: u32 = 0x0102_0304;
const FIXED: usize = 128;
const CHECKSUM_AT: usize = 120;

/// Header of a chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkHeader {
    /// Identifier of the tier.
    pub tier: u128,
    /// Random number drawn at each open of the tier, so that no two writes produce the same header.
    pub session: u64,
    /// Number of the extent.
    pub extent: u32,
    /// Number of the path.
    pub path: u32,
    /// Generation of the extent's contents.
    pub generation: u64,
    /// Number of the chunk's first block in the extent.
    pub first: u32,
    /// Offset of the chunk in the data file, in bytes.
    pub offset: u64,
    /// Bytes of a whole block.
    pub block_bytes: u64,
    /// XXH3-64 of each block, in block order.
    pub checksums: Vec<u64>,
}

/// Size in bytes of a chunk header for `blocks` blocks: a multiple of [`PAGE`].
pub fn header_bytes(blocks: u64) -> u64 {
    (FIXED as u64 + 8 * blocks).next_multiple_of(PAGE)
}

/// True if the bytes begin with the magic of a chunk header, even if truncated.
pub(super) fn is_chunk(bytes: &[u8]) -> bool {
    bytes.starts_with(&CHUNK_MAGIC)
}

impl ChunkHeader {
    /// The stored header, padded to whole pages, and its checksum.
    pub fn encode(&self) -> (Vec<u8>, u64) {
        let mut fixed = Encoder::default();
        preamble(&mut fixed, &CHUNK_MAGIC);
        fixed.u128(self.tier).u64(self.session);
        fixed.u32(self.extent).u32(self.path).u64(self.generation).u32(self.first);
        fixed.u32(self.checksums.len() as u32).u64(self.offset).u64(self.block_bytes);
        let mut bytes = fixed.finish();
        bytes.resize(FIXED, 0);
        self.checksums.iter().for_each(|sum| bytes.extend_from_slice(&sum.to_le_bytes()));
        let sum = header_checksum(&bytes);
        bytes[CHECKSUM_AT..FIXED].copy_from_slice(&sum.to_le_bytes());
        bytes.resize(header_bytes(self.checksums.len() as u64) as usize, 0);
        (bytes, sum)
    }

    /// Parses a stored header; returns it and its checksum, or an error text.
    pub fn parse(bytes: &[u8]) -> Result<(ChunkHeader, u64), String> {
        let mut fixed = Decoder::new(bytes);
        let too_short = || format!("{} bytes are too few for a header of a chunk", bytes.len());
        check_preamble(&mut fixed, &CHUNK_MAGIC)?;
        let mut parse = || {
            let (tier, session) = (fixed.u128()?, fixed.u64()?);
            let (extent, path, generation) = (fixed.u32()?, fixed.u32()?, fixed.u64()?);
            let (first, count, offset, block_bytes) =
                (fixed.u32()?, fixed.u32()?, fixed.u64()?, fixed.u64()?);
            let checksums = bytes.get(FIXED..)?.get(..8 * count as usize)?;
            let checksums =
                checksums.chunks_exact(8).filter_map(|sum| Some(u64::from_le_bytes(sum.try_into().ok()?)));
            let checksums = checksums.collect();
            Some(ChunkHeader {
                tier,
                session,
                extent,
                path,
                generation,
                first,
                offset,
                block_bytes,
                checksums,
            })
        };
        let header = parse().ok_or_else(too_short)?;
        let all = &bytes[..FIXED + 8 * header.checksums.len()];
        let stored = Decoder::new(&all[CHECKSUM_AT..]).u64().ok_or_else(too_short)?;
        match header_checksum(all) == stored {
            true => Ok((header, stored)),
            false => Err("its fields do not match its checksum".to_string()),
        }
    }
}

/// Checksum of a header; the checksum field counts as zeros.
fn header_checksum(bytes: &[u8]) -> u64 {
    let mut copy = bytes.to_vec();
    copy[CHECKSUM_AT..FIXED].fill(0);
    checksum::of(&copy)
}

/// Checks magic, version and byte order, the first fields of every stored header.
pub(super) fn check_preamble(from: &mut Decoder, magic: &[u8; 8]) -> Result<(), String> {
    let found = (from.take(8), from.u32(), from.u32());
    match found {
        (Some(found), _, _) if found != magic => Err("its first bytes are not those of a tier".to_string()),
        (_, Some(FORMAT_VERSION), Some(BYTE_ORDER)) => Ok(()),
        (_, Some(FORMAT_VERSION), Some(order)) => {
            Err(format!("it was written with another byte order ({order:#010x})"))
        }
        (_, Some(version), _) => {
            Err(format!("its format version is {version}, but this library reads {FORMAT_VERSION}"))
        }
        _ => Err("it is too short".to_string()),
    }
}

/// Writes the fields that [`check_preamble`] checks.
pub(super) fn preamble(to: &mut Encoder, magic: &[u8; 8]) {
    to.raw(magic).u32(FORMAT_VERSION).u32(BYTE_ORDER);
}
