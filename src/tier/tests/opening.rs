//! Opens on full file systems, with too little memory, and from another working directory.
#![forbid(unsafe_code)]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::real::{Small, options};
use super::*;
use crate::error::IoKind;
use crate::log::{self, Level};
use crate::sys::sync::Lock;
use crate::tier::Health;
use crate::tier::select::Selection;

fn full() -> Faults {
    Faults { refuse_writes: Some(libc::ENOSPC), ..Faults::default() }
}

/// A full file system that writes to new blocks, as btrfs, refuses even the superblock of the open.
#[test]
fn a_tier_on_a_full_file_system_opens_for_reading_and_goes_on_once_there_is_room() {
    let disk = Disk::default();
    let options = |faults: Faults| on_disks(std::slice::from_ref(&disk), &[faults]);
    let tier = Tier::open(options(Faults::default())).unwrap();
    step(&tier, 1).unwrap();
    drop(tier);
    let tier = Tier::open(options(full())).unwrap();
    assert!(is_at(&tier, 1));
    assert_eq!(tier.verify().unwrap().damage, []);
    for error in [write(&tier, 0, 5, &ExtentPlacement::Auto).unwrap_err(), tier.commit(2, &[]).unwrap_err()] {
        assert!(error.is_full() && error.to_string().contains("free some space"), "{error}");
    }
    assert_eq!(tier.paths()[0].health, Health::Healthy);
    drop(tier);
    let tier = Tier::open(options(Faults::default())).unwrap();
    assert!(is_at(&tier, 1));
    step(&tier, 2).unwrap();
    drop(tier);
    assert!(is_at(&Tier::open(options(Faults::default())).unwrap(), 2));
}

#[test]
fn a_new_tier_or_an_older_step_on_a_full_file_system_is_an_error() {
    let disk = Disk::default();
    let options = |faults: Faults| on_disks(std::slice::from_ref(&disk), &[faults]);
    assert!(Tier::open(options(full())).unwrap_err().is_full());
    let tier = Tier::open(options(Faults::default())).unwrap();
    step(&tier, 1).unwrap();
    step(&tier, 2).unwrap();
    drop(tier);
    assert!(Tier::open(TierOptions { at_step: Some(1), ..options(full()) }).unwrap_err().is_full());
    assert!(is_at(&Tier::open(options(Faults::default())).unwrap(), 2));
}

#[test]
#[cfg_attr(not(built_by_root), ignore = "mounts a file system, which needs root")]
fn a_lock_file_that_a_full_file_system_does_not_take_is_no_reason_to_refuse_a_tier() {
    let dir = tempfile::tempdir().unwrap();
    let Some(small) = Small::mount(dir.path().join("small"), 4 << 20) else { return };
    let bases = [small.0.clone()];
    let tier = Tier::open(options(&bases)).unwrap();
    step(&tier, 1).unwrap();
    drop(tier);
    let lock = owner().below(&bases[0]).join("lock");
    for reserved in [true, false] {
        if !reserved {
            fs::write(&lock, []).unwrap();
        }
        let filler = bases[0].join("filler");
        while fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(&filler)
            .is_ok_and(|file| std::io::Write::write_all(&mut &file, &[1; 4096]).is_ok())
        {}
        let tier = Tier::open(options(&bases)).unwrap();
        assert!(is_at(&tier, 1), "reserved: {reserved}");
        drop(tier);
        fs::remove_file(filler).unwrap();
        let tier = Tier::open(options(&bases)).unwrap();
        step(&tier, 1).unwrap();
    }
}

/// Without memory nothing is known about the path, which may have a newer step.
#[test]
fn a_degraded_open_leaves_out_a_path_after_an_error_of_the_path_and_not_for_lack_of_memory() {
    let disks = [Disk::default(), Disk::default()];
    let tier = Tier::open(on_disks(&disks, &[])).unwrap();
    write(&tier, 0, 5, &ExtentPlacement::On(0)).unwrap();
    tier.commit(1, &[]).unwrap();
    drop(tier);
    let degraded = |errno| {
        let faults = Faults { error_permille: vec![(errno, 1000)], ..Faults::default() };
        Tier::open(TierOptions { degraded: true, ..on_disks(&disks, &[Faults::default(), faults]) })
    };
    for errno in [libc::ENOMEM, libc::EMFILE] {
        let error = degraded(errno).unwrap_err();
        assert!(error.io_kind() == Some(IoKind::Failed), "{error}");
    }
    let tier = degraded(libc::EIO).unwrap();
    assert_eq!(tier.opened().missing, ["disk-1"]);
    assert!(read(&tier, 0, 5).unwrap());
}

