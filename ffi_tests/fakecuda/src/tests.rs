//! Proves that the fake driver refuses what its documentation says. Each test uses a device of its own.

use std::ffi::{c_int, c_void};

use cudarc::driver::sys::{CUevent, CUstream};

use crate::api;
use crate::capture::{GLOBAL, RELAXED, THREAD_LOCAL};
use crate::code::{Code, INVALID_VALUE};
use crate::memory::Held;

const NOT_READY: Code = 600;

/// Makes the context of a device current on this thread.
fn enter(ordinal: u32) {
    crate::with(ordinal, |gpu| gpu.reset());
    let mut context = std::ptr::null_mut();
    // SAFETY: the pointer is valid.
    unsafe {
        assert_eq!(api::cuDevicePrimaryCtxRetain(&raw mut context, ordinal as c_int), 0);
        assert_eq!(api::cuCtxPushCurrent_v2(context), 0);
    }
}

fn made<T>(make: impl FnOnce(*mut *mut T) -> Code) -> *mut T {
    let mut made = std::ptr::null_mut();
    assert_eq!(make(&raw mut made), 0);
    made
}

fn stream() -> CUstream {
    // SAFETY: the pointer is valid.
    made(|stream| unsafe { api::cuStreamCreateWithPriority(stream, 1, 0) })
}

fn event() -> CUevent {
    // SAFETY: the pointer is valid.
    made(|event| unsafe { api::cuEventCreate(event, 2) })
}

fn memory(bytes: usize) -> u64 {
    let mut address = 0;
    // SAFETY: the pointer is valid.
    assert_eq!(unsafe { api::cuMemAlloc_v2(&raw mut address, bytes) }, 0);
    address
}

fn exchange(mode: c_int) -> c_int {
    let mut mode = mode;
    // SAFETY: the pointer is valid.
    assert_eq!(unsafe { api::cuThreadExchangeStreamCaptureMode(&raw mut mode) }, 0);
    mode
}

#[test]
fn a_full_queue_blocks_the_call_until_the_oldest_is_over() {
    enter(60);
    let (first, second, device) = (stream(), stream(), memory(8));
    let mut host = [7_u8; 8];
    crate::with(60, |gpu| {
        gpu.queues.limits.depth = 3;
        gpu.page_lock(host.as_ptr() as usize, host.len());
    });
    // SAFETY: memory of the device and page-locked memory of the host, both valid until the end.
    unsafe {
        let page = host.as_mut_ptr().cast::<c_void>();
        assert_eq!(api::cuMemcpyHtoDAsync_v2(device, page.cast_const(), 8, first), 0);
        let there = event();
        assert_eq!(api::cuEventRecord(there, first), 0);
        assert_eq!(api::cuStreamWaitEvent(second, there, 0), 0);
        crate::with(60, |gpu| assert_eq!((gpu.queues.blocked, gpu.queues.most_queued), (0, 3)));
        host.fill(9);
        // A full queue delays every stream. The copy was queued first, so it has finished now.
        assert_eq!(api::cuMemcpyDtoHAsync_v2(page, device, 8, second), 0);
        crate::with(60, |gpu| assert_eq!((gpu.queues.blocked, gpu.queues.most_queued), (1, 3)));
        host.fill(1);
        assert_eq!(api::cuStreamSynchronize(second), 0);
    }
    assert_eq!(host, [9; 8]);
}

