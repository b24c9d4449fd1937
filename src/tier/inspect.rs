//! Verification of all stored bytes, path reports, and closing or destroying a tier.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::checksums;
use super::extent::{Chunk, header_bytes};
use super::health::Health;
use super::snapshot::{HeldExtent, View};
use super::state::{DurableCopy, PathState, TierState};
use super::storage::deadline_after;
use super::store::Tier;
use super::transfer::check_header;
use super::volume::{Scratch, SuperblockCopy, Volume};
use crate::error::{Error, IoKind, Result, TierError, TierKind};
use crate::io::counters::EngineTraffic;

/// Bytes that are read at a time, unless a block is larger.
pub(super) const WINDOW: u64 = 16 << 20;

/// Shortest wait of a close for its files.
const CLOSE_AT_LEAST: Duration = Duration::from_secs(1);

/// Result of a verification.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VerifyReport {
    /// Number of extents that have contents.
    pub extents: u64,
    /// Number of blocks read.
    pub blocks: u64,
    /// Length of these blocks, in bytes.
    pub bytes: u64,
    /// One error for each damaged, lost or unreadable part.
    pub damage: Vec<Error>,
}

/// State and statistics of a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathReport {
    /// Directory or address of the path, or "memory".
    pub name: String,
    /// True if the data is lost when the process ends.
    pub memory: bool,
    /// Health of the path.
    pub health: Health,
    /// Reason if the path is not healthy.
    pub reason: String,
    /// Bytes read since the open.
    pub read_bytes: u64,
    /// Bytes written since the open, including headers and superblocks.
    pub written_bytes: u64,
    /// Time during which at least one read was in flight.
    pub reading: Duration,
    /// Time during which at least one write or sync was in flight.
    pub writing: Duration,
    /// Time during which at least one operation was in flight.
    pub busy: Duration,
    /// Bytes written since the tier was created.
    pub wear: u64,
    /// Length of the data file, in bytes.
    pub file_bytes: u64,
    /// Free bytes in the data file.
    pub free: u64,
    /// Free bytes in the data file, including growth up to its limit.
    pub room: u64,
    /// "io_uring", "threads", "s3" or "sim"; empty if the path is missing.
    pub backend: &'static str,
}

/// Health and traffic of one path.
#[derive(Debug, Clone, Copy)]
pub struct PathFlow {
    /// Health of the path.
    pub health: Health,
    /// Bytes and busy time since the tier was opened; zero for a missing path.
    pub traffic: EngineTraffic,
}

impl Tier {
    /// Reads all current blocks, their headers and the superblocks, and checks their checksums. Damage is listed in the
    /// result. `Busy` if an extent is being written.
    pub fn verify(&self) -> Result<VerifyReport> {
        let mut checked = self.verify_extents()?;
        self.verify_superblocks(&mut checked);
        Ok(checked)
    }

    pub(super) fn verify_extents(&self) -> Result<VerifyReport> {
        let snapshot = self.snapshot(View::Current)?;
        let mut checked = VerifyReport { damage: snapshot.lost, ..VerifyReport::default() };
        for extent in snapshot.extents {
            self.walk(&extent, &mut checked)?;
            checked.extents += 1;
        }
        Ok(checked)
    }

    /// Passes every stored block of an extent to `visit`, in order and through one window of memory.
    pub(super) fn walk(&self, extent: &HeldExtent, visit: &mut impl BlockVisitor) -> Result<()> {
        let version = &extent.contents.version;
        for chunk in &version.chunks {
            let Some(path) = &self.volumes[chunk.path as usize] else { continue };
            let header = path.scratch(header_bytes(chunk.count.into()) as usize)?;
            let read = path.read(chunk.offset, header.transfer()).and_then(|handle| path.wait(handle, None));
            if let Err(error) = read {
                self.mark_if_hung(chunk.path as usize, &error);
                visit.damage(error)?;
                continue;
            }
            let parsed = header.span().with_bytes(|bytes| {
                let (generation, tier) = (version.generation, self.identity.tier);
                check_header(bytes, chunk, generation, tier, extent.number, &extent.shape)
            });
            match parsed {
                Ok(header) => self.walk_blocks(path, chunk, &header.checksums, extent, visit)?,
                Err(message) => {
                    visit.damage(path.corrupt_block(&extent.name, (chunk.first, chunk.offset), message))?
                }
            }
        }
        Ok(())
    }

