//! The functions of `libspillway.so` that step DeepSpeed's optimizers, and their structs, as in `<spillway.h>`.
//!
//! The library is opened at the first call, so that programs without DeepSpeed do not load it. In a Python process
//! that imports `spillway` it is the same file, with the same thread pool.

use std::ffi::{CStr, CString, OsString, c_char, c_void};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::OnceLock;

use super::symbol::function;
use crate::environment;
use crate::forward;
use crate::report::{self, Level};

/// An `spw_dtype`.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum DType {
    F32 = 1,
    F16 = 2,
    BF16 = 3,
}

/// The fields of `spw_tensor` up to `options`.
#[repr(C)]
pub struct Tensor {
    pub struct_size: u32,
    pub param_dtype: u32,
    pub state_dtype: u32,
    pub grad_dtype: u32,
    pub copy_dtype: u32,
    pub take_copy: u32,
    pub n: u64,
    pub param: *mut c_void,
    pub grad: *const c_void,
    pub exp_avg: *mut c_void,
    pub exp_avg_sq: *mut c_void,
    pub param_copy: *mut c_void,
    pub options: *const c_void,
}

/// `spw_ds_adam_call`.
#[repr(C)]
pub struct AdamCall {
    pub struct_size: u32,
    pub bias_correction: u32,
    pub step: u64,
    pub lr: f32,
    pub beta1: f32,
    pub beta2: f32,
    pub eps: f32,
    pub weight_decay: f32,
    pub grad_scale: f32,
}

/// `spw_undo_options`.
#[repr(C)]
pub struct UndoOptions {
    pub struct_size: u32,
    pub mode: u32,
    pub elements: u64,
    pub tensors: u64,
}

/// `spw_adagrad_options`.
#[repr(C)]
pub struct AdagradOptions {
    pub struct_size: u32,
    pub reserved: u32,
    pub step: u64,
    pub lr: f64,
    pub lr_decay: f64,
    pub eps: f64,
    pub weight_decay: f64,
    pub grad_scale: f64,
}

/// `spw_lion_options`.
#[repr(C)]
pub struct LionOptions {
    pub struct_size: u32,
    pub reserved: u32,
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub weight_decay: f64,
    pub grad_scale: f64,
}

const _: () =
    assert!(size_of::<Tensor>() == 80 && size_of::<AdamCall>() == 40 && size_of::<UndoOptions>() == 24);
const _: () = assert!(size_of::<AdagradOptions>() == 56 && size_of::<LionOptions>() == 48);

/// `SPW_ABI_VERSION` of the structs above.
const ABI_VERSION: u32 = 2;

/// An `spw_status`; 0 is success.
type Status = i32;
/// An `spw_undo`.
pub type Undo = *mut c_void;

/// `spw_adagrad_step` and `spw_lion_step`; the last argument may be null.
pub type StepFunction<Options> =
    unsafe extern "C" fn(*const Options, *const Tensor, u64, *mut c_void) -> Status;

pub struct Spillway {
    pub adam_create: unsafe extern "C" fn(i32, f32, f32, u32) -> Status,
    pub adam_update: unsafe extern "C" fn(Undo, i32, *const AdamCall, *const Tensor) -> Status,
    pub adam_rollback: unsafe extern "C" fn(Undo, i32, *const AdamCall, *const Tensor, *mut u32) -> Status,
    pub adam_destroy: unsafe extern "C" fn(i32) -> Status,
    pub adagrad_step: StepFunction<AdagradOptions>,
    pub lion_step: StepFunction<LionOptions>,
    pub undo_open: unsafe extern "C" fn(*const UndoOptions, *mut Undo) -> Status,
    pub undo_close: unsafe extern "C" fn(Undo),
    last_error: unsafe extern "C" fn() -> *const c_char,
    /// The file, for the log.
    pub path: PathBuf,
}

impl Spillway {
    /// The library; `None`, after one line in the log, if it cannot be used.
    pub fn get() -> Option<&'static Spillway> {
        static SPILLWAY: OnceLock<Option<Spillway>> = OnceLock::new();
        let opened = SPILLWAY.get_or_init(|| {
            if forward::is_set() {
                report::say(Level::Warn, || {
                    "DeepSpeed's ops are not served: SPILLWAY_PRELOAD_FORWARD=1".to_string()
                });
                return None;
            }
            open()
                .inspect_err(|reason| {
                    report::say(Level::Warn, || format!("DeepSpeed's ops are not served: {reason}"));
                })
                .ok()
        });
        opened.as_ref()
    }

    /// The message of this thread's last failed call.
    pub fn last_error(&self) -> String {
        // SAFETY: the function returns a string of this thread that is valid until its next call.
        let message = unsafe { (self.last_error)() };
        if message.is_null() {
            return String::new();
        }
        // SAFETY: as above; the string ends with NUL.
        unsafe { CStr::from_ptr(message) }.to_string_lossy().into_owned()
    }
}

