//! Proves that each header compiles alone and included twice, in every C and C++ version. Also proves that the examples
//! in the headers compile; ffi_tests/rust/install.rs also runs the umbrella's example.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const C: [&str; 4] = ["c99", "c11", "c17", "c2x"];
const CPP: [&str; 4] = ["c++11", "c++14", "c++17", "c++20"];

fn include() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../include")
}

/// The include names of the umbrella and of the headers below it.
fn headers() -> Vec<String> {
    let folder = fs::read_dir(include().join("spillway")).expect("include/spillway exists");
    let names = folder.map(|entry| entry.expect("it is listed").file_name().to_string_lossy().into_owned());
    let mut headers: Vec<String> =
        names.filter(|name| name.ends_with(".h")).map(|name| format!("spillway/{name}")).collect();
    headers.push("spillway.h".to_string());
    headers.sort();
    assert!(headers.len() > 10, "{headers:?}");
    headers
}

/// The compilers of this machine, each with the name of its language. clang is optional.
fn compilers() -> Vec<(&'static str, &'static str, [&'static str; 4])> {
    let found = |program: &str| Command::new(program).arg("--version").output().is_ok();
    assert!(found("gcc") && found("g++"), "gcc and g++ are missing: run packaging/system_packages.sh");
    let all = [("gcc", "c", C), ("g++", "c++", CPP), ("clang", "c", C), ("clang++", "c++", CPP)];
    all.into_iter().filter(|(compiler, ..)| found(compiler)).collect()
}

const ACCEPT: &str = "#define SPW_EXPERIMENTAL\n";

/// What a program defines before it includes a header.
fn acceptance_of(header: &str) -> &'static str {
    let text = fs::read_to_string(include().join(header)).expect("headers are text");
    if text.contains("EXPERIMENTAL:") { ACCEPT } else { "" }
}

fn check(name: &str, compiler: &str, language: &str, standard: &str, text: &str, more: &[&str]) {
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::write(&file, text).expect("the target directory is writable");
    let mut build = Command::new(compiler);
    build.args(["-x", language, "-fsyntax-only", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]).args(more);
    build.arg(format!("-std={standard}")).arg("-I").arg(include()).arg(&file);
    let output = build.output().expect("the compiler starts");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{compiler} -std={standard}:\n{text}\n{errors}");
}

#[test]
fn the_opening_of_each_header_and_the_docs_name_the_oldest_standards_in_which_it_compiles() {
    let [c, cpp] = [C[0], CPP[0]].map(str::to_uppercase);
    let stated = format!("{c} or {cpp}, or newer");
    for header in headers() {
        let text = fs::read_to_string(include().join(&header)).expect("headers are text");
        let opening: Vec<&str> = text.lines().take_while(|line| line.starts_with("//")).collect();
        assert!(opening.iter().any(|line| line.contains(&stated)), "{header} does not say {stated}");
    }
    for page in ["c.md", "compatibility.md"] {
        let text = fs::read_to_string(include().join("../docs").join(page)).expect("the docs are text");
        assert!(text.contains(&stated), "docs/{page} does not say {stated}");
    }
}

#[test]
fn each_header_compiles_alone_and_twice_in_every_c_and_cpp() {
    for (compiler, language, standards) in compilers() {
        for standard in standards {
            for header in headers() {
                let once = format!("{}#include <{header}>\n", acceptance_of(&header));
                let main = "int main(void) { return (int)spw_abi_version(); }\n";
                let name = format!("alone-{compiler}.c");
                check(&name, compiler, language, standard, &format!("{once}{once}{main}"), &[]);
                check(&name, compiler, language, standard, &format!("{once}{main}"), &[]);
            }
        }
    }
}

#[test]
fn the_cpp_header_compiles_alone_and_twice_in_cpp_17_and_20() {
    for (compiler, language, standards) in
        compilers().into_iter().filter(|(_, language, _)| *language == "c++")
    {
        for standard in &standards[2..] {
            let main = "int main() { spillway::check_library(); }\n";
            for accept in ["", ACCEPT] {
                let once = format!("{accept}#include <spillway.hpp>\n");
                check("objects.cpp", compiler, language, standard, &format!("{once}{once}{main}"), &[]);
                check("objects.cpp", compiler, language, standard, &format!("{once}{main}"), &[]);
            }
        }
    }
}