#[test]
fn an_unsafe_call_breaks_a_global_capture_unless_the_thread_allows_it() {
    enter(61);
    let (captured, other, mark) = (stream(), stream(), event());
    let mut graph = std::ptr::null_mut();
    // SAFETY: objects of this device; the pointer is valid.
    unsafe {
        assert_eq!(api::cuEventRecord(mark, other), 0);
        let address = mark.addr();
        let query = || api::cuEventQuery(std::ptr::without_provenance_mut(address));
        for (capture, thread, refused) in [
            (GLOBAL, GLOBAL, true),
            (GLOBAL, THREAD_LOCAL, true),
            (GLOBAL, RELAXED, false),
            (THREAD_LOCAL, GLOBAL, true),
            (THREAD_LOCAL, RELAXED, false),
            (RELAXED, GLOBAL, false),
        ] {
            assert_eq!(api::cuStreamBeginCapture_v2(captured, capture), 0);
            assert_eq!(exchange(thread), GLOBAL);
            let asked = query();
            assert_eq!(exchange(GLOBAL), thread);
            let ended = api::cuStreamEndCapture(captured, &raw mut graph);
            match refused {
                true => assert_eq!((asked, ended), (900, 901), "{capture} {thread}"),
                false => assert!([0, NOT_READY].contains(&asked) && ended == 0, "{capture} {thread}"),
            }
        }
        // A call of another thread breaks only a global capture.
        for (capture, code) in [(GLOBAL, 900), (THREAD_LOCAL, 0)] {
            assert_eq!(api::cuStreamBeginCapture_v2(captured, capture), 0);
            let asked = std::thread::scope(|scope| scope.spawn(query).join().unwrap());
            assert_eq!((asked, api::cuStreamEndCapture(captured, &raw mut graph)), (code, code + code / 900));
        }
    }
}

#[test]
fn a_stream_that_waits_for_a_captured_event_takes_part_and_runs_nothing() {
    enter(62);
    let (captured, other, mark, back) = (stream(), stream(), event(), event());
    let mut graph = std::ptr::null_mut();
    let state = |stream| {
        let mut state = -1;
        // SAFETY: the pointer is valid.
        assert_eq!(unsafe { api::cuStreamIsCapturing(stream, &raw mut state) }, 0);
        state
    };
    // SAFETY: objects of this device; the pointer is valid.
    unsafe {
        for joined in [true, false] {
            assert_eq!(api::cuStreamBeginCapture_v2(captured, RELAXED), 0);
            assert_eq!(api::cuEventRecord(mark, captured), 0);
            assert_eq!((state(captured), state(other)), (1, 0));
            assert_eq!(api::cuStreamWaitEvent(other, mark, 0), 0);
            assert_eq!(state(other), 1);
            if joined {
                assert_eq!(api::cuEventRecord(back, other), 0);
                assert_eq!(api::cuStreamWaitEvent(captured, back, 0), 0);
            }
            let ended = api::cuStreamEndCapture(captured, &raw mut graph);
            assert_eq!((ended, state(other)), (if joined { 0 } else { 904 }, 0));
        }
        // The host may not query captured work, in any mode.
        assert_eq!(api::cuStreamBeginCapture_v2(captured, RELAXED), 0);
        assert_eq!(api::cuEventRecord(mark, captured), 0);
        assert_eq!(api::cuEventQuery(mark), 907);
        assert_eq!(api::cuStreamEndCapture(captured, &raw mut graph), 901);
    }
    crate::with(62, |gpu| assert_eq!(gpu.queues.most_queued, 0));
}

#[test]
fn a_pageable_copy_blocks_and_is_counted_and_memory_locked_in_part_is_refused() {
    enter(63);
    let (copies, device) = (stream(), memory(64));
    let mut host = [3_u8; 64];
    let page = host.as_mut_ptr().cast::<c_void>();
    // SAFETY: memory of the device and of the host, both valid until the end.
    unsafe {
        assert_eq!(api::cuMemcpyHtoDAsync_v2(device, page.cast_const(), 64, copies), 0);
        host.fill(4);
        assert_eq!(api::cuMemcpyDtoHAsync_v2(page, device, 64, copies), 0);
        assert_eq!(host, [3; 64], "over before the call returns");
        crate::with(63, |gpu| {
            assert_eq!(gpu.pageable_copies, 2);
            gpu.page_lock(page as usize, 32);
        });
        assert_eq!(api::cuMemcpyDtoHAsync_v2(page, device, 64, copies), INVALID_VALUE);
        assert_eq!(api::cuMemcpyDtoHAsync_v2(page, device, 32, copies), 0);
        crate::with(63, |gpu| assert_eq!(gpu.pageable_copies, 2));
        assert_eq!(api::cuStreamSynchronize(copies), 0);
    }
}

