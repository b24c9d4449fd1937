//! Proves the output of the commands. `doctor` reports each fault and nothing else, `plan` gives the figures of the
//! papers, `trace` writes JSON that shows the overlap, `tune` stores settings that an engine then uses, and `tier` handles
//! tiers.

#[path = "cli/draw.rs"]
mod draw;
#[path = "../../ffi_tests/rust/support/mod.rs"]
mod support;
#[path = "cli/tier.rs"]
mod tier;
#[path = "cli/topo.rs"]
mod topo;

use std::collections::HashMap;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use spillway::io::engine::Engine;
use spillway::io::options::Options;
use spillway::io::profile::Profile;
use spillway::sys::file::file_system;
use support::{empty_dir, run, succeed};

const TIMEOUT: Duration = Duration::from_secs(60);
/// The H100 machine of Deep Optimizer States, per GPU.
const H100: [&str; 8] = ["--cpu", "2", "--downscale", "15.5", "--gpu", "25", "--link", "55"];

fn spillway() -> Command {
    Command::new(env!("CARGO_BIN_EXE_spillway"))
}

#[test]
fn the_tool_states_its_name_and_the_version_of_the_library() {
    let said = succeed(spillway().arg("--version"), TIMEOUT);
    assert_eq!(said, format!("spillway {}\n", spillway::VERSION));
}

#[test]
fn the_help_names_the_commands_of_the_python_package() {
    let help = succeed(spillway().arg("--help"), TIMEOUT);
    for command in ["  doctor JOB ", "  watch DIR|PID ", "  metrics DIR|PID ", "python -m spillway"] {
        assert!(help.contains(command), "{command}: {help}");
    }
    let help = succeed(spillway().args(["doctor", "--help"]), TIMEOUT);
    assert!(help.contains("python -m spillway doctor JOB"), "{help}");
}

#[test]
fn a_plan_of_which_nothing_fits_is_printed_and_fails() {
    let plan = |host: &str, more: &[&str]| {
        let fixed = ["plan", "mlp-offload-40b", "--machine", "mlp-offload-1", "--host-memory", host];
        run(spillway().args(fixed).args(more), TIMEOUT)
    };
    let lacks = "the host has 18.6 GiB, but 600.0 GiB are needed";
    let done = plan("20GB", &[]);
    assert!(done.code == Some(1) && done.stdout.contains(lacks), "{}{}", done.stdout, done.stderr);
    assert!(done.stderr.contains("no strategy fits; the plan says what each one lacks"), "{}", done.stderr);
    assert_eq!(plan("250GB", &[]).code, Some(0));
    // As an object it is data.
    let done = plan("20GB", &["--json"]);
    assert!(done.code == Some(0) && done.stdout.contains(lacks), "{}{}", done.stdout, done.stderr);
    assert_eq!(serde_json::from_str::<Value>(&done.stdout).expect("JSON")["best"], Value::Null);
}

#[test]
fn a_misfit_says_what_each_strategy_lacks_and_whether_a_path_helps() {
    let plan = |fit: &str| run(spillway().args(["plan", "--parameters", "7B", "--fit", fit]), TIMEOUT);
    let none = plan("16GB,32GB");
    assert_eq!(none.code, Some(1));
    for words in [
        "no strategy fits this machine\ngpu does not fit: each GPU has 14.9 GiB, but ",
        "\nhost-int8-moments does not fit: the host has 29.8 GiB, but ",
        "tier, tier-cache, tier-split-master fit; add --path DIR:READ:WRITE:CAPACITY",
        "Adam 2.00 G parameters/s on the CPU (assumed), 25.00 on a GPU (assumed), 150 x 10^12 operations/s (assumed)",
    ] {
        assert!(none.stdout.contains(words), "{words}: {}", none.stdout);
    }
    assert!(!none.stdout.contains("step s"), "no table without rows: {}", none.stdout);
    let small = plan("1GB,1GB");
    assert!(
        small.stdout.contains("gpu does not fit") && !small.stdout.contains("--path"),
        "{}",
        small.stdout
    );
}

