//! I/O errors, full disks, hung paths and flipped bits: the run continues where possible; otherwise the error names
//! path, extent and block.
#![forbid(unsafe_code)]

use super::*;
use crate::error::{Doing, Error, IoError, IoKind, TierKind};
use crate::tier::catalog::WriteOrigin;
use crate::tier::extent::Chunk;
use crate::tier::{Health, PathReport};

/// Runs three steps with reads between them; returns the last step reached and the first error.
fn run(tier: &Tier) -> (u64, Option<Error>) {
    for number in 1..=3 {
        let go = || {
            step(tier, number)?;
            for n in 0..STREAMS.len() {
                assert!(read(tier, n, seed_of(number, n))?, "extent {n} of step {number} is another's");
            }
            Ok(())
        };
        if let Err(error) = go() {
            return (number, Some(error));
        }
    }
    (3, None)
}

fn names_its_place(error: &Error) -> bool {
    let message = error.to_string();
    message.contains("disk-")
        && (message.contains("errno") || message.contains("deadline") || message.contains("stuck"))
}

/// The last step that a new open finds, after checking that it is complete.
fn reopened(disks: &[Disk]) -> Option<u64> {
    let tier = Tier::open(TierOptions { mode: Mode::Resume, ..on_disks(disks, &[]) }).ok()?;
    let step = tier.opened().step;
    assert!(step.is_none_or(|step| is_at(&tier, step)));
    assert_eq!(tier.verify().unwrap().damage, []);
    step
}

#[test]
fn an_error_on_the_nth_request_of_a_path_is_taken_over_by_the_other_for_every_n() {
    let clean = [Disk::default(), Disk::default()];
    assert_eq!(run(&Tier::open(on_disks(&clean, &[])).unwrap()), (3, None));
    let requests = clean[1].requests();
    assert!(requests > 40, "{requests}");
    let (mut taken_over, mut read_errors, mut at_open) = (0, 0, 0);
    for errno in [libc::EIO, libc::ENOSPC] {
        for nth in 0..requests {
            let disks = [Disk::default(), Disk::default()];
            let fault = Faults { fail_nth: Some((nth, errno)), ..reorder(nth + 1) };
            let tier = match Tier::open(on_disks(&disks, &[Faults::default(), fault])) {
                Ok(tier) => tier,
                Err(error) => {
                    assert!(names_its_place(&error), "request {nth}: {error}");
                    at_open += 1;
                    continue;
                }
            };
            match run(&tier) {
                (3, None) => taken_over += 1,
                // The only copy could not be read. The error names it, and a second read succeeds.
                (number, Some(error)) => {
                    let message = error.to_string();
                    assert!(
                        message.contains("reading") && message.contains("extent \"subgroup-"),
                        "{nth}: {message}"
                    );
                    assert!(names_its_place(&error), "{message}");
                    read_errors += 1;
                    for n in 0..STREAMS.len() {
                        assert!(read(&tier, n, seed_of(number, n)).unwrap());
                    }
                    (number + 1..=3).for_each(|number| step(&tier, number).unwrap());
                }
                (number, None) => panic!("stopped at {number}"),
            }
            drop(tier);
            assert_eq!(reopened(&disks), Some(3), "request {nth}, errno {errno}");
        }
    }
    // An open has its own requests: it reads superblocks, allocates space for them, and writes and syncs them.
    assert!(taken_over > 40 && read_errors > 10 && at_open < 16, "{taken_over} {read_errors} {at_open}");
}

#[test]
fn with_one_path_every_error_is_named_and_the_committed_step_stays_whole() {
    let clean = [Disk::default()];
    run(&Tier::open(on_disks(&clean, &[])).unwrap());
    for errno in [libc::EIO, libc::ENOSPC] {
        for nth in 0..clean[0].requests() {
            let disks = [Disk::default()];
            let Ok(tier) =
                Tier::open(on_disks(&disks, &[Faults { fail_nth: Some((nth, errno)), ..reorder(5) }]))
            else {
                continue;
            };
            let (reached, error) = run(&tier);
            let error = error.unwrap_or_else(|| panic!("request {nth}: nothing failed"));
            assert!(names_its_place(&error), "request {nth}: {error}");
            drop(tier);
            let found = reopened(&disks).unwrap_or(0);
            assert!(found == reached || found + 1 == reached, "request {nth}: {found} after {reached}");
        }
    }
}

