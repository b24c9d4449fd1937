//! Proves that `spillway topo` prints one machine in three forms, and that `spillway resctrl` undoes what it made: at the
//! end of its command, on a signal, and after it was killed.

use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use super::support::{Finished, empty_dir, run, succeed};
use super::{TIMEOUT, spillway};

fn file(root: &Path, path: &str, text: &str) {
    let path = root.join(path);
    fs::create_dir_all(path.parent().expect("below the root")).expect("the target directory is writable");
    fs::write(path, format!("{text}\n")).expect("the target directory is writable");
}

/// Two nodes of four processors with a GPU each, and a tree of resctrl.
fn machine(name: &str) -> PathBuf {
    let root = empty_dir(name);
    fill(&root);
    root
}

fn fill(root: &Path) {
    file(root, "sys/devices/system/cpu/online", "0-7");
    for cpu in 0..8 {
        let mask = if cpu < 4 { "0f" } else { "f0" };
        file(root, &format!("sys/devices/system/cpu/cpu{cpu}/topology/package_cpus"), mask);
        let cache = format!("sys/devices/system/cpu/cpu{cpu}/cache/index3");
        let id = (cpu / 4).to_string();
        for (name, text) in
            [("level", "3"), ("type", "Unified"), ("shared_cpu_map", mask), ("id", id.as_str())]
        {
            file(root, &format!("{cache}/{name}"), text);
        }
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
    for (name, text) in [
        ("schemata", "L3:0=fff;1=fff\nMB:0=100;1=100"),
        ("cpus_list", "0-7"),
        ("info/L3/cbm_mask", "fff"),
        ("info/MB/min_bandwidth", "10"),
        ("info/MB/bandwidth_gran", "10"),
    ] {
        file(root, &format!("sys/fs/resctrl/{name}"), text);
    }
    fs::create_dir(root.join("run")).expect("the target directory is writable");
}

fn groups(root: &Path) -> Vec<String> {
    let entries = fs::read_dir(root.join("sys/fs/resctrl")).expect("it exists");
    let names =
        entries.map(|entry| entry.expect("it can be read").file_name().to_string_lossy().into_owned());
    names.filter(|name| name.starts_with("spillway")).collect()
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
    for command in [&["topo"][..], &["resctrl", "show"], &["resctrl", "restore"]] {
        let refused = run(spillway().args(command).args(["--root", "no/such"]), TIMEOUT);
        assert!(
            refused.stderr.starts_with("spillway: --root: \"no/such\" has no directory sys; "),
            "{command:?}"
        );
    }
}

#[test]
fn resctrl_shows_partitions_and_removes_them_after_its_command() {
    let root = machine("resctrl");
    let shown = succeed(spillway().args(["resctrl", "show", "--share", "0.5", "--root"]).arg(&root), TIMEOUT);
    assert!(shown.contains("echo 0-1,4-5 > ") && shown.contains("echo 'L3:0=ff0;1=ff0' > "), "{shown}");
    assert!(shown.contains("echo 2-3,6-7 > ") && shown.contains("echo 'MB:0=20;1=20' > "), "{shown}");
    assert_eq!(groups(&root).len(), 0);
    let mut apply = spillway();
    apply.args(["resctrl", "apply", "--root"]).arg(&root).args(["--", "sh", "-c"]);
    apply.arg(format!("cat {}/sys/fs/resctrl/spillway-optimizer/schemata; exit 7", root.display()));
    let ended = run(&mut apply, TIMEOUT);
    assert_eq!(
        (ended.code, ended.stdout.as_str()),
        (Some(7), "L3:0=f;1=f\nMB:0=20;1=20\n"),
        "{}",
        ended.stderr
    );
    assert_eq!(groups(&root).len(), 0);
    for wrong in [&["apply"][..], &["apply", "--owner", "999999999"], &["apply", "--", "/no/such/command"]] {
        let (words, rest) = wrong.split_at(1);
        let refused = run(spillway().arg("resctrl").args(words).arg("--root").arg(&root).args(rest), TIMEOUT);
        assert!(refused.code != Some(0) && !refused.stderr.is_empty(), "{wrong:?}");
        assert_eq!(groups(&root).len(), 0, "{wrong:?}");
    }
}

/// Runs the tool as the user nobody.
fn as_nobody(tool: &Path, arguments: &[&str], root: &Path) -> Finished {
    let mut command = Command::new(tool);
    run(command.args(arguments).arg("--root").arg(root).uid(65534).gid(65534), TIMEOUT)
}

/// The case of `sudo` left out: what the user may not do is named, with its path and the cure.
#[test]
#[cfg_attr(not(built_by_root), ignore = "acts as another user, which needs root")]
fn resctrl_tells_a_user_without_rights_to_run_as_root() {
    let folder = tempfile::tempdir().expect("the temporary directory is writable");
    let root = folder.path().join("root");
    fill(&root);
    let open = |path: &Path, mode: u32| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("it exists");
    };
    open(folder.path(), 0o755);
    let tool = folder.path().join("spillway");
    fs::copy(env!("CARGO_BIN_EXE_spillway"), &tool).expect("the tool was built");
    let refused = |arguments: &[&str], path: &str| {
        let Finished { code, stderr, .. } = as_nobody(&tool, arguments, &root);
        assert!(
            code == Some(1) && stderr.contains(path) && stderr.trim_end().ends_with("; run as root"),
            "{arguments:?}: {stderr}"
        );
    };
    // Nothing was made: there is nothing to do, and no file is left.
    let nothing = as_nobody(&tool, &["resctrl", "restore"], &root);
    assert_eq!(
        (nothing.code, nothing.stdout.as_str()),
        (Some(0), "nothing to restore\n"),
        "{}",
        nothing.stderr
    );
    assert!(!root.join("run/spillway-resctrl").exists());
    let me = std::process::id().to_string();
    let apply = ["resctrl", "apply", "--owner", &me];
    refused(&apply, "run/spillway-resctrl");
    let mut by_root = spillway();
    succeed(by_root.args(apply).arg("--root").arg(&root), TIMEOUT);
    refused(&apply, "run/spillway-resctrl");
    refused(&["resctrl", "restore", "--force"], "run/spillway-resctrl");
    for (path, mode) in [("sys/fs/resctrl/schemata", 0o600), ("sys/fs/resctrl/info", 0o700)] {
        open(&root.join(path), mode);
        refused(&["resctrl", "show"], path);
        open(&root.join(path), 0o755);
    }
    assert_eq!(as_nobody(&tool, &["resctrl", "show"], &root).code, Some(0));
}

