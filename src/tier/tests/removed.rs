//! Files that are removed, replaced or renamed under a live tier, and tiers whose superblocks are lost. A successful
//! commit can be opened again, and nothing that may be a tier is overwritten.
#![forbid(unsafe_code)]

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::real::{bases, kind, options};
use super::*;
use crate::error::TierKind;
use crate::tier::Health;
use crate::tier::directory::collect;
use spillway_stores::memory::MemoryStore as Store;

const NAMES: [&str; 4] = ["lock", "data", "superblock.0", "superblock.1"];

/// Ways to remove files of the second of two paths: the action, and a part of the error message.
type Way = (Box<dyn Fn(&Path)>, String);

fn ways() -> Vec<Way> {
    let rank = |base: &Path| owner().below(base);
    let mut ways: Vec<Way> = vec![
        (Box::new(move |base| fs::remove_dir_all(rank(base)).unwrap()), "rank-0".to_string()),
        (Box::new(|base| fs::remove_dir_all(base.join("run")).unwrap()), "rank-0".to_string()),
        (Box::new(|base| fs::rename(base.join("run"), base.join("moved")).unwrap()), "rank-0".to_string()),
        (
            Box::new(move |base| {
                fs::rename(rank(base), base.join("moved")).unwrap();
                fs::create_dir(rank(base)).unwrap();
                NAMES
                    .iter()
                    .for_each(|name| drop(fs::copy(base.join("moved").join(name), rank(base).join(name))));
            }),
            "the directory \"rank-0\" was replaced".to_string(),
        ),
    ];
    for name in NAMES {
        ways.push((
            Box::new(move |base| fs::remove_file(rank(base).join(name)).unwrap()),
            format!("{name}: a path of the tier is missing: the file was removed or renamed"),
        ));
        ways.push((
            Box::new(move |base| {
                let path = rank(base).join(name);
                fs::copy(&path, path.with_extension("copy")).unwrap();
                fs::rename(path.with_extension("copy"), path).unwrap();
            }),
            format!("{name}: a path of the tier is missing: the file was replaced"),
        ));
    }
    ways
}

/// The commit that detects the loss moves all data of the path, whether committed or not.
#[test]
fn what_lies_on_a_path_whose_files_are_gone_is_moved_and_the_commit_can_be_opened() {
    for (at, (way, message)) in ways().into_iter().enumerate() {
        let (_dir, bases) = bases();
        let tier = Tier::open(options(&bases)).unwrap();
        (0..STREAMS.len()).for_each(|n| write(&tier, n, seed_of(2, n), &ExtentPlacement::On(1)).unwrap());
        tier.commit(1, &1_u64.to_le_bytes()).unwrap();
        way(&bases[1]);
        write(&tier, 0, seed_of(2, 0), &ExtentPlacement::Auto).unwrap();
        tier.commit(2, &2_u64.to_le_bytes()).unwrap();
        let report = &tier.paths()[1];
        assert_eq!(report.health, Health::Failed, "way {at}");
        assert!(report.reason.contains(&message), "way {at}: {}", report.reason);
        assert!(tier.extents().iter().all(|extent| extent.blocks[1] == 0 && extent.committed), "way {at}");
        assert!(is_at_two(&tier));
        drop(tier);
        // Both opens are complete: without the path, and with what is left of it.
        let tier = Tier::open(options(&bases[..1])).unwrap_or_else(|error| panic!("way {at}: {error}"));
        assert!(tier.opened().step == Some(2) && is_at_two(&tier), "way {at}");
        drop(tier);
        let tier = Tier::open(options(&bases)).unwrap_or_else(|error| panic!("way {at}: {error}"));
        assert!(tier.opened().step == Some(2) && is_at_two(&tier), "way {at}");
        assert_eq!(tier.verify().unwrap().damage, [], "way {at}");
    }
}

fn is_at_two(tier: &Tier) -> bool {
    (0..STREAMS.len()).all(|n| read(tier, n, seed_of(2, n)).unwrap())
}

#[test]
fn a_commit_into_files_that_are_gone_is_an_error_where_no_other_path_takes_them() {
    for (at, (way, message)) in ways().into_iter().enumerate() {
        for empty in [false, true] {
            let (_dir, bases) = bases();
            let tier = Tier::open(options(&bases[1..])).unwrap();
            if !empty {
                write(&tier, 0, 5, &ExtentPlacement::Auto).unwrap();
            }
            way(&bases[1]);
            for _ in 0..2 {
                let error = tier.commit(1, &[]).unwrap_err();
                assert_eq!(error.tier_kind(), Some(TierKind::PathMissing), "way {at}");
                assert!(error.to_string().contains(&message), "way {at}: {error}");
            }
        }
    }
}

