//! `spillway tune`: finds the best I/O settings for a directory, and saves them in the profile that engines read.
//!
//! Candidates run in rounds of one short pass each, so that drift of the disk's speed affects all alike. The first
//! stage varies block size and depth together, the second the backend at the best of those. The smallest setting within
//! a few percent of the fastest wins: larger settings cost latency and processor time.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::time::{Duration, Instant};

use spillway::error::{Doing, Error, IoError, Result};
use spillway::io::options::BackendChoice;
use spillway::io::profile::{self, Notes, Profile, Settings};
use spillway::sys::file::{FileSystem, file_system};

use super::io_load::{Direction, Load, Shape, TestFile};
use super::progress::Progress;
use super::report::{io_settings, table};
use super::stdout;

#[derive(clap::Args)]
pub struct Options {
    /// Directory of the future files.
    #[arg(long, default_value = ".")]
    dir: PathBuf,
    /// Profile to write; default: the profile that engines read.
    #[arg(long)]
    profile: Option<PathBuf>,
    /// Time limit in seconds.
    #[arg(long, default_value_t = 45, value_parser = clap::value_parser!(u64).range(5..=600))]
    seconds: u64,
    /// Prints the settings without saving them.
    #[arg(long)]
    dry_run: bool,
}

/// Most bytes in flight: enough to fill a device's queue, and small beside the memory that training needs.
const MOST_UNDER_WAY: usize = 64 << 20;
const LARGEST_FILE: u64 = 1 << 30;
/// Seconds per pass: long enough to fill the queue, short enough for many rounds.
const PASS_SECONDS: f64 = 0.15;
/// A smaller setting wins if it reaches this fraction of the best score.
const AS_GOOD: f64 = 0.97;
/// Factor on the score of threads: they use several times the processor time, which training needs.
/// fraction.
const THREADS_WORTH: f64 = 0.85;

struct Candidate {
    shape: Shape,
    backend: BackendChoice,
    reads: Vec<f64>,
    writes: Vec<f64>,
}

impl Candidate {
    fn new(block_bytes: usize, depth: u32, backend: BackendChoice) -> Candidate {
        let shape = Shape { block_bytes, depth };
        Candidate { shape, backend, reads: Vec::new(), writes: Vec::new() }
    }

    /// GB/s of an equal mix of reads and writes, the load of a swapped optimizer.
    fn score(&self) -> f64 {
        let speed = 2.0 / (1.0 / median(&self.reads) + 1.0 / median(&self.writes));
        if self.backend == BackendChoice::Threads { THREADS_WORTH * speed } else { speed }
    }

    fn size(&self) -> (bool, usize) {
        (self.backend == BackendChoice::Threads, self.shape.block_bytes * self.shape.depth as usize)
    }
}

pub fn run(options: &Options) -> Result<()> {
    let start = Instant::now();
    let end = start + Duration::from_secs(options.seconds);
    let directory = std::fs::File::open(&options.dir)
        .map_err(|error| IoError::of(&error, Doing::Opening, options.dir.to_string_lossy()))?;
    let system = file_system(&directory)
        .map_err(|error| Error::system("reading the file system type of --dir", &error))?;
    // The number of rounds follows from the speed of the disk; the time limit is known.
    let progress = Progress::new(options.seconds as usize);
    progress.begin("writing the test file");
    let (file, speed) = test_file(options)?;
    progress.reach(start.elapsed());
    let pass_bytes = ((speed * PASS_SECONDS) as u64).clamp(8 << 20, file.bytes);

    let mut shapes = shapes();
    let show = |candidate: &Candidate| {
        progress.reach(start.elapsed());
        progress.detail(&describe(candidate));
    };
    progress.begin("comparing block sizes and depths");
    measure(&mut shapes, &file, pass_bytes, start + (end - start) * 3 / 5, show)?;
    let Shape { block_bytes, depth } = best(&shapes).shape;
    let mut backends = [BackendChoice::Auto, BackendChoice::Threads]
        .map(|backend| Candidate::new(block_bytes, depth, backend));
    progress.begin("comparing io_uring and threads");
    measure(&mut backends, &file, pass_bytes, end - Duration::from_secs(1), show)?;
    let winner = best(&backends);
    drop(file);
    drop(progress);

    let mut text = format!(
        "{} on file system {system}\n{}\nbest: {}: reads {:.2} GB/s, writes {:.2} GB/s\n{:.1} s\n",
        options.dir.display(),
        measured(shapes.iter().chain(&backends)),
        describe(winner),
        median(&winner.reads),
        median(&winner.writes),
        start.elapsed().as_secs_f64()
    );
    let settings = Settings { backend: winner.backend, block_bytes: block_bytes as u64, depth };
    if !options.dry_run {
        // Before the text is printed: the reader of standard output may be gone.
        text += &save(options, system, settings, winner)?;
    }
    stdout::say(&text)
}

