//! On-disk format of chunks and superblocks. Every number is little endian on every machine. There is no padding between
//! fields.
//!
//! Invariants:
//! - Parsing arbitrary bytes returns a value or an error text. It never panics, and never allocates more memory than
//!   the input has bytes.
//! - A chunk header names its tier, extent, generation, path and offset, and holds the checksums of its blocks. A block
//!   that was written to the wrong place, or not written at all, fails its check.
//! - The superblock holds the checksum of each chunk header. A header of an older generation fails the checksum
//!   comparison, so its blocks are rejected.
//! - A superblock is written only after everything that it names is durable. It overwrites the copy that does not hold
//!   the last committed superblock. A crash during this write therefore leaves one valid copy that names one complete
//!   step. With `Durability::Process` nothing is synced, so this holds for the end of the process only.
//! - The copy with the highest sequence wins, on any path. The other copy names the previous commit until the next
//!   commit.
//! - Before a superblock is written, its bytes are parsed and checked by the rules of an open.
//! - A superblock that parses names chunks inside their files, each block of each extent once, and no overlapping
//!   chunks.
//!
//! The directory of a path holds the file `data` with chunks, and the files `superblock.0` and `superblock.1`, which
//! are written alternately. Checksums are XXH3-64.
//!
//! | chunk, at byte | bytes | content |
//! |---|---|---|
//! | 0 | 16 | magic `SPWCHUNK`, format version u32, byte order mark u32 |
//! | 16 | 24 | tier u128, session u64 |
//! | 40 | 16 | extent u32, path u32, generation u64 |
//! | 56 | 24 | first block u32, number of blocks u32, offset u64, block size u64 |
//! | 80 | 40 | zeros |
//! | 120 | 8 | checksum of the fixed part, this field as zeros, and of the checksums that follow |
//! | 128 | 8 per block | checksum of the block's bytes |
//! | | | zeros to a whole number of pages, then the blocks, each padded to a whole number of pages |
//!
//! | superblock, at byte | bytes | content |
//! |---|---|---|
//! | 0 | 16 | magic `SPWSUPER`, format version u32, byte order mark u32 |
//! | 16 | 24 | sequence u64, length of the table u64, checksum of the table u64 |
//! | 40 | 32 | tier u128, path u32, zero u32, session u64 |
//! | 72 | 176 | zeros |
//! | 248 | 8 | checksum of bytes 0 to 247 |
//! | 256 | 3840 | zeros |
//! | 4096 | | the table, then zeros to a whole number of pages |
//!
//! | table, in this order | bytes | content |
//! |---|---|---|
//! | step | 24 | 1 if there is a step, else 0, as u64; step u64; block size u64 |
//! | owner | | job, host; rank u32, number of ranks u32 |
//! | commit | | generation u64; payload |
//! | paths | 4 | their number u32 |
//! | each path | | name; in memory u32; length of the data file u64; bytes written u64 |
//! | extents | 4 | their number u32 |
//! | each extent | 4 | 0 unused, 1 never written, 2 written, as u32; an unused one ends here |
//! | | | name; number of streams u32; length of each stream u64 |
//! | of a written one | 12 | generation u64, number of chunks u32 |
//! | each chunk | 28 | path u32, offset u64, first block u32, number of blocks u32, checksum of its header u64 |
//!
//! Names, job, host and payload are their bytes, after their length as u32.
#![forbid(unsafe_code)]

use super::extent::{CHUNK_FIXED, Chunk, MAX_STREAMS, PAGE, Shape, Version, header_bytes};
use super::paths::{Space, Stamp};
use crate::checksum;

/// Format version. Files with another version are refused.
const FORMAT_VERSION: u32 = 1;
const CHUNK_MAGIC: [u8; 8] = *b"SPWCHUNK";
/// Byte order mark: a file written in the opposite byte order has another value here.
const BYTE_ORDER: u32 = 0x0102_0304;
const FIXED: usize = CHUNK_FIXED as usize;
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
fn check_preamble(from: &mut Decoder, magic: &[u8; 8]) -> Result<(), String> {
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
fn preamble(to: &mut Encoder, magic: &[u8; 8]) {
    to.raw(magic).u32(FORMAT_VERSION).u32(BYTE_ORDER);
}

const SUPER_MAGIC: [u8; 8] = *b"SPWSUPER";
/// Bytes of the header; the table follows it.
pub const HEADER_BYTES: usize = PAGE as usize;
const HEADER_CHECKSUM_AT: usize = 248;
const HEADER_USED: usize = 256;
/// Maximum length of the table in bytes; a larger value means a corrupt header.
pub const MAX_TABLE: u64 = 1 << 30;
/// Maximum number of paths of a tier.
pub const MAX_PATHS: usize = 256;
/// Maximum block size, in bytes.
pub const MAX_BLOCK: u64 = 1 << 30;

/// A path at the time of the commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathRecord {
    /// Directory or address of the path, or "memory"; empty if the tier no longer uses the path.
    pub name: String,
    /// True if the data is lost when the process ends.
    pub memory: bool,
    /// Length of the data file, in bytes.
    pub end: u64,
    /// Bytes written to the path since the tier was created.
    pub written: u64,
}

