//! Every defect of a driver, a device or an argument has its own error, and no resource leaks.

use std::sync::Arc;

use cudarc::driver::sys::CUdevice_attribute;
use fakecuda::capture::GLOBAL;

use super::{device, driver, foreign, until};
use crate::error::{Error, GpuKind, Result};
use crate::gpu::device::Device;
use crate::gpu::driver::Driver;
use crate::gpu::kernels::Kernels;
use crate::gpu::memory::{DeviceMemory, DeviceSpan, Registry};
use crate::gpu::module::Module;
use crate::gpu::stream::{ForeignEvent, ForeignStream, GpuEvent, Stream};
use crate::gpu::table::Table;
use crate::pool::buffer::Buffer;
use crate::pool::pinned;
use crate::pool::region::{Backing, Region};
use crate::sys::span::Span;

fn kind<T>(result: Result<T>) -> (GpuKind, String) {
    match result.err() {
        Some(Error::Gpu(error)) => (error.kind, error.to_string()),
        other => panic!("{other:?}"),
    }
}

/// The fake driver with some functions replaced.
fn broken(change: impl Fn(&mut Table)) -> Result<Driver> {
    // SAFETY: the fake's functions have the names and signatures of the driver's.
    let mut table = unsafe { Table::resolve(fakecuda::symbol) }.unwrap();
    change(&mut table);
    Driver::initialise(table, "broken")
}

/// A `cuInit` that returns this code.
macro_rules! init {
    ($code:literal) => {{
        unsafe extern "C" fn init(_: u32) -> i32 {
            $code
        }
        init
    }};
}

#[test]
fn a_driver_that_is_missing_or_something_else_is_named() {
    let (found, words) = kind(Driver::open("libno-such-driver.so.9"));
    assert_eq!(found, GpuKind::NoDevice);
    assert!(words.contains("opening libno-such-driver.so.9: cannot load the CUDA driver library"), "{words}");
    let (found, words) = kind(Driver::open("libc.so.6"));
    assert_eq!(found, GpuKind::DriverTooOld);
    assert!(words.contains("the library has no cuInit"), "{words}");
    assert_eq!(kind(Driver::open("a\0b")).0, GpuKind::NoDevice);
}

