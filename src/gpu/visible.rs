//! The GPUs that a CUDA program in this process sees, by ordinal.
//!
//! The driver knows them. Where it is absent or not to be loaded, `CUDA_VISIBLE_DEVICES` and the addresses on PCI tell
//! them, if the driver's order is certain: with `CUDA_DEVICE_ORDER=PCI_BUS_ID`, or with GPUs of one model. By default the
//! driver counts the fastest model first.
#![forbid(unsafe_code)]

use serde::Serialize;

use super::driver::Driver;
use crate::environment;
use crate::error::Result;
use crate::sys::topology::{Device, PciAddress, Topology, visible};

/// Whether the driver is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ask {
    /// If this library has loaded it already.
    Loaded,
    /// It is loaded and initialised. Processes that are forked later cannot use CUDA.
    Load,
    /// Never: the topology is not this machine's.
    Never,
}

/// The GPU behind each ordinal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Visible {
    /// Addresses by ordinal; `None` if the GPU is visible, but not known.
    pub gpus: Vec<Option<PciAddress>>,
    /// True if the driver stated the addresses.
    pub from_driver: bool,
}

impl Visible {
    /// The GPU with this ordinal.
    pub fn device<'a>(&self, topology: &'a Topology, ordinal: usize) -> Option<&'a Device> {
        let address = (*self.gpus.get(ordinal)?)?;
        topology.devices.iter().find(|device| device.pci == address)
    }

    /// The node of each visible GPU.
    pub fn nodes(&self, topology: &Topology) -> Vec<Option<u32>> {
        (0..self.gpus.len()).map(|ordinal| self.device(topology, ordinal)?.node).collect()
    }
}

/// The visible GPUs of `topology`. Errors of a driver that was asked are returned, except that there is no driver.
pub fn find(topology: &Topology, ask: Ask) -> Result<Visible> {
    let driver = match ask {
        Ask::Never => None,
        Ask::Loaded => Driver::opened(),
        Ask::Load => Driver::get().ok(),
    };
    if let Some(driver) = driver {
        let gpus = driver.addresses()?.iter().map(|address| address.parse().ok()).collect();
        return Ok(Visible { gpus, from_driver: true });
    }
    let order = environment::value("CUDA_DEVICE_ORDER");
    let list = visible_devices();
    let gpus = from_list(topology, list.as_deref(), order.is_some_and(|order| order == "PCI_BUS_ID"));
    Ok(Visible { gpus, from_driver: false })
}

/// The value of `CUDA_VISIBLE_DEVICES`; an empty one shows no GPU. A character that is not UTF-8 names no GPU.
pub fn visible_devices() -> Option<String> {
    environment::value("CUDA_VISIBLE_DEVICES").map(|list| list.to_string_lossy().into_owned())
}

/// The GPUs that a value of `CUDA_VISIBLE_DEVICES` shows. `in_bus_order`: the driver counts by address.
fn from_list(topology: &Topology, list: Option<&str>, in_bus_order: bool) -> Vec<Option<PciAddress>> {
    let gpus = topology.gpus();
    let is_certain = in_bus_order || gpus.windows(2).all(|pair| pair[0].model == pair[1].model);
    let by_number = list.is_none_or(|list| !list.starts_with("GPU-") && !list.starts_with("MIG-"));
    let uuids: Vec<&str> = gpus.iter().map(|gpu| gpu.uuid.as_str()).collect();
    let shown = visible::visible(list, &uuids).into_iter();
    shown.map(|gpu| gpu.filter(|_| is_certain || !by_number).map(|gpu| gpus[gpu].pci)).collect()
}
