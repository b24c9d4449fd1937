//! Turns among threads that act as processes, and among real processes, one of which is killed during its turn.
#![forbid(unsafe_code)]

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;

use super::*;

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(5);

fn join(dir: &Path, most: u32, node: &Path) -> Result<TurnQueue> {
    TurnQueue::join(fs::metadata(dir).unwrap().dev(), &dir.display().to_string(), most, Some(node))
}

fn claim_with(dir: &Path, node: &Path) -> TurnRequest {
    TurnRequest::new(join(dir, 1, node).unwrap())
}

fn claim(dir: &Path) -> TurnRequest {
    claim_with(dir, &dir.join("node"))
}

trait Polled {
    fn ask(&mut self) -> bool;
    fn has_turn(&self) -> bool;
}

impl Polled for TurnRequest {
    fn ask(&mut self) -> bool {
        self.poll(LONG).unwrap()
    }

    fn has_turn(&self) -> bool {
        matches!(self.state, RequestState::Turn(_))
    }
}

/// Polls all claims until one is granted; returns its index.
fn first_of(claims: &mut [TurnRequest]) -> usize {
    first_within(claims, LONG)
}

fn first_within(claims: &mut [TurnRequest], timeout: Duration) -> usize {
    loop {
        if let Some(place) = claims.iter_mut().position(|claim| claim.poll(timeout).unwrap()) {
            return place;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn one_holder_at_a_time_and_first_come_first_served() {
    let dir = tempfile::tempdir().unwrap();
    let mut holder = claim(dir.path());
    assert!(holder.ask(), "a free path");
    let served = Arc::new(Mutex::new(Vec::new()));
    let waiters: Vec<_> = (0..5)
        .map(|who| {
            let mut mine = claim(dir.path());
            assert!(!mine.ask(), "two holders");
            let waits = Arc::clone(&served);
            thread::spawn(move || {
                first_of(std::slice::from_mut(&mut mine));
                waits.lock().unwrap().push(who);
                assert!(mine.has_turn());
                mine.release();
            })
        })
        .collect();
    assert!(holder.others_wait().unwrap() && holder.ask());
    holder.release();
    waiters.into_iter().for_each(|waiter| waiter.join().unwrap());
    assert_eq!(*served.lock().unwrap(), [0, 1, 2, 3, 4]);
    assert!(!holder.others_wait().unwrap());
}

#[test]
fn a_latecomer_does_not_pass_those_who_wait() {
    let dir = tempfile::tempdir().unwrap();
    let (mut holder, mut first, mut late) = (claim(dir.path()), claim(dir.path()), claim(dir.path()));
    assert!(holder.ask() && !first.ask());
    holder.release();
    assert!(!late.ask(), "the path is free, but somebody waits for it");
    assert!(first.ask() && !late.ask());
    first.release();
    assert!(late.ask());
    // The previous holder does not pass the new one either.
    assert!(!holder.ask() && holder.others_wait().is_ok_and(|wait| !wait));
    late.release();
    assert!(holder.ask());
}

#[test]
fn a_path_of_two_turns_has_two_holders_and_the_next_waits_for_either() {
    let dir = tempfile::tempdir().unwrap();
    let claim_of = |turns| TurnRequest::new(join(dir.path(), turns, &dir.path().join("node")).unwrap());
    let [mut one, mut other, mut third, mut fourth] = [2, 2, 2, 2].map(claim_of);
    assert!(one.ask() && other.ask());
    assert!(!third.ask() && !fourth.ask() && one.others_wait().unwrap());
    other.release();
    assert!(!fourth.ask(), "the third process asked first");
    assert!(third.ask() && !fourth.ask());
    one.release();
    assert!(fourth.ask());
    // A process that was opened with one turn waits for the first one.
    third.release();
    let mut single = claim_of(1);
    assert!(!single.ask());
    fourth.release();
    assert!(single.ask());
}

#[test]
fn who_finds_a_path_taken_goes_to_the_other() {
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm").unwrap());
    let node = a.path().join("node");
    let mut theirs = claim_with(a.path(), &node);
    let mut mine = [claim_with(a.path(), &node), claim_with(b.path(), &node)];
    assert!(theirs.ask());
    assert_eq!(first_of(&mut mine), 1);
    assert!(theirs.others_wait().unwrap() && !mine[0].ask());
    mine.iter_mut().for_each(TurnRequest::release);
    assert!(!theirs.others_wait().unwrap(), "a ticket was left in the queue");
}

#[test]
fn patience_ends_and_the_line_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let (mut holder, mut waiter) = (claim(dir.path()), claim(dir.path()));
    assert!(holder.ask());
    first_within(std::slice::from_mut(&mut waiter), SHORT);
    assert!(matches!(waiter.state, RequestState::TimedOut));
    assert!(!holder.others_wait().unwrap(), "who goes without a turn does not stay in queue");
    waiter.release();
    holder.release();
    assert!(waiter.ask() && waiter.has_turn());
}

#[test]
fn patience_ends_at_a_desk_that_stays_taken() {
    let dir = tempfile::tempdir().unwrap();
    let (mut holder, mut waiter) = (claim(dir.path()), claim(dir.path()));
    assert!(holder.ask());
    holder.queue.desk.lock().unwrap();
    first_within(std::slice::from_mut(&mut waiter), SHORT);
    assert!(matches!(waiter.state, RequestState::TimedOut));
}

/// Takes turns on two paths, and records the start and end of each on the node's clock.
#[test]
#[ignore = "the body of the child processes of another test"]
fn child_process() {
    let dir = std::env::var("SPILLWAY_TEST_TURNS").expect("set by the test that starts this process");
    let dir = PathBuf::from(dir);
    let other = PathBuf::from(std::env::var("SPILLWAY_TEST_TURNS_OTHER").unwrap());
    let node = dir.join("node");
    let mut claims = [&dir, &other].map(|path| claim_with(path, &node));
    let mut notes = OpenOptions::new().append(true).create(true).open(dir.join("notes")).unwrap();
    let hold = std::env::var("SPILLWAY_TEST_TURNS_HOLD").is_ok();
    for _ in 0..40 {
        let index = first_of(&mut claims);
        assert!(claims[index].has_turn());
        let note = |what: &str| {
            let pid = std::process::id();
            format!("{index} {pid} {what}\n")
        };
        io::Write::write_all(&mut notes, note("in").as_bytes()).unwrap();
        thread::sleep(Duration::from_millis(if hold { 600_000 } else { 1 }));
        io::Write::write_all(&mut notes, note("out").as_bytes()).unwrap();
        claims.iter_mut().for_each(TurnRequest::release);
    }
}

#[test]
fn real_processes_exclude_each_other_and_survive_a_killed_one() {
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm").unwrap());
    let start = |hold: bool| -> Child {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "io::turns::queue::tests::child_process", "--nocapture"]);
        command.env("SPILLWAY_TEST_TURNS", dir.path()).env("SPILLWAY_TEST_TURNS_OTHER", other.path());
        if hold {
            command.env("SPILLWAY_TEST_TURNS_HOLD", "1");
        }
        command.stdout(Stdio::null()).spawn().unwrap()
    };
    let notes = || fs::read_to_string(dir.path().join("notes")).unwrap_or_default();
    let mut killed = start(true);
    while !notes().contains(" in") {
        assert_eq!(killed.try_wait().unwrap(), None, "the holder is there");
        thread::sleep(Duration::from_millis(2));
    }
    let mut others: Vec<Child> = (0..4).map(|_| start(false)).collect();
    // The other processes use the second path while the first one is held.
    while notes().lines().count() < 20 {
        thread::sleep(Duration::from_millis(2));
    }
    killed.kill().unwrap();
    killed.wait().unwrap();
    for child in &mut others {
        assert!(child.wait().unwrap().success());
    }
    let dead = killed.id().to_string();
    let mut holder: [Option<String>; 2] = [None, None];
    let mut turns = 0;
    for note in notes().lines() {
        let message: Vec<&str> = note.split(' ').collect();
        let path: usize = message[0].parse().unwrap();
        match message[2] {
            "in" => {
                let alive = holder[path].as_ref().filter(|pid| **pid != dead);
                assert_eq!(alive, None, "two processes on path {path}");
                holder[path] = Some(message[1].to_string());
                turns += 1;
            }
            _ => assert_eq!(holder[path].take().as_deref(), Some(message[1])),
        }
    }
    assert_eq!(turns, 1 + 4 * 40);
    let on_first = notes().lines().filter(|note| note.starts_with("0 ") && note.ends_with(" in")).count();
    assert!(on_first > 1, "the death of its holder freed no path");
}

