//! `spillway bench io`: sequential direct reads and writes, alternating with fio on the same file.
//!
//! fio runs twice: with its default buffers, and with 2 MiB pages like the library's pools, because the page size alone
//! can change the results by a factor. Ratios are medians of the rounds' ratios, since the speed of a disk drifts.
#![forbid(unsafe_code)]

use std::path::PathBuf;

use spillway::error::{Error, Result};
use spillway::io::options::Choice;

use super::bench_adam::{median, parse_count};
use super::fio::{self, Pages};
use super::io_load::{Direction, Load, Pass, Shape, TestFile};

#[derive(clap::Args)]
pub struct Options {
    /// Prints one JSON object instead of a table.
    #[arg(long)]
    json: bool,
    /// Directory of the test file.
    #[arg(long, default_value = ".")]
    dir: PathBuf,
    /// Size of the test file in bytes, with Ki, Mi or Gi.
    #[arg(long, default_value = "1Gi", value_parser = parse_count)]
    size: usize,
    /// Size of a block in bytes.
    #[arg(long, value_delimiter = ',', default_value = "256Ki,1Mi,4Mi", value_parser = parse_count)]
    block: Vec<usize>,
    /// Blocks in flight per engine.
    #[arg(long, value_delimiter = ',', default_value = "8,32")]
    depth: Vec<u32>,
    /// Number of engines, each with its own ring, thread and range of the file; also fio's number of jobs.
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    engines: Vec<usize>,
    /// Blocks per operation; fio always uses one.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    blocks: u32,
    /// Number of rounds.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Passes over the file per measurement: fio reports processor time in whole milliseconds.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    times: u32,
    /// Skips fio.
    #[arg(long)]
    no_fio: bool,
}

#[derive(serde::Serialize)]
struct Row {
    direction: Direction,
    #[serde(flatten)]
    shape: Shape,
    gb_per_s: f64,
    cpu_seconds_per_gb: f64,
    /// Ratios to fio with its default buffers, and with 2 MiB pages.
    fio: Option<Versus>,
    fio_huge: Option<Versus>,
}

#[derive(serde::Serialize)]
struct Versus {
    gb_per_s: f64,
    cpu_seconds_per_gb: f64,
    /// Speed ratio; above 1 Spillway is faster.
    speed_ratio: f64,
    /// Ratio of processor times; below 1 Spillway uses less.
    cpu_ratio: f64,
}

#[derive(serde::Serialize)]
struct Report {
    version: &'static str,
    backend: &'static str,
    fio: String,
    file_bytes: u64,
    rounds: u32,
    times: u32,
    rows: Vec<Row>,
}

pub fn run(options: &Options) -> Result<()> {
    let fio = if options.no_fio { None } else { fio::version() };
    let file = TestFile::create(&options.dir, options.size as u64)?;
    let mut report = Report {
        version: spillway::VERSION,
        backend: Load::open(Shape { block_bytes: 4096, depth: 1, engines: 1, blocks: 1 }, Choice::Auto)?
            .backend()?,
        fio: fio.clone().unwrap_or_else(|| "not measured".to_string()),
        file_bytes: file.bytes,
        rounds: options.rounds,
        times: options.times,
        rows: Vec::new(),
    };
    if !options.json {
        print_head(&report);
    }
    for shape in shapes(options)? {
        let load = Load::open(shape, Choice::Auto)?;
        for direction in [Direction::Read, Direction::Write] {
            let row = measure(&load, &file, shape, direction, options, fio.is_some())?;
            if !options.json {
                print_row(&row);
            }
            report.rows.push(row);
        }
    }
    if options.json {
        println!("{}", serde_json::to_string_pretty(&report).unwrap_or_default());
    }
    Ok(())
}

