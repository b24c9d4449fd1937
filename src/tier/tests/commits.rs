//! Concurrent operations during a commit, and while contents move: a commit holds what its superblock names.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;

use super::*;
use crate::error::{Error, IoKind};
use crate::tier::Health;
use crate::tier::catalog::{Contents, WriteOrigin};

/// A tier on two disks with extents 0 and 1 written on disk 0, not committed; and the number of requests to disk 0.
fn written(disks: &[Disk], faults: &[Faults]) -> (Tier, u64) {
    let tier = Tier::open(on_disks(disks, faults)).unwrap();
    (0..2).for_each(|n| write(&tier, n, seed_of(1, n), &ExtentPlacement::On(0)).unwrap());
    (tier, disks[0].requests())
}

fn disks() -> [Disk; 2] {
    [Disk::default(), Disk::default()]
}

fn busy(outcome: Result<()>) -> bool {
    matches!(outcome, Err(Error::Busy(message)) if message.contains("commit"))
}

/// The commit hangs in the sync of its data or in the write of its superblock, while other threads evacuate, remove and
/// define. The state that it names is unchanged, also after later writes.
#[test]
fn nobody_changes_what_a_commit_under_way_takes() {
    let before = written(&disks(), &[]).1;
    for hung in before..before + 2 {
        let disks = disks();
        let hang = Faults { hang_nth: Some(hung), ..Faults::default() };
        let (tier, _) = written(&disks, &[hang]);
        let gone = tier.define("removed", &[1]).unwrap();
        tier.remove(gone).unwrap();
        let others = thread::scope(|scope| {
            let commit = scope.spawn(|| tier.commit(1, &1_u64.to_le_bytes()));
            until(|| disks[0].requests() > hung);
            let others = [
                tier.evacuate(0),
                tier.remove(1),
                tier.define("removed", &[1]).map(|_| ()),
                write(&tier, 0, 99, &ExtentPlacement::Auto),
            ];
            disks[0].release();
            commit.join().unwrap().unwrap();
            others
        });
        // Overwrites the space that is free now.
        (0..6).for_each(|n| write(&tier, n % 3, 99, &ExtentPlacement::On(0)).unwrap());
        drop(tier);
        let tier = Tier::open(TierOptions { mode: Mode::Resume, ..on_disks(&disks, &[]) }).unwrap();
        assert_eq!(tier.verify().unwrap().damage, [], "request {hung} hung");
        assert!((0..2).all(|n| read(&tier, n, seed_of(1, n)).unwrap()), "request {hung} hung");
        assert_eq!(others.map(busy), [true; 4], "request {hung} hung");
    }
}

/// A commit that starts while a write has no ticket yet is woken when the write gets one or fails.
#[test]
fn a_commit_waits_for_a_write_that_is_just_beginning() {
    for checksums in [None, Some(vec![])] {
        let tier = Arc::new(written(&disks(), &[]).0);
        let memory = Memory::filled(STREAMS[0], seed_of(2, 0));
        let begun = tier.begin_write(0, &WriteOrigin::Caller).unwrap();
        let (committing, (tell, told)) = (Arc::clone(&tier), mpsc::channel());
        thread::spawn(move || tell.send(committing.commit(2, &[])));
        until(|| tier.state.lock().catalog.between_commits().is_err());
        // Gives the commit time to block. If the time is too short, the test passes without testing anything.
        thread::sleep(Duration::from_millis(50));
        let fails = checksums.is_some();
        let ticket = tier.start_write(begun, &memory.buffers(), &ExtentPlacement::Auto, checksums);
        let outcome = told.recv_timeout(PATIENCE.unwrap()).expect("the commit sleeps for ever");
        assert_eq!((ticket.is_err(), outcome.is_err()), (fails, fails));
    }
}

