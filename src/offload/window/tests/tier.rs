//! Units whose home is a tier, on the fake CUDA driver and in host memory.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use super::device::Desk;
use super::{memory, on_host, rounded, seen, unit, values};
use crate::error::{Error, IoKind, Result};
use crate::io::sim::{Disk, Faults, short_io_timeout};
use crate::offload::window::device::{Device, Gpu, Host};
use crate::offload::window::engine::{Home, Unit, Window};
use crate::tier::directory::Owner;
use crate::tier::options::{PathLocation, PathOptions, TierOptions};
use crate::tier::{ExtentPlacement, Tier};

const BYTES: usize = 40_000;
const UNITS: usize = 4;

pub(super) fn open(location: PathLocation, io_timeout: Option<Duration>) -> Arc<Tier> {
    let owner = Owner { job: "window".to_string(), host: "here".to_string(), rank: 0 };
    let mut options = TierOptions::new(owner, []);
    options.paths = vec![PathOptions { location, limit: None, reserve: 0 }];
    options.block_bytes = 16 << 10;
    options.io.io_timeout = io_timeout;
    Arc::new(Tier::open(options).unwrap())
}

/// Writes the extent of a unit, whose second stream is the unit's.
pub(super) fn put(tier: &Tier, number: usize, step: usize) -> u32 {
    let extent = tier.define(&format!("unit{number}"), &[100, BYTES as u64]).unwrap();
    let (other, own) = (memory(100, 9, 9), memory(BYTES, number, step));
    let ticket =
        tier.write(extent, &[other.transfer(0, 100), own.transfer(0, BYTES)], &ExtentPlacement::Auto, None);
    tier.wait(ticket.unwrap(), None).unwrap();
    extent
}

pub(super) fn on_tier(extent: u32) -> Unit {
    Unit { bytes: BYTES as u64, home: Home::Tier { extent, stream: 1 }, keep: false }
}

#[test]
fn units_of_a_tier_reach_a_device_through_staging_memory_in_order() {
    let (desk, tier) = (Desk::new(54), open(PathLocation::Memory(None), None));
    let host = memory(BYTES, UNITS, 0);
    for slots in [1, 2, 3] {
        let mut units: Vec<Unit> = (0..UNITS).map(|number| on_tier(put(&tier, number, 0))).collect();
        units.push(unit(&host, BYTES, false));
        let gpu = |layout| -> Result<Box<dyn Device>> {
            Ok(Box::new(Gpu::new(&desk.device, &desk.registry, layout)?))
        };
        let window = Window::open(&units, slots, Some(Arc::clone(&tier)), gpu).unwrap();
        for step in 0..3 {
            window.begin();
            let order: &[usize] = if step == 1 { &[0, 3, 4, 1, 0] } else { &[0, 1, 4, 2, 3, 3, 2, 4, 1, 0] };
            let read: Vec<_> =
                order.iter().map(|n| (*n, desk.read(&window, *n, BYTES, n % 2).unwrap())).collect();
            desk.synchronize();
            for (number, found) in read {
                let step = if number == UNITS { 0 } else { step };
                assert!(found.span().to_vec() == values(BYTES, number, step), "{slots} {step} {number}");
            }
            for number in 0..UNITS {
                window.changed(number).unwrap();
                put(&tier, number, step + 1);
            }
        }
        assert_eq!(window.stats().device_bytes, slots as u64 * rounded(BYTES));
    }
    assert_eq!(desk.races(), 0);
}

/// The fake driver copies once something waits for the stream: here the end of the window.
#[test]
fn a_window_that_closes_waits_for_the_copies_from_its_staging_memory() {
    let (desk, tier) = (Desk::new(55), open(PathLocation::Memory(None), None));
    let units: Vec<Unit> = (0..UNITS).map(|number| on_tier(put(&tier, number, 0))).collect();
    for used in 1..=UNITS {
        let gpu = |layout| -> Result<Box<dyn Device>> {
            Ok(Box::new(Gpu::new(&desk.device, &desk.registry, layout)?))
        };
        let window = Window::open(&units, UNITS, Some(Arc::clone(&tier)), gpu).unwrap();
        (0..used).for_each(|number| drop(desk.read(&window, number, BYTES, 0).unwrap()));
        drop(window);
    }
    desk.synchronize();
    assert_eq!(desk.races(), 0);
}

#[test]
fn a_unit_that_its_tier_cannot_read_fails_alone_and_is_read_by_a_later_use() {
    let tier = open(PathLocation::Memory(None), None);
    let missing = tier.define("unit1", &[100, BYTES as u64]).unwrap();
    let units = [on_tier(put(&tier, 0, 0)), on_tier(missing), on_tier(put(&tier, 2, 0))];
    let window = on_host(&units, 2, Some(Arc::clone(&tier)));
    let used = |number: usize, expected: usize| -> Result<()> {
        let address = window.enter(number, None, None)?;
        assert!(seen(address, BYTES) == values(BYTES, expected, 0));
        window.leave(number, None)
    };
    for _ in 0..2 {
        window.begin();
        used(0, 0).unwrap();
        assert!(used(1, 1).is_err());
        used(2, 2).unwrap();
    }
    put(&tier, 1, 0);
    used(1, 1).unwrap();
    for (wrong, words) in [
        (Home::Tier { extent: missing, stream: 2 }, "units[0].stream: is 2, but the extent has 2 streams"),
        (Home::Tier { extent: missing, stream: 0 }, "units[0].bytes: is 40000, but its stream has 100 bytes"),
    ] {
        let unit = Unit { home: wrong, ..on_tier(0) };
        let host = |layout| -> Result<Box<dyn Device>> { Ok(Box::new(Host::new(layout)?)) };
        let error = Window::open(std::slice::from_ref(&unit), 1, Some(Arc::clone(&tier)), host).unwrap_err();
        assert_eq!(error.to_string(), words);
        let error = Window::open(&[unit], 1, None, host).unwrap_err().to_string();
        assert_eq!(error, "units[0].home: is a tier, but the window has none");
    }
}

