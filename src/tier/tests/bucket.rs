//! A tier on an object store in memory: resume, crash at every request, damage, failover, removal.
#![forbid(unsafe_code)]

use super::*;
use crate::error::{IoKind, TierKind};
use crate::tier::Health;
use spillway_stores::memory::MemoryStore as Store;

fn on_stores(stores: &[Store]) -> TierOptions {
    let path =
        |store: &Store| PathOptions { location: PathLocation::Store(store.clone()), limit: None, reserve: 0 };
    let io = IoOptions { depth: 4, block_bytes: 16 << 10, ..IoOptions::default() };
    let paths = stores.iter().map(path).collect();
    TierOptions { paths, block_bytes: BLOCK, io, ..TierOptions::new(owner(), []) }
}

fn open(stores: &[Store]) -> Tier {
    Tier::open(on_stores(stores)).unwrap()
}

/// Keys of the objects that are neither superblocks nor locks.
fn data_keys(store: &Store) -> Vec<String> {
    store.keys().into_iter().filter(|key| key.contains("/data/")).collect()
}

#[test]
fn steps_are_found_again_and_nothing_is_left_after_the_end() {
    let store = Store::default();
    for number in 1..8 {
        let tier = open(std::slice::from_ref(&store));
        assert!(number == 1 || is_at(&tier, number - 1), "step {number}");
        step(&tier, number).unwrap();
        assert!(tier.verify().unwrap().damage.is_empty());
        tier.close(PATIENCE).unwrap();
        assert!(store.keys().iter().all(|key| !key.contains("/lock/")), "the lock goes with the tier");
    }
    // At most two versions of every chunk, and objects in free space that was not reused.
    assert!(data_keys(&store).len() < 60, "{:?}", data_keys(&store));
    open(std::slice::from_ref(&store)).destroy().unwrap();
    assert_eq!(store.keys(), [""; 0]);
}

#[test]
fn deletions_that_never_happen_change_nothing() {
    let store = Store::default();
    store.forget_deletions(true);
    for number in 1..8 {
        let tier = open(std::slice::from_ref(&store));
        assert!(number == 1 || is_at(&tier, number - 1), "step {number}");
        step(&tier, number).unwrap();
        step(&tier, number).unwrap();
        tier.close(PATIENCE).unwrap();
    }
    store.forget_deletions(false);
    let tier = open(std::slice::from_ref(&store));
    assert!(is_at(&tier, 7) && tier.verify().unwrap().damage.is_empty());
    tier.destroy().unwrap();
    assert_eq!(store.keys(), [""; 0]);
}

/// The store fails from each request on, as after a kill or a lost connection. The next process finds a complete step:
/// the last committed one, or the one that was being committed.
#[test]
fn a_crash_at_any_request_leaves_the_last_committed_step() {
    let base = Store::default();
    let tier = open(std::slice::from_ref(&base));
    step(&tier, 1).unwrap();
    step(&tier, 2).unwrap();
    tier.close(PATIENCE).unwrap();
    let mut crashes = 0;
    for request in 0.. {
        let store = base.copy();
        store.fail_from(Some(request));
        let reached = match Tier::open(on_stores(std::slice::from_ref(&store))) {
            Err(_) => 2,
            Ok(tier) => 2 + (3..6).take_while(|number| step(&tier, *number).is_ok()).count() as u64,
        };
        let ended = store.requests() <= request;
        store.fail_from(None);
        let tier = open(std::slice::from_ref(&store));
        assert!(
            is_at(&tier, reached) || is_at(&tier, reached + 1),
            "request {request}: neither step {reached} nor the next"
        );
        assert!(tier.verify().unwrap().damage.is_empty());
        crashes += 1;
        if ended {
            break;
        }
    }
    assert!(crashes > 50, "{crashes}");
}

