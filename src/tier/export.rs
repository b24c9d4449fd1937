//! The committed state as plain files, for checkpoints: each stream's bytes as they are (f32 little endian, as the
//! optimizer keeps them), and a manifest that names and sums them.
//!
//! Invariants:
//! - The directory appears whole and durable, or not at all: it is written beside its place and renamed.
//! - An import changes the tier only by its commit.
#![forbid(unsafe_code)]

use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::directory::failed;
use super::extent::check_name;
use super::place::Placement;
use super::scratch::Scratch;
use super::store::Tier;
use crate::checksum;
use crate::error::{Error, Result, TierError, TierKind};
use crate::io::object::is_address;
use crate::sys::span::Span;

const MANIFEST: &str = "manifest.json";
const FORMAT: &str = "spillway tier export";
const VERSION: u32 = 1;
/// A larger manifest is something else.
const MAX_MANIFEST: u64 = 1 << 30;

#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    format: String,
    version: u32,
    job: String,
    rank: u32,
    world: u32,
    step: u64,
    /// The payload, in hexadecimal.
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
    /// Writes the committed state into `directory`, which must not exist, and gives its step. Something written since the
    /// last commit is an error.
    pub fn export(&self, directory: &Path) -> Result<u64> {
        if directory.to_str().is_some_and(is_address) {
            return Err(Error::invalid("directory", "is in an object store; an export is plain files"));
        }
        let extents = self.extents();
        let (step, payload) = {
            let state = self.lock();
            (state.step, state.payload.clone())
        };
        let nothing = || TierError::at(TierKind::NoState, self.some_name(), "nothing was committed yet");
        let step = step.ok_or_else(nothing)?;
        if let Some(extent) = extents.iter().find(|extent| !extent.committed) {
            return Err(Error::Busy(format!("extent {:?} was written since the last commit", extent.name)));
        }
        if directory.exists() {
            let error = io::Error::from_raw_os_error(libc::EEXIST);
            return Err(failed("opening", directory, error, "an export makes its directory itself"));
        }
        let mut name = directory.file_name().unwrap_or_default().to_os_string();
        name.push(".partial");
        let partial = directory.with_file_name(name);
        if partial.exists() {
            fs::remove_dir_all(&partial).map_err(|error| failed("removing", &partial, error, ""))?;
        }
        fs::create_dir_all(&partial).map_err(|error| failed("opening", &partial, error, ""))?;
        let written = extents.iter().filter(|extent| extent.generation > 0);
        let exported = written.map(|extent| self.export_extent(extent.number, &extent.name, &partial));
        let manifest = Manifest {
            format: FORMAT.to_string(),
            version: VERSION,
            job: self.options.owner.job.clone(),
            rank: self.options.owner.rank,
            world: self.options.world,
            step,
            payload: payload.iter().map(|byte| format!("{byte:02x}")).collect(),
            extents: exported.collect::<Result<_>>()?,
        };
        let words = serde_json::to_vec_pretty(&manifest)
            .map_err(|error| Error::System { what: "writing a manifest", reason: error.to_string() })?;
        write_durably(&partial.join(MANIFEST), &words)?;
        sync_directory(&partial)?;
        fs::rename(&partial, directory).map_err(|error| failed("writing", directory, error, ""))?;
        sync_directory(directory.parent().filter(|up| !up.as_os_str().is_empty()).unwrap_or(Path::new(".")))?;
        Ok(step)
    }

    fn export_extent(&self, number: u32, name: &str, directory: &Path) -> Result<Exported> {
        let (memory, spans) = memory_for(self.shape(number)?.streams())?;
        let ticket = self.read(number, &spans, false)?;
        self.wait(ticket, None)?;
        let mut streams = Vec::new();
        for (stream, scratch) in memory.iter().enumerate() {
            let file = format!("extent-{number:05}.stream-{stream}.bin");
            let path = directory.join(&file);
            let sum = scratch
                .span()
                .with_bytes(|bytes| write_durably(&path, bytes).map(|()| checksum::of(bytes)))?;
            streams.push(Stream { file, bytes: scratch.span().len() as u64, xxh3: format!("{sum:016x}") });
        }
        Ok(Exported { name: name.to_string(), streams })
    }

    /// Reads an export into this tier and commits it at its step, which it gives. Extents that exist must have the same
    /// streams; others stay as they are.
    pub fn import(&self, directory: &Path) -> Result<u64> {
        let manifest = read_manifest(&directory.join(MANIFEST))?;
        let payload = parse_hex(&manifest.payload)
            .ok_or_else(|| broken(&directory.join(MANIFEST), "its payload is not hexadecimal".to_string()))?;
        let loaded = manifest.extents.iter().try_for_each(|extent| self.import_extent(extent, directory));
        match loaded.and_then(|()| self.commit(manifest.step, &payload)) {
            Ok(()) => Ok(manifest.step),
            Err(error) => {
                self.roll_back()?;
                Err(error)
            }
        }
    }

    fn import_extent(&self, extent: &Exported, directory: &Path) -> Result<()> {
        check_name("manifest.name", &extent.name)?;
        let sizes: Vec<u64> = extent.streams.iter().map(|stream| stream.bytes).collect();
        // Before the memory is taken: the manifest may say anything.
        for stream in &extent.streams {
            let path = stream_path(directory, &stream.file)?;
            let found = fs::metadata(&path).map_err(|error| failed("opening", &path, error, ""))?.len();
            if found != stream.bytes {
                return Err(broken(
                    &path,
                    format!("it has {found} bytes, the manifest says {}", stream.bytes),
                ));
            }
        }
        let number = self.define(&extent.name, &sizes)?;
        let (_memory, spans) = memory_for(&sizes)?;
        for (stream, span) in extent.streams.iter().zip(&spans) {
            let path = stream_path(directory, &stream.file)?;
            read_into(&path, *span)?;
            let sum = span.with_bytes(checksum::of);
            if format!("{sum:016x}") != stream.xxh3 {
                let words = format!("its checksum is {sum:016x}, the manifest says {}", stream.xxh3);
                return Err(TierError::at(TierKind::Corrupt, path.to_string_lossy(), words));
            }
        }
        let ticket = self.write(number, &spans, &Placement::Auto, None)?;
        self.wait(ticket, None).map(|_| ())
    }
}

