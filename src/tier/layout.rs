//! Bytes on disk. Every number is little endian, whatever the machine.
//!
//! Invariants:
//! - Whatever bytes are given, parsing ends with a value or with words that say what is wrong with them; it never
//!   panics and never asks for more memory than the bytes themselves take.
//! - A chunk says whose it is and where it lies, and holds the checksums of its blocks: a block that landed in the
//!   wrong place, or that never landed, does not pass for another.
//! - The superblock holds the checksum of each chunk's header, so that a header of an older generation does not pass,
//!   and through it no older block.
//!
//! A path's directory holds `data`, with chunks, and `superblock.0` and `superblock.1`, written in turn:
//!
//! | chunk | bytes | |
//! |---|---|---|
//! | fixed part | 128 | magic, version, sizes, tier, session, extent, generation, first block, count, path, offset, sum |
//! | sums | 8 per block | XXH3-64 of the block's bytes |
//! | zeros | | up to whole pages |
//! | blocks | | each up to whole pages |
#![forbid(unsafe_code)]

use super::wire::{Reader, Writer};
use crate::checksum;
use crate::sys::memory::BASE_PAGE;

/// Version of the format; another one is refused.
pub const FORMAT_VERSION: u32 = 1;
/// Unit of places on disk.
pub const PAGE: u64 = BASE_PAGE as u64;

const CHUNK_MAGIC: [u8; 8] = *b"SPWCHUNK";
/// Reads back as something else if anybody ever stores it in the machine's own order.
const BYTE_ORDER: u32 = 0x0102_0304;
const FIXED: usize = 128;
const SUM_AT: usize = 120;

/// What the head of a chunk says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkHeader {
    /// The tier it belongs to.
    pub tier: u128,
    /// A number drawn at the open that wrote it, so that no two writes ever have the same head.
    pub session: u64,
    /// The extent, by its number.
    pub extent: u32,
    /// The path, by its number.
    pub path: u32,
    /// Of the extent's contents.
    pub generation: u64,
    /// First block of the extent that it holds.
    pub first: u32,
    /// Where the chunk begins in the data file.
    pub offset: u64,
    /// Bytes of a whole block.
    pub block_bytes: u64,
    /// Sums of its blocks.
    pub sums: Vec<u64>,
}

/// Bytes that the head of a chunk with so many blocks takes.
pub fn header_bytes(blocks: u64) -> u64 {
    (FIXED as u64 + 8 * blocks).next_multiple_of(PAGE)
}

/// True if these bytes begin as the head of a chunk does, whole or not.
pub(super) fn is_chunk(bytes: &[u8]) -> bool {
    bytes.starts_with(&CHUNK_MAGIC)
}

impl ChunkHeader {
    /// The head as it is stored, whole pages, and its checksum.
    pub fn encode(&self) -> (Vec<u8>, u64) {
        let mut fixed = Writer::default();
        preamble(&mut fixed, &CHUNK_MAGIC);
        fixed.u128(self.tier).u64(self.session);
        fixed.u32(self.extent).u32(self.path).u64(self.generation).u32(self.first);
        fixed.u32(self.sums.len() as u32).u64(self.offset).u64(self.block_bytes);
        let mut bytes = fixed.finish();
        bytes.resize(FIXED, 0);
        self.sums.iter().for_each(|sum| bytes.extend_from_slice(&sum.to_le_bytes()));
        let sum = header_sum(&bytes);
        bytes[SUM_AT..FIXED].copy_from_slice(&sum.to_le_bytes());
        bytes.resize(header_bytes(self.sums.len() as u64) as usize, 0);
        (bytes, sum)
    }

    /// Reads a head back, and its checksum, or says what is wrong.
    pub fn parse(bytes: &[u8]) -> Result<(ChunkHeader, u64), String> {
        let mut fixed = Reader::new(bytes);
        let too_short = || format!("{} bytes are no head of a chunk", bytes.len());
        check_preamble(&mut fixed, &CHUNK_MAGIC)?;
        let mut parse = || {
            let (tier, session) = (fixed.u128()?, fixed.u64()?);
            let (extent, path, generation) = (fixed.u32()?, fixed.u32()?, fixed.u64()?);
            let (first, count, offset, block_bytes) =
                (fixed.u32()?, fixed.u32()?, fixed.u64()?, fixed.u64()?);
            let sums = bytes.get(FIXED..)?.get(..8 * count as usize)?;
            let sums = sums.chunks_exact(8).filter_map(|sum| Some(u64::from_le_bytes(sum.try_into().ok()?)));
            let sums = sums.collect();
            Some(ChunkHeader { tier, session, extent, path, generation, first, offset, block_bytes, sums })
        };
        let header = parse().ok_or_else(too_short)?;
        let all = &bytes[..FIXED + 8 * header.sums.len()];
        let stored = Reader::new(&all[SUM_AT..]).u64().ok_or_else(too_short)?;
        match header_sum(all) == stored {
            true => Ok((header, stored)),
            false => Err("its head does not match its checksum".to_string()),
        }
    }
}

/// Sum of a head, its own place left out.
fn header_sum(bytes: &[u8]) -> u64 {
    let mut copy = bytes.to_vec();
    copy[SUM_AT..FIXED].fill(0);
    checksum::of(&copy)
}

/// Magic, version and byte order, which every stored head begins with.
pub(super) fn check_preamble(from: &mut Reader, magic: &[u8; 8]) -> Result<(), String> {
    let found = (from.take(8), from.u32(), from.u32());
    match found {
        (Some(found), _, _) if found != magic => Err("it does not begin as one".to_string()),
        (_, Some(FORMAT_VERSION), Some(BYTE_ORDER)) => Ok(()),
        (_, Some(FORMAT_VERSION), Some(order)) => Err(format!("its byte order is {order:#010x}")),
        (_, Some(version), _) => {
            Err(format!("its format version is {version}, this library reads {FORMAT_VERSION}"))
        }
        _ => Err("it is too short".to_string()),
    }
}

/// What [`check_preamble`] accepts.
pub(super) fn preamble(to: &mut Writer, magic: &[u8; 8]) {
    to.raw(magic).u32(FORMAT_VERSION).u32(BYTE_ORDER);
}
