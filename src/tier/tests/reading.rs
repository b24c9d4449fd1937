//! A tier that is opened for reading.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::real::{bases, kind, options};
use super::*;
use crate::error::{Error, TierKind};

fn reading(bases: &[PathBuf]) -> TierOptions {
    TierOptions { mode: Mode::Read, ..options(bases) }
}

/// Every file below a directory, with its bytes.
fn everything(directory: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => found.extend(everything(&path)),
            false => drop(found.insert(path.clone(), fs::read(path).unwrap())),
        }
    }
    found
}

#[test]
fn several_readers_find_either_commit_and_change_no_byte() {
    let (dir, bases) = bases();
    let tier = Tier::open(TierOptions { world: 4, ..options(&bases) }).unwrap();
    (1..=2).for_each(|number| step(&tier, number).unwrap());
    drop(tier);
    let before = everything(dir.path());
    let last = Tier::open(reading(&bases)).unwrap();
    let older = Tier::open(TierOptions { at_step: Some(1), ..reading(&bases) }).unwrap();
    assert!(is_at(&last, 2) && is_at(&older, 1));
    assert_eq!(
        (last.options.world, older.options.world),
        (4, 4),
        "what a reader exports has the number of ranks"
    );
    assert_eq!(Tier::steps(&reading(&bases)).unwrap().last, Some(2));
    let refused = [
        write(&last, 1, 9, &ExtentPlacement::Auto).err(),
        last.commit(3, b"").err(),
        older.commit(3, b"").err(),
        older.destroy().err(),
    ];
    for error in refused {
        let error = error.expect("it is refused");
        assert!(matches!(error, Error::Unsupported(_)), "{error}");
    }
    last.close(PATIENCE).unwrap();
    assert!(everything(dir.path()) == before, "a reader has changed a file");
    let tier = Tier::open(TierOptions { world: 4, at_step: Some(1), ..options(&bases) }).unwrap();
    assert!(is_at(&tier, 1), "the program itself goes on at either commit");
}

#[test]
fn a_tier_that_has_lost_a_copy_of_its_superblock_is_read_by_the_other() {
    for lost in ["superblock.0", "superblock.1"] {
        let (dir, bases) = bases();
        let tier = Tier::open(options(&bases)).unwrap();
        (1..=2).for_each(|number| step(&tier, number).unwrap());
        drop(tier);
        for path in everything(dir.path()).into_keys().filter(|path| path.ends_with(lost)) {
            fs::remove_file(path).unwrap();
        }
        let before = everything(dir.path());
        let tier = Tier::open(reading(&bases)).unwrap();
        let found = [1, 2].into_iter().find(|step| is_at(&tier, *step));
        tier.close(PATIENCE).unwrap();
        assert!(everything(dir.path()) == before, "a reader has changed a file");
        let owner = Tier::open(TierOptions { mode: Mode::Resume, ..options(&bases) }).unwrap();
        let resumed = [1, 2].into_iter().find(|step| is_at(&owner, *step));
        assert!(found.is_some() && found == resumed, "{lost}: read {found:?}, resumed {resumed:?}");
    }
}

#[test]
fn what_is_missing_or_in_use_is_not_read() {
    let (_dir, bases) = bases();
    assert_eq!(kind(Tier::open(reading(&bases))).0, Some(TierKind::NoState));
    assert!(bases.iter().all(|base| fs::read_dir(base).unwrap().next().is_none()), "nothing was made");
    let tier = Tier::open(options(&bases)).unwrap();
    step(&tier, 1).unwrap();
    let (kind_of, message) = kind(Tier::open(reading(&bases)));
    assert_eq!(kind_of, Some(TierKind::Locked), "{message}");
    assert_eq!(Tier::steps(&reading(&bases)).map_err(|error| error.tier_kind()), Err(Some(TierKind::Locked)));
    drop(tier);
    assert_eq!(kind(Tier::open(reading(&bases[..1]))).0, Some(TierKind::PathMissing));
    assert!(is_at(&Tier::open(reading(&bases)).unwrap(), 1));
}

#[test]
fn memory_is_not_opened_for_reading() {
    let memory = PathOptions { location: PathLocation::Memory(None), limit: None, reserve: 0 };
    let options = TierOptions { mode: Mode::Read, paths: vec![memory], ..TierOptions::new(owner(), []) };
    assert!(matches!(Tier::open(options), Err(Error::Unsupported(_))));
}