#[test]
fn contents_that_changed_since_they_were_read_are_not_moved() {
    let tier = written(&disks(), &[]).0;
    let read_once = tier.state.lock().catalog.current(0).unwrap();
    write(&tier, 0, seed_of(2, 0), &ExtentPlacement::Auto).unwrap();
    let moved = |of: Arc<Contents>| tier.begin_write(0, &WriteOrigin::Evacuation(of)).map(|_| ());
    assert!(matches!(moved(read_once), Err(Error::Busy(_))));
    let read_once = tier.state.lock().catalog.current(0).unwrap();
    tier.rollback().unwrap();
    assert!(matches!(moved(read_once), Err(Error::Busy(_))));
}

/// A tiered update writes and reads beside the caller: its transfers must not fail because the caller evacuates a path.
#[test]
fn transfers_and_reverts_of_an_extent_wait_for_its_move() {
    let disks = disks();
    let before = Tier::open(on_disks(&disks, &[])).map(|_| disks[1].requests()).unwrap();
    for operation in 0..3 {
        let disks = self::disks();
        let faults = [Faults::default(), Faults { hang_nth: Some(before), ..Faults::default() }];
        let tier = Arc::new(written(&disks, &faults).0);
        let pin = tier.pin(0).unwrap();
        thread::scope(|scope| {
            let evacuation = scope.spawn(|| tier.evacuate(0));
            until(|| tier.state.lock().catalog.is_being_moved(0));
            let other = scope.spawn(|| match operation {
                0 => write(&tier, 0, seed_of(2, 0), &ExtentPlacement::Auto),
                1 => read(&tier, 0, seed_of(1, 0)).map(|same| assert!(same)),
                _ => pin.revert(),
            });
            // Gives the other thread time to meet the move. If the time is too short, the test passes without testing anything.
            thread::sleep(Duration::from_millis(50));
            disks[1].release();
            evacuation.join().unwrap().unwrap();
            other.join().unwrap().unwrap();
        });
        // A pin holds the contents where they were.
        assert_eq!(tier.extent(0).unwrap().blocks[0] > 0, operation == 2);
        assert!(read(&tier, 0, seed_of(if operation == 0 { 2 } else { 1 }, 0)).unwrap());
    }
}

/// A move does not count as a failed write, does not clear an earlier write failure, and keeps the generation.
#[test]
fn an_evacuation_changes_nothing_but_places() {
    let tier = written(&disks(), &[]).0;
    tier.commit(1, &[]).unwrap();
    let generations = || tier.extents().iter().map(|extent| extent.generation).collect::<Vec<_>>();
    let before = generations();
    tier.set_health(1, Health::Failed, "as if").unwrap();
    assert_eq!(tier.evacuate(0).unwrap_err().io_kind(), Some(IoKind::NoSpace));
    tier.commit(2, &[]).unwrap();
    // The write fails on every path. Then a path works again, but the extent keeps its old contents.
    assert_eq!(
        write(&tier, 0, seed_of(3, 0), &ExtentPlacement::Auto).unwrap_err().io_kind(),
        Some(IoKind::NoSpace)
    );
    tier.set_health(1, Health::Healthy, "").unwrap();
    tier.evacuate(0).unwrap();
    assert_eq!((generations(), tier.extent(0).unwrap().blocks[0]), (before, 0));
    assert_eq!(tier.commit(3, &[]).unwrap_err().io_kind(), Some(IoKind::NoSpace));
    write(&tier, 0, seed_of(3, 0), &ExtentPlacement::Auto).unwrap();
    tier.commit(3, &[]).unwrap();
    assert!(read(&tier, 0, seed_of(3, 0)).unwrap() && read(&tier, 1, seed_of(1, 1)).unwrap());
}