#[test]
fn the_call_of_a_tier_is_whole_and_a_row_of_deepspeed_says_so() {
    let plan = |size: &str| {
        let fixed = ["plan", "--parameters", size, "--fit", "24GB,64GB", "--path", "/mnt/a:3:2:1TB"];
        succeed(spillway().args(fixed), TIMEOUT)
    };
    let fits = plan("7B");
    for words in [
        "\ntier: spillway.torch.AdamW(model.parameters(), tier=[\"/mnt/a\"], overlap=True)\n",
        "\ntier-cache: spillway.torch.AdamW(model.parameters(), tier=[\"/mnt/a\"], host_memory=",
        "\ntier-split-master: only under DeepSpeed, ZeRO-3: \"paths\": [\"/mnt/a\"], \"split_master\": true in ",
    ] {
        assert!(fits.contains(words), "{words}: {fits}");
    }
    let flows = plan("12B");
    let call = "\ntier: flow = spillway.torch.Flow(model, \"cuda\", keep_bytes=None); spillway.torch.AdamW(";
    assert!(flows.contains("tier, weights flow") && flows.contains(call), "{flows}");
}

#[test]
fn a_plan_says_what_residents_of_an_interleaved_update_change() {
    let plan = |more: &[&str]| {
        let fixed = ["plan", "dos-7b", "--machine", "dos-h100"];
        succeed(spillway().args(fixed).args(more), TIMEOUT)
    };
    let found: Value = serde_json::from_str(&plan(&["--json"])).expect("JSON");
    let strategies = found["strategies"].as_array().expect("strategies");
    let of = |name: &str| strategies.iter().find(|one| one["strategy"] == name).expect("the strategy");
    let (with, without) = (of("interleave-residents"), of("interleave"));
    let kept = &with["residents"];
    assert!(kept["subgroups"].as_u64() > Some(0) && without["residents"]["subgroups"] == 0, "{found}");
    let step = |one: &Value| one["seconds"]["step"].as_f64().expect("seconds");
    let words = format!(
        "residents of interleave-residents: {} of {} subgroups of each rank, {} parameters with ",
        kept["subgroups"], found["subgroups"], kept["parameters"]
    );
    let effect = format!(
        "a step takes {:.3} s instead of {:.3} s, moves 0 B over each link",
        step(with),
        step(without)
    );
    let text = plan(&[]);
    assert!(text.contains(&words) && text.contains(&effect), "{text}");
}

/// Verdict and remedy of each check.
fn doctor(
    environment: &[(&str, &str)],
    dir: &std::path::Path,
) -> (Option<i32>, HashMap<String, (String, bool)>) {
    let mut command = spillway();
    command.args(["doctor", "--json", "--dir"]).arg(dir).envs(environment.iter().copied());
    let outcome = run(&mut command, TIMEOUT);
    let report: Value = serde_json::from_str(&outcome.stdout).expect("it is JSON");
    let findings = report["findings"].as_array().expect("findings").iter().map(|finding| {
        let word = |name: &str| finding[name].as_str().unwrap_or_default().to_string();
        (word("check"), (word("verdict"), !word("fix").is_empty()))
    });
    (outcome.code, findings.collect())
}

#[test]
fn doctor_finds_nothing_broken_here_and_leaves_nothing_behind() {
    let dir = empty_dir("doctor");
    let (code, findings) = doctor(&[], &dir);
    assert!(code == Some(0) && findings.values().all(|(verdict, _)| verdict != "fails"), "{findings:?}");
    assert_eq!(findings["kernel"].0, "ok");
    for check in ["direct I/O", "io_uring", "thread I/O", "tier", "pages", "pinned memory", "NUMA", "GPU"] {
        assert!(findings.contains_key(check), "{check}: {findings:?}");
    }
    assert_eq!(std::fs::read_dir(&dir).expect("a directory").count(), 0);
}

#[test]
fn doctor_of_the_machine_alone_tests_no_directory() {
    let dir = empty_dir("doctor-machine");
    let said = succeed(spillway().args(["doctor", "--json", "--machine-only"]).current_dir(&dir), TIMEOUT);
    let report: Value = serde_json::from_str(&said).expect("it is JSON");
    let findings = report["findings"].as_array().expect("findings");
    assert!(findings.iter().any(|one| one["check"] == "kernel"));
    assert!(findings.iter().all(|one| one.get("directory").is_none()), "{said}");
    let refused = run(spillway().args(["doctor", "--machine-only", "--dir", "."]).current_dir(&dir), TIMEOUT);
    assert!(refused.code == Some(2) && refused.stderr.contains("--dir"), "{}", refused.stderr);
    assert_eq!(std::fs::read_dir(&dir).expect("the directory").count(), 0);
}

