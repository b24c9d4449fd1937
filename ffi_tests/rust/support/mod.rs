//! Shared by the tests of this folder: installed copies of the libraries under test, and programs that
//! run with a timeout.
#![allow(dead_code, reason = "each test uses a part of it")]

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Timeout of a tool that reads a file.
const TOOL: Duration = Duration::from_secs(60);

/// The root of the repository.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// An empty folder of this name inside the target directory.
pub fn empty_dir(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    if path.exists() {
        fs::remove_dir_all(&path).expect("a folder of an earlier run can be removed");
    }
    fs::create_dir_all(&path).expect("the target directory is writable");
    path
}

/// The release library, as `make lib` builds it, so that all runners share one build. The inner loop, which does not
/// wait for an optimised build, uses the library with the probe functions.
pub fn release_library() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        if quick() {
            return probe_library();
        }
        let target =
            Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("tmp lies in the target directory");
        let packages = ["--package", "spillway", "--package", "spillway-preload", "--package", "fakecuda"];
        build(target, &[&["--release", "--features", "spillway/s3"], &packages[..]].concat());
        target.join("release/libspillway.so")
    })
}

/// True in the inner loop: see `ffi_tests/quick.sh`.
pub fn quick() -> bool {
    std::env::var_os("SPILLWAY_TEST_QUICK").is_some()
}

/// A library with the probe functions. It has its own target directory, because cargo names libraries
/// alike for all features.
pub fn probe_library() -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("probe");
    // Programs of this library do not need kernels, which take a minute to optimise.
    build(&target, &["--no-default-features", "--features", "probe", "--config", "profile.dev.opt-level=0"]);
    target.join("debug/libspillway.so")
}

/// A CUDA driver that needs no GPU, as a shared library.
pub fn fake_cuda() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        if !quick() {
            return release_library().with_file_name("libfakecuda.so");
        }
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fakecuda");
        build(&target, &["--package", "fakecuda"]);
        target.join("debug/libfakecuda.so")
    })
}

/// Every symbol that the library exports. The inner loop tests a library with probe functions, which are not
/// part of the interface.
pub fn exports() -> BTreeSet<String> {
    let nm = succeed(Command::new("nm").args(["-D", "--defined-only"]).arg(release_library()), TOOL);
    // The text after an @ is the version of the symbol. The version itself has the type A.
    let symbols = nm.lines().filter(|line| !line.contains(" A "));
    let names = symbols.filter_map(|line| line.split_whitespace().nth(2)?.split('@').next());
    let names = names.filter(|name| !(quick() && name.starts_with("spw_probe_")));
    names.map(str::to_string).collect()
}

fn build(target: &Path, options: &[&str]) {
    let mut cargo = Command::new(env!("CARGO"));
    cargo
        .args(["build", "--quiet", "--lib"])
        .args(options)
        .arg("--target-dir")
        .arg(target)
        // ffi_tests/timed.sh sets this variable for the test program; build scripts would then
        // ask for unstable features.
        .env_remove("RUSTC_BOOTSTRAP")
        .current_dir(root());
    succeed(&mut cargo, Duration::from_secs(900));
}

/// Installs a library and its header under `prefix`.
pub fn install(library: &Path, prefix: &Path) {
    let mut script = Command::new("sh");
    script.arg(root().join("packaging/install.sh")).arg(prefix).arg(library).env_remove("DESTDIR");
    succeed(&mut script, Duration::from_secs(60));
}

/// The result of a program.
#[derive(Debug)]
pub struct Finished {
    /// Exit status; `None` for a signal or a timeout.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error; contains a message if the program exceeded the timeout.
    pub stderr: String,
}

/// Runs a program until it ends or `timeout` expires. Output goes through files, because a forgotten grandchild could
/// keep a pipe open.
pub fn run(command: &mut Command, timeout: Duration) -> Finished {
    static COUNT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    let number = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let file = |stream: &str| {
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}-{number}.{stream}", std::process::id()))
    };
    let (out, err) = (file("out"), file("err"));
    command.stdin(Stdio::null());
    command.stdout(File::create(&out).expect("the target directory is writable"));
    command.stderr(File::create(&err).expect("the target directory is writable"));
    let mut child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let end = Instant::now() + timeout;
    let (code, late) = loop {
        match child.try_wait().expect("a child can be waited for") {
            Some(status) => break (status.code(), false),
            None if Instant::now() < end => std::thread::sleep(Duration::from_millis(2)),
            None => {
                let _ = child.kill();
                let _ = child.wait();
                break (None, true);
            }
        }
    };
    let read = |path: &Path| {
        let bytes = fs::read(path).unwrap_or_default();
        let _ = fs::remove_file(path);
        String::from_utf8_lossy(&bytes).into_owned()
    };
    let mut stderr = read(&err);
    if late {
        stderr.push_str(&format!("ended after {} s\n", timeout.as_secs()));
    }
    Finished { code, stdout: read(&out), stderr }
}

/// Runs a program, which must exit with status 0, and returns its standard output.
pub fn succeed(command: &mut Command, timeout: Duration) -> String {
    let Finished { code, stdout, stderr } = run(command, timeout);
    assert!(code == Some(0), "{command:?}: {code:?}\n{stdout}{stderr}");
    stdout
}

/// True if a program of this name can be started.
pub fn exists(program: &str) -> bool {
    Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
}
