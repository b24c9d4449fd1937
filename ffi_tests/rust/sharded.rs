//! Proves that the example of several processes, `examples_c/sharded`, keeps what it says: equal bits for 1, 2 and 4
//! processes, and after `kill -9` of any process at any moment. It is built against an installed copy, by pkg-config and
//! by CMake.

mod support;

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use support::{cmake, empty_dir, install, release_library, root, run, succeed};

const TIMEOUT: Duration = Duration::from_secs(120);
const STEPS: u64 = 20;

fn prefix() -> &'static Path {
    static PREFIX: OnceLock<PathBuf> = OnceLock::new();
    PREFIX.get_or_init(|| {
        let prefix = empty_dir("sharded").join("prefix");
        install(release_library(), &prefix);
        prefix
    })
}

/// The example, built with the flags of pkg-config.
fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let mut asked = Command::new("pkg-config");
        asked.args(["--cflags", "--libs", "spillway"]);
        let flags = succeed(asked.env("PKG_CONFIG_PATH", prefix().join("lib/pkgconfig")), TIMEOUT);
        let source = root().join("examples_c/sharded/main.cpp");
        let program = empty_dir("sharded-pkg-config").join("sharded");
        let line = format!(
            "g++ -std=c++17 -O2 -Wall -Wextra -Wpedantic -Werror {source:?} {} -pthread -o {program:?}",
            flags.trim()
        );
        succeed(Command::new("sh").args(["-c", &line]), TIMEOUT);
        program
    })
}

fn command(program: &Path, directory: &Path, processes: u64, steps: u64) -> Command {
    let mut command = Command::new(program);
    command.arg(directory).args([processes, steps].map(|number| number.to_string()));
    command.env("LD_LIBRARY_PATH", prefix().join("lib"));
    command
}

/// What one run printed.
#[derive(Debug)]
struct Report {
    starts_after: u64,
    losses: Vec<f64>,
    digest: String,
}

fn report(printed: &str) -> Report {
    let after = |start: &str| {
        printed.lines().filter_map(|line| line.strip_prefix(start)).map(str::to_string).collect::<Vec<_>>()
    };
    Report {
        starts_after: after("starts after step ")[0].parse().expect("a number"),
        losses: after("step ")
            .iter()
            .map(|line| line.rsplit(' ').next().expect("a loss").parse().expect("it"))
            .collect(),
        digest: after("digest ").pop().unwrap_or_default(),
    }
}

fn finish(directory: &Path, processes: u64, steps: u64) -> Report {
    report(&succeed(&mut command(program(), directory, processes, steps), TIMEOUT))
}

/// The digest after `STEPS` steps of one process without interruption.
fn expected() -> &'static str {
    static DIGEST: OnceLock<String> = OnceLock::new();
    DIGEST.get_or_init(|| finish(&empty_dir("sharded-expected"), 1, STEPS).digest)
}

#[test]
fn one_two_and_four_processes_have_the_same_bits_and_learn() {
    for processes in [1, 2, 4] {
        let done = finish(&empty_dir("sharded-bits"), processes, STEPS);
        assert_eq!((done.starts_after, done.losses.len() as u64), (0, STEPS));
        assert_eq!(done.digest, expected(), "{processes} processes");
        let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
        assert!(mean(&done.losses[15..]) < mean(&done.losses[..5]), "{:?}", done.losses);
    }
    let fewer = finish(&empty_dir("sharded-bits"), 2, STEPS - 1);
    assert_ne!(fewer.digest, expected(), "the digest depends on the state");
}

#[test]
fn a_run_whose_processes_are_killed_at_random_moments_comes_to_the_same_bits() {
    let rounds = std::env::var("SPILLWAY_KILL_ROUNDS").map_or(4, |rounds| rounds.parse().expect("a number"));
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    for processes in [1, 2, 4] {
        let (mut killed, mut resumed) = (0, 0);
        while killed < rounds {
            let directory = empty_dir("sharded-killed");
            let mut committed = 0;
            // Each round kills one process of the run, until a run comes to its end.
            loop {
                let (printed, code) = killed_at_random(&directory, processes, &mut random);
                let before = committed;
                if let Some(line) = printed.lines().find_map(|line| line.strip_prefix("starts after step ")) {
                    let start: u64 = line.parse().expect("a number");
                    assert!(start >= committed, "seed {seed}: starts after {start}, committed {committed}");
                    resumed += u64::from(start > 0);
                    committed = start.max(before);
                }
                let steps = printed.lines().filter(|line| line.starts_with("step ")).count() as u64;
                committed = committed.max(if steps > 0 { last_step(&printed) } else { 0 });
                if code == Some(0) {
                    assert_eq!(report(&printed).digest, expected(), "seed {seed}, {processes} processes");
                    break;
                }
                killed += 1;
            }
        }
        println!("{processes} processes: {killed} killed, {resumed} resumed after a step");
    }
}

