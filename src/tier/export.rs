//! Export of the committed state as plain files: a directory with a file of raw bytes for each stream (f32 little endian,
//! as the optimizer keeps them) and a manifest, or one safetensors file.
//!
//! Invariants:
//! - The directory or file appears complete and durable, or not at all: it is written under a temporary name and then
//!   renamed.
//! - An export removes or changes only files that it created itself.
//! - An export holds one commit: its step and all its bytes are of one snapshot. Writes and commits may continue
//!   meanwhile. The space of an extent is free again once it is exported.
//! - A caller waits for each call on the directory at most for the I/O timeout (see `storage`).
//! - Every block is compared with its checksum before it is written.
//! - In a directory on the file system of a path, if that one can share blocks between files (reflinks: XFS, btrfs), the
//!   files share the blocks of the path. They are read and compared, but not written, and take no space until the tier
//!   writes other data to its own.
//! - An export uses the memory of its lanes, for extents of any size (see `lanes`).
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::fs;
use std::io::{self, Write};
use std::ops::{Deref, Range};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::catalog::{Held, HeldContents, Subject, View};
use super::extent::{PAGE, Run};
use super::lanes::{self, Buffers, Route};
use super::manifest::{Exported, Header, MANIFEST, Manifest, Stream, digits, item_bytes, sum_of};
use super::options::absolute;
use super::select::Selection;
use super::storage::{failed, within_timeout};
use super::store::{self, HeldExtent, Tier};
use super::stored::{StoredPart, StoredReader};
use crate::error::{Doing, Error, Result};
use crate::io::engine::Engine;
use crate::io::file::File;
use crate::io::options::{Request, Target as IoTarget};
use crate::pool::transfer_buffer::TransferBuffer;
use crate::sys::file::Access;
use crate::sys::time_limit::{self, Call};
use crate::sys::{descriptor, file, host};
use spillway_stores::is_address;

/// Called with the bytes of each part before it is written. Its error ends the export, which leaves nothing.
pub type Passed<'a> = &'a (dyn Fn(u64) -> Result<()> + Sync);

/// Name and dtype of each tensor of an extent, by the extent's name and number of streams.
pub type Tensors<'a> = &'a dyn Fn(&str, usize) -> Vec<(String, String)>;

/// What an export writes.
#[derive(Clone, Copy)]
pub enum Form<'a> {
    /// A directory.
    Directory,
    /// A safetensors file with these tensors.
    Safetensors(Tensors<'a>),
}

/// How much bandwidth an export takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pace {
    /// All that the paths have.
    Fast,
    /// One part at a time, so that steps keep most of it.
    Gentle,
}

impl Tier {
    /// Writes the committed state to `directory`, which must not exist, and returns the step. `NoState` if nothing was
    /// committed.
    pub fn export(&self, directory: &Path) -> Result<u64> {
        Export::begin(self, directory, Form::Directory, &Selection::default())?.run(Pace::Fast, &|_| Ok(()))
    }
}

/// An export whose state is held and whose files are made. `T` refers to the tier, or owns a part of it.
pub struct Export<T: Deref<Target = Tier>> {
    tier: T,
    items: Vec<Arc<Item<T>>>,
    output: Arc<Output>,
    partial: Partial,
    manifest: Manifest,
    /// The header of a safetensors file.
    header: Option<Header>,
    /// True if every byte of the extents is written, so that an import can restore them.
    whole: bool,
}

/// An extent that is exported.
struct Item<T: Deref<Target = Tier>> {
    extent: HeldExtent<T>,
    /// Index of its first stream in [`Output::streams`].
    first: usize,
}

/// The path of a lane, or all paths, and the extents with data there.
type Lane<T> = (Option<usize>, Vec<Arc<Item<T>>>);

/// Where the bytes go.
struct Output {
    engine: Engine,
    target: Target,
    files: Vec<PathBuf>,
    streams: Vec<OutputStream>,
    /// For each path, whether the files share its blocks.
    shares: Vec<bool>,
}

