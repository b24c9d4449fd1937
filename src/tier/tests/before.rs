//! An open at the commit before the last one returns exactly its bytes or a typed error, and the discarded last commit
//! does not come back.
#![forbid(unsafe_code)]

use super::crash::{Commit, FATES, allowed, check, record};
use super::*;
use crate::error::TierKind;
use crate::io::sim::Journal;
use crate::tier::recover::{Before, Steps};
use sampled::Sample;

fn at(disks: &[Disk], step: u64) -> Result<Tier> {
    Tier::open(TierOptions { at_step: Some(step), ..on_disks(disks, &[]) })
}

/// What can be opened, without the tags.
fn steps(disks: &[Disk]) -> Steps {
    Steps { tags: [0; 2], ..Tier::steps(&on_disks(disks, &[])).unwrap() }
}

#[test]
fn a_tag_tells_commits_of_one_step_apart() {
    let disks = [Disk::default()];
    let options = || on_disks(&disks, &[]);
    let tags = || Tier::steps(&options()).unwrap().tags;
    assert_eq!(tags(), [0; 2]);
    let payload = |first: u8, rest: u8| [[first; 48], [rest; 48]].concat();
    let mut seen = Vec::new();
    for (step, payload) in [(1, Vec::new()), (2, payload(1, 7)), (1, payload(2, 7)), (2, payload(1, 8))] {
        let tier = Tier::open(options()).unwrap();
        write(&tier, 0, step, &ExtentPlacement::Auto).unwrap();
        tier.commit(step, &payload).unwrap();
        drop(tier);
        seen.push(tags());
    }
    assert_eq!(seen[0], [0; 2]);
    assert!(seen[1][0] != 0 && seen[2][0] != 0 && seen[1][0] != seen[2][0]);
    assert_eq!((seen[2][1], seen[3]), (seen[1][0], [seen[1][0], seen[2][0]]));
}

/// Opens at a step that must be complete, and then checks that a default open finds the same step.
fn whole_at(disks: &[Disk], step: u64, message: &str) {
    let tier = at(disks, step).unwrap_or_else(|error| panic!("{message}: {error}"));
    assert_eq!(tier.opened().step, Some(step), "{message}");
    assert!(is_at(&tier, step), "{message}: step {step} is mixed");
    assert_eq!(tier.verify().unwrap().damage, [], "{message}");
    drop(tier);
    check(disks, &[Some(step)], message);
}

fn refused(disks: &[Disk], step: u64, message: &str) {
    let error = at(disks, step).unwrap_err();
    assert!(error.tier_kind() == Some(TierKind::NoStep) && error.to_string().contains(message), "{error}");
}

/// Two disks after steps 1 to 4: their journal and the commits.
fn four_steps(durability: Durability) -> (Journal, Vec<Commit>) {
    let journal = Journal::default();
    let disks = [Disk::journaled(&journal, 0), Disk::journaled(&journal, 1)];
    let options = TierOptions { durability, ..on_disks(&disks, &[reorder(21), reorder(22)]) };
    let commits = record(options, &journal, 1, 4);
    (journal, commits)
}

#[test]
fn every_crash_point_up_to_the_end_of_a_commit_opens_at_the_step_before() {
    let _core = OneCore::take();
    let mut sample = Sample::new();
    for durability in [Durability::Data, Durability::Full] {
        let (journal, commits) = four_steps(durability);
        for pair in commits.windows(2) {
            for events in pair[0].ended..=pair[1].ended {
                for (crash, seed) in sample.of(2, FATES) {
                    let image = journal.image(2, events, crash, seed);
                    whole_at(&image, pair[0].step, &format!("{events} events, {crash:?} {seed}"));
                }
            }
        }
    }
    let (journal, commits) = four_steps(Durability::Process);
    for events in commits[2].ended..=commits[3].ended {
        whole_at(&journal.replayed(2, events), 3, &format!("killed after {events} events"));
    }
}

/// Step 2 is complete until the first write after the commit of step 3. After that write, an open at step 2 either
/// finds it complete, or fails and changes nothing.
#[test]
fn a_step_whose_places_are_written_over_is_never_mixed() {
    let _core = OneCore::take();
    let (journal, commits) = four_steps(Durability::Data);
    let (mut whole, mut refused) = (0, 0);
    for events in commits[2].ended..=journal.len() {
        for (crash, seed) in FATES {
            let message = format!("{events} events, {crash:?} {seed}");
            let image = journal.image(2, events, crash, seed);
            match at(&image, 2) {
                Ok(tier) => {
                    assert!(is_at(&tier, 2), "{message}: step 2 is mixed");
                    whole += 1;
                }
                Err(error) => {
                    assert_eq!(error.tier_kind(), Some(TierKind::NoStep), "{message}: {error}");
                    assert!(events > commits[2].ended, "{message}: {error}");
                    check(&image, &allowed(&commits, events), &message);
                    refused += 1;
                }
            }
        }
    }
    assert!(whole > FATES.len() && refused > 50, "{whole} {refused}");
}