#[test]
fn doctor_says_what_is_wrong_and_what_to_do() {
    let dir = empty_dir("doctor-wrong");
    let found = |environment: &[(&str, &str)], check: &str| {
        let (code, findings) = doctor(environment, &dir);
        (code, findings[check].clone())
    };
    let with = |code, verdict: &str| (Some(code), (verdict.to_string(), true));
    assert_eq!(found(&[("SPILLWAY_KERNEL", "mmx")], "kernel"), with(1, "fails"));
    assert_eq!(found(&[("SPILLWAY_KERNEL", "scalar")], "kernel"), with(0, "worse"));
    assert_eq!(found(&[("SPILLWAY_NUM_THREADS", "many")], "threads"), with(1, "fails"));
    assert_eq!(found(&[("SPILLWAY_IO", "threads")], "io_uring"), with(0, "worse"));
    let (code, findings) = doctor(&[], std::path::Path::new("no/such/directory"));
    assert_eq!((code, findings["directory"].0.as_str()), (Some(1), "fails"));
}

#[test]
fn plan_gives_the_papers_figures_in_a_table_and_as_json() {
    let json = succeed(spillway().arg("plan").args(H100).arg("--json"), TIMEOUT);
    let report: Value = serde_json::from_str(&json).expect("it is JSON");
    let number = |name: &str| report[name].as_f64().expect("a number");
    assert_eq!((number("subgroups"), number("on_gpu")), (50.0, 36.0));
    assert!((number("serial_seconds") / number("seconds") / 3.58 - 1.0).abs() < 0.02, "{json}");
    assert_eq!(report["plan"].as_str().map(str::len), Some(50));

    let table = succeed(spillway().arg("plan").args(H100).args(["--mode", "stride=2"]), TIMEOUT);
    assert!(table.contains("25 on the GPU") && table.contains("serial update"), "{table}");
}

#[test]
fn plan_fills_free_memory_with_residents() {
    let counted = |options: &[&str]| {
        let json = succeed(spillway().args(["plan", "--json"]).args(options), TIMEOUT);
        let report: Value = serde_json::from_str(&json).expect("it is JSON");
        (report["residents"].clone(), report["on_gpu"] != 0)
    };
    assert_eq!(counted(&["--free-memory", "60"]), (50.into(), false));
    // 3 slots of 1.2 GB, and 6.4 GB for residents.
    assert_eq!(counted(&["--free-memory", "10"]), (5.into(), true));
    assert_eq!(counted(&["--free-memory", "10", "--slots", "2"]), (6.into(), true));
    assert_eq!(counted(&["--free-memory", "10", "--link", "3"]), (8.into(), false));
    let refused = run(spillway().args(["plan", "--free-memory", "10", "--residents", "3"]), TIMEOUT);
    assert!(refused.code != Some(0) && refused.stderr.contains("residents"), "{}", refused.stderr);
}

#[test]
fn plan_refuses_what_it_cannot_plan() {
    for wrong in [
        ["--cpu", "0"],
        ["--mode", "stride"],
        ["--wire", "f64"],
        ["--residents", "51"],
        ["--slots", "0"],
        ["--free-memory", "-1"],
    ] {
        let refused = run(spillway().arg("plan").args(wrong), TIMEOUT);
        assert!(refused.code != Some(0) && !refused.stderr.is_empty(), "{wrong:?}");
    }
}

#[test]
fn plan_of_a_model_is_a_table_json_and_a_timeline() {
    let svg = empty_dir("plan-model").join("step.svg");
    let model = ["plan", "mlp-offload-40b", "--machine", "mlp-offload-1", "--host-memory", "250GB"];
    let table = succeed(spillway().args(model).arg("--svg").arg(&svg), TIMEOUT);
    for words in ["40265318400 parameters", "tier-cache", "nvme 60 %", "host does not fit", "best: tier"] {
        assert!(table.contains(words), "{words}: {table}");
    }
    let text = std::fs::read_to_string(&svg).expect("the timeline was written");
    assert!(text.starts_with("<svg") && text.trim_end().ends_with("</svg>"), "{text}");
    for words in ["paths", "fetch", "flush", "CPU step", "upload weights", "seconds"] {
        assert!(text.contains(words), "{words}: {text}");
    }
    let json = succeed(spillway().args(model).arg("--json"), TIMEOUT);
    let report: Value = serde_json::from_str(&json).expect("it is JSON");
    let best = report["best"].as_str().expect("a name");
    let found = report["strategies"].as_array().expect("strategies");
    let chosen = found.iter().find(|found| found["strategy"] == best).expect("the best");
    assert!(chosen["fits"] == true && chosen["seconds"]["step"].as_f64() > Some(1.0), "{chosen}");
    assert_eq!(report["sources"]["flops"], "assumed");
    assert_eq!(report["calls"]["gpu"], "torch.optim.AdamW(model.parameters(), fused=True)");
}