struct OutputStream {
    /// Index of the file.
    file: usize,
    /// Where the range begins in the file.
    at: u64,
    /// The bytes of the stream that are written.
    range: Range<u64>,
    /// Sum of the parts so far.
    sum: AtomicU64,
}

impl<T: Deref<Target = Tier> + Clone + Send + Sync> Export<T> {
    /// Takes a snapshot of the last commit, and makes the files for what `selection` takes of it. `to` must not exist.
    pub fn begin(tier: T, to: &Path, form: Form, selection: &Selection) -> Result<Export<T>> {
        if to.to_str().is_some_and(is_address) {
            return Err(Error::invalid(
                "directory",
                "is in an object store, but an export needs a local directory",
            ));
        }
        // The directory is named several times.
        let to = absolute(to)?;
        let mut held = store::snapshot(&tier, View::Committed)?;
        held.lost.retain(|error| !matches!(error, Error::Tier(lost) if !selection.takes(&lost.extent)));
        if !held.lost.is_empty() {
            return Err(held.lost.remove(0));
        }
        held.extents.retain(|extent| selection.takes(&extent.held.subject.name));
        if held.extents.is_empty() && !selection.names.is_empty() {
            return Err(selection.nothing(&tier.state.lock().catalog.paths().some_name()));
        }
        if to.file_name().is_none() {
            return Err(Error::invalid(
                "directory",
                format!("{} is not the name of a new directory", to.display()),
            ));
        }
        let io_timeout = tier.options.io.io_timeout;
        let engine = Engine::open(tier.options.beside())?;
        let target = Target { directory: to, io_timeout };
        let partial = target.create()?;
        let shares = match form {
            Form::Directory => shares(&tier, &held.extents, &target, &partial),
            Form::Safetensors(_) => vec![false; tier.volumes.len()],
        };
        let output = Output { engine, target, files: Vec::new(), streams: Vec::new(), shares };
        let owner = &tier.options.owner;
        let step = held.step.unwrap_or_default();
        let rank = (owner.rank, tier.options.world);
        let mut manifest = Manifest::new(&owner.job, rank, step, &held.payload);
        manifest.partial = !selection.is_whole();
        let items = Vec::new();
        let header = matches!(form, Form::Safetensors(_)).then(Header::default);
        let (output, whole) = (Arc::new(output), selection.range.is_none());
        let mut export = Export { tier, items, output, partial, manifest, header, whole };
        export.lay_out(held, form, selection)?;
        Ok(export)
    }

    /// Gives every stream its place, and makes the files.
    fn lay_out(
        &mut self,
        held: HeldContents<HeldExtent<T>>,
        form: Form,
        selection: &Selection,
    ) -> Result<()> {
        let output =
            Arc::get_mut(&mut self.output).ok_or_else(|| Error::Internal("an export began twice".into()))?;
        let mut end = 0;
        for extent in held.extents {
            let (subject, first) = (&extent.held.subject, output.streams.len());
            let lengths = subject.shape.streams();
            let tensors = match form {
                Form::Directory => Vec::new(),
                Form::Safetensors(tensors) => tensors(&subject.name, lengths.len()),
            };
            let mut exported = Exported { name: subject.name.clone(), streams: Vec::new() };
            for (number, bytes) in lengths.iter().copied().enumerate() {
                let (place, range) = match (&mut self.header, tensors.get(number)) {
                    (Some(header), Some((name, dtype))) => {
                        let (range, elements) = elements(selection, name, dtype, bytes)?;
                        header.add(name, dtype, elements, end, end + (range.end - range.start))?;
                        (name.clone(), range)
                    }
                    _ => {
                        let name = format!("extent-{:05}.stream-{number}.bin", subject.extent);
                        output.files.push(self.partial.0.join(&name));
                        (name, selection.of_stream(bytes))
                    }
                };
                let file = output.files.len().saturating_sub(1);
                let at = if self.header.is_some() { end } else { 0 };
                end += range.end - range.start;
                output.streams.push(OutputStream { file, at, range, sum: AtomicU64::new(0) });
                exported.streams.push(Stream { place, bytes, checksum: digits(0) });
            }
            self.manifest.extents.push(exported);
            self.items.push(Arc::new(Item { extent, first }));
        }
        let Some(header) = &mut self.header else {
            let all_shared = output.shares.iter().all(|shares| *shares);
            return output.streams.iter().try_for_each(|stream| {
                let bytes = stream.range.end - stream.range.start;
                output.create(&output.files[stream.file], if all_shared { 0 } else { bytes })
            });
        };
        if self.whole {
            header.describe(&self.manifest)?;
        }
        // Checksums have a fixed length, so the header keeps its length when they are known.
        let begin = header.packed()?.len() as u64;
        output.streams.iter_mut().for_each(|stream| stream.at += begin);
        let file = self.partial.0.join("tensors");
        output.create(&file, begin + end)?;
        output.files.push(file);
        Ok(())
    }

