//! Locks against other processes, forked children, and descriptors that other code opens.

use super::*;
use crate::sys::private_files::GivenDirectory;
use std::os::fd::AsRawFd;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};

fn attempt(dir: &Path) -> LockAttempt {
    FileLock::attempt(&GivenDirectory::open(dir).unwrap(), "lock").unwrap()
}

/// Writes the text that a refused process reports.
fn write(lock: &FileLock) {
    let mut page = [b'\n'; PAGE];
    page[..4].copy_from_slice(b"mine");
    lock.write_page(0, &page, false).unwrap();
}

#[test]
fn a_process_holds_a_lock_once_and_gives_it_back() {
    let dir = tempfile::tempdir().unwrap();
    let LockAttempt::Acquired(lock) = attempt(dir.path()) else { panic!("it was free") };
    write(&lock);
    assert!(matches!(attempt(dir.path()), LockAttempt::HeldByUs));
    assert!(lock.is_named(&GivenDirectory::open(dir.path()).unwrap(), "lock").unwrap());
    drop(lock);
    assert!(matches!(attempt(dir.path()), LockAttempt::Acquired(_)));
}

/// Runs as the other process of these tests: "try" reports the outcome; "hold" takes the lock, forks a child that keeps
/// running, and dies.
#[test]
#[ignore = "the body of the other process of these tests"]
fn another_process() {
    let given = |name| std::env::var(name).expect("set by the test that starts this process");
    let (dir, what) = (given("SPILLWAY_TEST_LOCK"), given("SPILLWAY_TEST_LOCK_DO"));
    let dir = Path::new(&dir);
    let outcome = attempt(dir);
    if what == "try" {
        let code = match outcome {
            LockAttempt::Acquired(_) => 10,
            LockAttempt::HeldByUs => 11,
            LockAttempt::HeldByOther(text) if text.trim_end() == "mine" => 12,
            LockAttempt::HeldByOther(text) => 13 + i32::from(text.len() as u64 == MAX_HOLDER_TEXT),
        };
        std::process::exit(code);
    }
    let LockAttempt::Acquired(lock) = outcome else { panic!("it was free") };
    let (begun, named) = (dir.join("begun"), dir.join("child"));
    // SAFETY: the child names itself and sleeps, and is killed by the test.
    if unsafe { libc::fork() } == 0 {
        // The existence of this file shows that the child has run and has closed its parent's descriptors.
        std::fs::write(&begun, std::process::id().to_string()).unwrap();
        std::fs::rename(&begun, &named).unwrap();
        loop {
            // SAFETY: takes nothing.
            unsafe { libc::pause() };
        }
    }
    while !named.exists() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    std::mem::forget(lock);
    // SAFETY: ends this process as a kill would: nothing is dropped.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
}

fn other(dir: &Path, what: &str) -> std::process::ExitStatus {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "sys::lock::tests::another_process", "--nocapture"]);
    command.env("SPILLWAY_TEST_LOCK", dir).env("SPILLWAY_TEST_LOCK_DO", what);
    command.stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap()
}

/// A backup of the directory (shutil.copytree) opens and closes the file, which would end a record lock.
#[test]
fn another_descriptor_of_the_lock_file_that_is_closed_does_not_end_the_lock() {
    let dir = tempfile::tempdir().unwrap();
    let LockAttempt::Acquired(lock) = attempt(dir.path()) else { panic!("it was free") };
    write(&lock);
    assert_eq!(other(dir.path(), "try").code(), Some(12));
    assert!(std::fs::read(dir.path().join("lock")).unwrap().starts_with(b"mine"));
    assert_eq!(other(dir.path(), "try").code(), Some(12), "the lock ended with the descriptor of the read");
    drop(lock);
    assert_eq!(other(dir.path(), "try").code(), Some(10));
}

/// Older versions of this library took record locks.
#[test]
fn a_record_lock_of_an_older_version_excludes_and_is_excluded() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("lock"), "mine").unwrap();
    let file = File::options().read(true).write(true).open(dir.path().join("lock")).unwrap();
    change(&file, Kind::Record, libc::F_WRLCK).unwrap();
    assert_eq!(other(dir.path(), "try").code(), Some(12));
    drop(file);
    let LockAttempt::Acquired(_lock) = attempt(dir.path()) else { panic!("it was free") };
    let file = File::options().read(true).write(true).open(dir.path().join("lock")).unwrap();
    assert!(change(&file, Kind::Record, libc::F_WRLCK).is_err());
}

#[test]
fn a_forked_child_does_not_keep_the_lock_of_a_parent_that_was_killed() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(other(dir.path(), "hold").signal(), Some(libc::SIGKILL));
    let child: i32 = std::fs::read_to_string(dir.path().join("child")).unwrap().parse().unwrap();
    let outcome = attempt(dir.path());
    // SAFETY: the child that this test's process made.
    unsafe { libc::kill(child, libc::SIGKILL) };
    assert!(matches!(outcome, LockAttempt::Acquired(_)), "{outcome:?}");
}

