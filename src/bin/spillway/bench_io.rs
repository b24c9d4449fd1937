//! `spillway bench io`: sequential reads and writes past the page cache, in alternation with fio on the same file.
//!
//! fio runs twice: with buffers as it takes them, and with 2 MiB pages like the library's pools, since the size of the
//! pages alone can be worth a factor. Ratios are medians of the rounds' ratios: the speed of a disk drifts.
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
    /// Where the test file is made.
    #[arg(long, default_value = ".")]
    dir: PathBuf,
    /// Bytes of the test file, with Ki, Mi or Gi.
    #[arg(long, default_value = "1Gi", value_parser = parse_count)]
    size: usize,
    /// Bytes of a block.
    #[arg(long, value_delimiter = ',', default_value = "256Ki,1Mi,4Mi", value_parser = parse_count)]
    block: Vec<usize>,
    /// Blocks under way at a time, of each engine.
    #[arg(long, value_delimiter = ',', default_value = "8,32")]
    depth: Vec<u32>,
    /// Engines, each with its own ring, thread and stretch of the file; jobs of fio.
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    engines: Vec<usize>,
    /// Blocks of one operation; fio's always have one.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    blocks: u32,
    /// Alternations.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// How often a measurement goes over the file: fio tells processor time in whole milliseconds.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    times: u32,
    /// Does not run fio.
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
    /// Against fio with buffers as it takes them, and with 2 MiB pages.
    fio: Option<Versus>,
    fio_huge: Option<Versus>,
}

#[derive(serde::Serialize)]
struct Versus {
    gb_per_s: f64,
    cpu_seconds_per_gb: f64,
    /// Above 1, Spillway is faster.
    speed_ratio: f64,
    /// Below 1, Spillway uses less processor time.
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
    // The first round only warms up.
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
