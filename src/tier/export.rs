//! Export of the committed state as plain files, for checkpoints, and import. Each stream is one file with its raw
//! bytes (f32 little endian, as the optimizer keeps them). A manifest lists the files and their checksums.
//!
//! Invariants:
//! - The directory appears complete and durable, or not at all: it is written under a temporary name and then renamed.
//! - An export removes or changes only files that it created itself.
//! - An export holds one commit: its step and all its bytes are of one snapshot. Writes and commits may go on
//!   meanwhile.
//! - A caller waits for each call on the directory at most for the I/O timeout (see `storage`).
//! - An export uses the memory of one window, for extents of any size.
//! - An import changes the tier only by its commit.
#![forbid(unsafe_code)]

use std::fs;
use std::io::{self, Read, Write};
use std::ops::Deref;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::blocks::BlockVisitor;
use super::catalog::{Snapshot, View};
use super::extent::{Run, check_name};
use super::options::absolute;
use super::paths::ExtentPlacement;
use super::storage::{failed, within_timeout};
use super::store::{self, HeldExtent, Tier};
use super::volume::Scratch;
use crate::checksum::{self, RunningChecksum};
use crate::error::{Doing, Error, Result, TierError, TierKind};
use crate::pool::transfer_buffer::TransferBuffer;
use crate::sys::span::Span;
use crate::sys::time_limit::{self, Call};
use crate::sys::{descriptor, file, host, private_files, try_vec};
use spillway_stores::is_address;

const MANIFEST: &str = "manifest.json";
const FORMAT: &str = "spillway tier export";
const VERSION: u32 = 1;
/// Maximum length of a manifest, in bytes.
const MAX_MANIFEST: u64 = 1 << 30;