#[test]
fn a_failed_write_keeps_the_commit_from_succeeding_until_it_is_made_good() {
    let disks = [Disk::default()];
    let tier = Tier::open(on_disks(&disks, &[])).unwrap();
    step(&tier, 1).unwrap();
    tier.set_health(0, Health::Failed, "as if").unwrap();
    assert_eq!(write(&tier, 0, 77, &ExtentPlacement::Auto).unwrap_err().io_kind(), Some(IoKind::NoSpace));
    tier.set_health(0, Health::Healthy, "").unwrap();
    write(&tier, 1, 78, &ExtentPlacement::Auto).unwrap();
    assert!(tier.commit(2, &[]).is_err(), "extent 0 of step 2 is missing");
    write(&tier, 0, 77, &ExtentPlacement::Auto).unwrap();
    tier.commit(2, &2_u64.to_le_bytes()).unwrap();
    assert!(
        read(&tier, 0, 77).unwrap() && read(&tier, 1, 78).unwrap() && read(&tier, 2, seed_of(1, 2)).unwrap()
    );
}

#[test]
fn a_full_disk_is_left_for_another_and_full_disks_are_named_with_path_and_bytes() {
    for capacity in (100_000..260_000).step_by(7_000) {
        let disks = [Disk::default(), Disk::default()];
        let full = Faults { capacity: Some(capacity), ..Faults::default() };
        let tier = match Tier::open(on_disks(&disks, &[full.clone(), Faults::default()])) {
            Ok(tier) => tier,
            Err(error) => {
                assert_eq!(error.io_kind(), Some(IoKind::NoSpace), "{error}");
                continue;
            }
        };
        assert_eq!(run(&tier), (3, None), "{capacity}");
        drop(tier);
        assert_eq!(reopened(&disks), Some(3));

        let disks = [Disk::default(), Disk::default()];
        let Ok(tier) = Tier::open(on_disks(&disks, &[full.clone(), full])) else { continue };
        let (reached, error) = run(&tier);
        if let Some(error) = error {
            assert_eq!(error.io_kind(), Some(IoKind::NoSpace), "{error}");
            let message = error.to_string();
            assert!(message.contains("disk-") && message.contains(" bytes"), "{message}");
            tier.rollback().unwrap();
            tier.commit(50, &[50, 0, 0, 0, 0, 0, 0, 0]).unwrap();
            drop(tier);
            let tier = Tier::open(on_disks(&disks, &[])).unwrap();
            assert_eq!(tier.opened().step, Some(50));
            let whole =
                |step: u64| (0..STREAMS.len()).all(|n| read(&tier, n, seed_of(step, n)).unwrap_or(false));
            assert!(reached == 1 || whole(reached - 1), "capacity {capacity}, reached {reached}");
        }
    }
}

#[test]
fn a_disk_that_was_full_is_used_again_after_room_was_made() {
    let disks = [Disk::default(), Disk::default()];
    let small = Faults { capacity: Some(150_000), ..Faults::default() };
    let tier = Tier::open(on_disks(&disks, &[small.clone(), small])).unwrap();
    let (reached, error) = run(&tier);
    assert_eq!(error.and_then(|error| error.io_kind()), Some(IoKind::NoSpace));
    tier.rollback().unwrap();
    assert!(step(&tier, reached).is_err(), "the disks are still full");
    tier.rollback().unwrap();
    disks[1].limit(None);
    step(&tier, reached).unwrap();
    drop(tier);
    assert_eq!(reopened(&disks), Some(reached));
}