/// A committed extent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExtentRecord {
    /// Name of the extent.
    pub name: String,
    /// Stream and block sizes.
    pub shape: Shape,
    /// Location of the contents; `None` if never written.
    pub version: Option<Version>,
}

/// The state that a commit makes durable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Superblock {
    /// Random identifier, drawn when the tier was created.
    pub tier: u128,
    /// Sequence number; each superblock gets a higher one.
    pub sequence: u64,
    /// Random number of the open that wrote it; its chunks have the same number.
    pub session: u64,
    /// Step number of the caller; `None` before the first commit.
    pub step: Option<u64>,
    /// Number of the path that holds this copy.
    pub path: u32,
    /// Block size, in bytes.
    pub block_bytes: u64,
    /// Name of the job.
    pub job: String,
    /// Name of the host.
    pub host: String,
    /// Rank in the job.
    pub rank: u32,
    /// Number of ranks in the job.
    pub world: u32,
    /// Highest generation of any write.
    pub generation: u64,
    /// Payload of the commit.
    pub payload: Vec<u8>,
    /// Paths, by number.
    pub paths: Vec<PathRecord>,
    /// Extents, by number; `None` for unused numbers.
    pub extents: Vec<Option<ExtentRecord>>,
}

/// Header of a superblock: length and checksum of its table.
#[derive(Debug, Clone, Copy)]
pub struct SuperblockHeader {
    /// Who wrote the superblock, and which one it is.
    pub stamp: Stamp,
    /// Length of the table behind the header, in bytes.
    pub table_bytes: u64,
    table_checksum: u64,
    tier: u128,
    path: u32,
}

/// An encoded superblock that parses. The header is added per path, because it names the path.
#[derive(Debug)]
pub struct Encoded {
    stamp: Stamp,
    tier: u128,
    table: Vec<u8>,
    table_checksum: u64,
}

impl Encoded {
    /// Stored bytes for path `path`: header and table, padded to whole pages.
    pub fn on_path(&self, path: u32) -> Vec<u8> {
        let mut header = Encoder::default();
        preamble(&mut header, &SUPER_MAGIC);
        header.u64(self.stamp.sequence).u64(self.table.len() as u64).u64(self.table_checksum);
        header.u128(self.tier).u32(path).u32(0).u64(self.stamp.session);
        let mut bytes = header.finish();
        bytes.resize(HEADER_BYTES, 0);
        let sum = checksum::of(&bytes[..HEADER_CHECKSUM_AT]);
        bytes[HEADER_CHECKSUM_AT..HEADER_USED].copy_from_slice(&sum.to_le_bytes());
        bytes.extend_from_slice(&self.table);
        bytes.resize(bytes.len().next_multiple_of(HEADER_BYTES), 0);
        bytes
    }
}

impl Superblock {
    /// Encodes the superblock. Returns an error text if an open would refuse the bytes, so such a superblock is never
    /// written.
    pub fn encode(&self) -> Result<Encoded, String> {
        let table = self.encode_table();
        let (table_bytes, table_checksum) = (table.len() as u64, checksum::of(&table));
        check_table_bytes(table_bytes)?;
        let Superblock { tier, path, .. } = *self;
        let stamp = self.stamp();
        let header = SuperblockHeader { stamp, table_bytes, table_checksum, tier, path };
        match Superblock::of_table(&table, &header)? == *self {
            true => Ok(Encoded { stamp, tier, table, table_checksum }),
            false => Err("the encoded superblock does not read back as itself".to_string()),
        }
    }

    /// Which superblock this is.
    pub fn stamp(&self) -> Stamp {
        Stamp { sequence: self.sequence, session: self.session }
    }

