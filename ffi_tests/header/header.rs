//! The committed header is what cbindgen makes of src/capi, and version numbers agree.
//!
//! `SPILLWAY_BLESS=1 cargo test -p spillway-header` writes the header anew.

use std::path::{Path, PathBuf};

/// The header: src/capi in the order of its module list. `version` is the library's.
pub fn generate(root: &Path, version: &str) -> String {
    let capi = root.join("src/capi");
    let list = std::fs::read_to_string(capi.join("mod.rs")).expect("src/capi/mod.rs exists");
    let modules = list.lines().filter_map(|line| line.strip_prefix("pub mod ")?.strip_suffix(';'));
    let sources: Vec<PathBuf> = modules.map(|name| capi.join(format!("{name}.rs"))).collect();
    let mut config = cbindgen::Config::from_root_or_default(root);
    config.after_includes = Some(format!("\n#define SPW_VERSION \"{}\"", version));
    let builder = cbindgen::Builder::new().with_config(config);
    let builder = sources.into_iter().fold(builder, cbindgen::Builder::with_src);
    let mut text = Vec::new();
    builder.generate().expect("cbindgen reads src/capi").write(&mut text);
    let text = String::from_utf8(text).expect("the header is text");
    text.replace("// # Safety\n// ", "// Requires: ").replace("\n\n\n", "\n\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
    }

    #[test]
    fn the_committed_header_is_generated_from_the_sources() {
        let generated = generate(&root(), spillway::VERSION);
        let path = root().join("include/spillway.h");
        if std::env::var_os("SPILLWAY_BLESS").is_some() {
            std::fs::write(&path, &generated).expect("include/spillway.h is writable");
        }
        let committed = std::fs::read_to_string(&path).expect("include/spillway.h exists");
        assert!(
            committed == generated,
            "include/spillway.h is stale: SPILLWAY_BLESS=1 cargo test -p spillway-header"
        );
    }

    #[test]
    fn the_soname_carries_the_abi_version() {
        let build = std::fs::read_to_string(root().join("build.rs")).expect("build.rs exists");
        let version = spillway::capi::library::SPW_ABI_VERSION;
        assert!(
            build.contains(&format!("const ABI_VERSION: u32 = {version};")),
            "build.rs and SPW_ABI_VERSION differ"
        );
    }
}
