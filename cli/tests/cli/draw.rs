//! Proves the picture of a trace: the bars and means of a recorded step, and errors about files that are no trace of a step.

use super::{TIMEOUT, spillway};
use crate::support::{empty_dir, run, succeed};

/// A step of 24 subgroups on two paths, as `Swap.trace()` wrote it.
const TRACE: &str = include_str!("step.json");
/// Its picture, which the documentation shows.
const PICTURE: &str = include_str!("../../../docs/tier-step.svg");

#[test]
fn the_picture_of_a_recorded_step_is_that_of_the_documentation() {
    let folder = empty_dir("draw");
    let (trace, picture) = (folder.join("step.json"), folder.join("step.svg"));
    std::fs::write(&trace, TRACE).expect("the trace is written");
    let said = succeed(spillway().arg("draw").arg(&trace).arg("--output").arg(&picture), TIMEOUT);
    assert!(said.ends_with("step.svg: 66 bars, 0.235 s\n"), "{said}");
    let drawn = std::fs::read_to_string(&picture).expect("the picture was written");
    assert!(drawn == PICTURE, "docs/tier-step.svg differs from {}", picture.display());
}

#[test]
fn a_bar_has_its_time_and_a_transfer_its_throughput() {
    let trace = r#"{"traceEvents": [
        {"ph": "M", "tid": 4, "name": "thread_name", "args": {"name": "buffer <4>"}},
        {"ph": "X", "tid": 4, "ts": 2000000, "dur": 1000000, "name": "fetch 7", "args": {"bytes on path 0": 3000000000, "bytes on path 1": 1e9}},
        {"ph": "X", "tid": 4, "ts": 3000000, "dur": 3000000, "name": "fetch 8", "args": {"bytes on path 1": 2000000000}},
        {"ph": "X", "tid": 4, "ts": 6000000, "dur": 500000, "name": "step 8", "args": {"subgroup": 8}},
        {"ph": "C", "ts": 2000000, "name": "path 0, bytes in flight", "args": {"value": 7}}
    ]}"#;
    let folder = empty_dir("draw-small");
    let (file, picture) = (folder.join("step.json"), folder.join("step.svg"));
    std::fs::write(&file, trace).expect("the trace is written");
    succeed(spillway().arg("draw").arg(&file).arg("--output").arg(&picture), TIMEOUT);
    let drawn = std::fs::read_to_string(&picture).expect("the picture was written");
    for line in [
        "buffer &lt;4&gt;",
        "fetch 7: 0.000000 to 1.000000 s, 4.00 GB/s",
        "fetch 8: 1.000000 to 4.000000 s, 0.67 GB/s",
        "step 8: 4.000000 to 4.500000 s",
        "fetch, 1.50 GB/s on average",
        "step",
    ] {
        assert!(drawn.lines().any(|found| found == line), "{line}: {drawn}");
    }
    // Without bytes there is no chart of throughputs.
    std::fs::write(&file, trace.replace("bytes on", "words on")).expect("the trace is written");
    succeed(spillway().arg("draw").arg(&file).arg("--output").arg(&picture), TIMEOUT);
    assert!(!std::fs::read_to_string(&picture).expect("the picture was written").contains("GB/s"));
}

#[test]
fn what_is_no_trace_of_a_step_is_named() {
    let file = empty_dir("draw-errors").join("step.json");
    let span = |more: &str| format!("{{\"traceEvents\": [{{\"ph\": \"X\", \"name\": \"fetch 1\"{more}}}]}}");
    for (text, words) in [
        ("[]".to_string(), "is no trace of a step"),
        ("{\"traceEvents\": []}".to_string(), "has 0 spans"),
        (span(""), "\"fetch 1\" lacks tid, ts or dur"),
        (span(", \"tid\": 1, \"ts\": 0, \"dur\": 1"), "is in a row without a name"),
        (
            "{\"traceEvents\": [{\"ph\": \"M\", \"tid\": 1, \"name\": \"thread_name\", \"args\": {\"name\": \"a\"}}, \
             {\"ph\": \"X\", \"tid\": 1, \"ts\": 0, \"dur\": -1, \"name\": \"fetch 1\"}]}"
                .to_string(),
            "begins at 0 us and lasts -1 us",
        ),
    ] {
        std::fs::write(&file, text).expect("the trace is written");
        let refused = run(spillway().arg("draw").arg(&file), TIMEOUT);
        assert!(refused.code == Some(1) && refused.stderr.contains(words), "{words}: {}", refused.stderr);
    }
    let missing = run(spillway().args(["draw", "no/such/file.json"]), TIMEOUT);
    assert!(
        missing.code == Some(1) && missing.stderr.contains("no/such/file.json: No such file"),
        "{}",
        missing.stderr
    );
}