/// An extent larger than a window, in chunks on two paths; the chunk borders are inside windows.
#[test]
fn a_large_extent_is_moved_window_by_window() {
    let disks = [Disk::default(), Disk::default(), Disk::default()];
    let tier = Tier::open(on_disks(&disks, &[])).unwrap();
    let streams = [(20 << 20) + 5000, 3, (17 << 20) + 1];
    let memory = Memory::filled(&streams, 7);
    let extent = tier.define("large", &streams).unwrap();
    let placement = ExtentPlacement::Striped(vec![(0, 1000), (1, 3)]);
    let ticket = tier.write(extent, &memory.buffers(), &placement, None).unwrap();
    tier.wait(ticket, PATIENCE).unwrap();
    tier.commit(1, &1_u64.to_le_bytes()).unwrap();
    drop(tier);
    // The checksums are not known yet, so the move reads them from the headers.
    let tier = Tier::open(on_disks(&disks, &[])).unwrap();
    tier.set_health(0, Health::Draining, "slow").unwrap();
    tier.evacuate(1).unwrap();
    assert!(tier.extent(extent).unwrap().blocks[..2] == [0, 0]);
    tier.commit(2, &2_u64.to_le_bytes()).unwrap();
    let found = Memory::new(&streams);
    let ticket = tier.read(extent, &found.buffers()).unwrap();
    tier.wait(ticket, PATIENCE).unwrap();
    assert!(found.holds(7) && tier.verify().unwrap().damage.is_empty());
}

#[test]
fn a_read_that_is_over_leaves_its_extent_free_although_its_ticket_is_lost() {
    let tier = written(&disks(), &[]).0;
    let memory = Memory::new(STREAMS[0]);
    let ticket = tier.read(0, &memory.buffers()).unwrap();
    until(|| tier.volumes.iter().flatten().all(|path| path.quiet()));
    write(&tier, 0, seed_of(2, 0), &ExtentPlacement::Auto).unwrap();
    tier.commit(2, &[]).unwrap();
    // The ticket is still valid, and its memory holds the old contents.
    tier.wait(ticket, PATIENCE).unwrap();
    assert!(memory.holds(seed_of(1, 0)) && read(&tier, 0, seed_of(2, 0)).unwrap());
    write(&tier, 0, seed_of(3, 0), &ExtentPlacement::Auto).unwrap();
}

#[test]
fn commits_beside_a_check_of_everything_are_no_damage() {
    let tier = written(&disks(), &[]).0;
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            (1..)
                .take_while(|_| !over.load(Ordering::Relaxed))
                .for_each(|step| tier.commit(step, &[]).unwrap());
        });
        for _ in 0..400 {
            assert_eq!(tier.verify().unwrap().damage, []);
        }
        over.store(true, Ordering::Relaxed);
    });
}

/// Starts reads of extents 0 and 1.
fn read_both(tier: &Tier) -> (Vec<Memory>, Vec<u64>) {
    let memories: Vec<Memory> = (0..2).map(|n| Memory::new(STREAMS[n])).collect();
    let begin = |(memory, n): (&Memory, u32)| tier.read(n, &memory.buffers()).unwrap();
    let tickets = memories.iter().zip(0..).map(begin).collect();
    (memories, tickets)
}

#[test]
fn a_commit_without_a_usable_path_names_the_durable_paths() {
    let disks = disks();
    let mut options = on_disks(&disks, &[]);
    options.paths.insert(0, PathOptions { location: PathLocation::Memory(None), limit: None, reserve: 0 });
    let tier = Tier::open(options).unwrap();
    (1..=disks.len()).for_each(|path| tier.set_health(path as u32, Health::Failed, "as if").unwrap());
    let Err(Error::Io(error)) = tier.commit(1, &[]) else { panic!("committed to memory") };
    assert_eq!(error.kind, IoKind::PathFailed);
    assert!(error.path.starts_with("disk-") && !error.path.contains("memory"), "{error}");
    assert!(error.to_string().starts_with("committing to disk-"), "{error}");
}

