//! Placement of a write: allocates chunks on paths.
//!
//! Invariants:
//! - No function here waits for a device, because the tier's lock is held. If a data file must grow first, the caller
//!   gets its path and length, extends the file without the lock, and asks again.
//! - A call allocates space for all requested blocks, or for none.
#![forbid(unsafe_code)]

use super::extent::{Chunk, Shape};
use super::health::Health;
use super::layout::header_bytes;
use super::state::State;
use crate::error::{Error, IoError, IoKind, Result};

/// Placement that the caller requests for an extent.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Placement {
    /// The extent's current path, or the path with the least data for a new extent. Another path if this one is full or
    /// not healthy.
    #[default]
    Auto,
    /// The path with this number. Another path only if this one is full or not healthy.
    On(u32),
    /// Several paths in order: path number and number of blocks. The last path also takes the remaining blocks.
    Striped(Vec<(u32, u32)>),
}

impl Placement {
    /// Fails if the placement names an unknown path, or no path for an extent with blocks.
    pub(super) fn check(&self, paths: usize, blocks: u32) -> Result<()> {
        let named: Vec<u32> = match self {
            Placement::Auto => Vec::new(),
            Placement::On(path) => vec![*path],
            Placement::Striped(parts) if parts.is_empty() && blocks > 0 => {
                return Err(Error::invalid("path_blocks", format!("gives no path any of {blocks} blocks")));
            }
            Placement::Striped(parts) => parts.iter().map(|(path, _)| *path).collect(),
        };
        match named.into_iter().find(|path| *path as usize >= paths) {
            Some(path) => Err(Error::invalid("placement", format!("there is no path {path}"))),
            None => Ok(()),
        }
    }
}

/// Blocks to be placed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted<'a> {
    pub(super) shape: &'a Shape,
    pub(super) first: u32,
    pub(super) count: u32,
    /// Paths that this write must not use, by number.
    pub(super) excluded: &'a [bool],
}

/// Result of a placement.
#[derive(Debug)]
pub(super) enum Found {
    /// Chunks with space for all blocks.
    Chunks(Vec<Chunk>),
    /// Nothing allocated: the data file of `path` must first grow to `end` bytes.
    Longer {
        /// Number of the path.
        path: usize,
        /// Required length of the data file, in bytes.
        end: u64,
    },
}

/// Allocates chunks for the wanted blocks, as `placement` says. `home` is the extent's current path.
pub(super) fn place(
    state: &mut State,
    wanted: Wanted,
    placement: &Placement,
    home: Option<u32>,
) -> Result<Found> {
    let parts: Vec<(Option<u32>, u32)> = match placement {
        Placement::Auto => vec![(home, wanted.count)],
        Placement::On(path) => vec![(Some(*path), wanted.count)],
        Placement::Striped(parts) => parts.iter().map(|(path, count)| (Some(*path), *count)).collect(),
    };
    let mut chunks = Vec::new();
    let mut first = wanted.first;
    let end = wanted.first + wanted.count;
    for (number, (path, count)) in parts.iter().enumerate() {
        let last = number + 1 == parts.len();
        let count = if last { end - first } else { (*count).min(end - first) };
        match place_part(state, Wanted { first, count, ..wanted }, *path) {
            Ok(Found::Chunks(more)) => chunks.extend(more),
            other => {
                give_back(state, wanted.shape, &chunks);
                return other;
            }
        }
        first += count;
    }
    Ok(Found::Chunks(chunks))
}

/// Frees the space of chunks.
pub(super) fn give_back(state: &mut State, shape: &Shape, chunks: &[Chunk]) {
    chunks.iter().for_each(|chunk| state.free((chunk.path, chunk.offset, chunk.stored(shape))));
}

fn place_part(state: &mut State, wanted: Wanted, preferred: Option<u32>) -> Result<Found> {
    let mut chunks = Vec::new();
    let (mut first, end) = (wanted.first, wanted.first + wanted.count);
    for path in order(state, wanted.excluded, preferred) {
        while first < end {
            match take(state, path, Wanted { first, count: end - first, ..wanted }) {
                Taken::Chunk(chunk) => {
                    first += chunk.count;
                    chunks.push(chunk);
                }
                Taken::Nothing => break,
                Taken::Longer(end) => {
                    give_back(state, wanted.shape, &chunks);
                    return Ok(Found::Longer { path, end });
                }
            }
        }
    }
    if first == end {
        return Ok(Found::Chunks(chunks));
    }
    give_back(state, wanted.shape, &chunks);
    let bytes = header_bytes(wanted.count.into()) + wanted.shape.stored(wanted.first, wanted.count);
    Err(no_room(state, bytes))
}

/// Healthy paths that are not excluded: the preferred one, then the others with the least used space first.
fn order(state: &State, excluded: &[bool], preferred: Option<u32>) -> Vec<usize> {
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
enum Taken {
    Chunk(Chunk),
    Nothing,
    /// All blocks fit after the file has grown to this length.
    Longer(u64),
}

/// Allocates one chunk on a path. It holds all blocks if they fit, also after growing the file. Otherwise it holds as
/// many as fit into the longest free range.
fn take(state: &mut State, path: usize, wanted: Wanted) -> Taken {
    let Wanted { shape, first, count, .. } = wanted;
    let chunk = |offset, count| Chunk { path: path as u32, offset, first, count, header_sum: 0 };
    let bytes = header_bytes(count.into()) + shape.stored(first, count);
    let space = &mut state.paths[path].space;
    if let Some(offset) = space.take(bytes) {
        return Taken::Chunk(chunk(offset, count));
    }
    if let Some(end) = space.end_for(bytes) {
        return Taken::Longer(end);
    }
    let fitting = shape.fitting(first, space.longest()).min(count);
    if fitting == 0 {
        return Taken::Nothing;
    }
    let bytes = header_bytes(fitting.into()) + shape.stored(first, fitting);
    space.take(bytes).map_or(Taken::Nothing, |offset| Taken::Chunk(chunk(offset, fitting)))
}

fn no_room(state: &State, bytes: u64) -> Error {
    let words = state.paths.iter().map(|path| {
        let room = path.space.room();
        let room = if room > 1 << 60 { "no limit".to_string() } else { format!("{room} bytes of room") };
        match path.health {
            Health::Healthy => format!("{} has {room}", path.name),
            health => format!("{} is {}", path.name, format!("{health:?}").to_lowercase()),
        }
    });
    IoError {
        kind: IoKind::NoSpace,
        doing: "preallocating",
        path: state.paths.first().map_or_else(String::new, |path| path.name.clone()),
        offset: 0,
        bytes,
        errno: 0,
        detail: format!("no path has room: {}", words.collect::<Vec<_>>().join(", ")),
    }
    .into()
}