#[test]
fn every_refusal_to_initialise_has_its_kind_and_says_what_to_do() {
    let cases: [(unsafe extern "C" fn(u32) -> i32, GpuKind, &str); 8] = [
        (init!(100), GpuKind::NoDevice, "CUDA_ERROR_NO_DEVICE (100): no GPU is visible"),
        (init!(999), GpuKind::NoDevice, "CUDA error 999: the kernel driver does not respond"),
        (
            init!(34),
            GpuKind::DriverStub,
            "CUDA_ERROR_STUB_LIBRARY (34): the library is a CUDA toolkit's stub",
        ),
        (init!(35), GpuKind::DriverTooOld, "update the driver"),
        (init!(803), GpuKind::DriverTooOld, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
        (init!(3), GpuKind::Forked, "before this process was forked"),
        (init!(2), GpuKind::OutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"),
        (init!(916), GpuKind::Refused, "CUDA error 916"),
    ];
    for (init, expected, words) in cases {
        let (found, message) = kind(broken(|table| table.cuInit = init));
        assert_eq!(found, expected, "{message}");
        assert!(message.starts_with("initialising broken: ") && message.contains(words), "{message}");
    }
}

#[test]
fn a_driver_before_525_and_one_without_devices_are_named() {
    unsafe extern "C" fn old(version: *mut i32) -> i32 {
        // SAFETY: the caller's pointer is valid.
        unsafe { version.write(11_080) };
        0
    }
    let (found, words) = kind(broken(|table| table.cuDriverGetVersion = old));
    assert_eq!(
        (found, words.contains("the driver supports CUDA 11.8; install driver 525 (CUDA 12.0) or newer")),
        (GpuKind::DriverTooOld, true)
    );
    unsafe extern "C" fn none(count: *mut i32) -> i32 {
        // SAFETY: the caller's pointer is valid.
        unsafe { count.write(0) };
        0
    }
    let empty = Arc::new(broken(|table| table.cuDeviceGetCount = none).unwrap());
    assert_eq!(kind(Device::open(empty, 0)).0, GpuKind::NoDevice);
    assert!(matches!(
        Device::open(driver(), fakecuda::gpu::DEVICES as u32),
        Err(Error::InvalidArgument { .. })
    ));
    let missing = |name: &std::ffi::CStr| match name.to_str() {
        Ok("cuEventQuery") => std::ptr::null_mut(),
        _ => fakecuda::symbol(name),
    };
    // SAFETY: `missing` returns one of the fake's functions, or null.
    assert_eq!(unsafe { Table::resolve(missing) }.unwrap_err(), "cuEventQuery");
}

#[test]
fn a_gpu_that_is_too_old_for_the_kernels_is_refused() {
    unsafe extern "C" fn pascal(value: *mut i32, attribute: CUdevice_attribute, _: i32) -> i32 {
        // SAFETY: the caller's pointer is valid.
        unsafe {
            value.write(match attribute {
                CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => 6,
                _ => 1,
            });
        }
        0
    }
    let driver = Arc::new(broken(|table| table.cuDeviceGetAttribute = pascal).unwrap());
    let error = Device::open(driver, 10).unwrap_err();
    assert_eq!(
        error,
        Error::Unsupported("GPU 10 has compute capability 6.1; 7.0 or higher is needed".to_string())
    );
}

#[test]
fn kernels_that_the_driver_does_not_compile_come_with_its_log() {
    let device = device(11);
    let (found, words) = kind(Module::load(&device, "bad.ptx", ".version 8.0\nnonsense"));
    assert_eq!(found, GpuKind::Jit);
    assert!(words.contains("compiling bad.ptx: CUDA_ERROR_INVALID_PTX (218)"), "{words}");
    assert!(words.contains("compiler log: line 2: nonsense"), "{words}");
    for (code, expected) in [(221, GpuKind::Jit), (209, GpuKind::Jit), (222, GpuKind::DriverTooOld)] {
        fakecuda::with(11, |gpu| gpu.faults.push(("cuModuleLoadDataEx", 0, code)));
        assert_eq!(kind(Kernels::load(&device)).0, expected);
    }
    Kernels::load(&device).unwrap();
}

#[test]
fn memory_that_is_used_up_is_named_and_the_device_goes_on() {
    let device = device(12);
    let (found, words) = kind(DeviceMemory::new(&device, 1 << 40));
    assert_eq!(found, GpuKind::OutOfMemory);
    assert!(words.contains("1099511627776 bytes of memory on GPU 12"), "{words}");
    let span = pinned::alloc(100, Backing::default()).unwrap();
    fakecuda::with(12, |gpu| gpu.faults.push(("cuMemHostRegister_v2", 0, 2)));
    let registry = Registry::new(&device);
    assert_eq!(kind(registry.host(span, "host")).0, GpuKind::OutOfMemory);
    registry.host(span, "host").unwrap();
    pinned::free(span.address()).unwrap();
    DeviceMemory::new(&device, 1 << 20).unwrap();
}

#[test]
fn after_a_sticky_error_every_call_says_that_the_context_is_lost() {
    let (lost, other) = (device(13), device(14));
    let stream = Stream::new(&lost).unwrap();
    let event = GpuEvent::new(&lost).unwrap();
    fakecuda::with(13, |gpu| gpu.faults.push(("cuStreamSynchronize", 0, 700)));
    for result in [
        stream.synchronize(),
        stream.record(&event),
        event.synchronize(),
        stream.synchronize(),
        lost.info().map(drop),
    ] {
        let (found, words) = kind(result);
        assert_eq!(found, GpuKind::Lost);
        assert!(words.contains("CUDA_ERROR_ILLEGAL_ADDRESS (700): the CUDA context is lost"), "{words}");
    }
    other.info().unwrap();
}

#[test]
fn a_code_that_nobody_here_knows_is_passed_on_as_a_number() {
    let device = device(15);
    fakecuda::with(15, |gpu| gpu.faults.push(("cuStreamCreateWithPriority", 0, 4242)));
    let (found, words) = kind(Stream::new(&device));
    assert_eq!((found, words.as_str()), (GpuKind::Refused, "creating a stream: CUDA error 4242"));
}

#[test]
fn nothing_is_left_behind_and_the_callers_context_is_untouched() {
    let device = device(16);
    {
        let info = device.info().unwrap();
        assert_eq!((info.name.as_str(), info.pci.as_str()), ("Fake GPU", "0000:10:00.0"));
        assert_eq!((info.capability, info.copy_engines), (90, 2));
        let _objects = (
            Stream::new(&device).unwrap(),
            GpuEvent::new(&device).unwrap(),
            GpuEvent::timing(&device).unwrap(),
            DeviceMemory::new(&device, 10).unwrap(),
            DeviceMemory::new(&device, 0).unwrap(),
            Kernels::load(&device).unwrap(),
        );
        let buffer = Buffer::open(4096, Backing::default()).unwrap();
        let registry = Registry::new(&device);
        let block = buffer.span();
        registry.host(block, "block").unwrap();
        registry.host(block.part(10, 20), "block").unwrap();
        fakecuda::with(16, |gpu| assert_eq!(gpu.alive(), [1, 2, 3, 1, 1]));
        // The region is released with the buffer, and the registration before the region.
        drop(buffer);
        fakecuda::with(16, |gpu| assert_eq!(gpu.alive()[4], 0));
    }
    fakecuda::with(16, |gpu| {
        assert_eq!(gpu.alive(), [0; 5]);
        assert_eq!(gpu.retained, 1);
    });
    drop(device);
    fakecuda::with(16, |gpu| assert_eq!(gpu.retained, 0));
    // SAFETY: the pointer is valid.
    let empty = unsafe { fakecuda::api::cuCtxPopCurrent_v2(&mut std::ptr::null_mut()) };
    assert_eq!(empty, 201, "no context is left on this thread");
}

#[test]
fn memory_that_nobody_pinned_is_refused_and_what_its_owner_pinned_is_taken() {
    let device = device(17);
    let mut foreign = vec![0_u8; 1000];
    // SAFETY: `foreign` outlives the span and is not accessed otherwise meanwhile.
    let span = unsafe { Span::new(foreign.as_mut_ptr(), 1000) }.unwrap();
    let registry = Registry::new(&device);
    let message = registry.host(span, "grad").unwrap_err().to_string();
    assert!(message.starts_with("grad: 1000 bytes at") && message.contains("are not pinned"), "{message}");
    fakecuda::with(17, |gpu| gpu.page_lock(span.address(), 999));
    assert!(registry.host(span, "grad").is_err(), "one byte is missing");
    registry.host(span.part(0, 999), "grad").unwrap();
    registry.host(Span::empty(), "grad").unwrap();
}

/// The memory behind a small allocation is that of others, and is registered with it.
#[test]
fn memory_that_reaches_past_its_allocation_is_refused() {
    let device = device(20);
    let registry = Registry::new(&device);
    for bytes in [4096, 5000, 40 << 20] {
        let [own, next] = [(); 2].map(|()| pinned::alloc(bytes, Backing::default()).unwrap());
        for block in [own, next] {
            registry.host(block, "block").unwrap();
            registry.host(block.part(100, bytes - 100), "block").unwrap();
            // SAFETY: the bytes are not accessed.
            let past = unsafe { Span::new(block.as_ptr(), bytes + 1) }.unwrap();
            let message = registry.host(past, "block").unwrap_err().to_string();
            assert!(message.contains("use memory from one pinned allocation"), "{message}");
        }
        pinned::free(next.address()).unwrap();
        if bytes == 4096 {
            assert!(registry.host(next, "block").is_err(), "it was freed");
        }
        pinned::free(own.address()).unwrap();
    }
}

#[test]
fn foreign_handles_are_checked_as_far_as_they_can_be() {
    let device = device(18);
    let event = GpuEvent::new(&device).unwrap();
    // SAFETY: 0, a live event of this test, and a stream that is never used.
    let (none, own, stream) = unsafe {
        (ForeignEvent::new(0, "ready"), ForeignEvent::new(event.address(), "ready"), ForeignStream::new(0))
    };
    assert!(none.unwrap_err().to_string().starts_with("ready: is 0"));
    Stream::new(&device).unwrap().wait_foreign(own.unwrap()).unwrap();
    let current = device.enter().unwrap();
    stream.record(&event).unwrap();
    stream.wait(&event).unwrap();
    drop(current);
    let captured = Stream::new(&device).unwrap();
    let (handle, foreign) = (captured.handle() as u64, foreign(&captured));
    fakecuda::with(18, |gpu| assert_eq!(gpu.begin_capture(handle, GLOBAL), 0));
    assert!(foreign.record(&event).unwrap_err().to_string().contains("is being captured"));
    assert!(foreign.wait(&event).is_err());
    fakecuda::with(18, |gpu| assert_eq!(gpu.end_capture(handle), 0));
    foreign.record(&event).unwrap();
    // SAFETY: the spans are never accessed.
    unsafe {
        assert!(DeviceSpan::new(0, 1, "grad").is_err() && DeviceSpan::new(u64::MAX, 2, "grad").is_err());
        assert!(DeviceSpan::new(0, 0, "grad").is_ok());
    }
}

#[test]
fn a_missing_wait_is_seen_and_a_wait_makes_it_good() {
    for waits in [true, false] {
        let device = device(19);
        let memory = DeviceMemory::new(&device, 64).unwrap();
        let buffers = Buffer::open_many(2, 4096, Backing::default()).unwrap();
        let (from, to) = (buffers[0].span(), buffers[1].span());
        let registry = Registry::new(&device);
        let host = |span: Span| registry.host(span.part(0, 64), "block").unwrap();
        let (up, down) = (Stream::new(&device).unwrap(), Stream::new(&device).unwrap());
        let there = GpuEvent::new(&device).unwrap();
        from.write(&[7; 64]);
        to.write(&[0; 64]);
        assert!(there.done().unwrap(), "never recorded");
        up.upload(&host(from), memory.span()).unwrap();
        up.record(&there).unwrap();
        if waits {
            down.wait(&there).unwrap();
        }
        down.download(memory.span(), &host(to)).unwrap();
        down.synchronize().unwrap();
        up.synchronize().unwrap();
        let arrived = to.part(0, 64).to_vec() == [7; 64];
        let races = fakecuda::with(19, |gpu| gpu.races().len());
        assert_eq!((arrived, races), if waits { (true, 0) } else { (false, 1) });
    }
}

/// True if the address is mapped in a forked child of this process.
fn is_there_in_a_child(span: Span) -> bool {
    // SAFETY: the child makes two system calls and exits.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            libc::_exit(libc::msync(span.as_ptr().cast(), span.len(), libc::MS_ASYNC));
        }
        let mut outcome = 0;
        assert_eq!(libc::waitpid(child, &raw mut outcome, 0), child);
        outcome == 0
    }
}

