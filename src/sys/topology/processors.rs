//! Processors, and which of them share a core and a package.
#![forbid(unsafe_code)]

use serde::Serialize;

use super::sysfs::Root;
use crate::sys::bitmap::Bitmap;

const CPU: &str = "sys/devices/system/cpu";

/// A package (socket).
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Package {
    /// The system's number.
    pub id: u32,
    /// Online processors.
    pub cpus: Bitmap,
}

/// All online processors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Processors {
    pub online: Bitmap,
    pub packages: Vec<Package>,
    pub cores: Vec<Bitmap>,
}

pub(super) fn read(root: &Root) -> Processors {
    let online = online(root);
    Processors { packages: packages(root, &online), cores: cores(root, &online), online }
}

fn online(root: &Root) -> Bitmap {
    let found = root.numbered(CPU, "cpu");
    let listed = root.list(&format!("{CPU}/online"));
    let is_on = |cpu: &u32| root.number::<u32>(&format!("{CPU}/cpu{cpu}/online")) != Some(0);
    match listed {
        Some(listed) if found.is_empty() => listed,
        Some(listed) => found.and(&listed),
        None => found.iter().filter(is_on).collect(),
    }
}

/// The mask in the first of these files of a processor that exists.
fn siblings(root: &Root, cpu: u32, online: &Bitmap, files: [&str; 2]) -> Option<Bitmap> {
    let of = |file: &&str| root.mask(&format!("{CPU}/cpu{cpu}/topology/{file}"));
    let found = files.iter().find_map(of)?.and(online);
    found.contains(cpu).then_some(found)
}

fn packages(root: &Root, online: &Bitmap) -> Vec<Package> {
    let mut packages: Vec<Package> = Vec::new();
    let mut rest = online.clone();
    while let Some(cpu) = rest.first() {
        let id = root.number::<i64>(&format!("{CPU}/cpu{cpu}/topology/physical_package_id"));
        let id = id.and_then(|id| u32::try_from(id).ok());
        if let Some(cpus) = siblings(root, cpu, online, ["package_cpus", "core_siblings"]) {
            let cpus = cpus.and(&rest);
            rest = rest.minus(&cpus);
            packages.push(Package { id: id.unwrap_or(packages.len() as u32), cpus });
            continue;
        }
        // Without any statement about packages, all processors are in one.
        let cpus = if id.is_none() { rest.clone() } else { [cpu].into_iter().collect() };
        rest = rest.minus(&cpus);
        match packages.iter_mut().find(|package| Some(package.id) == id) {
            Some(package) => package.cpus = package.cpus.or(&cpus),
            None => packages.push(Package { id: id.unwrap_or(0), cpus }),
        }
    }
    packages
}

fn cores(root: &Root, online: &Bitmap) -> Vec<Bitmap> {
    let mut cores = Vec::new();
    let mut rest = online.clone();
    while let Some(cpu) = rest.first() {
        let own: Bitmap = [cpu].into_iter().collect();
        let core = siblings(root, cpu, online, ["core_cpus", "thread_siblings"]).unwrap_or(own.clone());
        let core = core.and(&rest).or(&own);
        rest = rest.minus(&core);
        cores.push(core);
    }
    cores
}