#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    format: String,
    version: u32,
    job: String,
    rank: u32,
    world: u32,
    step: u64,
    /// Payload of the commit, in hexadecimal.
    payload: String,
    extents: Vec<Exported>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Exported {
    name: String,
    streams: Vec<Stream>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Stream {
    file: String,
    bytes: u64,
    /// XXH3-64 of the file, in hexadecimal.
    xxh3: String,
}

impl Tier {
    /// Writes the committed state to `directory`, which must not exist, and returns the step. `NoState` if nothing was
    /// committed.
    pub fn export(&self, directory: &Path) -> Result<u64> {
        Export::begin(self, directory)?.run(&mut |_| Ok(()))
    }

    /// Reads an export into this tier, commits it at the step of the export, and returns this step. Existing extents
    /// with the same name must have the same streams; other extents stay as they are. After an error the tier is rolled
    /// back to its last commit.
    pub fn import(&self, directory: &Path) -> Result<u64> {
        // The directory is named several times.
        let directory = &absolute(directory)?;
        let source = Target { directory: directory.to_path_buf(), io_timeout: self.options.io.io_timeout };
        let path = directory.join(MANIFEST);
        let manifest = source.within(Doing::Opening, move || read_manifest(&path))?;
        let payload = parse_hex(&manifest.payload)
            .ok_or_else(|| broken(&directory.join(MANIFEST), "its payload is not hexadecimal".to_string()))?;
        let loaded = manifest.extents.iter().try_for_each(|extent| self.import_extent(extent, &source));
        match loaded.and_then(|()| self.commit(manifest.step, &payload)) {
            Ok(()) => Ok(manifest.step),
            Err(error) => {
                self.rollback()?;
                Err(error)
            }
        }
    }

    fn import_extent(&self, extent: &Exported, source: &Target) -> Result<()> {
        let directory = &source.directory;
        check_name("manifest.name", &extent.name)?;
        let sizes: Vec<u64> = extent.streams.iter().map(|stream| stream.bytes).collect();
        // Checked before the allocation, because sizes in the manifest may be arbitrary.
        for stream in &extent.streams {
            let path = stream_path(directory, &stream.file)?;
            let found = source.within(Doing::Opening, {
                let path = path.clone();
                move || length_of(&path)
            })?;
            if found != stream.bytes {
                return Err(broken(
                    &path,
                    format!("the file has {found} bytes, but the manifest says {}", stream.bytes),
                ));
            }
        }
        let number = self.define(&extent.name, &sizes)?;
        let (_memory, spans) = memory_for(&sizes)?;
        for (stream, span) in extent.streams.iter().zip(&spans) {
            let path = stream_path(directory, &stream.file)?;
            source.read_into(&path, span.span())?;
            let sum = span.span().with_bytes(checksum::of);
            if format!("{sum:016x}") != stream.xxh3 {
                let message = format!("its checksum is {sum:016x}, but the manifest says {}", stream.xxh3);
                return Err(TierError::at(TierKind::Corrupt, path.to_string_lossy(), message));
            }
        }
        let ticket = self.write(number, &spans, &ExtentPlacement::Auto, None)?;
        self.wait(ticket, None).map(|_| ())
    }
}

/// An export whose state is held and whose directory is made. `T` refers to the tier, or owns a part of it.
pub(super) struct Export<T: Deref<Target = Tier>> {
    tier: T,
    snapshot: Snapshot<HeldExtent<T>>,
    target: Target,
    partial: Partial,
}

impl<T: Deref<Target = Tier> + Clone> Export<T> {
    /// Takes the snapshot of the last commit.
    pub(super) fn begin(tier: T, directory: &Path) -> Result<Export<T>> {
        if directory.to_str().is_some_and(is_address) {
            return Err(Error::invalid(
                "directory",
                "is in an object store, but an export needs a local directory",
            ));
        }
        // The directory is named several times.
        let directory = absolute(directory)?;
        let mut snapshot = store::snapshot(&tier, View::Committed)?;
        if !snapshot.lost.is_empty() {
            return Err(snapshot.lost.remove(0));
        }
        if directory.file_name().is_none() {
            return Err(Error::invalid(
                "directory",
                format!("{} is not the name of a new directory", directory.display()),
            ));
        }
        let target = Target { directory, io_timeout: tier.options.io.io_timeout };
        let partial = target.create()?;
        Ok(Export { tier, snapshot, target, partial })
    }

    /// Bytes of all streams.
    pub(super) fn bytes(&self) -> u64 {
        let streams = self.snapshot.extents.iter().flat_map(|extent| extent.held.subject.shape.streams());
        streams.sum()
    }

    /// The step of the snapshot.
    pub(super) fn step(&self) -> u64 {
        self.snapshot.step.unwrap_or_default()
    }

    /// Writes the files, and returns the step. Calls `passed` with the bytes of each part before it is written; an error
    /// of `passed` ends the export, which leaves nothing.
    pub(super) fn run(self, passed: &mut dyn FnMut(u64) -> Result<()>) -> Result<u64> {
        let step = self.step();
        let Export { tier, snapshot: Snapshot { payload, extents, .. }, target, partial } = self;
        // Each extent is let go after its export.
        let exported =
            extents.into_iter().map(|extent| export_extent(&tier, &extent, &target, &partial, passed));
        let manifest = Manifest {
            format: FORMAT.to_string(),
            version: VERSION,
            job: tier.options.owner.job.clone(),
            rank: tier.options.owner.rank,
            world: tier.options.world,
            step,
            payload: payload.iter().map(|byte| format!("{byte:02x}")).collect(),
            extents: exported.collect::<Result<_>>()?,
        };
        let message = serde_json::to_vec_pretty(&manifest)
            .map_err(|error| Error::System { what: "writing a manifest", reason: error.to_string() })?;
        target.publish(partial, message)?;
        Ok(step)
    }
}

fn export_extent<T: Deref<Target = Tier>>(
    tier: &Tier,
    extent: &HeldExtent<T>,
    target: &Target,
    partial: &Partial,
    passed: &mut dyn FnMut(u64) -> Result<()>,
) -> Result<Exported> {
    let subject = &extent.held.subject;
    let lengths = subject.shape.streams();
    let names = (0..lengths.len()).map(|n| format!("extent-{:05}.stream-{n}.bin", subject.extent));
    let files = names.map(|name| target.file(&partial.0, name)).collect::<Result<_>>()?;
    let mut files = Files { tier, target, files, passed };
    extent.walk(&mut files)?;
    let ended = files.files.into_iter().zip(lengths).map(|(file, bytes)| {
        let file = file.ok_or_else(|| Error::Internal("a file of an export is missing".to_string()))?;
        let bytes = *bytes;
        target.within(Doing::Writing, move || file.finish(bytes))
    });
    Ok(Exported { name: subject.name.clone(), streams: ended.collect::<Result<_>>()? })
}

/// Directory of an export, and the longest wait for its file system.
struct Target {
    directory: PathBuf,
    io_timeout: Option<Duration>,
}

impl Target {
    fn within<T: Send + 'static>(
        &self,
        doing: Doing,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        within_timeout(self.io_timeout, doing, &self.directory, work)
    }

    fn create(&self) -> Result<Partial> {
        let (directory, io_timeout) = (self.directory.clone(), self.io_timeout);
        self.within(Doing::Opening, move || {
            if fs::symlink_metadata(&directory).is_ok() {
                return Err(exists(&directory));
            }
            Partial::beside(&directory, &parent_of(&directory), io_timeout)
        })
    }

    fn file(&self, partial: &Path, name: String) -> Result<Option<ExportFile>> {
        let partial = partial.to_path_buf();
        self.within(Doing::Writing, move || ExportFile::create(&partial, name).map(Some))
    }

    /// Writes the manifest, and gives the directory its name.
    fn publish(&self, partial: Partial, manifest: Vec<u8>) -> Result<()> {
        let directory = self.directory.clone();
        self.within(Doing::Writing, move || {
            write_durably(&partial.0.join(MANIFEST), &manifest)?;
            sync_directory(&partial.0)?;
            partial.publish(&directory)?;
            sync_directory(&parent_of(&directory))
        })
    }
}

