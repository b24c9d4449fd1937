//! Arenas with several handles: of one process, and of forked children that end.
#![forbid(unsafe_code)]

mod verdict;

use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::layout::{HEADER, Layout, MAGIC};
use super::{Arena, Create, Open, RegionSpec, collect};
use crate::error::{ArenaKind, Error, Result};
use crate::sys::fork::in_forked_child;
use crate::sys::shared_memory::DIRECTORY;

const AT_ONCE: Option<Duration> = Some(Duration::ZERO);
const SOON: Option<Duration> = Some(Duration::from_secs(60));
const WRITE: Open = Open { write: true, orphan: false, timeout: AT_ONCE };

fn specs(regions: &[(&str, u64)]) -> Vec<RegionSpec> {
    regions.iter().map(|(name, bytes)| RegionSpec { name: name.to_string(), bytes: *bytes }).collect()
}

fn options() -> Create {
    Create { regions: specs(&[("a", 1000), ("b", 70_001), ("c", 1)]), processes: 3, ..Create::default() }
}

/// A name that no other test uses, and the file of that name.
fn named(name: &str) -> (String, PathBuf) {
    let name = format!("unit-{}-{name}", std::process::id());
    let path = PathBuf::from(format!("{DIRECTORY}/spillway-{name}"));
    (name, path)
}

fn again(arena: &Arena) -> Arena {
    Arena::open_fd(arena.info().unwrap().fd, WRITE).unwrap()
}

fn kind<T: std::fmt::Debug>(outcome: Result<T>) -> ArenaKind {
    outcome.unwrap_err().arena_kind().expect("an arena error")
}

fn fill(arena: &Arena, region: u32, generation: u64) {
    arena.write_begin(region, generation).unwrap();
    let span = arena.region(region).unwrap().span;
    span.write(&vec![generation as u8; span.len()]);
    arena.write_end(region).unwrap();
}

#[test]
fn regions_are_at_one_offset_in_every_handle_and_begin_as_zeros() {
    let owner = Arena::create(&options()).unwrap();
    let other = again(&owner);
    for index in 0..3 {
        let (ours, theirs) = (owner.region(index).unwrap(), other.region(index).unwrap());
        assert_eq!((ours.offset % 4096, ours.offset, ours.generation), (0, theirs.offset, 0));
        assert_eq!(ours.span.to_vec(), vec![0; ours.span.len()]);
        assert_eq!(other.find(&ours.name), Ok(index));
        ours.span.write(&[7]);
        assert_eq!(theirs.span.to_vec()[0], 7);
    }
    let (mine, theirs) = (owner.info().unwrap(), other.info().unwrap());
    assert!(mine.is_owner && !theirs.is_owner && theirs.owner_lives && mine.id == theirs.id);
    assert!(owner.find("d").is_err() && owner.region(3).is_err());
    drop(owner);
    // A forked child of another test may hold the descriptor of the lock for a moment.
    let end = std::time::Instant::now() + Duration::from_secs(60);
    while other.info().unwrap().owner_lives {
        assert!(std::time::Instant::now() < end, "the lock has outlived its owner");
        std::thread::yield_now();
    }
    assert_eq!(other.region(0).unwrap().span.to_vec()[0], 7, "the memory stays");
}

