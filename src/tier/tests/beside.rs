//! Commits beside writes: they name what the extents held at the call, and nothing that comes later.
#![forbid(unsafe_code)]

use std::sync::{Arc, mpsc};
use std::thread;

use super::crash::{Commit, FATES, allowed, check};
use super::*;
use crate::error::{Error, IoKind};
use crate::io::sim::Journal;
use crate::tier::Health;
use crate::tier::catalog::WriteOrigin;

const WHOLE: [usize; 3] = [0, 1, 2];

fn disks() -> [Disk; 2] {
    [Disk::default(), Disk::default()]
}

/// A tier with step 1, not committed, and the number of requests to disk 0 so far.
fn written(disks: &[Disk], fault: Faults) -> (Arc<Tier>, u64) {
    let tier = Tier::open(on_disks(disks, &[fault])).unwrap();
    write_all(&tier, 1).unwrap();
    (Arc::new(tier), disks[0].requests())
}

fn write_on_other(tier: &Tier, step: u64) {
    WHOLE.iter().for_each(|n| write(tier, *n, seed_of(step, *n), &ExtentPlacement::On(1)).unwrap());
}

fn holds(tier: &Tier, step: u64) -> bool {
    WHOLE.iter().all(|n| read(tier, *n, seed_of(step, *n)).unwrap())
}

/// Numbers of the requests to disk 0 of a commit beside writes.
fn requests_of_a_commit() -> std::ops::Range<u64> {
    let disks = disks();
    let (tier, before) = written(&disks, Faults::default());
    tier.commit_beside(1, &[]).unwrap().wait(PATIENCE).unwrap();
    before..disks[0].requests()
}

/// Each request of the commit hangs in its turn. Meanwhile all extents are read, written and written again.
#[test]
fn a_commit_takes_what_was_there_at_its_call() {
    for hung in requests_of_a_commit() {
        let disks = disks();
        let (tier, _) = written(&disks, Faults { hang_nth: Some(hung), ..Faults::default() });
        let commit = tier.commit_beside(1, &1_u64.to_le_bytes()).unwrap();
        (2..5).for_each(|step| write_on_other(&tier, step));
        assert!(!commit.ended() && holds(&tier, 4), "request {hung}");
        assert!(tier.extents().iter().all(|extent| !extent.committed));
        disks[0].release();
        commit.wait(PATIENCE).unwrap();
        assert!(holds(&tier, 4), "request {hung}");
        tier.rollback().unwrap();
        assert!(holds(&tier, 1), "request {hung}");
        write_on_other(&tier, 5);
        drop(tier);
        assert_eq!(check(&disks, &[Some(1)], "reopened"), Some(1));
    }
}

#[test]
fn a_commit_waits_for_the_writes_in_flight_and_takes_what_they_install() {
    for fails in [false, true] {
        let disks = disks();
        let (tier, _) = written(&disks, Faults::default());
        let memory = Memory::filled(STREAMS[0], seed_of(2, 0));
        let begun = tier.begin_write(0, &WriteOrigin::Caller).unwrap();
        let commit = tier.commit_beside(1, &[]).unwrap();
        write(&tier, 1, seed_of(2, 1), &ExtentPlacement::Auto).unwrap();
        assert!(!commit.ended());
        // A wrong number of checksums.
        let checksums = fails.then(Vec::new);
        let ticket = tier.start_write(begun, &memory.buffers(), &ExtentPlacement::Auto, checksums);
        assert_eq!((ticket.is_err(), commit.wait(PATIENCE).is_err()), (fails, fails));
        if !fails {
            write(&tier, 0, seed_of(3, 0), &ExtentPlacement::Auto).unwrap();
            tier.rollback().unwrap();
            let seeds = [seed_of(2, 0), seed_of(1, 1), seed_of(1, 2)];
            assert!(WHOLE.iter().all(|n| read(&tier, *n, seeds[*n]).unwrap()));
        }
    }
}

