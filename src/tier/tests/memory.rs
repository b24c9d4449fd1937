//! The caller's memory: when it may be used again, and which errors invalid memory causes.
#![forbid(unsafe_code)]

use super::*;
use crate::error::IoKind;
use crate::tier::Health;

/// Number of requests to disk 1 until extent 0 is written to it and committed.
fn requests_before() -> u64 {
    let disks = [Disk::default(), Disk::default()];
    prepared(&disks, Faults::default(), None);
    disks[1].requests()
}

fn prepared(disks: &[Disk], fault: Faults, io_timeout: Option<Duration>) -> Tier {
    let mut options = on_disks(disks, &[Faults::default(), fault]);
    options.io.io_timeout = io_timeout;
    let tier = Tier::open(options).unwrap();
    write(&tier, 0, 5, &ExtentPlacement::On(1)).unwrap();
    tier.commit(1, &[]).unwrap();
    tier
}

#[test]
fn memory_that_is_not_there_is_no_fault_of_the_path() {
    let fault = Faults { fail_nth: Some((requests_before(), libc::EFAULT)), ..Faults::default() };
    let disks = [Disk::default(), Disk::default()];
    let tier = prepared(&disks, fault, None);
    let error = read(&tier, 0, 5).unwrap_err().to_string();
    assert!(error.contains("the buffer is not mapped"), "{error}");
    assert_eq!(tier.paths()[1].health, Health::Healthy);
    assert!(read(&tier, 0, 5).unwrap());

    let disks = [Disk::default(), Disk::default()];
    // A write without free space extends the file first.
    let fault = Faults { fail_nth: Some((requests_before() + 1, libc::EFAULT)), ..Faults::default() };
    let tier = prepared(&disks, fault, None);
    write(&tier, 0, 6, &ExtentPlacement::On(1)).unwrap();
    assert_eq!(tier.paths()[1].health, Health::Healthy);
}

/// A device error has lower precedence than an error that leaves memory in use, in any order of the transfers.
#[test]
fn a_read_with_a_part_that_hangs_is_past_its_deadline_whatever_else_failed() {
    let first = requests_before();
    let disks = [Disk::default(), Disk::default()];
    let faults =
        Faults { fail_nth: Some((first, libc::EIO)), hang_nth: Some(first + 2), ..Faults::default() };
    let tier = prepared(&disks, faults, short_io_timeout());
    let error = read(&tier, 0, 5).unwrap_err();
    assert_eq!(error.io_kind(), Some(IoKind::Deadline), "{error}");
    assert_eq!(tier.paths()[1].health, Health::Failed);
    disks[1].release();
}