    /// Bytes that the export writes.
    pub fn bytes(&self) -> u64 {
        self.output.streams.iter().map(|stream| stream.range.end - stream.range.start).sum()
    }

    /// The step of the snapshot.
    pub fn step(&self) -> u64 {
        self.manifest.step
    }

    /// Writes the files, and returns the step.
    pub fn run(mut self, pace: Pace, passed: Passed) -> Result<u64> {
        let (step, tier, output) = (self.step(), &*self.tier, &self.output);
        let paths = tier.volumes.len();
        let items = std::mem::take(&mut self.items);
        let on = |path: usize| -> Vec<Arc<Item<T>>> {
            let there = items.iter().filter(|item| item.extent.held.contents.version().touches(path as u32));
            there.cloned().collect()
        };
        let lanes: Vec<Lane<T>> = match pace {
            Pace::Fast => {
                (0..paths).map(|path| (Some(path), on(path))).filter(|(_, items)| !items.is_empty()).collect()
            }
            Pace::Gentle => vec![(None, items)],
        };
        let buffers = match pace {
            Pace::Fast => Buffers::of(lanes.len(), tier.block_bytes),
            Pace::Gentle => Buffers::gentle(tier.block_bytes),
        };
        lanes::each(lanes, |(path, items), stop| {
            let mut route = Exporting {
                tier,
                output,
                passed,
                reader: StoredReader::new(tier, None),
                opened: None,
                storing: VecDeque::new(),
                written: None,
            };
            let parts = items.into_iter().flat_map(|item| parts(item, path, buffers.bytes, output));
            lanes::run(parts, buffers, stop, &mut route)?;
            route.sync_written()
        })?;
        self.publish()?;
        Ok(step)
    }

    /// Writes the manifest or the header, and gives the files their name.
    fn publish(self) -> Result<()> {
        let Export { output, partial, mut manifest, header, whole, .. } = self;
        let sums = output.streams.iter().map(|stream| digits(stream.sum.load(Ordering::Relaxed)));
        let streams = manifest.extents.iter_mut().flat_map(|extent| &mut extent.streams);
        streams.zip(sums).for_each(|(stream, sum)| stream.checksum = sum);
        manifest.seal()?;
        match header {
            None => output.target.publish_directory(partial, manifest.json()?),
            Some(mut header) => {
                if whole {
                    header.describe(&manifest)?;
                }
                output.target.publish_file(partial, output.files[0].clone(), header.packed()?)
            }
        }
    }
}

/// How the names of 8-bit moments end.
const CODES: &str = "_codes";

/// The bytes that are taken of a tensor, and their number of elements. The range counts elements.
fn elements(selection: &Selection, name: &str, dtype: &str, bytes: u64) -> Result<(Range<u64>, u64)> {
    let item = item_bytes(dtype)
        .ok_or_else(|| Error::invalid("dtype", format!("{dtype:?} is none of safetensors; use F32 or U8")))?;
    if !bytes.is_multiple_of(item) {
        let reason = format!(
            "{dtype} does not fit tensor {name:?} of {bytes} bytes; use U8 for this extent, also where its name is that of a state"
        );
        return Err(Error::invalid("dtype", reason));
    }
    if selection.range.is_some() && name.ends_with(CODES) {
        let reason = format!(
            "cannot cut {name:?}: 8-bit moments have one scale for 32 elements, behind the codes of all; export the extent without a range"
        );
        return Err(Error::invalid("range", reason));
    }
    let range = selection.of_stream(bytes / item);
    Ok((range.start * item..range.end * item, range.end - range.start))
}

