//! One path: its files, and its own I/O engine, so that a slow path does not delay the queue of another.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::directory::{ClaimStep, DATA, Directory, Owner, PendingClaim, SUPERBLOCKS};
use super::layout::{PAGE, is_chunk};
use super::options::{PathLocation, TierOptions};
use super::scratch::{Scratch, ScratchPool};
use super::storage::{self, DirStorage, FilePair, MemoryStorage, Storage};
use super::superblock::{HEADER_BYTES, Stamp, Superblock, SuperblockHeader};
use super::turns::gate::{DataTransfer, Gate};
use super::waiting::{deadline_after, timed_out};
use crate::error::{IoKind, Result, TierError, TierKind};
use crate::io::engine::Engine;
use crate::io::file::File;
use crate::io::options::{Options as IoOptions, Request, Target};
use crate::pool::transfer_buffer::TransferBuffer;

/// Bytes that are allocated for a superblock file at first.
const SUPERBLOCK_ROOM: u64 = 64 << 10;

/// Files and I/O engine of a path.
pub struct TierPath {
    // Dropped before the storage. Operations that the engine gave up on keep their files, and with them the storage's
    // lock.
    pub(super) engine: Engine,
    storage: Box<dyn Storage>,
    pub(super) data: FilePair,
    superblocks: [FilePair; 2],
    /// Bytes that are allocated in both superblock files.
    superblock_room: AtomicU64,
    gate: Gate,
    pool: Arc<ScratchPool>,
    /// Held while a thread extends the data file.
    growing: Mutex<()>,
}

impl std::fmt::Debug for TierPath {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_tuple("TierPath").field(&self.storage).finish()
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

impl TierPath {
    pub(super) fn open(storage: Box<dyn Storage>, engine: Engine) -> Result<TierPath> {
        let superblocks = [storage.open(SUPERBLOCKS[0])?, storage.open(SUPERBLOCKS[1])?];
        let (data, gate, pool) = (storage.open(DATA)?, Gate::default(), Arc::default());
        let (superblock_room, growing) = (AtomicU64::new(0), Mutex::default());
        Ok(TierPath { data, superblocks, superblock_room, storage, engine, gate, pool, growing })
    }

    /// Name of the path, for messages.
    pub fn name(&self) -> String {
        self.storage.name()
    }

    /// False if the data is lost when the process ends.
    pub fn lasts(&self) -> bool {
        self.storage.lasts()
    }

    /// Name of the data file, for messages.
    pub fn data_name(&self) -> &str {
        self.data.reader.name()
    }

    pub(super) fn data_len(&self) -> Result<u64> {
        Ok(self.storage.len(DATA)?.unwrap_or(0))
    }

    /// Allocates bytes `from..end` of the data file on the device.
    pub(super) fn allocate(&self, from: u64, end: u64) -> Result<()> {
        self.allocate_file(&self.data, from, end)
    }

    /// Allocates through the engine, whose I/O timeout bounds the wait for a device that does not answer.
    fn allocate_file(&self, pair: &FilePair, from: u64, end: u64) -> Result<()> {
        let handle = self.engine.allocate(&pair.writer, from, end)?;
        self.engine.wait(handle, None).map_err(|error| pair.writer.with_free_space(error)).map(|_| ())
    }

    /// Lock that a thread holds while it extends the data file.
    pub(super) fn growing(&self) -> MutexGuard<'_, ()> {
        self.growing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Zeroed memory for a header or a superblock.
    pub(super) fn scratch(&self, bytes: usize) -> Result<Scratch> {
        Scratch::from_pool(&self.pool, bytes)
    }

    pub(super) fn sync_directory(&self) -> Result<()> {
        self.storage.sync()
    }

    pub(super) fn read(&self, offset: u64, buffer: TransferBuffer) -> Result<u64> {
        self.pass(DataTransfer { write: false, offset, buffer })
    }

    pub(super) fn write(&self, offset: u64, buffer: TransferBuffer) -> Result<u64> {
        self.pass(DataTransfer { write: true, offset, buffer })
    }

    pub(super) fn wait(&self, handle: u64, timeout: Option<Duration>) -> Result<u64> {
        let until = deadline_after(timeout);
        let outcome = match self.gate.handle(handle, until) {
            Ok(None) => return Err(timed_out()),
            Ok(Some(begun)) => {
                let left = until.map(|until| until.saturating_duration_since(Instant::now()));
                self.engine.wait(begun, left)
            }
            Err(error) => Err(error),
        };
        if !matches!(&outcome, Err(error) if error.io_kind() == Some(IoKind::Timeout)) {
            self.gate.forget(handle);
        }
        outcome
    }