/// The number of the last step that a run reported.
fn last_step(printed: &str) -> u64 {
    let line = printed.lines().rfind(|line| line.starts_with("step ")).expect("there is a step");
    line["step ".len()..].split(':').next().expect("a number").parse().expect("a number")
}

/// Runs the example and kills one of its processes after a random number of lines and microseconds. Returns what it
/// printed, and its exit status.
fn killed_at_random(directory: &Path, processes: u64, random: &mut fastrand::Rng) -> (String, Option<i32>) {
    let mut command = command(program(), directory, processes, STEPS);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("the example starts");
    let mut lines = BufReader::new(child.stdout.take().expect("it is a pipe"));
    let mut printed = String::new();
    for _ in 0..processes + random.u64(0..12) {
        if lines.read_line(&mut printed).expect("output is text") == 0 {
            break;
        }
    }
    let victim = format!("rank {} is process ", random.u64(0..processes));
    let victim = printed.lines().find_map(|line| line.strip_prefix(&victim)).expect("all ranks are reported");
    std::thread::sleep(Duration::from_micros(random.u64(0..20_000)));
    // The launcher waits for all of its processes before it ends, so while it runs the number is that of the process.
    if child.try_wait().expect("it is a child").is_none() {
        let _ = kill(Pid::from_raw(victim.parse().expect("a number")), Signal::SIGKILL);
    }
    lines.read_to_string(&mut printed).expect("output is text");
    (printed, child.wait().expect("it is a child").code())
}

/// A kill between the commits of two processes leaves one of them a step behind. Here an older copy takes the place of
/// one process's files.
#[test]
fn processes_that_committed_different_steps_continue_at_the_earlier_one() {
    let directory = empty_dir("sharded-behind");
    let rank = |number: u64| {
        let host =
            fs::read_dir(directory.join("sharded")).expect("the tier").next().expect("a host").expect("it");
        host.path().join(format!("rank-{number}"))
    };
    let copy = |from: &Path, to: &Path| {
        let _ = fs::remove_dir_all(to);
        succeed(Command::new("cp").arg("-a").arg(from).arg(to), TIMEOUT)
    };
    finish(&directory, 2, 7);
    let older = directory.with_extension("older");
    copy(&rank(1), &older);
    finish(&directory, 2, 8);
    copy(&older, &rank(1));
    let done = finish(&directory, 2, STEPS);
    assert_eq!((done.starts_after, done.digest.as_str()), (7, expected()));

    // Two steps behind is no kill: the other process cannot go back that far.
    copy(&older, &rank(1));
    let refused = run(&mut command(program(), &directory, 2, STEPS), TIMEOUT);
    assert!(refused.code == Some(1) && refused.stderr.contains("SPW_ERR_NO_STEP"), "{refused:?}");
    fs::remove_dir_all(rank(1)).expect("it is there");
    let refused = run(&mut command(program(), &directory, 2, STEPS), TIMEOUT);
    assert!(
        refused.code == Some(1) && refused.stderr.contains("states of another process are missing"),
        "{refused:?}"
    );
}

#[test]
fn cmake_builds_it_and_the_program_has_the_same_bits() {
    let folder = empty_dir("sharded-cmake");
    let source = root().join("examples_c/sharded/main.cpp");
    let list = format!(
        "project(sharded CXX)\nset(CMAKE_CXX_STANDARD 17)\nset(CMAKE_BUILD_TYPE Release)\n\
         find_package(spillway {} REQUIRED CONFIG)\nfind_package(Threads REQUIRED)\nadd_executable(sharded {source:?})\n\
         target_link_libraries(sharded PRIVATE spillway::spillway Threads::Threads)\n",
        env!("CARGO_PKG_VERSION")
    );
    let build = folder.join("build");
    succeed(&mut cmake(&folder, prefix(), &list), TIMEOUT);
    succeed(Command::new("cmake").arg("--build").arg(&build), TIMEOUT);
    let run =
        succeed(&mut command(&build.join("sharded"), &empty_dir("sharded-cmake-run"), 2, STEPS), TIMEOUT);
    assert_eq!(report(&run).digest, expected());
}

#[test]
fn wrong_arguments_are_named() {
    for arguments in [&["", "3", "1"][..], &["somewhere"], &["/nonexistent", "2", "1"]] {
        let finished = run(
            Command::new(program()).args(arguments).env("LD_LIBRARY_PATH", prefix().join("lib")),
            TIMEOUT,
        );
        let words = if arguments[0] == "/nonexistent" { "/nonexistent" } else { "usage" };
        assert!(finished.code != Some(0) && finished.stderr.contains(words), "{finished:?}");
    }
}