fn shapes(options: &Options) -> Result<Vec<Shape>> {
    let blocks = options.blocks as usize;
    let mut shapes = Vec::new();
    for &block_bytes in &options.block {
        for &depth in &options.depth {
            for &engines in &options.engines {
                let whole = block_bytes.is_multiple_of(4096) && depth > 0 && engines > 0;
                if !whole || options.size / block_bytes / blocks < engines {
                    let reason =
                        format!("{block_bytes} bytes, depth {depth}, {engines} engines: not possible here");
                    return Err(Error::invalid("--block, --depth, --engines", reason));
                }
                shapes.push(Shape { block_bytes, depth, engines, blocks });
            }
        }
    }
    Ok(shapes)
}

fn measure(
    load: &Load,
    file: &TestFile,
    shape: Shape,
    direction: Direction,
    options: &Options,
    with_fio: bool,
) -> Result<Row> {
    let mut ours = Vec::new();
    let mut theirs = [Vec::new(), Vec::new()];
    // Discard the first round, which warms up.
    for round in 0..=options.rounds {
        let record = |passes: &mut Vec<Pass>, pass| (round > 0).then(|| passes.push(pass));
        record(&mut ours, load.run(file, direction, file.bytes, options.times)?);
        if with_fio {
            for (pages, passes) in [Pages::Own, Pages::Huge].into_iter().zip(&mut theirs) {
                record(passes, fio::run(file, shape, pages, direction, options.times)?);
            }
        }
    }
    let [own, huge] = theirs.map(|passes| versus(&ours, &passes));
    Ok(Row {
        direction,
        shape,
        gb_per_s: middle(&ours, Pass::gb_per_s),
        cpu_seconds_per_gb: middle(&ours, Pass::cpu_seconds_per_gb),
        fio: own,
        fio_huge: huge,
    })
}

fn versus(ours: &[Pass], theirs: &[Pass]) -> Option<Versus> {
    let ratio = |of: fn(&Pass) -> f64| {
        let pairs = ours.iter().zip(theirs).map(|(our, their)| of(our) / of(their));
        median(&pairs.collect::<Vec<f64>>())
    };
    (!theirs.is_empty()).then(|| Versus {
        gb_per_s: middle(theirs, Pass::gb_per_s),
        cpu_seconds_per_gb: middle(theirs, Pass::cpu_seconds_per_gb),
        speed_ratio: ratio(Pass::gb_per_s),
        cpu_ratio: ratio(Pass::cpu_seconds_per_gb),
    })
}

fn middle(passes: &[Pass], of: fn(&Pass) -> f64) -> f64 {
    median(&passes.iter().map(of).collect::<Vec<f64>>())
}

fn print_head(report: &Report) {
    let Report { backend, fio, file_bytes, rounds, times, .. } = report;
    println!("{backend}, {fio}, {times} times {} MiB, {rounds} rounds in alternation", file_bytes >> 20);
    println!(
        "speed: Spillway's over fio's; cpu: processor seconds of Spillway over fio's; huge: fio with 2 MiB pages"
    );
    println!(
        "                                            cpu      fio  fio cpu                  huge huge cpu"
    );
    println!(
        "way      block  depth  engines    GB/s     s/GB     GB/s     s/GB  speed    cpu    GB/s     s/GB  speed    cpu"
    );
}

fn print_row(row: &Row) {
    let Shape { block_bytes, depth, engines, .. } = row.shape;
    let way = if row.direction == Direction::Read { "read" } else { "write" };
    let mut line = format!(
        "{way:<5}  {:>5} K  {depth:>5}  {engines:>7}  {:>6.3}  {:>7.4}",
        block_bytes >> 10,
        row.gb_per_s,
        row.cpu_seconds_per_gb
    );
    for Versus { gb_per_s, cpu_seconds_per_gb, speed_ratio, cpu_ratio } in
        [&row.fio, &row.fio_huge].into_iter().flatten()
    {
        line +=
            &format!("  {gb_per_s:>7.3}  {cpu_seconds_per_gb:>7.4}  {speed_ratio:>5.2}  {cpu_ratio:>5.2}");
    }
    println!("{line}");
}
