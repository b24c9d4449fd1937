//! Proves that the C interface still is the frozen one, with additions at most.
//!
//! `ffi_tests/abi/frozen/VERSION` stores the interface of SPW_ABI_VERSION on the day of its freeze: headers, exports,
//! sizes and offsets, enum values, and programs. No test writes there. The tests compare it with the present headers
//! and library, compile its programs with its headers, and run them with the present library. Further tests show that
//! each rule refuses the changes that it must refuse. The experimental headers plan.h and topo.h are not
//! frozen.

mod changes;
mod face;
mod rules;
#[path = "../support/mod.rs"]
mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use changes::{CHANGES, Change};
use face::Face;
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use spillway::capi;
use support::{Finished, empty_dir, exists, exports, install, release_library, root, run, succeed};

const TIMEOUT: Duration = Duration::from_secs(120);

type Outcome = Result<Completion, Failed>;

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let mut trials = vec![
        test("the_frozen_folder_is_unchanged", the_frozen_folder_is_unchanged),
        test("freeze_refuses_a_stored_version", freeze_refuses_a_stored_version),
        test("the_frozen_lists_are_those_of_the_frozen_headers", the_lists_are_those_of_the_headers),
        test("every_frozen_function_is_exported", || {
            let present = Face { exports: exports(), ..frozen() };
            no_faults(rules::exports(&frozen(), &present))
        }),
        test("structs_only_grew_at_their_end", || no_faults(rules::layout(&frozen(), &present("layout")))),
        test("every_frozen_struct_size_is_accepted", || {
            no_faults(rules::smallest_sizes(&frozen(), &smallest_sizes()))
        }),
        test("enum_values_were_only_added", || no_faults(rules::enums(&frozen(), &present("enums")))),
        test("types_are_the_frozen_ones", || {
            let work = empty_dir("frozen-types");
            no_faults(rules::types(&frozen(), &present("types-face"), &work))
        }),
        test("abidiff_reports_nothing", || {
            with_abidiff(|| {
                no_faults(rules::abidiff(&frozen(), &present("abidiff"), &empty_dir("frozen-stubs")))
            })
        }),
        test("the_soname_is_the_frozen_version", the_soname_is_the_frozen_version),
        test("refuses_what_no_header_shows", refuses_what_no_header_shows),
        test("sizes_crashes_behind_a_struct", sizes_crashes_behind_a_struct),
    ];
    for change in &CHANGES {
        trials.push(test(&format!("refuses::{}", change.name), || refuses(change)));
        trials.push(test(&format!("abidiff::{}", change.name), || with_abidiff(|| reports(change))));
    }
    for program in programs() {
        let name = program.file_stem().expect("it is a file").to_string_lossy().into_owned();
        trials.push(test(&format!("runs::{name}"), move || runs(&name, &program)));
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn test(name: &str, body: impl FnOnce() -> Outcome + Send + 'static) -> Trial {
    Trial::ignorable_test(name, body)
}

/// The folder of the frozen interface of the present SPW_ABI_VERSION.
fn folder() -> PathBuf {
    let folder = root().join(format!("ffi_tests/abi/frozen/{}", capi::base::SPW_ABI_VERSION));
    assert!(folder.exists(), "{folder:?} is missing: ffi_tests/abi/freeze.sh stores a new SPW_ABI_VERSION");
    folder
}

fn frozen() -> Face {
    Face::stored(&folder())
}

fn present(work: &str) -> Face {
    Face::declared(&root().join("include"), &empty_dir(&format!("frozen-{work}")))
}

fn no_faults(faults: Vec<String>) -> Outcome {
    match faults.is_empty() {
        true => Ok(Completion::Completed),
        false => Err(format!("the frozen interface is broken:\n{}", faults.join("\n")).into()),
    }
}

fn with_abidiff(body: impl FnOnce() -> Outcome) -> Outcome {
    match exists("abidiff") {
        true => body(),
        false => Ok(Completion::ignored_with("abidiff is missing: run packaging/system_packages.sh")),
    }
}

/// The smallest `struct_size` that the library accepts for each struct.
fn smallest_sizes() -> BTreeMap<String, u64> {
    let mut sizes = BTreeMap::new();
    capi::visit_structs(|name, _, smallest, _| {
        sizes.insert(name.to_string(), smallest as u64);
    });
    sizes
}

/// A rename across the whole tree, for example, would change the frozen headers too.
fn the_frozen_folder_is_unchanged() -> Outcome {
    let mut check = Command::new("sha256sum");
    succeed(check.args(["--check", "--strict", "--quiet", "SHA256SUMS"]).current_dir(folder()), TIMEOUT);
    let sums = fs::read_to_string(folder().join("SHA256SUMS")).expect("it was just read");
    let listed: BTreeSet<&str> = sums.lines().filter_map(|line| line.split("  ").nth(1)).collect();
    let mut find = Command::new("find");
    find.args([".", "-type", "f", "!", "-name", "SHA256SUMS"]).current_dir(folder());
    let found = succeed(&mut find, TIMEOUT);
    assert_eq!(found.lines().collect::<BTreeSet<&str>>(), listed, "files (left) and SHA256SUMS");
    Ok(Completion::Completed)
}

fn freeze_refuses_a_stored_version() -> Outcome {
    folder();
    let finished = run(Command::new("sh").arg(root().join("ffi_tests/abi/freeze.sh")), TIMEOUT);
    assert_eq!(finished.code, Some(1));
    assert!(finished.stderr.contains("is never stored again"), "{}", finished.stderr);
    Ok(Completion::Completed)
}

fn the_lists_are_those_of_the_headers() -> Outcome {
    let stored = frozen();
    let declared = Face::declared(&stored.include, &empty_dir("frozen-lists"));
    assert!(stored.exports.len() > 100 && stored.layout.len() > 300 && stored.enums.len() > 100);
    assert_eq!(stored.exports, declared.exports);
    assert_eq!(stored.layout, declared.layout);
    assert_eq!(stored.enums, declared.enums);
    Ok(Completion::Completed)
}

fn the_soname_is_the_frozen_version() -> Outcome {
    let dynamic = succeed(Command::new("readelf").arg("-d").arg(release_library()), TIMEOUT);
    let name = format!("soname: [libspillway.so.{}]", capi::base::SPW_ABI_VERSION);
    assert!(dynamic.contains(&name), "{name} is missing:\n{dynamic}");
    Ok(Completion::Completed)
}

/// The frozen headers with one change, and the rules that refuse it.
fn refuses(change: &Change) -> Outcome {
    let frozen = frozen();
    let work = empty_dir(&format!("frozen-refuses-{}", change.name));
    let changed = Face::declared(&change.apply(&frozen.include, &work), &work);
    let faults = [
        ("exports", rules::exports(&frozen, &changed)),
        ("layout", rules::layout(&frozen, &changed)),
        ("enums", rules::enums(&frozen, &changed)),
        ("types", rules::types(&frozen, &changed, &work)),
    ];
    let refused: Vec<&str> =
        faults.iter().filter(|(_, faults)| !faults.is_empty()).map(|(rule, _)| *rule).collect();
    assert_eq!(refused, change.refused_by, "{faults:?}");
    Ok(Completion::Completed)
}

fn reports(change: &Change) -> Outcome {
    let frozen = frozen();
    let work = empty_dir(&format!("frozen-abidiff-{}", change.name));
    let changed = Face::declared(&change.apply(&frozen.include, &work), &work);
    let faults = rules::abidiff(&frozen, &changed, &work);
    assert_eq!(!faults.is_empty(), change.reported, "{faults:?}");
    Ok(Completion::Completed)
}

/// Cases: a struct without struct_size grows, a field is placed in former padding, or a library requires more
/// than the frozen size.
fn refuses_what_no_header_shows() -> Outcome {
    let layout = |lines: &[(&str, &[u64])]| Face {
        layout: lines.iter().map(|(name, numbers)| (name.to_string(), numbers.to_vec())).collect(),
        ..frozen()
    };
    let old = layout(&[("pair", &[8]), ("pair.first", &[0, 8])]);
    let grown = layout(&[("pair", &[16]), ("pair.first", &[0, 8]), ("pair.second", &[8, 8])]);
    assert_eq!(rules::layout(&old, &grown), ["pair grew, and has no struct_size"]);
    let old = layout(&[("sized", &[16]), ("sized.struct_size", &[0, 4]), ("sized.value", &[8, 8])]);
    let mut filled = old.clone();
    filled.layout.insert("sized.padding".to_string(), vec![4, 4]);
    assert_eq!(
        rules::layout(&old, &filled),
        ["sized.padding was added inside the frozen part of its struct"]
    );
    assert_eq!(rules::layout(&old, &old), [""; 0]);

    let mut sizes = smallest_sizes();
    sizes.insert("spw_tensor".to_string(), frozen().layout["spw_tensor"][0] + 8);
    assert_eq!(rules::smallest_sizes(&frozen(), &sizes).len(), 1);
    Ok(Completion::Completed)
}

fn programs() -> Vec<PathBuf> {
    let entries = fs::read_dir(folder().join("programs")).expect("the frozen folder has programs");
    let mut programs: Vec<PathBuf> =
        entries.map(|entry| entry.expect("its entries can be read").path()).collect();
    programs.sort();
    programs
}

/// Compiles a frozen program with the frozen headers, and runs it with the present library.
fn runs(name: &str, program: &Path) -> Outcome {
    let finished = compiled_and_run(name, program, &[]);
    match (finished.code, finished.stderr.as_str()) {
        (Some(0), "") => Ok(Completion::Completed),
        (code, _) => Err(format!("exit status {code:?}\n{}{}", finished.stdout, finished.stderr).into()),
    }
}

/// The program of struct sizes crashes if the library accesses memory past the end of a struct.
fn sizes_crashes_behind_a_struct() -> Outcome {
    let program = folder().join("programs/sizes.c");
    let finished = compiled_and_run("sizes-behind", &program, &["-DBEHIND=8"]);
    assert_eq!(finished.code, None, "a signal ends it: {}{}", finished.stdout, finished.stderr);
    Ok(Completion::Completed)
}

fn compiled_and_run(name: &str, program: &Path, options: &[&str]) -> Finished {
    let work = empty_dir(&format!("frozen-runs-{name}"));
    install(release_library(), &work);
    let (binary, libraries) = (work.join("program"), work.join("lib"));
    let mut gcc = Command::new("gcc");
    gcc.args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-I"]).arg(folder().join("include"));
    gcc.args(options)
        .arg(program)
        .arg("-o")
        .arg(&binary)
        .arg("-L")
        .arg(&libraries)
        .args(["-lspillway", "-lm"]);
    succeed(gcc.arg(format!("-Wl,-rpath,{}", libraries.display())), TIMEOUT);
    let mut command = Command::new(&binary);
    for name in ["SPILLWAY_KERNEL", "SPILLWAY_LOG", "SPILLWAY_NUM_THREADS", "LOCAL_WORLD_SIZE", "LD_PRELOAD"]
    {
        command.env_remove(name);
    }
    run(command.current_dir(&work), TIMEOUT)
}