/// Step 4 is discarded for step 3, and step 14 follows. A crash during the open keeps step 3 available; after the open
/// no crash leads back to step 4.
#[test]
fn what_was_given_up_does_not_come_back() {
    let _core = OneCore::take();
    let (first, commits) = four_steps(Durability::Data);
    let mut sample = Sample::new();
    for (n, events) in (commits[3].began..=commits[3].ended).enumerate() {
        let (crash, seed) = FATES[n % FATES.len()];
        let second = Journal::default();
        let image = first.image(2, events, crash, seed);
        let disks: Vec<Disk> = image.iter().enumerate().map(|(n, disk)| disk.moved_to(&second, n)).collect();
        let start = second.len();
        let options = on_disks(&disks, &[reorder(23), reorder(24)]);
        let tier = Tier::open(TierOptions { at_step: Some(3), ..options }).unwrap();
        let opened = second.len();
        let there = steps(&second.replayed(2, opened));
        assert_eq!(
            there,
            Steps { last: Some(3), before: Before::Unknown, exists: true, tags: [0; 2] },
            "no copy names step 4"
        );
        step(&tier, 14).unwrap();
        drop(tier);
        let fates = |later: usize| match later <= opened {
            true => &FATES[..],
            false => &FATES[(n + later) % FATES.len()..][..1],
        };
        let crashes =
            (start..=second.len()).flat_map(|later| fates(later).iter().map(move |fate| (later, *fate)));
        for (later, (crash, seed)) in sample.of(20, crashes) {
            let message = format!("crashed after {events}, then {later} events, {crash:?}");
            let found = if later < opened { vec![Some(3), Some(4)] } else { vec![Some(3), Some(14)] };
            check(&second.image(2, later, crash, seed + later as u64), &found, &message);
            whole_at(&second.image(2, later, crash, seed + later as u64), 3, &message);
        }
    }
}

/// Extents that the last commit did not touch share their space with the previous step. Other extents were removed,
/// added, or moved to another path.
#[test]
fn extents_that_stayed_went_came_or_moved_are_as_they_were() {
    let disks = [Disk::default(), Disk::default()];
    let tier = Tier::open(on_disks(&disks, &[])).unwrap();
    step(&tier, 1).unwrap();
    step(&tier, 2).unwrap();
    write(&tier, 0, 77, &ExtentPlacement::Auto).unwrap();
    tier.remove(tier.define(&name_of(1), STREAMS[1]).unwrap()).unwrap();
    let new = tier.define("new", &[9000]).unwrap();
    let memory = Memory::filled(&[9000], 5);
    tier.wait(tier.write(new, &memory.buffers(), &ExtentPlacement::On(0), None).unwrap(), PATIENCE).unwrap();
    tier.evacuate(0).unwrap();
    tier.commit(3, b"three").unwrap();
    let used = tier.extents().iter().map(|extent| extent.generation).max();
    drop(tier);
    assert_eq!(steps(&disks), Steps { last: Some(3), before: Before::Step(2), exists: true, tags: [0; 2] });
    let tier = at(&disks, 2).unwrap();
    assert!(is_at(&tier, 2) && tier.extents().len() == STREAMS.len());
    write(&tier, 0, 78, &ExtentPlacement::Auto).unwrap();
    assert!(Some(tier.extent(0).unwrap().generation) > used, "a generation is given once");
    tier.commit(4, &[]).unwrap();
    assert!(read(&tier, 0, 78).unwrap() && read(&tier, 1, seed_of(2, 1)).unwrap());
    assert_eq!(tier.verify().unwrap().damage, []);
}

#[test]
fn any_other_step_is_refused_and_looking_changes_nothing() {
    let journal = Journal::default();
    let disks = [Disk::journaled(&journal, 0), Disk::journaled(&journal, 1)];
    let none = |exists| Steps { last: None, before: Before::Unknown, exists, tags: [0; 2] };
    assert_eq!(steps(&disks), none(false));
    assert_eq!(at(&disks, 1).unwrap_err().tier_kind(), Some(TierKind::NoState));
    let options = || TierOptions { at_step: Some(1), ..on_disks(&disks, &[]) };
    assert!(Tier::open(TierOptions { mode: Mode::Create, ..options() }).is_err());
    drop(Tier::open(on_disks(&disks, &[])).unwrap());
    assert_eq!(steps(&disks), none(true));
    refused(&disks, 1, "available steps: []");
    record(on_disks(&disks, &[]), &journal, 1, 1);
    assert_eq!(steps(&disks), Steps { last: Some(1), before: Before::Empty, exists: true, tags: [0; 2] });
    record(on_disks(&disks, &[]), &journal, 2, 3);
    // Looking writes the owner's record, and nothing else.
    let files = || {
        let of = |disk: &Disk| {
            let names = disk.names().into_iter().filter(|name| !name.ends_with("/lock"));
            names.map(|name| (disk.contents(&name), name)).collect::<Vec<_>>()
        };
        disks.iter().map(of).collect::<Vec<_>>()
    };
    let before = files();
    assert_eq!(steps(&disks), Steps { last: Some(3), before: Before::Step(2), exists: true, tags: [0; 2] });
    for step in [0, 1, 4, u64::MAX] {
        refused(&disks, step, &format!("step {step}: available steps: [3, 2]"));
    }
    assert!(files() == before, "a superblock or data was written");
    whole_at(&disks, 3, "the last step by its number");
    // After an open at the last step, both superblock copies hold this step.
    assert_eq!(steps(&disks), Steps { last: Some(3), before: Before::Unknown, exists: true, tags: [0; 2] });
    refused(&disks, 2, "[3]");
    let foreign = TierOptions { owner: Owner { rank: 1, ..owner() }, world: 2, ..on_disks(&disks, &[]) };
    assert_eq!(Tier::steps(&foreign).unwrap_err().tier_kind(), Some(TierKind::Foreign));
}

