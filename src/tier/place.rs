//! Where a write goes: chunks on paths, with places taken for them.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::extent::{Chunk, Shape};
use super::layout::header_bytes;
use super::path::Path;
use super::state::{Health, State};
use crate::error::{Error, IoError, IoKind, Result};

/// Where the caller wants an extent.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Placement {
    /// Where it lies, or where the least lies; elsewhere if that path is not healthy or full.
    #[default]
    Auto,
    /// On the path with this number; elsewhere only if that one is not healthy or full.
    On(u32),
    /// Over several paths: their numbers, and how many blocks each takes, in order. Blocks left over go to the last.
    Striped(Vec<(u32, u32)>),
}

/// Blocks that want a place.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted<'a> {
    pub(super) shape: &'a Shape,
    pub(super) first: u32,
    pub(super) count: u32,
    /// Paths that this write is not to use.
    pub(super) excluded: &'a [bool],
}

/// Chunks for a whole extent, as `placement` says. Nothing is taken if it fails.
pub(super) fn place(
    state: &mut State,
    paths: &[Option<Arc<Path>>],
    wanted: Wanted,
    placement: &Placement,
    home: Option<u32>,
) -> Result<Vec<Chunk>> {
    let parts: Vec<(Option<u32>, u32)> = match placement {
        Placement::Auto => vec![(home, wanted.count)],
        Placement::On(path) => vec![(Some(*path), wanted.count)],
        Placement::Striped(parts) => parts.iter().map(|(path, count)| (Some(*path), *count)).collect(),
    };
    if let Some((Some(path), _)) =
        parts.iter().find(|(path, _)| path.is_some_and(|p| p as usize >= paths.len()))
    {
        return Err(Error::invalid("placement", format!("there is no path {path}")));
    }
    let mut chunks = Vec::new();
    let mut first = wanted.first;
    let end = wanted.first + wanted.count;
    for (number, (path, count)) in parts.iter().enumerate() {
        let last = number + 1 == parts.len();
        let count = if last { end - first } else { (*count).min(end - first) };
        match place_part(state, paths, Wanted { first, count, ..wanted }, *path) {
            Ok(more) => chunks.extend(more),
            Err(error) => {
                give_back(state, wanted.shape, &chunks);
                return Err(error);
            }
        }
        first += count;
    }
    Ok(chunks)
}

/// Gives the places of chunks back.
pub(super) fn give_back(state: &mut State, shape: &Shape, chunks: &[Chunk]) {
    chunks.iter().for_each(|chunk| state.free((chunk.path, chunk.offset, chunk.stored(shape))));
}

fn place_part(
    state: &mut State,
    paths: &[Option<Arc<Path>>],
    wanted: Wanted,
    preferred: Option<u32>,
) -> Result<Vec<Chunk>> {
    let mut chunks = Vec::new();
    let mut full = None;
    let (mut first, end) = (wanted.first, wanted.first + wanted.count);
    for path in order(state, wanted.excluded, preferred) {
        while first < end {
            match take(state, &paths[path], path, Wanted { first, count: end - first, ..wanted }) {
                Ok(Some(chunk)) => {
                    first += chunk.count;
                    chunks.push(chunk);
                }
                Ok(None) => break,
                Err(error) if error.io_kind() == Some(IoKind::NoSpace) => {
                    state.paths[path].space.full();
                    full = Some(error);
                }
                Err(error) => {
                    state.mark(path, Health::Failed, &error.to_string());
                    full = Some(error);
                    break;
                }
            }
        }
    }
    if first == end {
        return Ok(chunks);
    }
    give_back(state, wanted.shape, &chunks);
    let bytes = header_bytes(wanted.count.into()) + wanted.shape.stored(wanted.first, wanted.count);
    Err(full.unwrap_or_else(|| no_room(state, bytes)))
}

/// Healthy paths: the preferred one, then those with the least on them.
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

/// One chunk on a path: all the blocks if they fit, also by making the file longer, else as many as the longest free
/// part holds. `None` if there is room for none.
fn take(state: &mut State, files: &Option<Arc<Path>>, path: usize, wanted: Wanted) -> Result<Option<Chunk>> {
    let Wanted { shape, first, count, .. } = wanted;
    let chunk = |offset, count| Some(Chunk { path: path as u32, offset, first, count, header_sum: 0 });
    let bytes = header_bytes(count.into()) + shape.stored(first, count);
    let space = &mut state.paths[path].space;
    if let Some(offset) = space.take(bytes) {
        return Ok(chunk(offset, count));
    }
    if let (Some(end), Some(files)) = (space.end_for(bytes), files) {
        files.allocate(end)?;
        space.grew(end);
        return Ok(space.take(bytes).and_then(|offset| chunk(offset, count)));
    }
    let fitting = shape.fitting(first, space.longest()).min(count);
    if fitting == 0 {
        return Ok(None);
    }
    let bytes = header_bytes(fitting.into()) + shape.stored(first, fitting);
    Ok(space.take(bytes).and_then(|offset| chunk(offset, fitting)))
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
