//! io_uring and threads on a real file system.

use std::fs;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use super::*;
use crate::error::{Error, IoKind};
use crate::pool::pinned;
use crate::pool::region::Backing;

/// A directory beside the build output, which is on a disk rather than on tmpfs on most machines.
fn disk_dir() -> tempfile::TempDir {
    let base = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("target");
    fs::create_dir_all(&base).unwrap();
    tempfile::tempdir_in(base).unwrap()
}

fn dirs() -> Vec<tempfile::TempDir> {
    let shm = Path::new("/dev/shm");
    let memory = shm.is_dir().then(|| tempfile::tempdir_in(shm).unwrap());
    [disk_dir()].into_iter().chain(memory).collect()
}

fn small() -> Options {
    Options { block_bytes: 64 << 10, depth: 8, ..Options::default() }
}

struct Memory(Span);

impl Memory {
    fn new(len: usize) -> Memory {
        Memory(pinned::alloc(len, Backing::default()).unwrap())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        pinned::free(self.0.address()).unwrap();
    }
}

#[test]
fn every_alignment_of_address_offset_and_length_moves_the_right_bytes() {
    let memory = Memory::new(1 << 20);
    for dir in dirs() {
        for engine in engines(small()) {
            let path = dir.path().join("model");
            let mut model = pattern(1, 400_000);
            fs::write(&path, &model).unwrap();
            let edges = [0, 1, 511, 512, 513, 4095, 4096, 4097, 65_536];
            let mut seed = 2;
            for offset in edges {
                for address in [0, 1, 4, 64, 512] {
                    for len in [1, 511, 512, 4096, 4097, 12_288, 65_537, 200_001] {
                        let span = memory.0.part(address, len);
                        span.write(&pattern(seed, len));
                        let write = request(Target::Path(&path), offset as u64, span);
                        let handle = engine.write(write).unwrap();
                        assert_eq!(engine.wait(handle, PATIENCE), Ok(len as u64));
                        model[offset..offset + len].copy_from_slice(&span.to_vec());
                        span.write(&vec![0; len]);
                        let handle = engine.read(request(Target::Path(&path), offset as u64, span)).unwrap();
                        assert_eq!(engine.wait(handle, PATIENCE), Ok(len as u64));
                        assert!(span.to_vec() == model[offset..offset + len], "{offset} {address} {len}");
                        seed += 1;
                    }
                }
                assert!(fs::read(&path).unwrap() == model, "the rest of the file changed at {offset}");
            }
            let stats = engine.stats().unwrap();
            assert_eq!((stats.failed, stats.pending, stats.stuck), (0, 0, 0));
            engine.close(PATIENCE).unwrap();
        }
    }
}

#[test]
fn foreign_memory_goes_through_bounce_blocks() {
    let dir = disk_dir();
    for engine in engines(small()) {
        let path = dir.path().join("foreign");
        let mut bytes = pattern(3, 3_000_001);
        // SAFETY: `bytes` outlives the operation and is not used before it ends.
        let span = unsafe { Span::new(bytes[1..].as_mut_ptr(), 3_000_000) }.unwrap();
        let handle = engine.write(request(Target::Path(&path), 0, span)).unwrap();
        assert_eq!(engine.wait(handle, PATIENCE), Ok(3_000_000));
        assert!(fs::read(&path).unwrap() == bytes[1..]);
        let stats = engine.stats().unwrap();
        assert!(stats.buffered_bytes == 3_000_000 || stats.bounced_bytes > 2_900_000, "{stats:?}");
    }
}

#[test]
fn many_small_tensors_in_many_files_and_one_wait() {
    let dir = disk_dir();
    let memory = Memory::new(200 * 50_000);
    let contents = pattern(4, memory.0.len());
    for engine in engines(small()) {
        memory.0.write(&contents);
        assert_eq!(engine.wait_all(PATIENCE), Ok(0));
        for n in 0..200 {
            let path = dir.path().join(format!("tensor-{}", n % 20));
            let span = memory.0.part(n * 50_000, 50_000);
            engine.write(request(Target::Path(&path), (n as u64 / 20) * 50_000, span)).unwrap();
        }
        assert_eq!(engine.wait_all(PATIENCE), Ok(200));
        memory.0.write(&vec![0; memory.0.len()]);
        for n in 0..200 {
            let path = dir.path().join(format!("tensor-{}", n % 20));
            let span = memory.0.part(n * 50_000, 50_000);
            engine.read(request(Target::Path(&path), (n as u64 / 20) * 50_000, span)).unwrap();
        }
        assert_eq!(engine.wait_all(PATIENCE), Ok(200));
        assert!(memory.0.to_vec() == contents);
        assert_eq!(engine.wait_all(PATIENCE), Ok(0));
    }
}

fn kind(outcome: crate::error::Result<u64>) -> IoKind {
    outcome.unwrap_err().io_kind().unwrap()
}

