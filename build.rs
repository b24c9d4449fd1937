//! Gives the shared library its SONAME, and compiles the kernels that are written in C.

/// `SPW_ABI_VERSION` of src/capi/library.rs; a test compares them.
const ABI_VERSION: u32 = 1;
const HEADERS: [&str; 3] = ["kernels/adam.h", "kernels/log_sve.h", "kernels/sve.h"];
const SVE: [&str; 2] = ["kernels/adam_sve.c", "kernels/undo_sve.c"];

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libspillway.so.{ABI_VERSION}");
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
