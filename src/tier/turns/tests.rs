//! Turns among threads that act as processes, and among real processes, one of which is killed during its turn.
#![forbid(unsafe_code)]

use std::fs::OpenOptions;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;

use super::*;

const LONG: Duration = Duration::from_secs(60);

fn claim_with(dir: &Path, node: &Path, timeout: Duration) -> TurnRequest {
    TurnRequest::new(TurnQueue::join(dir, 1, Some(node)).unwrap(), timeout)
}

fn claim(dir: &Path) -> TurnRequest {
    claim_with(dir, &dir.join("node"), LONG)
}

/// A claim with a short timeout.
fn impatient(dir: &Path) -> TurnRequest {
    claim_with(dir, &dir.join("node"), Duration::from_millis(5))
}

/// Polls all claims until one is granted; returns its index.
fn first_of(claims: &mut [TurnRequest]) -> usize {
    loop {
        if let Some(place) = claims.iter_mut().position(|claim| claim.poll().unwrap()) {
            return place;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn one_holder_at_a_time_and_first_come_first_served() {
    let dir = tempfile::tempdir().unwrap();
    let mut holder = claim(dir.path());
    assert!(holder.poll().unwrap(), "a free path");
    let served = Arc::new(Mutex::new(Vec::new()));
    let waiters: Vec<_> = (0..5)
        .map(|who| {
            let mut mine = claim(dir.path());
            assert!(!mine.poll().unwrap(), "two holders");
            let waits = Arc::clone(&served);
            thread::spawn(move || {
                first_of(std::slice::from_mut(&mut mine));
                waits.lock().unwrap().push(who);
                assert!(matches!(mine.state, RequestState::Turn { .. }));
                mine.release();
            })
        })
        .collect();
    assert!(holder.others_wait().unwrap() && holder.poll().unwrap());
    holder.release();
    waiters.into_iter().for_each(|waiter| waiter.join().unwrap());
    assert_eq!(*served.lock().unwrap(), [0, 1, 2, 3, 4]);
    assert!(!holder.others_wait().unwrap());
}

#[test]
fn a_latecomer_does_not_pass_those_who_wait() {
    let dir = tempfile::tempdir().unwrap();
    let (mut holder, mut first, mut late) = (claim(dir.path()), claim(dir.path()), claim(dir.path()));
    assert!(holder.poll().unwrap() && !first.poll().unwrap());
    holder.release();
    assert!(!late.poll().unwrap(), "the path is free, but somebody waits for it");
    assert!(first.poll().unwrap() && !late.poll().unwrap());
    first.release();
    assert!(late.poll().unwrap());
    // The previous holder does not pass the new one either.
    assert!(!holder.poll().unwrap() && holder.queue.others_wait().is_ok_and(|wait| !wait));
    late.release();
    assert!(holder.poll().unwrap());
}

#[test]
fn a_path_of_two_turns_has_two_holders_and_the_next_waits_for_either() {
    let dir = tempfile::tempdir().unwrap();
    let claim_of = |turns| {
        TurnRequest::new(TurnQueue::join(dir.path(), turns, Some(&dir.path().join("node"))).unwrap(), LONG)
    };
    let [mut one, mut other, mut third, mut fourth] = [2, 2, 2, 2].map(claim_of);
    assert!(one.poll().unwrap() && other.poll().unwrap());
    assert!(!third.poll().unwrap() && !fourth.poll().unwrap() && one.others_wait().unwrap());
    other.release();
    assert!(!fourth.poll().unwrap(), "the third process asked first");
    assert!(third.poll().unwrap() && !fourth.poll().unwrap());
    one.release();
    assert!(fourth.poll().unwrap());
    // A process that was opened with one turn waits for the first one.
    third.release();
    let mut single = claim_of(1);
    assert!(!single.poll().unwrap());
    fourth.release();
    assert!(single.poll().unwrap());
}

#[test]
fn who_finds_a_path_taken_goes_to_the_other() {
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm").unwrap());
    let node = a.path().join("node");
    let mut theirs = claim_with(a.path(), &node, LONG);
    let mut mine = [claim_with(a.path(), &node, LONG), claim_with(b.path(), &node, LONG)];
    assert!(theirs.poll().unwrap());
    assert_eq!(first_of(&mut mine), 1);
    assert!(theirs.others_wait().unwrap() && !mine[0].poll().unwrap());
    mine.iter_mut().for_each(TurnRequest::release);
    assert!(!theirs.others_wait().unwrap(), "a ticket was left in the queue");
}

#[test]
fn patience_ends_and_the_line_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let (mut holder, mut waiter) = (claim(dir.path()), impatient(dir.path()));
    assert!(holder.poll().unwrap());
    first_of(std::slice::from_mut(&mut waiter));
    assert!(matches!(waiter.state, RequestState::TimedOut));
    assert!(!holder.others_wait().unwrap(), "who goes without a turn does not stay in queue");
    waiter.release();
    holder.release();
    assert!(waiter.poll().unwrap() && matches!(waiter.state, RequestState::Turn { .. }));
}

#[test]
fn patience_ends_at_a_desk_that_stays_taken() {
    let dir = tempfile::tempdir().unwrap();
    let (mut holder, mut waiter) = (claim(dir.path()), impatient(dir.path()));
    assert!(holder.poll().unwrap());
    holder.queue.tickets.lock().unwrap();
    first_of(std::slice::from_mut(&mut waiter));
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
    let mut claims = [&dir, &other].map(|path| claim_with(path, &node, LONG));
    let mut notes = OpenOptions::new().append(true).create(true).open(dir.join("notes")).unwrap();
    let hold = std::env::var("SPILLWAY_TEST_TURNS_HOLD").is_ok();
    for _ in 0..40 {
        let index = first_of(&mut claims);
        assert!(matches!(claims[index].state, RequestState::Turn { .. }));
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
        command.args(["--ignored", "--exact", "tier::turns::tests::child_process", "--nocapture"]);
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
    let queue = claim(dir.path()).queue.directory().to_path_buf();
    for name in ["slot-0", "desk"] {
        let path = queue.join(name);
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(&precious, &path).unwrap();
        assert!(TurnQueue::join(dir.path(), 1, Some(&dir.path().join("node"))).is_err());
        fs::remove_file(&path).unwrap();
        fs::hard_link(&precious, &path).unwrap();
        assert!(TurnQueue::join(dir.path(), 1, Some(&dir.path().join("node"))).is_err());
        fs::remove_file(&path).unwrap();
    }
    assert_eq!(fs::read(&precious).unwrap(), b"eight bytes and more");
}

#[test]
fn a_turn_ends_although_a_forked_child_has_its_descriptor() {
    let dir = tempfile::tempdir().unwrap();
    let mut holder = claim(dir.path());
    assert!(holder.poll().unwrap());
    let RequestState::Turn { _turn: turn } = &holder.state else { panic!("the path was free") };
    // A child has such a copy: another descriptor of the same open file.
    let copy = turn.lock.try_clone().unwrap();
    holder.release();
    let mut next = claim(dir.path());
    assert!(next.poll().unwrap() && matches!(next.state, RequestState::Turn { .. }));
    drop(copy);
}

/// One thread alone closes the gates, reads, and waits without a limit.
#[test]
fn a_wait_needs_no_other_thread_to_take_the_turn() {
    use crate::tier::directory::Owner;
    use crate::tier::options::TierOptions;
    use crate::tier::volume::Scratch;
    let dir = tempfile::tempdir().unwrap();
    let owner = Owner { job: "run".to_string(), host: "node".to_string(), rank: 0 };
    let tier = Tier::open(TierOptions::new(owner, [dir.path().to_path_buf()])).unwrap();
    let arbiter = PathArbiter::new(&tier, 1, LONG);
    let (extent, memory) = (tier.define("one", &[8192]).unwrap(), Scratch::new(8192).unwrap());
    for _ in 0..3 {
        arbiter.begin();
        let ticket = tier.write(extent, &[memory.transfer()], &Default::default(), None).unwrap();
        tier.wait(ticket, None).unwrap();
        let ticket = tier.read(extent, &[memory.transfer()]).unwrap();
        tier.wait(ticket, None).unwrap();
        arbiter.end();
    }
    arbiter.begin();
    let ticket = tier.read(extent, &[memory.transfer()]).unwrap();
    drop(arbiter);
    tier.wait(ticket, None).unwrap();
}
