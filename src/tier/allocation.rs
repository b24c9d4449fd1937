//! Placement of a write: allocates chunks on paths.
//!
//! Invariants:
//! - No function here waits for a device, because the tier's lock is held. If a data file must grow first, the caller
//!   gets its path and length, extends the file without the lock, and asks again.
//! - A call allocates space for all requested blocks, or for none.
#![forbid(unsafe_code)]

use super::extent::{Chunk, Shape, header_bytes};
use super::health::Health;
use super::state::TierState;
use crate::error::{Doing, Error, IoError, IoKind, Result};

/// Placement that the caller requests for an extent.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum ExtentPlacement {
    /// The extent's current path, or the path with the least data for a new extent. Another path if this one is full or
    /// not healthy.
    #[default]
    Auto,
    /// The path with this number. Another path only if this one is full or not healthy.
    On(u32),
    /// Several paths in order: path number and number of blocks. The last path also takes the remaining blocks.
    Striped(Vec<(u32, u32)>),
}

impl ExtentPlacement {
    /// Fails if the placement names an unknown path, or no path for an extent with blocks.
    pub(super) fn check(&self, paths: usize, blocks: u32) -> Result<()> {
        let named: Vec<u32> = match self {
            ExtentPlacement::Auto => Vec::new(),
            ExtentPlacement::On(path) => vec![*path],
            ExtentPlacement::Striped(parts) if parts.is_empty() && blocks > 0 => {
                return Err(Error::invalid(
                    "target.path_blocks",
                    format!("assigns none of the {blocks} blocks to a path"),
                ));
            }
            ExtentPlacement::Striped(parts) => parts.iter().map(|(path, _)| *path).collect(),
        };
        match named.into_iter().find(|path| *path as usize >= paths) {
            Some(path) => Err(Error::invalid("target.path", format!("there is no path {path}"))),
            None => Ok(()),
        }
    }
}

/// Blocks to be placed.
#[derive(Debug, Clone, Copy)]
pub(super) struct AllocationRequest<'a> {
    pub(super) shape: &'a Shape,
    pub(super) first: u32,
    pub(super) count: u32,
    /// Paths that this write must not use, by number.
    pub(super) excluded: &'a [bool],
}

/// Result of a placement.
#[derive(Debug)]
pub(super) enum Allocated {
    /// Chunks with space for all blocks.
    Chunks(Vec<Chunk>),
    /// Nothing allocated: the data file of `path` must first grow to `end` bytes.
    Grow {
        /// Number of the path.
        path: usize,
        /// Required length of the data file, in bytes.
        end: u64,
    },
}

/// Allocates chunks for the requested blocks, as `placement` says. `home` is the extent's current path.
pub(super) fn allocate(
    state: &mut TierState,
    request: AllocationRequest,
    placement: &ExtentPlacement,
    home: Option<u32>,
) -> Result<Allocated> {
    let parts: Vec<(Option<u32>, u32)> = match placement {
        ExtentPlacement::Auto => vec![(home, request.count)],
        ExtentPlacement::On(path) => vec![(Some(*path), request.count)],
        ExtentPlacement::Striped(parts) => parts.iter().map(|(path, count)| (Some(*path), *count)).collect(),
    };
    let mut chunks = Vec::new();
    let mut first = request.first;
    let end = request.first + request.count;
    for (number, (path, count)) in parts.iter().enumerate() {
        let last = number + 1 == parts.len();
        let count = if last { end - first } else { (*count).min(end - first) };
        match allocate_part(state, AllocationRequest { first, count, ..request }, *path) {
            Ok(Allocated::Chunks(more)) => chunks.extend(more),
            other => {
                free_chunks(state, request.shape, &chunks);
                return other;
            }
        }
        first += count;
    }
    Ok(Allocated::Chunks(chunks))
}