#[test]
fn an_experimental_header_is_refused_without_its_macro() {
    let experimental: Vec<String> =
        headers().into_iter().filter(|header| !acceptance_of(header).is_empty()).collect();
    assert!(experimental.len() >= 6, "{experimental:?}");
    for header in experimental {
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("refused.c");
        fs::write(&file, format!("#include <{header}>\n")).expect("the target directory is writable");
        let mut build = Command::new("gcc");
        build.arg("-fsyntax-only").arg("-I").arg(include()).arg(&file);
        let output = build.output().expect("gcc starts");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && errors.contains("define SPW_EXPERIMENTAL"), "{header}: {errors}");
    }
}

#[test]
fn every_initialiser_names_every_field() {
    for (compiler, language, standards) in compilers() {
        for standard in standards {
            let mut text = "#define SPW_EXPERIMENTAL\n#include <spillway.h>\n#include <spillway/plan.h>\n\
                            #include <spillway/stage.h>\n#include <spillway/topo.h>\n#include <spillway/window.h>\n"
                .to_string();
            let mut count = 0;
            for header in headers() {
                let header = fs::read_to_string(include().join(header)).expect("headers are text");
                for line in header.lines() {
                    let Some(name) =
                        line.strip_prefix("#define ").and_then(|rest| rest.strip_suffix("_INIT \\"))
                    else {
                        continue;
                    };
                    let kind = name.to_lowercase();
                    text.push_str(&format!("{kind} make_{kind}(void);\n"));
                    text.push_str(&format!(
                        "{kind} make_{kind}(void) {{ {kind} x = {name}_INIT; return x; }}\n"
                    ));
                    count += 1;
                }
            }
            assert!(count > 40, "{count} initialisers");
            check(&format!("initialisers-{compiler}.c"), compiler, language, standard, &text, &["-Wshadow"]);
        }
    }
}

/// Declarations that the examples of the headers use but do not contain.
const PRELUDE: &str = "
#define SPW_EXPERIMENTAL
#include <spillway.h>
#include <spillway/plan.h>
#include <spillway/stage.h>
#include <spillway/topo.h>
#include <spillway/window.h>
#include <stdio.h>
extern spw_adam_options adam;
extern spw_tensor tensor, tensors[9];
extern void *master_weight, *grad, *exp_avg, *exp_avg_sq, *model_weight, *buffer, *pinned_grad;
extern uint64_t n, steps, bytes, count, stream, device_grad;
extern uint32_t buckets;
extern double max_norm;
extern char state[100];
extern const uint64_t *elements;
extern const float *const *states;
extern spw_tier *tier;
extern const spw_gpu *gpu;
extern spw_interleave_subgroup *subgroups;
extern uint32_t placements[24];
extern spw_interleave_rates rates;
extern spw_pinned_options pinned_options;
extern uint32_t local_rank;
extern void *weights[24];
void forward(uint32_t, uint64_t, uint64_t);
void optimize(void *);
int example(void);
int example(void) {
";

#[test]
fn the_example_of_each_header_compiles() {
    for header in headers().into_iter().filter(|header| header != "spillway.h") {
        let text = fs::read_to_string(include().join(&header)).expect("headers are text");
        let comment = text.lines().take_while(|line| line.starts_with("//"));
        let code: Vec<&str> = comment.filter_map(|line| line.strip_prefix("//     ")).collect();
        assert!(!code.is_empty(), "{header} has an example");
        let text = format!("{PRELUDE}{}\nreturn 0;\n}}\n", code.join("\n"));
        let unused = ["-Wno-unused-variable", "-Wno-unused-but-set-variable"];
        check("example.c", "gcc", "c", "c99", &text, &unused);
        check("example.cpp", "g++", "c++", "c++17", &text, &unused);
    }
}
