//! Import of an export, or of another safetensors file, into a tier.
//!
//! Invariants:
//! - An import changes the tier only by its commit.
//! - Sizes of a manifest or a header are compared with the files before the tier allocates space for them.
//! - What an export wrote is compared with its checksums before it is committed.
//! - An import uses the memory of its lanes, for extents of any size (see `lanes`).
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::blocks::checksums_of;
use super::catalog::{Subject, WriteOrigin};
use super::claim::Committer;
use super::export::{Passed, Target};
use super::extent::{Block, Chunk, Run, check_name};
use super::lanes::{self, Buffers, Route};
use super::manifest::{Header, MANIFEST, Manifest, Tensor, damaged, digits, sum_of, unknown};
use super::options::absolute;
use super::select::Selection;
use super::storage::failed;
use super::store::Tier;
use super::stored::NewChunks;
use crate::error::{Doing, Error, Result, TierError, TierKind};
use crate::io::engine::Engine;
use crate::io::file::File;
use crate::io::options::{Request, Target as IoTarget};
use crate::pool::transfer_buffer::TransferBuffer;
use crate::sys::file::Access;
use crate::sys::private_files;

/// An export, or another safetensors file, that can be read into a tier.
#[derive(Debug)]
pub struct Source {
    path: PathBuf,
    origin: Option<Origin>,
    /// True for an export that left out extents.
    partial: bool,
    extents: Vec<SourceExtent>,
}

/// Where the state of an export comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin {
    /// Job of the tier.
    pub job: String,
    /// Its rank.
    pub rank: u32,
    /// Number of ranks of the job.
    pub world: u32,
    /// Step of the commit.
    pub step: u64,
    /// Payload of the commit.
    pub payload: Vec<u8>,
}

#[derive(Debug)]
struct SourceExtent {
    name: String,
    streams: Vec<SourceStream>,
}

#[derive(Debug)]
struct SourceStream {
    file: PathBuf,
    at: u64,
    bytes: u64,
    /// Checksum that the export has recorded, in hexadecimal.
    checksum: Option<String>,
}

impl SourceExtent {
    fn sizes(&self) -> Vec<u64> {
        self.streams.iter().map(|stream| stream.bytes).collect()
    }

    fn bytes(&self) -> u64 {
        self.streams.iter().map(|stream| stream.bytes).sum()
    }
}

impl Source {
    /// Reads what a directory or a file says about itself. Its file system may take `io_timeout` for each call.
    pub fn open(path: &Path, io_timeout: Option<Duration>) -> Result<Source> {
        // It is named several times.
        let path = absolute(path)?;
        let target = Target { directory: path.clone(), io_timeout };
        let found = move |path: &Path| private_files::check_link(path).and_then(|()| fs::metadata(path));
        target.within(Doing::Opening, move || match found(&path) {
            Ok(found) if found.is_file() => Source::of_file(path),
            Ok(found) if !found.is_dir() => {
                Err(unknown(&path, "it is neither a directory nor a regular file".to_string()))
            }
            Ok(_) => Source::of_directory(path),
            Err(error) => Err(failed(Doing::Opening, &path, error, "")),
        })
    }

    fn of_directory(path: PathBuf) -> Result<Source> {
        let place = path.join(MANIFEST);
        let manifest = Manifest::read(&place)?;
        let stream = |file: &str, bytes: u64| {
            let file = plain_name(&path, file)?;
            let found = length_of(&file)?;
            match found == bytes {
                true => Ok((file, 0, found)),
                false => {
                    Err(damaged(&file, format!("the file has {found} bytes, but the manifest says {bytes}")))
                }
            }
        };
        let extents = described(&manifest, stream)?;
        Ok(Source { partial: manifest.partial, origin: Some(origin(manifest, &place)?), extents, path })
    }

