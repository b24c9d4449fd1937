//! Tests in real directories: locks, stale files, full file systems, exports.
#![forbid(unsafe_code)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::error::{Error, IoKind, TierKind};
use crate::tier::Health;
use crate::tier::directory::collect;
use crate::tier::select::Selection;
use crate::tier::snapshot::{Progress, TierSnapshot};

/// Two base directories in a temporary directory below `target`.
pub(super) fn bases() -> (tempfile::TempDir, Vec<PathBuf>) {
    let target = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("target");
    fs::create_dir_all(&target).unwrap();
    let dir = tempfile::tempdir_in(target).unwrap();
    let bases: Vec<PathBuf> = ["fast", "slow"].iter().map(|name| dir.path().join(name)).collect();
    bases.iter().for_each(|base| fs::create_dir(base).unwrap());
    (dir, bases)
}

pub(super) fn options(bases: &[PathBuf]) -> TierOptions {
    TierOptions { block_bytes: BLOCK, ..TierOptions::new(owner(), bases.to_vec()) }
}

pub(super) fn kind(outcome: Result<Tier>) -> (Option<TierKind>, String) {
    let error = outcome.expect_err("it is refused");
    (error.tier_kind(), error.to_string())
}

#[test]
fn steps_on_real_directories_are_found_again_with_every_durability_and_backend() {
    use crate::io::options::BackendChoice;
    for durability in [Durability::Process, Durability::Data, Durability::Full] {
        for (backend, direct) in
            [(BackendChoice::Auto, true), (BackendChoice::Threads, true), (BackendChoice::Auto, false)]
        {
            let (_dir, bases) = bases();
            let options = || {
                let mut options = TierOptions { durability, ..options(&bases) };
                (options.io.backend, options.io.direct) = (backend, direct);
                options
            };
            let tier = Tier::open(options()).unwrap();
            (1..=4).for_each(|number| step(&tier, number).unwrap());
            write(&tier, 1, 999, &ExtentPlacement::Auto).unwrap();
            tier.close(PATIENCE).unwrap();
            let tier = Tier::open(TierOptions { mode: Mode::Resume, ..options() }).unwrap();
            assert!(tier.opened().resumed && is_at(&tier, 4));
            let reports = tier.paths();
            assert!(reports.iter().all(|path| path.read_bytes > 0 && path.wear > path.written_bytes));
            assert!(
                reports.iter().all(|path| path.reading > Duration::ZERO && path.health == Health::Healthy)
            );
            assert_eq!(tier.verify().unwrap().damage, []);
            tier.destroy().unwrap();
            assert!(bases.iter().all(|base| fs::read_dir(base).unwrap().next().is_none()), "all is gone");
        }
    }
}

#[test]
fn paths_may_come_in_another_order_under_another_name_and_with_a_new_one() {
    let (dir, bases) = bases();
    let tier = Tier::open(options(&bases)).unwrap();
    step(&tier, 1).unwrap();
    drop(tier);
    let moved = [dir.path().join("elsewhere"), dir.path().join("new"), bases[0].clone()];
    fs::rename(&bases[1], &moved[0]).unwrap();
    fs::create_dir(&moved[1]).unwrap();
    let tier = Tier::open(options(&moved)).unwrap();
    assert!(is_at(&tier, 1));
    assert_eq!(tier.paths().len(), 3);
    step(&tier, 2).unwrap();
    drop(tier);
    assert!(is_at(&Tier::open(options(&moved)).unwrap(), 2));
    let (found, message) = kind(Tier::open(options(&moved[..2])));
    assert_eq!(found, Some(TierKind::PathMissing));
    assert!(message.contains("fast"), "{message}");
}