    fn pass(&self, transfer: DataTransfer) -> Result<u64> {
        self.gate.hold(&transfer).map_or_else(|| self.begin(transfer), Ok)
    }

    fn begin(&self, DataTransfer { write, offset, buffer }: DataTransfer) -> Result<u64> {
        match write {
            true => {
                self.storage.check_lease()?;
                self.engine.write(request(&self.data.writer, offset, buffer))
            }
            false => self.engine.read(request(&self.data.reader, offset, buffer)),
        }
    }

    /// Closes the gate: later reads and writes of data are held.
    pub(super) fn close_gate(&self) {
        self.gate.close();
    }

    /// Starts the held transfers. Later transfers are held again if `closed`.
    pub(super) fn release_held(&self, closed: bool) {
        self.gate.release_held(closed, |transfer| self.begin(transfer));
    }

    /// Number of held reads and writes.
    pub(super) fn held_back(&self) -> usize {
        self.gate.waiting()
    }

    /// True if no operation is in flight.
    pub(super) fn quiet(&self) -> bool {
        self.engine.traffic().map_or(true, |traffic| traffic.pending == 0)
    }

    /// Starts a sync of the data file.
    pub(super) fn sync_data(&self) -> Result<u64> {
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
        let pair = &self.superblocks[copy];
        let len = bytes.len() as u64;
        if len > self.superblock_room.load(Ordering::Relaxed) {
            // A nearly full disk may still have space for this superblock.
            self.reserve_superblocks(len).or_else(|_| self.allocate_file(pair, 0, len))?;
        }
        self.storage.check_lease()?;
        self.engine.write(request(&pair.writer, 0, bytes))
    }