/// The part of an extent that is read, checked and written at once.
struct ExportPart<T: Deref<Target = Tier>> {
    item: Arc<Item<T>>,
    stored: StoredPart,
}

impl<T: Deref<Target = Tier>> ExportPart<T> {
    fn subject(&self) -> &Subject {
        &self.item.extent.held.subject
    }
}

/// The parts of an extent on a path, or on all paths, in their order. Parts outside of the range are left out.
fn parts<T: Deref<Target = Tier>>(
    item: Arc<Item<T>>,
    path: Option<usize>,
    bytes: u64,
    output: &Output,
) -> impl Iterator<Item = ExportPart<T>> {
    let chunks = 0..item.extent.held.contents.version().chunks.len();
    chunks.flat_map(move |number| {
        let Held { subject, contents } = &item.extent.held;
        let chunk = &contents.version().chunks[number];
        if path.is_some_and(|path| path != chunk.path as usize) {
            return Vec::new();
        }
        let wanted = |run: &Run| {
            let range = &output.streams[item.first + run.stream].range;
            run.from < range.end && range.start < run.from + run.len
        };
        let runs = subject.shape.windows(chunk.first, chunk.count, bytes).filter(wanted);
        let part = |stored| ExportPart { item: Arc::clone(&item), stored };
        StoredPart::all(chunk, runs).map(part).collect()
    })
}

/// The route from a tier to files.
struct Exporting<'a> {
    tier: &'a Tier,
    output: &'a Output,
    passed: Passed<'a>,
    reader: StoredReader<'a>,
    /// The file that was opened last. A lane has few open files, whatever their number.
    opened: Option<(usize, Arc<File>)>,
    /// Files of the parts that are being stored.
    storing: VecDeque<(usize, Arc<File>)>,
    /// The file of the part that was stored last, which is not yet synced.
    written: Option<(usize, Arc<File>)>,
}

impl Exporting<'_> {
    fn file(&mut self, number: usize) -> Result<Arc<File>> {
        if let Some((_, file)) = self.opened.as_ref().filter(|(opened, _)| *opened == number) {
            return Ok(Arc::clone(file));
        }
        let file = Arc::new(self.output.open(&self.output.files[number])?);
        self.opened = Some((number, Arc::clone(&file)));
        Ok(file)
    }

    /// Lets the file have whole pages of a part by sharing them. Returns their number of bytes: 0 if they must be written.
    fn share<T: Deref<Target = Tier>>(
        &self,
        part: &ExportPart<T>,
        file: &Arc<File>,
        offset: u64,
        written: &Range<u64>,
    ) -> Result<u64> {
        let StoredPart { chunk, run, .. } = &part.stored;
        let from = chunk.block_offset(&part.subject().shape, run.block) + (written.start - run.from);
        let len = (written.end - written.start) / PAGE * PAGE;
        let aligned = from.is_multiple_of(PAGE) && offset.is_multiple_of(PAGE) && len > 0;
        if !aligned || !self.output.shares[chunk.path as usize] {
            return Ok(0);
        }
        let volume = self.tier.volume(chunk.path as usize)?;
        let (source, file) = (Arc::clone(volume.data_file()), Arc::clone(file));
        let shared = self.output.target.within(Doing::Writing, move || {
            // What the file system refuses to share, such as blocks that too many files have, is written.
            Ok(if file.share_blocks(&source, from, offset, len).is_ok() { len } else { 0 })
        })?;
        Ok(shared)
    }

    fn sync_written(&mut self) -> Result<()> {
        let Some((_, file)) = self.written.take() else { return Ok(()) };
        let engine = &self.output.engine;
        engine.wait(engine.sync(IoTarget::File(file), None)?, None).map(drop)
    }
}