#[test]
fn each_device_has_memory_of_its_own() {
    enter(59);
    let elsewhere = memory(100);
    enter(58);
    crate::with(58, |gpu| gpu.queues.limits.memory_bytes = 1000);
    let here = memory(600);
    let mut address = 0;
    // SAFETY: the pointer is valid.
    unsafe {
        assert_eq!(api::cuMemAlloc_v2(&raw mut address, 401), 2);
        assert_eq!(api::cuMemFree_v2(elsewhere), INVALID_VALUE);
        assert_eq!(api::cuMemFree_v2(here), 0);
    }
    crate::with(58, |gpu| {
        assert_eq!((gpu.memory_used(), gpu.most_memory()), (0, 600));
        assert_eq!(gpu.queues.reach.held(elsewhere, 1), Held::Nothing);
    });
    crate::with(59, |gpu| {
        assert_eq!((gpu.memory_used(), gpu.queues.reach.held(elsewhere, 100)), (100, Held::Device))
    });
}

const STORE: &str = ".version 8.0\n.target sm_70\n.address_size 64\n.visible .entry store(\n.param .u64 store_param_0\n)\n{\n\
        .reg .b32 %r<2>;\n.reg .b64 %rd<3>;\nld.param.u64 %rd1, [store_param_0];\nmov.u32 %r1, %ctaid.x;\n\
        st.global.u32 [%rd1], %r1;\nret;\n}\n";

#[test]
fn launches_uploads_and_instructions_are_counted() {
    enter(58);
    let (stream, device) = (stream(), memory(8));
    crate::with(58, |gpu| {
        let host = [7_u8; 8];
        gpu.page_lock(host.as_ptr() as usize, 8);
        let module = gpu.module_load(STORE).unwrap();
        let function = gpu.function(module, "store").unwrap();
        let kernel = gpu.kernel(function).unwrap();
        let stream = api::number(stream);
        gpu.copy(stream, host.as_ptr() as u64, device, 8, 0).unwrap();
        gpu.launch(stream, kernel, 3, 32, device.to_ne_bytes().to_vec()).unwrap();
        assert_eq!((gpu.uploaded, gpu.queues.instructions), (8, 0));
        gpu.stream_synchronize(stream).unwrap();
        // The return is one of the four.
        assert_eq!((gpu.uploaded, gpu.queues.instructions), (8, 3 * 32 * 4));
        assert_eq!(gpu.queues.failures, [""; 0]);
    });
}

#[test]
fn a_module_that_is_unloaded_under_its_kernel_is_a_failure() {
    enter(57);
    let (stream, device) = (api::number(stream()), memory(4));
    crate::with(57, |gpu| {
        for (waits, failures) in [(true, 0), (false, 1)] {
            let module = gpu.module_load(STORE).unwrap();
            let function = gpu.function(module, "store").unwrap();
            let kernel = gpu.kernel(function).unwrap();
            gpu.launch(stream, kernel, 1, 1, device.to_ne_bytes().to_vec()).unwrap();
            if waits {
                gpu.stream_synchronize(stream).unwrap();
            }
            gpu.module_unload(module).unwrap();
            assert_eq!(gpu.queues.failures.len(), failures);
        }
    });
}

#[test]
fn work_of_a_stream_that_was_destroyed_on_a_stalled_device_is_done_later() {
    enter(56);
    let (copies, device) = (stream(), memory(8));
    let mut host = [7_u8; 8];
    crate::with(56, |gpu| {
        gpu.page_lock(host.as_ptr() as usize, host.len());
        gpu.stalled = true;
    });
    // SAFETY: memory of the device and page-locked memory of the host, both valid until the end.
    unsafe {
        let page = host.as_mut_ptr().cast::<c_void>();
        assert_eq!(api::cuMemcpyHtoDAsync_v2(device, page.cast_const(), 8, copies), 0);
        assert_eq!(api::cuStreamDestroy_v2(copies), 0);
        assert_ne!(api::cuStreamDestroy_v2(copies), 0);
    }
    crate::with(56, |gpu| assert_eq!((gpu.alive()[0], gpu.queued()), (0, 1)));
    crate::resume(56);
    crate::with(56, |gpu| assert_eq!((gpu.alive()[0], gpu.queued()), (0, 0)));
}