#[test]
fn short_files_missing_files_and_wrong_targets_are_named() {
    let dir = disk_dir();
    let memory = Memory::new(1 << 20);
    for engine in engines(small()) {
        let path = dir.path().join("short");
        fs::write(&path, pattern(5, 100_000)).unwrap();
        let handle = engine.read(request(Target::Path(&path), 50_000, memory.0.part(0, 60_000))).unwrap();
        let error = engine.wait(handle, PATIENCE).unwrap_err();
        assert_eq!(error.io_kind(), Some(IoKind::ShortFile));
        let words = error.to_string();
        assert!(words.contains("60000 bytes at offset 50000") && words.contains("byte 100000"), "{words}");
        assert!(words.contains(path.to_str().unwrap()), "{words}");
        assert!(engine.wait(handle, PATIENCE).is_err(), "an outcome is given once");

        let missing = dir.path().join("no/such/file");
        let span = memory.0.part(0, 4096);
        assert_eq!(kind(engine.read(request(Target::Path(&missing), 0, span))), IoKind::NotFound);
        assert_eq!(kind(engine.write(request(Target::Path(&missing), 0, span))), IoKind::NotFound);
        let directory = engine.read(request(Target::Path(dir.path()), 0, span));
        assert!(matches!(directory, Err(Error::InvalidArgument { .. })), "{directory:?}");
        let null = engine.read(request(Target::Path(Path::new("/dev/null")), 0, span));
        assert!(matches!(null, Err(Error::InvalidArgument { .. })), "{null:?}");
        assert_eq!(kind(engine.read(request(Target::Descriptor(-1), 0, span))), IoKind::Failed);
        let end = fs::OpenOptions::new().append(true).open(&path).unwrap();
        let at_end = engine.write(request(Target::Descriptor(end.as_raw_fd()), 0, span));
        assert!(at_end.unwrap_err().to_string().contains("O_APPEND"));
        assert_eq!(fs::read(&path).unwrap(), pattern(5, 100_000));
        let first = engine.read(request(Target::Path(&path), 0, span)).unwrap();
        let twice = engine.wait_many(&[first, first], PATIENCE).unwrap_err();
        assert!(twice.to_string().contains("twice"), "{twice}");
        assert_eq!(engine.wait(first, PATIENCE).unwrap(), 4096, "a refused wait takes no outcome");
        let far = engine.read(request(Target::Path(&path), u64::MAX - 10, span));
        assert!(matches!(far, Err(Error::InvalidArgument { .. })), "{far:?}");
    }
}

#[test]
fn a_closed_descriptor_and_a_replaced_path_are_no_trap() {
    let dir = disk_dir();
    let memory = Memory::new(1 << 20);
    for engine in engines(small()) {
        let path = dir.path().join("file");
        fs::write(&path, pattern(6, 1 << 20)).unwrap();
        let file = fs::File::open(&path).unwrap();
        let handle = engine.read(request(Target::Descriptor(file.as_raw_fd()), 0, memory.0)).unwrap();
        drop(file);
        engine.wait(handle, PATIENCE).unwrap();
        assert!(memory.0.to_vec() == pattern(6, 1 << 20));
        let handle = engine.read(request(Target::Path(&path), 0, memory.0)).unwrap();
        let other = dir.path().join("other");
        fs::write(&other, pattern(7, 1 << 20)).unwrap();
        fs::rename(&other, &path).unwrap();
        engine.wait(handle, PATIENCE).unwrap();
        let handle = engine.read(request(Target::Path(&path), 0, memory.0)).unwrap();
        engine.wait(handle, PATIENCE).unwrap();
        assert!(memory.0.to_vec() == pattern(7, 1 << 20), "the new file is read, not the open old one");
    }
}

#[test]
fn a_rewrite_keeps_what_lies_behind_it_and_an_empty_operation_succeeds() {
    let dir = disk_dir();
    let memory = Memory::new(8192);
    for engine in engines(small()) {
        let path = dir.path().join("long");
        fs::write(&path, pattern(8, 20_000)).unwrap();
        memory.0.write(&pattern(9, 8192));
        let handle = engine.write(request(Target::Path(&path), 0, memory.0)).unwrap();
        engine.wait(handle, PATIENCE).unwrap();
        let mut expected = pattern(8, 20_000);
        expected[..8192].copy_from_slice(&pattern(9, 8192));
        assert!(fs::read(&path).unwrap() == expected);
        let handle = engine.read(request(Target::Path(&path), 5, Span::empty())).unwrap();
        assert_eq!(engine.wait(handle, PATIENCE), Ok(0));
        let handle = engine.sync(Target::Path(&path), None).unwrap();
        assert_eq!(engine.wait(handle, PATIENCE), Ok(0));
    }
}

#[test]
fn freed_memory_is_not_kept_and_not_confused_with_what_comes_after_it() {
    let dir = disk_dir();
    let path = dir.path().join("reuse");
    fs::write(&path, pattern(10, 20 << 20)).unwrap();
    for engine in engines(Options::default()) {
        for _ in 0..20 {
            let memory = Memory::new(20 << 20);
            memory.0.write(&[0xAA; 4096]);
            let handle = engine.read(request(Target::Path(&path), 0, memory.0)).unwrap();
            engine.wait(handle, PATIENCE).unwrap();
            assert!(memory.0.part(0, 1 << 20).to_vec() == pattern(10, 1 << 20));
        }
    }
}

#[test]
fn a_write_that_extends_its_file_has_its_place_first_and_exactly_its_length() {
    let dir = disk_dir();
    let memory = Memory::new(3 << 20);
    for engine in engines(small()) {
        let path = dir.path().join("new");
        let handle = engine.write(request(Target::Path(&path), 1000, memory.0)).unwrap();
        engine.wait(handle, PATIENCE).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), 1000 + (3 << 20));
        fs::remove_file(&path).unwrap();
    }
}