/// One valid copy on any path is enough to open the previous step. Without one, the last step stays available.
#[test]
fn the_step_before_is_found_on_any_path() {
    let (journal, commits) = four_steps(Durability::Data);
    let image = || journal.replayed(2, commits[3].ended);
    // Step 4 wrote the fifth superblock, into copy 0. Step 3 is in copy 1.
    let damage = |disks: &[Disk], n: usize| disks[n].put(&format!("disk-{n}/superblock.1"), vec![7; 8192]);
    for path in 0..2 {
        let disks = image();
        damage(&disks, path);
        assert_eq!(steps(&disks).before, Before::Step(3));
        whole_at(&disks, 3, &format!("damaged on path {path}"));
    }
    let disks = image();
    (0..2).for_each(|path| damage(&disks, path));
    assert_eq!(steps(&disks), Steps { last: Some(4), before: Before::Unknown, exists: true, tags: [0; 2] });
    refused(&disks, 3, "[4]");
    check(&disks, &[Some(4)], "the last step");
}

/// If a path fails during a commit, its data is moved, but never into space of the previous step.
#[test]
fn a_commit_that_a_path_failed_in_leaves_the_step_before_whole() {
    let prepared = || {
        let disks = [Disk::default(), Disk::default()];
        let tier = Tier::open(on_disks(&disks, &[])).unwrap();
        (1..=3).for_each(|number| step(&tier, number).unwrap());
        drop(tier);
        disks
    };
    let disks = prepared();
    let tier = Tier::open(on_disks(&disks, &[])).unwrap();
    let before = disks[1].requests();
    step(&tier, 4).unwrap();
    let after = disks[1].requests();
    drop(tier);
    let mut failed = 0;
    for nth in before..after {
        let disks = prepared();
        let fault = Faults { fail_nth: Some((nth, libc::EIO)), ..Faults::default() };
        let tier = Tier::open(on_disks(&disks, &[Faults::default(), fault])).unwrap();
        step(&tier, 4).unwrap();
        failed += usize::from(tier.paths()[1].health != crate::tier::Health::Healthy);
        drop(tier);
        whole_at(&disks, 3, &format!("request {nth} failed"));
    }
    assert!(failed > 5, "{failed}");
}

/// Two commits of one step: each of them is found by its tag, wherever the second one was interrupted, until something is
/// written after it.
#[test]
fn of_two_commits_of_one_step_each_is_found_by_its_tag() {
    let _core = OneCore::take();
    let journal = Journal::default();
    let disks = [Disk::journaled(&journal, 0), Disk::journaled(&journal, 1)];
    let tier = Tier::open(on_disks(&disks, &[reorder(25), reorder(26)])).unwrap();
    step(&tier, 6).unwrap();
    let mut ends = Vec::new();
    for content in [7, 8_u64] {
        write_all(&tier, content).unwrap();
        tier.commit(7, &content.to_le_bytes()).unwrap();
        ends.push(journal.len());
    }
    drop(tier);
    let found = |disks: &[Disk]| Tier::steps(&on_disks(disks, &[])).unwrap();
    let (first, both) = (found(&journal.replayed(2, ends[0])).tags[0], found(&journal.replayed(2, ends[1])));
    assert_eq!((both.last, both.before, both.tags[1]), (Some(7), Before::Step(7), first));
    assert!(both.tags[0] != first && first != 0);
    let at = |disks: &[Disk], tag| {
        Tier::open(TierOptions { at_step: Some(7), at_tag: tag, ..on_disks(disks, &[]) })
    };
    for events in ends[0]..=ends[1] {
        for (crash, seed) in FATES {
            let message = format!("{events} events, {crash:?} {seed}");
            let image = || journal.image(2, events, crash, seed);
            let last = at(&image(), 0).unwrap_or_else(|error| panic!("{message}: {error}"));
            assert!(is_at(&last, 7) || is_at(&last, 8), "{message}");
            let disks = image();
            let tier = at(&disks, first).unwrap_or_else(|error| panic!("{message}: {error}"));
            assert!(is_at(&tier, 7), "{message}");
            drop(tier);
            let again = found(&disks);
            assert_eq!((again.last, again.tags[0], again.before == Before::Step(7)), (Some(7), first, false));
            match at(&image(), both.tags[0]) {
                Ok(tier) => assert!(is_at(&tier, 8), "{message}"),
                Err(error) => {
                    assert!(events < ends[1] && error.to_string().contains("tag"), "{message}: {error}")
                }
            }
        }
    }
}