#[test]
fn a_reader_gets_one_whole_step_beside_a_writer() {
    const STEPS: u64 = 3000;
    let writer = Arena::create(&options()).unwrap();
    let readers = [again(&writer), again(&writer)];
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for reader in readers.iter().chain([&writer]) {
            scope.spawn(|| {
                let (mut copy, mut last) = (vec![0; 70_001], 0);
                while last < STEPS && !over.load(Ordering::Relaxed) {
                    let seen = reader.copy(1, last + 1, 0, &mut copy, SOON).unwrap();
                    assert!(seen > last && copy.iter().all(|byte| *byte == seen as u8));
                    last = seen;
                }
            });
        }
        (1..=STEPS).for_each(|step| fill(&writer, 1, step));
        fill(&writer, 1, STEPS + 1);
        over.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_read_in_place_counts_only_without_a_write() {
    let (writer, mut byte) = (Arena::create(&options()).unwrap(), [0]);
    let reader = again(&writer);
    let seen = reader.read_begin(0, 0, AT_ONCE).unwrap();
    assert_eq!(reader.read_validate(0, seen), Ok(()));
    writer.write_begin(0, 5).unwrap();
    assert_eq!(kind(reader.read_validate(0, seen)), ArenaKind::Changed);
    for handle in [&reader, &writer] {
        let late = handle.copy(0, 0, 0, &mut byte, AT_ONCE).unwrap_err();
        let own = std::process::id().to_string();
        assert!(matches!(&late, Error::Timeout(text) if text.contains(&own)), "{late}");
    }
    writer.write_end(0).unwrap();
    assert_eq!(kind(reader.read_validate(0, seen)), ArenaKind::Changed);
    let late = reader.read_begin(0, 6, Some(Duration::from_millis(1))).unwrap_err();
    assert!(matches!(&late, Error::Timeout(text) if text.ends_with("has generation 5, not 6")), "{late}");
    for (offset, bytes) in [(1000, 1), (0, 1001), (u64::MAX, 1)] {
        let outside = reader.copy(0, 0, offset, &mut vec![0; bytes], AT_ONCE);
        assert!(matches!(outside, Err(Error::InvalidArgument { .. })));
    }
    assert_eq!(reader.copy(0, 0, 1000, &mut [], AT_ONCE), Ok(5));
}

#[test]
fn one_writer_at_a_time_and_generations_grow() {
    let (first, mut all) = (Arena::create(&options()).unwrap(), [0; 1000]);
    let second = again(&first);
    assert_eq!(first.write_begin(0, 3), Ok(false));
    for handle in [&first, &second] {
        assert!(matches!(handle.write_begin(0, 4), Err(Error::Busy(_))));
    }
    assert!(second.write_end(0).is_err() && second.write_abort(0, true).is_err());
    second.write_begin(1, 1).unwrap();
    first.write_end(0).unwrap();
    for generation in [0, 1, 3] {
        assert!(matches!(second.write_begin(0, generation), Err(Error::InvalidArgument { .. })));
    }
    second.write_begin(0, 9).unwrap();
    second.write_abort(0, true).unwrap();
    assert_eq!(first.copy(0, 0, 0, &mut all, AT_ONCE), Ok(3), "the write was undone by its writer");
    second.write_begin(0, 9).unwrap();
    second.write_abort(0, false).unwrap();
    assert_eq!(kind(first.copy(0, 0, 0, &mut all, AT_ONCE)), ArenaKind::Torn);
    assert_eq!(first.write_begin(0, 9), Ok(true));
    first.write_abort(0, true).unwrap();
    assert_eq!(kind(second.read_begin(0, 0, SOON)), ArenaKind::Torn, "it was torn before");
    let reader = Arena::open_fd(first.info().unwrap().fd, Open::default()).unwrap();
    assert!(matches!(reader.write_begin(0, 10), Err(Error::Unsupported(_))));
    assert!(matches!(reader.join(0), Err(Error::Unsupported(_))));
}

#[test]
fn a_writer_that_ends_leaves_the_region_torn_until_it_is_written_again() {
    let owner = Arena::create(&options()).unwrap();
    let fd = owner.info().unwrap().fd;
    fill(&owner, 1, 1);
    assert!(in_forked_child(|| {
        let writer = Arena::open_fd(fd, WRITE).unwrap();
        let torn = writer.write_begin(1, 2).unwrap();
        std::mem::forget(writer);
        !torn
    }));
    let reader = again(&owner);
    let error = reader.read_begin(1, 0, None).unwrap_err();
    assert_eq!(error.arena_kind(), Some(ArenaKind::Torn));
    assert!(error.to_string().contains("region \"b\"") && reader.region(1).unwrap().in_write, "{error}");
    assert_eq!(owner.write_begin(1, 2), Ok(true));
    assert!(matches!(reader.read_begin(1, 0, AT_ONCE), Err(Error::Timeout(_))), "a writer is at work");
    owner.write_end(1).unwrap();
    assert_eq!(reader.read_begin(1, 2, AT_ONCE).unwrap().generation, 2);
}

#[test]
fn a_forked_child_has_no_part_in_its_parents_arena_and_ends_no_lock_of_it() {
    let owner = Arena::create(&options()).unwrap();
    let other = again(&owner);
    owner.join(0).unwrap();
    owner.write_begin(0, 1).unwrap();
    assert!(in_forked_child(|| true), "a child ends");
    assert!(matches!(other.read_begin(0, 0, AT_ONCE), Err(Error::Timeout(_))), "the parent still writes");
    assert!(matches!(other.join(0), Err(Error::Busy(_))));
    owner.write_end(0).unwrap();
    assert!(other.info().unwrap().owner_lives);
}

#[test]
fn the_name_of_a_live_owner_is_never_taken_and_that_of_a_dead_one_on_request() {
    let (name, path) = named("names");
    let create = Create { name: Some(name.clone()), ..options() };
    assert_eq!(kind(Arena::open(&name, WRITE)), ArenaKind::Missing);
    assert_eq!(kind(collect(&name)), ArenaKind::Missing);
    assert!(in_forked_child(|| {
        std::mem::forget(Arena::create(&create).unwrap());
        true
    }));
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o7777, 0o600);
    assert_eq!(kind(Arena::open(&name, WRITE)), ArenaKind::PeerEnded);
    let orphan = Arena::open(&name, Open { orphan: true, ..WRITE }).unwrap();
    fill(&orphan, 0, 1);
    assert_eq!(kind(Arena::create(&create)), ArenaKind::Exists);
    let owner = Arena::create(&Create { collect: true, ..create.clone() }).unwrap();
    assert_eq!(orphan.region(0).unwrap().span.to_vec(), [1; 1000], "what was mapped stays");
    assert_eq!(owner.region(0).unwrap().generation, 0);
    let own = std::process::id().to_string();
    for outcome in [
        Arena::create(&create).map(drop),
        Arena::create(&Create { collect: true, ..create.clone() }).map(drop),
        collect(&name),
    ] {
        assert!(outcome.as_ref().unwrap_err().to_string().contains(&own));
        assert_eq!(kind(outcome), ArenaKind::Exists);
    }
    assert!(Arena::open(&name, Open::default()).is_ok());
    drop(owner);
    assert!(!path.exists());
    assert!(in_forked_child(|| {
        std::mem::forget(Arena::create(&create).unwrap());
        true
    }));
    collect(&name).unwrap();
    assert!(!path.exists());
}

