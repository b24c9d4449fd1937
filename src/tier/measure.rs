//! How fast paths are written, measured before anything is stored on them.
//!
//! Invariants:
//! - Nothing is left: the file of a measurement has no name, so it is gone with its descriptor, also after a crash.
//! - A path takes [`TIME`], the writes in flight then, and a sync, and at most [`MOST`] bytes. All paths are written at once.
//!   Without direct I/O the sync writes all bytes, so a slow device takes longer.
//! - With the file of a measurement a path stays within its limit. A path without room for [`LEAST`] bytes is not measured.
//! - Time in which other processes had their turn does not count.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::lanes;
use super::store::Tier;
use super::volume::{Scratch, Volume, request};
use crate::error::{Error, Result};
use crate::io::engine::Engine;
use crate::io::file::File;
use crate::io::options::Target;
use crate::pool::transfer_buffer::TransferBuffer;
use crate::sys::sync::Lock;

/// How long writes are started. Devices and throttles work in bursts of a tenth of a second.
const TIME: Duration = Duration::from_millis(500);
/// Most bytes that are written to a path.
const MOST: u64 = 512 << 20;
/// Fewest bytes that are written to a path that is measured.
const LEAST: u64 = PART as u64;
/// Bytes of a write, and writes in flight.
const PART: usize = 1 << 20;
const IN_FLIGHT: usize = 16;

impl Tier {
    /// Bytes per second that each path is written with; of a path without room for the measurement, the mean of the others.
    /// `None` if a path is no directory, or its file system has no files without names.
    pub fn measured_speeds(&self) -> Option<Vec<f64>> {
        let volumes: Option<Vec<_>> = self.volumes.iter().map(Option::as_ref).collect();
        let found: Vec<Lock<Option<f64>>> = self.volumes.iter().map(|_| Lock::new(None)).collect();
        // Growth of the data file that its limit allows.
        let most = self.paths().into_iter().map(|path| (path.room - path.free).min(MOST));
        let work = volumes?.into_iter().zip(most).zip(&found).collect();
        lanes::each(work, |((volume, most), found): ((&Arc<Volume>, u64), &Lock<Option<f64>>), _| {
            *found.lock() = if most < LEAST { None } else { speed(volume, most)? };
            Ok(())
        })
        .ok()?;
        let speeds: Vec<Option<f64>> = found.into_iter().map(Lock::into_inner).collect();
        let known: Vec<f64> = speeds.iter().copied().flatten().collect();
        let mean = known.iter().sum::<f64>() / known.len() as f64;
        (mean.is_finite() && known.iter().all(|speed| *speed > 0.0))
            .then(|| speeds.into_iter().map(|speed| speed.unwrap_or(mean)).collect())
    }
}

/// `None` if the file system has no room for `most` bytes.
fn speed(volume: &Volume, most: u64) -> Result<Option<f64>> {
    let directory = Path::new(volume.data_name()).parent().filter(|_| volume.lasts());
    let directory = directory.ok_or_else(|| Error::invalid("path", "is no directory"))?;
    let file = volume.unnamed_file(directory.to_path_buf())?;
    let engine = &volume.engine;
    match engine.wait(engine.allocate(&file, 0, most)?, None) {
        Err(error) if error.is_full() => return Ok(None),
        allocated => allocated?,
    };
    // All writes have the same bytes, which a device cannot compress.
    let memory = Scratch::new(PART)?;
    let mut bits = 0x9e37_79b9_7f4a_7c15_u64;
    let noise = std::iter::repeat_with(|| {
        bits ^= bits << 13;
        bits ^= bits >> 7;
        bits ^= bits << 17;
        bits.to_le_bytes()
    });
    memory.span().write(&noise.take(PART / 8).flatten().collect::<Vec<u8>>());
    let before = engine.traffic()?;
    write(engine, &file, &memory.transfer(), most)?;
    engine.wait(engine.sync(Target::File(file), None)?, None)?;
    let after = engine.traffic()?;
    let (bytes, time) = (after.written_bytes - before.written_bytes, after.writing - before.writing);
    Ok(Some(bytes as f64 / time.as_secs_f64()))
}

/// Writes parts of a file for [`TIME`], and at most `most` bytes. No write is in flight afterwards.
fn write(engine: &Engine, file: &Arc<File>, part: &TransferBuffer, most: u64) -> Result<()> {
    let begun = Instant::now();
    let (mut offset, mut handles, mut outcome) = (0, VecDeque::new(), Ok(()));
    while outcome.is_ok() && begun.elapsed() < TIME && offset + PART as u64 <= most {
        if handles.len() == IN_FLIGHT {
            outcome = handles.pop_front().map_or(Ok(()), |handle| engine.wait(handle, None).map(drop));
        }
        let started = engine.write(request(file, offset, part.clone()));
        outcome = outcome.and(started.map(|handle| handles.push_back(handle)));
        offset += PART as u64;
    }
    // After an error too: a write that nobody waits for shows its error at the close.
    handles.into_iter().for_each(|handle| outcome = outcome.clone().and(engine.wait(handle, None).map(drop)));
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::options::Options;
    use crate::io::plan::Alignment;
    use crate::io::sim::{Disk, Faults, Sim};

    #[test]
    fn a_measurement_that_fails_leaves_no_write_without_a_wait() {
        let faults = Faults { error_permille: vec![(libc::EIO, 1000)], ..Faults::default() };
        let engine = Engine::open_simulated(Options::default(), Sim::new(&Disk::default(), faults)).unwrap();
        let file = File::named("data", 1, Some(Alignment { memory: 512, offset: 4096 }));
        let memory = Scratch::new(PART).unwrap();
        let error = write(&engine, &Arc::new(file), &memory.transfer(), MOST).unwrap_err();
        assert!(error.io_kind().is_some(), "{error}");
        engine.close(None).unwrap();
    }
}
