//! Shared by the tests of this folder: installed copies of the libraries under test, and programs that
//! run with a timeout.
#![allow(dead_code, reason = "each test uses a part of it")]

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Timeout of a tool that reads a file.
const TOOL: Duration = Duration::from_secs(60);
/// Timeout of an optimised build.
const BUILD: Duration = Duration::from_secs(900);

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
        succeed(cargo().args(release_build()), BUILD);
        target().join("release/libspillway.so")
    })
}

/// True in the inner loop: see `ffi_tests/quick.sh`.
pub fn quick() -> bool {
    std::env::var_os("SPILLWAY_TEST_QUICK").is_some()
}

/// The library with the probe functions: the debug build that cargo made for this test.
pub fn probe_library() -> PathBuf {
    beside_this_test("libspillway.so")
}

/// A CUDA driver that needs no GPU, as a shared library.
pub fn fake_cuda() -> PathBuf {
    if quick() {
        beside_this_test("libfakecuda.so")
    } else {
        release_library().with_file_name("libfakecuda.so")
    }
}

/// A shared library that cargo built because this test depends on its crate.
fn beside_this_test(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a running program has a path");
    let path = test.with_file_name(name);
    assert!(path.exists(), "cargo did not build {} with this test", path.display());
    path
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

fn target() -> &'static Path {
    Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("tmp lies in the target directory")
}

/// The arguments of cargo for the release library and the others of the same build.
pub fn release_build() -> Vec<OsString> {
    let words = "build --quiet --lib --release --features spillway/s3 --package spillway --package spillway-preload \
                 --package fakecuda --target-dir";
    words.split(' ').map(OsString::from).chain([target().into()]).collect()
}

/// A cargo without the variables that the first cargo set for this test. Build scripts of some crates run again if
/// these change, and all that depends on them is compiled again: see the crate `ring`.
fn cargo() -> Command {
    let mut cargo = Command::new(env!("CARGO"));
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        let of_package = ["CARGO_PKG_", "CARGO_MANIFEST_"].iter().any(|start| text.starts_with(start));
        // ffi_tests/timed.sh sets RUSTC_BOOTSTRAP. Build scripts would then ask for unstable features.
        if of_package || text == "OUT_DIR" || text == "RUSTC_BOOTSTRAP" {
            cargo.env_remove(name);
        }
    }
    cargo.current_dir(root());
    cargo
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

/// The command that configures a CMake project in `folder`, whose build goes to its folder `build`.
pub fn cmake(folder: &Path, prefix: &Path, project: &str) -> Command {
    assert!(exists("cmake"), "cmake is missing: run packaging/system_packages.sh");
    let list = format!("cmake_minimum_required(VERSION 3.16)\n{project}");
    fs::write(folder.join("CMakeLists.txt"), list).expect("the target directory is writable");
    let mut configure = Command::new("cmake");
    configure.arg("-S").arg(folder).arg("-B").arg(folder.join("build"));
    configure.arg(format!("-DCMAKE_PREFIX_PATH={}", prefix.display()));
    configure
}

/// True if a program of this name can be started.
pub fn exists(program: &str) -> bool {
    Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
}
