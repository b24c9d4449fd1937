//! Compiles the kernels that are written in C.

const HEADERS: [&str; 3] = ["adam.h", "log_sve.h", "sve.h"];
const SVE: [&str; 2] = ["adam_sve.c", "undo_sve.c"];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_ARCH").is_ok_and(|arch| arch == "aarch64") {
        for file in HEADERS.iter().chain(&SVE) {
            println!("cargo::rerun-if-changed={file}");
        }
        sve("-march=armv8.2-a+sve").compile("spillway_sve");
        sve("-march=armv8.6-a+sve+bf16").define("USE_BFCVT", None).compile("spillway_sve_bf16");
    }
}

/// The flags are part of the arithmetic: a contracted multiply and add would round once where every other kernel
/// rounds twice.
fn sve(march: &str) -> cc::Build {
    let mut build = cc::Build::new();
    build.files(SVE).no_default_flags(true).warnings_into_errors(true);
    for flag in
        ["-O3", "-std=gnu11", "-fPIC", "-Wall", "-Wextra", "-ffp-contract=off", "-fno-math-errno", march]
    {
        build.flag(flag);
    }
    build
}
