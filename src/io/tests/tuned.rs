//! Which settings a profile changes, and which it does not.
#![forbid(unsafe_code)]

use std::fs;
use std::path::{Path, PathBuf};

use super::*;
use crate::io::profile::{Notes, Profile, Settings};
use crate::pool::pinned;
use crate::pool::region::Backing;
use crate::sys::file::{FileSystem, file_system};

const TUNED: Settings = Settings { backend: BackendChoice::Auto, block_bytes: 64 << 10, depth: 12 };

struct Bench {
    volume: tempfile::TempDir,
    memory: Span,
}

impl Bench {
    fn new() -> Bench {
        let volume = tempfile::tempdir().unwrap();
        fs::write(volume.path().join("file"), pattern(1, 1 << 20)).unwrap();
        Bench { volume, memory: pinned::alloc(1 << 20, Backing::default()).unwrap() }
    }

    fn system(&self) -> FileSystem {
        file_system(&fs::File::open(self.volume.path()).unwrap()).unwrap()
    }

    /// Depth, block size and number of requests of an engine that has read the file.
    fn read(&self, options: Options, profile: Option<Profile>) -> (u32, u64, u64) {
        let engine = Engine::open_tuned(options, profile).unwrap();
        let path = self.volume.path().join("file");
        let handle = engine.read(request(Target::Path(&path), 0, self.memory)).unwrap();
        engine.wait(handle, PATIENCE).unwrap();
        let stats = engine.stats().unwrap();
        (stats.depth, stats.block_bytes, stats.pieces)
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        pinned::free(self.memory.address()).unwrap();
    }
}

fn profile(system: FileSystem, settings: Settings) -> Profile {
    let mut profile = Profile::default();
    profile.path = PathBuf::from("somewhere");
    profile.put(system, settings, Notes::new()).unwrap();
    profile
}

#[test]
fn a_profile_gives_what_the_caller_leaves_open_and_nothing_else() {
    let bench = Bench::new();
    let tuned = || Some(profile(bench.system(), TUNED));
    let open = Options::default();
    assert_eq!(bench.read(open, tuned()), (12, 64 << 10, 16));
    assert_eq!(bench.read(open, None).0, 32);
    assert_eq!(bench.read(open, None).1, 1 << 20);
    assert_eq!(bench.read(Options { depth: 5, ..open }, tuned()), (5, 64 << 10, 16));
    assert_eq!(bench.read(Options { block_bytes: 128 << 10, ..open }, tuned()), (12, 128 << 10, 8));
}

#[test]
fn a_profile_of_another_file_system_leaves_the_block_size_alone() {
    let bench = Bench::new();
    let FileSystem { kind, id } = bench.system();
    let other = profile(FileSystem { kind, id: id ^ 1 }, TUNED);
    assert_eq!(bench.read(Options::default(), Some(other)).1, 1 << 20);
}

#[test]
fn a_profile_may_ask_for_threads_unless_the_caller_asks_for_io_uring() {
    let bench = Bench::new();
    let threads = || Some(profile(bench.system(), Settings { backend: BackendChoice::Threads, ..TUNED }));
    let engine = Engine::open_tuned(Options::default(), threads()).unwrap();
    let stats = engine.stats().unwrap();
    assert_eq!(
        (stats.backend, engine.options().workers, stats.profile.as_str()),
        ("threads", 12, "somewhere")
    );
    if let Ok(engine) =
        Engine::open_tuned(Options { backend: BackendChoice::Uring, ..Options::default() }, threads())
    {
        assert_eq!(engine.stats().unwrap().backend, "io_uring");
    }
}

#[test]
fn the_name_of_a_file_system_is_read_back() {
    let system = Bench::new().system();
    assert_eq!(FileSystem::parse(&system.to_string()), Some(system));
    let root = file_system(&fs::File::open(Path::new("/proc")).unwrap()).unwrap();
    assert!(root != system);
    assert!(["", "-", "ef53", "x-1", "ef53-"].iter().all(|text| FileSystem::parse(text).is_none()));
}
