//! Processors, and which of them share a core, a package and caches.
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

/// Content of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheKind {
    /// Data alone.
    Data,
    /// Instructions alone.
    Instruction,
    /// Both.
    Unified,
}

/// A cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Cache {
    /// 1 is next to the core.
    pub level: u32,
    /// Its content.
    pub kind: CacheKind,
    /// Online processors that share it.
    pub cpus: Bitmap,
    /// Size; 0 if unknown.
    pub bytes: u64,
}

/// All online processors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Processors {
    pub online: Bitmap,
    pub packages: Vec<Package>,
    pub cores: Vec<Bitmap>,
    pub caches: Vec<Cache>,
}

pub(super) fn read(root: &Root) -> Processors {
    let online = online(root);
    let cores = cores(root, &online);
    Processors { packages: packages(root, &online), caches: caches(root, &online, &cores), cores, online }
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

fn caches(root: &Root, online: &Bitmap, cores: &[Bitmap]) -> Vec<Cache> {
    let mut caches = Vec::new();
    for cpu in online.iter() {
        let folder = format!("{CPU}/cpu{cpu}/cache");
        for index in root.numbered(&folder, "index").iter() {
            let core = cores.iter().find(|core| core.contains(cpu));
            let cache = cache(root, &format!("{folder}/index{index}"), online, core);
            // Each cache is reported by all of its processors; the first of them counts.
            caches.extend(cache.filter(|cache| cache.cpus.first() == Some(cpu)));
        }
    }
    caches.sort_by_key(|cache: &Cache| (cache.level, cache.kind, cache.cpus.first()));
    caches.dedup_by(|one, two| (one.level, one.kind, &one.cpus) == (two.level, two.kind, &two.cpus));
    caches
}

/// A cache of a processor of `core`, which has it alone if the system names no processors.
fn cache(root: &Root, folder: &str, online: &Bitmap, core: Option<&Bitmap>) -> Option<Cache> {
    let shared = root.mask(&format!("{folder}/shared_cpu_map")).map(|cpus| cpus.and(online));
    let shared = shared.filter(|cpus| !cpus.is_empty()).or_else(|| core.cloned());
    let kind = match root.text(&format!("{folder}/type"))?.trim() {
        "Data" => CacheKind::Data,
        "Instruction" => CacheKind::Instruction,
        _ => CacheKind::Unified,
    };
    Some(Cache {
        level: root.number(&format!("{folder}/level"))?,
        kind,
        cpus: shared?,
        bytes: root.text(&format!("{folder}/size")).and_then(|text| bytes(text.trim())).unwrap_or(0),
    })
}

/// A size such as "32K".
fn bytes(text: &str) -> Option<u64> {
    let (digits, shift) = match text.chars().last()? {
        'K' => (&text[..text.len() - 1], 10),
        'M' => (&text[..text.len() - 1], 20),
        _ => (text, 0),
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}
