//! Checks of a directory: direct I/O, both I/O backends, the profile, and a tier from creation to resumption.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::time::Duration;

use spillway::error::{Error, Result};
use spillway::io::engine::Engine;
use spillway::io::file::File;
use spillway::io::options::{BackendChoice, Options, Request, Target};
use spillway::io::profile;
use spillway::pool::buffer::Buffer;
use spillway::pool::region::Backing;
use spillway::sys::file::{Access, file_system, free_bytes};
use spillway::tier::directory::Owner;
use spillway::tier::options::{Mode, TierOptions};
use spillway::tier::{ExtentPlacement, Tier};

use super::finding::{Finding, Verdict};
use crate::report::io_settings;

const BYTES: usize = 4 << 20;
const WAIT_TIMEOUT: Option<Duration> = Some(Duration::from_secs(60));

pub fn findings(directory: &Path) -> Vec<Finding> {
    let mut findings = match Scratch::new(directory) {
        Err(error) => return vec![writable(directory, &error)],
        Ok(scratch) => vec![direct(&scratch), io_uring(&scratch), threads(&scratch)],
    };
    findings.extend([tuned(directory), tier(directory)]);
    findings
}

fn writable(directory: &Path, error: &std::io::Error) -> Finding {
    let found = format!("cannot create a file in {}: {error}", directory.display());
    Finding::new("directory", Verdict::Fails, found)
}

/// A test file, removed when dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn new(directory: &Path) -> std::io::Result<Scratch> {
        let path = directory.join(format!("spillway-doctor-{}", std::process::id()));
        std::fs::OpenOptions::new().write(true).create_new(true).open(&path)?;
        Ok(Scratch(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn direct(scratch: &Scratch) -> Finding {
    const CHECK: &str = "direct I/O";
    let free = free_bytes(&scratch.0).map_or_else(String::new, |bytes| format!(", {} GiB free", bytes >> 30));
    match File::open(&scratch.0, Access::Write { mode: 0o600 }, true) {
        Err(error) => Finding::new(CHECK, Verdict::Fails, error.to_string()),
        Ok(file) => match file.direct() {
            Some(need) => Finding::ok(CHECK, format!("supported, aligned to {} bytes{free}", need.offset)),
            None => {
                let reason = file.buffered_reason().unwrap_or_default();
                Finding::new(
                    CHECK,
                    Verdict::Worse,
                    format!("unavailable, I/O goes through the page cache: {reason}{free}"),
                )
                .fix("use a directory on ext4, xfs or another file system with O_DIRECT")
            }
        },
    }
}

fn io_uring(scratch: &Scratch) -> Finding {
    const CHECK: &str = "io_uring";
    match round_trip(scratch, BackendChoice::Uring) {
        Ok(()) => Finding::ok(CHECK, "written, read back and compared"),
        Err(error) => Finding::new(CHECK, Verdict::Worse, format!("{error}; threads are used instead")).fix(
            "sysctl kernel.io_uring_disabled=0; in a container, use a seccomp profile that allows \
             io_uring_setup",
        ),
    }
}

fn threads(scratch: &Scratch) -> Finding {
    match round_trip(scratch, BackendChoice::Threads) {
        Ok(()) => Finding::ok("thread I/O", "written, read back and compared"),
        Err(error) => Finding::new("thread I/O", Verdict::Fails, error.to_string()),
    }
}

/// Writes a file through an engine, syncs it, reads it back and compares the bytes.
fn round_trip(scratch: &Scratch, backend: BackendChoice) -> Result<()> {
    let engine = Engine::open(Options { backend, ..Options::default() })?;
    let (used, wanted) =
        (engine.stats()?.backend, if backend == BackendChoice::Uring { "io_uring" } else { "threads" });
    if used != wanted {
        return Err(Error::invalid(
            "SPILLWAY_IO",
            format!("forces {used}; unset it to check the other way of I/O"),
        ));
    }
    let (source, target) = (pattern(backend as u64)?, Buffer::open(BYTES, Backing::default())?);
    let request = |memory: &Buffer| {
        let buffer = memory.transfer(0, memory.span().len());
        Request { target: Target::Path(&scratch.0), offset: 0, buffer, deadline: WAIT_TIMEOUT }
    };
    engine.wait(engine.write(request(&source))?, WAIT_TIMEOUT)?;
    engine.wait(engine.sync(Target::Path(&scratch.0), WAIT_TIMEOUT)?, WAIT_TIMEOUT)?;
    engine.wait(engine.read(request(&target))?, WAIT_TIMEOUT)?;
    engine.close(WAIT_TIMEOUT)?;
    same(&source, &target)
}

fn pattern(seed: u64) -> Result<Buffer> {
    let buffer = Buffer::open(BYTES, Backing::default())?;
    let bytes: Vec<u8> = (0..BYTES as u64).map(|i| (i.wrapping_mul(seed + 31) >> 7) as u8).collect();
    buffer.span().write(&bytes);
    Ok(buffer)
}

fn same(wanted: &Buffer, found: &Buffer) -> Result<()> {
    match wanted.span().to_vec() == found.span().to_vec() {
        true => Ok(()),
        false => Err(Error::System {
            what: "reading back",
            reason: "the bytes differ from those that were written".to_string(),
        }),
    }
}

fn tuned(directory: &Path) -> Finding {
    const CHECK: &str = "profile";
    let system = std::fs::File::open(directory).and_then(|directory| file_system(&directory));
    let settings = system.ok().and_then(|system| profile::current()?.get(system));
    match settings {
        Some(settings) => Finding::ok(CHECK, io_settings(settings)),
        None => Finding::new(CHECK, Verdict::Worse, "not tuned: default settings are used")
            .fix(format!("spillway tune --dir {}", directory.display())),
    }
}

fn tier(directory: &Path) -> Finding {
    match resumed(directory) {
        Ok(()) => Finding::ok("tier", "committed, reopened and compared"),
        Err(error) => Finding::new("tier", Verdict::Fails, error.to_string()),
    }
}

/// Creates a tier, commits a step, reopens the tier as after a crash, and removes it.
fn resumed(directory: &Path) -> Result<()> {
    let owner = Owner { job: format!("doctor-{}", std::process::id()), host: "here".to_string(), rank: 0 };
    let options = |mode| TierOptions { mode, ..TierOptions::new(owner.clone(), [directory.to_path_buf()]) };
    let (source, target) = (pattern(97)?, Buffer::open(BYTES, Backing::default())?);
    let sizes = [BYTES as u64];
    let made = Tier::open(options(Mode::Create))?;
    let outcome = (|| {
        let extent = made.define("state", &sizes)?;
        made.wait(
            made.write(extent, &[source.transfer(0, BYTES)], &ExtentPlacement::Auto, None)?,
            WAIT_TIMEOUT,
        )?;
        made.commit(1, &[])
    })();
    drop(made);
    let again = Tier::open(options(Mode::Auto))?;
    let read = outcome.and_then(|()| {
        let extent = again.define("state", &sizes)?;
        again.wait(again.read(extent, &[target.transfer(0, BYTES)])?, WAIT_TIMEOUT)?;
        same(&source, &target)
    });
    again.destroy()?;
    read
}
