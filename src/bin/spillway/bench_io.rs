//! `spillway bench io`: sequential direct reads and writes, alternating with fio on the same file.
//!
//! fio runs twice: with its default buffers, and with 2 MiB pages like the library's pools, because the page size alone
//! can change the results by a factor. Ratios are medians of the rounds' ratios, since the speed of a disk drifts.
#![forbid(unsafe_code)]

use std::path::PathBuf;

use spillway::error::{Error, Result};
use spillway::io::options::BackendChoice;

use super::fio::{self, Pages};
use super::io_load::{Direction, Load, Pass, Shape, TestFile};
use super::progress::Progress;
use super::report::{median, parse_count, size, table};

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
    let shapes = shapes(options)?;
    let progress = Progress::new(1 + 2 * shapes.len());
    progress.begin(&format!("writing a file of {}", size(options.size as u64)));
    let file = TestFile::create(&options.dir, options.size as u64)?;
    progress.end();
    let mut report = Report {
        version: spillway::VERSION,
        backend: Load::open(
            Shape { block_bytes: 4096, depth: 1, engines: 1, blocks: 1 },
            BackendChoice::Auto,
        )?
        .backend()?,
        fio: fio.clone().unwrap_or_else(|| "not measured".to_string()),
        file_bytes: file.bytes,
        rounds: options.rounds,
        times: options.times,
        rows: Vec::new(),
    };
    for shape in shapes {
        let load = Load::open(shape, BackendChoice::Auto)?;
        for direction in [Direction::Read, Direction::Write] {
            let Shape { block_bytes, depth, engines, .. } = shape;
            let block = size(block_bytes as u64);
            progress
                .begin(&format!("{}: blocks of {block}, depth {depth}, {engines} engines", word(direction)));
            report.rows.push(measure(&load, &file, shape, direction, options, fio.is_some())?);
            progress.end();
        }
    }
    drop(progress);
    match options.json {
        true => println!("{}", serde_json::to_string_pretty(&report).unwrap_or_default()),
        false => print(&report),
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
                    let reason = format!(
                        "cannot measure {block_bytes} bytes, depth {depth}, {engines} engines: blocks must \
                         be multiples of 4096 bytes, the others above 0, and --size large enough"
                    );
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

fn word(direction: Direction) -> &'static str {
    if direction == Direction::Read { "read" } else { "write" }
}

fn print(report: &Report) {
    let Report { backend, fio, file_bytes, rounds, times, rows, .. } = report;
    println!("{backend}, {fio}, {times} x {}, {rounds} alternating rounds", size(*file_bytes));
    println!("s/GB: CPU seconds per GB; speed and cpu: Spillway / fio; huge: fio with 2 MiB pages");
    let mut table = table([
        "way",
        "block",
        "depth",
        "engines",
        "GB/s",
        "s/GB",
        "fio GB/s",
        "fio s/GB",
        "speed",
        "cpu",
        "huge GB/s",
        "huge s/GB",
        "huge speed",
        "huge cpu",
    ]);
    for row in rows {
        let Shape { block_bytes, depth, engines, .. } = row.shape;
        let mut cells = vec![
            word(row.direction).to_string(),
            size(block_bytes as u64),
            depth.to_string(),
            engines.to_string(),
            format!("{:.3}", row.gb_per_s),
            format!("{:.4}", row.cpu_seconds_per_gb),
        ];
        for versus in [&row.fio, &row.fio_huge].into_iter().flatten() {
            cells.push(format!("{:.3}", versus.gb_per_s));
            cells.push(format!("{:.4}", versus.cpu_seconds_per_gb));
            cells.push(format!("{:.2}", versus.speed_ratio));
            cells.push(format!("{:.2}", versus.cpu_ratio));
        }
        table.add_row(cells);
    }
    println!("{table}");
}
