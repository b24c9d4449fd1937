//! `spillway resctrl`: partitions of cache and memory bandwidth, shown, applied on request, and undone.
#![forbid(unsafe_code)]

use std::ffi::OsString;
use std::fmt::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitCode, ExitStatus};

use nix::sys::signal::{SigSet, SigmaskHow, Signal, kill};
use nix::unistd::Pid;
use spillway::error::{Error, Result};
use spillway::gpu::machine::Machine;
use spillway::gpu::visible::Ask;
use spillway::sys::bitmap::Bitmap;
use spillway::sys::resctrl::partition::{Partition, partitions};
use spillway::sys::resctrl::support::{MOUNT, Support};
use spillway::sys::resctrl::{self, Restored};
use spillway::sys::topology::Root;
use spillway::sys::topology::placement::Scope;

use super::stdout;

#[derive(clap::Subcommand)]
pub enum Command {
    /// Shows what the machine supports, and the two partitions as files of resctrl. Changes nothing.
    Show(Show),
    /// Makes the partitions for a command or a process; needs root.
    Apply(Apply),
    /// Removes the partitions of a process that has ended.
    Restore(Restore),
}

#[derive(clap::Args)]
struct Plan {
    /// Number of ranks on this machine; default: one for each visible GPU, else one.
    #[arg(long)]
    ranks: Option<u32>,
    /// Share of each rank's cores for the optimizer.
    #[arg(long, default_value_t = 0.9)]
    share: f64,
    /// Directory that stands for /, with `sys`, `proc` and `run`.
    #[arg(long, value_name = "DIR", default_value = "/")]
    root: PathBuf,
}

#[derive(clap::Args)]
pub struct Show {
    #[command(flatten)]
    plan: Plan,
    /// Prints one JSON object instead of text.
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
pub struct Apply {
    #[command(flatten)]
    plan: Plan,
    /// The partitions belong to this process. `restore` and the next `apply` remove them after its end.
    #[arg(long, value_name = "PID", required_unless_present = "command", conflicts_with = "command")]
    owner: Option<u32>,
    /// A command that runs in the partitions. They are removed at its end, and its exit status is returned.
    #[arg(last = true)]
    command: Vec<OsString>,
}

#[derive(clap::Args)]
pub struct Restore {
    /// Directory that stands for /, with `sys`, `proc` and `run`.
    #[arg(long, value_name = "DIR", default_value = "/")]
    root: PathBuf,
    /// Removes the partitions of a live process too.
    #[arg(long)]
    force: bool,
}

pub fn run(command: &Command) -> ExitCode {
    let outcome = match command {
        Command::Show(show) => self::show(show).map(|()| ExitCode::SUCCESS),
        Command::Apply(apply) => self::apply(apply),
        Command::Restore(restore) => self::restore(restore).map(|()| ExitCode::SUCCESS),
    };
    outcome.unwrap_or_else(|error| super::fail(&error))
}

fn root(path: &Path) -> Result<Root> {
    Root::recorded(path).map_err(|error| error.within("--"))
}

impl Plan {
    fn root(&self) -> Result<Root> {
        root(&self.root)
    }

