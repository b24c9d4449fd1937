//! Degraded opens: lost extents are listed, present ones are found, and paths that were opened separately are not
//! mixed.
#![forbid(unsafe_code)]

use std::fs;

use super::real::{bases, kind, options};
use super::*;
use crate::error::{IoKind, TierKind};

#[test]
fn a_missing_path_is_named_or_the_degraded_open_lists_what_is_lost() {
    let disks = [Disk::default(), Disk::default()];
    let tier = Tier::open(on_disks(&disks, &[])).unwrap();
    write(&tier, 0, 5, &ExtentPlacement::On(0)).unwrap();
    write(&tier, 1, 6, &ExtentPlacement::On(1)).unwrap();
    write(&tier, 2, 7, &ExtentPlacement::On(0)).unwrap();
    tier.commit(1, &[]).unwrap();
    drop(tier);
    let without = [disks[0].clone(), Disk::default()];
    let error = Tier::open(on_disks(&without, &[])).unwrap_err();
    assert_eq!(error.tier_kind(), Some(TierKind::PathMissing));
    assert!(error.to_string().contains("disk-1") && error.to_string().contains("1 extents"), "{error}");

    let tier = Tier::open(TierOptions { degraded: true, ..on_disks(&without, &[]) }).unwrap();
    assert_eq!(tier.opened().lost, ["subgroup-1"]);
    assert_eq!(read(&tier, 1, 6).unwrap_err().tier_kind(), Some(TierKind::Lost));
    assert!(read(&tier, 0, 5).unwrap() && read(&tier, 2, 7).unwrap());
    assert_eq!(tier.verify().unwrap().damage.len(), 1);
    // After a new write the extent is complete, and the path is no longer reported as missing.
    write(&tier, 1, 8, &ExtentPlacement::Auto).unwrap();
    tier.commit(2, &[]).unwrap();
    drop(tier);
    let tier = Tier::open(on_disks(&without, &[])).unwrap();
    assert!(read(&tier, 1, 8).unwrap() && tier.opened().lost.is_empty());
}

#[test]
fn a_directory_that_is_not_mounted_is_missed_left_out_and_taken_up_again() {
    let (dir, bases) = bases();
    let tier = Tier::open(options(&bases)).unwrap();
    step(&tier, 1).unwrap();
    drop(tier);
    let aside = dir.path().join("aside");
    fs::rename(&bases[1], &aside).unwrap();
    let (found, message) = kind(Tier::open(options(&bases)));
    assert_eq!(found, Some(TierKind::PathMissing), "{message}");
    assert!(message.contains("slow"), "{message}");
    let tier = Tier::open(TierOptions { degraded: true, ..options(&bases) }).unwrap();
    let opened = tier.opened();
    assert!(opened.missing.len() == 1 && opened.missing[0].contains("slow"), "{opened:?}");
    assert!(!opened.lost.is_empty() && !bases[1].exists(), "nothing is made on the disk below");
    drop(tier);
    fs::rename(&aside, &bases[1]).unwrap();
    assert!(is_at(&Tier::open(options(&bases)).unwrap(), 1));
    // A listed path that the tier never had is an error; it is not ignored.
    let stranger = [&bases[..], &[dir.path().join("stranger")]].concat();
    assert_eq!(Tier::open(options(&stranger)).unwrap_err().io_kind(), Some(IoKind::NotFound));
}

#[test]
fn memory_is_a_path_whose_extents_are_lost_with_the_process() {
    let (_dir, bases) = bases();
    let with_memory = || {
        let mut options = options(&bases[..1]);
        options.paths.push(PathOptions {
            location: PathLocation::Memory(None),
            limit: Some(1 << 20),
            reserve: 0,
        });
        options
    };
    let tier = Tier::open(with_memory()).unwrap();
    write(&tier, 0, 5, &ExtentPlacement::On(0)).unwrap();
    write(&tier, 1, 6, &ExtentPlacement::On(1)).unwrap();
    tier.commit(1, &[]).unwrap();
    assert!(read(&tier, 0, 5).unwrap() && read(&tier, 1, 6).unwrap());
    assert!(tier.paths()[1].memory);
    drop(tier);
    assert_eq!(kind(Tier::open(with_memory())).0, Some(TierKind::PathMissing));
    let tier = Tier::open(TierOptions { degraded: true, ..with_memory() }).unwrap();
    assert_eq!(tier.opened().lost, ["subgroup-1"]);
    write(&tier, 1, 7, &ExtentPlacement::On(2)).unwrap();
    assert!(read(&tier, 0, 5).unwrap() && read(&tier, 1, 7).unwrap());
}

/// Each path has its own last commit. The caller must choose which one counts.
#[test]
fn paths_that_went_on_without_each_other_are_not_mixed() {
    for commits in [0, 1] {
        let (_dir, bases) = bases();
        let tier = Tier::open(options(&bases)).unwrap();
        write(&tier, 0, 5, &ExtentPlacement::On(0)).unwrap();
        write(&tier, 1, 6, &ExtentPlacement::On(1)).unwrap();
        tier.commit(1, &[]).unwrap();
        drop(tier);
        let alone = |path: usize| {
            let options = options(&bases[path..][..1]);
            Tier::open(TierOptions { degraded: true, ..options }).unwrap()
        };
        for path in 0..2 {
            let tier = alone(path);
            for _ in 0..commits {
                write(&tier, 2, 20 + path as u64, &ExtentPlacement::Auto).unwrap();
                tier.commit(2, &[]).unwrap();
            }
        }
        assert_eq!(Tier::steps(&options(&bases)).is_err(), commits > 0);
        if commits > 0 {
            let (found, message) = kind(Tier::open(options(&bases)));
            assert_eq!(found, Some(TierKind::Foreign));
            assert!(message.contains("fast") && message.contains("slow"), "{message}");
            drop(alone(1));
        }
        let tier = Tier::open(options(&bases)).unwrap();
        assert!(tier.opened().missing.is_empty() && tier.opened().lost.is_empty());
        assert!(read(&tier, 1, 6).unwrap());
        if commits > 0 {
            assert!(read(&tier, 2, 21).unwrap());
        } else {
            assert!(read(&tier, 0, 5).unwrap());
        }
    }
}
