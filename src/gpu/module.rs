//! Kernels as PTX text, compiled by the driver for the GPU in use.

use std::ffi::{CString, c_uint, c_void};
use std::sync::Arc;

use cudarc::driver::sys::{CUfunction, CUjit_option, CUmodule};

use super::device::Device;
use super::driver::failure;
use super::stream::Stream;
use super::table::code;
use crate::error::{Error, GpuKind, Result};

const LOG_BYTES: usize = 8192;

/// A compiled module.
#[derive(Debug)]
pub(super) struct Module {
    device: Arc<Device>,
    handle: usize,
}

impl Module {
    /// Compiles `ptx`; `what` names the text in errors.
    pub(super) fn load(device: &Arc<Device>, what: &str, ptx: &str) -> Result<Module> {
        let text = CString::new(ptx).map_err(|_| Error::invalid("ptx", "contains a NUL"))?;
        let mut log = vec![0_u8; LOG_BYTES];
        let mut options =
            [CUjit_option::CU_JIT_ERROR_LOG_BUFFER, CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
        // The driver expects the size in place of a pointer here.
        let mut values = [log.as_mut_ptr().cast::<c_void>(), std::ptr::without_provenance_mut(LOG_BYTES - 1)];
        let mut handle: CUmodule = std::ptr::null_mut();
        let _current = device.enter()?;
        // SAFETY: a NUL-terminated string, and two options with their values. The log's last byte stays 0.
        let outcome = unsafe {
            (device.table().cuModuleLoadDataEx)(
                &raw mut handle,
                text.as_ptr().cast(),
                options.len() as c_uint,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        if outcome != code::SUCCESS {
            let end = log.iter().position(|byte| *byte == 0).unwrap_or(LOG_BYTES);
            let words = String::from_utf8_lossy(&log[..end]).trim().replace('\n', "; ");
            let error = device.check(outcome, || format!("compiling {what}")).err();
            return Err(with_log(error, &words));
        }
        Ok(Module { device: Arc::clone(device), handle: handle as usize })
    }

    /// The kernel `name`.
    pub(super) fn function(&self, name: &str) -> Result<Function> {
        let text = CString::new(name).map_err(|_| Error::invalid("name", "contains a NUL"))?;
        let mut handle: CUfunction = std::ptr::null_mut();
        let _current = self.device.enter()?;
        // SAFETY: a live module of this object, a NUL-terminated string, a valid pointer.
        let found = unsafe {
            (self.device.table().cuModuleGetFunction)(&raw mut handle, self.handle as CUmodule, text.as_ptr())
        };
        self.device.check(found, || format!("looking up the kernel {name}"))?;
        Ok(Function(handle as usize))
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.enter() {
            // SAFETY: a live module of this object. Its functions are not used after it.
            unsafe { (self.device.table().cuModuleUnload)(self.handle as CUmodule) };
        }
    }
}

/// A kernel of a loaded module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Function(usize);

impl Function {
    /// Enqueues the kernel with `blocks` blocks of `threads` threads.
    ///
    /// # Safety
    /// The module is loaded. Each of `arguments` points to a value of the kernel's parameter at that
    /// position. The memory that these values address stays valid until the kernel is done.
    pub(super) unsafe fn launch(
        self,
        stream: &Stream,
        blocks: u32,
        threads: u32,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        let device = stream.device();
        let _current = device.enter()?;
        let none = std::ptr::null_mut();
        // SAFETY: the caller's promise; the driver copies the arguments before the call returns.
        let outcome = unsafe {
            (device.table().cuLaunchKernel)(
                self.0 as CUfunction,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                stream.handle(),
                arguments.as_mut_ptr(),
                none,
            )
        };
        device.check(outcome, || "launching a kernel".to_string())
    }
}

fn with_log(error: Option<Error>, log: &str) -> Error {
    match error {
        Some(error) if log.is_empty() => error,
        Some(error) => error.context(format_args!("compiler log: {log}")),
        None => failure(GpuKind::Jit, "compiling".to_string(), log.to_string()),
    }
}
