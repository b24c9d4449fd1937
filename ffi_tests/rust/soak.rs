//! Builds the soak program without sanitizers, because their own memory would hide a leak. Runs it for five seconds, or
//! for `SPILLWAY_SOAK_SECONDS` (`make soak MINUTES=10`).

mod support;

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use support::{empty_dir, install, release_library, root, succeed};

#[test]
fn nothing_is_lost_and_nothing_grows() {
    let named = std::env::var("SPILLWAY_SOAK_SECONDS").ok();
    let seconds: u64 = named.map_or(5, |text| text.parse().expect("SPILLWAY_SOAK_SECONDS is a number"));
    let work = empty_dir("soak");
    install(release_library(), &work.join("installed"));
    let program = work.join("soak");
    compile(&work.join("installed"), &program);
    let files = work.join("files");
    std::fs::create_dir(&files).expect("the target directory is writable");
    let mut soak = Command::new(&program);
    soak.arg(&files).arg(seconds.to_string()).env_remove("SPILLWAY_IO").env("SPILLWAY_PROFILE", "");
    soak.env("LD_LIBRARY_PATH", work.join("installed/lib"));
    println!("{}", succeed(&mut soak, Duration::from_secs(seconds + 300)));
}

fn compile(installed: &Path, program: &Path) {
    let mut compiler = Command::new("cc");
    compiler
        .args(["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror"])
        .arg(root().join("ffi_tests/soak/soak.c"));
    compiler.arg("-I").arg(installed.join("include")).arg("-L").arg(installed.join("lib"));
    compiler.args(["-lspillway", "-lpthread", "-o"]).arg(program);
    succeed(&mut compiler, Duration::from_secs(120));
}
