//! One path: its files, and its own I/O engine, so that a slow path does not delay the queue of another.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::bucket::Bucket;
use super::directory::Directory;
use super::gate::{Gate, Passage};
use super::layout::{PAGE, is_chunk};
use super::medium::{self, Medium, Memory, Mounted, Pair};
use super::options::{Place, TierOptions};
use super::scratch::{Scratch, Shelf};
use super::superblock::{HEAD_BYTES, Head, Superblock};
use super::waiting::{moment, timed_out};
use crate::error::{IoKind, Result, TierError, TierKind};
use crate::io::engine::Engine;
use crate::io::object::{self, Address};
use crate::io::options::{Options as IoOptions, Request, Target};
use crate::sys::span::Span;

/// File names of the two superblock copies.
const SUPERBLOCKS: [&str; 2] = ["superblock.0", "superblock.1"];
/// Bytes that are allocated for a superblock file at first.
const SUPERBLOCK_ROOM: u64 = 64 << 10;

/// Files and I/O engine of a path.
pub struct Path {
    // Dropped before the medium. Operations that the engine gave up on keep their files, and with them the medium's
    // lock.
    pub(super) engine: Engine,
    medium: Box<dyn Medium>,
    pub(super) data: Pair,
    superblocks: [Pair; 2],
    /// Bytes that are allocated in both superblock files.
    superblock_room: AtomicU64,
    gate: Gate,
    shelf: Arc<Shelf>,
    /// Held while a thread extends the data file.
    growing: Mutex<()>,
}

impl std::fmt::Debug for Path {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_tuple("Path").field(&self.medium).finish()
    }
}

/// Content of a superblock copy.
#[derive(Debug)]
pub(super) enum Copy {
    /// Never written.
    Blank,
    /// A valid superblock.
    Whole(Box<Superblock>),
    /// Corrupt; the text says why.
    Broken(String),
}

impl Path {
    pub(super) fn open(medium: Box<dyn Medium>, engine: Engine) -> Result<Path> {
        let superblocks = [medium.open(SUPERBLOCKS[0])?, medium.open(SUPERBLOCKS[1])?];
        let (data, gate, shelf) = (medium.open("data")?, Gate::default(), Arc::default());
        let (superblock_room, growing) = (AtomicU64::new(0), Mutex::default());
        Ok(Path { data, superblocks, superblock_room, medium, engine, gate, shelf, growing })
    }

    /// Name of the path, for messages.
    pub fn name(&self) -> String {
        self.medium.name()
    }

    /// False if the data is lost when the process ends.
    pub fn lasts(&self) -> bool {
        self.medium.lasts()
    }

    /// Name of the data file, for messages.
    pub fn data_name(&self) -> &str {
        self.data.reader.name()
    }

    pub(super) fn data_len(&self) -> Result<u64> {
        Ok(self.medium.len("data")?.unwrap_or(0))
    }

    /// Allocates bytes `from..end` of the data file on the device.
    pub(super) fn allocate(&self, from: u64, end: u64) -> Result<()> {
        self.allocate_file(&self.data, from, end)
    }

    /// Allocates through the engine, whose stall limit bounds the wait for a device that does not answer.
    fn allocate_file(&self, pair: &Pair, from: u64, end: u64) -> Result<()> {
        let handle = self.engine.allocate(&pair.writer, from, end)?;
        self.engine.wait(handle, None).map_err(|error| pair.writer.with_free_space(error)).map(|_| ())
    }

    /// Lock that a thread holds while it extends the data file.
    pub(super) fn growing(&self) -> MutexGuard<'_, ()> {
        self.growing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Zeroed memory for a header or a superblock.
    pub(super) fn scratch(&self, bytes: usize) -> Result<Scratch> {
        Scratch::from_shelf(&self.shelf, bytes)
    }

    pub(super) fn sync_directory(&self) -> Result<()> {
        self.medium.sync()
    }

