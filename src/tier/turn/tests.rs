//! Turns among threads, which stand for processes, and among real processes, one of them killed in its turn.
#![forbid(unsafe_code)]

use super::*;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;

const LONG: Duration = Duration::from_secs(60);

fn claim_with(dir: &Path, node: &Path, patience: Duration) -> Claim {
    Claim::new(Line::join(dir, Some(node)).unwrap(), patience)
}

fn claim(dir: &Path) -> Claim {
    claim_with(dir, &dir.join("node"), LONG)
}

/// One whose patience is short.
fn impatient(dir: &Path) -> Claim {
    claim_with(dir, &dir.join("node"), Duration::from_millis(5))
}

/// Waits in all lines at once for the first path to be had; its place.
fn first_of(claims: &mut [Claim]) -> usize {
    loop {
        if let Some(place) = claims.iter_mut().position(|claim| claim.ask().unwrap()) {
            return place;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn one_holder_at_a_time_and_first_come_first_served() {
    let dir = tempfile::tempdir().unwrap();
    let mut holder = claim(dir.path());
    assert!(holder.ask().unwrap(), "a free path");
    let served = Arc::new(Mutex::new(Vec::new()));
    let waiters: Vec<_> = (0..5)
        .map(|who| {
            let mut mine = claim(dir.path());
            assert!(!mine.ask().unwrap(), "two holders");
            let waits = Arc::clone(&served);
            thread::spawn(move || {
                first_of(std::slice::from_mut(&mut mine));
                waits.lock().unwrap().push(who);
                assert!(matches!(mine.standing, Standing::Turn { .. }));
                mine.give_up();
            })
        })
        .collect();
    assert!(holder.others_wait().unwrap() && holder.ask().unwrap());
    holder.give_up();
    waiters.into_iter().for_each(|waiter| waiter.join().unwrap());
    assert_eq!(*served.lock().unwrap(), [0, 1, 2, 3, 4]);
    assert!(!holder.others_wait().unwrap());
}

#[test]
fn a_latecomer_does_not_pass_those_who_wait() {
    let dir = tempfile::tempdir().unwrap();
    let (mut holder, mut first, mut late) = (claim(dir.path()), claim(dir.path()), claim(dir.path()));
    assert!(holder.ask().unwrap() && !first.ask().unwrap());
    holder.give_up();
    assert!(!late.ask().unwrap(), "the path is free, but somebody waits for it");
    assert!(first.ask().unwrap() && !late.ask().unwrap());
    first.give_up();
    assert!(late.ask().unwrap());
    // Nor does one who has had it.
    assert!(!holder.ask().unwrap() && holder.line.others_wait().is_ok_and(|wait| !wait));
    late.give_up();
    assert!(holder.ask().unwrap());
}

#[test]
fn who_finds_a_path_taken_goes_to_the_other() {
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm").unwrap());
    let node = a.path().join("node");
    let mut theirs = claim_with(a.path(), &node, LONG);
    let mut mine = [claim_with(a.path(), &node, LONG), claim_with(b.path(), &node, LONG)];
    assert!(theirs.ask().unwrap());
    assert_eq!(first_of(&mut mine), 1);
    assert!(theirs.others_wait().unwrap() && !mine[0].ask().unwrap());
    mine.iter_mut().for_each(Claim::give_up);
    assert!(!theirs.others_wait().unwrap(), "a ticket was left in the line");
}

#[test]
fn patience_ends_and_the_line_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let (mut holder, mut waiter) = (claim(dir.path()), impatient(dir.path()));
    assert!(holder.ask().unwrap());
    first_of(std::slice::from_mut(&mut waiter));
    assert!(matches!(waiter.standing, Standing::Without));
    assert!(!holder.others_wait().unwrap(), "who goes without a turn does not stay in line");
    waiter.give_up();
    holder.give_up();
    assert!(waiter.ask().unwrap() && matches!(waiter.standing, Standing::Turn { .. }));
}

#[test]
fn patience_ends_at_a_desk_that_stays_taken() {
    let dir = tempfile::tempdir().unwrap();
    let (mut holder, mut waiter) = (claim(dir.path()), impatient(dir.path()));
    assert!(holder.ask().unwrap());
    holder.line.desk.lock().unwrap();
    first_of(std::slice::from_mut(&mut waiter));
    assert!(matches!(waiter.standing, Standing::Without));
}

/// What a child process runs: turns on two paths, each noted with its begin and end on the node's clock.
#[test]
fn child_process() {
    let Ok(dir) = std::env::var("SPILLWAY_TEST_TURNS") else { return };
    let dir = PathBuf::from(dir);
    let other = PathBuf::from(std::env::var("SPILLWAY_TEST_TURNS_OTHER").unwrap());
    let node = dir.join("node");
    let mut claims = [&dir, &other].map(|path| claim_with(path, &node, LONG));
    let mut notes = OpenOptions::new().append(true).create(true).open(dir.join("notes")).unwrap();
    let hold = std::env::var("SPILLWAY_TEST_TURNS_HOLD").is_ok();
    for _ in 0..40 {
        let index = first_of(&mut claims);
        assert!(matches!(claims[index].standing, Standing::Turn { .. }));
        let note = |what: &str| {
            let pid = std::process::id();
            format!("{index} {pid} {what}\n")
        };
        io::Write::write_all(&mut notes, note("in").as_bytes()).unwrap();
        thread::sleep(Duration::from_millis(if hold { 600_000 } else { 1 }));
        io::Write::write_all(&mut notes, note("out").as_bytes()).unwrap();
        claims.iter_mut().for_each(Claim::give_up);
    }
}

#[test]
fn real_processes_exclude_each_other_and_survive_a_killed_one() {
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm").unwrap());
    let start = |hold: bool| -> Child {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "tier::turn::tests::child_process", "--nocapture"]);
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
    // They live on the other path while this one is held.
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
        let words: Vec<&str> = note.split(' ').collect();
        let path: usize = words[0].parse().unwrap();
        match words[2] {
            "in" => {
                let alive = holder[path].as_ref().filter(|pid| **pid != dead);
                assert_eq!(alive, None, "two processes on path {path}");
                holder[path] = Some(words[1].to_string());
                turns += 1;
            }
            _ => assert_eq!(holder[path].take().as_deref(), Some(words[1])),
        }
    }
    assert_eq!(turns, 1 + 4 * 40);
    let on_first = notes().lines().filter(|note| note.starts_with("0 ") && note.ends_with(" in")).count();
    assert!(on_first > 1, "the death of its holder freed no path");
}