    fn encode_table(&self) -> Vec<u8> {
        let mut to = Encoder::default();
        to.u64(self.step.map_or(0, |_| 1)).u64(self.step.unwrap_or(0)).u64(self.block_bytes);
        to.bytes(self.job.as_bytes()).bytes(self.host.as_bytes()).u32(self.rank).u32(self.world);
        to.u64(self.generation).bytes(&self.payload);
        to.u32(self.paths.len() as u32);
        for path in &self.paths {
            to.bytes(path.name.as_bytes()).u32(path.memory.into()).u64(path.end).u64(path.written);
        }
        to.u32(self.extents.len() as u32);
        for extent in &self.extents {
            let Some(ExtentRecord { name, shape, version }) = extent else {
                to.u32(0);
                continue;
            };
            to.u32(if version.is_some() { 2 } else { 1 }).bytes(name.as_bytes());
            to.u32(shape.streams().len() as u32);
            shape.streams().iter().for_each(|bytes| {
                to.u64(*bytes);
            });
            if let Some(Version { generation, chunks }) = version {
                to.u64(*generation).u32(chunks.len() as u32);
                for Chunk { path, offset, first, count, header_checksum } in chunks {
                    to.u32(*path).u64(*offset).u32(*first).u32(*count).u64(*header_checksum);
                }
            }
        }
        to.finish()
    }

    /// Parses header and table, or returns an error text.
    pub fn parse(bytes: &[u8]) -> Result<Superblock, String> {
        let header = SuperblockHeader::parse(bytes)?;
        let table = bytes.get(HEADER_BYTES..).and_then(|rest| rest.get(..header.table_bytes as usize));
        let table = table.ok_or_else(|| "its table is truncated".to_string())?;
        if checksum::of(table) != header.table_checksum {
            return Err("its table does not match its checksum".to_string());
        }
        Superblock::of_table(table, &header)
    }

    fn of_table(table: &[u8], header: &SuperblockHeader) -> Result<Superblock, String> {
        let mut from = Decoder::new(table);
        let parsed = parse_table(&mut from, header).filter(|_| from.is_empty());
        parsed.ok_or_else(|| "its table is malformed".to_string())?.checked()
    }

    /// Checks the rules that every superblock of this library satisfies.
    pub(super) fn checked(self) -> Result<Superblock, String> {
        if self.path as usize >= self.paths.len() || self.paths.len() > MAX_PATHS {
            return Err(format!(
                "its path number is {}, but the tier has {} paths",
                self.path,
                self.paths.len()
            ));
        }
        let mut used = vec![Vec::new(); self.paths.len()];
        for extent in self.extents.iter().flatten() {
            let Some(version) = &extent.version else { continue };
            if !version.covers(&extent.shape) {
                return Err(format!("extent {:?} has missing or duplicate blocks", extent.name));
            }
            for chunk in &version.chunks {
                let Some(used) = used.get_mut(chunk.path as usize) else {
                    return Err(format!(
                        "extent {:?} is on path {}, which does not exist",
                        extent.name, chunk.path
                    ));
                };
                used.push((chunk.offset, chunk.stored(&extent.shape)));
            }
        }
        for (path, used) in self.paths.iter().zip(used) {
            if Space::new(path.end, path.end, used).is_none() {
                return Err(format!("chunks on {} overlap, or exceed its {} bytes", path.name, path.end));
            }
        }
        Ok(self)
    }
}

impl SuperblockHeader {
    /// Parses the header, or returns an error text.
    pub fn parse(bytes: &[u8]) -> Result<SuperblockHeader, String> {
        let mut from = Decoder::new(bytes);
        check_preamble(&mut from, &SUPER_MAGIC)?;
        let mut parse = || {
            let (sequence, table_bytes, table_checksum) = (from.u64()?, from.u64()?, from.u64()?);
            let (tier, path) = (from.u128()?, from.u32()?);
            from.u32()?;
            let stamp = Stamp { sequence, session: from.u64()? };
            let sum = Decoder::new(bytes.get(HEADER_CHECKSUM_AT..)?).u64()?;
            Some((SuperblockHeader { stamp, table_bytes, table_checksum, tier, path }, sum))
        };
        let (header, sum) = parse().ok_or_else(|| "it is too short".to_string())?;
        match checksum::of(&bytes[..HEADER_CHECKSUM_AT]) == sum {
            false => Err("its header does not match its checksum".to_string()),
            true => check_table_bytes(header.table_bytes).map(|()| header),
        }
    }
}

fn check_table_bytes(bytes: u64) -> Result<(), String> {
    match bytes > MAX_TABLE {
        true => Err(format!("its table has {bytes} bytes, but the limit is {MAX_TABLE}")),
        false => Ok(()),
    }
}

/// True if `bytes` is a valid block size: a multiple of [`PAGE`], at most [`MAX_BLOCK`].
pub fn block_bytes_fit(bytes: u64) -> bool {
    (PAGE..=MAX_BLOCK).contains(&bytes) && bytes.is_multiple_of(PAGE)
}