#[test]
fn state_under_the_name_of_another_host_is_not_forgotten() {
    let (_dir, bases) = bases();
    let on = |host: &str, mode| {
        let mut options = TierOptions { mode, ..options(&bases) };
        options.owner.host = host.to_string();
        Tier::open(options)
    };
    let tier = on("a", Mode::Auto).unwrap();
    step(&tier, 1).unwrap();
    // The owner on host a is alive, so host b is another run and may create its own tier.
    drop(on("b", Mode::Auto).unwrap());
    drop(tier);
    collect(None, &bases[0], &Owner { host: "b".to_string(), ..owner() }).unwrap();
    collect(None, &bases[1], &Owner { host: "b".to_string(), ..owner() }).unwrap();
    let (found, message) = kind(on("b", Mode::Auto));
    assert!(
        found == Some(TierKind::Foreign) && message.contains("another host name than \"b\""),
        "{message}"
    );
    assert!(is_at(&on("a", Mode::Auto).unwrap(), 1));
    drop(on("b", Mode::Create).unwrap());
}

#[test]
fn two_tiers_on_one_path_exclude_each_other_and_a_dead_one_can_be_collected() {
    let (_dir, bases) = bases();
    let tier = Tier::open(options(&bases)).unwrap();
    let (found, message) = kind(Tier::open(options(&bases)));
    assert_eq!(found, Some(TierKind::Locked));
    assert!(message.contains("this process") && message.contains("fast"), "{message}");
    // Another rank and another job in the same base directory.
    let mut other = TierOptions { world: 2, ..options(&bases) };
    other.owner.rank = 1;
    let second = Tier::open(other).unwrap();
    assert_eq!(collect(None, &bases[0], &owner()).unwrap_err().tier_kind(), Some(TierKind::Locked));
    drop((tier, second));
    for rank in 0..2 {
        collect(None, &bases[0], &Owner { rank, ..owner() }).unwrap();
    }
    assert_eq!(fs::read_dir(&bases[0]).unwrap().count(), 0);
    assert_eq!(
        kind(Tier::open(TierOptions { mode: Mode::Resume, ..options(&bases[..1]) })).0,
        Some(TierKind::NoState)
    );
}

fn rank_dir(base: &Path) -> PathBuf {
    owner().below(base)
}

#[test]
fn stale_files_of_another_run_rank_version_or_size_are_refused_and_named() {
    let (_dir, bases) = bases();
    let step_on = |bases: &[PathBuf]| {
        let tier = Tier::open(options(bases)).unwrap();
        step(&tier, 1).unwrap();
    };
    step_on(&bases);
    let refused = |options: TierOptions, expected: TierKind, part: &str| {
        let (found, message) = kind(Tier::open(options));
        assert_eq!(found, Some(expected), "{message}");
        assert!(message.contains(part) && message.contains("rank-"), "{message}");
    };
    // A tier exists where a new one is to be created.
    refused(
        TierOptions { mode: Mode::Create, ..options(&bases) },
        TierKind::Foreign,
        "step 1 of job \"run\"",
    );
    // A different number of ranks.
    refused(TierOptions { world: 4, ..options(&bases) }, TierKind::Foreign, "rank 0 of 1");
    // Directories of this rank, copied to the name of another rank.
    let mut other = TierOptions { world: 2, ..options(&bases) };
    other.owner.rank = 1;
    for base in &bases {
        fs::create_dir_all(other.owner.below(base)).unwrap();
        for file in ["superblock.0", "superblock.1", "data", "lock"] {
            fs::copy(rank_dir(base).join(file), other.owner.below(base).join(file)).unwrap();
        }
    }
    refused(other.clone(), TierKind::Foreign, "rank 0 of 1");
    bases.iter().for_each(|base| collect(None, base, &other.owner).unwrap());

    // One path belongs to another run of the same name.
    let (_dir2, bases2) = self::bases();
    step_on(&bases2);
    refused(options(&[bases[0].clone(), bases2[1].clone()]), TierKind::Foreign, "another tier");
    // The same path twice, as a copy.
    let copied = bases2[1].join("copy");
    fs::create_dir_all(rank_dir(&copied)).unwrap();
    for file in ["superblock.0", "superblock.1", "data"] {
        fs::copy(rank_dir(&bases[0]).join(file), rank_dir(&copied).join(file)).unwrap();
    }
    refused(options(&[bases[0].clone(), bases[1].clone(), copied]), TierKind::Foreign, "copy");
    // A truncated data file.
    let data = rank_dir(&bases[0]).join("data");
    let whole = fs::read(&data).unwrap();
    fs::write(&data, &whole[..whole.len() - 4096 * 3]).unwrap();
    refused(options(&bases), TierKind::Format, "data");
    fs::write(&data, &whole).unwrap();
    assert!(is_at(&Tier::open(options(&bases)).unwrap(), 1));
    // A different format version.
    for base in &bases {
        for copy in ["superblock.0", "superblock.1"] {
            let path = rank_dir(base).join(copy);
            let mut bytes = fs::read(&path).unwrap();
            bytes[8] = 9;
            fs::write(path, bytes).unwrap();
        }
    }
    refused(options(&bases), TierKind::Format, "format version is 9");
}