    fn walk_blocks(
        &self,
        path: &Volume,
        chunk: &Chunk,
        checksums: &[u64],
        extent: &HeldExtent,
        visit: &mut impl BlockVisitor,
    ) -> Result<()> {
        let shape = &*extent.shape;
        let at_once = (WINDOW / shape.block_bytes()).clamp(1, chunk.count.into()) as u32;
        let window = Scratch::new((u64::from(at_once) * shape.block_bytes()) as usize)?;
        let mut first = chunk.first;
        while first < chunk.first + chunk.count {
            let count = at_once.min(chunk.first + chunk.count - first);
            // Blocks are whole except for the last one of a stream, which is read up to its last written byte.
            for run in shape.runs(first, count) {
                let buffer = window.transfer().part(0, run.len as usize);
                let span = buffer.span();
                let read = path.read(chunk.block_offset(shape, run.block), buffer);
                if let Err(error) = read.and_then(|handle| path.wait(handle, None)) {
                    self.mark_if_hung(chunk.path as usize, &error);
                    visit.damage(error)?;
                    continue;
                }
                let blocks = run.len.div_ceil(shape.block_bytes()) as u32;
                let expected = &checksums[(run.block - chunk.first) as usize..][..blocks as usize];
                for (block, message) in checksums::differences(shape, span, run.block, expected) {
                    let place = (block, chunk.block_offset(shape, block));
                    visit.damage(path.corrupt_block(&extent.name, place, message))?;
                }
                span.with_bytes(|bytes| visit.bytes(run.stream, bytes, blocks.into()))?;
            }
            first += count;
        }
        Ok(())
    }

    /// Marks a path as failed that did not respond to a read.
    fn mark_if_hung(&self, path: usize, error: &Error) {
        if matches!(error.io_kind(), Some(IoKind::Deadline | IoKind::PathFailed)) {
            self.mark(path, Health::Failed, &error.to_string());
        }
    }

    fn verify_superblocks(&self, checked: &mut VerifyReport) {
        for number in 0..self.volumes.len() {
            if let Some(error) = self.superblock_damage(number) {
                checked.damage.push(error);
            }
        }
    }

    /// Error of the last superblock of a path, if it is damaged. Concurrent commits write to the other copy first. A
    /// copy therefore counts as damaged only if it was the last one before the read and still is.
    fn superblock_damage(&self, number: usize) -> Option<Error> {
        let path = self.volumes[number].as_ref()?;
        let last = || {
            let state = self.state.lock();
            state.paths[number].durable_copy.filter(|_| state.paths[number].health != Health::Failed)
        };
        loop {
            let good = last()?;
            let DurableCopy { copy, sequence } = good;
            let error = match path.read_superblock(copy) {
                Ok(SuperblockCopy::Valid(found)) if found.sequence == sequence => return None,
                Err(error) => {
                    self.mark_if_hung(number, &error);
                    error
                }
                Ok(other) => {
                    let message = match other {
                        SuperblockCopy::Valid(found) => {
                            format!("the superblock has sequence {} instead of {sequence}", found.sequence)
                        }
                        SuperblockCopy::Blank => "the superblock is blank".to_string(),
                        SuperblockCopy::Corrupt(message, _) => message,
                    };
                    TierError::at(TierKind::Corrupt, path.superblock_name(copy), message)
                }
            };
            if last() == Some(good) {
                return Some(error);
            }
        }
    }

    /// Reports of all paths, by number.
    pub fn paths(&self) -> Vec<PathReport> {
        let state = self.state.lock();
        (0..state.paths.len()).map(|number| self.report(&state, number)).collect()
    }

    /// Report of one path; `None` if there is no such path.
    pub fn path(&self, number: u32) -> Option<PathReport> {
        let state = self.state.lock();
        let number = usize::try_from(number).ok().filter(|number| *number < state.paths.len())?;
        Some(self.report(&state, number))
    }

    /// Health and traffic of all paths, by number.
    pub fn flows(&self) -> Vec<PathFlow> {
        let state = self.state.lock();
        let traffic = |path: &Option<Arc<Volume>>| path.as_ref().and_then(|path| path.engine.traffic().ok());
        let flow = |(state, path): (&PathState, _)| PathFlow {
            health: state.health,
            traffic: traffic(path).unwrap_or_default(),
        };
        state.paths.iter().zip(&self.volumes).map(flow).collect()
    }

