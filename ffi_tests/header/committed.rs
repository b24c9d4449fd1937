//! Proves that the committed headers are generated from the sources, and that version numbers agree.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use spillway::capi::CStruct;
use spillway_header::initializers::{Field, Structs};
use spillway_header::{Generated, generate};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The structs of the library.
fn structs() -> Structs {
    let fields = |one: &CStruct| {
        let field = |(name, offset, size): &(&'static str, usize, usize)| Field {
            name,
            offset: *offset,
            initial: one.initial[*offset..offset + size].to_vec(),
        };
        one.fields.iter().map(field).collect()
    };
    spillway::capi::structs().iter().map(|one| (one.name, fields(one))).collect()
}

#[test]
fn the_committed_headers_are_generated_from_the_sources() {
    let folder = root().join("include/spillway");
    let Generated { headers, json, .. } = generate(&root(), spillway::VERSION, &structs());
    for (name, text) in &headers {
        is_committed(&folder.join(name), text);
    }
    is_committed(&folder.join("abi.json"), &json);
    let mut made: BTreeSet<String> = headers.into_iter().map(|(name, _)| name).collect();
    made.insert("abi.json".to_string());
    let found = fs::read_dir(&folder).expect("include/spillway exists");
    let found: BTreeSet<String> =
        found.map(|entry| entry.expect("it is listed").file_name().to_string_lossy().into_owned()).collect();
    assert_eq!(found, made, "files in include/spillway (left) and modules of src/capi");
}

#[test]
fn the_committed_module_for_ctypes_is_generated_from_the_sources() {
    let text = generate(&root(), spillway::VERSION, &structs()).python;
    is_committed(&root().join("packaging/python/spillway/_c.py"), &text);
}

/// Fails if the file has another text. Writes the text before if SPILLWAY_BLESS is set.
fn is_committed(path: &Path, text: &str) {
    if std::env::var_os("SPILLWAY_BLESS").is_some() {
        fs::write(path, text).expect("the file is writable");
    }
    let committed = fs::read_to_string(path).unwrap_or_default();
    assert!(committed == text, "{} is stale: SPILLWAY_BLESS=1 cargo test -p spillway-header", path.display());
}

#[test]
fn the_umbrella_is_short_and_includes_every_header_that_is_not_experimental() {
    let umbrella = fs::read_to_string(root().join("include/spillway.h")).expect("include/spillway.h exists");
    let lines = umbrella.lines().count();
    assert!(lines <= 150, "include/spillway.h has {lines} lines, at most 150");
    for (name, text) in generate(&root(), spillway::VERSION, &structs()).headers {
        let include = format!("#include \"spillway/{name}\"");
        assert_eq!(umbrella.contains(&include), !text.contains("EXPERIMENTAL"), "{name}");
        assert!(umbrella.contains(&format!("spillway/{name}")), "the table of contents lacks {name}");
    }
}

/// All other pointers are borrowed during the call, as the umbrella says.
#[test]
fn a_call_whose_memory_stays_in_use_says_until_when() {
    let calls =
        ["tier_put", "tier_get", "io_read", "io_write", "spec_submit", "swap_submit", "undo_adam_step"];
    let experimental = ["gpu_copy_start", "stage_submit_adam"];
    let headers = generate(&root(), spillway::VERSION, &structs()).headers;
    for call in calls.into_iter().chain(experimental) {
        let declares = |block: &&str| block.contains(&format!("\nspw_status spw_{call}("));
        let block = headers.iter().find_map(|(_, text)| text.split("\n\n").find(declares));
        assert!(block.is_some_and(|block| block.contains("\n// Kept: ")), "spw_{call}: {block:?}");
    }
}