/// Starts `apply` around a command that says when it runs, and then sleeps.
fn applied(root: &Path) -> Child {
    let mut command = spillway();
    command.args(["resctrl", "apply", "--root"]).arg(root).args(["--", "sh", "-c", "echo x; exec sleep 60"]);
    let mut child = command.stdout(Stdio::piped()).spawn().expect("the tool starts");
    let mut byte = [0];
    child.stdout.as_mut().expect("piped").read_exact(&mut byte).expect("the command says something");
    assert_eq!(groups(root).len(), 2);
    child
}

#[test]
fn partitions_end_with_a_signal_and_are_found_after_a_kill() {
    let root = machine("resctrl-signals");
    let restore = || run(spillway().args(["resctrl", "restore", "--root"]).arg(&root), TIMEOUT);
    let mut child = applied(&root);
    // Another run, while this one lives.
    let second =
        run(spillway().args(["resctrl", "apply", "--root"]).arg(&root).args(["--", "true"]), TIMEOUT);
    assert!(
        second.code == Some(1) && second.stderr.contains(&format!("process {}", child.id())),
        "{}",
        second.stderr
    );
    assert_eq!(restore().code, Some(1));
    let pid = |child: &Child| Pid::from_raw(child.id() as i32);
    kill(pid(&child), Signal::SIGTERM).expect("it lives");
    assert_eq!(child.wait().expect("it ends").code(), Some(128 + Signal::SIGTERM as i32));
    assert_eq!(groups(&root).len(), 0);

    let mut child = applied(&root);
    kill(pid(&child), Signal::SIGKILL).expect("it lives");
    assert_eq!(child.wait().expect("it ends").signal(), Some(Signal::SIGKILL as i32));
    assert_eq!(groups(&root).len(), 2);
    assert_eq!((restore().stdout.as_str(), groups(&root).len()), ("partitions removed\n", 0));
    assert_eq!(restore().stdout, "nothing to restore\n");
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
    let report = root.join("report.json").display().to_string();
    let root = root.display().to_string();
    let json = format!("--json={report}");
    let bench = ["bench", "adam", "--sizes", "4Ki", "--rounds", "1", "--kernels", "scalar", json.as_str()];
    for (arguments, code) in [
        (&bench[..], 0),
        (&["bench", "compare", &report, &report], 0),
        (&["doctor", "--dir", &root], 0),
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
        &["resctrl", "show", "--root", root],
        &["resctrl", "restore", "--root", root],
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