#[test]
fn extents_with_other_streams_and_disks_that_are_not_mounted_are_refused() {
    let (dir, bases) = bases();
    let tier = Tier::open(options(&bases)).unwrap();
    step(&tier, 1).unwrap();
    let error = tier.define(&name_of(0), &[10_000]).unwrap_err();
    assert_eq!(error.tier_kind(), Some(TierKind::Foreign));
    assert!(error.to_string().contains("subgroup-0") && error.to_string().contains("[10000]"), "{error}");
    for name in ["", "a\0b", &"x".repeat(256)] {
        assert!(tier.define(name, &[1]).is_err());
    }
    drop(tier);
    let error = Tier::open(options(&[dir.path().join("not-mounted")])).unwrap_err();
    assert_eq!(error.io_kind(), Some(IoKind::NotFound));
    assert!(error.to_string().contains("create it, or check that its file system is mounted"), "{error}");
    for job in ["", "a/b", "..", ".hidden"] {
        let mut options = options(&bases);
        options.owner.job = job.to_string();
        assert!(matches!(Tier::open(options), Err(Error::InvalidArgument { .. })), "{job:?}");
    }
}

#[test]
fn an_export_is_read_back_elsewhere_and_a_damaged_one_changes_nothing() {
    let (dir, bases) = bases();
    let tier = Tier::open(options(&bases)).unwrap();
    let out = dir.path().join("checkpoint");
    assert_eq!(tier.export(&out).unwrap_err().tier_kind(), Some(TierKind::NoState));
    step(&tier, 7).unwrap();
    write(&tier, 0, 3, &ExtentPlacement::Auto).unwrap();
    assert_eq!(tier.export(&out), Ok(7), "what was written since the commit is not in it");
    step(&tier, 7).unwrap();
    assert!(tier.export(&out).is_err(), "it is there");
    // The files hold the raw bytes.
    assert_eq!(fs::read(out.join("extent-00001.stream-0.bin")).unwrap(), pattern(seed_of(7, 1) * 10, 20_000));
    let manifest: serde_json::Value =
        serde_json::from_slice(&fs::read(out.join("manifest.json")).unwrap()).unwrap();
    assert_eq!(
        (&manifest["step"], &manifest["extents"][0]["streams"][1]["bytes"]),
        (&7.into(), &5000.into())
    );

    let (_dir2, others) = self::bases();
    let copy = Tier::open(options(&others[..1])).unwrap();
    assert_eq!(copy.import(&out, &Selection::default()), Ok(7));
    drop(copy);
    assert!(is_at(&Tier::open(options(&others[..1])).unwrap(), 7));

    let damaged = out.join("extent-00002.stream-0.bin");
    let mut bytes = fs::read(&damaged).unwrap();
    bytes[77] ^= 1;
    fs::write(&damaged, &bytes).unwrap();
    step(&tier, 8).unwrap();
    let error = tier.import(&out, &Selection::default()).unwrap_err();
    assert_eq!(error.tier_kind(), Some(TierKind::Corrupt));
    assert!(error.to_string().contains("extent-00002.stream-0.bin"), "{error}");
    (0..STREAMS.len()).for_each(|n| assert!(read(&tier, n, seed_of(8, n)).unwrap()));
    let refused = || tier.import(&out, &Selection::default()).unwrap_err().tier_kind();
    fs::write(&damaged, &bytes[1..]).unwrap();
    assert_eq!(refused(), Some(TierKind::Corrupt));
    fs::write(out.join("manifest.json"), b"{\"format\": 3}").unwrap();
    assert_eq!(refused(), Some(TierKind::Corrupt));
    fs::write(out.join("manifest.json"), b"{\"format\": \"another\", \"version\": 1}").unwrap();
    assert_eq!(refused(), Some(TierKind::Format));
    // A manifest that is too large, a FIFO without a writer, and a symbolic link.
    let manifest = out.join("manifest.json");
    fs::File::create(&manifest).unwrap().set_len(3 << 30).unwrap();
    assert!(
        tier.import(&out, &Selection::default())
            .unwrap_err()
            .to_string()
            .contains("the limit of a manifest is")
    );
    fs::remove_file(&manifest).unwrap();
    let status = std::process::Command::new("mkfifo").arg(&manifest).status().unwrap();
    assert!(status.success());
    assert!(tier.import(&out, &Selection::default()).unwrap_err().to_string().contains("FIFO"));
    fs::remove_file(&manifest).unwrap();
    std::os::unix::fs::symlink("/etc/hostname", &manifest).unwrap();
    assert!(tier.import(&out, &Selection::default()).unwrap_err().to_string().contains("symbolic link"));
}

