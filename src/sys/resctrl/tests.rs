//! Trees of plain files in place of the kernel's: the release page's partitions, owners that die, and hostile content.

use std::fs;
use std::os::unix::fs::symlink;
use std::process::Command;

use tempfile::TempDir;

use super::partition::partitions;
use super::support::{MOUNT, Support};
use super::*;
use crate::sys::bitmap::Bitmap;
use crate::sys::topology::Topology;

/// The second chip of the release page's machine: 72 processors, whose L3 cache has the number 1.
struct Machine(TempDir);

impl Machine {
    fn new() -> Machine {
        let machine = Machine(tempfile::tempdir().unwrap());
        machine.file("sys/devices/system/cpu/online", "0-71").file("run/placeholder", "");
        for cpu in 0..72 {
            let folder = format!("sys/devices/system/cpu/cpu{cpu}/cache/index3");
            machine.file(&format!("{folder}/level"), "3").file(&format!("{folder}/type"), "Unified");
            machine.file(&format!("{folder}/id"), "1");
            machine.file(&format!("{folder}/shared_cpu_map"), "ff,ffffffff,ffffffff");
        }
        for (name, text) in [
            ("schemata", "    MB:1=100;9=100\n    L3:1=fff;9=fff"),
            ("cpus_list", "0-71"),
            ("info/L3/cbm_mask", "fff"),
            ("info/L3/min_cbm_bits", "1"),
            ("info/L3/num_closids", "32"),
            ("info/MB/min_bandwidth", "5"),
            ("info/MB/bandwidth_gran", "5"),
            ("info/MB/num_closids", "16"),
        ] {
            machine.file(&format!("{MOUNT}/{name}"), text);
        }
        machine
    }

    fn file(&self, path: &str, text: &str) -> &Machine {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, format!("{text}\n")).unwrap();
        self
    }

    fn root(&self) -> Root {
        Root::at(self.0.path())
    }

    fn plan(&self) -> Result<[Partition; 2]> {
        let list = |text| Bitmap::parse_list(text).unwrap();
        partitions(&self.root(), &Topology::read(&self.root()), &list("0-6"), &list("7-71"))
    }

    fn text(&self, path: &str) -> Option<String> {
        self.root().text(&format!("{MOUNT}/{path}")).map(|text| text.trim().to_string())
    }

    fn has_groups(&self) -> bool {
        partition::NAMES.iter().any(|name| self.root().exists(&format!("{MOUNT}/{name}")))
    }
}

