//! A crash at every write and every sync leaves the last committed step, complete.
#![forbid(unsafe_code)]

use super::*;
use crate::error::TierKind;
use crate::io::sim::{Crash, Journal};
use sampled::Sample;

pub(super) const FATES: [(Crash, u64); 5] =
    [(Crash::Kept, 1), (Crash::Dropped, 1), (Crash::Torn, 1), (Crash::Torn, 77), (Crash::Torn, 991)];

/// Start and end of a step's commit, as positions in the journal.
pub(super) struct Commit {
    pub(super) step: u64,
    pub(super) began: usize,
    pub(super) ended: usize,
}

/// Runs steps `from..=to` on journaled disks.
pub(super) fn record(options: TierOptions, journal: &Journal, from: u64, to: u64) -> Vec<Commit> {
    let tier = Tier::open(options).unwrap();
    let mut commits = Vec::new();
    for number in from..=to {
        let began = journal.len();
        step(&tier, number).unwrap();
        commits.push(Commit { step: number, began, ended: journal.len() });
    }
    commits
}

/// Steps that an open may find after `events` events: the last acknowledged one, or one whose commit was in flight.
pub(super) fn allowed(commits: &[Commit], events: usize) -> Vec<Option<u64>> {
    let acknowledged = commits.iter().rev().find(|commit| commit.ended <= events).map(|commit| commit.step);
    let begun = commits.iter().filter(|commit| commit.began < events && commit.ended > events);
    [acknowledged].into_iter().chain(begun.map(|commit| Some(commit.step))).collect()
}

/// Opens an image, and checks that its step is in `allowed` and complete.
pub(super) fn check(disks: &[Disk], allowed: &[Option<u64>], message: &str) -> Option<u64> {
    let options = TierOptions { mode: Mode::Resume, ..on_disks(disks, &[]) };
    let tier = match Tier::open(options) {
        Ok(tier) => tier,
        Err(error) if error.tier_kind() == Some(TierKind::NoState) && allowed.contains(&None) => return None,
        Err(error) => panic!("{message}: {error}"),
    };
    let found = tier.opened().step;
    assert!(allowed.contains(&found), "{message}: found {found:?}, allowed {allowed:?}");
    if let Some(found) = found {
        assert!(is_at(&tier, found), "{message}: step {found} is mixed");
    }
    let checked = tier.verify().unwrap();
    assert_eq!(checked.damage, [], "{message}");
    found
}

#[test]
fn every_crash_point_with_writes_kept_dropped_or_torn_gives_a_whole_step() {
    let _core = OneCore::take();
    for (seed, durability) in [(1, Durability::Data), (2, Durability::Full)] {
        let journal = Journal::default();
        let disks = [Disk::journaled(&journal, 0), Disk::journaled(&journal, 1)];
        let options = TierOptions { durability, ..on_disks(&disks, &[reorder(seed), reorder(seed + 1)]) };
        let commits = record(options, &journal, 1, 5);
        assert!(journal.len() > 120, "{} events", journal.len());
        let mut found_new = 0;
        for events in 0..=journal.len() {
            for (crash, seed) in FATES {
                let image = journal.image(2, events, crash, seed);
                let allowed = allowed(&commits, events);
                let found = check(&image, &allowed, &format!("{events} events, {crash:?} {seed}"));
                found_new += usize::from(allowed.len() > 1 && found == allowed[1]);
            }
        }
        assert!(found_new > 0, "no crash inside a commit found the new step");
    }
}

/// The second run overwrites space that the first run freed. The test fails if a superblock of the first run comes
/// back.
#[test]
fn a_crash_after_a_crash_gives_a_whole_step() {
    let _core = OneCore::take();
    let first = Journal::default();
    let disks = [Disk::journaled(&first, 0), Disk::journaled(&first, 1)];
    let commits = record(on_disks(&disks, &[reorder(3), reorder(4)]), &first, 1, 3);
    let middle = commits[1].began..=commits[1].ended + 8;
    let mut sample = Sample::new();
    for (n, events) in middle.enumerate() {
        let (crash, seed) = FATES[n % FATES.len()];
        let image = first.image(2, events, crash, seed);
        let base = check(&image, &allowed(&commits, events), "the first life").unwrap();
        let image = first.image(2, events, crash, seed);
        let second = Journal::default();
        let disks: Vec<Disk> = image.iter().enumerate().map(|(n, disk)| disk.moved_to(&second, n)).collect();
        let start = second.len();
        let mut lives = record(on_disks(&disks, &[reorder(5), reorder(6)]), &second, 11, 12);
        lives.insert(0, Commit { step: base, began: 0, ended: start });
        for events in sample.of(25, start..=second.len()) {
            let (crash, seed) = FATES[(events + n) % FATES.len()];
            let image = second.image(2, events, crash, seed + events as u64);
            check(&image, &allowed(&lives, events), &format!("second life, {events} events, {crash:?}"));
        }
    }
}