    fn of_file(path: PathBuf) -> Result<Source> {
        let (Header { tensors, .. }, manifest, begin) = Header::read(&path)?;
        let place = |tensor: &Tensor| (path.clone(), begin + tensor.data_offsets[0], tensor.bytes());
        let Some(manifest) = manifest else {
            let extent = |(name, tensor): (String, Tensor)| {
                let wrong = |error| unknown(&path, format!("a tensor cannot be an extent: {error}"));
                check_name("its name", &name).map_err(wrong)?;
                let (file, at, bytes) = place(&tensor);
                Ok(SourceExtent { name, streams: vec![SourceStream { file, at, bytes, checksum: None }] })
            };
            let extents = tensors.into_iter().map(extent).collect::<Result<_>>()?;
            return Ok(Source { origin: None, partial: true, extents, path });
        };
        let stream = |name: &str, bytes: u64| match tensors.get(name).map(place) {
            Some(found) if found.2 == bytes => Ok(found),
            _ => Err(damaged(
                &path,
                format!("it has no tensor {name:?} of {bytes} bytes, which its metadata name"),
            )),
        };
        let extents = described(&manifest, stream)?;
        Ok(Source { partial: manifest.partial, origin: Some(origin(manifest, &path)?), extents, path })
    }

    /// Where the state comes from; `None` for a safetensors file that no export wrote.
    pub fn origin(&self) -> Option<&Origin> {
        self.origin.as_ref()
    }

    /// Bytes of the extents that `selection` takes.
    pub fn bytes(&self, selection: &Selection) -> u64 {
        self.taken(selection).map(SourceExtent::bytes).sum()
    }

    fn taken<'a>(&'a self, selection: &'a Selection) -> impl Iterator<Item = &'a SourceExtent> {
        self.extents.iter().filter(|extent| selection.takes(&extent.name))
    }
}

fn origin(manifest: Manifest, place: &Path) -> Result<Origin> {
    let payload = manifest.payload(place)?;
    let Manifest { job, rank, world, step, .. } = manifest;
    Ok(Origin { job, rank, world, step, payload })
}

/// The extents of a manifest. `place` returns file, offset and length of a stream.
fn described(
    manifest: &Manifest,
    place: impl Fn(&str, u64) -> Result<(PathBuf, u64, u64)>,
) -> Result<Vec<SourceExtent>> {
    let mut names = BTreeMap::new();
    let extents = manifest.extents.iter().map(|extent| {
        check_name("manifest.name", &extent.name)?;
        if names.insert(&extent.name, ()).is_some() {
            return Err(Error::invalid(
                "manifest.name",
                format!("{:?} is the name of two extents", extent.name),
            ));
        }
        let streams = extent.streams.iter().map(|stream| {
            let (file, at, bytes) = place(&stream.place, stream.bytes)?;
            Ok(SourceStream { file, at, bytes, checksum: Some(stream.checksum.clone()) })
        });
        Ok(SourceExtent { name: extent.name.clone(), streams: streams.collect::<Result<_>>()? })
    });
    extents.collect()
}

impl Tier {
    /// Reads an export into this tier, commits it at the step of the export, and returns this step. Existing extents
    /// with the same name must have the same streams; other extents stay as they are. After an error the tier is rolled
    /// back to its last commit.
    ///
    /// `selection` has no range. If it takes all of an export that left out nothing, step and payload are those of the
    /// export. Else they are those of the last commit, if there is one.
    pub fn import(&self, from: &Path, selection: &Selection) -> Result<u64> {
        let source = Source::open(from, self.options.io.io_timeout)?;
        self.import_from(&source, selection, &|_| Ok(()))
    }