/// A directory of another user, a link and a file have the usual name. None of them is changed, and all processes use
/// the next name.
#[test]
#[cfg_attr(not(built_by_root), ignore = "acts as another user, which needs root")]
fn a_planted_directory_of_turns_is_not_used_and_the_next_name_is() {
    let (shared, victim) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::set_permissions(shared.path(), fs::Permissions::from_mode(0o1777)).unwrap();
    let precious = victim.path().join("slot-0");
    fs::write(&precious, "eight bytes and more").unwrap();
    let plant = |command: &str| {
        assert_eq!(private_files::user(), 0, "this test acts as another user: run it as root");
        let mut shell = Command::new("sh");
        let done = shell.args(["-c", command]).current_dir(shared.path()).uid(65534).gid(65534).status();
        assert!(done.unwrap().success(), "{command}");
    };
    plant(&format!("umask 0; mkdir spillway-turns-0; ln -s {} spillway-turns-0-1", victim.path().display()));
    let places = [shared.path().to_path_buf()];
    for _ in 0..2 {
        assert_eq!(usual_directory(&places, 0).unwrap().0, shared.path().join("spillway-turns-0-2"));
    }
    plant("touch spillway-turns-7 spillway-turns-7-1 spillway-turns-7-2 spillway-turns-7-3");
    assert!(usual_directory(&places, 7).is_err());
    assert_eq!(
        usual_directory(&[places[0].clone(), victim.path().into()], 7).unwrap().0.parent(),
        Some(victim.path())
    );
    assert_eq!(fs::read(&precious).unwrap(), b"eight bytes and more");
    assert_eq!(fs::read_dir(shared.path().join("spillway-turns-0")).unwrap().count(), 0);
}

