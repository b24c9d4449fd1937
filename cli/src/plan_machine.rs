//! The machine of `spillway plan MODEL`: options, then measurements, then a machine of a paper, then assumptions.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use bytesize::ByteSize;
use serde_json::Value;
use spillway::error::{Error, Result};
use spillway::io::profile as io_profile;
use spillway::sys::descriptor::read_small;
use spillway::sys::file::{file_system, free_bytes};
use spillway::sys::memory::unused_bytes;
use spillway::sys::profile::Contents;
use spillway::sys::topology::mounts;
use spillway_planner::model::machine::{Machine, PathSpec};
use spillway_planner::model::presets;

use super::stdout;

const GIGA: f64 = 1e9;
/// Bytes that an Adam step in f32 moves per parameter.
const ADAM_BYTES: f64 = 28.0;
/// Largest report; those of the benchmarks have a few kilobytes.
const MOST_REPORT_BYTES: u64 = 64 << 20;
/// Bytes of a parameter on the link, in the profile's figures of 16-bit copies.
const HALF: f64 = 2.0;

/// Where each figure comes from.
pub type Sources = BTreeMap<&'static str, String>;

#[derive(clap::Args)]
#[group(skip)]
pub struct Options {
    /// A machine of a paper: gh200, dos-h100, dos-v100, mlp-offload-1 or mlp-offload-2; without it, this machine.
    #[arg(long, requires = "subject", conflicts_with = "interleaved")]
    machine: Option<String>,
    /// Memory of each GPU and host memory for the run, such as 24GB,64GB: prints what fits, fastest first, and the call
    /// that uses it.
    #[arg(long, requires = "subject", value_name = "GPU,HOST", value_parser = fit,
          conflicts_with_all = ["gpu_memory", "host_memory", "interleaved"])]
    pub fit: Option<(ByteSize, ByteSize)>,
    /// Memory of each GPU, such as 80GB.
    #[arg(long, requires = "subject", conflicts_with = "interleaved", value_parser = memory)]
    gpu_memory: Option<ByteSize>,
    /// Host memory for the run, such as 512GB; default: what is available.
    #[arg(long, requires = "subject", conflicts_with = "interleaved", value_parser = memory)]
    host_memory: Option<ByteSize>,
    /// Link of each GPU, GB/s in each direction.
    #[arg(long, requires = "subject", conflicts_with = "interleaved")]
    link_gbps: Option<f64>,
    /// Adam on all processors together, in GB/s: 28 bytes per parameter.
    #[arg(long, requires = "subject", conflicts_with = "interleaved")]
    cpu_adam_gbps: Option<f64>,
    /// Adam on one GPU, in GB/s of 28 bytes per parameter.
    #[arg(long, requires = "subject", conflicts_with = "interleaved")]
    gpu_adam_gbps: Option<f64>,
    /// Operations that forward and backward reach on one GPU, in 10^12 per second.
    #[arg(long, requires = "subject", conflicts_with = "interleaved")]
    gpu_tflops: Option<f64>,
    /// A path of the tier, with GB/s of reads and writes and its capacity; may be repeated. Without the speeds, those
    /// of `spillway tune`; without the capacity, the free space.
    #[arg(
        long = "path",
        requires = "subject",
        conflicts_with = "interleaved",
        value_name = "DIR[:READ:WRITE[:CAPACITY]]"
    )]
    paths: Vec<String>,
    /// Profile with measurements; default: the one that engines read, unless --machine is given.
    #[arg(long, requires = "subject", conflicts_with = "interleaved")]
    profile: Option<PathBuf>,
    /// The entry of the profile for the GPU's link; needed if the profile has several.
    #[arg(long, requires = "subject", conflicts_with = "interleaved")]
    profile_link: Option<String>,
    /// A report of `python -m spillway.bench adam --json=FILE`: its fastest case in f32.
    #[arg(long, requires = "subject", conflicts_with = "interleaved", value_name = "REPORT.json")]
    adam_report: Option<PathBuf>,
}

/// The two sizes of `--fit`.
fn fit(given: &str) -> std::result::Result<(ByteSize, ByteSize), String> {
    let (gpu, host) = given.split_once(',').ok_or("is not two sizes, such as 24GB,64GB")?;
    Ok((memory(gpu.trim())?, memory(host.trim())?))
}

/// A size with its unit: 24 for 24GB would be a plan of 24 bytes.
pub fn memory(given: &str) -> std::result::Result<ByteSize, String> {
    let found = given.parse()?;
    match given.ends_with(|letter: char| letter.is_ascii_alphabetic()) {
        true => Ok(found),
        false => Err(format!("{given} has no unit; write it as {given}GB, or with another unit")),
    }
}