#[test]
fn an_export_leaves_alone_what_others_made_and_takes_back_what_it_made_when_it_fails() {
    let (dir, bases) = bases();
    let tier = Tier::open(options(&bases)).unwrap();
    step(&tier, 1).unwrap();
    let out = dir.path().join("checkpoint");
    let names = || -> Vec<String> {
        let entries = fs::read_dir(dir.path()).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    let precious = dir.path().join("checkpoint.partial");
    fs::create_dir(&precious).unwrap();
    fs::write(precious.join("thesis"), b"years of work").unwrap();
    let before = names();
    // A block that does not match its checksum fails the export.
    let data =
        bases.iter().map(|base| base.join("run/node/rank-0/data")).find(|path| path.is_file()).unwrap();
    let whole = fs::read(&data).unwrap();
    fs::write(&data, vec![7; whole.len()]).unwrap();
    assert!(tier.export(&out).is_err());
    assert_eq!(names(), before, "nothing is left of an export that failed");
    fs::write(&data, &whole).unwrap();
    assert_eq!(tier.export(&out), Ok(1));
    assert_eq!(fs::read(precious.join("thesis")).unwrap(), b"years of work");
    assert_eq!(names().len(), before.len() + 1);
}

#[test]
fn an_export_makes_private_parents() {
    use std::os::unix::fs::PermissionsExt;
    let (dir, bases) = bases();
    let tier = Tier::open(options(&bases)).unwrap();
    step(&tier, 1).unwrap();
    assert_eq!(tier.export(&dir.path().join("new/parents/checkpoint")), Ok(1));
    for made in ["new", "new/parents", "new/parents/checkpoint"] {
        let mode = fs::metadata(dir.path().join(made)).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o700, "{made}");
    }
}