/// Links that were planted while the directory of turns was open to other users.
#[test]
fn a_planted_link_to_a_file_is_not_written_through() {
    let dir = tempfile::tempdir().unwrap();
    let precious = dir.path().join("precious");
    fs::write(&precious, "eight bytes and more").unwrap();
    let queue = claim(dir.path()).queue.dir.clone();
    for name in ["slot-0", "desk"] {
        let path = queue.join(name);
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(&precious, &path).unwrap();
        assert!(join(dir.path(), 1, &dir.path().join("node")).is_err());
        fs::remove_file(&path).unwrap();
        fs::hard_link(&precious, &path).unwrap();
        assert!(join(dir.path(), 1, &dir.path().join("node")).is_err());
        fs::remove_file(&path).unwrap();
    }
    assert_eq!(fs::read(&precious).unwrap(), b"eight bytes and more");
}

#[test]
fn a_turn_ends_although_a_forked_child_has_its_descriptor() {
    let dir = tempfile::tempdir().unwrap();
    let mut holder = claim(dir.path());
    assert!(holder.ask());
    // A child has such a copy: another descriptor of the same open file.
    let copy = holder.queue.turns[0].file().unwrap().try_clone().unwrap();
    holder.release();
    let mut next = claim(dir.path());
    assert!(next.ask() && next.has_turn());
    drop(copy);
}