/// A process is killed, the next one opens the tier, and then the power fails: the step that the open found is not
/// lost.
#[test]
fn a_power_cut_after_a_killed_process_was_resumed_keeps_what_it_found() {
    let _core = OneCore::take();
    let first = Journal::default();
    let disks = [Disk::journaled(&first, 0), Disk::journaled(&first, 1)];
    let commits = record(on_disks(&disks, &[reorder(14), reorder(15)]), &first, 1, 3);
    let (mut found_unsynced, mut sample) = (0, Sample::new());
    for events in commits[2].began..=commits[2].ended {
        let second = Journal::default();
        let killed = first.replayed(2, events);
        let disks: Vec<Disk> = killed.iter().enumerate().map(|(n, disk)| disk.moved_to(&second, n)).collect();
        let start = second.len();
        let tier = Tier::open(on_disks(&disks, &[reorder(16), reorder(17)])).unwrap();
        let (opened, found) = (second.len(), tier.opened().step);
        assert!(allowed(&commits, events).contains(&found));
        found_unsynced += usize::from(found == Some(3) && events < commits[2].ended);
        step(&tier, 4).unwrap();
        drop(tier);
        let crashes = (start..=second.len()).flat_map(|later| FATES.map(|fate| (later, fate)));
        for (later, (crash, seed)) in sample.of(40, crashes) {
            let allowed = if later < opened { allowed(&commits, events) } else { vec![found, Some(4)] };
            let image = second.image(2, later, crash, seed + later as u64);
            check(&image, &allowed, &format!("killed after {events}, {later} events, {crash:?}"));
        }
    }
    assert!(found_unsynced > 0);
}

/// A killed process left its last superblock in the page cache. The power fails while the next process opens the tier
/// and writes its own superblock. If that copy is torn, the other must be durable already, because older superblocks
/// name reused space.
#[test]
fn a_power_cut_while_a_tier_is_opened_does_not_lead_back_past_what_was_found() {
    let _core = OneCore::take();
    let first = Journal::default();
    let disks = [Disk::journaled(&first, 0)];
    let commits = record(on_disks(&disks, &[reorder(18)]), &first, 1, 4);
    let (mut unsynced, mut torn, mut sample) = (0, 0, Sample::new());
    for events in commits[3].began..=commits[3].ended {
        let killed = first.replayed(1, events);
        let second = Journal::default();
        let disks = [killed[0].moved_to(&second, 0)];
        let start = second.len();
        let found = Tier::open(on_disks(&disks, &[reorder(19)])).unwrap().opened().step;
        unsynced += usize::from(found == Some(4) && events < commits[3].ended);
        for later in start..=second.len() {
            for seed in sample.of(6, 0..24) {
                let image = second.image(1, later, Crash::Torn, 1 + 0x9E37 * seed);
                check(
                    &image,
                    &[Some(3), found],
                    &format!("killed after {events}, {later} events, seed {seed}"),
                );
                torn += 1;
            }
        }
    }
    assert!(unsynced > 0 && torn > 250, "{unsynced} {torn}");
}

/// A killed process leaves everything that reached the system; nothing is synced.
#[test]
fn a_killed_process_loses_nothing_even_without_syncs() {
    let _core = OneCore::take();
    let journal = Journal::default();
    let disks = [Disk::journaled(&journal, 0), Disk::journaled(&journal, 1)];
    let options = |disks: &[Disk]| TierOptions {
        durability: Durability::Process,
        ..on_disks(disks, &[reorder(7), reorder(8)])
    };
    let commits = record(options(&disks), &journal, 1, 6);
    for events in 0..=journal.len() {
        let image = journal.image(2, events, Crash::Kept, 1);
        check(&image, &allowed(&commits, events), &format!("{events} events"));
    }
}