/// If contents are discarded while they are being read, by a rollback or a removal, their space is reused only after
/// the read.
#[test]
fn what_is_being_read_stays_where_it_is_until_that_is_over() {
    for removed in [true, false] {
        let clean = disks();
        let (tier, _) = written(&clean, &[]);
        tier.commit(1, &[]).unwrap();
        write(&tier, 0, seed_of(2, 0), &ExtentPlacement::On(0)).unwrap();
        let fault = Faults { hang_nth: Some(clean[0].requests()), ..Faults::default() };
        let slow = disks();
        let (tier, _) = written(&slow, &[fault]);
        tier.commit(1, &[]).unwrap();
        write(&tier, 0, seed_of(2, 0), &ExtentPlacement::On(0)).unwrap();
        let memory = Memory::new(STREAMS[0]);
        let ticket = tier.read(0, &memory.buffers()).unwrap();
        until(|| slow[0].requests() > clean[0].requests());
        if removed {
            tier.remove(0).unwrap();
            tier.commit(2, &[]).unwrap();
        } else {
            tier.rollback().unwrap();
        }
        let before = tier.paths()[0].free;
        // Overwrites the space that is free now.
        let others = (0..4).map(|n| tier.define(&format!("other-{n}"), STREAMS[0]).unwrap());
        for (extent, seed) in others.zip(90..) {
            let memory = Memory::filled(STREAMS[0], seed);
            let ticket = tier.write(extent, &memory.buffers(), &ExtentPlacement::On(0), None).unwrap();
            tier.wait(ticket, PATIENCE).unwrap();
        }
        let after = tier.paths()[0].free;
        slow[0].release();
        tier.wait(ticket, PATIENCE).unwrap();
        assert!(memory.holds(seed_of(2, 0)), "removed: {removed}");
        assert!(tier.paths()[0].free > after, "before: {before}, after {after}; removed: {removed}");
        // The end of the read must not affect another extent that has the same number now.
        assert!(tier.extents().iter().all(|extent| !tier.state.lock().catalog.is_read(extent.number)));
    }
}

fn wait_for(tier: &Tier, tickets: Vec<u64>) {
    tickets.into_iter().for_each(|ticket| assert!(tier.wait(ticket, PATIENCE).is_ok()));
}

/// The system reports lost pages only once. A second sync may succeed although the data was lost.
#[test]
fn after_a_failed_sync_no_commit_succeeds_before_its_data_was_written_elsewhere() {
    let clean = disks();
    let (tier, _) = written(&clean, &[]);
    let (_memories, tickets) = read_both(&tier);
    wait_for(&tier, tickets);
    let before = clean[0].requests();
    let fault =
        Faults { fail_nth: Some((before, libc::EIO)), hang_nth: Some(before - 1), ..Faults::default() };
    let failing = disks();
    let (tier, _) = written(&failing, &[fault]);
    // Contents that are being read cannot be moved. The sync is sent after the reads, and fails.
    let (_memories, tickets) = read_both(&tier);
    until(|| failing[0].requests() == before);
    assert!(tier.commit(1, &[]).is_err());
    failing[0].release();
    wait_for(&tier, tickets);
    assert!(tier.extents().iter().any(|extent| extent.blocks[0] > 0));
    tier.commit(1, &1_u64.to_le_bytes()).unwrap();
    assert!(tier.extents().iter().all(|extent| extent.blocks[0] == 0));
}

#[test]
fn a_commit_searches_the_tickets_no_oftener_for_many_writes_than_for_one() {
    let searches = |count: usize, beside: bool| {
        let tier = Arc::new(Tier::open(on_disks(&disks(), &[])).unwrap());
        let memory = Memory::filled(&[1], 5);
        for n in 0..count {
            let extent = tier.define(&format!("small-{n}"), &[1]).unwrap();
            tier.write(extent, &memory.buffers(), &ExtentPlacement::Auto, None).unwrap();
        }
        tier.state.lock().tickets.searches.set(0);
        match beside {
            true => tier.commit_beside(1, &[]).unwrap().wait(None).unwrap(),
            false => tier.commit(1, &[]).unwrap(),
        }
        tier.state.lock().tickets.searches.get()
    };
    for beside in [false, true] {
        assert_eq!(searches(50, beside), searches(1, beside), "beside: {beside}");
    }
}