    pub(super) fn read(&self, offset: u64, span: Span) -> Result<u64> {
        self.pass(Passage { write: false, offset, span })
    }

    pub(super) fn write(&self, offset: u64, span: Span) -> Result<u64> {
        self.pass(Passage { write: true, offset, span })
    }

    pub(super) fn wait(&self, handle: u64, timeout: Option<Duration>) -> Result<u64> {
        let until = moment(timeout);
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

    fn pass(&self, passage: Passage) -> Result<u64> {
        self.gate.hold(passage).map_or_else(|| self.begin(passage), Ok)
    }

    fn begin(&self, Passage { write, offset, span }: Passage) -> Result<u64> {
        match write {
            true => self.engine.write(request(&self.data.writer, offset, span)),
            false => self.engine.read(request(&self.data.reader, offset, span)),
        }
    }

    /// Closes the gate: later reads and writes of data are held.
    pub(super) fn close_gate(&self) {
        self.gate.close();
    }

    /// Starts the held transfers. Later transfers are held again if `closed`.
    pub(super) fn let_through(&self, closed: bool) {
        self.gate.let_through(closed, |passage| self.begin(passage));
    }

    /// Number of held reads and writes.
    pub(super) fn held_back(&self) -> usize {
        self.gate.waiting()
    }

    /// True if no operation is in flight.
    pub(super) fn quiet(&self) -> bool {
        self.engine.stats().map_or(true, |stats| stats.pending == 0)
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
    pub(super) fn write_superblock(&self, copy: usize, bytes: Span) -> Result<u64> {
        let pair = &self.superblocks[copy];
        let len = bytes.len() as u64;
        if len > self.superblock_room.load(Ordering::Relaxed) {
            // A nearly full disk may still have space for this superblock.
            self.reserve_superblocks(len).or_else(|_| self.allocate_file(pair, 0, len))?;
        }
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
    pub(super) fn read_superblock(&self, copy: usize) -> Result<Copy> {
        let reader = &self.superblocks[copy].reader;
        let read = |bytes: usize| -> Result<Option<Scratch>> {
            let scratch = self.scratch(bytes)?;
            let outcome = self.engine.read(request(reader, 0, scratch.span()));
            match outcome.and_then(|handle| self.wait(handle, None)) {
                Ok(_) => Ok(Some(scratch)),
                Err(error) if error.io_kind() == Some(IoKind::ShortFile) => Ok(None),
                Err(error) => Err(error),
            }
        };
        let Some(head) = read(HEAD_BYTES)? else { return Ok(Copy::Blank) };
        let head = match head.span().with_bytes(|bytes| (bytes.iter().all(|b| *b == 0), Head::parse(bytes))) {
            (true, _) => return Ok(Copy::Blank),
            (_, Err(words)) => return Ok(Copy::Broken(words)),
            (_, Ok(head)) => head,
        };
        let all = (HEAD_BYTES as u64 + head.table_bytes).next_multiple_of(PAGE);
        // Checked before the allocation, because the length in a header may be arbitrary.
        if self.medium.len(SUPERBLOCKS[copy])?.is_none_or(|len| len < all) {
            return Ok(Copy::Broken("its table is cut off".to_string()));
        }
        Ok(match read(all as usize)? {
            None => Copy::Broken("its table is cut off".to_string()),
            Some(bytes) => match bytes.span().with_bytes(Superblock::parse) {
                Ok(superblock) => Copy::Whole(Box::new(superblock)),
                Err(words) => Copy::Broken(words),
            },
        })
    }

    /// Fails if the files no longer have their names, or if the lock was lost.
    pub(super) fn check(&self) -> Result<()> {
        let [first, second] = &self.superblocks;
        self.medium.check(&[
            ("superblock.0", &first.writer),
            ("superblock.1", &second.writer),
            ("data", &self.data.writer),
        ])
    }

    /// Fails with `Format` if the path holds chunks of a tier although both superblocks are blank. A superblock is
    /// durable before the first chunk is written, so the superblocks were lost. Only an interrupted removal leaves
    /// chunks without superblocks.
    pub(super) fn check_blank(&self) -> Result<()> {
        let mut left = self.medium.finishes_removal();
        for name in ["superblock.0", "superblock.1"] {
            left |= self.medium.len(name)?.unwrap_or(0) > 0;
        }
        if !left || !self.holds_chunk()? {
            return Ok(());
        }
        let words = "its superblocks are blank, but it holds chunks of a tier, which a new tier would write over; \
                     restore the superblocks, or collect the directory to begin anew";
        Err(TierError::at(TierKind::Format, self.data_name(), words))
    }

    /// True if a page of the data file begins with a chunk header. Reads the file up to the first one, and skips holes.
    fn holds_chunk(&self) -> Result<bool> {
        const PART: u64 = 1 << 20;
        let (bytes, mut at) = (self.data_len()?, 0);
        let part = self.scratch(PART as usize)?;
        while let Some(from) = self.data.reader.next_data(at).filter(|from| from + PAGE <= bytes) {
            let from = from - from % PAGE;
            let span = part.span().part(0, PART.min(bytes - from) as usize);
            match self.read(from, span).and_then(|handle| self.wait(handle, None)) {
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

    /// Removes the files. `Busy` if an operation is still in flight.
    pub(super) fn remove(self) -> Result<()> {
        let Path { medium, engine, data, superblocks, .. } = self;
        drop((data, superblocks));
        match engine.close(None) {
            Err(error) if error.io_kind() == Some(IoKind::PathFailed) => Err(error),
            // Errors of operations that no caller waited for are ignored.
            _ => {
                drop(engine);
                medium.remove()
            }
        }
    }
}

/// Claims a path and opens it. `None` if it does not exist and `make` is false.
pub(super) fn claim(options: &TierOptions, number: usize, make: bool) -> Result<Option<Path>> {
    let io = IoOptions { preallocate: false, ..options.io };
    let (medium, engine): (Box<dyn Medium>, Engine) = match &options.paths[number].place {
        Place::Directory(base) => {
            let (base, owner) = (base.clone(), options.owner.clone());
            return medium::answered(io.stall, "opening", &owner.below(&base), move || {
                let Some(directory) = Directory::claim(&base, &owner, make)? else { return Ok(None) };
                let mounted = Mounted::new(directory, io.direct, io.stall);
                Path::open(Box::new(mounted), Engine::open(io)?).map(Some)
            });
        }
        Place::Bucket(address) => {
            let address = Address::parse(address)?;
            let store = object::connect(&address, io.stall)?;
            let Some(bucket) = Bucket::claim(store, &address, &options.owner, make)? else { return Ok(None) };
            in_bucket(bucket, io)?
        }
        Place::Memory if !make => return Ok(None),
        Place::Memory => (Box::new(Memory::new()?), Engine::open(io)?),
        #[cfg(test)]
        Place::Store(store) => {
            let address = Address::parse(super::bucket::TEST_ADDRESS)?;
            let store = Arc::new(store.clone());
            let Some(bucket) = Bucket::claim(store, &address, &options.owner, make)? else { return Ok(None) };
            in_bucket(bucket, io)?
        }
        #[cfg(any(test, feature = "sim"))]
        Place::Simulated(disk, faults) => {
            let medium = super::medium::Simulated::new(disk, number as u64);
            let sim = crate::io::sim::Sim::new(disk, faults.clone());
            (Box::new(medium), Engine::open_simulated(io, sim)?)
        }
    };
    Path::open(medium, engine).map(Some)
}

fn in_bucket(bucket: Bucket, io: IoOptions) -> Result<(Box<dyn Medium>, Engine)> {
    let engine = Engine::open_folder(io, bucket.folder())?;
    Ok((Box::new(bucket), engine))
}

fn request(file: &Arc<crate::io::file::File>, offset: u64, span: Span) -> Request<'static> {
    Request { target: Target::File(Arc::clone(file)), offset, span, deadline: None }
}