/// In the child the descriptor is closed already: dropping the parent's lock there closes no descriptor of the child
/// and does not release the parent's lock.
#[test]
fn a_forked_child_that_drops_the_lock_ends_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let LockAttempt::Acquired(lock) = attempt(dir.path()) else { panic!("it was free") };
    write(&lock);
    let fd = lock.file.as_ref().unwrap().file().unwrap().as_raw_fd();
    // SAFETY: the child makes system calls, drops the lock (which takes no mutex that another thread could hold) and
    // exits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: descriptor numbers, and the end of the child.
        unsafe {
            let closed = libc::fcntl(fd, libc::F_GETFD) < 0;
            let reused = libc::dup2(0, fd) == fd;
            drop(lock);
            let kept = libc::fcntl(fd, libc::F_GETFD) >= 0;
            libc::_exit(i32::from(!(closed && reused && kept)));
        }
    }
    let mut status = -1;
    // SAFETY: the status is a local.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
    assert_eq!(other(dir.path(), "try").code(), Some(12));
}

#[test]
fn a_lock_that_the_system_lost_is_taken_again_unless_another_has_it() {
    let dir = tempfile::tempdir().unwrap();
    let LockAttempt::Acquired(lock) = attempt(dir.path()) else { panic!("it was free") };
    write(&lock);
    let lose =
        || change(lock.file.as_ref().unwrap().file().unwrap(), kind(&RECORD_LOCKS), libc::F_UNLCK).unwrap();
    lose();
    assert!(lock.is_held());
    assert_eq!(other(dir.path(), "try").code(), Some(12));
    lose();
    let thief = File::options().write(true).open(dir.path().join("lock")).unwrap();
    change(&thief, Kind::OpenFile, libc::F_WRLCK).unwrap();
    assert!(!lock.is_held());
}

#[test]
fn a_huge_lock_file_is_not_read_whole_for_a_message() {
    let dir = tempfile::tempdir().unwrap();
    let file = File::create(dir.path().join("lock")).unwrap();
    file.set_len(1 << 40).unwrap();
    let LockAttempt::Acquired(_lock) = attempt(dir.path()) else { panic!("it was free") };
    file.set_len(1 << 40).unwrap();
    assert_eq!(other(dir.path(), "try").code(), Some(14));
}

/// Linux before 3.15 and some emulators refuse F_OFD_SETLK with EINVAL.
#[test]
fn a_system_without_locks_of_open_files_gets_a_record_lock() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lock");
    std::fs::write(&path, "mine").unwrap();
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let (record_locks, mut asked) = (AtomicBool::new(false), Vec::new());
    let mut take = || {
        lock_by(&record_locks, |kind| {
            asked.push(kind);
            match kind {
                Kind::OpenFile => Err(Errno::EINVAL),
                Kind::Record => change(&file, kind, libc::F_WRLCK),
            }
        })
    };
    assert!(take().unwrap() && take().unwrap());
    assert_eq!(asked, [Kind::OpenFile, Kind::Record, Kind::Record], "the refusal is remembered");
    assert_eq!(other(dir.path(), "try").code(), Some(12));
    // Only a record lock ends with another descriptor of the file.
    drop(File::open(&path).unwrap());
    assert_eq!(other(dir.path(), "try").code(), Some(10));
}

#[test]
fn an_interrupted_call_is_repeated_and_other_errors_are_returned() {
    let outcome = |errors: &[Errno]| {
        let (record_locks, mut errors) = (AtomicBool::new(false), errors.iter());
        let taken = lock_by(&record_locks, |_| errors.next().map_or(Ok(()), |errno| Err(*errno)));
        let taken = taken.map_err(|error| error.raw_os_error());
        (taken, errors.len(), record_locks.into_inner())
    };
    assert_eq!(outcome(&[Errno::EINTR, Errno::EINTR]), (Ok(true), 0, false));
    assert_eq!(outcome(&[Errno::EINTR, Errno::EAGAIN]), (Ok(false), 0, false));
    assert_eq!(outcome(&[Errno::EACCES]), (Ok(false), 0, false));
    assert_eq!(outcome(&[Errno::ENOLCK]), (Err(Some(libc::ENOLCK)), 0, false));
    // EINVAL of a record lock too: there is no third kind.
    assert_eq!(outcome(&[Errno::EINVAL, Errno::EINVAL]), (Err(Some(libc::EINVAL)), 0, true));
}

#[test]
fn a_lock_of_this_machine_excludes_a_second_descriptor() {
    let dir = tempfile::tempdir().unwrap();
    let LockAttempt::Acquired(lock) = attempt(dir.path()) else { panic!("it was free") };
    assert!(lock.excludes() && lock.is_held());
}

#[test]
fn a_page_is_read_through_the_name_and_overwritten_in_place() {
    let dir = tempfile::tempdir().unwrap();
    let given = GivenDirectory::open(dir.path()).unwrap();
    let LockAttempt::Acquired(lock) = attempt(dir.path()) else { panic!("it was free") };
    lock.reserve();
    assert_eq!(std::fs::metadata(dir.path().join("lock")).unwrap().len(), 2 * PAGE as u64);
    lock.write_page(1, &[7; PAGE], true).unwrap();
    assert_eq!(lock.read_page(&given, "lock", 1, true).unwrap(), Some(vec![7; PAGE]));
    assert_eq!(lock.read_page(&given, "lock", 0, false).unwrap(), Some(vec![0; PAGE]));
    std::fs::rename(dir.path().join("lock"), dir.path().join("aside")).unwrap();
    assert_eq!(lock.read_page(&given, "lock", 1, true).unwrap(), None);
    std::fs::write(dir.path().join("lock"), "another file").unwrap();
    assert!(lock.read_page(&given, "lock", 0, true).unwrap().unwrap().starts_with(b"another file\0"));
}