/// A machine, the number of its GPUs, and where its figures come from.
pub struct Found {
    pub machine: Machine,
    pub gpus: u64,
    pub sources: Sources,
}

/// What is assumed where nothing is known: a GPU of 80 GB on PCIe 4, and the processors of a small server.
fn assumed() -> Machine {
    Machine {
        gpu_memory: 80_000_000_000,
        host_memory: unused_bytes().unwrap_or(64_000_000_000),
        h2d: 25.0 * GIGA,
        d2h: 25.0 * GIGA,
        duplex: true,
        cpu: 2.0 * GIGA,
        downscale: f64::INFINITY,
        gpu: 25.0 * GIGA,
        flops: 150e12,
        paths: Vec::new(),
    }
}

const FIELDS: [&str; 7] = ["gpu_memory", "host_memory", "h2d", "d2h", "cpu", "gpu", "flops"];

/// The machine that the options describe.
pub fn machine(options: &Options) -> Result<Found> {
    let mut found = base(options)?;
    let contents = profile(options)?;
    if let Some((path, contents)) = &contents {
        measured_link(options, path, contents, &mut found)?;
    }
    if let Some(path) = &options.adam_report {
        found.machine.cpu = report(path)
            .map_err(|reason| Error::invalid("--adam-report", format!("{}: {reason}", path.display())))?;
        found.sources.insert("cpu", format!("report {}", path.display()));
    }
    let Found { machine, sources, .. } = &mut found;
    let mut set = |names: &[&'static str]| {
        names.iter().for_each(|name| drop(sources.insert(name, "option".to_string())))
    };
    if let Some(size) = options.fit.map(|(gpu, _)| gpu).or(options.gpu_memory) {
        machine.gpu_memory = size.as_u64();
        set(&["gpu_memory"]);
    }
    if let Some(size) = options.fit.map(|(_, host)| host).or(options.host_memory) {
        machine.host_memory = size.as_u64();
        set(&["host_memory"]);
    }
    if let Some(speed) = options.link_gbps {
        (machine.h2d, machine.d2h) = (speed * GIGA, speed * GIGA);
        set(&["h2d", "d2h"]);
    }
    if let Some(speed) = options.cpu_adam_gbps {
        machine.cpu = speed * GIGA / ADAM_BYTES;
        set(&["cpu"]);
    }
    if let Some(speed) = options.gpu_adam_gbps {
        machine.gpu = speed * GIGA / ADAM_BYTES;
        set(&["gpu"]);
    }
    if let Some(speed) = options.gpu_tflops {
        machine.flops = speed * 1e12;
        set(&["flops"]);
    }
    if !options.paths.is_empty() {
        let contents = contents.as_ref().map(|(_, contents)| contents);
        machine.paths = paths(&options.paths, contents)?;
        sources.insert("paths", "option".to_string());
    }
    Ok(found)
}

/// The machine of a paper, or this machine before any measurement.
fn base(options: &Options) -> Result<Found> {
    let Some(name) = &options.machine else {
        let mut sources: Sources = FIELDS.iter().map(|name| (*name, "assumed".to_string())).collect();
        if unused_bytes().is_some() {
            sources.insert("host_memory", "available".to_string());
        }
        return Ok(Found { machine: assumed(), gpus: 1, sources });
    };
    let preset = presets::machine(name).ok_or_else(|| {
        let names = presets::machines().map(|preset| preset.name);
        Error::invalid("--machine", format!("is {name:?}, but must be one of {}", names.join(", ")))
    })?;
    let source = |field: &&'static str| match preset.assumed.contains(field) {
        true => (*field, "assumed".to_string()),
        false => (*field, preset.source.to_string()),
    };
    let sources = FIELDS.iter().chain(&["paths"]).map(source).collect();
    Ok(Found { machine: preset.machine(), gpus: preset.gpus, sources })
}

/// The profile: a named one must be there and valid, that of this machine may be absent or invalid.
fn profile(options: &Options) -> Result<Option<(PathBuf, Contents)>> {
    let path = match &options.profile {
        Some(path) => path.clone(),
        None if options.machine.is_some() => return Ok(None),
        None => match io_profile::path() {
            Some(path) => path,
            None => return Ok(None),
        },
    };
    match (Contents::read(&path), options.profile.is_some()) {
        (Ok(Some(contents)), _) => Ok(Some((path, contents))),
        (Ok(None), true) => {
            Err(Error::invalid("--profile", format!("{}: there is no such file", path.display())))
        }
        (Err(reason), true) => Err(Error::invalid("--profile", format!("{}: {reason}", path.display()))),
        (Err(reason), false) => {
            stdout::note(&format!("spillway: the profile {} is ignored: {reason}", path.display()));
            Ok(None)
        }
        (Ok(None), false) => Ok(None),
    }
}