/// One rule for all closes: those that wait for files of the caller have a timeout, and no other.
#[test]
fn closes_with_a_timeout_are_those_that_the_umbrella_names_and_all_say_the_same_of_it() {
    let umbrella = fs::read_to_string(root().join("include/spillway.h")).expect("include/spillway.h exists");
    let rule = umbrella.split("//   Closes ").nth(1).and_then(|rest| rest.split("//   Callbacks ").next());
    let rule = rule.expect("the umbrella has a rule of closes");
    let named: BTreeSet<&str> = rule
        .split(|c: char| !c.is_alphanumeric() && c != '_')
        .filter(|word| word.starts_with("spw_"))
        .collect();
    let (mut closes, mut timed) = (0, BTreeSet::new());
    let headers = generate(&root(), spillway::VERSION, &structs()).headers;
    for block in headers.iter().flat_map(|(_, text)| text.split(");\n")) {
        let Some((before, arguments)) = block.rsplit_once("_close(") else { continue };
        let Some((comment, name)) = before.rsplit_once("\nspw_status ") else { continue };
        closes += 1;
        if !arguments.contains("timeout_ms") {
            continue;
        }
        for words in
            ["(0: polls; negative: without limit)", "freed whatever the status", "After SPW_ERR_TIMEOUT"]
        {
            let comment = comment.replace("\n// ", " ");
            assert!(comment.contains(words), "{name}_close does not say {words:?}");
        }
        timed.insert(format!("{name}_close"));
    }
    assert!(closes >= 12, "{closes} closes");
    assert_eq!(timed.iter().map(String::as_str).collect::<BTreeSet<_>>(), named);
}

/// The text with that of each optimizer in place of the macros that repeat it.
fn with_optimizers(cpp: &str, headers: &[(String, String)]) -> String {
    let macros = headers.iter().find_map(|(_, text)| text.split("#define SPW_OPTIMIZERS(X) ").nth(1));
    let uses = macros.and_then(|rest| rest.lines().next()).expect("optim.h has the macro of optimizers");
    let names = uses.split("X(").skip(1).map(|one| one.split(',').next().unwrap_or(one));
    names.map(|name| cpp.replace("##name##", name).replace("##name", name)).collect()
}

#[test]
fn the_cpp_header_covers_the_headers_that_are_not_experimental() {
    // What C++ has otherwise: initialisers, exceptions with the text of their call, functions of the log.
    const OTHERWISE: [&str; 5] =
        ["spw_struct_init", "spw_error_text", "spw_get_io_failure", "spw_log_next", "spw_version"];
    let cpp = fs::read_to_string(root().join("include/spillway.hpp")).expect("include/spillway.hpp exists");
    let Generated { headers, json, .. } = generate(&root(), spillway::VERSION, &structs());
    let cpp = with_optimizers(&cpp, &headers);
    let words: BTreeSet<&str> = cpp.split(|c: char| !c.is_alphanumeric() && c != '_').collect();
    let json: serde_json::Value = serde_json::from_str(&json).expect("it is JSON");
    let functions = json["functions"].as_object().expect("functions have names");
    assert!(functions.len() > 150, "{}", functions.len());
    let is_missing = |(name, about): &(&String, &serde_json::Value)| {
        let is_of_classes = about["experimental"] != true && about["header"] != "spillway/deepspeed.h";
        is_of_classes && !OTHERWISE.contains(&name.as_str()) && !words.contains(name.as_str())
    };
    let missing: Vec<&String> = functions.iter().filter(is_missing).map(|(name, _)| name).collect();
    assert!(missing.is_empty(), "{missing:?}");
    let plain = |field: &serde_json::Value| {
        field["name"] == "struct_size" || field["initial"].as_f64().is_none_or(|value| value == 0.0)
    };
    for (name, about) in json["structs"].as_object().expect("structs have names") {
        let fields = about["fields"].as_array().expect("structs have fields");
        assert!(fields.iter().all(plain) || cpp.contains(&format!("inline {name} make()")), "make<{name}>()");
    }
}

#[test]
fn the_soname_carries_the_abi_version() {
    let build = fs::read_to_string(root().join("build.rs")).expect("build.rs exists");
    let version = spillway::capi::base::SPW_ABI_VERSION;
    assert!(
        build.contains(&format!("const ABI_VERSION: u32 = {version};")),
        "build.rs and SPW_ABI_VERSION differ"
    );
}
