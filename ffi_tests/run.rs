//! Builds every program of ffi_tests/c against an installed copy of the release library and runs it.
//!
//! A program exits 0 if its promise holds, 1 if not, 77 if it cannot run here, which is printed with its reason. One
//! that passes may not have printed anything: the library is silent. All are built with the address and
//! undefined-behaviour sanitizers; the symbols of each program prove it. A first line `// Build: probe` links the library
//! with the probe functions, `// Build: valgrind` builds without sanitizers and runs under valgrind as well, and
//! `// Build: forks` leaves the address sanitizer out: a child that is forked while another thread allocates inherits
//! the sanitizer's locks as they were, and waits for them for ever. A program that limits its address space has the same
//! line: the sanitizer reserves terabytes.

mod support;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use support::{
    Finished, empty_dir, exists, fake_cuda, install, probe_library, release_library, root, run, succeed,
};

const TIMEOUT: Duration = Duration::from_secs(120);
/// With SPILLWAY_KILL_ROUNDS, which asks for a long run.
const LONG: Duration = Duration::from_secs(3600);

enum Outcome {
    Passed,
    Skipped(String),
    Failed(String),
}

struct Program {
    name: String,
    source: PathBuf,
    build: Build,
}

#[derive(Clone, Copy, PartialEq)]
enum Build {
    Sanitized,
    Probe,
    Valgrind,
    Forks,
}

/// Where the programs find what they need.
struct Places {
    release: PathBuf,
    probe: PathBuf,
    work: PathBuf,
}