/// A commit rejects what the next open would refuse.
#[test]
fn a_file_with_a_second_name_and_a_directory_that_became_a_link_fail_their_path() {
    let linked = |base: &Path| {
        let host = owner().below(base).parent().unwrap().to_path_buf();
        fs::rename(&host, host.with_extension("moved")).unwrap();
        std::os::unix::fs::symlink(host.with_extension("moved"), host).unwrap();
    };
    let second_name = |base: &Path| {
        fs::hard_link(owner().below(base).join("data"), base.join("second")).unwrap();
    };
    let ways: [Way; 2] =
        [(Box::new(linked), "was replaced".to_string()), (Box::new(second_name), "a hard link".to_string())];
    for (way, message) in ways {
        let (_dir, bases) = bases();
        let tier = Tier::open(options(&bases)).unwrap();
        (0..STREAMS.len()).for_each(|n| write(&tier, n, seed_of(2, n), &ExtentPlacement::On(1)).unwrap());
        tier.commit(1, &1_u64.to_le_bytes()).unwrap();
        way(&bases[1]);
        tier.commit(2, &2_u64.to_le_bytes()).unwrap();
        assert!(tier.paths()[1].reason.contains(&message), "{}", tier.paths()[1].reason);
        assert!(tier.extents().iter().all(|extent| extent.blocks[1] == 0 && extent.committed));
        drop(tier);
        let tier = Tier::open(options(&bases[..1])).unwrap();
        assert!(tier.opened().step == Some(2) && is_at_two(&tier));

        let (_dir, bases) = self::bases();
        let tier = Tier::open(options(&bases[1..])).unwrap();
        way(&bases[1]);
        let error = tier.commit(1, &[]).unwrap_err();
        assert!(error.to_string().contains(&message), "{error}");
    }
}

#[test]
fn a_tier_is_destroyed_only_where_it_still_lies() {
    let (_dir, bases) = bases();
    let tier = Tier::open(options(&bases[..1])).unwrap();
    step(&tier, 1).unwrap();
    drop(tier);
    let rank = owner().below(&bases[0]);
    let moved = bases[0].join("moved");
    for (renamed, message) in [
        (bases[0].join("run"), "the directory \"run\" was removed or renamed"),
        (rank.clone(), "the directory \"rank-0\" was removed or renamed"),
        (rank.join("data"), "the file \"data\" was renamed"),
        (bases[0].clone(), "fast\" was removed or renamed"),
    ] {
        let moved = if renamed == bases[0] { bases[0].with_extension("moved") } else { moved.clone() };
        let tier = Tier::open(options(&bases[..1])).unwrap();
        fs::rename(&renamed, &moved).unwrap();
        let error = tier.destroy().unwrap_err();
        assert_eq!(error.tier_kind(), Some(TierKind::PathMissing));
        assert!(error.to_string().contains(message) && error.to_string().contains("files remain"), "{error}");
        fs::rename(moved, renamed).unwrap();
        assert!(is_at(&Tier::open(options(&bases[..1])).unwrap(), 1), "{message}");
    }
    let tier = Tier::open(options(&bases[..1])).unwrap();
    // The lock is removed, so another process may hold the directory now.
    fs::remove_file(owner().below(&bases[0]).join("lock")).unwrap();
    assert_eq!(tier.destroy().unwrap_err().tier_kind(), Some(TierKind::PathMissing));
    let tier = Tier::open(options(&bases[..1])).unwrap();
    assert!(is_at(&tier, 1));
    // Nothing remains of a directory that was removed with its files.
    fs::remove_dir_all(bases[0].join("run")).unwrap();
    tier.destroy().unwrap();
}

#[test]
fn a_tier_whose_lock_was_removed_writes_nothing_over_the_commits_of_its_next_owner() {
    let (_dir, bases) = bases();
    let first = Tier::open(options(&bases[..1])).unwrap();
    step(&first, 1).unwrap();
    fs::remove_file(owner().below(&bases[0]).join("lock")).unwrap();
    let second = Tier::open(options(&bases[..1])).unwrap();
    step(&second, 2).unwrap();
    let error = write(&first, 0, seed_of(3, 0), &ExtentPlacement::Auto).unwrap_err();
    assert_eq!(error.tier_kind(), Some(TierKind::PathMissing), "{error}");
    assert!(first.commit(3, &3_u64.to_le_bytes()).is_err());
    drop((first, second));
    assert!(is_at(&Tier::open(options(&bases[..1])).unwrap(), 2));
}