#[test]
fn memory_that_the_gpu_reaches_is_not_there_in_a_forked_child() {
    let (first, second) = (device(28), device(29));
    let region = Region::open(8192, Backing::default()).unwrap();
    assert!(is_there_in_a_child(region.span()));
    let registries = [Registry::new(&first), Registry::new(&second)];
    let spans = registries.each_ref().map(|registry| registry.host(region.span(), "block").unwrap());
    assert!(!is_there_in_a_child(region.span()));
    let [one, other] = registries;
    drop((one, spans));
    assert!(!is_there_in_a_child(region.span()), "the other device still reaches it");
    drop(other);
    assert!(is_there_in_a_child(region.span()));
    region.retire();
}

/// The driver may let a registration wait for running work.
#[test]
fn memory_that_is_registered_does_not_wait_for_the_registration_of_other_memory() {
    let device = device(38);
    let registry = Registry::new(&device);
    let (known, new) =
        (Buffer::open(4096, Backing::default()).unwrap(), Buffer::open(4096, Backing::default()).unwrap());
    registry.host(known.span(), "block").unwrap();
    let (stream, memory) = (Stream::new(&device).unwrap(), DeviceMemory::new(&device, 64).unwrap());
    fakecuda::with(38, |gpu| gpu.stalled = true);
    stream.upload(&registry.host(known.span().part(0, 64), "block").unwrap(), memory.span()).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| registry.host(new.span(), "block").unwrap());
        until(|| fakecuda::with(38, |gpu| gpu.waiting == 1));
        registry.host(known.span(), "block").unwrap();
        fakecuda::resume(38);
    });
    stream.synchronize().unwrap();
}

#[test]
fn memory_that_others_registered_in_part_is_refused() {
    let device = device(90);
    let region = Region::open(8192, Backing::default()).unwrap();
    let registry = Registry::new(&device);
    fakecuda::with(90, |gpu| gpu.page_lock(region.span().address(), 4096));
    assert!(kind(registry.host(region.span(), "block")).1.contains("registering 8192 bytes"));
    fakecuda::with(90, |gpu| gpu.page_lock(region.span().address(), 8192));
    registry.host(region.span(), "block").unwrap();
    drop(registry);
    fakecuda::with(90, |gpu| assert_eq!(gpu.alive()[4], 1, "still the owner's"));
    region.retire();
}