/// Saves the settings in the profile, and says so.
fn save(options: &Options, system: FileSystem, settings: Settings, winner: &Candidate) -> Result<String> {
    let mut text = String::new();
    let directory = options.dir.canonicalize().unwrap_or_else(|_| options.dir.clone());
    let notes = Notes::from_iter([
        ("directory".to_string(), directory.to_string_lossy().into()),
        ("read_gb_per_s".to_string(), median(&winner.reads).into()),
        ("write_gb_per_s".to_string(), median(&winner.writes).into()),
    ]);
    let nowhere = || {
        Error::invalid(
            "--profile",
            "is missing, and there is no cache directory; set --profile, XDG_CACHE_HOME or HOME",
        )
    };
    let path = options.profile.clone().or_else(profile::path).ok_or_else(nowhere)?;
    let mut profile = match Profile::read(&path) {
        Ok(found) => found.unwrap_or_default(),
        Err(reason) => {
            text = format!("{} is replaced, because it is invalid: {reason}\n", path.display());
            Profile::default()
        }
    };
    profile.put(system, settings, notes)?;
    profile.write(&path)?;
    Ok(text + &format!("wrote {}\n", path.display()))
}

/// Creates the test file, whose size follows from a trial write. Also returns the bandwidth of that write in bytes per
/// second.
fn test_file(options: &Options) -> Result<(TestFile, f64)> {
    let first = Instant::now();
    let small = TestFile::create(&options.dir, 32 << 20)?;
    let speed = small.bytes as f64 / first.elapsed().as_secs_f64();
    // Sized for a tenth of the time limit at this bandwidth.
    let bytes = ((speed * options.seconds as f64 / 10.0) as u64).clamp(small.bytes, LARGEST_FILE);
    drop(small);
    let file = TestFile::create(&options.dir, bytes.next_multiple_of(32 << 20))?;
    Ok((file, speed))
}

fn shapes() -> Vec<Candidate> {
    let blocks = [256 << 10, 1 << 20, 4 << 20];
    let all = blocks.into_iter().flat_map(|block| [4, 8, 16, 32, 64].map(|depth| (block, depth)));
    all.filter(|(block, depth)| block * *depth as usize <= MOST_UNDER_WAY)
        .map(|(block, depth)| Candidate::new(block, depth, BackendChoice::Auto))
        .collect()
}

/// Runs at least one round, then further rounds until `end`.
fn measure(
    candidates: &mut [Candidate],
    file: &TestFile,
    bytes: u64,
    end: Instant,
    begin: impl Fn(&Candidate),
) -> Result<()> {
    const MOST_ROUNDS: usize = 9;
    for round in 0..MOST_ROUNDS {
        let begun = Instant::now();
        for candidate in candidates.iter_mut() {
            begin(candidate);
            let load = Load::open(candidate.shape, candidate.backend)?;
            candidate.reads.push(load.gb_per_s(file, Direction::Read, bytes)?);
            candidate.writes.push(load.gb_per_s(file, Direction::Write, bytes)?);
        }
        if Instant::now() + begun.elapsed() > end {
            break;
        }
        if round == 0 && candidates.len() > 1 {
            // Discard the first round, which warms up, unless it is the only one.
            candidates.iter_mut().for_each(|candidate| (candidate.reads.clear(), candidate.writes.clear()).0);
        }
    }
    Ok(())
}

fn best(candidates: &[Candidate]) -> &Candidate {
    let fastest = candidates.iter().map(Candidate::score).fold(0.0, f64::max);
    let good = candidates.iter().filter(|candidate| candidate.score() >= AS_GOOD * fastest);
    good.min_by_key(|candidate| candidate.size()).unwrap_or(&candidates[0])
}