#[test]
fn a_path_that_hangs_is_given_up_and_the_run_goes_on() {
    let clean = [Disk::default(), Disk::default()];
    step(&Tier::open(on_disks(&clean, &[])).unwrap(), 1).unwrap();
    let opening = {
        let disks = [Disk::default(), Disk::default()];
        drop(Tier::open(on_disks(&disks, &[])).unwrap());
        disks[1].requests()
    };
    // Requests of the writes, and of the commit's syncs and superblocks.
    let survives = |nth: u64| {
        let disks = [Disk::default(), Disk::default()];
        let hang = Faults { hang_nth: Some(nth), ..Faults::default() };
        let mut options = on_disks(&disks, &[Faults::default(), hang]);
        options.io.io_timeout = short_io_timeout();
        let tier = Tier::open(options).unwrap();
        let first = step(&tier, 1);
        if let Err(error) = &first {
            // Data that was written but not synced cannot be recovered from a path that does not answer.
            assert!(names_its_place(error), "request {nth}: {error}");
            step(&tier, 1).unwrap();
        }
        step(&tier, 2).unwrap();
        assert_eq!(tier.paths()[1].health, Health::Failed, "request {nth}");
        assert!(!tier.paths()[1].reason.is_empty());
        disks[1].release();
        drop(tier);
        disks[1].wait_unused();
        assert_eq!(reopened(&disks), Some(2), "request {nth}");
    };
    // Each run spends its time in waits.
    std::thread::scope(|scope| {
        (opening..clean[1].requests()).for_each(|nth| drop(scope.spawn(move || survives(nth))));
    });
}

/// The space of a failed write is freed. The space of a write that the system may still perform stays allocated.
#[test]
fn the_place_of_a_stuck_write_is_not_given_to_another() {
    let used_after = |fault: &dyn Fn(u64) -> Faults| {
        let disks = [Disk::default(), Disk::default()];
        drop(Tier::open(on_disks(&disks, &[])).unwrap());
        // The request before the first write extends the data file.
        let first_write = disks[1].requests() + 1;
        let disks = [Disk::default(), Disk::default()];
        let mut options = on_disks(&disks, &[Faults::default(), fault(first_write)]);
        options.io.io_timeout = short_io_timeout();
        let tier = Tier::open(options).unwrap();
        write(&tier, 1, 5, &ExtentPlacement::On(1)).unwrap();
        assert!(tier.extents().iter().all(|extent| extent.blocks[1] == 0), "the other path took it over");
        let path = &tier.paths()[1];
        let used = path.file_bytes - path.free;
        disks[1].release();
        used
    };
    let failed = used_after(&|nth| Faults { fail_nth: Some((nth, libc::EIO)), ..Faults::default() });
    let stuck = used_after(&|nth| Faults { hang_nth: Some(nth), ..Faults::default() });
    assert_eq!(failed, 0);
    assert!(stuck >= STREAMS[1][0], "{stuck}");
}

