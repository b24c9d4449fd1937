//! Turns among threads, which stand for processes, and among real processes, one of them killed in its turn.
#![forbid(unsafe_code)]

use super::*;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;

const LONG: Duration = Duration::from_secs(60);

fn soon() -> Instant {
    Instant::now() + LONG
}

fn line(dir: &Path) -> Line {
    Line::join(dir, Some(&dir.join("node"))).unwrap()
}

#[test]
fn one_holder_at_a_time_and_first_come_first_served() {
    let dir = tempfile::tempdir().unwrap();
    let holder = line(dir.path());
    let turn = holder.try_take().unwrap().expect("a free path");
    let served = Arc::new(Mutex::new(Vec::new()));
    let waiters: Vec<_> = (0..5)
        .map(|who| {
            let mine = line(dir.path());
            assert!(mine.try_take().unwrap().is_none(), "two holders");
            let waits = Arc::clone(&served);
            let ticket = mine.stand(soon()).unwrap().unwrap();
            thread::spawn(move || {
                let taken = wait_in(&[&mine], &[ticket], soon()).unwrap();
                waits.lock().unwrap().push(who);
                assert!(taken.1.is_some());
                mine.leave().unwrap();
            })
        })
        .collect();
    assert!(holder.others_wait().unwrap());
    drop(turn);
    waiters.into_iter().for_each(|waiter| waiter.join().unwrap());
    assert_eq!(*served.lock().unwrap(), [0, 1, 2, 3, 4]);
    assert!(!holder.others_wait().unwrap());
}

#[test]
fn a_latecomer_does_not_pass_those_who_wait() {
    let dir = tempfile::tempdir().unwrap();
    let (first, late) = (line(dir.path()), line(dir.path()));
    let ticket = first.stand(soon()).unwrap().unwrap();
    assert!(late.try_take().unwrap().is_none(), "the path is free, but somebody waits for it");
    let turn = first.take_before(ticket).unwrap().expect("its turn");
    first.leave().unwrap();
    drop(turn);
    assert!(late.try_take().unwrap().is_some());
}

#[test]
fn who_finds_a_path_taken_goes_to_the_other() {
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm").unwrap());
    let node = a.path().join("node");
    let join = |path: &Path| Line::join(path, Some(&node)).unwrap();
    let (mine_a, mine_b, theirs) = (join(a.path()), join(b.path()), join(a.path()));
    let turn = theirs.try_take().unwrap().expect("a free path");
    let (index, other) = take_any(&[&mine_a, &mine_b], LONG).unwrap();
    assert_eq!((index, other.is_some()), (1, true));
    // Both taken: the first to be free is had, and no ticket stays behind.
    let waits = thread::spawn(move || {
        let taken = take_any(&[&mine_a, &mine_b], LONG).unwrap();
        assert!(!theirs.others_wait().unwrap(), "a ticket was left in the line");
        taken.0
    });
    thread::sleep(Duration::from_millis(20));
    drop(turn);
    assert_eq!(waits.join().unwrap(), 0);
}

#[test]
fn patience_ends_and_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let (holder, waiter) = (line(dir.path()), line(dir.path()));
    let _turn = holder.try_take().unwrap().unwrap();
    let (_, turn) = take_any(&[&waiter], Duration::from_millis(5)).unwrap();
    assert!(turn.is_none());
    assert!(!holder.others_wait().unwrap(), "who goes without a turn does not stay in line");
}

#[test]
fn patience_ends_at_a_desk_that_stays_taken() {
    let dir = tempfile::tempdir().unwrap();
    let (holder, waiter) = (line(dir.path()), line(dir.path()));
    let _turn = holder.try_take().unwrap().unwrap();
    holder.desk.lock().unwrap();
    let (tell, told) = std::sync::mpsc::channel();
    thread::spawn(move || tell.send(take_any(&[&waiter], Duration::from_millis(5)).unwrap().1.is_none()));
    assert!(told.recv_timeout(LONG).expect("it waits for the desk for ever"));
}

#[test]
fn who_cannot_stand_in_one_line_leaves_the_others() {
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm").unwrap());
    let node = a.path().join("node");
    let join = |path: &Path| Line::join(path, Some(&node)).unwrap();
    let holders = [join(a.path()), join(b.path())];
    let _turns = holders.each_ref().map(|holder| holder.try_take().unwrap().unwrap());
    let whole = join(b.path());
    // A desk that nobody can write to.
    let broken = Line { desk: File::open(whole.dir.join("desk")).unwrap(), ..join(b.path()) };
    let waiter = join(a.path());
    take_any(&[&waiter, &broken], LONG).unwrap_err();
    assert!(!holders[0].others_wait().unwrap(), "a ticket was left in the line");
}

/// What a child process runs: turns on two paths, each noted with its begin and end on the node's clock.
#[test]
fn child_process() {
    let Ok(dir) = std::env::var("SPILLWAY_TEST_TURNS") else { return };
    let dir = PathBuf::from(dir);
    let other = PathBuf::from(std::env::var("SPILLWAY_TEST_TURNS_OTHER").unwrap());
    let node = dir.join("node");
    let lines = [Line::join(&dir, Some(&node)).unwrap(), Line::join(&other, Some(&node)).unwrap()];
    let mut notes = OpenOptions::new().append(true).create(true).open(dir.join("notes")).unwrap();
    let hold = std::env::var("SPILLWAY_TEST_TURNS_HOLD").is_ok();
    for _ in 0..40 {
        let (index, turn) = take_any(&[&lines[0], &lines[1]], LONG).unwrap();
        assert!(turn.is_some());
        let note = |what: &str| {
            let pid = std::process::id();
            format!("{index} {pid} {what}\n")
        };
        io::Write::write_all(&mut notes, note("in").as_bytes()).unwrap();
        thread::sleep(Duration::from_millis(if hold { 600_000 } else { 1 }));
        io::Write::write_all(&mut notes, note("out").as_bytes()).unwrap();
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