    fn report(&self, state: &TierState, number: usize) -> PathReport {
        let path = &state.paths[number];
        let stats = self.volumes[number].as_ref().and_then(|path| path.engine.stats().ok());
        let of = |get: fn(&crate::io::counters::EngineStats) -> u64| stats.as_ref().map_or(0, get);
        PathReport {
            name: path.name.clone(),
            memory: path.memory,
            health: path.health,
            reason: path.reason.clone(),
            read_bytes: of(|stats| stats.read_bytes),
            written_bytes: of(|stats| stats.written_bytes),
            reading: stats.as_ref().map_or(Duration::ZERO, |stats| stats.reading),
            writing: stats.as_ref().map_or(Duration::ZERO, |stats| stats.writing),
            busy: stats.as_ref().map_or(Duration::ZERO, |stats| stats.busy),
            wear: path.written_before + of(|stats| stats.written_bytes),
            file_bytes: path.space.end(),
            free: path.space.free(),
            room: path.space.room(),
            backend: stats.map_or("", |stats| stats.backend),
        }
    }

    /// Sets the health of a path. A draining path gets no new writes; a healthy one gets them again. A missing path
    /// stays missing, and no path can be set to missing.
    pub fn set_health(&self, path: u32, health: Health, reason: &str) -> Result<()> {
        let mut state = self.state.lock();
        let Some(found) = state.paths.get_mut(path as usize) else {
            return Err(Error::invalid("number", format!("there is no path {path}")));
        };
        if found.health == Health::Missing || health == Health::Missing {
            return Err(Error::invalid(
                "path",
                format!("the health of {} cannot be changed to or from missing", found.name),
            ));
        }
        found.health = health;
        found.reason = reason.to_string();
        Ok(())
    }

    /// Waits for operations in flight and closes the paths. Uncommitted changes are lost. `Timeout` if operations are
    /// still in flight after `timeout`. `Deadline` if a file system does not respond to the close of the files within the
    /// I/O timeout, or within the rest of `timeout`, which counts as one second at least. The close then continues on its
    /// own.
    pub fn close(self, timeout: Option<Duration>) -> Result<()> {
        let until = deadline_after(timeout);
        let left = || until.map(|until| until.saturating_duration_since(Instant::now()));
        self.volumes.iter().flatten().try_for_each(|path| match path.engine.close(left()) {
            // Errors of operations that no caller waited for concern writes that are discarded here.
            Err(error) if error.io_kind() == Some(IoKind::Timeout) => Err(error),
            _ => Ok(()),
        })?;
        if !self.opener.is_current() {
            return Ok(());
        }
        let Tier { volumes: paths, state, .. } = self;
        // Transfers without a waiter hold references to their paths.
        drop(state);
        let paths = paths.into_iter().flatten().filter_map(Arc::into_inner).collect();
        Volume::close_all(left().map(|left| left.max(CLOSE_AT_LEAST)), paths)
    }

    /// Removes the tier from every path that is present. Returns the first error, after trying all paths. `Busy` if an
    /// operation is in flight. `Deadline` if a file system does not respond; the removal then continues on its own.
    pub fn destroy(self) -> Result<()> {
        self.check_process()?;
        let Tier { volumes: paths, state, .. } = self;
        // Transfers without a waiter hold references to their paths.
        drop(state);
        let (mut outcome, mut owned) = (Ok(()), Vec::new());
        for path in paths.into_iter().flatten() {
            let name = path.name();
            match Arc::into_inner(path) {
                Some(path) => owned.push(path),
                None => outcome = outcome.and(Err(Error::Busy(format!("{name} is still in use")))),
            }
        }
        outcome.and(Volume::remove_all(owned))
    }
}

/// Receiver of the stored blocks of an extent. An error ends the walk.
pub(super) trait BlockVisitor {
    /// The next bytes of a stream, `blocks` blocks. Damage among them was reported before.
    fn bytes(&mut self, stream: usize, bytes: &[u8], blocks: u64) -> Result<()>;

    /// Reports a damaged or unreadable part.
    fn damage(&mut self, error: Error) -> Result<()>;
}

impl BlockVisitor for VerifyReport {
    fn bytes(&mut self, _: usize, bytes: &[u8], blocks: u64) -> Result<()> {
        self.blocks += blocks;
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    fn damage(&mut self, error: Error) -> Result<()> {
        self.damage.push(error);
        Ok(())
    }
}