/// A file that is no arena stays: collecting it is an error. What an owner leaves behind at any moment is collected.
#[test]
fn only_what_an_owner_left_behind_is_removed() {
    let (name, path) = named("leftover");
    let create = Create { name: Some(name.clone()), ..options() };
    let owner = Arena::create(&create).unwrap();
    let whole = std::fs::read(&path).unwrap();
    drop(owner);
    let mut late = vec![0; 70_000];
    late[69_999] = 1;
    let not_complete = [vec![0; 8], whole[8..].to_vec()].concat();
    let other_size = [vec![0; 8], whole[8..].to_vec(), vec![0]].concat();
    let other_version = [&MAGIC[..], &1_u32.to_le_bytes(), &[7; 500]].concat();
    for (bytes, removed) in [
        (vec![7; 10_000], false),
        (b"SPWAREN".to_vec(), false),
        (late, false),
        (other_size, false),
        (vec![0; 70_000], true),
        (vec![0; 5], true),
        (Vec::new(), true),
        (not_complete, true),
        (other_version, true),
        (whole, true),
    ] {
        let text = format!("{} bytes, {:?}", bytes.len(), &bytes[..bytes.len().min(16)]);
        std::fs::write(&path, &bytes).unwrap();
        match removed {
            true => collect(&name).unwrap(),
            false => assert_eq!(kind(collect(&name)), ArenaKind::Format, "{text}"),
        }
        assert_eq!(path.exists(), !removed, "{text}");
        std::fs::write(&path, &bytes).unwrap();
        let created = Arena::create(&Create { collect: true, ..create.clone() });
        assert_eq!(created.is_ok(), removed, "{text}");
        if let Err(error) = created {
            assert_eq!(error.arena_kind(), Some(ArenaKind::Format));
            assert_eq!(kind(Arena::create(&create)), ArenaKind::Format);
            assert_eq!(std::fs::read(&path).unwrap(), bytes, "{text}");
            std::fs::remove_file(&path).unwrap();
        }
    }
}

#[test]
fn an_open_waits_for_its_owner() {
    let (name, _) = named("waits");
    let create = Create { name: Some(name.clone()), ..options() };
    std::thread::scope(|scope| {
        let opened = scope.spawn(|| Arena::open(&name, Open { timeout: SOON, ..WRITE }).unwrap());
        std::thread::sleep(Duration::from_millis(5));
        let owner = Arena::create(&create).unwrap();
        assert_eq!(opened.join().unwrap().info().unwrap().id, owner.info().unwrap().id);
    });
}