fn open() -> Result<Spillway, String> {
    let candidates = candidates();
    for path in &candidates {
        let Ok(name) = CString::new(path.as_os_str().as_encoded_bytes()) else { continue };
        // SAFETY: the name ends with NUL; the library's constructors do nothing.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if let Some(library) = NonNull::new(library) {
            // SAFETY: a library of this name is Spillway's.
            return unsafe { bind(library, path) }.ok_or(format!(
                "{} does not have ABI version {ABI_VERSION}; install both libraries of one release",
                path.display()
            ));
        }
    }
    let searched: Vec<_> = candidates.iter().map(|path| path.display().to_string()).collect();
    Err(format!("no libspillway.so is found; searched: {}; name it in SPILLWAY_LIBRARY", searched.join(", ")))
}

/// # Safety
/// The library is Spillway's.
unsafe fn bind(library: NonNull<c_void>, path: &Path) -> Option<Spillway> {
    // SAFETY: each type is the one that Spillway's headers declare for the name in this ABI version.
    unsafe {
        let version: unsafe extern "C" fn() -> u32 = function(library, c"spw_abi_version")?;
        if version() != ABI_VERSION {
            return None;
        }
        Some(Spillway {
            adam_create: function(library, c"spw_ds_adam_create")?,
            adam_update: function(library, c"spw_ds_adam_update")?,
            adam_rollback: function(library, c"spw_ds_adam_rollback")?,
            adam_destroy: function(library, c"spw_ds_adam_destroy")?,
            adagrad_step: function(library, c"spw_adagrad_step")?,
            lion_step: function(library, c"spw_lion_step")?,
            undo_open: function(library, c"spw_undo_open")?,
            undo_close: function(library, c"spw_undo_close")?,
            last_error: function(library, c"spw_last_error")?,
            path: path.to_path_buf(),
        })
    }
}

/// `SPILLWAY_LIBRARY` alone, or the names of the library beside this one.
fn candidates() -> Vec<PathBuf> {
    if let Some(named) = environment::path("SPILLWAY_LIBRARY") {
        return vec![named];
    }
    let mut info = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    // SAFETY: the record is a local, and the address is in this library, whose name ends with NUL.
    let own = unsafe {
        if libc::dladdr(candidates as fn() -> Vec<PathBuf> as *const c_void, &raw mut info) == 0
            || info.dli_fname.is_null()
        {
            return Vec::new();
        }
        PathBuf::from(OsString::from_vec(CStr::from_ptr(info.dli_fname).to_bytes().to_vec()))
    };
    // A relative name was meant from the folder in which the program started.
    let own = own.canonicalize().unwrap_or(own);
    let folder = own.parent().unwrap_or(Path::new("/"));
    vec![folder.join("libspillway.so"), folder.join(format!("libspillway.so.{ABI_VERSION}"))]
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    /// Sizes and offsets of all structs in the headers, which `cargo test --test abi` compares with C.
    const LAYOUT: &str = include_str!("../../../../ffi_tests/layout.txt");

    /// Size of the type of a field.
    const fn size<T, F>(_field: fn(&T) -> &F) -> usize {
        size_of::<F>()
    }

    /// Name, offset and size of each field.
    macro_rules! fields {
        ($name:ident: $($field:ident),* $(,)?) => {
            [$((stringify!($field), offset_of!($name, $field), size(|value: &$name| &value.$field))),*]
        };
    }

    /// Lines of the layout that begin with `name` and a dot.
    fn in_header(name: &str) -> Vec<&'static str> {
        LAYOUT.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix('.')).collect()
    }

    fn line((field, offset, size): &(&str, usize, usize)) -> String {
        format!("{field} {offset} {size}")
    }

    #[test]
    fn the_structs_lie_as_in_the_headers() {
        let tensor = fields!(Tensor: struct_size, param_dtype, state_dtype, grad_dtype, copy_dtype, take_copy, n, param, grad,
            exp_avg, exp_avg_sq, param_copy, options);
        let call = fields!(AdamCall: struct_size, bias_correction, step, lr, beta1, beta2, eps, weight_decay, grad_scale);
        let undo = fields!(UndoOptions: struct_size, mode, elements, tensors);
        let adagrad =
            fields!(AdagradOptions: struct_size, reserved, step, lr, lr_decay, eps, weight_decay, grad_scale);
        let lion = fields!(LionOptions: struct_size, reserved, lr, beta1, beta2, weight_decay, grad_scale);
        let structs = [
            ("spw_tensor", size_of::<Tensor>(), tensor.to_vec()),
            ("spw_ds_adam_call", size_of::<AdamCall>(), call.to_vec()),
            ("spw_undo_options", size_of::<UndoOptions>(), undo.to_vec()),
            ("spw_adagrad_options", size_of::<AdagradOptions>(), adagrad.to_vec()),
            ("spw_lion_options", size_of::<LionOptions>(), lion.to_vec()),
        ];
        for (name, size, fields) in structs {
            let header = in_header(name);
            let own: Vec<String> = fields.iter().map(line).collect();
            assert_eq!(own, header[..fields.len()], "{name}");
            // A prefix of the header's struct is a struct of an older header.
            let next = header.get(fields.len()).map(|line| line.split(' ').nth(1).unwrap().parse().unwrap());
            assert_eq!(next.unwrap_or(size), size, "{name}");
            // All bytes belong to a field: the test has left out none.
            assert_eq!(fields.iter().map(|field| field.2).sum::<usize>(), size, "{name}");
        }
    }
}
