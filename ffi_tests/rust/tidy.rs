//! Proves the rules of the source tree: the order of the layers, no circles between files, `unsafe` in few modules, the
//! length of files, no unfinished code, no path of one machine. A last test shows that each rule reports a fault that
//! it must report.

#[path = "support/circles.rs"]
mod circles;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Lowest first; modules of one layer do not import each other.
const LAYERS: [&[&str]; 8] = [
    &["error", "environment", "dtype", "log", "stats", "trace", "checksum"],
    &["sys", "kernel"],
    &["optim", "pool"],
    &["io", "gpu", "arena"],
    &["tier"],
    &["offload"],
    &["capi"],
    &["lib"],
];
/// Modules of the lowest layer that every layer may use, the lowest included: an error is part of every signature, and
/// variables of the environment are read in one place.
const VOCABULARY: [&str; 2] = ["error", "environment"];
/// Constants of lib.rs that any module may name.
const CRATE_CONSTANTS: [&str; 1] = ["VERSION"];
const MAY_BE_UNSAFE: [&str; 6] = ["environment", "sys", "kernel", "pool", "gpu", "capi"];
/// The ring, and tests that lend the engine their own memory. A lint in the two mod.rs would also apply to these files.
const MAY_BE_UNSAFE_FILES: [&str; 4] = ["io/uring.rs", "io/mod.rs", "io/tests/mod.rs", "io/tests/real.rs"];
const MOST_LINES: usize = 800;

fn layer(module: &str) -> Option<usize> {
    LAYERS.iter().position(|modules| modules.contains(&module))
}

/// The module of a file under src: the first folder, or the file itself.
fn module_of(path: &str) -> &str {
    let first = path.split('/').next().unwrap_or(path);
    first.strip_suffix(".rs").unwrap_or(first)
}

/// Lines without comments, numbered from 1.
fn code(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = text.lines().enumerate().map(|(index, line)| (index + 1, line));
    lines.map(|(number, line)| (number, line.split("//").next().unwrap_or(line)))
}

/// Modules named after `crate::`, a list in braces included.
fn modules_used(line: &str) -> Vec<String> {
    let mut used = Vec::new();
    for rest in line.split("crate::").skip(1) {
        let names = match rest.strip_prefix('{') {
            Some(list) => list.split('}').next().unwrap_or(list).split(',').collect(),
            None => vec![rest],
        };
        for name in names {
            let name: String = name.trim().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            if !name.is_empty() && !CRATE_CONSTANTS.contains(&name.as_str()) {
                used.push(name);
            }
        }
    }
    used
}

/// The layer faults of one file. In the kernels, the planner, the stores and the tool, `crate` means their own crate.
fn layer_faults(path: &str, text: &str) -> Vec<String> {
    let module = module_of(path);
    if matches!(module, "kernel" | "planner" | "stores" | "cli") {
        return Vec::new();
    }
    let Some(own) = layer(module) else { return vec![format!("{path}: {module} is in no layer")] };
    let mut faults = Vec::new();
    for (number, line) in code(text) {
        for used in modules_used(line).into_iter().filter(|used| used != module) {
            let allowed = match layer(&used) {
                Some(other) => other < own || own == 0 && VOCABULARY.contains(&used.as_str()),
                None => false,
            };
            if !allowed {
                faults.push(format!("{path}:{number}: {module} may not use {used}"));
            }
        }
    }
    faults
}

/// The faults of one file in its use of `unsafe`.
fn unsafe_faults(path: &str, text: &str) -> Vec<String> {
    let module = module_of(path);
    if MAY_BE_UNSAFE.contains(&module) || MAY_BE_UNSAFE_FILES.contains(&path) || module == "lib" {
        return Vec::new();
    }
    let after_docs = text.lines().find(|line| !line.starts_with("//!") && !line.trim().is_empty());
    match after_docs {
        Some("#![forbid(unsafe_code)]") => Vec::new(),
        _ => vec![format!("{path}: does not begin with #![forbid(unsafe_code)] after its docs")],
    }
}

/// Finds files that are too long, unfinished code, and printing outside the log.
fn text_faults(path: &str, text: &str) -> Vec<String> {
    let mut faults = Vec::new();
    let lines = text.lines().count();
    if lines > MOST_LINES {
        faults.push(format!("{path}: {lines} lines, at most {MOST_LINES}"));
    }
    let unfinished = ["todo!", "unimplemented!", "dbg!"];
    let printing = ["println!", "eprintln!", "print!(", "eprint!("];
    for (number, line) in code(text) {
        for word in unfinished.iter().chain(printing.iter().filter(|_| module_of(path) != "cli")) {
            if line.contains(word) {
                faults.push(format!("{path}:{number}: {word}"));
            }
        }
    }
    for (number, line) in text.lines().enumerate() {
        if ["TODO", "FIXME", "XXX"].iter().any(|word| line.contains(word)) {
            faults.push(format!("{path}:{}: unfinished: {}", number + 1, line.trim()));
        }
    }
    faults
}