fn main() -> ExitCode {
    let filters: Vec<String> =
        std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let mut programs = programs();
    programs.retain(|p| filters.is_empty() || filters.iter().any(|filter| p.name.contains(filter.as_str())));
    if std::env::args().any(|argument| argument == "--list") {
        programs.iter().for_each(|program| println!("{}: test", program.name));
        return ExitCode::SUCCESS;
    }
    let places = install_all();
    let counts = run_all(&programs, &places);
    let [passed, skipped, failed] = counts;
    let result = if failed == 0 && passed > 0 { "ok" } else { "FAILED" };
    println!("\ntest result: {result}. {passed} passed; {failed} failed; {skipped} skipped (C programs)");
    if result == "ok" { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn programs() -> Vec<Program> {
    let folder = std::fs::read_dir(root().join("ffi_tests/c")).expect("ffi_tests/c exists");
    let mut sources: Vec<PathBuf> =
        folder.map(|entry| entry.expect("its entries can be read").path()).collect();
    sources.retain(|path| path.extension().is_some_and(|extension| extension == "c"));
    sources.sort();
    let program = |source: PathBuf| {
        let text = std::fs::read_to_string(&source).expect("sources are text");
        let build = match text.lines().next() {
            Some("// Build: probe") => Build::Probe,
            Some("// Build: valgrind") => Build::Valgrind,
            Some("// Build: forks") => Build::Forks,
            _ => Build::Sanitized,
        };
        Program { name: source.file_stem().expect("a file").to_string_lossy().into_owned(), source, build }
    };
    sources.into_iter().map(program).collect()
}

fn install_all() -> Places {
    let work = empty_dir("c");
    let places = Places { release: work.join("release"), probe: work.join("probe"), work };
    install(release_library(), &places.release);
    install(&probe_library(), &places.probe);
    places
}

/// Runs the programs two at a time and prints a line for each.
fn run_all(programs: &[Program], places: &Places) -> [usize; 3] {
    let next = AtomicUsize::new(0);
    let counts = Mutex::new([0; 3]);
    let worker = || {
        while let Some(program) = programs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let start = Instant::now();
            let outcome = test(program, places);
            let (index, words) = match outcome {
                Outcome::Passed => (0, "ok".to_string()),
                Outcome::Skipped(why) => (1, format!("skipped: {why}")),
                Outcome::Failed(why) => (2, format!("FAILED\n{why}")),
            };
            counts.lock().expect("no printer panics")[index] += 1;
            println!("test c/{} ... {words} ({:.1} s)", program.name, start.elapsed().as_secs_f64());
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(worker);
        scope.spawn(worker);
    });
    counts.into_inner().expect("no printer panics")
}

fn test(program: &Program, places: &Places) -> Outcome {
    let folder = places.work.join(&program.name);
    std::fs::create_dir_all(&folder).expect("the target directory is writable");
    let binary = folder.join(&program.name);
    if let Err(why) = compile(program, places, &binary) {
        return Outcome::Failed(why);
    }
    match program.build {
        Build::Valgrind => under_valgrind(&binary, &folder),
        _ => {
            let long = std::env::var_os("SPILLWAY_KILL_ROUNDS").is_some();
            judge(run(&mut command(&binary, &folder), if long { LONG } else { TIMEOUT }))
        }
    }
}

fn compile(program: &Program, places: &Places, binary: &Path) -> Result<(), String> {
    let prefix = if program.build == Build::Probe { &places.probe } else { &places.release };
    let address = matches!(program.build, Build::Sanitized | Build::Probe);
    let undefined = program.build != Build::Valgrind;
    let mut gcc = Command::new("gcc");
    gcc.args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-g"]);
    if address {
        gcc.arg("-fsanitize=address");
    }
    if undefined {
        gcc.args(["-fsanitize=undefined", "-fno-sanitize-recover=all"]);
    }
    gcc.arg("-I").arg(prefix.join("include")).arg(&program.source).arg("-o").arg(binary);
    gcc.arg("-L").arg(prefix.join("lib")).args(["-lspillway", "-lpthread", "-ldl"]);
    gcc.arg(format!("-Wl,-rpath,{}", prefix.join("lib").display()));
    let built = run(&mut gcc, TIMEOUT);
    if built.code != Some(0) {
        return Err(format!("{}{}", built.stdout, built.stderr));
    }
    let symbols = succeed(Command::new("nm").arg(binary), TIMEOUT);
    let has = |symbol: &str| symbols.lines().any(|line| line.contains(symbol));
    match (has("__asan_init"), has("__ubsan_handle")) == (address, undefined) {
        true => Ok(()),
        false => Err(format!("sanitizers wanted: address {address}, undefined behaviour {undefined}")),
    }
}

fn command(binary: &Path, folder: &Path) -> Command {
    let mut command = Command::new(binary);
    prepare(&mut command, folder);
    command
}

/// Nothing from outside steers the library, and the sanitizers report what they find, leaks included.
fn prepare(command: &mut Command, folder: &Path) {
    for name in ["SPILLWAY_KERNEL", "SPILLWAY_LOG", "SPILLWAY_NUM_THREADS", "LOCAL_WORLD_SIZE", "LD_PRELOAD"]
    {
        command.env_remove(name);
    }
    command.current_dir(folder).env("SPILLWAY_VECTORS", root().join("kernels"));
    command.env_remove("SPILLWAY_CUDA_LIBRARY").env("FAKE_CUDA", fake_cuda());
    command.env("ASAN_OPTIONS", "detect_leaks=1:exitcode=1:detect_stack_use_after_return=1");
    command.env("UBSAN_OPTIONS", "print_stacktrace=1");
}

fn judge(finished: Finished) -> Outcome {
    let Finished { code, stdout, stderr } = finished;
    match code {
        Some(0) if stdout.is_empty() && stderr.is_empty() => Outcome::Passed,
        Some(0) => Outcome::Failed(format!("passed, but something printed:\n{stdout}{stderr}")),
        Some(77) => Outcome::Skipped(stdout.trim().to_string()),
        code => Outcome::Failed(format!("exit status {code:?}\n{stdout}{stderr}")),
    }
}

/// The program tells its result natively, and must come to the same on the processor that valgrind shows.
fn under_valgrind(binary: &Path, folder: &Path) -> Outcome {
    if !exists("valgrind") {
        return Outcome::Skipped("valgrind is not installed".to_string());
    }
    let native = run(&mut command(binary, folder), TIMEOUT);
    if native.code != Some(0) || !native.stderr.is_empty() {
        return judge(Finished { code: Some(1), ..native });
    }
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--quiet", "--error-exitcode=1", "--leak-check=full"]);
    valgrind.args(["--show-leak-kinds=definite", "--errors-for-leak-kinds=definite"]);
    valgrind.arg(binary).env("UNDER_VALGRIND", "1").env("EXPECTED_SUM", native.stdout.trim());
    prepare(&mut valgrind, folder);
    judge(run(&mut valgrind, TIMEOUT))
}
