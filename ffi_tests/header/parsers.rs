//! Proves that foreign-function interfaces parse the headers: cffi (Python) and LuaJIT's FFI
//! read the preprocessed umbrella.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// The umbrella without the system's headers, whose types the parsers already define: a file of declarations only.
/// Each `parser` has a folder of its own, because the tests of this file run at the same time.
fn preprocessed(parser: &str) -> std::path::PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("parsers").join(parser);
    let empty = folder.join("empty");
    fs::create_dir_all(&empty).expect("the target directory is writable");
    for name in ["stddef.h", "stdint.h"] {
        fs::write(empty.join(name), "").expect("the target directory is writable");
    }
    let mut preprocess = Command::new("gcc");
    preprocess.args(["-E", "-P", "-nostdinc", "-I"]).arg(&empty).arg("-I").arg(root().join("include"));
    preprocess.args(["-include", "spillway.h", "-x", "c", "-"]).stdin(std::process::Stdio::null());
    let output = preprocess.output().expect("gcc is missing: run packaging/system_packages.sh");
    assert!(output.status.success(), "{output:?}");
    let file = folder.join("spillway.i");
    fs::write(&file, output.stdout).expect("the target directory is writable");
    file
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[test]
fn luajit_parses_the_header() {
    const SCRIPT: &str = "
        local ffi = require('ffi')
        ffi.cdef(io.open(arg[1]):read('*a'))
        assert(ffi.sizeof('spw_adam_options') == 96)
        assert(ffi.new('spw_tier_options').struct_size == 0)
        print('parsed')";
    let header = preprocessed("luajit");
    let script = header.with_file_name("parse.lua");
    fs::write(&script, SCRIPT).expect("the target directory is writable");
    let output = Command::new("luajit").arg(&script).arg(header).output();
    let output = output.expect("luajit is missing: run packaging/system_packages.sh");
    assert!(said(&output).trim() == "parsed", "{}", said(&output));
}

#[test]
fn cffi_parses_the_header() {
    const SCRIPT: &str = "
import sys
from cffi import FFI
ffi = FFI()
ffi.cdef(open(sys.argv[1]).read())
assert ffi.sizeof('spw_adam_options') == 96
print('parsed')";
    let python = std::env::var_os("SPILLWAY_PYTHON").unwrap_or_else(|| {
        let made = Command::new(root().join("packaging/python_env.sh")).output().expect("the script starts");
        assert!(made.status.success(), "packaging/python_env.sh: {}", said(&made));
        String::from_utf8_lossy(&made.stdout).trim().into()
    });
    let output =
        Command::new(python).args(["-c", SCRIPT]).arg(preprocessed("cffi")).output().expect("python starts");
    assert!(said(&output).trim() == "parsed", "{}", said(&output));
}
