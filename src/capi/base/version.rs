//! The library as a whole: version, kernel, counters, the thread pool.

use std::ffi::{c_char, c_void};

use crate::capi;
use crate::capi::pointer::fault_of_size;
use crate::capi::prelude::*;
use crate::kernel::{AdagradRule, AdamRule, LionRule};
use crate::optim::{self, Family};
use crate::sys::threads;

/// Version of the binary interface; the SONAME contains it. Within one version, functions and fields are only added.
pub const SPW_ABI_VERSION: u32 = 2;

/// Returns the `SPW_ABI_VERSION` of the loaded library. Compare it with the macro before any other call.
#[unsafe(no_mangle)]
pub extern "C" fn spw_abi_version() -> u32 {
    SPW_ABI_VERSION
}

/// Returns the release version, for example "0.1.0". The string is constant.
#[unsafe(no_mangle)]
pub extern "C" fn spw_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// Writes a struct of these headers as its macro SPW_X_INIT makes it, for languages without the macros of C. `name` is
/// the name of its type, such as "spw_adam_options", and `size` is the size of the caller's struct.
///
///     spw_struct_init("spw_adam_options", &options, sizeof options);
#[unsafe(no_mangle)]
pub extern "C" fn spw_struct_init(name: In<c_char>, struct_out: Out<c_void>, size: u64) -> spw_status {
    guard(|| {
        let name = name.text("name")?;
        let found = capi::structs().into_iter().find(|one| one.name == name);
        let found =
            found.ok_or_else(|| Error::invalid("name", format!("{name:?} is no struct of spillway")))?;
        let size = usize::try_from(size).unwrap_or(usize::MAX);
        if let Some(fault) = fault_of_size(name, found.first_size, found.fields, size) {
            return Err(Error::invalid("size", format!("is {size}, {fault}")));
        }
        let own = (size as u32).to_ne_bytes();
        let fields = found.initial[own.len()..].iter().copied();
        let zeros = std::iter::repeat(0);
        struct_out.put_bytes(own.into_iter().chain(fields).chain(zeros).take(size), "struct_out")
    })
}

c_struct! { first 64;
/// The kernel, the threads and the optimizer work of this process.
pub struct spw_info {
    /// Maximum number of threads, including the calling thread, of a step of more than 65536 elements. Smaller steps run
    /// on the calling thread only. Exception: steps of 32768 to 65536 elements of the main thread also use OpenMP's
    /// threads while these are awake.
    pub num_threads: u32,
    /// Name of the kernel that runs steps: "avx512", "avx2", "sve_bf16", "sve", "neon" or "scalar". The string is constant.
    pub kernel: *const c_char,
    /// Successful Adam and AdamW calls since the library was loaded.
    pub adam_calls: u64,
    /// Elements that these calls updated.
    pub adam_elements: u64,
    /// Successful Adagrad calls.
    pub adagrad_calls: u64,
    /// Elements that these calls updated.
    pub adagrad_elements: u64,
    /// Successful Lion and Signum calls.
    pub lion_calls: u64,
    /// Elements that these calls updated.
    pub lion_elements: u64,
}
}

/// Reads how this process runs steps, and how many it has run. The environment variable `SPILLWAY_KERNEL` selects a kernel.
/// If this processor lacks it, this call and every step are SPW_ERR_UNSUPPORTED. A wrong value of `SPILLWAY_NUM_THREADS` is
/// SPW_ERR_INVALID_ARGUMENT.
#[unsafe(no_mangle)]
pub extern "C" fn spw_get_info(info_out: Out<spw_info>) -> spw_status {
    guard(|| {
        info_out.required("info_out")?;
        let kernel = match optim::kernel()?.name() {
            "avx512" => c"avx512",
            "avx2" => c"avx2",
            "sve_bf16" => c"sve_bf16",
            "sve" => c"sve",
            "neon" => c"neon",
            _ => c"scalar",
        };
        let (adam_calls, adam_elements) = AdamRule::COUNTER.get();
        let (adagrad_calls, adagrad_elements) = AdagradRule::COUNTER.get();
        let (lion_calls, lion_elements) = LionRule::COUNTER.get();
        let values = report!(spw_info with {
            num_threads: threads::count()? as u32, kernel: kernel.as_ptr(),
            adam_calls, adam_elements, adagrad_calls, adagrad_elements, lion_calls, lion_elements
        });
        info_out.write(&values, "info_out")
    })
}

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

/// Panics inside the guard. Tests use it to see what a C caller receives. A debug build has it, so that they need no
/// build of their own.
#[cfg(any(feature = "probe", debug_assertions))]
#[unsafe(no_mangle)]
pub extern "C" fn spw_probe_panic() -> spw_status {
    guard(|| panic!("probe"))
}
