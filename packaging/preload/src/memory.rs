//! Checks the caller's memory before each access, so that a bad pointer returns EFAULT, as from a system call.
//!
//! The check is a call of `rt_sigprocmask`, which copies eight bytes from or to an address and is the cheapest such
//! call. An access still faults if another thread unmaps the memory after the check.

use std::ptr;

use libc::{EFAULT, SIG_BLOCK, SYS_rt_sigprocmask, c_int, c_long, syscall};

const PAGE: u64 = 4096;
const SIGSET_BYTES: usize = 8;
/// An invalid `how`: the kernel refuses it only after it has read the set.
const NEVER_A_HOW: c_int = c_int::MAX;

/// Remembers the last page that passed, because requests and events are usually adjacent in memory.
#[derive(Default)]
pub struct Checked {
    page: Option<u64>,
}

impl Checked {
    /// A copy of the `T` at `address`, or EFAULT.
    pub fn read<T: Copy>(&mut self, address: u64) -> Result<T, c_int> {
        self.each_page(address, size_of::<T>() as u64, readable)?;
        // SAFETY: every page of the value is readable, and all bit patterns of the plain struct `T` are valid.
        Ok(unsafe { ptr::read_unaligned(address as *const T) })
    }

    /// Stores `value` at `address`, or EFAULT.
    pub fn write<T: Copy>(&mut self, address: u64, value: T) -> Result<(), c_int> {
        self.each_page(address, size_of::<T>() as u64, writable)?;
        // SAFETY: the check has just written to every page of the value, at the same place that is overwritten here.
        unsafe { ptr::write_unaligned(address as *mut T, value) };
        Ok(())
    }

    fn each_page(&mut self, address: u64, bytes: u64, passes: fn(u64) -> bool) -> Result<(), c_int> {
        let last = address.checked_add(bytes - 1).ok_or(EFAULT)? / PAGE;
        for page in address / PAGE..=last {
            if self.page == Some(page) {
                continue;
            }
            let within = address.max(page * PAGE);
            if !passes(within.min((page + 1) * PAGE - SIGSET_BYTES as u64)) {
                return Err(EFAULT);
            }
            self.page = Some(page);
        }
        Ok(())
    }
}

fn readable(address: u64) -> bool {
    let none = ptr::null::<u8>();
    // SAFETY: the kernel checks the address itself; with this `how` it changes nothing.
    let result =
        unsafe { syscall(SYS_rt_sigprocmask, c_long::from(NEVER_A_HOW), address, none, SIGSET_BYTES) };
    address != 0 && (result == 0 || last_errno() != EFAULT)
}

/// Overwrites the eight bytes at `address`; only for memory that the caller overwrites next.
fn writable(address: u64) -> bool {
    let none = ptr::null::<u8>();
    // SAFETY: the kernel checks the address itself; a null new set leaves the signal mask as it is.
    let result = unsafe { syscall(SYS_rt_sigprocmask, c_long::from(SIG_BLOCK), none, address, SIGSET_BYTES) };
    address != 0 && result == 0
}

/// The calling thread's errno.
pub fn last_errno() -> c_int {
    // SAFETY: the location belongs to the calling thread.
    unsafe { *libc::__errno_location() }
}

/// Restores the calling thread's errno, because libaio's functions do not change it.
pub fn restore_errno(value: c_int) {
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = value };
}
