//! `spillway bench io`: sequential direct reads and writes, alternating with fio on the same file.
//!
//! fio runs twice: with its default buffers, and with 2 MiB pages like the library's pools, because the page size alone
//! can change the results by a factor. Both figures of a ratio are of one round, since the speed of a disk drifts.
#![forbid(unsafe_code)]

use std::path::PathBuf;

use spillway::error::{Error, Result};
use spillway::io::options::BackendChoice;

use super::fio::{self, Pages};
use super::io_load::{Direction, FILE_BLOCK, Load, Pass, Shape, TestFile};
use super::measurement::{Better, Row, ratios};
use super::output::{Output, Session};
use super::report::{Column, parse_count, size};

#[derive(clap::Args)]
pub struct Options {
    #[command(flatten)]
    output: Output,
    /// Directory of the test file.
    #[arg(long, default_value = ".")]
    dir: PathBuf,
    /// Size of the test file in bytes, with Ki, Mi or Gi.
    #[arg(long, default_value = "256Mi", value_parser = parse_count)]
    size: usize,
    /// Size of a block in bytes.
    #[arg(long, value_delimiter = ',', default_value = "256Ki,1Mi", value_parser = parse_count)]
    block: Vec<usize>,
    /// Blocks in flight per engine.
    #[arg(long, value_delimiter = ',', default_value = "32")]
    depth: Vec<u32>,
    /// Number of engines, each with its own ring, thread and range of the file; also fio's number of jobs.
    #[arg(long, value_delimiter = ',', default_value = "1")]
    engines: Vec<usize>,
    /// Blocks per operation; fio always uses one.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    blocks: u32,
    /// Number of rounds.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Passes over the file per measurement: fio reports processor time in whole milliseconds.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    times: u32,
    /// Skips fio.
    #[arg(long)]
    no_fio: bool,
}

const COLUMNS: &[Column] = &[
    Column::case("way", "direction", 5),
    Column::case("block", "block_bytes", 5),
    Column::case("depth", "depth", 5),
    Column::case("engines", "engines", 7),
    Column::median("GB/s", "gb_per_s", 6, 3),
    Column::median("cpu s/GB", "cpu_seconds_per_gb", 8, 4),
    Column::median("fio GB/s", "fio_gb_per_s", 8, 3),
    Column::median("speed", "speed_ratio_to_fio", 6, 2),
    Column::spread(2),
    Column::median("cpu", "cpu_ratio_to_fio", 6, 2),
    Column::median("huge speed", "speed_ratio_to_fio_huge", 10, 2),
    Column::median("huge cpu", "cpu_ratio_to_fio_huge", 8, 2),
];

pub fn run(options: &Options) -> Result<()> {
    let fio = if options.no_fio { None } else { fio::version() };
    let shapes = shapes(options)?;
    let smallest = Shape { block_bytes: 4096, depth: 1, engines: 1, blocks: 1 };
    let settings = [
        ("backend", Load::open(smallest, BackendChoice::Auto)?.backend()?.into()),
        ("file_bytes", options.size.into()),
        ("fio", fio.as_deref().unwrap_or("not measured").into()),
        ("rounds", options.rounds.into()),
        ("times", options.times.into()),
    ];
    let stages = 1 + 2 * shapes.len();
    let mut session = Session::begin(&options.output, "io", settings, COLUMNS, stages)?;
    session.progress().begin(&format!("writing a file of {}", size(options.size as u64)));
    let file = TestFile::create(&options.dir, options.size as u64)?;
    session.progress().end();
    for shape in shapes {
        let load = Load::open(shape, BackendChoice::Auto)?;
        for direction in [Direction::Read, Direction::Write] {
            let Shape { block_bytes, depth, engines, .. } = shape;
            let (word, block) = (word(direction), size(block_bytes as u64));
            session.progress().begin(&format!("{word}: blocks of {block}, depth {depth}, {engines} engines"));
            session.row(measure(&load, &file, shape, direction, options, fio.is_some())?)?;
            session.progress().end();
        }
    }
    session.finish()
}

fn shapes(options: &Options) -> Result<Vec<Shape>> {
    if !(options.size as u64).is_multiple_of(FILE_BLOCK) {
        return Err(Error::invalid("--size", "must be a multiple of 4 MiB, in which the file is written"));
    }
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
    let headline = if with_fio { "speed_ratio_to_fio" } else { "gb_per_s" };
    let (speed, cpu) = (each(&ours, Pass::gb_per_s), each(&ours, Pass::cpu_seconds_per_gb));
    let mut row = Row::new(headline, Better::Higher)
        .case("direction", word(direction))
        .case("block_bytes", shape.block_bytes)
        .case("blocks", shape.blocks)
        .case("depth", shape.depth)
        .case("engines", shape.engines)
        .figure("gb_per_s", &speed)
        .figure("cpu_seconds_per_gb", &cpu);
    for (name, passes) in ["fio", "fio_huge"].into_iter().zip(&theirs).filter(|_| with_fio) {
        let (its_speed, its_cpu) = (each(passes, Pass::gb_per_s), each(passes, Pass::cpu_seconds_per_gb));
        row = row
            .figure(&format!("{name}_gb_per_s"), &its_speed)
            .figure(&format!("{name}_cpu_seconds_per_gb"), &its_cpu)
            .figure(&format!("speed_ratio_to_{name}"), &ratios(&speed, &its_speed))
            .figure(&format!("cpu_ratio_to_{name}"), &ratios(&cpu, &its_cpu));
    }
    Ok(row)
}

fn each(passes: &[Pass], figure: fn(&Pass) -> f64) -> Vec<f64> {
    passes.iter().map(figure).collect()
}

fn word(direction: Direction) -> &'static str {
    if direction == Direction::Read { "read" } else { "write" }
}