    /// As [`Tier::import`]. `passed` is called with the bytes of each part; its error ends the import.
    pub fn import_from(&self, source: &Source, selection: &Selection, passed: Passed) -> Result<u64> {
        let exclusive = Exclusive::begin(self)?;
        let (last, own) = self.state.lock().catalog.last_commit();
        let exported = source.origin.as_ref().map(|origin| (origin.step, origin.payload.clone()));
        let kept = last.map(|last| (last, own));
        let whole = selection.is_whole() && !source.partial;
        let (first, second) = if whole { (exported, kept) } else { (kept, exported) };
        let (step, payload) = first.or(second).unwrap_or_default();
        let mut taken = source.taken(selection).peekable();
        // A commit without extents has a step and a payload alone.
        if taken.peek().is_none() && !whole {
            return Err(match selection.names.is_empty() {
                true => unknown(&source.path, "it has no extents".to_string()),
                false => selection.nothing(&source.path.to_string_lossy()),
            });
        }
        let engine = Engine::open(self.options.beside())?;
        let mut defined = Vec::new();
        let loaded = taken.try_for_each(|extent| {
            let before = self.state.lock().catalog.number(&extent.name);
            let number = self.define(&extent.name, &extent.sizes())?;
            defined.extend(before.is_none().then_some(number));
            self.import_extent(extent, number, &source.path, &engine, passed)
        });
        match loaded.and_then(|()| self.commit_if(Committer::Import, step, &payload)) {
            Ok(()) => {
                exclusive.replaced();
                Ok(step)
            }
            Err(error) => {
                self.rollback_if(|| Ok(()))?;
                defined.into_iter().for_each(|extent| self.state.lock().catalog.undefine(extent));
                Err(error)
            }
        }
    }

    fn import_extent(
        &self,
        extent: &SourceExtent,
        number: u32,
        place: &Path,
        engine: &Engine,
        passed: Passed,
    ) -> Result<()> {
        let target = Target { directory: place.to_path_buf(), io_timeout: self.options.io.io_timeout };
        let files = extent.streams.iter().map(|stream| {
            let path = stream.file.clone();
            target.within(Doing::Opening, move || open(&path).map(Arc::new))
        });
        let files = files.collect::<Result<Vec<_>>>()?;
        let reserved = self.begin_write(number, &WriteOrigin::Caller)?;
        let checksums = (0..reserved.subject.shape.blocks()).map(|_| AtomicU64::new(0)).collect();
        let from = Origins { engine, files, extent, checksums, passed };
        self.fill(&reserved, |new| from.read(&reserved.subject, new))
    }
}

/// An import in progress; its drop ends it.
struct Exclusive<'a> {
    tier: &'a Tier,
    replaced: bool,
}

impl Exclusive<'_> {
    fn begin(tier: &Tier) -> Result<Exclusive<'_>> {
        let _state = tier.after_commit_beside();
        tier.claims.begin_import()?;
        Ok(Exclusive { tier, replaced: false })
    }

    /// Ends an import that has committed other states.
    fn replaced(mut self) {
        self.replaced = true;
    }
}

impl Drop for Exclusive<'_> {
    fn drop(&mut self) {
        self.tier.claims.end_import(self.replaced);
    }
}

fn open(path: &Path) -> Result<File> {
    // Through the page cache: the tensors of a file need not begin at pages.
    File::open_with(path, Access::Read, false, |_| private_files::open_to_check(path))
}

/// What an import of an extent reads, and the checksums of the blocks it has read.
struct Origins<'a> {
    engine: &'a Engine,
    files: Vec<Arc<File>>,
    extent: &'a SourceExtent,
    checksums: Vec<AtomicU64>,
    passed: Passed<'a>,
}

impl Origins<'_> {
    /// Fills chunks, compares the streams with their checksums, and returns the checksums of the blocks.
    fn read(&self, subject: &Subject, new: &NewChunks) -> Result<Arc<[u64]>> {
        let sums: Vec<AtomicU64> = self.files.iter().map(|_| AtomicU64::new(0)).collect();
        let mut lanes: BTreeMap<u32, Vec<&Chunk>> = BTreeMap::new();
        for chunk in new.chunks() {
            lanes.entry(chunk.path).or_default().push(chunk);
        }
        let buffers = Buffers::of(lanes.len(), subject.shape.block_bytes());
        lanes::each(lanes.into_values().collect(), |chunks: Vec<&Chunk>, stop| {
            let mut route = Importing { from: self, subject, sums: &sums, new };
            let runs = |chunk: &Chunk| subject.shape.windows(chunk.first, chunk.count, buffers.bytes);
            lanes::run(chunks.into_iter().flat_map(runs), buffers, stop, &mut route)
        })?;
        self.compare(&sums)?;
        Ok(self.checksums.iter().map(|sum| sum.load(Ordering::Relaxed)).collect())
    }

    fn compare(&self, sums: &[AtomicU64]) -> Result<()> {
        for (stream, sum) in self.extent.streams.iter().zip(sums) {
            let sum = digits(sum.load(Ordering::Relaxed));
            if let Some(expected) = stream.checksum.as_ref().filter(|expected| **expected != sum) {
                let message = format!(
                    "extent {:?}: its checksum is {sum}, but the export recorded {expected}",
                    self.extent.name
                );
                return Err(TierError::at(TierKind::Corrupt, stream.file.to_string_lossy(), message));
            }
        }
        Ok(())
    }
}

