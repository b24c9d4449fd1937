//! Support for partitions by the processor, the kernel and the mounted file system.
#![forbid(unsafe_code)]

use std::{fs, io};

use serde::Serialize;

use crate::error::{Error, Result};
use crate::sys::topology::Root;

/// Where the kernel mounts resctrl.
pub const MOUNT: &str = "sys/fs/resctrl";
/// Options of the kernel, for Arm and x86.
const OPTIONS: [&str; 5] = [
    "CONFIG_ARM64_MPAM",
    "CONFIG_ACPI_MPAM",
    "CONFIG_ARM64_MPAM_DRIVER",
    "CONFIG_ARM64_MPAM_RESCTRL_FS",
    "CONFIG_X86_CPU_RESCTRL",
];
/// Flags of x86 processors.
const FLAGS: [&str; 4] = ["rdt_a", "cat_l3", "cdp_l3", "mba"];

/// Support for partitions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Support {
    /// Features that the processor or its firmware states.
    pub processor: Vec<String>,
    /// Options that the kernel was built with, from /boot/config-RELEASE.
    pub options: Vec<String>,
    /// True if the kernel has the file system.
    pub kernel: bool,
    /// True if it is mounted.
    pub mounted: bool,
    /// The L3 cache, if it can be divided.
    pub cache: Option<CacheMask>,
    /// The memory bandwidth, if it can be divided.
    pub bandwidth: Option<Bandwidth>,
    /// Number of groups that the hardware distinguishes (`num_closids`), the default group included; 0 if unknown.
    pub groups: u32,
}

/// Parts of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct CacheMask {
    /// Number of parts, a bit for each.
    pub bits: u32,
    /// Least number of bits of a group.
    pub least: u32,
}

/// Steps of bandwidth.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Bandwidth {
    /// Least value.
    pub least: u64,
    /// Values are multiples of this.
    pub step: u64,
}

impl Support {
    /// Reads the support below `root`.
    pub fn read(root: &Root) -> Support {
        let cpuinfo = root.text("proc/cpuinfo").unwrap_or_default();
        let flags = cpuinfo.lines().find_map(|line| line.strip_prefix("flags")).unwrap_or_default();
        let has = |flag: &&&str| flags.split_whitespace().any(|found| found == **flag);
        let mut processor: Vec<String> = FLAGS.iter().filter(has).map(ToString::to_string).collect();
        if root.exists("sys/firmware/acpi/tables/MPAM") {
            processor.push("MPAM".to_string());
        }
        let release = root.text("proc/sys/kernel/osrelease").unwrap_or_default();
        let config = root.text(&format!("boot/config-{}", release.trim())).unwrap_or_default();
        let is_set = |option: &&&str| config.lines().any(|line| line == format!("{option}=y"));
        let systems = root.text("proc/filesystems").unwrap_or_default();
        let number = |path: &str| root.number::<u64>(&format!("{MOUNT}/info/{path}"));
        let small = |path: &str| number(path).and_then(|number| u32::try_from(number).ok());
        let groups =
            ["L3", "L3CODE", "MB"].iter().filter_map(|name| small(&format!("{name}/num_closids"))).min();
        Support {
            processor,
            options: OPTIONS.iter().filter(is_set).map(ToString::to_string).collect(),
            kernel: systems.lines().any(|line| line.ends_with("resctrl")),
            mounted: !matches!(mounted(root), Err(Error::Unsupported(_))),
            cache: ["L3", "L3CODE"].iter().find_map(|name| cache(root, name)),
            bandwidth: number("MB/min_bandwidth")
                .map(|least| Bandwidth { least, step: number("MB/bandwidth_gran").unwrap_or(1).max(1) }),
            groups: groups.unwrap_or(0),
        }
    }
}

fn cache(root: &Root, name: &str) -> Option<CacheMask> {
    let text = root.text(&format!("{MOUNT}/info/{name}/cbm_mask"))?;
    let mask = u64::from_str_radix(text.trim(), 16).ok().filter(|mask| *mask != 0)?;
    // The kernel's masks begin at bit 0 without gaps.
    (mask & mask.wrapping_add(1) == 0).then_some(())?;
    let least = root.number::<u32>(&format!("{MOUNT}/info/{name}/min_cbm_bits")).unwrap_or(1).max(1);
    Some(CacheMask { bits: mask.count_ones(), least })
}

/// [`Error::Unsupported`] if resctrl is not mounted. [`Error::System`] if this user may not read it.
pub(super) fn mounted(root: &Root) -> Result<()> {
    let schemata = root.path(&format!("{MOUNT}/schemata"));
    let info = root.path(&format!("{MOUNT}/info"));
    let tried = [(fs::File::open(&schemata).err(), &schemata), (fs::read_dir(&info).err(), &info)];
    for (error, path) in tried {
        if let Some(error) = error.filter(|error| error.kind() == io::ErrorKind::PermissionDenied) {
            let reason = format!("{}: {}", path.display(), super::words(&error));
            return Err(Error::System { what: "reading resctrl", reason });
        }
    }
    if root.text(&format!("{MOUNT}/schemata")).is_some() {
        return Ok(());
    }
    let path = root.path(MOUNT);
    Err(Error::Unsupported(format!(
        "resctrl is not mounted at {0}; as root: mount -t resctrl resctrl {0}. The kernel needs \
         CONFIG_ARM64_MPAM_RESCTRL_FS (Arm) or CONFIG_X86_CPU_RESCTRL (x86), the processor MPAM, RDT or QoS",
        path.display()
    )))
}
