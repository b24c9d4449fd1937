//! Verification: all that is stored is read and compared with its checksums.
//!
//! Invariants:
//! - Writes continue meanwhile: what is verified is held as by a snapshot.
//! - Damage ends nothing: it is listed. Of a chunk with a damaged header nothing else is read.
//! - A verification uses the memory of one buffer, for extents of any size.
#![forbid(unsafe_code)]

use super::catalog::{Held, Subject, View};
use super::extent::Chunk;
use super::lanes::Buffers;
use super::paths::{DurableCopy, Health};
use super::store::{Tier, snapshot};
use super::stored::{StoredPart, StoredReader};
use super::volume::{Scratch, SuperblockCopy};
use crate::error::{Error, Result, TierError, TierKind};

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

impl Tier {
    /// Reads all current blocks, their headers and the superblocks, and checks their checksums. Damage is listed in the
    /// result. `Busy` if an extent is being written.
    pub fn verify(&self) -> Result<VerifyReport> {
        self.verify_telling(&|_| ())
    }

    /// As [`Tier::verify`]. Calls `told` with the bytes of blocks that were read, as they pass.
    pub fn verify_telling(&self, told: &dyn Fn(u64)) -> Result<VerifyReport> {
        let mut report = self.verify_extents(told)?;
        report.damage.extend((0..self.volumes.len()).filter_map(|path| self.superblock_damage(path)));
        Ok(report)
    }

    pub(super) fn verify_extents(&self, told: &dyn Fn(u64)) -> Result<VerifyReport> {
        let snapshot = snapshot(&self, View::Current)?;
        let mut verification = Verification::begin(self, told)?;
        verification.report.damage = snapshot.lost;
        for extent in snapshot.extents {
            verification.read(&extent.held)?;
        }
        Ok(verification.report)
    }

    /// Error of the last superblock of a path, if it is damaged. Concurrent commits write to the other copy first. A
    /// copy therefore counts as damaged only if it was the last one before the read and still is.
    fn superblock_damage(&self, number: usize) -> Option<Error> {
        let volume = self.volumes[number].as_ref()?;
        let last = || {
            let state = self.state.lock();
            let path = state.catalog.paths().get(number);
            path.durable_copy().filter(|_| path.health() != Health::Failed)
        };
        loop {
            let good = last()?;
            let DurableCopy { copy, sequence } = good;
            let error = match volume.read_superblock(copy) {
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
                    TierError::at(TierKind::Corrupt, volume.superblock_name(copy), message)
                }
            };
            if last() == Some(good) {
                return Some(error);
            }
        }
    }
}

/// A verification and what it has found.
pub(super) struct Verification<'a> {
    tier: &'a Tier,
    buffer: Scratch,
    pub(super) report: VerifyReport,
    told: &'a dyn Fn(u64),
}

impl Verification<'_> {
    pub(super) fn begin<'a>(tier: &'a Tier, told: &'a dyn Fn(u64)) -> Result<Verification<'a>> {
        let buffer = Scratch::new(Buffers::gentle(tier.block_bytes).bytes as usize)?;
        Ok(Verification { tier, buffer, report: VerifyReport::default(), told })
    }

    /// Reads the blocks of an extent, except for those on missing paths.
    pub(super) fn read(&mut self, Held { subject, contents }: &Held) -> Result<()> {
        for chunk in &contents.version().chunks {
            if self.tier.volumes[chunk.path as usize].is_some() {
                self.read_chunk(subject, chunk)?;
            }
        }
        self.report.extents += 1;
        Ok(())
    }

    fn read_chunk(&mut self, subject: &Subject, chunk: &Chunk) -> Result<()> {
        let (buffer, mut reader) = (self.buffer.transfer(), StoredReader::new(self.tier, None));
        let runs = subject.shape.windows(chunk.first, chunk.count, buffer.len() as u64);
        for part in StoredPart::all(chunk, runs) {
            let started = reader.fetch(subject, &part, &buffer);
            if let Err(error) = reader.fetched(subject, &part, started) {
                self.tier.mark_if_hung(chunk.path as usize, &error);
                self.report.damage.push(error);
                if !reader.knows_checksums() {
                    break;
                }
                continue;
            }
            self.report.damage.extend(reader.check(subject, &part, &buffer)?);
            self.report.blocks += u64::from(part.run.count(&subject.shape));
            self.report.bytes += part.run.len;
            (self.told)(part.run.len);
        }
        Ok(())
    }
}