impl<T: Deref<Target = Tier>> Route<ExportPart<T>> for Exporting<'_> {
    fn fetch(&mut self, part: &ExportPart<T>, buffer: &TransferBuffer) -> Result<u64> {
        self.reader.fetch(part.subject(), &part.stored, buffer)
    }

    fn fetched(&mut self, part: &ExportPart<T>, started: Result<u64>) -> Result<()> {
        let fetched = self.reader.fetched(part.subject(), &part.stored, started);
        fetched.inspect_err(|error| self.tier.mark_if_hung(part.stored.chunk.path as usize, error))
    }

    fn check(&mut self, part: &ExportPart<T>, buffer: &TransferBuffer) -> Result<()> {
        if let Some(error) = self.reader.check(part.subject(), &part.stored, buffer)?.next() {
            return Err(error);
        }
        let (run, bytes) = (&part.stored.run, buffer.span().part(0, part.stored.run.len as usize));
        let stream = &self.output.streams[part.item.first + run.stream];
        stream.sum.fetch_add(bytes.with_bytes(|bytes| sum_of(run.from, bytes)), Ordering::Relaxed);
        let written = clipped(run, &stream.range);
        (self.passed)(written.end - written.start)
    }

    fn store(&mut self, part: &ExportPart<T>, buffer: &TransferBuffer) -> Result<u64> {
        let run = &part.stored.run;
        let output = self.output;
        let stream = &output.streams[part.item.first + run.stream];
        let written = clipped(run, &stream.range);
        let file = self.file(stream.file)?;
        let offset = stream.at + (written.start - stream.range.start);
        let shared = self.share(part, &file, offset, &written)?;
        let (start, offset) = (written.start + shared, offset + shared);
        let buffer = buffer.part((start - run.from) as usize, (written.end - start) as usize);
        let target = IoTarget::File(Arc::clone(&file));
        let handle = output.engine.write(Request { target, offset, buffer, deadline: None })?;
        self.storing.push_back((stream.file, file));
        Ok(handle)
    }

    fn stored(&mut self, _: &ExportPart<T>, started: Result<u64>) -> Result<()> {
        self.output.engine.wait(started?, None)?;
        let stored = self.storing.pop_front();
        let same = |written: &(usize, Arc<File>)| stored.as_ref().is_some_and(|(file, _)| *file == written.0);
        if !self.written.as_ref().is_none_or(same) {
            self.sync_written()?;
        }
        self.written = stored;
        Ok(())
    }
}

/// For each path, whether files in the new directory can share its blocks. Paths without data can.
fn shares<T: Deref<Target = Tier>>(
    tier: &T,
    extents: &[HeldExtent<T>],
    target: &Target,
    partial: &Partial,
) -> Vec<bool> {
    let can_share = |path: usize| {
        let mut chunks = extents.iter().flat_map(|extent| &extent.held.contents.version().chunks);
        let Some(chunk) = chunks.find(|chunk| chunk.path as usize == path) else { return true };
        let Ok(volume) = tier.volume(path) else { return false };
        let (source, from, probe) = (Arc::clone(volume.data_file()), chunk.offset, partial.0.join("shared"));
        let tried = target.within(Doing::Writing, move || {
            let failed = |error| failed(Doing::Writing, &probe, error, "");
            new_file(&probe).map_err(failed)?;
            let file = File::open(&probe, Access::Write { mode: FILE_MODE }, true)?;
            let shared = file.share_blocks(&source, from, 0, PAGE).is_ok();
            fs::remove_file(&probe).map_err(failed)?;
            Ok(shared)
        });
        tried.unwrap_or(false)
    };
    (0..tier.volumes.len()).map(can_share).collect()
}

/// The bytes of a run that lie in a range.
fn clipped(run: &Run, range: &Range<u64>) -> Range<u64> {
    run.from.max(range.start)..(run.from + run.len).min(range.end)
}