#[test]
fn damage_is_named_with_extent_and_block() {
    let store = Store::default();
    let tier = open(std::slice::from_ref(&store));
    write(&tier, 1, 5, &ExtentPlacement::Auto).unwrap();
    tier.commit(1, &[]).unwrap();
    // The first object is the chunk header, the second is the only stream, whose blocks are consecutive.
    let key = data_keys(&store)[1].clone();
    store.change(&key, |bytes| bytes[2 * BLOCK as usize + 7] ^= 1);
    let name = "s3://bucket/prefix/run/node/rank-0/data";
    for error in [read(&tier, 1, 5).unwrap_err(), tier.verify().unwrap().damage.remove(0)] {
        assert_eq!(error.tier_kind(), Some(TierKind::Corrupt));
        let message = error.to_string();
        assert!(
            message.contains(name) && message.contains("extent \"subgroup-1\", block 2 at offset"),
            "{message}"
        );
    }
    store.change(&key, |bytes| bytes.truncate(100));
    let error = read(&tier, 1, 5).unwrap_err().to_string();
    assert!(error.contains("HTTP 416") && error.contains("subgroup-1") && error.contains(name), "{error}");
}

#[test]
fn an_object_that_is_gone_is_the_end_of_its_file_at_the_next_open() {
    let store = Store::default();
    let tier = open(std::slice::from_ref(&store));
    step(&tier, 1).unwrap();
    let first = data_keys(&store)[0].clone();
    use spillway_stores::Store as _;
    store.delete(&first).unwrap();
    let damage = tier.verify().unwrap().damage;
    assert_eq!(damage[0].io_kind(), Some(IoKind::NotFound), "{}", damage[0]);
    tier.close(PATIENCE).unwrap();
    let damage = open(std::slice::from_ref(&store)).verify().unwrap().damage;
    assert_eq!(damage[0].io_kind(), Some(IoKind::ShortFile), "{}", damage[0]);
}

#[test]
fn a_store_that_fails_loses_nothing_that_another_path_can_take() {
    let stores = [Store::default(), Store::default()];
    let tier = open(&stores);
    step(&tier, 1).unwrap();
    stores[1].fail_from(Some(0));
    step(&tier, 2).unwrap();
    let paths = tier.paths();
    assert_eq!((paths[0].health, paths[1].health), (Health::Healthy, Health::Failed));
    assert!(paths[1].reason.contains("HTTP 500") && paths[0].backend == "s3", "{}", paths[1].reason);
    assert!((0..STREAMS.len()).all(|n| read(&tier, n, seed_of(2, n)).unwrap()));
    tier.close(PATIENCE).unwrap();
    stores[1].fail_from(None);
    assert!(is_at(&open(&stores), 2));
}

/// A process that is about to list its own lock must find it. The next claim deletes a lock of a dead process.
#[test]
fn removing_leaves_locks_and_objects_of_others_alone() {
    use spillway_stores::Store as _;
    let store = Store::default();
    let tier = open(std::slice::from_ref(&store));
    step(&tier, 1).unwrap();
    let other = "prefix/run/node/rank-0/lock/other";
    store.put(other, b"{}").unwrap();
    let notes = "prefix/run/node/rank-0/notes/by-hand";
    store.put(notes, b"{}").unwrap();
    tier.destroy().unwrap();
    assert_eq!(store.keys(), [other, notes]);
}

#[test]
fn a_second_owner_is_refused_and_a_place_that_is_not_there_is_not_made() {
    let store = Store::default();
    let options = || on_stores(std::slice::from_ref(&store));
    let error = Tier::open(TierOptions { mode: Mode::Resume, ..options() }).unwrap_err();
    assert_eq!(error.tier_kind(), Some(TierKind::NoState));
    assert_eq!(store.keys(), [""; 0], "an open that finds nothing leaves nothing");
    let tier = Tier::open(options()).unwrap();
    assert_eq!(Tier::open(options()).unwrap_err().tier_kind(), Some(TierKind::Locked));
    step(&tier, 1).unwrap();
    drop(tier);
    assert!(is_at(&Tier::open(options()).unwrap(), 1));
    assert_eq!(
        Tier::open(TierOptions { mode: Mode::Create, ..options() }).unwrap_err().tier_kind(),
        Some(TierKind::Foreign)
    );
}
