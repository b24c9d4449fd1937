//! The lock file of a real directory, with a lease and without one.
#![forbid(unsafe_code)]

use super::*;
use crate::sys::lock::LockAttempt;
use crate::sys::private_files::GivenDirectory;

/// A lease that a test need not wait for.
const SHORT: Timing = Timing {
    period: Duration::from_millis(2),
    valid: Duration::from_secs(3600),
    quiet: Duration::from_millis(20),
    settle: Duration::from_millis(10),
};

fn claim(path: &Path, leased: bool, timing: Timing) -> Result<OwnedLock> {
    let directory = GivenDirectory::open(path).unwrap();
    let LockAttempt::Acquired(lock) = FileLock::attempt(&directory, LOCK).unwrap() else {
        panic!("it is held")
    };
    let mut pending = PendingLock::with(lock, &directory, path, leased, timing)?;
    loop {
        match pending.resume(path)? {
            LockStep::Owned(lock) => return Ok(lock),
            LockStep::Wait(later, time) => {
                std::thread::sleep(time);
                pending = *later;
            }
        }
    }
}

fn record(path: &Path) -> OwnerRecord {
    OwnerRecord::parse(&std::fs::read(path.join(LOCK)).unwrap()[..PAGE]).unwrap()
}

fn replace_record(path: &Path, record: &OwnerRecord) {
    let file = std::fs::OpenOptions::new().write(true).open(path.join(LOCK)).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &record.page().unwrap(), 0).unwrap();
}

#[test]
fn an_owner_without_a_lease_writes_its_record_once_and_leaves_it() {
    let dir = tempfile::tempdir().unwrap();
    let lock = claim(dir.path(), false, SHORT).unwrap();
    let text = std::fs::read(dir.path().join(LOCK)).unwrap();
    assert!(text.len() == 2 * PAGE && text[PAGE..].iter().all(|byte| *byte == 0));
    lock.check_owner().unwrap();
    drop(lock);
    assert!(record(dir.path()).held, "the next owner needs the lock of the system only");
    claim(dir.path(), false, SHORT).unwrap().check_owner().unwrap();
}

#[test]
fn an_owner_with_a_lease_writes_heartbeats_and_gives_the_directory_back() {
    let dir = tempfile::tempdir().unwrap();
    let lock = claim(dir.path(), true, SHORT).unwrap();
    let beat = || std::fs::read(dir.path().join(LOCK)).unwrap()[PAGE..].to_vec();
    let first = beat();
    while beat() == first {
        std::thread::yield_now();
    }
    assert!(lock.lease_is_valid());
    lock.check_owner().unwrap();
    assert!(record(dir.path()).held && record(dir.path()).leased);
    drop(lock);
    assert!(!record(dir.path()).held);
}

#[test]
fn an_owner_that_another_process_replaced_notices_and_leaves_the_record() {
    for leased in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let lock = claim(dir.path(), leased, SHORT).unwrap();
        let other = OwnerRecord { claim: "another".to_string(), ..record(dir.path()) };
        replace_record(dir.path(), &other);
        let error = lock.check_owner().unwrap_err();
        assert!(error.is_fenced(), "{error}");
        assert!(!lock.lease_is_valid());
        assert!(lock.check_lease().unwrap_err().is_fenced());
        drop(lock);
        assert_eq!(record(dir.path()), other);
    }
}

#[test]
fn a_lease_that_ended_is_renewed_by_the_next_write_unless_another_process_came() {
    let dir = tempfile::tempdir().unwrap();
    let ended = Timing { valid: Duration::ZERO, period: Duration::from_secs(3600), ..SHORT };
    let lock = claim(dir.path(), true, ended).unwrap();
    assert!(!lock.lease_is_valid());
    lock.check_lease().unwrap();
    let other = OwnerRecord { claim: "another".to_string(), ..record(dir.path()) };
    replace_record(dir.path(), &other);
    assert!(lock.check_lease().unwrap_err().is_fenced());
}

#[test]
fn a_lock_file_without_a_record_is_damage_and_no_other_owner() {
    let dir = tempfile::tempdir().unwrap();
    let lock = claim(dir.path(), false, SHORT).unwrap();
    std::fs::write(dir.path().join(LOCK), "").unwrap();
    assert_eq!(lock.check_owner().unwrap_err().tier_kind(), Some(TierKind::PathMissing));
}