fn describe(candidate: &Candidate) -> String {
    let Shape { block_bytes, depth } = candidate.shape;
    io_settings(Settings { backend: candidate.backend, block_bytes: block_bytes as u64, depth })
}

fn measured<'a>(candidates: impl Iterator<Item = &'a Candidate>) -> String {
    let mut table = table(["settings", "read GB/s", "write GB/s"]);
    for candidate in candidates {
        let (read, write) = (median(&candidate.reads), median(&candidate.writes));
        table.add_row([describe(candidate), format!("{read:.3}"), format!("{write:.3}")]);
    }
    table.to_string()
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = |index: usize| sorted.get(index).copied().unwrap_or(f64::NAN);
    (middle(sorted.len().saturating_sub(1) / 2) + middle(sorted.len() / 2)) / 2.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_of_those_that_are_as_good_wins() {
        let with = |depth, speed| {
            let candidate = Candidate::new(1 << 20, depth, BackendChoice::Auto);
            Candidate { reads: vec![speed], writes: vec![speed], ..candidate }
        };
        let candidates = [with(32, 2.0), with(8, 1.96), with(4, 1.5), with(64, 1.9)];
        assert_eq!(best(&candidates).shape.depth, 8);
        let backends = |threads: f64| {
            let other = Candidate { backend: BackendChoice::Threads, ..with(8, threads) };
            best(&[with(8, 2.0), other]).backend
        };
        assert_eq!((backends(2.2), backends(2.6)), (BackendChoice::Auto, BackendChoice::Threads));
        assert!(shapes().iter().all(|candidate| candidate.size().1 <= MOST_UNDER_WAY));
        assert_eq!(shapes().len(), 13);
    }

    /// Either writer may come first.
    #[test]
    fn one_file_holds_what_tune_found_and_the_speeds_of_links() {
        use std::fs;
        use std::os::unix::fs::{PermissionsExt, symlink};

        use spillway::gpu::profile::{find, keep};
        use spillway::gpu::speeds::Link;
        use spillway::io::options::BackendChoice;
        use spillway::sys::file::FileSystem;

        const LINK: Link = Link {
            d2h_f32: 13e9,
            d2h_native: 26.5e9,
            h2d_f32: 1.0 / 3.0,
            h2d_native: 1e-300,
            step_f32: 2e9,
            step_native: 2.1e9,
        };
        let (settings, system) = (
            Settings { backend: BackendChoice::Auto, block_bytes: 1 << 20, depth: 9 },
            FileSystem { kind: 1, id: 2 },
        );
        let other = Link { d2h_f32: 7.0, ..LINK };
        let tune = |path: &std::path::Path| {
            let mut profile = Profile::read(path).unwrap().unwrap_or_default();
            let notes = Notes::from_iter([("directory".to_string(), "/data".into())]);
            profile.put(system, settings, notes).unwrap();
            profile.write(path).unwrap();
        };
        let folder = tempfile::tempdir().unwrap();
        for links_first in [true, false] {
            let path = folder.path().join(format!("profile-{links_first}"));
            if links_first {
                keep(&path, "a [x] b = c", &other);
            }
            tune(&path);
            for _ in 0..3 {
                keep(&path, "a [x] b = c", &LINK);
                keep(&path, "second", &other);
                tune(&path);
            }
            assert_eq!((find(&path, "a [x] b = c"), find(&path, "second")), (Some(LINK), Some(other)));
            let profile = Profile::read(&path).unwrap().unwrap();
            assert_eq!(profile.get(system), Some(settings));
            let kept: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
            assert_eq!(kept["filesystems"]["1-2"]["directory"], "/data");
            assert_eq!(kept["links"].as_object().map(|links| links.len()), Some(2));
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        }
        // A link in place of the profile is replaced, and the link's target is unchanged.
        let victim = folder.path().join("victim");
        fs::write(&victim, "precious").unwrap();
        let path = folder.path().join("link");
        symlink(&victim, &path).unwrap();
        keep(&path, "a", &LINK);
        assert_eq!(
            (fs::read_to_string(&victim).unwrap().as_str(), find(&path, "a")),
            ("precious", Some(LINK))
        );
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 4, "nothing beside them");
    }
}
