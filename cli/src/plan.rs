//! `spillway plan` without a model: the predictions for an interleaved update and for the plans of other rules.
#![forbid(unsafe_code)]

use std::fmt::Write;
use std::str::FromStr;

use spillway::error::{Error, Result};
use spillway_planner::interleave::choose::{Choice, Mode, choose, within};
use spillway_planner::interleave::memory::{Bytes, bytes};
use spillway_planner::interleave::placements::{Placement, Plan};
use spillway_planner::interleave::share::{self, Balance};
use spillway_planner::interleave::{DEFAULT_SLOTS, GpuGrads, Rates, Shape, TransferDtype};
use spillway_planner::model::config::parameters;

use super::report::{size, table};
use super::stdout;

const GIGA: f64 = 1e9;
/// Bytes of a parameter on the link.
const WORD: f64 = 4.0;

/// Options for the machine, the model and the planning rule.
#[derive(clap::Args)]
#[group(id = "interleaved")]
#[command(next_help_heading = "Interleaved update")]
pub struct Options {
    /// Parameters of this GPU's shard, such as 5B.
    #[arg(long, default_value = "5B", value_name = "NUMBER", value_parser = parameters)]
    pub shard: u64,
    /// Parameters of a subgroup, in millions.
    #[arg(long, default_value_t = 100.0)]
    pub subgroup: f64,
    /// Number of subgroups whose state stays on the GPU.
    #[arg(long, default_value_t = 0)]
    pub residents: usize,
    /// Free GPU memory, GB: as many residents as fit, and slots if they gain more than the residents in their place.
    #[arg(long, conflicts_with_all = ["residents", "mode"])]
    pub free_memory: Option<f64>,
    /// CPU step, billions of parameters per second.
    #[arg(long, default_value_t = 2.0)]
    pub cpu: f64,
    /// Separate rounding pass to 16 bits on the CPU, billions of parameters per second; omitted, the step rounds.
    #[arg(long, default_value_t = f64::INFINITY)]
    pub downscale: f64,
    /// GPU step, billions of parameters per second.
    #[arg(long, default_value_t = 100.0)]
    pub gpu: f64,
    /// Link bandwidth, GB/s in each direction.
    #[arg(long, default_value_t = 55.0)]
    pub link: f64,
    /// Widening gradients on the GPU, billions of parameters per second; omitted, it takes no time.
    #[arg(long, default_value_t = f64::INFINITY)]
    pub cast: f64,
    /// Host memory bandwidth, GB/s; omitted, it is no limit.
    #[arg(long, default_value_t = f64::INFINITY)]
    pub dram: f64,
    /// The link transfers in one direction at a time.
    #[arg(long)]
    pub half_duplex: bool,
    /// Number of state buffers on the GPU, 12 bytes per parameter of a subgroup each.
    #[arg(long, default_value_t = DEFAULT_SLOTS)]
    pub slots: usize,
    /// Parameters per copy, in millions.
    #[arg(long, default_value_t = 16.0)]
    pub chunk: f64,
    /// Format of gradients on the link: f32, native or delivered.
    #[arg(long, default_value = "native", value_parser = wire)]
    pub wire: TransferDtype,
    /// Gradients of GPU subgroups wait in host memory and are fetched with the state.
    #[arg(long)]
    pub fetch_gradients: bool,
    /// Duration in seconds of the backward pass that overlaps the update.
    #[arg(long, default_value_t = 0.0)]
    pub backward: f64,
    /// Planning rule: model, eq1, stride=K or count=N.
    #[arg(long, default_value = "model", value_parser = mode)]
    pub mode: Mode,
}

#[derive(serde::Serialize)]
struct Report {
    plan: String,
    subgroups: usize,
    on_gpu: usize,
    residents: usize,
    seconds: f64,
    home_seconds: f64,
    serial_seconds: f64,
    share_eq1: f64,
    share_two_slots: f64,
    gpu_bytes: u64,
    host_bytes: u64,
    to_device_bytes: u64,
    to_host_bytes: u64,
}

impl Options {
    pub fn rates(&self) -> Rates {
        Rates {
            cpu: self.cpu * GIGA,
            downscale: self.downscale * GIGA,
            gpu: self.gpu * GIGA,
            h2d: self.link * GIGA / WORD,
            d2h: self.link * GIGA / WORD,
            cast: self.cast * GIGA,
            dram: self.dram * GIGA,
            duplex: !self.half_duplex,
        }
    }

    pub fn shape(&self) -> Result<Shape> {
        let whole = |name: &'static str, value: f64| match value >= 1.0 && value < 2_f64.powi(56) {
            true => Ok(value as u64),
            false => Err(Error::invalid(name, "must be at least 1 and below 2^56")),
        };
        let size = whole("subgroup", self.subgroup * 1e6)?.min(self.shard);
        let shape = Shape::covering(self.shard, size)?;
        let gpu_grads = if self.fetch_gradients { GpuGrads::Fetched } else { GpuGrads::Kept };
        let chunk = whole("chunk", self.chunk * 1e6)?;
        Ok(Shape { chunk, slots: self.slots, transfer_dtype: self.wire, gpu_grads, ..shape })
    }

    /// The plan of the options.
    pub fn plan(&self, shape: &Shape) -> Result<Choice> {
        match self.free_memory {
            None => self.choose(shape, self.mode),
            Some(free) if free >= 0.0 => {
                Ok(within(shape, &self.rates(), (free * GIGA) as u64, self.backward)?)
            }
            Some(free) => Err(Error::invalid("free-memory", format!("is {free}; pass a number from 0 on"))),
        }
    }

    pub fn choose(&self, shape: &Shape, mode: Mode) -> Result<Choice> {
        Ok(choose(shape, &self.rates(), self.residents, self.backward, mode)?)
    }
}