/// Finds names of the C interface below it. The kernels of the GPU have such names of their own.
fn border_faults(path: &str, text: &str) -> Vec<String> {
    if module_of(path) == "capi" || path.contains("tests") || path == "gpu/kernels.rs" {
        return Vec::new();
    }
    let lines = code(text).filter(|(_, line)| ["spw_", "SPW_"].iter().any(|name| line.contains(name)));
    lines
        .map(|(number, line)| format!("{path}:{number}: a name of the C interface: {}", line.trim()))
        .collect()
}

/// Finds reads of the environment outside of the one place, which ignores it in a program with more rights than its caller.
/// Tests may read variables of their own.
fn environment_faults(path: &str, text: &str) -> Vec<String> {
    if path.ends_with("environment.rs") || path.contains("tests") {
        return Vec::new();
    }
    let reads = ["env::var", "getenv", "temp_dir()", "home_dir()"];
    let product = |line: &str| reads.iter().any(|read| line.contains(read));
    let own = text.split("mod tests {").next().unwrap_or(text);
    let lines = code(own).filter(|(_, line)| product(line));
    lines.map(|(number, line)| format!("{path}:{number}: reads the environment: {}", line.trim())).collect()
}

/// Finds files of the library that make descriptors without `sys::descriptor`, which keeps them off the standard streams.
fn descriptor_faults(path: &str, text: &str) -> Vec<String> {
    const MAKERS: [&str; 10] = [
        "OpenOptions::new",
        "File::options",
        "File::create",
        "memfd_create(",
        "openat(",
        "eventfd(",
        "from_flags(",
        "pipe2(",
        "io::pipe",
        "socket(",
    ];
    if path.contains("tests") || module_of(path) == "cli" {
        return Vec::new();
    }
    let own = text.split("mod tests {").next().unwrap_or(text);
    let uses = code(own).any(|(_, line)| line.contains("descriptor::") || line.contains("fn moved"));
    let lines = code(own).filter(|(_, line)| !uses && MAKERS.iter().any(|maker| line.contains(maker)));
    lines.map(|(number, line)| format!("{path}:{number}: makes a descriptor: {}", line.trim())).collect()
}

/// Finds threads of the library that take the program's signals: all are started in one place, which blocks them.
fn thread_faults(path: &str, text: &str) -> Vec<String> {
    const STARTS: [&str; 4] = ["thread::spawn", "thread::Builder", "scope.spawn(", "ThreadPoolBuilder::new"];
    if path.contains("tests") || module_of(path) == "cli" || matches!(path, "sys/threads.rs" | "sys/team.rs")
    {
        return Vec::new();
    }
    let own = text.split("mod tests {").next().unwrap_or(text);
    let lines = code(own).filter(|(_, line)| STARTS.iter().any(|start| line.contains(start)));
    lines.map(|(number, line)| format!("{path}:{number}: starts a thread: {}", line.trim())).collect()
}

/// Paths that exist on one machine only. Each word is split in two here, so that this file passes its own rule.
fn machine_faults(path: &str, text: &str) -> Vec<String> {
    let places = [concat!("/wo", "rk/"), concat!("/ro", "ot/"), concat!("/ho", "me/"), concat!("/tm", "p/")];
    let mut faults = Vec::new();
    for (number, line) in text.lines().enumerate() {
        if places.iter().any(|place| line.contains(place)) {
            faults.push(format!("{path}:{}: a path of one machine: {}", number + 1, line.trim()));
        }
    }
    faults
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every Rust file of the library, as its path under src and its text; the crates of the kernels, the
/// planner, the stores and the tool are modules of their names; a test double is part of the module whose place it takes.
fn sources() -> Vec<(String, String)> {
    let mut found = files("src", "");
    found.extend(files("kernels/src", "kernel/"));
    found.extend(files("planner/src", "planner/"));
    found.extend(files("stores/src", "stores/"));
    found.extend(files("cli/src", "cli/"));
    found.extend(files("ffi_tests/doubles", ""));
    found
}

/// Every Rust file under `folder`, as `prefix` joined with its path below the folder, and its text.
fn files(folder: &str, prefix: &str) -> Vec<(String, String)> {
    fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).expect("src can be read") {
            let path = entry.expect("its entries can be read").path();
            if path.is_dir() { walk(&path, found) } else { found.push(path) }
        }
    }
    let src = root().join(folder);
    let mut found = Vec::new();
    walk(&src, &mut found);
    found.retain(|path| path.extension().is_some_and(|extension| extension == "rs"));
    found.sort();
    let read = |path: PathBuf| {
        let name = path.strip_prefix(&src).expect("found there").to_string_lossy();
        (format!("{prefix}{name}"), fs::read_to_string(&path).expect("sources are text"))
    };
    found.into_iter().map(read).collect()
}

