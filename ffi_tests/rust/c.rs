//! Builds every C and C++ program of ffi_tests/c against an installed copy of the library and runs it, each as one test.
//!
//! Exit status 0 means that the promise holds, and 1 that it does not. Status 77, with a reason on standard output,
//! means that the program cannot run here; that test is ignored. A program that passes must print nothing: the library
//! is silent. All programs are built with the address and undefined-behaviour sanitizers; the symbols of each program
//! prove it. The first line of a source changes the build:
//!
//! | first line | build |
//! |---|---|
//! | `// Build: probe` | links the library with the probe functions |
//! | `// Build: valgrind` | no sanitizers; the program also runs under valgrind |
//! | `// Build: forks` | no address sanitizer |
//!
//! If another thread allocates during a fork, the child inherits the address sanitizer's locks in the locked state and
//! hangs. The sanitizer also reserves terabytes, which a program with a limit on its address space cannot allow.
//!
//! The arguments are those of any Rust test, and more than one name is allowed: `cargo test --test
//! c -- undo tier_fork`.

mod support;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Completion, Failed, Trial};
use support::{
    Finished, empty_dir, exists, fake_cuda, install, probe_library, release_library, root, run, succeed,
};

const TIMEOUT: Duration = Duration::from_secs(120);
/// The timeout when SPILLWAY_KILL_ROUNDS asks for a long run.
const LONG: Duration = Duration::from_secs(3600);
/// Number of programs in the list of the slowest.
const SLOWEST: usize = 20;

type Outcome = Result<Completion, Failed>;

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

/// The installed libraries that the programs use.
struct Places {
    release: PathBuf,
    probe: PathBuf,
    work: PathBuf,
}

/// The seconds that each program took, with its compiler.
static TIMES: Mutex<Vec<(f64, String)>> = Mutex::new(Vec::new());

fn main() -> ExitCode {
    let (names, arguments) = split_names(std::env::args().collect());
    let mut arguments = Arguments::from_iter(arguments);
    // A program may start threads and measure time: more than two at once would disturb each other.
    arguments.test_threads.get_or_insert(2);
    let wanted = |program: &Program| {
        let named = |name: &String| match arguments.exact {
            true => program.name == *name,
            false => program.name.contains(name.as_str()),
        };
        names.is_empty() || names.iter().any(named)
    };
    let trial = |program: Program| Trial::ignorable_test(program.name.clone(), move || timed(&program));
    let trials = programs().into_iter().filter(wanted).map(trial).collect();
    let conclusion = libtest_mimic::run(&arguments, trials);
    print_slowest();
    conclusion.exit_code()
}

/// Splits the arguments into test names and all others, because libtest-mimic accepts only one name.
fn split_names(arguments: Vec<String>) -> (Vec<String>, Vec<String>) {
    const WITH_VALUE: [&str; 6] = ["--skip", "--test-threads", "--logfile", "--color", "--format", "-Z"];
    let (mut names, mut others) = (Vec::new(), Vec::new());
    for (index, argument) in arguments.iter().enumerate() {
        let value = index == 0 || WITH_VALUE.contains(&arguments[index - 1].as_str());
        let list = if value || argument.starts_with('-') { &mut others } else { &mut names };
        list.push(argument.clone());
    }
    (names, others)
}

fn timed(program: &Program) -> Outcome {
    let places = places();
    let start = Instant::now();
    let outcome = test(program, places);
    TIMES
        .lock()
        .expect("no test panics with the list")
        .push((start.elapsed().as_secs_f64(), program.name.clone()));
    outcome
}

fn print_slowest() {
    let mut times = TIMES.lock().expect("no test panics with the list");
    times.sort_by(|a, b| b.0.total_cmp(&a.0));
    if times.len() > 1 {
        println!("slowest C programs:");
        times.iter().take(SLOWEST).for_each(|(seconds, name)| println!("{seconds:7.1} s  {name}"));
    }
}

fn programs() -> Vec<Program> {
    let folder = std::fs::read_dir(root().join("ffi_tests/c")).expect("ffi_tests/c exists");
    let mut sources: Vec<PathBuf> =
        folder.map(|entry| entry.expect("its entries can be read").path()).collect();
    sources.retain(|path| path.extension().is_some_and(|extension| extension == "c" || extension == "cpp"));
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

/// The installed libraries; made once, before the first program.
fn places() -> &'static Places {
    static PLACES: OnceLock<Places> = OnceLock::new();
    PLACES.get_or_init(|| {
        let work = empty_dir("c");
        let places = Places { release: work.join("release"), probe: work.join("probe"), work };
        install(release_library(), &places.release);
        places
    })
}

/// The installed library with the probe functions; made once, before the first program that needs it.
fn probe(places: &Places) -> &Path {
    static PROBE: OnceLock<()> = OnceLock::new();
    PROBE.get_or_init(|| install(&probe_library(), &places.probe));
    &places.probe
}

fn test(program: &Program, places: &Places) -> Outcome {
    let folder = places.work.join(&program.name);
    std::fs::create_dir_all(&folder).expect("the target directory is writable");
    let binary = folder.join(&program.name);
    compile(program, places, &binary)?;
    match program.build {
        Build::Valgrind => under_valgrind(&binary, &folder),
        _ => {
            let long = std::env::var_os("SPILLWAY_KILL_ROUNDS").is_some();
            judge(run(&mut command(&binary, &folder), if long { LONG } else { TIMEOUT }))
        }
    }
}

fn compile(program: &Program, places: &Places, binary: &Path) -> Result<(), Failed> {
    let prefix = if program.build == Build::Probe { probe(places) } else { &places.release };
    let address = matches!(program.build, Build::Sanitized | Build::Probe);
    let undefined = program.build != Build::Valgrind;
    let (compiler, standard) = match program.source.extension() {
        Some(extension) if extension == "cpp" => ("g++", "-std=c++17"),
        _ => ("gcc", "-std=c11"),
    };
    let mut gcc = Command::new(compiler);
    gcc.args([standard, "-Wall", "-Wextra", "-Werror", "-O1", "-g"]);
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
        return Err(format!("{}{}", built.stdout, built.stderr).into());
    }
    let symbols = succeed(Command::new("nm").arg(binary), TIMEOUT);
    let has = |symbol: &str| symbols.lines().any(|line| line.contains(symbol));
    match (has("__asan_init"), has("__ubsan_handle")) == (address, undefined) {
        true => Ok(()),
        false => Err(format!("sanitizers wanted: address {address}, undefined behaviour {undefined}").into()),
    }
}

fn command(binary: &Path, folder: &Path) -> Command {
    let mut command = Command::new(binary);
    prepare(&mut command, folder);
    command
}

/// Clears the environment that would steer the library, and makes the sanitizers report every error, leaks included.
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
        Some(0) if stdout.is_empty() && stderr.is_empty() => Ok(Completion::Completed),
        Some(0) => Err(format!("passed, but something printed:\n{stdout}{stderr}").into()),
        Some(77) => Ok(Completion::ignored_with(stdout.trim())),
        code => Err(format!("exit status {code:?}\n{stdout}{stderr}").into()),
    }
}

/// The program prints its result natively, and must give the same result on the processor that valgrind emulates.
fn under_valgrind(binary: &Path, folder: &Path) -> Outcome {
    if !exists("valgrind") {
        return Err("valgrind is missing: run packaging/system_packages.sh".into());
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