#[test]
fn a_superblock_that_is_gone_is_reported_if_the_path_had_it() {
    let dir = tempfile::tempdir().unwrap();
    let base = [dir.path().to_path_buf()];
    let superblock = |copy: usize| owner().below(dir.path()).join(format!("superblock.{copy}"));
    let lines = Arc::new(Lock::new(Vec::new()));
    let (sink, own) = (Arc::clone(&lines), dir.path().to_str().unwrap().to_string());
    log::set_sink(Some((
        Level::Warn,
        log::Sink::Called(Box::new(move |_, line| {
            sink.lock().extend(line.contains(&own).then(|| line.to_string()))
        })),
    )));
    let opened = || {
        Tier::open(options(&base)).unwrap();
        log::deliver();
        std::mem::take(&mut *lines.lock())
    };
    // A new tier has had one superblock.
    assert!(opened().is_empty() && opened().is_empty());
    let tier = Tier::open(options(&base)).unwrap();
    [1, 2].iter().for_each(|at| step(&tier, *at).unwrap());
    drop(tier);
    assert!(opened().is_empty());
    for make_blank in
        [|file: &Path| fs::remove_file(file).unwrap(), |file: &Path| fs::write(file, "").unwrap()]
    {
        let tier = Tier::open(options(&base)).unwrap();
        step(&tier, 2).unwrap();
        drop(tier);
        make_blank(&superblock(0));
        let found = opened();
        let what = format!(
            "one superblock is lost, with the step that it may have had; the other one is used: {}",
            superblock(0).display()
        );
        assert!(matches!(&found[..], [line] if line.starts_with(&what)), "{found:?}");
    }
    log::set_sink(None);
}

#[test]
fn an_empty_name_of_a_directory_is_an_argument_error() {
    let error = Tier::open(options(&[PathBuf::new()])).unwrap_err().to_string();
    assert_eq!(error, "directory: is empty");
}

#[test]
fn a_relative_path_is_fixed_at_the_open() {
    let dir = tempfile::tempdir_in("target").unwrap();
    let relative = Path::new("target").join(dir.path().file_name().unwrap());
    assert!(relative.is_relative());
    let tier = Tier::open(options(std::slice::from_ref(&relative))).unwrap();
    step(&tier, 1).unwrap();
    let name = tier.paths()[0].name.clone();
    assert_eq!(Path::new(&name), owner().below(&std::env::current_dir().unwrap().join(&relative)));
    drop(tier);
    // The absolute path names the same path of the tier.
    let tier = Tier::open(options(&[std::path::absolute(&relative).unwrap()])).unwrap();
    assert!(is_at(&tier, 1) && tier.opened().missing.is_empty());
    let error = tier.import(&relative.join("absent"), &Selection::default()).unwrap_err().to_string();
    let place = std::env::current_dir().unwrap().join(relative).join("absent");
    assert!(error.contains(&*place.to_string_lossy()), "{error}");
}

/// The first put writes the superblock of the open, which commits nothing.
#[test]
fn a_removal_before_the_superblock_of_the_open_waits_for_a_commit() {
    let disk = Disk::default();
    let options = || on_disks(std::slice::from_ref(&disk), &[]);
    step(&Tier::open(options()).unwrap(), 1).unwrap();
    let tier = Tier::open(TierOptions { write_at_open: false, ..options() }).unwrap();
    tier.remove(tier.define(&name_of(0), STREAMS[0]).unwrap()).unwrap();
    write(&tier, 1, 99, &ExtentPlacement::Auto).unwrap();
    drop(tier);
    assert!(is_at(&Tier::open(options()).unwrap(), 1));
}