fn memory_for(sizes: &[u64]) -> Result<(Vec<Scratch>, Vec<Span>)> {
    let memory = sizes.iter().map(|bytes| Scratch::new(*bytes as usize)).collect::<Result<Vec<_>>>()?;
    let spans = memory.iter().map(Scratch::span).collect();
    Ok((memory, spans))
}

/// A file of the export: a plain name, never a way out of its directory.
fn stream_path(directory: &Path, file: &str) -> Result<PathBuf> {
    match file.is_empty() || file.starts_with('.') || file.contains(['/', '\0']) {
        true => Err(broken(&directory.join(MANIFEST), format!("{file:?} is no name of a file"))),
        false => Ok(directory.join(file)),
    }
}

fn read_manifest(path: &Path) -> Result<Manifest> {
    let mut words = Vec::new();
    let file = fs::File::open(path).map_err(|error| failed("opening", path, error, ""))?;
    file.take(MAX_MANIFEST).read_to_end(&mut words).map_err(|error| failed("opening", path, error, ""))?;
    let manifest: Manifest =
        serde_json::from_slice(&words).map_err(|error| broken(path, error.to_string()))?;
    match (manifest.format.as_str(), manifest.version) {
        (FORMAT, VERSION) => Ok(manifest),
        (FORMAT, version) => {
            Err(broken(path, format!("its version is {version}, this library reads {VERSION}")))
        }
        (other, _) => Err(broken(path, format!("its format is {other:?}"))),
    }
}

fn broken(path: &Path, words: String) -> Error {
    TierError::at(TierKind::Format, path.to_string_lossy(), words)
}

fn parse_hex(text: &str) -> Option<Vec<u8>> {
    let digits: Option<Vec<u8>> = text.chars().map(|digit| digit.to_digit(16).map(|n| n as u8)).collect();
    let digits = digits.filter(|digits| digits.len().is_multiple_of(2))?;
    Some(digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect())
}

fn write_durably(path: &Path, bytes: &[u8]) -> Result<()> {
    let written = fs::File::create_new(path).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()
    });
    written.map_err(|error| failed("writing", path, error, ""))
}

fn read_into(path: &Path, span: Span) -> Result<()> {
    const PART: usize = 1 << 20;
    let fail = |error| failed("reading", path, error, "");
    let mut file = fs::File::open(path).map_err(fail)?;
    let mut buffer = vec![0; PART.min(span.len())];
    for from in (0..span.len()).step_by(PART) {
        let part = &mut buffer[..PART.min(span.len() - from)];
        file.read_exact(part).map_err(fail)?;
        span.part(from, part.len()).write(part);
    }
    Ok(())
}

fn sync_directory(path: &Path) -> Result<()> {
    let synced = fs::File::open(path).and_then(|directory| directory.sync_all());
    synced.map_err(|error| failed("syncing", path, error, ""))
}
