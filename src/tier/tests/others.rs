//! Directories that other users can write to: files that they planted are refused and left alone.
#![forbid(unsafe_code)]

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use super::real::{bases, kind, options};
use super::*;
use crate::error::TierKind;
use crate::tier::directory::collect;

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

/// Makes a directory world-writable, as /tmp or a shared scratch disk.
fn everybody_writes(base: &Path) {
    fs::set_permissions(base, Permissions::from_mode(0o1777)).unwrap();
}

fn as_nobody(dir: &Path, command: &str) {
    assert_eq!(crate::sys::private_files::user(), 0, "this test acts as another user: run it as root");
    let done = Command::new("sh").args(["-c", command]).current_dir(dir).uid(65534).gid(65534).status();
    assert!(done.unwrap().success(), "{command}");
}

#[test]
fn a_tier_in_a_directory_that_everybody_writes_to_is_this_users_alone() {
    let dir = tempfile::tempdir().unwrap();
    everybody_writes(dir.path());
    let tier = Tier::open(options(&[dir.path().to_path_buf()])).unwrap();
    step(&tier, 1).unwrap();
    let rank = owner().below(dir.path());
    assert!(rank.ancestors().take(3).all(|path| mode(path) == 0o700));
    assert!(["lock", "data", "superblock.0"].iter().all(|name| mode(&rank.join(name)) == 0o600));
}

/// Directories of older versions have modes that depend on the umask.
#[test]
fn a_tier_with_the_modes_of_an_older_version_opens() {
    for umask in [0o022, 0o002] {
        let (_dir, bases) = bases();
        let tier = Tier::open(options(&bases)).unwrap();
        step(&tier, 1).unwrap();
        drop(tier);
        for base in &bases {
            let rank = owner().below(base);
            for path in rank.ancestors().take(3) {
                fs::set_permissions(path, Permissions::from_mode(0o777 & !umask)).unwrap();
            }
            fs::set_permissions(rank.join("data"), Permissions::from_mode(0o644)).unwrap();
        }
        let tier = Tier::open(options(&bases)).unwrap();
        assert!(is_at(&tier, 1));
        let rank = owner().below(&bases[0]);
        assert_eq!((mode(&rank), mode(&rank.join("data"))), (0o755, 0o600));
    }
}

#[test]
fn links_and_fifos_at_the_names_of_a_tier_are_refused() {
    for name in ["lock", "data", "superblock.0", "superblock.1"] {
        for way in ["link", "fifo", "hard link"] {
            let (dir, bases) = bases();
            let rank = owner().below(&bases[0]);
            fs::create_dir_all(&rank).unwrap();
            let victim = dir.path().join("victim");
            fs::write(&victim, "precious").unwrap();
            match way {
                "link" => symlink(&victim, rank.join(name)).unwrap(),
                "hard link" => fs::hard_link(&victim, rank.join(name)).unwrap(),
                _ => assert!(Command::new("mkfifo").arg(rank.join(name)).status().unwrap().success()),
            }
            let (found, message) = kind(Tier::open(options(&bases)));
            assert_eq!(found, Some(TierKind::Foreign), "{name}, {way}: {message}");
            assert!(message.contains(&format!("rank-0/{name}")) && message.contains("remove"), "{message}");
            assert_eq!(fs::read(&victim).unwrap(), b"precious", "{name}, {way}");
        }
    }
    // A job directory that is a link is refused, too.
    let (dir, bases) = bases();
    fs::create_dir(dir.path().join("elsewhere")).unwrap();
    symlink(dir.path().join("elsewhere"), bases[0].join("run")).unwrap();
    assert_eq!(kind(Tier::open(options(&bases))).0, Some(TierKind::Foreign));
}

#[test]
#[cfg_attr(not(built_by_root), ignore = "acts as another user, which needs root")]
fn what_another_user_planted_is_not_opened_or_removed() {
    let dir = tempfile::tempdir().unwrap();
    everybody_writes(dir.path());
    let victim = dir.path().join("victim");
    fs::write(&victim, "precious").unwrap();
    fs::set_permissions(&victim, Permissions::from_mode(0o600)).unwrap();
    as_nobody(
        dir.path(),
        "umask 0; mkdir -p run/node/rank-0 run/node/rank-1; cd run/node; ln -s ../../../victim rank-0/lock; \
         touch rank-0/data rank-1/lock rank-1/data",
    );
    let base = [dir.path().to_path_buf()];
    for mode in [Mode::Auto, Mode::Create, Mode::Resume] {
        let (found, message) = kind(Tier::open(TierOptions { mode, ..options(&base) }));
        assert_eq!(found, Some(TierKind::Foreign), "{message}");
        assert!(message.contains("/run:") && message.contains("user 65534 (mode 0777)"), "{message}");
    }
    let error = collect(None, dir.path(), &Owner { rank: 1, ..owner() }).unwrap_err();
    assert_eq!(error.tier_kind(), Some(TierKind::Foreign));
    assert!(dir.path().join("run/node/rank-1/data").exists());
    assert_eq!((fs::read(&victim).unwrap(), mode(&victim)), (b"precious".to_vec(), 0o600));
}

#[test]
#[cfg_attr(not(built_by_root), ignore = "acts as another user, which needs root")]
fn a_search_names_what_another_user_keeps_private() {
    use crate::sys::private_files::tests::as_another_user;
    use crate::tier::inspect;
    let dir = tempfile::tempdir().unwrap();
    everybody_writes(dir.path());
    let base = [dir.path().to_path_buf()];
    let tier = Tier::open(options(&base)).unwrap();
    step(&tier, 1).unwrap();
    drop(tier);
    // The directories are open to others, one more each time; the files stay private.
    let rank = owner().below(dir.path());
    let opened: Vec<&Path> = rank.ancestors().take(3).collect();
    for open in 0..=opened.len() {
        if let Some(above) = open.checked_sub(1) {
            fs::set_permissions(opened[2 - above], Permissions::from_mode(0o755)).unwrap();
        }
        let found = as_another_user(|| inspect::find(&base)).unwrap();
        let unread = &found.unread;
        assert!(found.tiers.is_empty() && unread.len() == 1 && unread[0].contains("/run"), "{unread:?}");
    }
    assert_eq!(inspect::find(&base).unwrap().tiers.len(), 1);
}