/// Another extent has the number of the removed one, and streams of the same lengths.
#[test]
fn a_unit_whose_extent_was_removed_is_not_that_of_another_extent() {
    let tier = open(PathLocation::Memory(None), None);
    let extent = put(&tier, 0, 0);
    let window = on_host(&[on_tier(extent)], 1, Some(Arc::clone(&tier)));
    window.enter(0, None, None).unwrap();
    window.leave(0, None).unwrap();
    // The extent is defined again before the removal is committed: it stays the same extent.
    tier.remove(extent).unwrap();
    assert_eq!(put(&tier, 0, 1), extent);
    window.changed(0).unwrap();
    assert!(seen(window.enter(0, None, None).unwrap(), BYTES) == values(BYTES, 0, 1));
    window.leave(0, None).unwrap();
    tier.remove(extent).unwrap();
    tier.commit(1, b"").unwrap();
    window.changed(0).unwrap();
    let removed = window.enter(0, None, None).unwrap_err().to_string();
    assert_eq!(removed, format!("extent: {extent} does not exist"));
    let streams = [100, BYTES as u64];
    assert_eq!(tier.define("unit1", &streams).unwrap(), extent);
    assert_eq!(window.enter(0, None, None).unwrap_err().to_string(), removed);
    put(&tier, 1, 0);
    assert_eq!(window.enter(0, None, None).unwrap_err().to_string(), removed);
}

/// A disk with a tier that has committed this number of units.
fn stored(count: usize) -> (Disk, Vec<Unit>) {
    let disk = Disk::default();
    let tier = open(PathLocation::Simulated(disk.clone(), Faults::default()), None);
    let units = (0..count).map(|number| on_tier(put(&tier, number, 0))).collect();
    tier.commit(1, b"").unwrap();
    (disk, units)
}

/// Opens the tier of the disk. Request number `nth` after the open hangs.
fn with_read_that_hangs(disk: &Disk, nth: u64, io_timeout: Option<Duration>) -> Arc<Tier> {
    let at = |faults| open(PathLocation::Simulated(disk.clone(), faults), io_timeout);
    let before = disk.requests();
    drop(at(Faults::default()));
    let opened = disk.requests() - before;
    at(Faults { hang_nth: Some(disk.requests() + opened + nth), ..Faults::default() })
}

/// What the system writes after the deadline reaches no later unit.
#[test]
fn a_read_past_its_deadline_is_the_error_of_its_unit_and_its_staging_memory_is_not_used_again() {
    let (disk, units) = stored(3);
    let mut late = 0;
    for nth in 0..4 {
        let tier = with_read_that_hangs(&disk, nth, short_io_timeout());
        let window = on_host(&units, 2, Some(tier));
        for round in 0..2 {
            for number in 0..3 {
                match window.enter(number, None, None) {
                    Ok(address) => {
                        assert!(seen(address, BYTES) == values(BYTES, number, 0), "{nth} {number}");
                        window.leave(number, None).unwrap();
                    }
                    Err(error) => {
                        // After a deadline the tier counts the path as failed, and refuses further reads of it.
                        let refused = error.io_kind() == Some(IoKind::Deadline)
                            || matches!(error, Error::Tier(_) | Error::Io(_));
                        assert!(refused, "{nth} {number} {round}: {error}");
                        late += usize::from(error.io_kind() == Some(IoKind::Deadline));
                        disk.release();
                    }
                }
            }
        }
        disk.release();
    }
    assert!(late > 0, "no read hung");
}

#[test]
fn a_use_that_times_out_leaves_none_and_a_later_one_has_its_read() {
    let (disk, units) = stored(2);
    let tier = with_read_that_hangs(&disk, 0, None);
    let window = on_host(&units, 1, Some(tier));
    for wait in [0, 1, 20] {
        let timed_out = window.enter(0, None, Some(Duration::from_millis(wait)));
        assert!(matches!(timed_out, Err(Error::Timeout(_))), "{timed_out:?}");
        assert!(window.leave(0, None).is_err(), "it has no use");
    }
    disk.release();
    assert!(seen(window.enter(0, None, None).unwrap(), BYTES) == values(BYTES, 0, 0));
    let stats = window.stats();
    assert_eq!((stats.uses, stats.late, stats.fetches), (1, 1, 1));
    // It is the only use: after its end the slot takes another unit.
    assert!(matches!(window.enter(1, None, None), Err(Error::Busy(_))));
    window.leave(0, None).unwrap();
    assert!(seen(window.enter(1, None, None).unwrap(), BYTES) == values(BYTES, 1, 0));
}

#[test]
fn a_window_closes_while_its_units_are_read() {
    let disk = Disk::default();
    let faults = Faults { reorder: true, seed: 7, ..Faults::default() };
    let tier = open(PathLocation::Simulated(disk, faults), None);
    let units: Vec<Unit> = (0..UNITS).map(|number| on_tier(put(&tier, number, 0))).collect();
    for round in 0..20 {
        let window = on_host(&units, 3, Some(Arc::clone(&tier)));
        for number in 0..=round % UNITS {
            window.enter(number, None, None).unwrap();
            window.leave(number, None).unwrap();
        }
        window.begin();
        for number in 0..UNITS {
            window.changed(number).unwrap();
        }
        window.begin();
        window.enter(0, None, None).unwrap();
        drop(window);
    }
    assert_eq!(Arc::strong_count(&tier), 1);
}