fn measured_link(options: &Options, path: &Path, contents: &Contents, found: &mut Found) -> Result<()> {
    let names: Vec<&String> = contents.links.keys().collect();
    let name = match (&options.profile_link, names.as_slice()) {
        (Some(name), _) => name,
        (None, []) => return Ok(()),
        (None, [only]) => only,
        (None, _) => {
            return Err(Error::invalid(
                "--profile-link",
                format!("is missing, and the profile has {} links: {names:?}", names.len()),
            ));
        }
    };
    let link = spillway::gpu::profile::find(path, name).ok_or_else(|| {
        Error::invalid(
            "--profile-link",
            format!("is {name:?}, but the profile has valid figures for none or for {names:?}"),
        )
    })?;
    found.machine.h2d = link.h2d_native * HALF;
    found.machine.d2h = link.d2h_native * HALF;
    found.machine.cpu = link.step_native;
    for field in ["h2d", "d2h", "cpu"] {
        found.sources.insert(field, format!("profile {}", path.display()));
    }
    Ok(())
}

/// Parameters per second of Spillway's fastest step in f32, from a report of `python -m spillway.bench adam`.
fn report(path: &Path) -> std::result::Result<f64, String> {
    let bytes = read_small(path, MOST_REPORT_BYTES)?.ok_or("there is no such file")?;
    let report: Value =
        serde_json::from_slice(&bytes).map_err(|error| format!("the file is not JSON: {error}"))?;
    let rows = report["rows"].as_array().filter(|_| report["bench"] == "python adam");
    let ours = |row: &&Value| {
        let case = &row["case"];
        case["contender"] == "spillway" && case["work"] == "plain f32"
    };
    let seconds = |row: &Value| row["figures"]["ns_per_parameter"]["median"].as_f64();
    let fastest = rows.into_iter().flatten().filter(ours).filter_map(seconds).reduce(f64::min);
    let found = fastest.map(|nanoseconds| GIGA / nanoseconds).filter(|speed| speed.is_finite());
    found.ok_or_else(|| "is no report of python -m spillway.bench adam --json=FILE".to_string())
}

/// The paths. Those on one file system share its free space; a capacity that is given counts as it is.
fn paths(texts: &[String], contents: Option<&Contents>) -> Result<Vec<PathSpec>> {
    let mut found: Vec<(PathSpec, bool)> = Vec::new();
    let mut places: Vec<Option<(PathBuf, u64)>> = Vec::new();
    for text in texts {
        let (spec, is_free_space) = path(text, contents)?;
        let directory = Path::new(&spec.name);
        let place = directory.canonicalize().ok().zip(directory.metadata().ok());
        let place = place.map(|(whole, about)| (whole, about.dev()));
        let is_equal = |(earlier, other): (&(PathSpec, bool), &Option<(PathBuf, u64)>)| {
            earlier.0.name == spec.name
                || place.as_ref().zip(other.as_ref()).is_some_and(|(one, two)| one.0 == two.0)
        };
        if found.iter().zip(&places).any(is_equal) {
            return Err(Error::invalid("--path", format!("{text}: the directory is given twice")));
        }
        found.push((spec, is_free_space));
        places.push(place);
    }
    let devices: Vec<Option<u64>> = places.iter().map(|place| Some(place.as_ref()?.1)).collect();
    let shares = |index: usize| {
        let is_one_of = |other: &usize| found[*other].1 && devices[*other] == devices[index];
        (0..found.len()).filter(is_one_of).count().max(1) as u64
    };
    let counts: Vec<u64> = (0..found.len()).map(shares).collect();
    let share = |((spec, is_free_space), count): ((PathSpec, bool), u64)| match is_free_space {
        true => PathSpec { capacity: spec.capacity / count, ..spec },
        false => spec,
    };
    Ok(found.into_iter().zip(counts).map(share).collect())
}

