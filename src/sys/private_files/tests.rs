//! Files that exist already: another user's files, links, FIFOs, and own files with a lax mode.

use super::*;
use std::os::unix::process::CommandExt;
use std::process::Command;

const READ: OpenFlags = OpenFlags { read: true, write: false, make: false, direct: false };
const WRITE: OpenFlags = OpenFlags { read: false, write: true, make: true, direct: false };

/// The result of `work` in a thread that acts as another user. The process runs as root.
pub fn as_another_user<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let work = || {
        // SAFETY: plain numbers. The system call itself, unlike the C library's function, changes this thread alone.
        assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534) }, 0);
        work()
    };
    std::thread::scope(|scope| match scope.spawn(work).join() {
        Ok(done) => done,
        Err(panic) => std::panic::resume_unwind(panic),
    })
}

/// A directory that every user may write to, like /tmp.
fn shared() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), Permissions::from_mode(0o1777)).unwrap();
    dir
}

/// Runs a shell command in a directory, as the user nobody.
fn as_nobody(dir: &Path, command: &str) {
    assert_eq!(user(), 0, "this test acts as another user: run it as root");
    let done = Command::new("sh").args(["-c", command]).current_dir(dir).uid(65534).gid(65534).status();
    assert!(done.unwrap().success(), "{command}");
}

fn refusal(outcome: io::Result<File>) -> String {
    let error = outcome.expect_err("it is refused");
    assert!(is_refusal(&error), "{error}");
    error.to_string()
}

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

#[test]
fn a_new_file_and_a_new_directory_are_this_users_alone() {
    let dir = shared();
    let given = GivenDirectory::open(dir.path()).unwrap();
    assert_eq!(given.enter("job", false).unwrap_err().kind(), io::ErrorKind::NotFound);
    let job = given.enter("job", true).unwrap();
    drop(job.open("data", WRITE).unwrap());
    assert_eq!((mode(&dir.path().join("job")), mode(&dir.path().join("job/data"))), (0o700, 0o600));
    // Later reads and writes block as for any regular file.
    let file = job.open("data", READ).unwrap();
    // SAFETY: fcntl on an open descriptor.
    assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) } & libc::O_NONBLOCK, 0);
}

#[test]
fn links_fifos_and_files_with_two_names_are_refused_and_named() {
    let dir = tempfile::tempdir().unwrap();
    let given = GivenDirectory::open(dir.path()).unwrap();
    let victim = dir.path().join("victim");
    std::fs::write(&victim, "precious").unwrap();
    std::os::unix::fs::symlink(&victim, dir.path().join("link")).unwrap();
    std::os::unix::fs::symlink("nothing", dir.path().join("dangling")).unwrap();
    std::fs::hard_link(&victim, dir.path().join("second")).unwrap();
    make_fifo(&dir.path().join("fifo"));
    for want in [READ, WRITE] {
        assert!(refusal(given.open("link", want)).contains("symbolic link"));
        assert!(refusal(given.open("dangling", want)).contains("symbolic link"));
        // An open that waited for the other end would hang here.
        assert!(refusal(given.open("fifo", want)).contains("FIFO"));
        assert!(refusal(given.open("second", want)).contains("2 hard links"));
        assert!(refusal(open_private(None, &dir.path().join("link"), want)).contains("symbolic link"));
    }
    assert!(!dir.path().join("nothing").exists());
    assert_eq!(std::fs::read(&victim).unwrap(), b"precious");
    std::os::unix::fs::symlink(".", dir.path().join("job")).unwrap();
    let error = given.enter("job", true).unwrap_err();
    assert!(is_refusal(&error) && error.to_string().contains("symbolic link"), "{error}");
    let fifo = format!("a FIFO of user {} (mode 0600), but must be ", user());
    for (error, wanted) in [
        (given.enter("fifo", true).unwrap_err(), format!("{fifo}a directory")),
        (given.open("fifo", READ).unwrap_err(), format!("{fifo}a regular file")),
        (given.enter("victim", true).unwrap_err(), "but must be a directory".to_string()),
    ] {
        assert!(error.to_string().contains(&wanted), "{error}");
    }
    std::fs::create_dir(dir.path().join("data")).unwrap();
    let error = given.remove_file("data").unwrap_err();
    assert!(error.to_string().contains("a directory of user"), "{error}");
}

