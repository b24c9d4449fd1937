//! The measurement of paths: what it may write, and where.
#![forbid(unsafe_code)]

use std::fs;
use std::path::PathBuf;

use super::real::{bases, options};
use super::*;

/// A tier on two directories with these limits.
fn limited(bases: &[PathBuf], limits: [Option<u64>; 2]) -> Tier {
    let mut options = options(bases);
    options.paths.iter_mut().zip(limits).for_each(|(path, limit)| path.limit = limit);
    Tier::open(options).unwrap()
}

/// The speeds, and the bytes that their measurement has written to each path.
fn measured(tier: &Tier) -> (Option<Vec<f64>>, Vec<u64>) {
    let written = || tier.flows().iter().map(|flow| flow.traffic.written_bytes).collect::<Vec<_>>();
    let before = written();
    let speeds = tier.measured_speeds();
    (speeds, written().iter().zip(before).map(|(after, before)| after - before).collect())
}

#[test]
fn a_measurement_stays_within_the_limit_of_its_path() {
    let (_dir, bases) = bases();
    let (speeds, written) = measured(&limited(&bases, [Some(3 << 20), Some((5 << 20) + 1)]));
    assert!(speeds.unwrap().iter().all(|speed| *speed > 0.0));
    assert!(written.iter().all(|bytes| *bytes >= 1 << 20), "{written:?}");
    assert!(written[0] <= 3 << 20 && written[1] <= 5 << 20, "{written:?}");
}

#[test]
fn a_path_without_room_for_a_measurement_is_not_written_and_gets_the_mean_of_the_others() {
    let (_dir, bases) = bases();
    let (speeds, written) = measured(&limited(&bases, [Some((1 << 20) - 1), Some(4 << 20)]));
    let speeds = speeds.unwrap();
    assert_eq!((written[0], speeds[0]), (0, speeds[1]));
    let (_dir, bases) = super::real::bases();
    let (speeds, written) = measured(&limited(&bases, [Some(1 << 19), Some(1)]));
    assert_eq!((speeds, written), (None, vec![0, 0]));
    // Room that the data file has taken is no room for a measurement.
    let (_dir, bases) = super::real::bases();
    let mut full = options(&bases);
    full.paths.iter_mut().for_each(|path| (path.limit, path.reserve) = (Some(8 << 20), 8 << 20));
    assert_eq!(measured(&Tier::open(full).unwrap()), (None, vec![0, 0]));
}

#[test]
fn a_measurement_writes_to_the_device_of_the_data_alone() {
    let (_dir, bases) = bases();
    let other = tempfile::tempdir_in("/dev/shm").unwrap();
    let tier = limited(&bases, [Some(2 << 20), Some(2 << 20)]);
    let volume = tier.volumes[0].as_ref().unwrap();
    let error = volume.unnamed_file(other.path().to_path_buf()).unwrap_err();
    assert!(error.to_string().contains("another device than its data"), "{error}");
    // A link takes the place of the directory with the data.
    let place = PathBuf::from(volume.data_name()).parent().unwrap().to_path_buf();
    fs::rename(&place, place.with_extension("moved")).unwrap();
    std::os::unix::fs::symlink(other.path(), &place).unwrap();
    let (speeds, written) = measured(&tier);
    assert_eq!((speeds, written[0]), (None, 0));
    assert_eq!(fs::read_dir(other.path()).unwrap().count(), 0);
}