/// Prints the plan; `json`: as one JSON object.
pub fn run(options: &Options, json: bool) -> Result<()> {
    let (shape, rates) = (options.shape()?, options.rates());
    let chosen = options.plan(&shape)?;
    let found = bytes(&shape, &chosen.plan);
    let serial = shape.total() as f64 / share::serial_throughput(&rates);
    if json {
        let report = report(&shape, &rates, &chosen, &found, serial);
        return stdout::say_json(&report);
    }
    let mut text = String::new();
    write_plan(&mut text, &chosen.plan, shape.largest());
    let mut table = table(["update", "seconds", "G/s", "speed-up"]);
    let mut add = |name: &str, seconds: f64| {
        let rate = shape.total() as f64 / seconds / GIGA;
        let speed = serial / seconds;
        table.add_row([
            name.to_string(),
            format!("{seconds:.3}"),
            format!("{rate:.2}"),
            format!("{speed:.2}"),
        ]);
    };
    add("serial update", serial);
    let rows =
        [("all on the CPU", Mode::Count(0)), ("stride of Eq. 1", Mode::Eq1), ("model's best", Mode::Model)];
    for (name, mode) in rows {
        add(name, options.choose(&shape, mode)?.prediction.exposed);
    }
    add("this plan", chosen.prediction.exposed);
    let _ = writeln!(text, "\n{table}");
    let _ = writeln!(text, "last flush finished: {:.3} seconds", chosen.prediction.home);
    write_busy(&mut text, &chosen);
    write_bytes(&mut text, &found);
    stdout::say(&text)
}

fn report(shape: &Shape, rates: &Rates, chosen: &Choice, found: &Bytes, serial: f64) -> Report {
    let fetched = shape.fetched_words();
    Report {
        plan: chosen.plan.letters(),
        subgroups: shape.count(),
        on_gpu: chosen.plan.count_on(Placement::Gpu),
        residents: chosen.plan.count_on(Placement::Resident),
        seconds: chosen.prediction.exposed,
        home_seconds: chosen.prediction.home,
        serial_seconds: serial,
        share_eq1: share::gpu_share(rates, fetched, Balance::OneSlot),
        share_two_slots: share::gpu_share(rates, fetched, Balance::TwoSlots),
        gpu_bytes: found.gpu(),
        host_bytes: found.host(),
        to_device_bytes: found.to_device,
        to_host_bytes: found.to_host,
    }
}

fn write_plan(text: &mut String, plan: &Plan, size: u64) {
    let [cpu, gpu, residents] =
        [Placement::Cpu, Placement::Gpu, Placement::Resident].map(|placement| plan.count_on(placement));
    let _ = writeln!(
        text,
        "{} subgroups of {} M: {cpu} on the CPU (c), {gpu} on the GPU (G), {residents} resident (R)",
        plan.count(),
        size as f64 / 1e6
    );
    let letters = plan.letters();
    for line in letters.as_bytes().chunks(100) {
        let _ = writeln!(text, "{}", String::from_utf8_lossy(line));
    }
}

fn write_busy(text: &mut String, chosen: &Choice) {
    let [cpu, h2d, d2h, gpu] = chosen.prediction.busy;
    let _ = writeln!(
        text,
        "\nbusy seconds: CPU {cpu:.3}, host to device {h2d:.3}, device to host {d2h:.3}, GPU {gpu:.3}"
    );
}

fn write_bytes(text: &mut String, found: &Bytes) {
    let _ = writeln!(
        text,
        "GPU memory {}: slots {}, residents {}, kept gradients {}, chunks {}",
        size(found.gpu()),
        size(found.slots),
        size(found.residents),
        size(found.kept_grads),
        size(found.chunks)
    );
    let _ = writeln!(
        text,
        "host memory {}, pinned: states {}, gradients {}, staging {}",
        size(found.host()),
        size(found.host_states),
        size(found.host_grads),
        size(found.stages)
    );
    let _ = writeln!(
        text,
        "each step copies {} to the GPU and {} back",
        size(found.to_device),
        size(found.to_host)
    );
}

fn wire(text: &str) -> std::result::Result<TransferDtype, String> {
    match text {
        "f32" => Ok(TransferDtype::F32),
        "native" => Ok(TransferDtype::Native),
        "delivered" => Ok(TransferDtype::Delivered),
        _ => Err("must be f32, native or delivered".to_string()),
    }
}

fn mode(text: &str) -> std::result::Result<Mode, String> {
    let number = |text: &str| usize::from_str(text).map_err(|error| error.to_string());
    match text.split_once('=') {
        None if text == "model" => Ok(Mode::Model),
        None if text == "eq1" => Ok(Mode::Eq1),
        Some(("stride", stride)) => number(stride).map(Mode::Stride),
        Some(("count", count)) => number(count).map(Mode::Count),
        _ => Err("must be model, eq1, stride=K or count=N".to_string()),
    }
}
