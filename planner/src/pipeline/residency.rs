//! Which parameters are on a device when, and what follows the backward passes.
//!
//! A device has room for `slots` parameter sets. Before a pass of a stage whose parameters are not there, they are
//! fetched into a free slot, or into the slot of the set that was unused for the longest time. The fetch begins as soon
//! as that set's last pass has ended. With two slots, the next set is fetched while the present one computes.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, HashMap};

use super::graph::{Graph, Kind, Operation};
use super::passes::{Links, blank};
use super::{Shape, Unit, reserve, reserved};
use crate::error::Result;

/// A stay of parameters on a device.
pub struct Stay {
    /// The fetch.
    pub fetch: u32,
    /// Bytes of the parameters.
    pub bytes: u64,
    /// The last computation that reads the parameters.
    pub last: u32,
}

/// Parameters and accumulated gradients on the devices.
pub struct Residency {
    /// All stays of parameters.
    pub stays: Vec<Stay>,
    /// The offload of each backward stage.
    pub offloads: Vec<u32>,
}

/// Adds the fetches, offloads, optimizer steps and validations.
pub fn add(shape: &Shape, units: &[Unit], links: &Links, graph: &mut Graph) -> Result<Residency> {
    let mut residency =
        Residency { stays: Vec::new(), offloads: reserved(shape.backward_stages() as usize)? };
    for computed in &links.computed {
        add_fetches(shape, units, computed, graph, &mut residency.stays)?;
    }
    for stage in 0..shape.backward_stages() {
        let (first_unit, count, inside) = inside(shape, units, stage);
        let offload = Operation {
            bytes: inside.iter().map(|unit| unit.grad_bytes).sum(),
            seconds: inside.iter().map(|unit| unit.offload).sum(),
            ..blank(Kind::Offload, shape.backward_device(stage), first_unit, count)
        };
        let last = links.backward(stage, shape.micro_batches - 1);
        residency.offloads.push(graph.add(offload, &[last])?);
    }
    add_optimizers(shape, units, &residency.offloads, graph)?;
    Ok(residency)
}

fn inside<'a>(shape: &Shape, units: &'a [Unit], stage: u32) -> (u32, u32, &'a [Unit]) {
    let count = shape.backward_split();
    let first_unit = stage * count;
    (first_unit, count, &units[first_unit as usize..][..count as usize])
}

fn add_fetches(
    shape: &Shape,
    units: &[Unit],
    computed: &[u32],
    graph: &mut Graph,
    stays: &mut Vec<Stay>,
) -> Result<()> {
    // The stay of each set that is on the device, and the sets by their last use.
    let mut present: HashMap<(u32, u32), (usize, usize)> = HashMap::new();
    let mut uses = BTreeMap::new();
    let mut fetched: Option<u32> = None;
    for (position, number) in computed.iter().enumerate() {
        let Operation { device, first_unit, units: count, .. } = graph.operations[*number as usize];
        let set = (first_unit, count);
        if let Some((stay, used)) = present.get_mut(&set) {
            stays[*stay].last = *number;
            uses.remove(used);
            uses.insert(position, set);
            *used = position;
            continue;
        }
        let oldest = if present.len() >= shape.slots as usize { uses.pop_first() } else { None };
        let freed = oldest.and_then(|(_, old)| present.remove(&old)).map(|(stay, _)| stays[stay].last);
        let inside = &units[first_unit as usize..][..count as usize];
        let fetch = Operation {
            bytes: inside.iter().map(|unit| unit.param_bytes).sum(),
            seconds: inside.iter().map(|unit| unit.fetch).sum(),
            ..blank(Kind::Fetch, device, first_unit, count)
        };
        let fetch = graph.add(fetch, &[])?;
        for before in fetched.into_iter().chain(freed) {
            graph.order(before, fetch)?;
        }
        graph.order(fetch, *number)?;
        fetched = Some(fetch);
        present.insert(set, (stays.len(), position));
        uses.insert(position, set);
        reserve(stays, 1)?;
        stays.push(Stay { fetch, bytes: graph.operations[fetch as usize].bytes, last: *number });
    }
    Ok(())
}

/// One validation per device. The first waits for all offloads, or for all asynchronous optimizers; the others wait
/// for the first, which has the verdict.
fn add_optimizers(shape: &Shape, units: &[Unit], offloads: &[u32], graph: &mut Graph) -> Result<()> {
    let validate = |device| blank(Kind::Validate, device, 0, 0);
    let mut verdicts: Vec<u32> = reserved(shape.devices as usize)?;
    if !shape.async_optimizer {
        verdicts.push(graph.add(validate(0), offloads)?);
        for device in 1..shape.devices {
            verdicts.push(graph.add(validate(device), &verdicts[..1])?);
        }
    }
    let mut optimizers: Vec<u32> = reserved(offloads.len())?;
    for (stage, offload) in offloads.iter().enumerate() {
        let (first_unit, count, inside) = inside(shape, units, stage as u32);
        let device = shape.backward_device(stage as u32);
        let seconds = inside.iter().map(|unit| unit.optimizer).sum();
        let optimizer = Operation { seconds, ..blank(Kind::Optimize, device, first_unit, count) };
        let after = verdicts.get(device as usize).copied().unwrap_or(*offload);
        optimizers.push(graph.add(optimizer, &[after])?);
    }
    if shape.async_optimizer {
        let first = graph.add(validate(0), &optimizers)?;
        for device in 1..shape.devices {
            graph.add(validate(device), &[first])?;
        }
    }
    Ok(())
}