#[test]
fn plan_of_a_model_refuses_options_without_effect() {
    let model = ["plan", "dos-7b", "--machine", "dos-h100"];
    for (wrong, words) in [
        (&["--cpu", "2"][..], "cannot be used with"),
        (&["--strategy", "tier"], "--svg"),
        (&["--svg", "no/such/folder/step.svg"], "no/such/folder/step.svg"),
        (&["--svg", "step.svg", "--strategy", "tier"], "tier has no timeline"),
        (&["--path", "no/such/folder"], "spillway tune"),
        (&["--machine-learning"], "unexpected argument"),
    ] {
        let refused = run(spillway().args(model).args(wrong), TIMEOUT);
        assert!(refused.code != Some(0) && refused.stderr.contains(words), "{wrong:?}: {}", refused.stderr);
    }
    let alone = run(spillway().args(["plan", "--ranks", "4"]), TIMEOUT);
    assert!(
        alone.code == Some(2) && alone.stderr.contains("<MODEL|--parameters <NUMBER>>"),
        "{}",
        alone.stderr
    );
    for update in [["--shard", "7B"], ["--cpu", "2"]] {
        let refused = run(spillway().arg("plan").args(update).args(["--fit", "24GB,64GB"]), TIMEOUT);
        assert!(refused.code == Some(2) && refused.stderr.contains("cannot be used with"), "{update:?}");
    }
}

#[test]
fn plan_takes_the_size_of_a_model_in_place_of_its_description() {
    let plan =
        |size: &str, more: &[&str]| run(spillway().args(["plan", "--parameters", size]).args(more), TIMEOUT);
    let fit = ["--fit", "24GB,64GB"];
    let found = plan("7B", &fit);
    assert!(found.code == Some(0) && found.stdout.contains("7000000000 parameters"), "{}", found.stderr);
    assert!(found.stdout.contains("host-int8-moments: spillway.torch.offload("), "{}", found.stdout);
    for same in ["7e9", "7000000000", "7000M"] {
        assert_eq!(plan(same, &fit).stdout, found.stdout, "{same}");
    }
    assert_eq!(plan("100T", &[]).code, Some(1), "its subgroups are few enough");
    for wrong in ["7", "0", "7 B B"] {
        let refused = plan(wrong, &fit);
        assert!(refused.code == Some(2) && refused.stderr.contains("such as 7B"), "{}", refused.stderr);
    }
    let both = run(spillway().args(["plan", "dos-7b", "--parameters", "7B"]), TIMEOUT);
    assert!(both.code == Some(2) && both.stderr.contains("cannot be used with"), "{}", both.stderr);
    let named = run(spillway().args(["plan", "7B"]).args(fit), TIMEOUT);
    assert!(
        named.code == Some(1) && named.stderr.contains("--parameters 7B plans a decoder"),
        "{}",
        named.stderr
    );
    let shard = succeed(spillway().args(["plan", "--shard", "2B", "--json"]), TIMEOUT);
    assert_eq!(serde_json::from_str::<Value>(&shard).expect("JSON")["subgroups"], 20);
}