    fn partitions(&self) -> Result<[Partition; 2]> {
        let root = self.root()?;
        let machine = Machine::read(root.clone(), Ask::Never)?;
        let ranks = self.ranks.unwrap_or(machine.visible.gpus.len().max(1) as u32);
        let ranks = machine.place(ranks, Scope::Node, self.share)?;
        let optimizer = ranks.iter().fold(Bitmap::new(), |all, rank| all.or(&rank.workers));
        let trainer = ranks.iter().fold(Bitmap::new(), |all, rank| all.or(&rank.trainer));
        partitions(&root, &machine.topology, &trainer, &optimizer)
    }
}

#[derive(serde::Serialize)]
struct Shown {
    support: Support,
    /// Empty if there are none; `reason` says why.
    partitions: Vec<Partition>,
    reason: Option<String>,
}

fn show(options: &Show) -> Result<()> {
    let support = Support::read(&options.plan.root()?);
    let (partitions, reason) = match options.plan.partitions() {
        Ok(partitions) => (partitions.to_vec(), None),
        Err(error @ Error::Unsupported(_)) => (Vec::new(), Some(error.to_string())),
        Err(error) => return Err(error),
    };
    let shown = Shown { support, partitions, reason };
    if options.json {
        return stdout::say_json(&shown);
    }
    stdout::say(&text(&shown))
}

fn text(shown: &Shown) -> String {
    let mut text = String::new();
    let list = |words: &[String]| if words.is_empty() { "none known".to_string() } else { words.join(", ") };
    let yes = |is: bool| if is { "yes" } else { "no" };
    let Support { processor, options, kernel, mounted, cache, bandwidth, groups } = &shown.support;
    let _ = writeln!(text, "processor features: {}", list(processor));
    let _ = writeln!(
        text,
        "kernel options: {}; file system: {}; mounted: {}",
        list(options),
        yes(*kernel),
        yes(*mounted)
    );
    if let Some(cache) = cache {
        let _ = writeln!(text, "L3 cache: {} parts, at least {} in a group", cache.bits, cache.least);
    }
    if let Some(bandwidth) = bandwidth {
        let _ = writeln!(text, "memory bandwidth: from {} in steps of {}", bandwidth.least, bandwidth.step);
    }
    if *groups > 0 {
        let _ = writeln!(text, "groups: at most {groups}");
    }
    for partition in &shown.partitions {
        let folder = format!("/{MOUNT}/{}", partition.name);
        let _ = writeln!(text, "\nmkdir {folder}\necho {} > {folder}/cpus_list", partition.cpus);
        for line in &partition.schemata {
            let _ = writeln!(text, "echo '{line}' > {folder}/schemata");
        }
    }
    if let Some(reason) = &shown.reason {
        let _ = writeln!(text, "no partitions: {reason}");
    }
    text
}

fn apply(options: &Apply) -> Result<ExitCode> {
    let partitions = options.plan.partitions()?;
    let root = options.plan.root()?;
    if let Some(owner) = options.owner {
        resctrl::apply(&root, &partitions, owner)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mine = std::process::id();
    // Blocked before the first change: a signal then ends the command first, and after it the partitions.
    let signals: SigSet = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGCHLD]
        .into_iter()
        .collect();
    let failed = |error: nix::Error| Error::system("changing the signal mask", &error.into());
    let before = signals.thread_swap_mask(SigmaskHow::SIG_BLOCK).map_err(failed)?;
    resctrl::apply(&root, &partitions, mine)?;
    // The command inherits the mask, so it starts with the earlier one. A signal in this moment ends this process alone, as
    // a kill does: `restore` removes what it left.
    let started = before.thread_set_mask().map_err(failed).and_then(|()| start(&options.command));
    let blocked = signals.thread_block().map_err(failed);
    let ended = started.and_then(|child| blocked.and_then(|()| wait(child, &signals)));
    let restored = resctrl::restore(&root, Some(mine), false);
    let status = ended?;
    restored?;
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    Ok(ExitCode::from(code.clamp(0, 255) as u8))
}

fn start(command: &[OsString]) -> Result<Child> {
    let (program, arguments) = command.split_first().ok_or_else(|| Error::invalid("command", "is empty"))?;
    std::process::Command::new(program).args(arguments).spawn().map_err(|error| Error::System {
        what: "starting the command",
        reason: format!("{}: {error}", program.display()),
    })
}

/// Waits for the end of the command. SIGTERM and SIGHUP are passed on; the terminal sends the others to the command too.
fn wait(mut child: Child, signals: &SigSet) -> Result<ExitStatus> {
    loop {
        let ended = child.try_wait().map_err(|error| Error::system("waiting for the command", &error))?;
        if let Some(status) = ended {
            return Ok(status);
        }
        match signals.wait() {
            Ok(signal @ (Signal::SIGTERM | Signal::SIGHUP)) => {
                // Not reaped yet, so the id is still the command's.
                let _ = kill(Pid::from_raw(child.id() as i32), signal);
            }
            _ => continue,
        }
    }
}

fn restore(options: &Restore) -> Result<()> {
    match resctrl::restore(&root(&options.root)?, None, options.force)? {
        Restored::Nothing => stdout::say("nothing to restore"),
        Restored::Removed => stdout::say("partitions removed"),
    }
}