/// The folders of all crates of the workspace, this one included.
fn crates() -> Vec<String> {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).expect("the workspace has a manifest");
    let list = manifest.lines().find_map(|line| line.strip_prefix("members = [")?.strip_suffix(']'));
    let members =
        list.expect("the list of members is one line").split(", ").map(|name| name.trim_matches('"'));
    std::iter::once(".").chain(members).map(String::from).collect()
}

fn no_faults(check: fn(&str, &str) -> Vec<String>) {
    let sources = sources();
    assert!(sources.len() > 20, "{} sources", sources.len());
    let faults: Vec<String> = sources.iter().flat_map(|(path, text)| check(path, text)).collect();
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
}

#[test]
fn modules_use_only_lower_layers() {
    no_faults(layer_faults);
}

#[test]
fn unsafe_stands_only_where_it_may() {
    no_faults(unsafe_faults);
}

#[test]
fn sources_are_finished_short_and_silent() {
    no_faults(text_faults);
}

#[test]
fn names_of_the_c_interface_stand_in_it_alone() {
    no_faults(border_faults);
}

#[test]
fn the_environment_is_read_in_one_place() {
    no_faults(environment_faults);
    let preload = files("packaging/preload/src", "preload/");
    assert!(preload.len() > 10, "{} files", preload.len());
    let faults: Vec<String> =
        preload.iter().flat_map(|(path, text)| environment_faults(path, text)).collect();
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
}

#[test]
fn descriptors_and_threads_are_made_in_one_place() {
    no_faults(descriptor_faults);
    no_faults(thread_faults);
}

#[test]
fn no_two_files_import_each_other_in_a_circle() {
    let (mut found, mut count) = (Vec::new(), 0);
    for folder in crates() {
        let src = if root().join(&folder).join("src").is_dir() { format!("{folder}/src") } else { folder };
        let mut files = files(&src, "");
        files.retain(|(path, _)| !path.contains("tests"));
        assert!(!files.is_empty(), "no files in {src}");
        count += files.len();
        found.extend(circles::circles(&files).into_iter().map(|circle| format!("{src}: {circle}")));
    }
    assert!(count > 400, "{count} files");
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

#[test]
fn every_module_of_lib_rs_has_a_layer() {
    let lib = fs::read_to_string(root().join("src/lib.rs")).expect("src/lib.rs exists");
    let modules: Vec<&str> =
        lib.lines().filter_map(|line| line.strip_prefix("pub mod ")?.strip_suffix(';')).collect();
    assert!(!modules.is_empty());
    let layers: Vec<usize> = modules
        .iter()
        .map(|module| layer(module).unwrap_or_else(|| panic!("{module} has no layer")))
        .collect();
    assert!(layers.is_sorted(), "lib.rs lists its modules in the order of their layers: {modules:?}");
}

#[test]
fn nothing_committed_names_a_place_of_one_machine() {
    let mut list = Command::new("git");
    list.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]);
    let output = list.current_dir(root()).output().expect("git is missing: install it");
    assert!(output.status.success(), "the rules hold for a git checkout: {output:?}");
    let names = String::from_utf8(output.stdout).expect("file names are UTF-8");
    let files: Vec<&str> = names.split('\0').filter(|name| !name.is_empty()).collect();
    assert!(files.len() > 20, "{} files", files.len());
    let mut faults = Vec::new();
    for name in files {
        if let Ok(text) = fs::read_to_string(root().join(name)) {
            faults.extend(machine_faults(name, &text));
        }
    }
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
}