/// Work of several kinds at the same time: the overlap that the trace shows.
#[test]
fn trace_is_json_in_which_engines_overlap() {
    let file = empty_dir("trace").join("step.json");
    let mut trace = spillway();
    trace.arg("trace").args(H100).args(["--backward", "0.1", "--residents", "5", "--output"]).arg(&file);
    let said = succeed(&mut trace, TIMEOUT);
    assert!(said.contains("spans"), "{said}");
    let text = std::fs::read_to_string(&file).expect("the trace was written");
    let value: Value = serde_json::from_str(&text).expect("it is JSON");
    let events = value["traceEvents"].as_array().expect("events");
    let spans = |name: &str| -> Vec<(f64, f64)> {
        let of = |event: &&Value| {
            event["ph"] == "X" && event["name"].as_str().is_some_and(|own| own.starts_with(name))
        };
        let time = |event: &Value| {
            let start = event["ts"].as_f64().expect("a time");
            (start, start + event["dur"].as_f64().expect("a time"))
        };
        events.iter().filter(of).map(time).collect()
    };
    let overlap = |one: &str, other: &str| {
        spans(one).iter().any(|a| spans(other).iter().any(|b| a.0 < b.1 && b.0 < a.1))
    };
    for (one, other) in
        [("prefetch", "flush"), ("CPU step", "GPU step"), ("upload", "CPU step"), ("flush", "CPU step")]
    {
        assert!(overlap(one, other), "{one} beside {other}");
    }
    let missing = run(spillway().args(["trace", "--output", "no/such/folder/step.json"]), TIMEOUT);
    assert!(
        missing.code == Some(1) && missing.stderr.contains("writing the file of --output"),
        "{}",
        missing.stderr
    );
}

#[test]
fn tune_writes_what_an_engine_then_has() {
    let folder = empty_dir("tune");
    let path = folder.join("new/profile");
    let tune = |more: &[&str]| {
        let mut command = spillway();
        command.args(["tune", "--seconds", "5", "--dir"]).arg(&folder).arg("--profile").arg(&path).args(more);
        succeed(&mut command, TIMEOUT)
    };
    let said = tune(&["--dry-run"]);
    assert!(said.contains("best: ") && !path.exists(), "{said}");
    let said = tune(&[]);
    let profile = Profile::read(&path).expect("it makes sense").expect("it is there");
    let directory = std::fs::File::open(&folder).expect("the directory is there");
    let system = file_system(&directory).expect("it lies on a file system");
    let found = profile.get(system).expect("it is of this file system");
    let block = found.block_bytes as f64 / 1024.0;
    let (block, unit) = if block < 1024.0 { (block, "KiB") } else { (block / 1024.0, "MiB") };
    let words = format!("blocks of {block:.1} {unit}, depth {}", found.depth);
    assert!(said.lines().any(|line| line.starts_with("best: ") && line.contains(&words)), "{said}");
    let engine = Engine::open_tuned(Options::default(), Some(profile)).expect("an engine opens");
    assert_eq!(engine.options().depth, found.depth);
    let left: Vec<_> = std::fs::read_dir(&folder).expect("it can be read").collect();
    assert_eq!(left.len(), 1, "the test file is removed: {left:?}");
}

#[test]
fn what_fits_is_named_with_its_call_fastest_first() {
    let plan =
        |fit: &str| run(spillway().args(["plan", "dos-7b", "--machine", "dos-h100", "--fit", fit]), TIMEOUT);
    let done = plan("24GB,64GB");
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    let call = "offload(model, torch.optim.AdamW, moment_dtype=\"int8\", master=\"split\"";
    assert!(done.stdout.contains(call) && !done.stdout.contains("does not fit"), "{}", done.stdout);
    assert!(!done.stdout.contains("host-split-master"), "{}", done.stdout);
    let steps = |text: &str| -> Vec<f64> {
        let rows = text.lines().skip_while(|line| !line.contains("step s")).skip(1);
        rows.map_while(|line| line.split_whitespace().last()?.parse().ok()).collect()
    };
    let many = plan("80GB,2TB").stdout;
    let found = steps(&many);
    assert!(found.len() > 5 && found.is_sorted() && many.contains("tail=\"auto\""), "{many}");
    assert!(done.stdout.contains("of a step: 1 x 1 x 2048 tokens, link 55.00"), "{}", done.stdout);
    for wrong in ["24GB", "24GB,", "x,64GB"] {
        let done = plan(wrong);
        assert!(done.code != Some(0) && done.stderr.contains("--fit"), "{wrong}: {}", done.stderr);
    }
    let done = plan("24,64");
    assert!(done.code == Some(2) && done.stderr.contains("24 has no unit"), "{}", done.stderr);
    let both = ["plan", "dos-7b", "--fit", "24GB,64GB", "--host-memory", "64GB"];
    assert!(run(spillway().args(both), TIMEOUT).stderr.contains("cannot be used with"));
}
