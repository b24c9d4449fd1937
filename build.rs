//! Gives the shared library its SONAME, and compiles the kernels that are written in C.

/// `SPW_ABI_VERSION` of src/capi/library.rs; a test compares them.
const ABI_VERSION: u32 = 1;

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libspillway.so.{ABI_VERSION}");
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_ARCH").is_ok_and(|arch| arch == "aarch64") {
        println!("cargo::rerun-if-changed=kernels/adam.h");
        println!("cargo::rerun-if-changed=kernels/adam_sve.c");
        adam_sve("-march=armv8.2-a+sve").compile("spillway_adam_sve");
        adam_sve("-march=armv8.6-a+sve+bf16").define("USE_BFCVT", None).compile("spillway_adam_sve_bf16");
    }
}

/// The flags are part of the arithmetic: a contracted multiply and add would round once where every other kernel
/// rounds twice.
fn adam_sve(march: &str) -> cc::Build {
    let mut build = cc::Build::new();
    build.file("kernels/adam_sve.c").no_default_flags(true).warnings_into_errors(true);
    for flag in
        ["-O3", "-std=gnu11", "-fPIC", "-Wall", "-Wextra", "-ffp-contract=off", "-fno-math-errno", march]
    {
        build.flag(flag);
    }
    build
}
