//! Proves that the binary interface equals the committed one: exported symbols, and sizes and offsets in
//! Rust and C.
//!
//! `SPILLWAY_BLESS=1 cargo test --test abi` rewrites exports.txt and layout.txt. After the release of an
//! SPW_ABI_VERSION, lines may be added to them, and no line may change.

mod support;

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use spillway::capi;
use support::{empty_dir, exports, release_library, root, succeed};

const TIMEOUT: Duration = Duration::from_secs(60);

fn golden(file: &str, text: &str) {
    let path = root().join("ffi_tests").join(file);
    if std::env::var_os("SPILLWAY_BLESS").is_some() {
        fs::write(&path, text).expect("the golden file is writable");
    }
    let committed = fs::read_to_string(&path).expect("the golden file exists");
    assert!(committed == text, "{file} is stale: SPILLWAY_BLESS=1 cargo test --test abi; now it is\n{text}");
}

/// The text of all headers, including the experimental ones.
fn headers() -> String {
    let folder = root().join("include/spillway");
    let mut paths: Vec<PathBuf> = fs::read_dir(&folder)
        .expect("include/spillway exists")
        .map(|entry| entry.expect("its entries can be read").path())
        .collect();
    paths.sort();
    paths.iter().map(|path| fs::read_to_string(path).expect("headers are text")).collect()
}

/// Every function that the header declares.
fn declared() -> BTreeSet<String> {
    let headers = headers();
    let code = headers.lines().filter(|line| !line.trim_start().starts_with("//"));
    let words = code.flat_map(|line| line.split_inclusive('('));
    let names = words.filter_map(|word| word.strip_suffix('(')?.rsplit([' ', '*']).next());
    names.filter(|name| name.starts_with("spw_") && !name.ends_with(')')).map(str::to_string).collect()
}

#[test]
fn exported_symbols_are_the_committed_list() {
    let list: String = exports().iter().map(|name| format!("{name}\n")).collect();
    golden("exports.txt", &list);
}

#[test]
fn every_exported_function_is_declared_and_the_other_way_round() {
    assert!(declared().contains("spw_adam_step"));
    assert_eq!(declared(), exports());
}

#[test]
fn nothing_runs_or_is_demanded_when_the_library_is_loaded() {
    let needed = succeed(Command::new("readelf").arg("-d").arg(release_library()), TIMEOUT);
    let allowed = ["libc.so", "libm.so", "libgcc_s.so", "libpthread.so", "libdl.so", "librt.so", "ld-linux"];
    let libraries: Vec<&str> = needed.lines().filter(|line| line.contains("(NEEDED)")).collect();
    assert!(!libraries.is_empty());
    for library in libraries {
        assert!(allowed.iter().any(|name| library.contains(name)), "{library}");
    }
}

/// Lines of the layout: a struct's size, then offset and size of each field.
fn layout_of_rust() -> String {
    let mut text = String::new();
    for capi::CStruct { name, size, fields, .. } in capi::structs() {
        text.push_str(&format!("{name} {size}\n"));
        for (field, offset, size) in fields {
            text.push_str(&format!("{name}.{field} {offset} {size}\n"));
        }
    }
    text
}

/// The structs that the header defines, in its order, with their fields.
fn structs_of_header() -> Vec<(String, Vec<String>)> {
    let mut structs: Vec<(String, Vec<String>)> = Vec::new();
    let mut inside = false;
    for line in headers().lines().map(str::trim).filter(|line| !line.starts_with("//")) {
        if let Some(name) = line.strip_prefix("typedef struct ").and_then(|rest| rest.strip_suffix(" {")) {
            structs.push((name.to_string(), Vec::new()));
            inside = true;
        } else if line.starts_with('}') {
            inside = false;
        } else if let (true, Some(field)) = (inside, line.strip_suffix(';')) {
            let name = field.rsplit([' ', '*']).next().expect("a field has a name");
            structs.last_mut().expect("inside one").1.push(name.to_string());
        }
    }
    structs
}

fn layout_of_c(compiler: &[&str]) -> String {
    let mut source =
        "#define SPW_EXPERIMENTAL\n#include <spillway.h>\n#include <spillway/plan.h>\n#include <spillway/stage.h>\n\
         #include <spillway/topo.h>\n#include <spillway/window.h>\n#include <stdio.h>\nint main(void) {\n"
            .to_string();
    for (name, fields) in structs_of_header() {
        source.push_str(&format!("printf(\"{name} %d\\n\", (int)sizeof({name}));\n"));
        for field in fields {
            source.push_str(&format!(
                "printf(\"{name}.{field} %d %d\\n\", (int)offsetof({name}, {field}), (int)sizeof((({name} *)0)->{field}));\n"
            ));
        }
    }
    source.push_str("return 0;\n}\n");
    let folder = empty_dir(&format!("layout-{}", compiler[0]));
    let (file, binary) = (folder.join("layout.c"), folder.join("layout"));
    fs::write(&file, source).expect("the target directory is writable");
    let mut build = Command::new(compiler[0]);
    build.args(&compiler[1..]).arg("-I").arg(root().join("include")).arg(&file).arg("-o").arg(&binary);
    succeed(&mut build, TIMEOUT);
    succeed(&mut Command::new(binary), TIMEOUT)
}

/// Sorts structs by name: Rust and C each list them in their own order.
fn sorted(layout: &str) -> String {
    let mut blocks: Vec<Vec<&str>> = Vec::new();
    for line in layout.lines() {
        let starts_struct = line.split(' ').next().is_some_and(|name| !name.contains('.'));
        if starts_struct {
            blocks.push(Vec::new());
        }
        blocks.last_mut().expect("a layout begins with a struct").push(line);
    }
    blocks.sort();
    blocks.concat().iter().map(|line| format!("{line}\n")).collect()
}

#[test]
fn rust_and_c_see_the_committed_layout() {
    let rust = sorted(&layout_of_rust());
    golden("layout.txt", &rust);
    assert_eq!(sorted(&layout_of_c(&["gcc", "-std=c99"])), rust, "C (left) and Rust");
    assert_eq!(sorted(&layout_of_c(&["g++", "-std=c++11", "-x", "c++"])), rust, "C++ (left) and Rust");
}
