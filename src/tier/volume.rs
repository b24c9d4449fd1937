//! One path: its storage, its I/O engine, and its pair of superblocks. An engine of its own, so that a slow path does not
//! delay the queue of another.
//!
//! Invariant: memory that a transfer still uses is not handed out again, even if its owner gave it up.
#![forbid(unsafe_code)]

use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::bucket;
use super::directory::{self, DirStorage};
use super::extent::PAGE;
use super::format::{HEADER_BYTES, Superblock, SuperblockHeader, is_chunk};
use super::options::{Mode, PathLocation, TierOptions};
use super::paths::Stamp;
use super::reading;
#[cfg(test)]
use super::sim_storage::SimStorage;
use super::storage::{
    DATA, FilePair, MemoryStorage, NamedFile, PathFiles, SUPERBLOCKS, Storage, within_timeout,
};
use crate::error::{Doing, Error, IoKind, Result, TierError, TierKind};
use crate::io::engine::Engine;
use crate::io::file::File;
use crate::io::options::{Options as IoOptions, Request, Target, TurnOptions};
use crate::pool::region::{Backing, Region};
use crate::pool::transfer_buffer::TransferBuffer;
use crate::sys::span::Span;
use crate::sys::sync::{Guard, Lock};

/// Bytes that are allocated for a superblock file at first.
const SUPERBLOCK_ROOM: u64 = 64 << 10;

/// Files and I/O engine of a path.
pub struct Volume {
    // Dropped before the files. Operations that the engine gave up on keep their files, and with them the storage's
    // lock.
    pub(super) engine: Engine,
    pub(super) data: FilePair,
    superblocks: [FilePair; 2],
    /// Bytes that are allocated in both superblock files.
    superblock_room: AtomicU64,
    pool: Arc<ScratchPool>,
    /// Held while a thread extends the data file.
    growing: Lock<()>,
    // Dropped last: it closes the files.
    files: PathFiles,
}

impl Debug for Volume {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_tuple("Volume").field(&self.files).finish()
    }
}

/// Content of a superblock copy.
#[derive(Debug)]
pub(super) enum SuperblockCopy {
    /// Never written.
    Blank,
    /// A valid superblock.
    Valid(Box<Superblock>),
    /// Corrupt; the text says why. The stamp is that of the header, if the header is intact.
    Corrupt(String, Option<Stamp>),
}

impl Volume {
    pub(super) fn open(storage: Box<dyn Storage>, engine: Engine) -> Result<Volume> {
        let superblocks = [storage.open(SUPERBLOCKS[0])?, storage.open(SUPERBLOCKS[1])?];
        let (data, pool) = (storage.open(DATA)?, Arc::default());
        let (superblock_room, growing) = (AtomicU64::new(0), Lock::default());
        let pairs = [(SUPERBLOCKS[0], &superblocks[0]), (SUPERBLOCKS[1], &superblocks[1]), (DATA, &data)];
        // The handles for writing identify the files.
        let files = pairs.map(|(name, pair)| (name, Arc::clone(&pair.writer))).to_vec();
        let files = PathFiles::new(Arc::from(storage), files, engine.options().io_timeout);
        Ok(Volume { engine, data, superblocks, superblock_room, pool, growing, files })
    }

    /// Error about a block that is stored at `offset` of the data file.
    pub(super) fn corrupt_block(&self, extent: &str, place: (u32, u64), detail: String) -> Error {
        TierError::corrupt_block(self.data_name(), extent, place, detail)
    }