/// A path with its speeds, from the text or from the profile; and whether its capacity is the free space.
fn path(text: &str, contents: Option<&Contents>) -> Result<(PathSpec, bool)> {
    let refuse = |reason: String| Error::invalid("--path", format!("{text}: {reason}"));
    let parts: Vec<&str> = text.split(':').collect();
    let number = |place: usize| parts.get(place).and_then(|part| part.parse::<f64>().ok());
    let count = parts.len();
    let with_capacity = count > 3 && number(count - 3).is_some() && number(count - 2).is_some();
    let with_speeds = count > 2 && number(count - 2).is_some() && number(count - 1).is_some();
    let (name, speeds, capacity) = match (with_capacity, with_speeds) {
        (true, _) => {
            let capacity = memory(parts[count - 1]).map_err(refuse)?.as_u64();
            (parts[..count - 3].join(":"), number(count - 3).zip(number(count - 2)), Some(capacity))
        }
        (false, true) => (parts[..count - 2].join(":"), number(count - 2).zip(number(count - 1)), None),
        (false, false) => (text.to_string(), None, None),
    };
    let directory = Path::new(&name);
    let (read, write) = match speeds {
        Some(speeds) => speeds,
        None => tuned(directory, contents).map_err(refuse)?,
    };
    let is_free_space = capacity.is_none();
    let capacity = match capacity {
        Some(capacity) => capacity,
        None => free_bytes(directory)
            .ok_or_else(|| refuse("its free space is unknown; add :CAPACITY".to_string()))?,
    };
    Ok((PathSpec { name, read: read * GIGA, write: write * GIGA, capacity }, is_free_space))
}

/// GB/s of reads and writes that `spillway tune` stored for the file system of a directory.
fn tuned(directory: &Path, contents: Option<&Contents>) -> std::result::Result<(f64, f64), String> {
    let advice = "run spillway tune --dir, or give DIR:READ:WRITE:CAPACITY";
    let file = std::fs::File::open(directory).map_err(|error| format!("{error}; {advice}"))?;
    let system = file_system(&file).map_err(|error| error.to_string())?;
    let entry = contents.and_then(|contents| contents.filesystems.get(&system.to_string()));
    let figure = |name: &str| entry.and_then(|entry| entry.get(name)).and_then(Value::as_f64);
    let both = figure("read_gb_per_s").zip(figure("write_gb_per_s"));
    both.ok_or_else(|| {
        let name = mounts::of(directory).map_or_else(|| system.to_string(), |mount| mount.to_string());
        format!("the profile has no speeds for its file system, {name}; {advice}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_has_its_speeds_behind_its_name() {
        let found = path("/mnt/a:6.9:5.3:3.2TB", None).unwrap().0;
        assert_eq!((found.name.as_str(), found.read, found.write), ("/mnt/a", 6.9e9, 5.3e9));
        assert_eq!(found.capacity, 3_200_000_000_000);
        let store = path("s3://bucket/run:1:0.5:1GiB", None).unwrap().0;
        assert_eq!((store.name.as_str(), store.write, store.capacity), ("s3://bucket/run", 0.5e9, 1 << 30));
        let (here, is_free_space) = path(".:1:2", None).unwrap();
        assert!(is_free_space && here.capacity > 0 && here.read == 1e9 && here.name == ".");
        for (text, words) in [
            (".", "has no speeds"),
            ("/proc", "proc, mounted on /proc; run spillway tune"),
            ("/mnt/a:1:1:500", "500GB, or with another unit"),
            ("no/such/folder", "spillway tune"),
            ("no/such/folder:1:1", "free space is unknown"),
            ("/mnt/a:1:1:many", "many"),
        ] {
            let reason = path(text, None).unwrap_err().to_string();
            assert!(reason.contains(words), "{text}: {reason}");
        }
    }

    #[test]
    fn paths_on_one_file_system_share_its_free_space() {
        let folder = tempfile::tempdir().unwrap();
        let text = |name: &str, end: &str| {
            std::fs::create_dir_all(folder.path().join(name)).unwrap();
            format!("{}{end}", folder.path().join(name).display())
        };
        let found = paths(&[text("a", ":1:1"), text("b", ":1:1"), text("c", ":1:1:7GB")], None).unwrap();
        let free = free_bytes(folder.path()).unwrap() as f64;
        // Other processes write to this file system meanwhile.
        let part = (found[0].capacity + found[1].capacity) as f64 / free;
        assert!((0.9..1.1).contains(&part), "{part}");
        assert_eq!(found[2].capacity, 7_000_000_000);
        let twice = paths(&[text("a", ":1:1"), text("a/../a", ":2:2:1GB")], None).unwrap_err().to_string();
        assert!(twice.contains("given twice"), "{twice}");
    }
}