/// Frees the space of chunks.
pub(super) fn free_chunks(state: &mut TierState, shape: &Shape, chunks: &[Chunk]) {
    chunks.iter().for_each(|chunk| state.free((chunk.path, chunk.offset, chunk.stored(shape))));
}

fn allocate_part(
    state: &mut TierState,
    request: AllocationRequest,
    preferred: Option<u32>,
) -> Result<Allocated> {
    let mut chunks = Vec::new();
    let (mut first, end) = (request.first, request.first + request.count);
    for path in order(state, request.excluded, preferred) {
        while first < end {
            match take(state, path, AllocationRequest { first, count: end - first, ..request }) {
                ChunkAllocation::Chunk(chunk) => {
                    first += chunk.count;
                    chunks.push(chunk);
                }
                ChunkAllocation::Nothing => break,
                ChunkAllocation::Grow(end) => {
                    free_chunks(state, request.shape, &chunks);
                    return Ok(Allocated::Grow { path, end });
                }
            }
        }
    }
    if first == end {
        return Ok(Allocated::Chunks(chunks));
    }
    free_chunks(state, request.shape, &chunks);
    let bytes = header_bytes(request.count.into()) + request.shape.stored(request.first, request.count);
    Err(no_room(state, bytes))
}

/// Healthy paths that are not excluded: the preferred one, then the others with the least used space first.
fn order(state: &TierState, excluded: &[bool], preferred: Option<u32>) -> Vec<usize> {
    let usable = |path: &usize| state.paths[*path].health == Health::Healthy && !excluded[*path];
    let mut order: Vec<usize> = (0..state.paths.len()).filter(usable).collect();
    let used = |path: &usize| {
        let space = &state.paths[*path].space;
        space.end() - space.free()
    };
    order.sort_by_key(|path| (preferred != Some(*path as u32), used(path)));
    order
}

/// Result of an allocation on one path.
enum ChunkAllocation {
    Chunk(Chunk),
    Nothing,
    /// All blocks fit after the file has grown to this length.
    Grow(u64),
}

/// Allocates one chunk on a path. It holds all blocks if they fit, also after growing the file. Otherwise it holds as
/// many as fit into the longest free range.
fn take(state: &mut TierState, path: usize, request: AllocationRequest) -> ChunkAllocation {
    let AllocationRequest { shape, first, count, .. } = request;
    let chunk = |offset, count| Chunk { path: path as u32, offset, first, count, header_checksum: 0 };
    let bytes = header_bytes(count.into()) + shape.stored(first, count);
    let space = &mut state.paths[path].space;
    if let Some(offset) = space.take(bytes) {
        return ChunkAllocation::Chunk(chunk(offset, count));
    }
    if let Some(end) = space.end_for(bytes) {
        return ChunkAllocation::Grow(end);
    }
    let fitting = shape.fitting(first, space.longest()).min(count);
    if fitting == 0 {
        return ChunkAllocation::Nothing;
    }
    let bytes = header_bytes(fitting.into()) + shape.stored(first, fitting);
    space
        .take(bytes)
        .map_or(ChunkAllocation::Nothing, |offset| ChunkAllocation::Chunk(chunk(offset, fitting)))
}

fn no_room(state: &TierState, bytes: u64) -> Error {
    let message = state.paths.iter().map(|path| {
        let room = path.space.room();
        let room = if room > 1 << 60 { "no limit".to_string() } else { format!("{room} bytes free") };
        match path.health {
            Health::Healthy => format!("{} has {room}", path.name),
            health => format!("{} is {}", path.name, format!("{health:?}").to_lowercase()),
        }
    });
    let first = state.paths.first().map_or_else(String::new, |path| path.name.clone());
    let detail = format!(
        "no path has room; free space, or raise the limit of a path: {}",
        message.collect::<Vec<_>>().join(", ")
    );
    IoError::about(IoKind::NoSpace, Doing::Preallocating, first).at(0, bytes).because(detail).into()
}