/// The route from files to a path of a tier.
struct Importing<'a> {
    from: &'a Origins<'a>,
    subject: &'a Subject,
    sums: &'a [AtomicU64],
    new: &'a NewChunks<'a>,
}

impl Route<Run> for Importing<'_> {
    fn fetch(&mut self, run: &Run, buffer: &TransferBuffer) -> Result<u64> {
        let target = IoTarget::File(Arc::clone(&self.from.files[run.stream]));
        let offset = self.from.extent.streams[run.stream].at + run.from;
        let buffer = buffer.part(0, run.len as usize);
        self.from.engine.read(Request { target, offset, buffer, deadline: None })
    }

    fn fetched(&mut self, _: &Run, started: Result<u64>) -> Result<()> {
        self.from.engine.wait(started?, None).map(drop)
    }

    fn check(&mut self, run: &Run, buffer: &TransferBuffer) -> Result<()> {
        let (shape, bytes) = (&self.subject.shape, buffer.span().part(0, run.len as usize));
        let part = |block: Block| bytes.part((block.from - run.from) as usize, block.len as usize);
        let found = checksums_of(shape, run.block, run.count(shape), &part)?;
        let known = &self.from.checksums[run.block as usize..];
        known.iter().zip(found).for_each(|(known, sum)| known.store(sum, Ordering::Relaxed));
        let sum = bytes.with_bytes(|bytes| sum_of(run.from, bytes));
        self.sums[run.stream].fetch_add(sum, Ordering::Relaxed);
        (self.from.passed)(run.len)
    }

    fn store(&mut self, run: &Run, buffer: &TransferBuffer) -> Result<u64> {
        self.new.store(run, buffer)
    }

    fn stored(&mut self, run: &Run, started: Result<u64>) -> Result<()> {
        self.new.stored(run, started)
    }
}

/// Path of a file of the export. The name must be a plain file name, so that it cannot leave the directory.
fn plain_name(directory: &Path, file: &str) -> Result<PathBuf> {
    match file.is_empty() || file.starts_with('.') || file.contains(['/', '\0']) {
        true => Err(damaged(&directory.join(MANIFEST), format!("{file:?} is not a valid name of a file"))),
        false => Ok(directory.join(file)),
    }
}

/// Length of a file of an export.
fn length_of(path: &Path) -> Result<u64> {
    let found = fs::metadata(path).map_err(|error| failed(Doing::Opening, path, error, ""))?;
    if found.is_file() { Ok(found.len()) } else { Err(damaged(path, "it is no regular file".to_string())) }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;
    use crate::tier::directory::Owner;
    use crate::tier::options::{PathLocation, PathOptions, TierOptions};

    /// Imports of several threads, which begin as soon as the one before has ended.
    #[test]
    fn one_import_at_a_time_has_the_tier() {
        const EACH: usize = 20_000;
        let owner = Owner { job: "run".to_string(), host: "node".to_string(), rank: 0 };
        let memory = PathOptions { location: PathLocation::Memory(None), limit: None, reserve: 0 };
        let tier = Tier::open(TierOptions { paths: vec![memory], ..TierOptions::new(owner, []) }).unwrap();
        let has_it = AtomicBool::new(false);
        let imports = || {
            for _ in 0..EACH {
                let Ok(exclusive) = Exclusive::begin(&tier) else { continue };
                assert!(!has_it.swap(true, Ordering::SeqCst), "two imports at a time");
                has_it.store(false, Ordering::SeqCst);
                exclusive.replaced();
            }
        };
        std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(imports))));
    }
}
