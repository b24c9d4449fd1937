//! The same load by fio, as an independent reference: io_uring with registered buffers and files, direct I/O.
#![forbid(unsafe_code)]

use std::process::{Command, Stdio};

use spillway::error::{Error, Result};

use super::io_load::{Direction, Pass, Shape, TestFile};

/// Pages that back fio's buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pages {
    /// fio's default: base pages.
    Own,
    /// Transparent 2 MiB pages, as in Spillway's pools.
    Huge,
}

/// The version of the installed fio; `None` if there is none.
pub fn version() -> Option<String> {
    let output = Command::new("fio").arg("--version").stdin(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_string())
}

/// Makes `times` passes over the file. Time and processor time are fio's own figures, without its startup.
pub fn run(file: &TestFile, shape: Shape, pages: Pages, direction: Direction, times: u32) -> Result<Pass> {
    let each = file.bytes / shape.block_bytes as u64 / shape.engines as u64 * shape.block_bytes as u64;
    let way = if direction == Direction::Read { "read" } else { "write" };
    let mut fio = Command::new("fio");
    fio.args(["--name=spillway", "--ioengine=io_uring", "--fixedbufs=1", "--registerfiles=1", "--direct=1"]);
    // fio fills its write buffers with random bytes before the clock starts, like Spillway.
    fio.args(["--scramble_buffers=0", "--refill_buffers=0", "--fallocate=none", "--invalidate=0"]);
    fio.args(["--thread", "--output-format=json"]);
    fio.arg(format!("--filename={}", file.path.display())).arg(format!("--rw={way}"));
    fio.arg(format!("--bs={}", shape.block_bytes)).arg(format!("--iodepth={}", shape.depth));
    fio.arg(format!("--numjobs={}", shape.engines));
    fio.arg(format!("--size={each}")).arg(format!("--offset_increment={each}"));
    fio.arg(format!("--loops={times}"));
    if pages == Pages::Huge {
        fio.env("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1");
    }
    let output = fio.stdin(Stdio::null()).output().map_err(|error| Error::system("running fio", &error))?;
    let words = || String::from_utf8_lossy(&output.stderr).trim().to_string();
    let refused = |reason: String| Error::System { what: "running fio", reason };
    if !output.status.success() {
        return Err(refused(words()));
    }
    parse(&output.stdout, way).ok_or_else(|| refused(format!("its JSON output has no results: {}", words())))
}

fn parse(json: &[u8], way: &str) -> Option<Pass> {
    // fio may print a warning before the JSON object.
    let from = json.iter().position(|byte| *byte == b'{')?;
    let answer: serde_json::Value = serde_json::from_slice(&json[from..]).ok()?;
    let mut pass = Pass { bytes: 0, seconds: 0.0, cpu_seconds: 0.0 };
    for job in answer["jobs"].as_array()? {
        let seconds = job[way]["runtime"].as_f64()? / 1e3;
        let share = (job["usr_cpu"].as_f64()? + job["sys_cpu"].as_f64()?) / 100.0;
        pass.bytes += job[way]["io_bytes"].as_u64()?;
        pass.seconds = pass.seconds.max(seconds);
        pass.cpu_seconds += share * job["job_runtime"].as_f64()? / 1e3;
    }
    (pass.bytes > 0 && pass.seconds > 0.0).then_some(pass)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_of_two_jobs_is_added_up_and_anything_else_is_refused() {
        let job =
            r#"{"read":{"io_bytes":1000000000,"runtime":500},"usr_cpu":1.0,"sys_cpu":3.0,"job_runtime":500}"#;
        let answer = format!("note: something\n{{\"jobs\":[{job},{job}]}}");
        let pass = parse(answer.as_bytes(), "read").unwrap();
        assert_eq!((pass.bytes, pass.seconds, pass.cpu_seconds), (2_000_000_000, 0.5, 0.04));
        assert_eq!((pass.gb_per_s(), pass.cpu_seconds_per_gb()), (4.0, 0.02));
        for wrong in ["", "{}", "{\"jobs\":[]}", "{\"jobs\":[{}]}", "fio: error"] {
            assert!(parse(wrong.as_bytes(), "read").is_none(), "{wrong}");
        }
    }
}
