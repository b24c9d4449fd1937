//! Proves that the committed headers are generated from the sources, and that version numbers agree.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use spillway::optim::adagrad::AdagradOptions;
use spillway::optim::adam::AdamOptions;
use spillway::optim::lion::LionOptions;
use spillway_header::generate;
use spillway_header::initializers::Default as Initial;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Initialiser values other than 0. Those of optimizers are the defaults of the library.
fn defaults() -> Vec<Initial> {
    let adam = AdamOptions::default();
    let adagrad = AdagradOptions::default();
    let lion = LionOptions::default();
    let number = |value: f64| format!("{value:?}");
    assert!(adam.decoupled && adam.bias_correction, "their fields are 0");
    vec![
        ("spw_adam_options", "step", adam.step.to_string()),
        ("spw_adam_options", "lr", number(adam.lr)),
        ("spw_adam_options", "beta1", number(adam.beta1)),
        ("spw_adam_options", "beta2", number(adam.beta2)),
        ("spw_adam_options", "eps", number(adam.eps)),
        ("spw_adam_options", "weight_decay", number(adam.weight_decay)),
        ("spw_adam_options", "grad_scale", number(adam.grad_scale)),
        ("spw_adagrad_options", "step", adagrad.step.to_string()),
        ("spw_adagrad_options", "lr", number(adagrad.lr)),
        ("spw_adagrad_options", "lr_decay", number(adagrad.lr_decay)),
        ("spw_adagrad_options", "eps", number(adagrad.eps)),
        ("spw_adagrad_options", "weight_decay", number(adagrad.weight_decay)),
        ("spw_adagrad_options", "grad_scale", number(adagrad.grad_scale)),
        ("spw_lion_options", "lr", number(lion.lr)),
        ("spw_lion_options", "beta1", number(lion.beta1)),
        ("spw_lion_options", "beta2", number(lion.beta2)),
        ("spw_lion_options", "weight_decay", number(lion.weight_decay)),
        ("spw_lion_options", "grad_scale", number(lion.grad_scale)),
        ("spw_io_request", "fd", "-1".to_string()),
        ("spw_stage_options", "undo_mode", "1".to_string()),
        ("spw_ds_adam_call", "bias_correction", "1".to_string()),
        ("spw_ds_adam_call", "grad_scale", "1.0".to_string()),
    ]
}

#[test]
fn the_committed_headers_are_generated_from_the_sources() {
    let folder = root().join("include/spillway");
    let headers = generate(&root(), spillway::VERSION, &defaults()).headers;
    for (name, text) in &headers {
        is_committed(&folder.join(name), text);
    }
    let made: BTreeSet<String> = headers.into_iter().map(|(name, _)| name).collect();
    let found = fs::read_dir(&folder).expect("include/spillway exists");
    let found: BTreeSet<String> =
        found.map(|entry| entry.expect("it is listed").file_name().to_string_lossy().into_owned()).collect();
    assert_eq!(found, made, "files in include/spillway (left) and modules of src/capi");
}

#[test]
fn the_committed_module_for_ctypes_is_generated_from_the_sources() {
    let text = generate(&root(), spillway::VERSION, &defaults()).python;
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
    for (name, text) in generate(&root(), spillway::VERSION, &defaults()).headers {
        let include = format!("#include \"spillway/{name}\"");
        assert_eq!(umbrella.contains(&include), !text.contains("EXPERIMENTAL"), "{name}");
        assert!(umbrella.contains(&format!("spillway/{name}")), "the table of contents lacks {name}");
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