/// Without syncs a machine crash may lose steps, but an open never accepts a mix of steps as complete.
#[test]
fn without_syncs_a_crash_of_the_machine_is_never_silent() {
    let _core = OneCore::take();
    let journal = Journal::default();
    let disks = [Disk::journaled(&journal, 0), Disk::journaled(&journal, 1)];
    let options =
        TierOptions { durability: Durability::Process, ..on_disks(&disks, &[reorder(9), reorder(10)]) };
    let commits = record(options, &journal, 1, 4);
    let mut told = 0;
    for events in commits[0].ended..=journal.len() {
        for (crash, seed) in FATES {
            let image = journal.image(2, events, crash, seed);
            let Ok(tier) = Tier::open(TierOptions { mode: Mode::Resume, ..on_disks(&image, &[]) }) else {
                told += 1;
                continue;
            };
            let Some(step) = tier.opened().step else { continue };
            for n in 0..STREAMS.len() {
                match read(&tier, n, seed_of(step, n)) {
                    Ok(right) => {
                        assert!(right, "{events} events, {crash:?}: extent {n} of step {step} is another's")
                    }
                    Err(_) => told += 1,
                }
            }
        }
    }
    assert!(told > 0);
}

#[test]
fn a_path_that_fails_on_the_way_leaves_every_crash_point_whole() {
    let _core = OneCore::take();
    for fail in [
        Faults { fail_nth: Some((40, libc::EIO)), ..reorder(11) },
        Faults { fail_nth: Some((55, libc::ENOSPC)), ..reorder(12) },
    ] {
        let journal = Journal::default();
        let disks = [Disk::journaled(&journal, 0), Disk::journaled(&journal, 1)];
        let commits = record(on_disks(&disks, &[reorder(13), fail]), &journal, 1, 5);
        for events in 0..=journal.len() {
            let (crash, seed) = FATES[events % FATES.len()];
            let image = journal.image(2, events, crash, seed);
            check(&image, &allowed(&commits, events), &format!("{events} events, {crash:?} {seed}"));
        }
    }
}

/// After a commit with unknown outcome, both steps keep their space until a commit succeeds.
#[test]
fn a_commit_of_unknown_outcome_leaves_every_crash_point_whole() {
    let _core = OneCore::take();
    let clean = [Disk::default()];
    let opened = Tier::open(on_disks(&clean, &[])).unwrap();
    step(&opened, 1).unwrap();
    let before = clean[0].requests();
    step(&opened, 2).unwrap();
    let after = clean[0].requests();
    drop(opened);
    for nth in before..after {
        let journal = Journal::default();
        let disks = [Disk::journaled(&journal, 0)];
        let fault = Faults { fail_nth: Some((nth, libc::EIO)), ..Faults::default() };
        let tier = Tier::open(on_disks(&disks, &[fault])).unwrap();
        let mut commits = Vec::new();
        let mut failed = 0;
        for number in 1..=4 {
            let began = journal.len();
            let outcome = step(&tier, number);
            let ended = if outcome.is_ok() { journal.len() } else { usize::MAX };
            commits.push(Commit { step: number, began, ended });
            if outcome.is_err() {
                failed += 1;
                tier.set_health(0, crate::tier::Health::Healthy, "").unwrap();
                match nth % 2 {
                    0 => drop(tier.finish_writes()),
                    _ => tier.rollback().unwrap(),
                }
            }
        }
        assert_eq!(failed, 1, "request {nth}");
        drop(tier);
        for events in commits[0].ended..=journal.len() {
            let (crash, seed) = FATES[events % FATES.len()];
            let image = journal.image(1, events, crash, seed);
            check(
                &image,
                &allowed(&commits, events),
                &format!("request {nth}, {events} events, {crash:?} {seed}"),
            );
        }
    }
}

#[test]
fn rolling_back_gives_the_committed_step_and_its_places_stay_whole() {
    let disks = [Disk::default(), Disk::default()];
    let tier = Tier::open(on_disks(&disks, &[])).unwrap();
    step(&tier, 1).unwrap();
    let files = |tier: &Tier| tier.paths().iter().map(|path| path.file_bytes).sum::<u64>();
    for round in 0..20 {
        for n in 0..STREAMS.len() {
            write(&tier, n, 9000 + round, &ExtentPlacement::Auto).unwrap();
            assert!(read(&tier, n, 9000 + round).unwrap());
        }
        tier.rollback().unwrap();
        (0..STREAMS.len()).for_each(|n| assert!(read(&tier, n, seed_of(1, n)).unwrap()));
    }
    let before = files(&tier);
    for number in 2..30 {
        step(&tier, number).unwrap();
    }
    assert!(files(&tier) < before * 4, "places are used again: {before} became {}", files(&tier));
    drop(tier);
    let tier = Tier::open(on_disks(&disks, &[])).unwrap();
    assert!(is_at(&tier, 29));
}
