//! Settings of the thread pool.

use crate::capi::prelude::*;
use crate::sys::threads;

c_struct! { first 8;
/// Settings of the process's thread pool. Every process has one pool.
pub struct spw_thread_options {
    /// Number of threads per step, including the calling thread. 0: derived from the affinity mask, the cgroup quota
    /// and `LOCAL_WORLD_SIZE`.
    pub num_threads: u32,
}
}

/// Sets the number of threads per step, including the calling thread. The caller starts at once; workers join as they
/// wake up. Without this call the number is that of the environment variable `SPILLWAY_NUM_THREADS`. Without the
/// variable it is the number of processors that this process may use, divided by `LOCAL_WORLD_SIZE`. Steps in flight
/// keep their workers. The log (level info) states once how the number was derived.
#[unsafe(no_mangle)]
pub extern "C" fn spw_set_threads(options: In<spw_thread_options>) -> spw_status {
    guard(|| {
        let options = options.read("options")?;
        threads::configure(options.num_threads as usize)
    })
}

/// Writes the maximum number of threads, including the calling thread, of a step of more than 65536 elements. Smaller
/// steps run on the calling thread only. Exception: steps of 32768 to 65536 elements of the main thread
/// also use OpenMP's threads while these are awake.
#[unsafe(no_mangle)]
pub extern "C" fn spw_get_threads(count_out: Out<u32>) -> spw_status {
    guard(|| count_out.put(threads::count()? as u32, "count_out"))
}
