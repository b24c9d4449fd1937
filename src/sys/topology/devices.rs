//! GPUs and NVMe drives on PCI, and their nodes.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

use super::nodes::Node;
use super::sysfs::Root;

const PCI: &str = "sys/bus/pci/devices";
const NVIDIA: &str = "proc/driver/nvidia/gpus";
/// PCI vendor numbers.
const VENDOR_NVIDIA: u32 = 0x10de;
const VENDOR_AMD: u32 = 0x1002;

/// Address of a PCI function: "0000:17:00.0".
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    /// Domain (segment).
    pub domain: u32,
    /// Bus.
    pub bus: u8,
    /// Device.
    pub device: u8,
    /// Function.
    pub function: u8,
}

impl fmt::Display for PciAddress {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

impl FromStr for PciAddress {
    type Err = ();

    fn from_str(text: &str) -> Result<PciAddress, ()> {
        let parse = || {
            let (rest, function) = text.trim().rsplit_once('.')?;
            let (rest, device) = rest.rsplit_once(':')?;
            let (domain, bus) = rest.rsplit_once(':')?;
            let byte = |text: &str| u8::from_str_radix(text, 16).ok();
            let domain = u32::from_str_radix(domain, 16).ok()?;
            Some(PciAddress { domain, bus: byte(bus)?, device: byte(device)?, function: byte(function)? })
        };
        parse().ok_or(())
    }
}

impl Serialize for PciAddress {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

/// Kind of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// A GPU of NVIDIA.
    Nvidia,
    /// A GPU of AMD.
    Amd,
    /// An NVMe drive.
    Nvme,
}

/// A GPU or an NVMe drive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Device {
    /// Its kind.
    pub kind: DeviceKind,
    /// Address.
    pub pci: PciAddress,
    /// The vendor's number of the model.
    pub model: u32,
    /// The model of a GPU as its driver states it, the controller name of a drive (nvme0); empty if unknown.
    pub name: String,
    /// UUID of an NVIDIA GPU; empty if unknown.
    pub uuid: String,
    /// The node whose processors reach the device best.
    pub node: Option<u32>,
    /// The node that the GPU's own memory forms, if the system can use that memory.
    pub memory_node: Option<u32>,
}

/// The devices, in the order of their addresses; their nodes are open.
pub(super) fn read(root: &Root) -> Vec<Device> {
    let mut devices: Vec<Device> = root.names(PCI).iter().filter_map(|name| device(root, name)).collect();
    devices.sort_by_key(|device| device.pci);
    devices.dedup_by_key(|device| device.pci);
    devices
}

fn device(root: &Root, name: &str) -> Option<Device> {
    let folder = format!("{PCI}/{name}");
    let (class, vendor) = (root.hex(&format!("{folder}/class"))?, root.hex(&format!("{folder}/vendor"))?);
    // Display controllers, and processing accelerators: AMD's GPUs for servers.
    let is_gpu = matches!(class >> 16, 0x03 | 0x12);
    let kind = match vendor {
        _ if class == 0x01_08_02 => DeviceKind::Nvme,
        VENDOR_NVIDIA if class >> 16 == 0x03 => DeviceKind::Nvidia,
        VENDOR_AMD if is_gpu => DeviceKind::Amd,
        _ => return None,
    };
    let pci: PciAddress = name.parse().ok()?;
    let model = root.hex(&format!("{folder}/device")).unwrap_or(0);
    let (mut device_name, mut uuid, mut memory_node) = (String::new(), String::new(), None);
    match kind {
        DeviceKind::Nvidia => {
            let about = root.text(&format!("{NVIDIA}/{pci}/information")).unwrap_or_default();
            device_name = field(&about, "Model:");
            uuid = field(&about, "GPU UUID:");
            memory_node = self::memory_node(root, &pci.to_string());
        }
        DeviceKind::Nvme => {
            device_name = root.names(&format!("{folder}/nvme")).into_iter().next().unwrap_or_default()
        }
        DeviceKind::Amd => {}
    }
    Some(Device { kind, pci, model, name: device_name, uuid, node: None, memory_node })
}

/// The rest of the line that begins with `name`.
fn field(text: &str, name: &str) -> String {
    let found = text.lines().find_map(|line| line.trim().strip_prefix(name));
    found.unwrap_or_default().trim().to_string()
}

/// Nodes that are the memory of GPUs, as NVIDIA's driver states, with the folder of the GPU.
pub(super) fn memory_nodes(root: &Root) -> BTreeMap<u32, String> {
    let gpus = root.names(NVIDIA).into_iter();
    gpus.filter_map(|gpu| Some((memory_node(root, &gpu)?, format!("{PCI}/{gpu}")))).collect()
}

fn memory_node(root: &Root, gpu: &str) -> Option<u32> {
    field(&root.text(&format!("{NVIDIA}/{gpu}/numa_status"))?, "Node:").parse().ok()
}

/// Finds the node of each device.
pub(super) fn place(root: &Root, devices: &mut [Device], nodes: &[Node]) {
    for device in devices {
        device.node = node_of(root, &format!("{PCI}/{}", device.pci), nodes);
    }
}

/// The node of the device in a folder of /sys: as the device or one above it states, else the one node that has all of
/// its local processors. `None` if the firmware says nothing, and there are several nodes.
pub(super) fn node_of(root: &Root, folder: &str, nodes: &[Node]) -> Option<u32> {
    let with_cpus: Vec<&Node> = nodes.iter().filter(|node| !node.cpus.is_empty()).collect();
    if let [only] = with_cpus[..] {
        return Some(only.id);
    }
    let top = root.resolved("sys/devices");
    let mut place = root.resolved(folder);
    while let Some(path) = place {
        let text = path.join("numa_node").to_str().and_then(|path| root.text(path));
        let stated = text.and_then(|text| text.trim().parse::<u32>().ok());
        if let Some(node) = stated.and_then(|stated| nodes.iter().find(|node| node.id == stated)) {
            return Some(nearest_with_cpus(node, nodes).unwrap_or(node.id));
        }
        place = path
            .parent()
            .filter(|parent| top.as_ref().is_some_and(|top| parent.starts_with(top)))
            .map(Into::into);
    }
    let local = root.mask(&format!("{folder}/local_cpus"))?;
    let mut holders = with_cpus.iter().filter(|node| local.meets(&node.cpus));
    match (holders.next(), holders.next()) {
        (Some(only), None) => Some(only.id),
        _ => None,
    }
}

/// The node itself if it has processors, else the nearest that has some.
fn nearest_with_cpus(node: &Node, nodes: &[Node]) -> Option<u32> {
    if !node.cpus.is_empty() {
        return Some(node.id);
    }
    nodes
        .iter()
        .find(|other| !other.cpus.is_empty() && node.near_cpus.meets(&other.cpus))
        .map(|other| other.id)
}