fn make_fifo(path: &Path) {
    let path = c_string(path.as_os_str()).unwrap();
    // SAFETY: a C string and a mode.
    assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
}

/// An umask or a volume manager may have left such modes; tiers of older versions have mode 0755.
#[test]
fn own_files_and_directories_with_a_lax_mode_are_tightened() {
    let dir = tempfile::tempdir().unwrap();
    let given = GivenDirectory::open(dir.path()).unwrap();
    for (was, expected) in [(0o755, 0o755), (0o2775, 0o2755), (0o777, 0o755)] {
        let job = dir.path().join(format!("job-{was:o}"));
        std::fs::create_dir(&job).unwrap();
        std::fs::set_permissions(&job, Permissions::from_mode(was)).unwrap();
        given.enter(&format!("job-{was:o}"), false).unwrap();
        assert_eq!(mode(&job), expected);
    }
    let data = dir.path().join("data");
    std::fs::write(&data, "weights").unwrap();
    for lax in [0o644, 0o666, 0o660] {
        std::fs::set_permissions(&data, Permissions::from_mode(lax)).unwrap();
        given.open("data", READ).unwrap();
        assert_eq!(mode(&data), 0o600);
    }
}

#[test]
#[cfg_attr(not(built_by_root), ignore = "acts as another user, which needs root")]
fn what_another_user_planted_is_refused_and_left_as_it_was() {
    let dir = shared();
    as_nobody(dir.path(), "umask 0; echo theirs > data; mkdir job; mkfifo fifo; ln -s data link");
    let given = GivenDirectory::open(dir.path()).unwrap();
    for want in [READ, OpenFlags { make: false, ..WRITE }] {
        let words = refusal(given.open("data", want));
        assert!(
            words.contains("belongs to user 65534 (mode 0666)") && words.contains("as user 0"),
            "{words}"
        );
        refusal(given.open("fifo", want));
        refusal(given.open("link", want));
    }
    // With fs.protected_regular the kernel refuses this open first.
    assert!(given.open("data", WRITE).is_err());
    let error = given.enter("job", true).unwrap_err();
    assert!(error.to_string().contains("directory belongs to user 65534 (mode 0777)"), "{error}");
    assert_eq!(mode(&dir.path().join("data")), 0o666);
    assert_eq!(std::fs::read(dir.path().join("data")).unwrap(), b"theirs\n");
}

#[test]
fn a_directory_in_the_place_of_a_file_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("lock")).unwrap();
    let given = GivenDirectory::open(dir.path()).unwrap();
    for want in [READ, WRITE] {
        assert!(refusal(given.open("lock", want)).contains("it is a directory"));
    }
}

/// The usual case: another user's directory cannot even be opened.
#[test]
#[cfg_attr(not(built_by_root), ignore = "acts as another user, which needs root")]
fn what_cannot_be_opened_because_it_is_another_users_is_refused_with_its_owner() {
    let dir = shared();
    let job = dir.path().join("job");
    std::fs::create_dir(&job).unwrap();
    std::fs::set_permissions(&job, Permissions::from_mode(0o700)).unwrap();
    std::fs::write(dir.path().join("data"), "ours").unwrap();
    std::fs::set_permissions(dir.path().join("data"), Permissions::from_mode(0o600)).unwrap();
    let nobody = as_another_user(|| {
        let given = GivenDirectory::open(dir.path()).unwrap();
        [given.enter("job", true).map(|_| ()), given.open("data", READ).map(|_| ())].map(Result::unwrap_err)
    });
    for error in nobody {
        let words = error.to_string();
        assert!(
            is_refusal(&error) && words.contains("belongs to user 0") && words.contains("as user 65534"),
            "{words}"
        );
    }
}
