//! Proves that the compiler turns kernels/*.cu into the committed PTX, that drivers from 525 accept it, and that it
//! contains no approximate instruction.

use std::fs;
use std::path::Path;
use std::process::Command;

const MODULES: [&str; 3] = ["cast", "adam", "narrow"];

fn read(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels").join(name);
    fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn ptx(module: &str) -> String {
    String::from_utf8(read(&format!("{module}.ptx"))).expect("PTX is text")
}

#[test]
fn committed_ptx_names_the_hash_of_its_source() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for module in MODULES {
        let text = ptx(module);
        let line = text.lines().next().unwrap_or_default();
        let (_, files) = line.rsplit_once(" of ").expect("the first line names the sources");
        let source: Vec<u8> = files.split(", ").flat_map(read).collect();
        let file = folder.path().join(module);
        fs::write(&file, source).expect("the folder is writable");
        let output = Command::new("sha256sum").arg(&file).output().expect("sha256sum is installed");
        let hash = String::from_utf8_lossy(&output.stdout).split(' ').next().unwrap_or_default().to_string();
        assert_eq!(hash.len(), 64);
        let named = text.lines().find_map(|line| line.strip_prefix("// sha256 "));
        assert_eq!(named, Some(hash.as_str()), "{module}.ptx is stale: run kernels/ptx.py");
    }
}

/// The hash test above fails if the sources changed. This test downloads the compiler once.
#[test]
fn committed_ptx_is_what_the_compiler_makes_of_its_source() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/ptx.py");
    let output = Command::new("python3").arg(script).arg("--check").output();
    let output = output.expect("python3 is missing: run packaging/system_packages.sh");
    let words = String::from_utf8_lossy(&output.stdout);
    match output.status.code() {
        Some(0) => {}
        Some(77) => panic!("pip cannot download NVIDIA's compiler: allow access to PyPI once; {words}"),
        code => panic!("{code:?}: {words}{}", String::from_utf8_lossy(&output.stderr)),
    }
}

#[test]
fn committed_ptx_is_for_drivers_from_525_and_rounds_to_nearest_everywhere() {
    for module in MODULES {
        let text = ptx(module);
        let directives: Vec<&str> = text.lines().filter(|line| line.starts_with('.')).take(3).collect();
        assert_eq!(directives, [".version 8.0", ".target sm_70", ".address_size 64"]);
        for line in text.lines() {
            for word in [".ftz", ".approx", ".sat", ".full", "rcp", "rsqrt", ".local", "call"] {
                assert!(!line.contains(word), "{module}: {line}");
            }
            let name = line.split_whitespace().find(|word| !word.starts_with('@')).unwrap_or_default();
            let computes = ["add", "sub", "mul", "fma", "div", "sqrt"]
                .iter()
                .any(|op| name.starts_with(&format!("{op}.")));
            if computes && (name.ends_with("f32") || name.ends_with("f64")) {
                assert!(name.contains(".rn."), "{module}: {line}");
            }
        }
        // The fake driver's parser is stricter: it refuses every instruction that it does not know.
        let parsed = fakecuda::ptx::Module::parse(&text).expect("every instruction is known");
        let kernels = match module {
            "cast" => 4,
            "adam" => 17 + 4 + 3 + 1,
            _ => 9 + 2 + 4,
        };
        assert_eq!(parsed.names().len(), kernels, "{:?}", parsed.names());
    }
}

#[test]
fn copies_of_sixteen_bytes_are_one_instruction() {
    let wide = |text: &str, kind: &str| text.matches(&format!("{kind}.global.v4.")).count();
    let text = ptx("adam");
    // A step of f32 with bf16 gradient and copy has three spans with two loads each and one span with one load. It has
    // three spans with two stores each and one span with one store.
    let start = text.find(".entry spw_adam_f32_f32_bf16_bf16(").expect("the kernel exists");
    let kernel = &text[start..start + text[start..].find("ret;").expect("it returns")];
    assert_eq!((wide(kernel, "ld"), wide(kernel, "st")), (7, 7));
}