fn parent_of(directory: &Path) -> PathBuf {
    directory.parent().filter(|up| !up.as_os_str().is_empty()).unwrap_or(Path::new(".")).to_path_buf()
}

fn exists(directory: &Path) -> Error {
    let error = io::Error::from_raw_os_error(libc::EEXIST);
    failed(
        Doing::Opening,
        directory,
        error,
        "an export creates its directory; choose a name that does not exist",
    )
}

/// Temporary directory of an export, created by this call. It is removed unless it is published.
struct Partial(PathBuf, Option<Duration>);

impl Partial {
    fn beside(directory: &Path, parent: &Path, io_timeout: Option<Duration>) -> Result<Partial> {
        const TRIES: usize = 16;
        let private = |recursive: bool, path: &Path| {
            fs::DirBuilder::new().mode(0o700).recursive(recursive).create(path)
        };
        private(true, parent).map_err(|error| failed(Doing::Opening, parent, error, ""))?;
        let mut last: io::Error = io::ErrorKind::AlreadyExists.into();
        for _ in 0..TRIES {
            let number = host::random().map_err(|error| Error::system("generating a name", &error))?;
            let mut name = directory.file_name().unwrap_or_default().to_os_string();
            name.push(format!(".{:016x}.partial", number as u64));
            let partial = parent.join(name);
            // `create` fails if the name exists, so an existing directory is never written to.
            match private(false, &partial) {
                Ok(()) => return Ok(Partial(partial, io_timeout)),
                Err(error) => last = error,
            }
            if last.kind() != io::ErrorKind::AlreadyExists {
                break;
            }
        }
        Err(failed(Doing::Opening, parent, last, ""))
    }

    fn publish(mut self, directory: &Path) -> Result<()> {
        match file::rename_new(&self.0, directory) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Err(exists(directory)),
            renamed => renamed.map_err(|error| failed(Doing::Writing, directory, error, ""))?,
        }
        self.0 = PathBuf::new();
        Ok(())
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        let partial = std::mem::take(&mut self.0);
        if !partial.as_os_str().is_empty() {
            let path = partial.clone();
            let removal = Call::cleanup(&path, move || drop(fs::remove_dir_all(&partial)));
            time_limit::run_all_within(self.1, vec![removal]);
        }
    }
}

/// A file of an export that is being written sequentially.
struct ExportFile {
    name: String,
    path: PathBuf,
    file: io::BufWriter<fs::File>,
    sum: RunningChecksum,
    bytes: u64,
}

impl ExportFile {
    fn create(directory: &Path, name: String) -> Result<ExportFile> {
        let path = directory.join(&name);
        let file = new_file(&path).map_err(|error| failed(Doing::Writing, &path, error, ""))?;
        Ok(ExportFile {
            name,
            path,
            file: io::BufWriter::new(file),
            sum: RunningChecksum::default(),
            bytes: 0,
        })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.sum.add(bytes);
        self.bytes += bytes.len() as u64;
        self.file.write_all(bytes).map_err(|error| failed(Doing::Writing, &self.path, error, ""))
    }

    fn finish(mut self, bytes: u64) -> Result<Stream> {
        let synced = self.file.flush().and_then(|()| self.file.get_ref().sync_all());
        synced.map_err(|error| failed(Doing::Writing, &self.path, error, ""))?;
        match self.bytes == bytes {
            true => Ok(Stream { file: self.name, bytes, xxh3: format!("{:016x}", self.sum.finish()) }),
            false => Err(Error::Internal(format!(
                "{} has {} bytes instead of {bytes}",
                self.path.display(),
                self.bytes
            ))),
        }
    }
}

/// Files of an extent, by stream. A file is `None` after a write to it failed.
struct Files<'a> {
    tier: &'a Tier,
    target: &'a Target,
    files: Vec<Option<ExportFile>>,
    passed: &'a mut dyn FnMut(u64) -> Result<()>,
}

