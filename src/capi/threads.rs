//! The thread pool's settings.
#![allow(non_camel_case_types)]

use super::guard::guard;
use super::library::out;
use super::record::{self, Record};
use super::status::spw_status;
use crate::error::Result;
use crate::sys::threads;

/// Settings of the process's one thread pool.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct spw_thread_options {
    /// `sizeof(spw_thread_options)`
    pub struct_size: u32,
    /// Number of threads of one step, its caller among them; 0 decides from affinity mask, cgroup quota and
    /// `LOCAL_WORLD_SIZE`.
    pub num_threads: u32,
}

// SAFETY: integers without padding.
unsafe impl Record for spw_thread_options {
    const FIRST_SIZE: usize = 8;
    const NAME: &'static str = "spw_thread_options";
}

/// Sets the number of threads that one step uses: its caller, which begins at once, and workers, which join as they wake.
/// Without it: the environment variable `SPILLWAY_NUM_THREADS`, else the processors this process may use divided by
/// `LOCAL_WORLD_SIZE`. Steps under way finish on the workers they have. The log (level info) says once how the number
/// came about.
///
/// # Safety
/// `options` points to a struct of `struct_size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_threads_configure(options: *const spw_thread_options) -> spw_status {
    guard(|| {
        // SAFETY: the caller's promise is the callee's.
        let options = unsafe { record::read(options, "options") }?;
        threads::configure(options.num_threads as usize)
    })
}

/// Number of threads that a step of more than 65536 elements uses at most, its caller among them. Smaller ones stay on
/// the caller's thread.
///
/// # Safety
/// `count_out` points to a u32.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_threads_count(count_out: *mut u32) -> spw_status {
    guard(|| -> Result<()> {
        let count_out = out(count_out, "count_out")?;
        let count = threads::count()?;
        // SAFETY: not NULL, and the caller's promise.
        unsafe { count_out.write(count as u32) };
        Ok(())
    })
}