#[test]
fn an_export_of_more_than_its_window_has_every_byte_and_takes_the_memory_of_a_window() {
    const BYTES: u64 = (40 << 20) + 12_345;
    let (dir, bases) = bases();
    let tier = Tier::open(options(&bases)).unwrap();
    let extent = tier.define("large", &[BYTES, 5]).unwrap();
    let memory = Memory::filled(&[BYTES, 5], 3);
    let ticket = tier
        .write(extent, &memory.buffers(), &ExtentPlacement::Striped(vec![(0, 6000), (1, 6000)]), None)
        .unwrap();
    tier.wait(ticket, PATIENCE).unwrap();
    tier.commit(2, &[]).unwrap();
    drop(memory);
    let out = dir.path().join("checkpoint");
    assert_eq!(tier.export(&out), Ok(2));
    assert!(fs::read(out.join("extent-00000.stream-0.bin")).unwrap() == pattern(30, BYTES as usize));
    assert_eq!(fs::read(out.join("extent-00000.stream-1.bin")).unwrap(), pattern(31, 5));
    let (_dir2, others) = self::bases();
    let copy = Tier::open(options(&others[..1])).unwrap();
    assert_eq!(copy.import(&out, &Selection::default()), Ok(2));
}

/// Names below the parent of `out`.
fn beside(out: &Path) -> Vec<String> {
    let entries = fs::read_dir(out.parent().unwrap()).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn a_snapshot_has_one_commit_while_later_steps_are_written_and_committed() {
    let (dir, bases) = bases();
    let tier = Arc::new(Tier::open(options(&bases)).unwrap());
    step(&tier, 1).unwrap();
    let out = dir.path().join("snapshot");
    // Slow enough that it is in flight during the next steps.
    let snapshot = TierSnapshot::begin(&tier, &out, Some(100_000)).unwrap();
    for number in 2..6 {
        step(&tier, number).unwrap();
    }
    assert_eq!(snapshot.wait(PATIENCE), Ok(1));
    let bytes = STREAMS.iter().flat_map(|streams| streams.iter()).sum();
    assert_eq!(snapshot.progress(), Progress { step: 1, written: bytes, bytes, ended: true });
    let (_dir2, others) = self::bases();
    let copy = Tier::open(options(&others[..1])).unwrap();
    assert_eq!(copy.import(&out, &Selection::default()), Ok(1));
    for n in 0..STREAMS.len() {
        assert!(
            read(&copy, n, seed_of(1, n)).unwrap() && read(&tier, n, seed_of(5, n)).unwrap(),
            "extent {n}"
        );
    }
    assert_eq!(snapshot.wait(PATIENCE), Ok(1), "a wait can be repeated");
    assert!(
        Arc::into_inner(tier).unwrap().close(PATIENCE).is_ok(),
        "a snapshot that has ended does not use the tier"
    );
}

#[test]
fn a_snapshot_that_is_closed_early_leaves_nothing_and_gives_the_space_and_the_tier_back() {
    let (dir, bases) = bases();
    let tier = Arc::new(Tier::open(options(&bases)).unwrap());
    step(&tier, 1).unwrap();
    let out = dir.path().join("snapshot");
    let before = beside(&out);
    let used = |tier: &Tier| tier.paths().iter().map(|path| path.file_bytes - path.free).sum::<u64>();
    let space = used(&tier);
    let snapshot = TierSnapshot::begin(&tier, &out, Some(1)).unwrap();
    step(&tier, 2).unwrap();
    assert!(used(&tier) > space, "the snapshot holds the space of step 1");
    assert_eq!(snapshot.wait(Some(Duration::ZERO)).unwrap_err().io_kind(), Some(IoKind::Timeout));
    assert!(!snapshot.progress().ended && !out.exists());
    drop(snapshot);
    assert_eq!((beside(&out), used(&tier)), (before, space));
    // The second snapshot is closed after the tier.
    let snapshot = TierSnapshot::begin(&tier, &out, Some(1)).unwrap();
    assert!(Arc::into_inner(tier).is_none());
    assert_eq!(Tier::open(options(&bases)).unwrap_err().tier_kind(), Some(TierKind::Locked));
    drop(snapshot);
    assert!(is_at(&Tier::open(options(&bases)).unwrap(), 2));
}

#[test]
fn a_commit_without_extents_is_exported_and_imported() {
    let (dir, bases) = bases();
    let tier = Tier::open(options(&bases)).unwrap();
    tier.commit(5, b"a payload").unwrap();
    let out = dir.path().join("checkpoint");
    assert_eq!(tier.export(&out), Ok(5));
    let (_dir2, others) = self::bases();
    let copy = Tier::open(options(&others)).unwrap();
    assert_eq!(copy.import(&out, &Selection::default()), Ok(5));
    drop(copy);
    assert_eq!(Tier::open(options(&others)).unwrap().opened().payload, b"a payload");
}

#[test]
fn a_snapshot_whose_parent_is_renamed_leaves_nothing() {
    let (dir, bases) = bases();
    let tier = Arc::new(Tier::open(options(&bases)).unwrap());
    step(&tier, 1).unwrap();
    let (parent, renamed) = (dir.path().join("parent"), dir.path().join("renamed"));
    let snapshot = TierSnapshot::begin(&tier, &parent.join("snapshot"), Some(1)).unwrap();
    fs::rename(&parent, &renamed).unwrap();
    assert_eq!(beside(&renamed.join("snapshot")).len(), 1);
    drop(snapshot);
    assert_eq!(beside(&renamed.join("snapshot")), [""; 0]);
}

#[test]
fn an_edited_manifest_is_refused_although_it_parses() {
    let (dir, bases) = bases();
    let tier = Tier::open(options(&bases)).unwrap();
    step(&tier, 7).unwrap();
    let out = dir.path().join("checkpoint");
    tier.export(&out).unwrap();
    let (_dir2, others) = self::bases();
    let copy = Tier::open(options(&others[..1])).unwrap();
    let whole = fs::read_to_string(out.join("manifest.json")).unwrap();
    let (step, name) = ("\"step\": 7", "\"job\": \"run\"");
    for (from, to) in [(step, "\"step\": 8"), (name, "\"job\": \"ran\""), ("\"world\": 1", "\"world\": 2")] {
        assert!(whole.contains(from), "{whole}");
        fs::write(out.join("manifest.json"), whole.replace(from, to)).unwrap();
        let error = copy.import(&out, &Selection::default()).unwrap_err();
        assert_eq!(error.tier_kind(), Some(TierKind::Corrupt), "{error}");
        assert!(error.to_string().contains("it was changed"), "{error}");
    }
    fs::write(out.join("manifest.json"), whole).unwrap();
    assert_eq!(copy.import(&out, &Selection::default()), Ok(7));
}

#[test]
fn a_reserve_that_a_memory_path_cannot_hold_names_the_path() {
    let location = PathLocation::Memory(None);
    let paths = vec![PathOptions { location, limit: None, reserve: 1 << 60 }];
    let error = Tier::open(TierOptions { paths, ..options(&[]) }).unwrap_err().to_string();
    assert!(error.contains("memory") && !error.contains("descriptor"), "{error}");
}

#[test]
fn a_superblock_whose_head_asks_for_more_than_its_file_takes_no_memory() {
    let (_dir, bases) = bases();
    let tier = Tier::open(options(&bases[..1])).unwrap();
    step(&tier, 1).unwrap();
    drop(tier);
    for copy in ["superblock.0", "superblock.1"] {
        let file = bases[0].join("run/node/rank-0").join(copy);
        let mut bytes = fs::read(&file).unwrap();
        // A large table length, with a matching header checksum.
        bytes[24..32].copy_from_slice(&(1_u64 << 30).to_le_bytes());
        let sum = crate::checksum::of(&bytes[..248]);
        bytes[248..256].copy_from_slice(&sum.to_le_bytes());
        fs::write(&file, &bytes).unwrap();
    }
    let peak = || {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("VmHWM")).unwrap().to_string();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
    };
    let before = peak();
    let error = Tier::open(options(&bases[..1])).unwrap_err().to_string();
    assert!(error.contains("its table is truncated"), "{error}");
    assert!(peak() < before + (512 << 20), "from {before} to {} bytes", peak());
}