impl BlockVisitor for Files<'_> {
    fn blocks(&mut self, run: &Run, bytes: &TransferBuffer) -> Result<()> {
        (self.passed)(bytes.len() as u64)?;
        let mut copy = try_vec::with_capacity("copying a part of an extent", bytes.len())?;
        bytes.span().with_bytes(|bytes| copy.extend_from_slice(bytes));
        let Some(mut file) = self.files[run.stream].take() else { return Ok(()) };
        let written = self.target.within(Doing::Writing, move || file.write(&copy).map(|()| file))?;
        self.files[run.stream] = Some(written);
        Ok(())
    }

    fn unreadable(&mut self, path: usize, error: Error) -> Result<()> {
        self.tier.mark_if_hung(path, &error);
        Err(error)
    }

    fn damage(&mut self, error: Error) -> Result<()> {
        Err(error)
    }
}

fn memory_for(sizes: &[u64]) -> Result<(Vec<Scratch>, Vec<TransferBuffer>)> {
    let memory = sizes.iter().map(|bytes| Scratch::new(*bytes as usize)).collect::<Result<Vec<_>>>()?;
    let spans = memory.iter().map(Scratch::transfer).collect();
    Ok((memory, spans))
}

/// Path of a file of the export. The name must be a plain file name, so that it cannot leave the directory.
fn stream_path(directory: &Path, file: &str) -> Result<PathBuf> {
    match file.is_empty() || file.starts_with('.') || file.contains(['/', '\0']) {
        true => Err(broken(&directory.join(MANIFEST), format!("{file:?} is not a valid name of a file"))),
        false => Ok(directory.join(file)),
    }
}

fn read_manifest(path: &Path) -> Result<Manifest> {
    let mut message = Vec::new();
    let fail = |error| failed(Doing::Opening, path, error, "");
    let file = private_files::open_to_check(path).map_err(fail)?;
    let bytes = file.metadata().map_err(fail)?.len();
    if bytes > MAX_MANIFEST {
        return Err(broken(
            path,
            format!("it has {bytes} bytes, but the limit of a manifest is {MAX_MANIFEST}"),
        ));
    }
    file.take(MAX_MANIFEST).read_to_end(&mut message).map_err(fail)?;
    let manifest: Manifest =
        serde_json::from_slice(&message).map_err(|error| broken(path, error.to_string()))?;
    match (manifest.format.as_str(), manifest.version) {
        (FORMAT, VERSION) => Ok(manifest),
        (FORMAT, version) => {
            Err(broken(path, format!("its version is {version}, but this library reads {VERSION}")))
        }
        (other, _) => Err(broken(path, format!("its format {other:?} is unknown"))),
    }
}

fn broken(path: &Path, message: String) -> Error {
    TierError::at(TierKind::Format, path.to_string_lossy(), message)
}

fn parse_hex(text: &str) -> Option<Vec<u8>> {
    let digits: Option<Vec<u8>> = text.chars().map(|digit| digit.to_digit(16).map(|n| n as u8)).collect();
    let digits = digits.filter(|digits| digits.len().is_multiple_of(2))?;
    Some(digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect())
}

fn new_file(path: &Path) -> io::Result<fs::File> {
    descriptor::open(fs::File::options().read(true).write(true).create_new(true), path)
}

fn write_durably(path: &Path, bytes: &[u8]) -> Result<()> {
    let written = new_file(path).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()
    });
    written.map_err(|error| failed(Doing::Writing, path, error, ""))
}

/// Length of a file of an export.
fn length_of(path: &Path) -> Result<u64> {
    let found = fs::metadata(path).map_err(|error| failed(Doing::Opening, path, error, ""))?;
    match found.is_file() {
        true => Ok(found.len()),
        false => Err(broken(path, "it is no regular file".to_string())),
    }
}

impl Target {
    /// Fills a span from a file, one part at a time.
    fn read_into(&self, path: &Path, span: Span) -> Result<()> {
        const PART: usize = 16 << 20;
        let opened = path.to_path_buf();
        let mut file = self.within(Doing::Opening, move || {
            private_files::open_to_check(&opened).map_err(|error| failed(Doing::Opening, &opened, error, ""))
        })?;
        for from in (0..span.len()).step_by(PART) {
            let (path, len) = (path.to_path_buf(), PART.min(span.len() - from));
            let (next, part) = self.within(Doing::Reading, move || {
                let mut part = try_vec::from_fn("reading a file of an export", len, |_| 0)?;
                file.read_exact(&mut part).map_err(|error| failed(Doing::Reading, &path, error, ""))?;
                Ok((file, part))
            })?;
            file = next;
            span.part(from, len).write(&part);
        }
        Ok(())
    }
}

fn sync_directory(path: &Path) -> Result<()> {
    let synced = fs::File::open(path).and_then(|directory| directory.sync_all());
    synced.map_err(|error| failed(Doing::Syncing, path, error, ""))
}