    /// Starts a sync of a superblock copy.
    pub(super) fn sync_superblock(&self, copy: usize) -> Result<u64> {
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
            let scratch = self.scratch(bytes)?;
            let outcome = self.engine.read(request(reader, 0, scratch.transfer()));
            match outcome.and_then(|handle| self.wait(handle, None)) {
                Ok(_) => Ok(Some(scratch)),
                Err(error) if error.io_kind() == Some(IoKind::ShortFile) => Ok(None),
                Err(error) => Err(error),
            }
        };
        let Some(header) = read(HEADER_BYTES)? else { return Ok(SuperblockCopy::Blank) };
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
        if self.storage.len(SUPERBLOCKS[copy])?.is_none_or(|len| len < all) {
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

    /// Starts to read the header of a superblock copy.
    pub(super) fn read_stamp(&self, copy: usize) -> Result<(u64, Scratch)> {
        let scratch = self.scratch(HEADER_BYTES)?;
        let handle = self.engine.read(request(&self.superblocks[copy].reader, 0, scratch.transfer()))?;
        Ok((handle, scratch))
    }

    /// The stamp that [`TierPath::read_stamp`] reads; `None` if the copy is blank or corrupt.
    pub(super) fn stamp(&self, (handle, scratch): (u64, Scratch)) -> Result<Option<Stamp>> {
        match self.wait(handle, None) {
            Ok(_) => Ok(scratch.span().with_bytes(SuperblockHeader::parse).ok().map(|header| header.stamp)),
            Err(error) if error.io_kind() == Some(IoKind::ShortFile) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Fails with `Fenced` if another process claimed the files since they were opened.
    pub(super) fn check_owner(&self) -> Result<()> {
        self.storage.check_owner()
    }

    /// Fails if the files no longer have their names, or if the lock was lost.
    pub(super) fn check(&self) -> Result<()> {
        self.storage.check(&self.files())
    }

    fn files(&self) -> [(&'static str, &File); 3] {
        let [first, second] = &self.superblocks;
        [(SUPERBLOCKS[0], &first.writer), (SUPERBLOCKS[1], &second.writer), (DATA, &self.data.writer)]
    }

    /// Fails with `Format` if the path holds chunks of a tier although both superblocks are blank. A superblock is
    /// durable before the first chunk is written, so the superblocks were lost. Only an interrupted removal leaves
    /// chunks without superblocks.
    pub(super) fn check_blank(&self) -> Result<()> {
        let mut left = self.storage.finishes_removal();
        for name in SUPERBLOCKS {
            left |= self.storage.len(name)?.unwrap_or(0) > 0;
        }
        if !left || !self.holds_chunk()? {
            return Ok(());
        }
        let message = "its superblocks are blank, but it has data of a tier, which a new tier would \
                       overwrite; restore the superblocks, or remove the tier with spw_tier_collect";
        Err(TierError::at(TierKind::Format, self.data_name(), message))
    }

    /// True if a page of the data file begins with a chunk header. Reads the file up to the first one, and skips holes.
    fn holds_chunk(&self) -> Result<bool> {
        const PART: u64 = 1 << 20;
        let (bytes, mut at) = (self.data_len()?, 0);
        let part = self.scratch(PART as usize)?;
        while let Some(from) = self.data.reader.next_data(at).filter(|from| from + PAGE <= bytes) {
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
        Ok(false)
    }

    /// Removes the files. `Busy` if an operation is still in flight; `PathMissing` if a file has another name now.
    pub(super) fn remove(self) -> Result<()> {
        self.storage.check_removal(&self.files())?;
        let TierPath { storage, engine, data, superblocks, .. } = self;
        drop((data, superblocks));
        match engine.close(None) {
            Err(error) if error.io_kind() == Some(IoKind::PathFailed) => Err(error),
            // Errors of operations that no caller waited for are ignored.
            _ => {
                drop(engine);
                storage.remove()
            }
        }
    }
}

/// Claims a path and opens it. `None` if it does not exist and `make` is false.
pub(super) fn claim(options: &TierOptions, number: usize, make: bool) -> Result<Option<TierPath>> {
    // A tier allocates its files itself.
    let io = IoOptions { preallocate: false, ..options.io };
    let (storage, engine): (Box<dyn Storage>, Engine) = match &options.paths[number].location {
        PathLocation::Directory(base) => {
            let (base, owner) = (base.clone(), options.owner.clone());
            return claim_directory(base, owner, io, make);
        }
        #[cfg(feature = "s3")]
        PathLocation::Bucket(address) => match super::bucket::open(address, &options.owner, io, make)? {
            Some(opened) => opened,
            None => return Ok(None),
        },
        #[cfg(not(feature = "s3"))]
        PathLocation::Bucket(_) => return Err(super::options::no_object_stores()),
        PathLocation::Memory if !make => return Ok(None),
        PathLocation::Memory => (Box::new(MemoryStorage::new()?), Engine::open(io)?),
        #[cfg(test)]
        PathLocation::Store(store) => match super::bucket::open_in_memory(store, &options.owner, io, make)? {
            Some(opened) => opened,
            None => return Ok(None),
        },
        #[cfg(any(test, feature = "sim"))]
        PathLocation::Simulated(disk, faults) => {
            let storage = super::storage::SimStorage::claim(disk, number as u64)?;
            let sim = crate::io::sim::Sim::new(disk, faults.clone());
            (Box::new(storage), Engine::open_simulated(io, sim)?)
        }
    };
    TierPath::open(storage, engine).map(Some)
}

/// Claims a directory and opens it. The I/O timeout bounds each part of the claim, but not the wait for another owner's
/// lease.
fn claim_directory(base: PathBuf, owner: Owner, io: IoOptions, make: bool) -> Result<Option<TierPath>> {
    type Opening = std::result::Result<Option<TierPath>, (Box<PendingClaim>, Duration)>;
    let open = move |step: ClaimStep| -> Result<Opening> {
        match step {
            ClaimStep::Done(None) => Ok(Ok(None)),
            ClaimStep::Done(Some(directory)) => {
                let directory = DirStorage::new(directory, io.direct, io.io_timeout);
                TierPath::open(Box::new(directory), Engine::open(io)?).map(|path| Ok(Some(path)))
            }
            ClaimStep::Wait(pending, time) => Ok(Err((pending, time))),
        }
    };
    let place = owner.below(&base);
    let begin = move || Directory::begin_claim(&base, &owner, make).and_then(open);
    let mut opening = storage::within_timeout(io.io_timeout, "opening", &place, begin)?;
    loop {
        match opening {
            Ok(path) => return Ok(path),
            Err((pending, time)) => {
                std::thread::sleep(time);
                let go_on = move || pending.resume().and_then(open);
                opening = storage::within_timeout(io.io_timeout, "opening", &place, go_on)?;
            }
        }
    }
}

fn request(file: &Arc<crate::io::file::File>, offset: u64, buffer: TransferBuffer) -> Request<'static> {
    Request { target: Target::File(Arc::clone(file)), offset, buffer, deadline: None }
}