#[test]
fn the_nth_extent_and_path_are_those_of_the_lists_with_gaps_and_without() {
    let (_dir, bases) = bases();
    let tier = Tier::open(options(&bases)).unwrap();
    step(&tier, 1).unwrap();
    let same = || {
        let all = tier.extents();
        let each: Vec<_> = (0..=all.len()).map_while(|n| tier.nth_extent(n)).collect();
        assert_eq!(each, all);
        for path in 0..bases.len() as u32 {
            let blocks: u64 = all.iter().map(|extent| u64::from(extent.blocks[path as usize])).sum();
            assert_eq!(
                (tier.path(path), tier.blocks_on(path)),
                (Some(tier.paths()[path as usize].clone()), blocks)
            );
        }
        all.len()
    };
    assert_eq!(same(), STREAMS.len());
    tier.remove(1).unwrap();
    tier.commit(2, &[]).unwrap();
    assert_eq!(same(), STREAMS.len() - 1);
    assert!(tier.path(9).is_none() && tier.nth_extent(usize::MAX).is_none());
}

/// A small mounted file system; unmounted on drop.
pub(super) struct Small(pub(super) PathBuf);

impl Small {
    pub(super) fn mount(at: PathBuf, bytes: u64) -> Option<Small> {
        fs::create_dir_all(&at).unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={bytes}"), "tmpfs"]).arg(&at);
        mount.output().is_ok_and(|done| done.status.success()).then_some(Small(at))
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        // The kernel releases the files of a ring shortly after the ring.
        for _ in 0..100 {
            match Command::new("umount").arg(&self.0).output() {
                Ok(done) if !done.status.success() => std::thread::sleep(Duration::from_millis(20)),
                _ => return,
            }
        }
    }
}