/// A process that has ended, with its state file in place: as after a crash.
fn crashed(machine: &Machine) {
    let mut child = Command::new("sleep").arg("60").spawn().unwrap();
    apply(&machine.root(), &machine.plan().unwrap(), child.id()).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn the_partitions_are_those_of_the_release_page() {
    let machine = Machine::new();
    let [trainer, optimizer] = machine.plan().unwrap();
    assert_eq!(
        (trainer.cpus.to_string(), trainer.schemata),
        ("0-6".into(), vec!["MB:1=100".into(), "L3:1=ff0".into()])
    );
    assert_eq!(
        (optimizer.cpus.to_string(), optimizer.schemata),
        ("7-71".into(), vec!["MB:1=20".into(), "L3:1=f".into()])
    );
    let support = Support::read(&machine.root());
    assert_eq!((support.groups, support.mounted, support.cache.unwrap().bits), (16, true, 12));
}

#[test]
fn other_hardware_gets_values_that_it_accepts() {
    let machine = Machine::new();
    // AMD: bandwidth in eighths of GB/s, 16 parts, at least two of them; code and data apart.
    machine.file(&format!("{MOUNT}/schemata"), "MB:1=2048\nL3CODE:1=ffff\nL3DATA:1=ffff\nL2:1=ff");
    machine
        .file(&format!("{MOUNT}/info/L3CODE/cbm_mask"), "ffff")
        .file(&format!("{MOUNT}/info/L3CODE/min_cbm_bits"), "2");
    fs::remove_dir_all(machine.0.path().join(MOUNT).join("info/L3")).unwrap();
    machine.file(&format!("{MOUNT}/info/MB/bandwidth_gran"), "8");
    let [trainer, optimizer] = machine.plan().unwrap();
    assert_eq!(trainer.schemata, ["MB:1=2048", "L3CODE:1=ffe0", "L3DATA:1=ffe0"]);
    assert_eq!(optimizer.schemata, ["MB:1=416", "L3CODE:1=1f", "L3DATA:1=1f"]);
    // Bandwidth in MB/s is no share, and a cache of one part cannot be divided.
    machine.file(&format!("{MOUNT}/schemata"), "MB:1=4294967295\nL3CODE:1=1");
    machine.file(&format!("{MOUNT}/info/L3CODE/cbm_mask"), "1");
    assert!(matches!(machine.plan(), Err(Error::Unsupported(_))));
}

#[test]
fn partitions_are_written_and_removed_with_nothing_left() {
    let machine = Machine::new();
    let root = machine.root();
    apply(&root, &machine.plan().unwrap(), std::process::id()).unwrap();
    assert_eq!(machine.text("spillway-trainer/cpus_list").unwrap(), "0-6");
    assert_eq!(machine.text("spillway-optimizer/schemata").unwrap(), "MB:1=20\nL3:1=f");
    // A second one, and a restore by another process, while the owner lives.
    assert!(matches!(apply(&root, &machine.plan().unwrap(), std::process::id()), Err(Error::Busy(_))));
    assert!(matches!(restore(&root, None, false), Err(Error::Busy(_))));
    assert!(machine.has_groups());
    assert_eq!(restore(&root, Some(std::process::id()), false), Ok(Restored::Removed));
    assert!(!machine.has_groups());
    assert_eq!(restore(&root, None, false), Ok(Restored::Nothing));
    assert!(!root.exists("run/spillway-resctrl/owner"));
}

#[test]
fn what_a_dead_process_left_is_undone_by_restore_and_by_apply() {
    let machine = Machine::new();
    crashed(&machine);
    assert!(machine.has_groups());
    assert_eq!(restore(&machine.root(), None, false), Ok(Restored::Removed));
    assert!(!machine.has_groups());
    crashed(&machine);
    fs::remove_dir_all(machine.0.path().join(MOUNT).join("spillway-trainer")).unwrap();
    apply(&machine.root(), &machine.plan().unwrap(), std::process::id()).unwrap();
    assert_eq!(machine.text("spillway-trainer/cpus_list").unwrap(), "0-6");
    assert_eq!(restore(&machine.root(), None, true), Ok(Restored::Removed));
}

#[test]
fn another_boot_or_a_reused_id_is_a_dead_owner() {
    for (field, value) in [("boot", "\"other\""), ("start", "1")] {
        let machine = Machine::new();
        apply(&machine.root(), &machine.plan().unwrap(), std::process::id()).unwrap();
        let path = machine.0.path().join("run/spillway-resctrl/owner");
        let mut owner: serde_json::Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        owner[field] = serde_json::from_str(value).unwrap();
        fs::write(&path, owner.to_string()).unwrap();
        assert_eq!(restore(&machine.root(), None, false), Ok(Restored::Removed), "{field}");
    }
}

#[test]
fn groups_and_processors_of_others_are_left_alone() {
    let machine = Machine::new();
    machine.file(&format!("{MOUNT}/spillway-optimizer/cpus_list"), "3");
    assert!(matches!(
        apply(&machine.root(), &machine.plan().unwrap(), std::process::id()),
        Err(Error::Busy(_))
    ));
    assert_eq!(machine.text("spillway-optimizer/cpus_list").unwrap(), "3");
    fs::remove_dir_all(machine.0.path().join(MOUNT).join("spillway-optimizer")).unwrap();
    machine.file(&format!("{MOUNT}/cpus_list"), "0-60");
    let error = apply(&machine.root(), &machine.plan().unwrap(), std::process::id()).unwrap_err().to_string();
    assert!(error.contains("61-71 belong to another group") && !machine.has_groups(), "{error}");
    assert!(!machine.root().exists("run/spillway-resctrl/owner"));
    assert!(apply(&machine.root(), &machine.plan().unwrap(), u32::MAX).is_err());
}

#[test]
fn hostile_files_change_nothing_outside_the_two_groups() {
    let machine = Machine::new();
    let victim = machine.0.path().join("victim");
    fs::create_dir(&victim).unwrap();
    fs::write(victim.join("schemata"), "keep").unwrap();
    // A link in place of a group is neither written through nor removed behind.
    symlink(&victim, machine.0.path().join(MOUNT).join("spillway-trainer")).unwrap();
    assert!(apply(&machine.root(), &machine.plan().unwrap(), std::process::id()).is_err());
    assert_eq!(fs::read_to_string(victim.join("schemata")).unwrap(), "keep");
    fs::remove_file(machine.0.path().join(MOUNT).join("spillway-trainer")).unwrap();
    for text in ["", "{}", "[1]", "{\"version\":1,\"pid\":-1}", &"x".repeat(3 << 20)] {
        fs::write(machine.0.path().join("run/spillway-resctrl/owner"), text).unwrap();
        let error = restore(&machine.root(), None, true).unwrap_err().to_string();
        assert!(error.contains("owner") && error.contains("rmdir"), "{error}");
    }
    fs::remove_dir_all(machine.0.path().join("run/spillway-resctrl")).unwrap();
    symlink(&victim, machine.0.path().join("run/spillway-resctrl")).unwrap();
    assert!(restore(&machine.root(), None, true).is_err());
    for text in ["L3", "L3:", "L3:1", "L3:x=1", "MB:1=x;2=7", ":1=1", "L3:4294967296=f", "\u{0}\u{0}"] {
        machine.file(&format!("{MOUNT}/schemata"), text);
        let _ = machine.plan();
    }
    for mask in ["0", "f0f", "fffffffffffffffff", "zz", "ffffffffffffffff"] {
        machine
            .file(&format!("{MOUNT}/info/L3/cbm_mask"), mask)
            .file(&format!("{MOUNT}/schemata"), "L3:1=fff");
        let _ = machine.plan();
    }
}

#[test]
fn a_machine_without_resctrl_says_how_to_mount_it() {
    let machine = Machine::new();
    fs::remove_dir_all(machine.0.path().join(MOUNT)).unwrap();
    let error = machine.plan().unwrap_err();
    assert!(matches!(&error, Error::Unsupported(words) if words.contains("mount -t resctrl")), "{error}");
    let nobody = [Partition { name: partition::NAMES[0], cpus: Bitmap::new(), schemata: vec![] }];
    assert!(matches!(apply(&machine.root(), &nobody, 1), Err(Error::Unsupported(_))));
    // Restore makes no file there.
    assert_eq!(restore(&machine.root(), None, false), Ok(Restored::Nothing));
    assert!(!machine.root().exists("run/spillway-resctrl"));
}

#[test]
fn hardware_with_too_few_groups_is_named() {
    let machine = Machine::new();
    for groups in ["1", "2"] {
        machine.file(&format!("{MOUNT}/info/L3/num_closids"), groups);
        let error = machine.plan().unwrap_err();
        let words = format!("distinguishes {groups} groups (num_closids)");
        assert!(matches!(&error, Error::Unsupported(said) if said.contains(&words)), "{error}");
    }
    machine.file(&format!("{MOUNT}/info/L3/num_closids"), "3");
    assert!(machine.plan().is_ok());
}
