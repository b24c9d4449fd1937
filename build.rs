//! Gives the shared library its SONAME.

/// `SPW_ABI_VERSION` of src/capi/library.rs; a test compares them.
const ABI_VERSION: u32 = 1;

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libspillway.so.{ABI_VERSION}");
    println!("cargo::rerun-if-changed=build.rs");
}