impl Output {
    /// Makes a file, and allocates its bytes, so that a full disk is found at the begin.
    fn create(&self, path: &Path, bytes: u64) -> Result<()> {
        let owned = path.to_path_buf();
        let file = self.target.within(Doing::Writing, move || {
            new_file(&owned).map_err(|error| failed(Doing::Writing, &owned, error, ""))?;
            let file = File::open(&owned, Access::Write { mode: FILE_MODE }, true)?;
            file.check_room(0, bytes)?;
            Ok(Arc::new(file))
        })?;
        if bytes == 0 {
            return Ok(());
        }
        let allocated = self.engine.wait(self.engine.allocate(&file, 0, bytes)?, None);
        allocated.map(drop).map_err(|error| if error.is_full() { file.with_free_space(error) } else { error })
    }

    fn open(&self, path: &Path) -> Result<File> {
        let path = path.to_path_buf();
        self.target.within(Doing::Writing, move || File::open(&path, Access::Write { mode: FILE_MODE }, true))
    }
}

/// Where an export appears, and the longest wait for its file system.
pub(super) struct Target {
    pub(super) directory: PathBuf,
    pub(super) io_timeout: Option<Duration>,
}

impl Target {
    pub(super) fn within<T: Send + 'static>(
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

    /// Writes the manifest, and gives the directory its name.
    fn publish_directory(&self, mut partial: Partial, manifest: Vec<u8>) -> Result<()> {
        let directory = self.directory.clone();
        self.within(Doing::Writing, move || {
            write_durably(&partial.0.join(MANIFEST), true, &manifest)?;
            sync_directory(&partial.0)?;
            rename(&partial.0, &directory)?;
            drop(std::mem::take(&mut partial.0));
            sync_directory(&parent_of(&directory))
        })
    }

    /// Writes the header, and gives the file its name.
    fn publish_file(&self, partial: Partial, file: PathBuf, header: Vec<u8>) -> Result<()> {
        let to = self.directory.clone();
        self.within(Doing::Writing, move || {
            write_durably(&file, false, &header)?;
            rename(&file, &to)?;
            drop(partial);
            sync_directory(&parent_of(&to))
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
        "an export creates its directory or file; choose a name that does not exist",
    )
}

fn rename(from: &Path, to: &Path) -> Result<()> {
    match file::rename_new(from, to) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Err(exists(to)),
        renamed => renamed.map_err(|error| failed(Doing::Writing, to, error, "")),
    }
}

/// Temporary directory of an export, created by this call. It is removed unless it was renamed. The descriptor finds it if
/// a directory above it was renamed.
struct Partial(PathBuf, Option<Duration>, Option<fs::File>);

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
                Ok(()) => {
                    let opened = fs::File::open(&partial).ok();
                    return Ok(Partial(partial, io_timeout, opened));
                }
                Err(error) => last = error,
            }
            if last.kind() != io::ErrorKind::AlreadyExists {
                break;
            }
        }
        Err(failed(Doing::Opening, directory, last, "its temporary directory could not be made"))
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        let partial = std::mem::take(&mut self.0);
        if !partial.as_os_str().is_empty() {
            let (path, opened) = (partial.clone(), self.2.take());
            let removal = Call::cleanup(&path, move || {
                let now = opened.as_ref().and_then(|opened| file::name_of(opened).ok());
                drop(fs::remove_dir_all(now.unwrap_or(partial)));
            });
            time_limit::run_all_within(self.1, vec![removal]);
        }
    }
}

/// Permission bits of the files.
const FILE_MODE: u32 = 0o600;

fn new_file(path: &Path) -> io::Result<fs::File> {
    descriptor::open(fs::File::options().read(true).write(true).create_new(true).mode(FILE_MODE), path)
}

/// Writes the first bytes of a file, which is made if it is `new`.
fn write_durably(path: &Path, new: bool, bytes: &[u8]) -> Result<()> {
    let opened = if new { new_file(path) } else { descriptor::open(fs::File::options().write(true), path) };
    let written = opened.and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()
    });
    written.map_err(|error| failed(Doing::Writing, path, error, ""))
}

fn sync_directory(path: &Path) -> Result<()> {
    let synced = fs::File::open(path).and_then(|directory| directory.sync_all());
    synced.map_err(|error| failed(Doing::Syncing, path, error, ""))
}
