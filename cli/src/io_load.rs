//! A sequential load on one file through the library's I/O engine, for tune.
//!
//! The engine has memory for as many blocks as are in flight. An operation is submitted as soon as its memory is free. Setup of
//! engine and memory is not timed; each pass opens the file once.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use spillway::error::{Error, Result};
use spillway::io::engine::Engine;
use spillway::io::file::File;
use spillway::io::options::{BackendChoice, Options, Request, Target};
use spillway::pool::buffer::Buffer;
use spillway::pool::region::Backing;
use spillway::sys::file::Access;
use spillway::sys::host;
use spillway::sys::span::Span;

/// Direction of the load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    Read,
    Write,
}

/// Settings of a load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    pub block_bytes: usize,
    pub depth: u32,
}

/// A test file is written in blocks of so many bytes.
const FILE_BLOCK: u64 = 4 << 20;

/// An unlinked file of random bytes: it disappears when it is dropped or the process ends.
pub struct TestFile {
    /// Path of the open file in `/proc`, valid for this process and its children.
    path: PathBuf,
    pub bytes: u64,
    _open: std::fs::File,
}

impl TestFile {
    /// Creates the file in `directory`; `bytes` is a multiple of [`FILE_BLOCK`].
    pub fn create(directory: &Path, bytes: u64) -> Result<TestFile> {
        let open = nameless(directory).map_err(|error| Error::system("creating the test file", &error))?;
        let path = PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), open.as_raw_fd()));
        let file = TestFile { path, bytes, _open: open };
        let shape = Shape { block_bytes: FILE_BLOCK as usize, depth: 8 };
        Load::open(shape, BackendChoice::Auto)?.pass(&file, Direction::Write, bytes)?;
        Ok(file)
    }
}

/// Creates a file with a random name and unlinks it at once.
fn nameless(directory: &Path) -> io::Result<std::fs::File> {
    let path = directory.join(format!(".spillway-bench-{:032x}", host::random()?));
    // Exclusive creation: an existing file or link is never opened.
    let mut options = std::fs::OpenOptions::new();
    let file = options.read(true).write(true).create_new(true).mode(0o600).open(&path)?;
    std::fs::remove_file(&path)?;
    Ok(file)
}

/// An engine and its memory.
pub struct Load {
    engine: Engine,
    buffers: Vec<Buffer>,
}

impl Load {
    pub fn open(shape: Shape, backend: BackendChoice) -> Result<Load> {
        let Shape { block_bytes, depth } = shape;
        let options =
            Options { backend, depth, workers: depth, block_bytes: block_bytes as u64, ..Options::default() };
        let engine = Engine::open(options)?;
        let buffers = Buffer::open_many((depth as usize).max(2), block_bytes, Backing::default())?;
        buffers.iter().enumerate().for_each(|(n, buffer)| fill(buffer.span(), n as u64));
        Ok(Load { engine, buffers })
    }

    /// GB/s of a pass over the first `bytes` bytes of the file, rounded down to whole blocks.
    pub fn gb_per_s(&self, file: &TestFile, direction: Direction, bytes: u64) -> Result<f64> {
        let start = Instant::now();
        let moved = self.pass(file, direction, bytes)?;
        Ok(moved as f64 / start.elapsed().as_secs_f64() / 1e9)
    }

    /// The number of bytes read or written.
    fn pass(&self, file: &TestFile, direction: Direction, bytes: u64) -> Result<u64> {
        const WAIT_TIMEOUT: Option<Duration> = Some(Duration::from_secs(60));
        let access = match direction {
            Direction::Read => Access::Read,
            Direction::Write => Access::Write { mode: 0o600 },
        };
        let open = Arc::new(File::open(&file.path, access, true)?);
        let block_bytes = self.buffers[0].span().len() as u64;
        let count = bytes.min(file.bytes) / block_bytes;
        let mut in_flight = VecDeque::new();
        for n in 0..count {
            if in_flight.len() == self.buffers.len() {
                in_flight.pop_front().map_or(Ok(0), |handle| self.engine.wait(handle, WAIT_TIMEOUT))?;
            }
            let buffer = &self.buffers[n as usize % self.buffers.len()];
            let offset = n * block_bytes;
            let request = Request {
                target: Target::File(Arc::clone(&open)),
                offset,
                buffer: buffer.transfer(0, buffer.span().len()),
                deadline: None,
            };
            in_flight.push_back(match direction {
                Direction::Read => self.engine.read(request)?,
                Direction::Write => self.engine.write(request)?,
            });
        }
        in_flight.into_iter().try_for_each(|handle| self.engine.wait(handle, WAIT_TIMEOUT).map(drop))?;
        Ok(count * block_bytes)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        let _ = self.engine.close(Some(Duration::from_secs(60)));
    }
}

/// Fills a block with random bytes, so that a device cannot compress them.
fn fill(block: Span, seed: u64) {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut page = [0_u8; 4096];
    for from in (0..block.len()).step_by(page.len()) {
        for word in page.chunks_exact_mut(8) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            word.copy_from_slice(&state.to_le_bytes());
        }
        let len = page.len().min(block.len() - from);
        block.part(from, len).write(&page[..len]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_file_has_no_name_that_anybody_could_have_planted_and_leaves_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let file = TestFile::create(directory.path(), 8 << 20).unwrap();
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "not even while it is used");
        let shape = Shape { block_bytes: 1 << 20, depth: 2 };
        let load = Load::open(shape, BackendChoice::Threads).unwrap();
        for direction in [Direction::Read, Direction::Write] {
            assert_eq!(load.pass(&file, direction, file.bytes).unwrap(), 8 << 20);
        }
        assert_eq!(std::fs::metadata(&file.path).unwrap().len(), 8 << 20);
    }
}