#[test]
fn full_file_systems_are_left_for_others_or_named_and_lose_nothing() {
    let (dir, bases) = bases();
    let Some(small) = Small::mount(dir.path().join("small"), 300 << 10) else {
        // Mounting needs root.
        return;
    };
    let tier = Tier::open(options(&[small.0.clone(), bases[0].clone()])).unwrap();
    (1..=6).for_each(|number| step(&tier, number).unwrap());
    assert!(tier.paths()[0].file_bytes <= 300 << 10);
    drop(tier);
    assert!(is_at(&Tier::open(options(&[small.0.clone(), bases[0].clone()])).unwrap(), 6));
    collect(None, &small.0, &owner()).unwrap();

    let Some(other) = Small::mount(dir.path().join("other"), 300 << 10) else { return };
    let both = [small.0.clone(), other.0.clone()];
    let tier = Tier::open(options(&both)).unwrap();
    step(&tier, 1).unwrap();
    let error = (0..20).find_map(|n| {
        let large = tier.define(&format!("large-{n}"), &[50_000]).unwrap();
        let memory = Memory::filled(&[50_000], n);
        let ticket = tier.write(large, &memory.buffers(), &ExtentPlacement::Auto, None);
        ticket.and_then(|ticket| tier.wait(ticket, PATIENCE)).err()
    });
    let error = error.expect("600 KB do not hold a megabyte");
    assert_eq!(error.io_kind(), Some(IoKind::NoSpace), "{error}");
    assert!(error.to_string().contains("bytes") && error.to_string().contains("rank-0"), "{error}");
    tier.rollback().unwrap();
    tier.commit(2, &1_u64.to_le_bytes()).unwrap();
    drop(tier);
    let tier = Tier::open(options(&both)).unwrap();
    assert_eq!(tier.opened().step, Some(2));
    (0..STREAMS.len()).for_each(|n| assert!(read(&tier, n, seed_of(1, n)).unwrap()));
}
