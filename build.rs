//! Gives the shared library its SONAME, and tells the tests whether they may switch to another user.

/// `SPW_ABI_VERSION` of src/capi/base/version.rs; a test compares them.
const ABI_VERSION: u32 = 2;

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libspillway.so.{ABI_VERSION}");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(built_by_root)");
    use std::os::unix::fs::MetadataExt;
    if std::fs::metadata("/proc/self").is_ok_and(|found| found.uid() == 0) {
        println!("cargo::rustc-cfg=built_by_root");
    }
}