    /// Result of a call on the storage, or `Deadline`. Fails at once if the device did not respond to an earlier
    /// transfer.
    fn call<T: Send + 'static>(
        &self,
        doing: Doing,
        work: impl FnOnce(&dyn Storage, &[NamedFile]) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.engine.check_device(&self.data.writer, doing)?;
        self.files.call(doing, work)
    }

    /// Name of the path, for messages.
    pub fn name(&self) -> String {
        self.files.name().to_string()
    }

    /// The data file, to read from it.
    pub(super) fn data_file(&self) -> &Arc<File> {
        &self.data.reader
    }

    /// False if the data is lost when the process ends.
    pub fn lasts(&self) -> bool {
        self.files.lasts()
    }

    /// Name of the data file, for messages.
    pub fn data_name(&self) -> &str {
        self.data.reader.name()
    }

    pub(super) fn data_len(&self) -> Result<u64> {
        Ok(self.call(Doing::Opening, |storage, _| storage.len(DATA))?.unwrap_or(0))
    }

    /// Allocates bytes `from..end` of the data file on the device.
    pub(super) fn allocate(&self, from: u64, end: u64) -> Result<()> {
        self.allocate_file(&self.data, from, end)
    }

    /// Allocates through the engine, whose I/O timeout bounds the wait for a device that does not answer. A call with the
    /// same timeout looks up the free space.
    fn allocate_file(&self, pair: &FilePair, from: u64, end: u64) -> Result<()> {
        let file = Arc::clone(&pair.writer);
        self.call(Doing::Preallocating, move |_, _| file.check_room(from, end))?;
        let begun = self.engine.allocate(&pair.writer, from, end)?;
        let file = Arc::clone(&pair.writer);
        match self.engine.wait(begun, None) {
            Err(error) if error.is_full() => {
                self.call(Doing::Preallocating, move |_, _| Err(file.with_free_space(error)))
            }
            ended => ended.map(|_| ()),
        }
    }

    /// Lock that a thread holds while it extends the data file.
    pub(super) fn growing(&self) -> Guard<'_, ()> {
        self.growing.lock()
    }

    /// Zeroed memory for a header or a superblock.
    pub(super) fn scratch(&self, bytes: usize) -> Result<Scratch> {
        Scratch::from_pool(&self.pool, bytes)
    }

    pub(super) fn sync_directory(&self) -> Result<()> {
        self.call(Doing::Syncing, |storage, _| storage.sync())
    }

    pub(super) fn read(&self, offset: u64, buffer: TransferBuffer) -> Result<u64> {
        self.files.responds(Doing::Reading)?;
        self.engine.read(request(&self.data.reader, offset, buffer))
    }

    pub(super) fn write(&self, offset: u64, buffer: TransferBuffer) -> Result<u64> {
        self.files.responds(Doing::Writing)?;
        self.files.storage()?.check_lease()?;
        self.engine.write(request(&self.data.writer, offset, buffer))
    }

    pub(super) fn wait(&self, handle: u64, timeout: Option<Duration>) -> Result<u64> {
        self.engine.wait(handle, timeout)
    }

    /// Waits for a transfer that was started.
    pub(super) fn ended(&self, started: Result<u64>) -> Result<()> {
        self.wait(started?, None).map(|_| ())
    }

    /// True if no operation is in flight.
    #[cfg(test)]
    pub(super) fn quiet(&self) -> bool {
        self.engine.traffic().map_or(true, |traffic| traffic.pending == 0)
    }

    /// Starts a sync of the data file.
    pub(super) fn sync_data(&self) -> Result<u64> {
        self.files.responds(Doing::Syncing)?;
        self.engine.sync(Target::File(Arc::clone(&self.data.writer)), None)
    }

    /// Allocates at least twice `bytes` for each superblock file, so that a full disk does not stop a later commit.
    pub(super) fn reserve_superblocks(&self, bytes: u64) -> Result<()> {
        let room = (2 * bytes).next_power_of_two().max(SUPERBLOCK_ROOM);
        self.superblocks.iter().try_for_each(|pair| self.allocate_file(pair, 0, room))?;
        self.superblock_room.store(room, Ordering::Relaxed);
        Ok(())
    }

    /// Starts to write a superblock into a copy.
    pub(super) fn write_superblock(&self, copy: usize, bytes: TransferBuffer) -> Result<u64> {
        self.files.responds(Doing::Writing)?;
        let pair = &self.superblocks[copy];
        let len = bytes.len() as u64;
        if len > self.superblock_room.load(Ordering::Relaxed) {
            // A nearly full disk may still have space for this superblock.
            self.reserve_superblocks(len).or_else(|_| self.allocate_file(pair, 0, len))?;
        }
        self.files.storage()?.check_lease()?;
        self.engine.write(request(&pair.writer, 0, bytes))
    }

    /// Starts a sync of a superblock copy.
    pub(super) fn sync_superblock(&self, copy: usize) -> Result<u64> {
        self.files.responds(Doing::Syncing)?;
        self.engine.sync(Target::File(Arc::clone(&self.superblocks[copy].writer)), None)
    }

    /// Name of a superblock file, for messages.
    pub(super) fn superblock_name(&self, copy: usize) -> &str {
        self.superblocks[copy].reader.name()
    }

    /// Reads a superblock copy. Only device errors are returned as errors; corrupt bytes are part of the result.
    pub(super) fn read_superblock(&self, copy: usize) -> Result<SuperblockCopy> {
        let reader = &self.superblocks[copy].reader;
        let read = |bytes: usize| -> Result<Option<Scratch>> {
            self.files.responds(Doing::Reading)?;
            let scratch = self.scratch(bytes)?;
            let outcome = self.engine.read(request(reader, 0, scratch.transfer()));
            match outcome.and_then(|handle| self.wait(handle, None)) {
                Ok(_) => Ok(Some(scratch)),
                Err(error) if error.io_kind() == Some(IoKind::ShortFile) => Ok(None),
                Err(error) => Err(error),
            }
        };
        let Some(header) = read(HEADER_BYTES)? else { return self.read_short_superblock(copy) };
        let header = match header
            .span()
            .with_bytes(|bytes| (bytes.iter().all(|b| *b == 0), SuperblockHeader::parse(bytes)))
        {
            (true, _) => return Ok(SuperblockCopy::Blank),
            (_, Err(message)) => return Ok(SuperblockCopy::Corrupt(message, None)),
            (_, Ok(header)) => header,
        };
        let all = (HEADER_BYTES as u64 + header.table_bytes).next_multiple_of(PAGE);
        let truncated = SuperblockCopy::Corrupt("its table is truncated".to_string(), Some(header.stamp));
        // Checked before the allocation, because the length in a header may be arbitrary.
        let len = self.call(Doing::Opening, move |storage, _| storage.len(SUPERBLOCKS[copy]))?;
        if len.is_none_or(|len| len < all) {
            return Ok(truncated);
        }
        Ok(match read(all as usize)? {
            None => truncated,
            Some(bytes) => match bytes.span().with_bytes(Superblock::parse) {
                Ok(superblock) => SuperblockCopy::Valid(Box::new(superblock)),
                Err(message) => SuperblockCopy::Corrupt(message, Some(header.stamp)),
            },
        })
    }

    /// A copy whose file is shorter than a header. The next writer of the file extends it, and then finds this stamp.
    fn read_short_superblock(&self, copy: usize) -> Result<SuperblockCopy> {
        let len = self.call(Doing::Opening, move |storage, _| storage.len(SUPERBLOCKS[copy]))?.unwrap_or(0);
        let len = len.min(HEADER_BYTES as u64) as usize;
        let scratch = self.scratch(HEADER_BYTES)?;
        scratch.span().write(&[0; HEADER_BYTES]);
        if len > 0 {
            let there = scratch.transfer().part(0, len);
            let read = self.engine.read(request(&self.superblocks[copy].reader, 0, there));
            match read.and_then(|handle| self.wait(handle, None)) {
                // Another process has truncated the file meanwhile. What is not there is zeros.
                Err(error) if error.io_kind() == Some(IoKind::ShortFile) => {}
                outcome => drop(outcome?),
            }
        }
        Ok(scratch.span().with_bytes(|bytes| match SuperblockHeader::parse(bytes) {
            _ if bytes.iter().all(|byte| *byte == 0) => SuperblockCopy::Blank,
            parsed => {
                let message = format!("it is truncated to {len} bytes");
                SuperblockCopy::Corrupt(message, parsed.ok().map(|header| header.stamp))
            }
        }))
    }

    /// Starts to read the header of a superblock copy.
    pub(super) fn read_stamp(&self, copy: usize) -> Result<(u64, Scratch)> {
        self.files.responds(Doing::Reading)?;
        let scratch = self.scratch(HEADER_BYTES)?;
        let handle = self.engine.read(request(&self.superblocks[copy].reader, 0, scratch.transfer()))?;
        Ok((handle, scratch))
    }

    /// The stamp that [`Volume::read_stamp`] reads; `None` if the copy is blank or corrupt.
    pub(super) fn stamp(&self, (handle, scratch): (u64, Scratch)) -> Result<Option<Stamp>> {
        match self.wait(handle, None) {
            Ok(_) => Ok(scratch.span().with_bytes(SuperblockHeader::parse).ok().map(|header| header.stamp)),
            Err(error) if error.io_kind() == Some(IoKind::ShortFile) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Fails with `Fenced` if another process claimed the files since they were opened.
    pub(super) fn check_owner(&self) -> Result<()> {
        self.files.storage()?.check_owner()
    }

    /// For each volume the length of the data file, 0 if it is not known. Fails if the files no longer have their names, if
    /// the lock was lost, or if the path does not respond. All paths share one I/O timeout.
    pub(super) fn check_all(paths: &[&Volume]) -> Vec<Result<u64>> {
        let known: Vec<Result<()>> =
            paths.iter().map(|path| path.engine.check_device(&path.data.writer, Doing::Opening)).collect();
        let asked = paths.iter().zip(&known).filter(|(_, known)| known.is_ok()).map(|(path, _)| &path.files);
        let checked = PathFiles::call_all(Doing::Opening, &asked.collect::<Vec<_>>(), |storage, files| {
            storage.check(files)?;
            Ok(storage.len(DATA).ok().flatten().unwrap_or(0))
        });
        let mut checked = checked.into_iter();
        known.into_iter().map(|known| known.and_then(|()| checked.next().unwrap_or(Ok(0)))).collect()
    }

    /// Fails with `Format` if the path holds chunks of a tier although both superblocks are blank. A superblock is
    /// durable before the first chunk is written, so the superblocks were lost. Only an interrupted removal leaves
    /// chunks without superblocks.
    pub(super) fn check_blank(&self) -> Result<()> {
        let mut left = self.files.finishes_removal();
        for name in SUPERBLOCKS {
            left |= self.call(Doing::Opening, move |storage, _| storage.len(name))?.unwrap_or(0) > 0;
        }
        if !left || !self.holds_chunk()? {
            return Ok(());
        }
        let message = "its superblocks are blank, but it has data of a tier, which a new tier would \
                       overwrite; restore the superblocks, or remove the tier with collect";
        Err(TierError::at(TierKind::Format, self.data_name(), message))
    }

    /// True if a page of the data file begins with a chunk header. Reads the file up to the first one, and skips holes.
    fn holds_chunk(&self) -> Result<bool> {
        const PART: u64 = 1 << 20;
        let (bytes, mut at) = (self.data_len()?, 0);
        let part = self.scratch(PART as usize)?;
        loop {
            let reader = Arc::clone(&self.data.reader);
            let found = self.call(Doing::Reading, move |_, _| Ok(reader.next_data(at)))?;
            let Some(from) = found.filter(|from| from + PAGE <= bytes) else { return Ok(false) };
            let from = from - from % PAGE;
            let buffer = part.transfer().part(0, PART.min(bytes - from) as usize);
            let span = buffer.span();
            match self.read(from, buffer).and_then(|handle| self.wait(handle, None)) {
                Ok(_) if span.with_bytes(|bytes| bytes.chunks(PAGE as usize).any(is_chunk)) => {
                    return Ok(true);
                }
                Ok(_) => at = from + span.len() as u64,
                Err(error) if error.io_kind() == Some(IoKind::ShortFile) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
    }

    /// Removes the files of all paths. Returns the first error, after all were tried: `Busy` if an operation is still
    /// in flight, `PathMissing` if a file has another name now, `Deadline` if the path does not respond.
    pub(super) fn remove_all(volumes: Vec<Volume>) -> Result<()> {
        let mut outcome = Ok(());
        let mut ready = Vec::new();
        for volume in volumes {
            match volume.engine.close(None) {
                Err(error) if error.io_kind() == Some(IoKind::PathFailed) => {
                    outcome = outcome.and(Err(error))
                }
                // Errors of operations that no caller waited for are ignored.
                _ => ready.push(volume.taken_apart()),
            }
        }
        let removed = PathFiles::remove_all(ready);
        outcome.and(removed)
    }

    /// Closes the files of all paths within `limit` and the I/O timeout, whichever is shorter. Their engines are closed.
    pub(super) fn close_all(limit: Option<Duration>, paths: Vec<Volume>) -> Result<()> {
        PathFiles::close_all(limit, paths.into_iter().map(Volume::taken_apart).collect())
    }

    /// The files, and what uses them.
    fn taken_apart(self) -> (PathFiles, (Engine, FilePair, [FilePair; 2])) {
        let Volume { engine, data, superblocks, files, .. } = self;
        (files, (engine, data, superblocks))
    }
}

pub(super) fn request(
    file: &Arc<crate::io::file::File>,
    offset: u64,
    buffer: TransferBuffer,
) -> Request<'static> {
    Request { target: Target::File(Arc::clone(file)), offset, buffer, deadline: None }
}

/// Claims the path of an options entry and opens it. `None` if it does not exist and `make` is false. The I/O timeout
/// bounds each part of the open.
pub(super) fn claim(options: &TierOptions, number: usize, make: bool) -> Result<Option<Volume>> {
    // A tier allocates its files itself. Memory belongs to this process alone, and an object store serves all processes at
    // once.
    let location = &options.paths[number].location;
    let turns = if location.directory().is_some() { options.io.turns } else { TurnOptions::NONE };
    let io = IoOptions { preallocate: false, turns, ..options.io };
    let (storage, engine): (Box<dyn Storage>, Engine) = match location {
        PathLocation::Directory(base) if options.mode == Mode::Read => {
            let (base, owner, place) = (base.clone(), options.owner.clone(), options.owner.below(base));
            return within_timeout(io.io_timeout, Doing::Opening, &place, move || {
                let found = reading::open(&base, &owner, io.direct)?;
                found.map(|storage| Volume::open(Box::new(storage), Engine::open(io)?)).transpose()
            });
        }
        PathLocation::Directory(base) => {
            let Some(directory) = directory::acquire(io.io_timeout, base, &options.owner, make)? else {
                return Ok(None);
            };
            let place = directory.path().to_path_buf();
            return within_timeout(io.io_timeout, Doing::Opening, &place, move || {
                let storage = DirStorage::new(directory, io.direct, io.io_timeout);
                Volume::open(Box::new(storage), Engine::open(io)?).map(Some)
            });
        }
        // Each request has a timeout, and so has each listing.
        PathLocation::Bucket(address) => match bucket::open(address, &options.owner, io, make)? {
            Some(opened) => opened,
            None => return Ok(None),
        },
        PathLocation::Memory(_) if !make => return Ok(None),
        PathLocation::Memory(node) => (Box::new(MemoryStorage::new(*node)?), Engine::open(io)?),
        #[cfg(test)]
        PathLocation::Store(store) => match bucket::open_in_memory(store, &options.owner, io, make)? {
            Some(opened) => opened,
            None => return Ok(None),
        },
        #[cfg(test)]
        PathLocation::Simulated(disk, faults) => {
            let storage = SimStorage::acquire(disk, number as u64, faults.stop)?;
            let key = storage.key();
            let sim = crate::io::sim::Sim::new(disk, faults.clone());
            return within_timeout(io.io_timeout, Doing::Opening, &key, move || {
                Volume::open(Box::new(storage), Engine::open_simulated(io, sim)?).map(Some)
            });
        }
    };
    Volume::open(storage, engine).map(Some)
}

/// A memory region. When dropped, it is retired or returned to its pool; transfers in flight keep it mapped.
#[derive(Debug)]
pub struct Scratch {
    region: Arc<Region>,
    bytes: usize,
    pool: Option<Arc<ScratchPool>>,
}

/// Cache of small regions. Each chunk that is transferred needs memory for its header. Mapping and unmapping memory
/// interrupts each core that the process runs on, and retiring a region wakes every engine.
#[derive(Debug, Default)]
pub struct ScratchPool(Lock<Vec<Arc<Region>>>);

/// Length of each cached region in bytes, and maximum number of cached regions.
const CACHED_BYTES: usize = 8 << 10;
const MAX_CACHED: usize = 64;
const SMALL: Backing = Backing { huge: false, lock: false, node: None };

impl Scratch {
    /// Allocates zeroed memory of `bytes` bytes.
    pub fn new(bytes: usize) -> Result<Scratch> {
        let backing = Backing { huge: bytes >= 2 << 20, ..SMALL };
        Ok(Scratch { region: Region::open(bytes.max(1), backing)?, bytes, pool: None })
    }

    /// Zeroed memory of `bytes` bytes, from the pool if it is small.
    pub fn from_pool(pool: &Arc<ScratchPool>, bytes: usize) -> Result<Scratch> {
        if bytes > CACHED_BYTES {
            return Scratch::new(bytes);
        }
        let kept = pool.0.lock().pop();
        let region = match kept {
            Some(region) => region,
            None => Region::open(CACHED_BYTES, SMALL)?,
        };
        region.span().write(&[0; CACHED_BYTES]);
        Ok(Scratch { region, bytes, pool: Some(Arc::clone(pool)) })
    }

    /// Address and length of the whole memory.
    pub fn span(&self) -> Span {
        self.region.span().part(0, self.bytes)
    }

    /// The whole memory, for a transfer.
    pub fn transfer(&self) -> TransferBuffer {
        TransferBuffer::pinned(&self.region, 0, self.bytes)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A forked child must not take this lock: a thread of the parent may hold it.
        if let Some(pool) = self.pool.take()
            && self.region.is_own()
            && !self.region.leased(self.region.span())
        {
            let mut kept = pool.0.lock();
            if kept.len() < MAX_CACHED {
                return kept.push(Arc::clone(&self.region));
            }
        }
        self.region.retire();
    }
}

impl Drop for ScratchPool {
    fn drop(&mut self) {
        let kept = self.0.get_mut();
        kept.drain(..).for_each(|region| region.retire());
    }
}

#[cfg(test)]
mod tests;