/// Every way to damage the header, one bit or byte at a time, is an error and never a wrong arena.
#[test]
fn what_is_no_arena_of_this_version_is_refused() {
    let (name, path) = named("damage");
    let owner = Arena::create(&Create { name: Some(name.clone()), ..options() }).unwrap();
    let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    let (mut whole, size) = (vec![0; HEADER + 3 * 96], file.metadata().unwrap().len());
    file.read_exact_at(&mut whole, 0).unwrap();
    let open = || Arena::open(&name, Open { orphan: true, ..WRITE });
    for at in 0..whole.len() {
        for bit in 0..8 {
            file.write_all_at(&[whole[at] ^ (1 << bit)], at as u64).unwrap();
            assert_eq!(kind(open()), ArenaKind::Format, "byte {at}");
        }
        file.write_all_at(&whole[at..=at], at as u64).unwrap();
    }
    file.write_all_at(&7_u32.to_le_bytes(), 8).unwrap();
    assert!(open().unwrap_err().to_string().contains("format version 7"));
    file.write_all_at(&whole, 0).unwrap();
    for length in [size + 1, size - 1, 4096, HEADER as u64, HEADER as u64 - 1, 1, 0] {
        file.set_len(length).unwrap();
        let wanted = if length == 0 { ArenaKind::Missing } else { ArenaKind::Format };
        assert_eq!(kind(open()), wanted, "{length} bytes");
    }
    drop(owner);
    assert!(!path.exists());
    symlink("/proc/self/exe", &path).unwrap();
    assert_eq!(kind(open()), ArenaKind::Foreign);
    assert_eq!(kind(Arena::create(&Create { name: Some(name.clone()), ..options() })), ArenaKind::Foreign);
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, vec![7; 10_000]).unwrap();
    assert_eq!(kind(open()), ArenaKind::Format);
    std::fs::remove_file(&path).unwrap();
    let plain = std::fs::File::open("/proc/self/exe").unwrap();
    let descriptor = std::os::fd::AsRawFd::as_raw_fd(&plain);
    assert!(matches!(
        kind(Arena::open_fd(descriptor, Open::default())),
        ArenaKind::Format | ArenaKind::Foreign
    ));
    assert!(matches!(Arena::open_fd(-1, WRITE), Err(Error::InvalidArgument { .. })));
    let (pipe, _writer) = std::io::pipe().unwrap();
    assert_eq!(kind(Arena::open_fd(std::os::fd::AsRawFd::as_raw_fd(&pipe), WRITE)), ArenaKind::Format);
}

#[test]
fn regions_that_cannot_be_are_named() {
    let with = |regions: &[(&str, u64)]| Create { regions: specs(regions), ..Create::default() };
    let long = "x".repeat(65);
    let cases = [
        (with(&[]), "region_count"),
        (with(&[("a", 1), ("", 1)]), "regions[1].name"),
        (with(&[(&long, 1)]), "regions[0].name"),
        (with(&[("a", 1), ("a", 1)]), "regions[1].name"),
        (with(&[("a", 0)]), "regions[0].bytes"),
        (with(&[("a", u64::MAX)]), "regions[0].bytes"),
        (with(&[("a", 1 << 62), ("b", 1 << 62)]), "regions"),
        (Create { processes: 5000, ..options() }, "processes"),
        (Create { name: Some("a/b".to_string()), ..options() }, "name"),
        (Create { name: Some(String::new()), ..options() }, "name"),
    ];
    for (create, argument) in cases {
        let text = Arena::create(&create).unwrap_err().to_string();
        assert!(text.starts_with(argument), "{argument}: {text}");
    }
    let (name, path) = named("large");
    let huge = Create { name: Some(name), ..with(&[("a", 1 << 50)]) };
    assert!(matches!(Arena::create(&huge), Err(Error::System { .. })));
    assert!(matches!(Arena::create(&with(&[("a", 1 << 50)])), Err(Error::System { .. })));
    assert!(!path.exists(), "what could not be created leaves no name");
    let layout = Layout::new(&specs(&[("a", 1 << 33)]), 0, Some).unwrap();
    assert_eq!(layout.regions[0].bytes, 1 << 33);
}

#[test]
fn wanted_pages_that_are_not_there_are_noted() {
    let arena = Arena::create(&Create { huge: true, node: Some(900), ..options() }).unwrap();
    assert!(arena.notes().contains("NUMA node"), "{}", arena.notes());
    assert!(arena.info().unwrap().huge || arena.notes().contains("no reserved huge pages"));
    assert_eq!(again(&arena).region(1).unwrap().span.to_vec(), vec![0; 70_001]);
}
