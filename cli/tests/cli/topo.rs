//! Proves that `spillway topo` prints one machine in three forms, and what every command does where its output cannot be
//! written.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use super::support::{empty_dir, run, succeed};
use super::{TIMEOUT, spillway};

fn file(root: &Path, path: &str, text: &str) {
    let path = root.join(path);
    fs::create_dir_all(path.parent().expect("below the root")).expect("the target directory is writable");
    fs::write(path, format!("{text}\n")).expect("the target directory is writable");
}

/// Two nodes of four processors with a GPU each.
fn machine(name: &str) -> PathBuf {
    let root = &empty_dir(name);
    file(root, "sys/devices/system/cpu/online", "0-7");
    for cpu in 0..8 {
        let mask = if cpu < 4 { "0f" } else { "f0" };
        file(root, &format!("sys/devices/system/cpu/cpu{cpu}/topology/package_cpus"), mask);
    }
    for node in 0..2 {
        let cpus = if node == 0 { "0-3" } else { "4-7" };
        file(root, &format!("sys/devices/system/node/node{node}/cpulist"), cpus);
        let gpu = format!("sys/bus/pci/devices/000{node}:01:00.0");
        let node = node.to_string();
        for (name, text) in
            [("class", "0x030200"), ("vendor", "0x10de"), ("device", "0x2342"), ("numa_node", node.as_str())]
        {
            file(root, &format!("{gpu}/{name}"), text);
        }
    }
    root.clone()
}

#[test]
fn topo_prints_one_machine_as_text_json_and_svg() {
    let root = machine("topo");
    let svg = root.join("machine.svg");
    let mut command = spillway();
    command.env_remove("CUDA_VISIBLE_DEVICES").args(["topo", "--root"]).arg(&root);
    let text = succeed(command.arg("--svg").arg(&svg), TIMEOUT);
    for words in [
        "8 processors, 8 cores, 8 usable: 0-7",
        "package 1: processors 4-7",
        "GPU 1: GPU at 0001:01:00.0",
        "rank 1: GPU 1, node 1, trainer 4, workers 5-7",
        "rank 0: numactl --physcpubind=0-3 --preferred=0",
        "--bind_core_list 0-7",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    let svg = fs::read_to_string(svg).expect("it was written");
    assert!(svg.starts_with("<svg") && svg.contains("rank 1: trainer 4, workers 5-7"), "{svg}");
    let json = succeed(command.arg("--json").env("CUDA_VISIBLE_DEVICES", "1"), TIMEOUT);
    let report: Value = serde_json::from_str(&json).expect("it is JSON");
    assert_eq!(report["visible"]["gpus"][0], "0001:01:00.0");
    assert_eq!((&report["ranks"][0]["cpus"], &report["ranks"][1]), (&"4-7".into(), &Value::Null));
    for wrong in
        [["--ranks", "0"], ["--share", "0"], ["--share", "nan"], ["--scope", "core"], ["--root", "no/such"]]
    {
        assert_ne!(run(spillway().arg("topo").args(wrong), TIMEOUT).code, Some(0), "{wrong:?}");
    }
    let refused = run(spillway().args(["topo", "--root", "no/such"]), TIMEOUT);
    assert!(
        refused.stderr.starts_with("spillway: --root: \"no/such\" has no directory sys; "),
        "{}",
        refused.stderr
    );
}

/// DeepSpeed's launcher deletes CUDA_VISIBLE_DEVICES, and OpenMP needs a thread.
#[test]
fn topo_prints_launchers_that_use_the_visible_gpus() {
    let root = machine("topo-visible");
    let text = |list: &str, arguments: &[&str]| {
        let mut command = spillway();
        command.env("CUDA_VISIBLE_DEVICES", list).args(["topo", "--root"]).arg(&root).args(arguments);
        succeed(&mut command, TIMEOUT)
    };
    assert!(
        text("1", &[]).contains("DeepSpeed: env -u CUDA_VISIBLE_DEVICES deepspeed --include localhost:1 ")
    );
    assert!(text("0,1", &[]).contains("DeepSpeed: deepspeed --num_gpus 2 "));
    assert!(text("1", &["--ranks", "2"]).contains("DeepSpeed: no: there are fewer visible GPUs than ranks"));
    assert!(text("", &["--ranks", "2"]).contains("DeepSpeed: deepspeed --num_gpus 2 "));
    assert!(text("0", &["--share", "1"]).contains("OMP_NUM_THREADS=1"));
}

/// Standard error that is full or closed changes no outcome, and a closed standard output is one that nobody reads.
#[test]
fn the_outcome_is_the_same_where_messages_cannot_be_written() {
    let root = machine("closed");
    let root = root.display().to_string();
    for (arguments, code) in [
        (&["doctor", "--dir", &root][..], 0),
        (&["doctor", "--dir", &root, "--json"], 0),
        (&["doctor", "--dir", "/no/such/directory"], 1),
        (&["topo", "--root", "/no/such/directory"], 1),
    ] {
        for redirection in [">&-", "2>&-", "2>/dev/full", ">&- 2>&-"] {
            let mut command = Command::new("sh");
            command.args([
                "-c",
                &format!("exec \"$0\" \"$@\" {redirection}"),
                env!("CARGO_BIN_EXE_spillway"),
            ]);
            let done = run(command.args(arguments), TIMEOUT);
            assert_eq!(done.code, Some(code), "{arguments:?} {redirection}: {}", done.stderr);
        }
        let done = run(
            Command::new("sh")
                .args(["-c", "exec \"$0\" \"$@\" >/dev/full", env!("CARGO_BIN_EXE_spillway")])
                .args(arguments),
            TIMEOUT,
        );
        assert!(done.code == Some(1) && !done.stderr.contains("panicked"), "{arguments:?}: {}", done.stderr);
    }
}

/// A reader that is gone and a full device are errors with a message.
#[test]
fn standard_output_that_cannot_be_written_is_an_error_not_a_panic() {
    let root = machine("full");
    let root = root.to_str().expect("the target directory is UTF-8");
    let trace = format!("{root}/step.json");
    for arguments in [
        &["topo", "--root", root][..],
        &["topo", "--root", root, "--json"],
        &["plan"],
        &["plan", "--json"],
        &["plan", "superoffload-5b"],
        &["trace", "--output", &trace],
    ] {
        let full = fs::OpenOptions::new().write(true).open("/dev/full").expect("Linux has /dev/full");
        let mut child = spillway();
        child.args(arguments).stdout(full).stderr(Stdio::piped());
        let done = child.spawn().and_then(Child::wait_with_output).expect("the tool starts");
        let said = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(1), "{arguments:?}: {said}");
        assert!(said.contains("writing to standard output") && !said.contains("panicked"), "{said}");
    }
}