fn parse_table(from: &mut Decoder, header: &SuperblockHeader) -> Option<Superblock> {
    let (has_step, step, block_bytes) = (from.u64()?, from.u64()?, from.u64()?);
    if !block_bytes_fit(block_bytes) {
        return None;
    }
    let (job, host, rank, world) = (from.string()?, from.string()?, from.u32()?, from.u32()?);
    let (generation, payload) = (from.u64()?, from.bytes()?.to_vec());
    let count = from.count(24)?;
    let paths = (0..count)
        .map(|_| {
            let (name, memory) = (from.string()?, from.u32()? != 0);
            Some(PathRecord { name, memory, end: from.u64()?, written: from.u64()? })
        })
        .collect::<Option<Vec<_>>>()?;
    let count = from.count(4)?;
    let extents = (0..count).map(|_| parse_extent(from, block_bytes)).collect::<Option<Vec<_>>>()?;
    Some(Superblock {
        tier: header.tier,
        sequence: header.stamp.sequence,
        session: header.stamp.session,
        step: (has_step == 1).then_some(step),
        path: header.path,
        block_bytes,
        job,
        host,
        rank,
        world,
        generation,
        payload,
        paths,
        extents,
    })
}

/// Parses one extent; `Some(None)` for an unused number.
fn parse_extent(from: &mut Decoder, block_bytes: u64) -> Option<Option<ExtentRecord>> {
    let kind = from.u32()?;
    if kind == 0 {
        return Some(None);
    }
    let name = from.string()?;
    let count = from.count(8).filter(|count| *count <= MAX_STREAMS)?;
    let streams = (0..count).map(|_| from.u64()).collect::<Option<Vec<_>>>()?;
    let shape = Shape::new(&streams, block_bytes).ok()?;
    let version = match kind {
        1 => None,
        2 => {
            let (generation, count) = (from.u64()?, from.count(28)?);
            let chunk = |_| {
                let (path, offset) = (from.u32()?, from.u64()?);
                let (first, count, header_checksum) = (from.u32()?, from.u32()?, from.u64()?);
                Some(Chunk { path, offset, first, count, header_checksum })
            };
            Some(Version { generation, chunks: (0..count).map(chunk).collect::<Option<Vec<_>>>()? })
        }
        _ => return None,
    };
    Some(Some(ExtentRecord { name, shape, version }))
}

/// Parser of untrusted bytes. Every getter returns `None` past the end.
#[derive(Debug, Clone, Copy)]
pub(super) struct Decoder<'a> {
    bytes: &'a [u8],
}

impl<'a> Decoder<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Decoder<'a> {
        Decoder { bytes }
    }

    pub(super) fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.bytes.split_at_checked(len)?;
        self.bytes = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    pub(super) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    pub(super) fn u128(&mut self) -> Option<u128> {
        self.array().map(u128::from_le_bytes)
    }

    /// Bytes, preceded by their length as u32.
    pub(super) fn bytes(&mut self) -> Option<&'a [u8]> {
        let len = self.u32()?;
        self.take(len as usize)
    }

    pub(super) fn string(&mut self) -> Option<String> {
        String::from_utf8(self.bytes()?.to_vec()).ok()
    }

    /// A number of items of at least `least` bytes each. A count that exceeds the remaining bytes is `None`, so a
    /// corrupt count cannot cause a large allocation.
    pub(super) fn count(&mut self, least: usize) -> Option<usize> {
        let count = self.u32()? as usize;
        (count <= self.bytes.len() / least).then_some(count)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }
}

/// Encoder of values.
#[derive(Debug, Default)]
pub(super) struct Encoder {
    bytes: Vec<u8>,
}

impl Encoder {
    pub(super) fn raw(&mut self, bytes: &[u8]) -> &mut Self {
        self.bytes.extend_from_slice(bytes);
        self
    }

    pub(super) fn u32(&mut self, value: u32) -> &mut Self {
        self.raw(&value.to_le_bytes())
    }

    pub(super) fn u64(&mut self, value: u64) -> &mut Self {
        self.raw(&value.to_le_bytes())
    }

    pub(super) fn u128(&mut self, value: u128) -> &mut Self {
        self.raw(&value.to_le_bytes())
    }

    /// The length must fit into u32: names and payloads are limited where they enter the tier.
    pub(super) fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.u32(bytes.len() as u32).raw(bytes)
    }

    pub(super) fn finish(self) -> Vec<u8> {
        self.bytes
    }
}
