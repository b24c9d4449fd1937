//! A sequential load on one file through the library's I/O engines, for bench and tune.
//!
//! Each engine has its own range of the file, and memory for as many blocks as it has in flight. One thread per engine
//! submits an operation as soon as its memory is free. Setup of engines and memory is not timed; each pass opens the
//! file once.
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
use spillway::pool::fixed::{Pool, PoolOptions};
use spillway::pool::region::Backing;
use spillway::sys::file::Access;
use spillway::sys::host;
use spillway::sys::span::Span;
use spillway::sys::usage::cpu_time;

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
    pub engines: usize,
    /// Blocks per operation.
    pub blocks: usize,
}

impl Shape {
    fn operation_bytes(&self) -> usize {
        self.block_bytes * self.blocks
    }
}

/// Measurements of one pass over the file.
#[derive(Debug, Clone, Copy)]
pub struct Pass {
    pub bytes: u64,
    pub seconds: f64,
    pub cpu_seconds: f64,
}

impl Pass {
    pub fn gb_per_s(&self) -> f64 {
        self.bytes as f64 / self.seconds / 1e9
    }

    pub fn cpu_seconds_per_gb(&self) -> f64 {
        self.cpu_seconds / (self.bytes as f64 / 1e9)
    }
}

/// A test file is written in blocks of so many bytes.
pub const FILE_BLOCK: u64 = 4 << 20;

/// An unlinked file of random bytes: it disappears when it is dropped or the process ends.
pub struct TestFile {
    /// Path of the open file in `/proc`, valid for this process and its children.
    pub path: PathBuf,
    pub bytes: u64,
    _open: std::fs::File,
}

impl TestFile {
    /// Creates the file in `directory`; `bytes` is a multiple of [`FILE_BLOCK`].
    pub fn create(directory: &Path, bytes: u64) -> Result<TestFile> {
        let open = nameless(directory).map_err(|error| Error::system("creating the test file", &error))?;
        let path = PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), open.as_raw_fd()));
        let file = TestFile { path, bytes, _open: open };
        let shape = Shape { block_bytes: FILE_BLOCK as usize, depth: 8, engines: 1, blocks: 1 };
        Load::open(shape, BackendChoice::Auto)?.run(&file, Direction::Write, bytes, 1)?;
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

/// The engines and their memory.
pub struct Load {
    shape: Shape,
    loads: Vec<EngineLoad>,
}

struct EngineLoad {
    engine: Engine,
    pool: Pool,
    buffers: Vec<Span>,
}

impl Load {
    pub fn open(shape: Shape, backend: BackendChoice) -> Result<Load> {
        let loads =
            (0..shape.engines).map(|n| EngineLoad::open(shape, backend, n as u64)).collect::<Result<_>>()?;
        Ok(Load { shape, loads })
    }

    /// "io_uring" or "threads".
    pub fn backend(&self) -> Result<&'static str> {
        Ok(self.loads[0].engine.stats()?.backend)
    }

    /// Makes `times` passes over the first `bytes` bytes of the file, rounded down to whole operations.
    pub fn run(&self, file: &TestFile, direction: Direction, bytes: u64, times: u32) -> Result<Pass> {
        let operations =
            bytes.min(file.bytes) / self.shape.operation_bytes() as u64 / self.loads.len() as u64;
        let access = match direction {
            Direction::Read => Access::Read,
            Direction::Write => Access::Write { mode: 0o600 },
        };
        let cpu = cpu_time();
        let start = Instant::now();
        let open = Arc::new(File::open(&file.path, access, true)?);
        std::thread::scope(|scope| {
            let passes: Vec<_> = self
                .loads
                .iter()
                .enumerate()
                .map(|(n, load)| {
                    let first = n as u64 * operations;
                    let open = &open;
                    std::thread::Builder::new().spawn_scoped(scope, move || {
                        (0..times).try_for_each(|_| load.pass(open, direction, first, operations))
                    })
                })
                .collect();
            passes.into_iter().try_for_each(|pass| {
                let pass = pass.map_err(|error| Error::system("starting a thread", &error))?;
                pass.join().unwrap_or_else(|_| Err(thread_panicked()))
            })
        })?;
        Ok(Pass {
            bytes: u64::from(times) * operations * (self.shape.operation_bytes() * self.loads.len()) as u64,
            seconds: start.elapsed().as_secs_f64(),
            cpu_seconds: (cpu_time() - cpu).as_secs_f64(),
        })
    }
}

impl EngineLoad {
    fn open(shape: Shape, backend: BackendChoice, seed: u64) -> Result<EngineLoad> {
        let Shape { block_bytes, depth, .. } = shape;
        let options =
            Options { backend, depth, workers: depth, block_bytes: block_bytes as u64, ..Options::default() };
        let engine = Engine::open(options)?;
        let bytes = shape.operation_bytes();
        let block_count = (depth as usize * block_bytes).div_ceil(bytes).max(2);
        let pool = Pool::open(PoolOptions { block_bytes: bytes, block_count, backing: Backing::default() })?;
        let buffers = (0..block_count).map(|_| pool.alloc()).collect::<Result<Vec<Span>>>()?;
        buffers.iter().enumerate().for_each(|(n, buffer)| fill(*buffer, seed * 4096 + n as u64));
        Ok(EngineLoad { engine, pool, buffers })
    }

    fn pass(&self, file: &Arc<File>, direction: Direction, first: u64, count: u64) -> Result<()> {
        const WAIT_TIMEOUT: Option<Duration> = Some(Duration::from_secs(60));
        let mut in_flight = VecDeque::new();
        for n in 0..count {
            if in_flight.len() == self.buffers.len() {
                in_flight.pop_front().map_or(Ok(0), |handle| self.engine.wait(handle, WAIT_TIMEOUT))?;
            }
            let span = self.buffers[n as usize % self.buffers.len()];
            let offset = (first + n) * span.len() as u64;
            let request = Request {
                target: Target::File(Arc::clone(file)),
                offset,
                buffer: span.into(),
                deadline: None,
            };
            in_flight.push_back(match direction {
                Direction::Read => self.engine.read(request)?,
                Direction::Write => self.engine.write(request)?,
            });
        }
        in_flight.into_iter().try_for_each(|handle| self.engine.wait(handle, WAIT_TIMEOUT).map(drop))
    }
}

impl Drop for EngineLoad {
    fn drop(&mut self) {
        // Close the engine first: the pool keeps buffers that are still in use.
        let _ = self.engine.close(Some(Duration::from_secs(60)));
        self.buffers.iter().for_each(|buffer| drop(self.pool.free(buffer.address())));
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

fn thread_panicked() -> Error {
    Error::System { what: "measuring", reason: "a thread ended unexpectedly".to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_file_has_no_name_that_anybody_could_have_planted_and_leaves_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let file = TestFile::create(directory.path(), 8 << 20).unwrap();
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "not even while it is used");
        let shape = Shape { block_bytes: 1 << 20, depth: 2, engines: 2, blocks: 1 };
        let load = Load::open(shape, BackendChoice::Threads).unwrap();
        for direction in [Direction::Read, Direction::Write] {
            assert_eq!(load.run(&file, direction, file.bytes, 1).unwrap().bytes, 8 << 20);
        }
        assert_eq!(std::fs::metadata(&file.path).unwrap().len(), 8 << 20);
    }
}