#[test]
fn the_rules_refuse_what_breaks_them() {
    let bad_layers = [
        ("error.rs", "use crate::log;"),
        ("sys/mod.rs", "use crate::kernel::Kernel;"),
        ("sys/mod.rs", "    crate::optim::adam::step(x)"),
        ("optim/adam.rs", "use crate::{error::Error, capi};"),
        ("log.rs", "use crate::stats;"),
        ("optim/adam.rs", "use crate::utils::helper;"),
        ("utils.rs", ""),
    ];
    for (path, text) in bad_layers {
        assert_eq!(layer_faults(path, text).len(), 1, "{path}: {text}");
    }
    for (path, text) in [
        ("optim/adam.rs", "use crate::{error::Error, kernel};"),
        ("optim/adam.rs", "use crate::optim::parallel;"),
        ("optim/adam.rs", "// use crate::capi"),
        ("checksum.rs", "use crate::error::Result;"),
        ("capi/record.rs", "crate::VERSION"),
    ] {
        assert_eq!(layer_faults(path, text), [""; 0], "{path}: {text}");
    }

    assert_eq!(border_faults("tier/volume.rs", "\"use spw_tier_collect\" // as SPW_X").len(), 1);
    assert_eq!(border_faults("capi/undo.rs", "spw_undo"), [""; 0]);

    let good = "//! Docs.\n#![forbid(unsafe_code)]\n";
    assert_eq!(unsafe_faults("optim/adam.rs", good), [""; 0]);
    assert_eq!(unsafe_faults("kernel/avx2.rs", "//! Docs.\n"), [""; 0]);
    assert_eq!(unsafe_faults("optim/adam.rs", "//! Docs.\nuse std::fmt;\n").len(), 1);
    assert_eq!(unsafe_faults("io/engine.rs", "//! Docs.\n").len(), 1);

    let bad_texts =
        ["todo!()", "unimplemented!()", "    println!(\"x\")", "let x = dbg!(y);", "// TODO: later"];
    for text in bad_texts {
        assert_eq!(text_faults("optim/adam.rs", text).len(), 1, "{text}");
    }
    assert_eq!(text_faults("cli/main.rs", "println!()"), [""; 0]);
    assert_eq!(text_faults("optim/adam.rs", &"\n".repeat(MOST_LINES + 1)).len(), 1);
    assert_eq!(text_faults("optim/adam.rs", &"\n".repeat(MOST_LINES)), [""; 0]);

    let tests = "#[cfg(test)]\nmod tests {\n";
    for line in ["std::env::var(\"A\")", "env::var_os(name)", "libc::getenv(name)", "std::env::temp_dir()"] {
        assert_eq!(environment_faults("io/options.rs", line).len(), 1, "{line}");
        assert_eq!(environment_faults("environment.rs", line), [""; 0]);
        assert_eq!(environment_faults("io/options.rs", &format!("{tests}{line}")), [""; 0]);
    }
    assert_eq!(descriptor_faults("io/file.rs", "OpenOptions::new().open(path)").len(), 1);
    assert_eq!(descriptor_faults("io/file.rs", "descriptor::open(&OpenOptions::new(), path)"), [""; 0]);
    assert_eq!(thread_faults("io/file.rs", "std::thread::spawn(|| ())").len(), 1);
    assert_eq!(thread_faults("io/file.rs", &format!("{tests}std::thread::spawn(|| ())")), [""; 0]);

    let files = |texts: &[(&str, &str)]| -> Vec<(String, String)> {
        texts.iter().map(|(path, text)| (path.to_string(), text.to_string())).collect()
    };
    let round = files(&[
        ("a/mod.rs", "mod b; mod c;"),
        ("a/b.rs", "use super::{c::{self, One}, d};\nuse crate::e::Two;"),
        ("a/c.rs", "fn f() { crate::e::g() }"),
        ("e.rs", "use crate::a::b;\n"),
    ]);
    assert_eq!(circles::circles(&round), ["a::b, a::c, e"]);
    let straight = files(&[
        ("a/mod.rs", "pub use b::X;"),
        ("a/b.rs", "use crate::e::Two;"),
        ("e.rs", "// use crate::a::b;\n#[cfg(test)]\nmod tests { use crate::a::b; }"),
    ]);
    assert_eq!(circles::circles(&straight), [""; 0]);
    let folder =
        files(&[("a/mod.rs", "mod b; pub struct A; fn f() { b::g() }"), ("a/b.rs", "use super::A;")]);
    assert_eq!(circles::circles(&folder), ["a, a::b"]);
    let passed_on = files(&[
        ("a/mod.rs", "mod b; mod c; pub use b::{B, X}; pub use c::C;"),
        ("a/b.rs", "use super::C;"),
        ("a/c.rs", "use super::B;"),
    ]);
    assert_eq!(circles::circles(&passed_on), ["a::b, a::c"]);

    let place = concat!("cd /ro", "ot/x");
    assert_eq!(machine_faults("README.md", place).len(), 1);
    assert_eq!(machine_faults("README.md", "cd packaging/python"), [""; 0]);
}