/// Two paths refuse a part of the same move or import: each is marked, none is asked again, and the space of both stays
/// allocated if the system may still write there.
#[test]
fn each_path_that_refuses_a_part_of_new_chunks_counts() {
    let used_after = |kind: IoKind| {
        let disks = [Disk::default(), Disk::default(), Disk::default()];
        let mut options = on_disks(&disks, &[]);
        let size = |path: &mut PathOptions| (path.limit, path.reserve) = (Some(4 * BLOCK), 4 * BLOCK);
        options.paths[..2].iter_mut().for_each(size);
        let tier = Tier::open(options).unwrap();
        tier.set_health(2, Health::Draining, "the extent does not fit elsewhere").unwrap();
        let extent = tier.define("new", &[4 * BLOCK]).unwrap();
        let reserved = tier.begin_write(extent, &WriteOrigin::Caller).unwrap();
        let mut attempts = Vec::new();
        let filled = tier.fill(&reserved, |new| {
            attempts.push(new.chunks().iter().map(|chunk| chunk.path).collect::<Vec<_>>());
            tier.set_health(2, Health::Healthy, "").unwrap();
            for chunk in new.chunks().iter().filter(|chunk| chunk.path < 2) {
                let run = reserved.subject.shape.runs(chunk.first, chunk.count)[0];
                new.stored(&run, Err(IoError::about(kind, Doing::Writing, "data").into())).unwrap_err();
            }
            let sum = crate::checksum::of(&[0; BLOCK as usize]);
            if attempts.len() == 1 { Err(Error::Busy("it failed".to_string())) } else { Ok([sum; 4].into()) }
        });
        assert_eq!(filled, Ok(()));
        assert_eq!(attempts, [vec![0, 1], vec![2]]);
        let used = |path: &PathReport| (path.health == Health::Failed).then(|| path.file_bytes - path.free);
        tier.paths()[..2].iter().map(|path| used(path).unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(used_after(IoKind::Failed), [0, 0]);
    assert_eq!(used_after(IoKind::Deadline), [4 * BLOCK, 2 * BLOCK]);
}

#[test]
fn a_file_that_cannot_be_made_longer_in_time_holds_up_nobody_and_fails_its_path() {
    let disks = [Disk::default(), Disk::default()];
    drop(Tier::open(on_disks(&disks, &[])).unwrap());
    let growth = disks[1].requests();
    let disks = [Disk::default(), Disk::default()];
    let fault = Faults { hang_nth: Some(growth), ..Faults::default() };
    let mut options = on_disks(&disks, &[Faults::default(), fault]);
    options.io.io_timeout = short_io_timeout();
    let tier = Tier::open(options).unwrap();
    write(&tier, 0, 5, &ExtentPlacement::On(0)).unwrap();
    std::thread::scope(|scope| {
        let slow = scope.spawn(|| write(&tier, 1, 6, &ExtentPlacement::On(1)));
        while disks[1].requests() == growth {
            std::thread::yield_now();
        }
        // Each of these operations takes the tier's lock.
        assert!(!slow.is_finished() && tier.paths()[1].health == Health::Healthy);
        assert!(read(&tier, 0, 5).unwrap() && tier.extents().len() == 2);
        write(&tier, 2, 7, &ExtentPlacement::On(0)).unwrap();
        assert!(!slow.is_finished(), "the I/O timeout is not over");
        slow.join().unwrap().unwrap();
    });
    assert_eq!(tier.paths()[1].health, Health::Failed);
    assert!(read(&tier, 1, 6).unwrap() && tier.extents().iter().all(|extent| extent.blocks[1] == 0));
    tier.commit(1, &1_u64.to_le_bytes()).unwrap();
    disks[1].release();
}

#[test]
fn a_striped_write_that_gives_no_path_any_block_is_refused() {
    let disks = [Disk::default(), Disk::default()];
    let tier = Tier::open(on_disks(&disks, &[])).unwrap();
    for placement in [ExtentPlacement::Striped(vec![]), ExtentPlacement::Striped(vec![(0, 0), (1, 0)])] {
        let refused = write(&tier, 0, 5, &placement);
        let none = matches!(&placement, ExtentPlacement::Striped(parts) if parts.is_empty());
        assert_eq!(refused.is_err(), none, "{placement:?}: {refused:?}");
        // A rejected write leaves the extent as it was.
        assert!(write(&tier, 0, 5, &ExtentPlacement::On(7)).is_err());
        tier.commit(1, &1_u64.to_le_bytes()).unwrap();
        write(&tier, 0, 6, &ExtentPlacement::Striped(vec![(1, 1)])).unwrap();
        assert!(read(&tier, 0, 6).unwrap());
        tier.commit(1, &1_u64.to_le_bytes()).unwrap();
    }
    drop(tier);
    assert!(Tier::open(on_disks(&disks, &[])).is_ok_and(|tier| read(&tier, 0, 6).unwrap()));
}

#[test]
fn a_sync_that_fails_moves_what_was_written_to_another_path() {
    let disks = [Disk::default(), Disk::default()];
    let tier = Tier::open(on_disks(&disks, &[])).unwrap();
    (0..STREAMS.len()).for_each(|n| write(&tier, n, seed_of(1, n), &ExtentPlacement::On(1)).unwrap());
    let before = disks[1].requests();
    drop(tier);

    let disks = [Disk::default(), Disk::default()];
    let fault = Faults { fail_nth: Some((before, libc::EIO)), ..Faults::default() };
    let tier = Tier::open(on_disks(&disks, &[Faults::default(), fault])).unwrap();
    (0..STREAMS.len()).for_each(|n| write(&tier, n, seed_of(1, n), &ExtentPlacement::On(1)).unwrap());
    tier.commit(1, &1_u64.to_le_bytes()).unwrap();
    assert_eq!(tier.paths()[1].health, Health::Failed);
    assert!(tier.extents().iter().all(|extent| extent.blocks[1] == 0 && extent.committed));
    drop(tier);
    assert_eq!(reopened(&disks), Some(1));
}

#[test]
fn a_draining_path_empties_as_extents_are_written_and_an_evacuated_one_at_once() {
    let disks = [Disk::default(), Disk::default(), Disk::default()];
    let tier = Tier::open(on_disks(&disks, &[])).unwrap();
    step(&tier, 1).unwrap();
    tier.set_health(0, Health::Draining, "slow").unwrap();
    (0..STREAMS.len()).for_each(|n| write(&tier, n, seed_of(2, n), &ExtentPlacement::On(0)).unwrap());
    assert!(tier.extents().iter().all(|extent| extent.blocks[0] == 0));
    tier.commit(2, &2_u64.to_le_bytes()).unwrap();
    tier.evacuate(1).unwrap();
    assert!(tier.extents().iter().all(|extent| extent.blocks[1] == 0));
    tier.commit(3, &2_u64.to_le_bytes()).unwrap();
    assert!(is_at_step_two(&tier));
    drop(tier);
    // The first two disks hold no data any more, so nothing is lost without them.
    let others = [Disk::default(), Disk::default(), disks[2].clone()];
    let tier = Tier::open(on_disks(&others, &[])).unwrap();
    assert!(tier.opened().missing.is_empty() && tier.opened().lost.is_empty());
    assert!(is_at_step_two(&tier));
}

#[test]
fn a_verification_tells_the_bytes_that_it_reads() {
    let tier = Tier::open(on_disks(&[Disk::default(), Disk::default()], &[])).unwrap();
    step(&tier, 1).unwrap();
    let told = std::cell::Cell::new(0);
    let report = tier.verify_telling(&|bytes| told.set(told.get() + bytes)).unwrap();
    assert_eq!((told.get(), report.bytes), (report.bytes, STREAMS.iter().copied().flatten().sum()));
}

#[test]
fn an_evacuation_waits_for_the_transfers_of_the_extents() {
    let disks = [Disk::default(), Disk::default()];
    let tier = Tier::open(on_disks(&disks, &[])).unwrap();
    step(&tier, 1).unwrap();
    tier.set_health(1, Health::Draining, "so that the extents are on the other one").unwrap();
    (0..STREAMS.len()).for_each(|n| write(&tier, n, seed_of(2, n), &ExtentPlacement::Auto).unwrap());
    tier.set_health(1, Health::Healthy, "").unwrap();
    // A write to the path, and a read from it, that nobody has waited for.
    let extent = |n: usize| tier.define(&name_of(n), STREAMS[n]).unwrap();
    let (new, found) = (Memory::filled(STREAMS[0], seed_of(3, 0)), Memory::new(STREAMS[1]));
    let put = tier.write(extent(0), &new.buffers(), &ExtentPlacement::On(0), None).unwrap();
    let get = tier.read(extent(1), &found.buffers()).unwrap();
    tier.evacuate(0).unwrap();
    assert!(tier.extents().iter().all(|extent| extent.blocks[0] == 0));
    tier.wait(put, PATIENCE).unwrap();
    tier.wait(get, PATIENCE).unwrap();
    assert!(found.holds(seed_of(2, 1)) && read(&tier, 0, seed_of(3, 0)).unwrap());
    tier.commit(2, &[]).unwrap();
    assert_eq!(tier.verify().unwrap().damage, []);
}

fn is_at_step_two(tier: &Tier) -> bool {
    (0..STREAMS.len()).all(|n| read(tier, n, seed_of(2, n)).unwrap())
}

/// Chunks of all extents, each with the number of its extent.
fn chunks(tier: &Tier) -> Vec<(usize, Chunk)> {
    let of = |number: usize| {
        let contents = tier.state.lock().catalog.current(number as u32).unwrap();
        contents.version().chunks.iter().map(move |chunk| (number, chunk.clone())).collect::<Vec<_>>()
    };
    (0..tier.extents().len()).flat_map(of).collect()
}

fn flip(disk: &Disk, name: &str, at: u64) {
    let mut bytes = disk.contents(name);
    bytes[at as usize] ^= 0x10;
    disk.put(name, bytes);
}

#[test]
fn every_block_and_every_head_corrupted_once_is_named_exactly() {
    let disks = [Disk::default(), Disk::default()];
    let tier = Tier::open(on_disks(&disks, &[])).unwrap();
    step(&tier, 1).unwrap();
    let chunks = chunks(&tier);
    drop(tier);
    let mut checked = 0;
    for (n, chunk) in &chunks {
        let file = format!("disk-{}/data", chunk.path);
        let shape = Tier::open(on_disks(&disks, &[])).unwrap().shape(*n as u32).unwrap();
        let headers =
            [(chunk.first, chunk.offset, chunk.offset + 90), (chunk.first, chunk.offset, chunk.offset + 128)];
        let blocks = (chunk.first..chunk.first + chunk.count).map(|block| {
            let offset = chunk.block_offset(&shape, block);
            (block, offset, offset + shape.block(block).len - 1)
        });
        for (block, offset, at) in headers.into_iter().chain(blocks) {
            flip(&disks[chunk.path as usize], &file, at);
            let tier = Tier::open(on_disks(&disks, &[])).unwrap();
            let found = tier.verify().unwrap().damage;
            let error = read(&tier, *n, 0).unwrap_err();
            for error in found.iter().chain([&error]) {
                let Error::Tier(inner) = error else { panic!("{error}") };
                assert_eq!(inner.kind, TierKind::Corrupt);
                assert_eq!(
                    (inner.path.as_str(), inner.extent.as_str()),
                    (file.as_str(), name_of(*n).as_str())
                );
                assert_eq!(inner.block, Some((block.into(), offset)));
            }
            assert_eq!(found.len(), 1, "block {block} of extent {n}");
            drop(tier);
            flip(&disks[chunk.path as usize], &file, at);
            checked += 1;
        }
    }
    assert!(checked > 15, "{checked}");
}

#[test]
fn a_broken_superblock_is_named_and_another_one_counts() {
    let disks = [Disk::default(), Disk::default()];
    let tier = Tier::open(on_disks(&disks, &[])).unwrap();
    step(&tier, 1).unwrap();
    for (n, disk) in disks.iter().enumerate() {
        for copy in 0..2 {
            let name = format!("disk-{n}/superblock.{copy}");
            for at in [9, 20, 250, 4100] {
                flip(disk, &name, at);
                let damage = tier.verify().unwrap().damage;
                // Only damage to the last superblock is reported. The other copy may hold anything.
                let good = tier
                    .state
                    .lock()
                    .catalog
                    .paths()
                    .get(n)
                    .durable_copy()
                    .is_some_and(|good| good.copy == copy);
                assert_eq!(damage.len(), usize::from(good), "{damage:?}");
                assert!(damage.iter().all(|error| error.to_string().contains(&name)));
                flip(disk, &name, at);
            }
        }
    }
    drop(tier);
    for copy in 0..2 {
        flip(&disks[0], &format!("disk-0/superblock.{copy}"), 300);
        flip(&disks[0], &format!("disk-0/superblock.{copy}"), 4100);
    }
    assert_eq!(reopened(&disks), Some(1));
    // The path was repaired. Opened alone, its superblock names the other path as missing.
    let alone = Tier::open(TierOptions { mode: Mode::Resume, ..on_disks(&disks[..1], &[]) });
    let Err(Error::Tier(error)) = alone else { panic!("opened without its other path") };
    assert_eq!((error.kind, error.path.as_str()), (TierKind::PathMissing, "disk-1"));
}