/// Requests as an engine makes them. True if the request had to wait.
fn waits(request: &mut TurnRequest, timeout: Duration) -> bool {
    let at_once = request.poll(timeout).unwrap();
    if !at_once {
        first_within(std::slice::from_mut(request), timeout);
    }
    !at_once
}

/// A holder that never moves is waited for once, and again after it has moved.
#[test]
fn a_stopped_holder_costs_one_timeout() {
    let dir = tempfile::tempdir().unwrap();
    let (mut holder, mut waiter) = (claim(dir.path()), claim(dir.path()));
    assert!(holder.ask());
    assert!(waits(&mut waiter, SHORT) && !waiter.has_turn());
    assert!(waiter.take_message().is_some_and(|message| message.contains("no turn on the device of")));
    for _ in 0..3 {
        waiter.release();
        assert!(!waits(&mut waiter, LONG) && !waiter.has_turn(), "the same turn is not waited for again");
        assert_eq!(waiter.take_message(), None);
    }
    // The holder goes on: the next turn is granted, and then another one of the holder is waited for.
    holder.release();
    waiter.release();
    assert!(!waits(&mut waiter, LONG) && waiter.has_turn());
    waiter.release();
    assert!(holder.ask() && waits(&mut waiter, SHORT) && !waiter.has_turn());
    assert!(waiter.take_message().is_some());
}

/// After a turn has ended, the next one is waited for, of the same process or of another.
#[test]
fn a_holder_that_moves_is_waited_for_again() {
    let dir = tempfile::tempdir().unwrap();
    let (mut holder, mut other, mut waiter) = (claim(dir.path()), claim(dir.path()), claim(dir.path()));
    for again in [false, true] {
        assert!(holder.ask());
        assert!(waits(&mut waiter, SHORT) && !waiter.has_turn());
        waiter.release();
        holder.release();
        let next = if again { &mut holder } else { &mut other };
        assert!(next.ask() && !waiter.ask(), "the turn is another one");
        next.release();
        assert!(waiter.ask() && waiter.has_turn());
        waiter.release();
    }
}

/// A process that waits and was stopped is overtaken too.
#[test]
fn a_stopped_waiter_costs_one_timeout() {
    let dir = tempfile::tempdir().unwrap();
    let (mut holder, mut stopped, mut waiter) = (claim(dir.path()), claim(dir.path()), claim(dir.path()));
    assert!(holder.ask() && !stopped.ask());
    assert!(waits(&mut waiter, SHORT));
    holder.release();
    waiter.release();
    assert!(
        !waits(&mut waiter, LONG) && !waiter.has_turn(),
        "the ticket of the stopped process is still there"
    );
    drop(stopped);
    waiter.release();
    assert!(!waits(&mut waiter, LONG) && waiter.has_turn());
}

/// Each user has a directory of its own below the one that is given.
#[test]
#[cfg_attr(not(built_by_root), ignore = "acts as another user, which needs root")]
fn two_users_share_one_directory_of_turns() {
    let shared = tempfile::tempdir().unwrap();
    fs::set_permissions(shared.path(), fs::Permissions::from_mode(0o1777)).unwrap();
    let places = [shared.path().to_path_buf()];
    let own = || usual_directory(&places, private_files::user()).unwrap().0;
    let theirs = private_files::tests::as_another_user(own);
    assert_eq!((own(), theirs), (places[0].join("spillway-turns-0"), places[0].join("spillway-turns-65534")));
}

#[test]
#[cfg_attr(not(built_by_root), ignore = "acts as another user, which needs root")]
fn a_directory_of_turns_without_write_access_is_named() {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let places = [dir.path().to_path_buf()];
    let error =
        private_files::tests::as_another_user(|| usual_directory(&places, 65534)).unwrap_err().to_string();
    assert!(error.contains("spillway-turns-65534: ") && error.contains("Permission denied"), "{error}");
}

#[test]
fn an_unusable_directory_of_turns_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let error = usual_directory(std::slice::from_ref(&file), 0).unwrap_err().to_string();
    assert!(error.contains(&file.display().to_string()), "{error}");
}