/// A commit, a rollback, a removal, and the definition of an extent that the commit removes.
#[test]
fn what_a_commit_excludes_waits_for_its_end() {
    let sync = requests_of_a_commit().start;
    let calls: [fn(&Tier) -> Result<()>; 4] = [
        |tier| tier.commit(2, &[]),
        Tier::rollback,
        |tier| tier.remove(1),
        |tier| {
            write(tier, 2, 7, &ExtentPlacement::On(1))?;
            assert!(read(tier, 2, 7)?);
            Ok(())
        },
    ];
    for call in calls {
        let disks = disks();
        let (tier, _) = written(&disks, Faults { hang_nth: Some(sync), ..Faults::default() });
        tier.remove(2).unwrap();
        let commit = tier.commit_beside(1, &[]).unwrap();
        let busy = tier.begin_write(2, &WriteOrigin::Caller).unwrap_err();
        assert!(matches!(busy, Error::Busy(_)), "{busy}");
        let (caller, (tell, told)) = (Arc::clone(&tier), mpsc::channel());
        thread::spawn(move || tell.send(call(&caller)));
        assert!(told.recv_timeout(Duration::from_millis(50)).is_err(), "the call does not wait");
        disks[0].release();
        commit.wait(PATIENCE).unwrap();
        told.recv_timeout(PATIENCE.unwrap()).unwrap().unwrap();
    }
}

/// The system reports lost pages once. What was in flight during a failed sync may be lost too.
#[test]
fn after_a_failed_sync_the_next_commit_moves_what_was_written_before() {
    let sync = requests_of_a_commit().start;
    let disks = disks();
    let (tier, _) = written(&disks, Faults { fail_nth: Some((sync, libc::EIO)), ..Faults::default() });
    let error = tier.commit_beside(1, &[]).unwrap().wait(PATIENCE).unwrap_err();
    assert_eq!(error.io_kind(), Some(IoKind::Failed), "{error}");
    assert_eq!(tier.paths()[0].health, Health::Failed);
    assert!(tier.commit_beside(1, &[]).unwrap().wait(PATIENCE).is_err(), "it moves nothing");
    tier.commit(1, &1_u64.to_le_bytes()).unwrap();
    assert!(tier.extents().iter().all(|extent| extent.blocks[0] == 0));
    drop(tier);
    assert_eq!(check(&disks, &[Some(1)], "reopened"), Some(1));
}

#[test]
fn an_error_of_the_begin_begins_nothing() {
    let (tier, _) = written(&disks(), Faults::default());
    let too_long = vec![0; crate::tier::MAX_PAYLOAD + 1];
    assert!(matches!(tier.commit_beside(1, &too_long), Err(Error::InvalidArgument { .. })));
    assert!(tier.write(0, &[], &ExtentPlacement::Auto, None).is_err());
    tier.begin_write(0, &WriteOrigin::Caller)
        .map(|begun| tier.state.lock().catalog.fail(&begun, &Error::Busy("a device".to_string())))
        .unwrap();
    assert!(matches!(tier.commit_beside(1, &[]), Err(Error::Busy(_))));
    tier.rollback().unwrap();
    write_all(&tier, 1).unwrap();
    tier.commit_beside(1, &[]).unwrap().wait(PATIENCE).unwrap();
}

#[test]
fn a_close_of_the_outcome_waits_for_the_commit() {
    let disks = disks();
    let (tier, _) = written(&disks, Faults::default());
    drop(tier.commit_beside(1, &1_u64.to_le_bytes()).unwrap());
    let tier = Arc::into_inner(tier).expect("the thread does not use the tier any more");
    tier.close(PATIENCE).unwrap();
    assert_eq!(check(&disks, &[Some(1)], "reopened"), Some(1));
}

/// The next step is written while the commit of the step before is in flight.
#[test]
fn every_crash_point_among_writes_beside_commits_gives_a_whole_step() {
    let _core = OneCore::take();
    for seed in [1, 2, 3] {
        let journal = Journal::default();
        let disks = [Disk::journaled(&journal, 0), Disk::journaled(&journal, 1)];
        let options = TierOptions {
            durability: Durability::Data,
            ..on_disks(&disks, &[reorder(seed), reorder(seed + 9)])
        };
        let tier = Arc::new(Tier::open(options).unwrap());
        let mut commits: Vec<Commit> = Vec::new();
        write_all(&tier, 1).unwrap();
        for step in 1..=5 {
            let began = journal.len();
            let commit = tier.commit_beside(step, &step.to_le_bytes()).unwrap();
            write_all(&tier, step + 1).unwrap();
            if step == 3 {
                write_all(&tier, 99).unwrap();
                write_all(&tier, step + 1).unwrap();
            }
            commit.wait(PATIENCE).unwrap();
            commits.push(Commit { step, began, ended: journal.len() });
        }
        drop(tier);
        for events in 0..=journal.len() {
            let (crash, fate) = FATES[events % FATES.len()];
            let image = journal.image(2, events, crash, fate);
            check(&image, &allowed(&commits, events), &format!("seed {seed}, {events} events, {crash:?}"));
        }
    }
}