#[test]
fn a_commit_below_a_prefix_whose_lock_was_deleted_is_an_error() {
    let store = Store::default();
    let place = PathLocation::Store(store.clone());
    let paths = vec![PathOptions { location: place, limit: None, reserve: 0 }];
    let tier =
        Tier::open(TierOptions { paths, block_bytes: BLOCK, ..TierOptions::new(owner(), []) }).unwrap();
    step(&tier, 1).unwrap();
    let lock = store.keys().into_iter().find(|key| key.contains("/lock/")).unwrap();
    spillway_stores::Store::delete(&store, &lock).unwrap();
    let error = tier.commit(2, &[]).unwrap_err();
    assert!(
        error.tier_kind() == Some(TierKind::PathMissing) && error.to_string().contains("lock"),
        "{error}"
    );
}

/// Damage that a test does to the superblocks of a tier.
type Damage = fn(&Path);

#[test]
fn a_tier_whose_superblocks_are_lost_is_not_written_over() {
    let damages: [Damage; 3] = [
        |path| {
            let len = fs::metadata(path).unwrap().len();
            fs::write(path, vec![0; len as usize]).unwrap();
        },
        |path| fs::write(path, []).unwrap(),
        |path| fs::remove_file(path).unwrap(),
    ];
    for damage in damages {
        let (_dir, bases) = bases();
        let tier = Tier::open(options(&bases)).unwrap();
        step(&tier, 1).unwrap();
        drop(tier);
        let rank = |base: &Path| owner().below(base);
        for base in &bases {
            ["superblock.0", "superblock.1"].iter().for_each(|name| damage(&rank(base).join(name)));
        }
        // A first page of zeros or of other bytes does not hide the chunks behind it.
        for (number, base) in bases.iter().enumerate() {
            let file = fs::OpenOptions::new().write(true).open(rank(base).join("data")).unwrap();
            file.write_all_at(&[number as u8 * 7; 4096], 0).unwrap();
        }
        let before = fs::read(rank(&bases[0]).join("data")).unwrap();
        let error = Tier::steps(&options(&bases)).unwrap_err();
        assert_eq!(error.tier_kind(), Some(TierKind::Format), "{error}");
        for mode in [Mode::Auto, Mode::Create, Mode::Resume] {
            for degraded in [false, true] {
                let (found, message) = kind(Tier::open(TierOptions { mode, degraded, ..options(&bases) }));
                assert_eq!(found, Some(TierKind::Format));
                assert!(message.contains("data") && message.contains("collect"), "{message}");
            }
        }
        assert!(fs::read(rank(&bases[0]).join("data")).unwrap() == before);
        bases.iter().for_each(|base| collect(None, base, &owner()).unwrap());
        step(&Tier::open(options(&bases)).unwrap(), 1).unwrap();
    }
}

/// A killed creation or removal leaves files without a committed state.
#[test]
fn a_creation_or_a_removal_that_was_cut_short_is_no_tier() {
    let (_dir, bases) = bases();
    let rank = owner().below(&bases[0]);
    let reserved = || {
        let mut options = options(&bases[..1]);
        options.paths[0].reserve = 1 << 20;
        options
    };
    fs::create_dir_all(&rank).unwrap();
    fs::write(rank.join("data"), vec![0; 1 << 20]).unwrap();
    ["superblock.0", "superblock.1"]
        .iter()
        .for_each(|name| fs::write(rank.join(name), [0; 1 << 16]).unwrap());
    let tier = Tier::open(reserved()).unwrap();
    step(&tier, 1).unwrap();
    drop(tier);
    for left in 0..3 {
        fs::write(rank.join("removing"), []).unwrap();
        for name in &["superblock.0", "superblock.1", "data"][..left] {
            fs::remove_file(rank.join(name)).unwrap();
        }
        let tier = Tier::open(reserved()).unwrap();
        assert!(!tier.opened().resumed && !rank.join("removing").exists());
        step(&tier, 1).unwrap();
    }
    let tier = Tier::open(reserved()).unwrap();
    assert!(is_at(&tier, 1));
}

/// The unreadable path may hold a tier.
#[test]
fn a_degraded_open_that_finds_no_tier_beside_an_unreadable_path_is_an_error() {
    let (_dir, bases) = bases();
    fs::create_dir_all(owner().below(&bases[1]).join("superblock.0")).unwrap();
    for list in [&bases[1..], &bases[..]] {
        for mode in [Mode::Auto, Mode::Create] {
            let error = Tier::open(TierOptions { mode, degraded: true, ..options(list) }).unwrap_err();
            assert!(error.to_string().contains("slow"), "{error}");
        }
    }
}
