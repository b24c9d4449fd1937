//! Data files that another process truncates.
#![forbid(unsafe_code)]

use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::thread;

use super::real::{bases, kind, options};
use super::*;
use crate::error::{Error, TierKind};
use crate::io::sim::Crash;

/// End of the last written byte of extent 1 in a new tier: a header of one page, and 20,000 bytes.
const WRITTEN_END: u64 = 4096 + 20_000;
const PADDED_END: u64 = WRITTEN_END.next_multiple_of(4096);

/// A tier in one directory whose data file holds extent 1 alone.
fn one_extent(base: &[PathBuf]) -> (Tier, PathBuf) {
    let tier = Tier::open(options(base)).unwrap();
    write(&tier, 1, 7, &ExtentPlacement::Auto).unwrap();
    let data = owner().below(&base[0]).join("data");
    assert_eq!(len(&data), PADDED_END);
    (tier, data)
}

fn len(file: &Path) -> u64 {
    std::fs::metadata(file).unwrap().len()
}

fn truncate(file: &Path, len: u64) {
    OpenOptions::new().write(true).open(file).unwrap().set_len(len).unwrap();
}

#[test]
fn a_commit_restores_padding_that_was_cut_off() {
    let (_dir, bases) = bases();
    let (tier, data) = one_extent(&bases[..1]);
    truncate(&data, WRITTEN_END);
    tier.commit(1, &[]).unwrap();
    assert_eq!(len(&data), PADDED_END);
    drop(tier);
    assert!(read(&Tier::open(options(&bases[..1])).unwrap(), 1, 7).unwrap());
}

#[test]
fn a_commit_without_all_written_bytes_fails_and_keeps_the_last_one() {
    let (_dir, bases) = bases();
    let (tier, data) = one_extent(&bases[..1]);
    tier.commit(1, &[]).unwrap();
    // The second version lies behind the committed one.
    write(&tier, 1, 8, &ExtentPlacement::Auto).unwrap();
    assert!(len(&data) > PADDED_END);
    truncate(&data, PADDED_END);
    let error = tier.commit(2, &[]).unwrap_err();
    let Error::Tier(found) = &error else { panic!("{error}") };
    assert_eq!((found.kind, found.extent.as_str()), (TierKind::Corrupt, "subgroup-1"));
    assert!(
        error.to_string().contains("data") && error.to_string().contains("truncated to 24576"),
        "{error}"
    );
    drop(tier);
    let tier = Tier::open(options(&bases[..1])).unwrap();
    assert!(tier.opened().step == Some(1) && read(&tier, 1, 7).unwrap());
    // A commit succeeds after the missing data is written again.
    write(&tier, 1, 9, &ExtentPlacement::Auto).unwrap();
    truncate(&data, PADDED_END);
    assert!(tier.commit(2, &[]).is_err());
    write(&tier, 1, 9, &ExtentPlacement::Auto).unwrap();
    tier.commit(2, &[]).unwrap();
    drop(tier);
    assert!(read(&Tier::open(options(&bases[..1])).unwrap(), 1, 9).unwrap());
}

#[test]
fn an_open_restores_missing_padding_and_refuses_missing_bytes() {
    let (_dir, bases) = bases();
    let (tier, data) = one_extent(&bases[..1]);
    tier.commit(1, &[]).unwrap();
    drop(tier);
    truncate(&data, WRITTEN_END);
    let tier = Tier::open(options(&bases[..1])).unwrap();
    assert!(len(&data) == PADDED_END && read(&tier, 1, 7).unwrap());
    drop(tier);
    truncate(&data, WRITTEN_END - 1);
    assert_eq!(kind(Tier::open(options(&bases[..1]))).0, Some(TierKind::Format));
}

#[test]
fn a_simulated_disk_keeps_the_restored_length_over_a_power_cut() {
    let disks = [Disk::default()];
    let tier = Tier::open(on_disks(&disks, &[])).unwrap();
    step(&tier, 1).unwrap();
    let whole = disks[0].len("disk-0/data").unwrap();
    // The free space behind the extents is cut off.
    let extent = tier.define("last", &[1]).unwrap();
    let memory = Memory::filled(&[1], 5);
    let ticket = tier.write(extent, &memory.buffers(), &ExtentPlacement::Auto, None).unwrap();
    tier.wait(ticket, PATIENCE).unwrap();
    let grown = disks[0].len("disk-0/data").unwrap();
    assert!(grown > whole);
    disks[0].truncate("disk-0/data", grown as usize - 4095);
    tier.commit(2, &2_u64.to_le_bytes()).unwrap();
    assert_eq!(disks[0].len("disk-0/data"), Some(grown));
    drop(tier);
    disks[0].crash(Crash::Dropped, 1);
    assert_eq!(disks[0].len("disk-0/data"), Some(grown));
    assert_eq!(Tier::open(on_disks(&disks, &[])).unwrap().opened().step, Some(2));
}

#[test]
fn a_truncated_superblock_is_replaced_by_the_next_commit() {
    for superblock in ["superblock.0", "superblock.1"] {
        for left in [0, 1, 255, 256, 300, 4095, 4096, 5000] {
            let (_dir, bases) = bases();
            let (tier, _) = one_extent(&bases[..1]);
            tier.commit(1, &[]).unwrap();
            tier.commit(2, &[]).unwrap();
            drop(tier);
            truncate(&owner().below(&bases[0]).join(superblock), left);
            let tier = Tier::open(options(&bases[..1])).unwrap();
            assert!(matches!(tier.opened().step, Some(1 | 2)), "{superblock} of {left} bytes");
            assert!(read(&tier, 1, 7).unwrap());
            tier.commit(3, &[]).unwrap();
            drop(tier);
            assert_eq!(Tier::open(options(&bases[..1])).unwrap().opened().step, Some(3));
        }
    }
}

#[test]
fn a_short_superblock_that_shrinks_while_it_is_read_is_no_error() {
    const SHORT: &str = "disk-0/superblock.1";
    let prepared = || {
        let disk = Disk::default();
        let tier = Tier::open(on_disks(std::slice::from_ref(&disk), &[])).unwrap();
        (1..=2).for_each(|number| step(&tier, number).unwrap());
        drop(tier);
        // The copy of the step before the last one.
        disk.truncate(SHORT, 300);
        disk
    };
    let disk = prepared();
    let before = disk.requests();
    drop(Tier::open(on_disks(std::slice::from_ref(&disk), &[])).unwrap());
    for hung in before..disk.requests() {
        let disk = prepared();
        let faults = Faults { hang_nth: Some(hung), ..Faults::default() };
        let opened = thread::scope(|scope| {
            let open = scope.spawn(|| Tier::open(on_disks(std::slice::from_ref(&disk), &[faults])));
            until(|| disk.requests() > hung);
            disk.truncate(SHORT, 0);
            disk.release();
            open.join().unwrap()
        });
        let tier = opened.unwrap_or_else(|error| panic!("request {hung}: {error}"));
        assert!(is_at(&tier, 2), "request {hung}");
    }
}
