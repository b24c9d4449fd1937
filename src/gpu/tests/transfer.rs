//! Copies are complete, ordered with the framework's work, and use pinned memory only; no wait between them is missing.

use std::sync::Arc;
use std::time::Duration;

use super::device;
use super::sample::{Span, values};
use crate::dtype::Dtype;
use crate::error::{Error, GpuKind};
use crate::gpu::device::Device;
use crate::gpu::kernels::{DeviceFloats, Kernels};
use crate::gpu::memory::{DeviceMemory, HostSpan, Registry};
use crate::gpu::stream::{ForeignEvent, ForeignStream, GpuEvent, Stream};
use crate::gpu::transfer::{After, Copy, Direction, Transfers};
use crate::pool::pinned;
use crate::pool::region::Backing;

/// Elements per chunk; small, so that copies have many chunks.
pub(super) const CHUNK: usize = 1000;

/// A framework with a stream and device memory, and pinned memory on the host.
pub(super) struct Fixture {
    ordinal: u32,
    pub device: Arc<Device>,
    pub transfers: Transfers,
    pub registry: Registry,
    pub framework: Stream,
    pub there: GpuEvent,
    pub blocks: Vec<usize>,
}

impl Fixture {
    pub fn new(ordinal: u32) -> Fixture {
        let device = device(ordinal);
        let kernels = Arc::new(Kernels::load(&device).unwrap());
        Fixture {
            ordinal,
            transfers: Transfers::new(&device, &kernels, (CHUNK * 4) as u64).unwrap(),
            registry: Registry::new(&device),
            framework: Stream::new(&device).unwrap(),
            there: GpuEvent::new(&device).unwrap(),
            blocks: Vec::new(),
            device,
        }
    }

    /// Pinned memory that contains `bytes`.
    pub fn pinned(&mut self, bytes: &[u8]) -> HostSpan {
        let block = pinned::alloc(bytes.len(), Backing::default()).unwrap();
        self.blocks.push(block.address());
        block.write(bytes);
        self.registry.host(block.part(0, bytes.len()), "host").unwrap()
    }

    pub fn memory(&self, dtype: Dtype, n: usize) -> (DeviceMemory, DeviceFloats) {
        let memory = DeviceMemory::new(&self.device, (n * dtype.size()) as u64).unwrap();
        let floats = DeviceFloats::new(memory.span(), dtype, "device").unwrap();
        (memory, floats)
    }

    /// The framework's event, recorded now.
    pub fn event(&self) -> After {
        self.framework.record(&self.there).unwrap();
        // SAFETY: the event lives as long as the fixture.
        After::Event(unsafe { ForeignEvent::new(self.there.address(), "after") }.unwrap())
    }

    pub fn stream(&self) -> ForeignStream {
        // SAFETY: the stream lives as long as the fixture.
        unsafe { ForeignStream::new(self.framework.handle() as u64) }
    }

    pub fn races(&self) -> Vec<String> {
        fakecuda::with(self.ordinal, |gpu| {
            assert_eq!(gpu.pageable_copies, 0);
            gpu.races().to_vec()
        })
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        self.transfers.finish().unwrap();
        self.blocks.iter().for_each(|block| pinned::free(*block).unwrap());
    }
}

fn bytes(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    let mut span = Span::of(dtype, values);
    let inside = span.inner().address() as usize;
    let all = span.bytes_mut();
    let start = inside - all.as_ptr() as usize;
    all[start..start + values.len() * dtype.size()].to_vec()
}

/// Compares values; f32 NaNs may have any payload.
fn same(found: &[u8], expected: &[u8], dtype: Dtype) -> bool {
    let word = |bytes: &[u8]| {
        let value = f32::from_ne_bytes(bytes.try_into().unwrap());
        if value.is_nan() { 0x7fc0_0000 } else { value.to_bits() }
    };
    match dtype {
        Dtype::F32 => found.chunks(4).map(word).eq(expected.chunks(4).map(word)),
        _ => found == expected,
    }
}

const WIRES: [(Dtype, Dtype); 5] = [
    (Dtype::F16, Dtype::F32),
    (Dtype::Bf16, Dtype::F32),
    (Dtype::F16, Dtype::F16),
    (Dtype::Bf16, Dtype::Bf16),
    (Dtype::F32, Dtype::F32),
];

#[test]
fn gradients_leave_and_parameters_arrive_for_every_wire_and_length() {
    let mut fixture = Fixture::new(20);
    for (device_dtype, host_dtype) in WIRES {
        for n in [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 7 * CHUNK + 13] {
            let numbers = values(n, true, 5, false);
            let there = bytes(device_dtype, &numbers);
            let here = bytes(host_dtype, &Span::of(device_dtype, &numbers).values());

            // The framework writes its gradient, and the copy starts after it.
            let source = fixture.pinned(&there);
            let (_memory, floats) = fixture.memory(device_dtype, n);
            fixture.framework.upload(&source, floats.span()).unwrap();
            let host = fixture.pinned(&vec![0xee; here.len()]);
            let out = Copy {
                direction: Direction::D2h,
                device: floats,
                host: host.into(),
                host_dtype,
                after: fixture.event(),
            };
            let ticket = fixture.transfers.start(&out).unwrap();
            fixture.transfers.wait(ticket, None).unwrap();
            let what = format!("{device_dtype:?} {host_dtype:?} {n}");
            assert!(same(&out.host.span().to_vec(), &here, host_dtype), "out {what}");

            // The parameters are copied back, and the framework reads them after the copy.
            let (_memory, floats) = fixture.memory(device_dtype, n);
            let host = fixture.pinned(&bytes(host_dtype, &numbers));
            let into = Copy {
                direction: Direction::H2d,
                device: floats,
                host: host.into(),
                host_dtype,
                after: After::Stream(fixture.stream()),
            };
            let ticket = fixture.transfers.start(&into).unwrap();
            fixture.transfers.stream_wait(ticket, fixture.stream()).unwrap();
            let target = fixture.pinned(&vec![0xee; there.len()]);
            fixture.framework.download(floats.span(), &target).unwrap();
            fixture.framework.synchronize().unwrap();
            assert!(same(&target.span().to_vec(), &there, device_dtype), "in {what}");
        }
    }
    assert_eq!(fixture.races(), [""; 0]);
}

#[test]
fn many_copies_of_both_directions_share_two_buffers_without_a_race() {
    let mut fixture = Fixture::new(21);
    let n = 5 * CHUNK + 7;
    let numbers: Vec<Vec<f32>> = (0..6).map(|seed| values(n, false, seed, false)).collect();
    let mut copies = Vec::new();
    for numbers in &numbers {
        let source = fixture.pinned(&bytes(Dtype::Bf16, numbers));
        let (grads, from) = fixture.memory(Dtype::Bf16, n);
        fixture.framework.upload(&source, from.span()).unwrap();
        let host = fixture.pinned(&vec![0; n * 4]);
        let out = Copy {
            direction: Direction::D2h,
            device: from,
            host: host.into(),
            host_dtype: Dtype::F32,
            after: fixture.event(),
        };
        let (params, to) = fixture.memory(Dtype::F16, n);
        let host = fixture.pinned(&bytes(Dtype::F32, numbers));
        let into = Copy {
            direction: Direction::H2d,
            device: to,
            host: host.into(),
            host_dtype: Dtype::F32,
            after: After::Now,
        };
        let tickets = [fixture.transfers.start(&out).unwrap(), fixture.transfers.start(&into).unwrap()];
        copies.push((out, into, tickets, grads, params));
    }
    for ((out, into, tickets, ..), numbers) in copies.iter().zip(&numbers) {
        fixture.transfers.wait(tickets[0], None).unwrap();
        let widened = Span::of(Dtype::Bf16, numbers).values();
        assert!(same(&out.host.span().to_vec(), &bytes(Dtype::F32, &widened), Dtype::F32));
        fixture.transfers.stream_wait(tickets[1], fixture.stream()).unwrap();
        let target = fixture.pinned(&vec![0; n * 2]);
        fixture.framework.download(into.device.span(), &target).unwrap();
        fixture.framework.synchronize().unwrap();
        assert!(target.span().to_vec() == bytes(Dtype::F16, numbers));
    }
    assert_eq!(fixture.races(), [""; 0]);
}

#[test]
fn a_copy_that_does_not_wait_for_the_framework_is_a_race() {
    let mut fixture = Fixture::new(22);
    for (host_dtype, direction) in [
        (Dtype::F32, Direction::D2h),
        (Dtype::Bf16, Direction::D2h),
        (Dtype::F32, Direction::H2d),
        (Dtype::Bf16, Direction::H2d),
    ] {
        let before = fixture.races().len();
        let source = fixture.pinned(&bytes(Dtype::Bf16, &[1.0; 50]));
        let (_memory, floats) = fixture.memory(Dtype::Bf16, 50);
        fixture.framework.upload(&source, floats.span()).unwrap();
        let host = fixture.pinned(&vec![0; 50 * host_dtype.size()]);
        let copy = Copy { direction, device: floats, host: host.into(), host_dtype, after: After::Now };
        let ticket = fixture.transfers.start(&copy).unwrap();
        fixture.transfers.wait(ticket, None).unwrap();
        fixture.framework.synchronize().unwrap();
        assert_eq!(fixture.races().len(), before + 1, "{direction:?} {host_dtype:?}");
    }
}

#[test]
fn copies_that_do_not_fit_are_refused() {
    let mut fixture = Fixture::new(23);
    let (_memory, floats) = fixture.memory(Dtype::F16, 10);
    let host = fixture.pinned(&[0; 40]);
    let good = Copy {
        direction: Direction::D2h,
        device: floats,
        host: host.clone().into(),
        host_dtype: Dtype::F32,
        after: After::Now,
    };
    let cases = [
        (Copy { host: host.part(0, 39).into(), ..good.clone() }, "host: has 39 bytes, but 40 are needed"),
        (
            Copy { host_dtype: Dtype::Bf16, host: host.part(0, 20).into(), ..good.clone() },
            "host_dtype: is bf16, but the device type is f16",
        ),
    ];
    for (copy, words) in cases {
        let message = fixture.transfers.start(&copy).unwrap_err().to_string();
        assert!(message.starts_with(words), "{message}");
    }
    for wrong in [0, 1, u64::MAX] {
        assert!(matches!(fixture.transfers.wait(wrong, None), Err(Error::InvalidArgument { .. })), "{wrong}");
    }
    let ticket = fixture.transfers.start(&good).unwrap();
    let late = fixture.transfers.wait(ticket, Some(Duration::ZERO)).unwrap_err();
    assert!(matches!(late, Error::Timeout(_)), "{late}");
    fixture.transfers.wait(ticket, Some(Duration::from_secs(60))).unwrap();
    fixture.transfers.wait(ticket, Some(Duration::ZERO)).unwrap();
}

#[test]
fn pinned_memory_stays_until_its_copy_is_over_even_if_its_owner_lets_go() {
    let fixture = Fixture::new(24);
    let (_memory, floats) = fixture.memory(Dtype::F32, 1 << 23);
    let big = pinned::alloc(4 << 23, Backing::default()).unwrap();
    let host = fixture.registry.host(big, "host").unwrap();
    let copy = Copy {
        direction: Direction::D2h,
        device: floats,
        host: host.into(),
        host_dtype: Dtype::F32,
        after: fixture.event(),
    };
    let ticket = fixture.transfers.start(&copy).unwrap();
    drop(copy);
    let registered = || fakecuda::with(24, |gpu| gpu.alive()[4]);
    let before = registered();
    pinned::free(big.address()).unwrap();
    assert_eq!(registered(), before, "the copy still needs it");
    fixture.transfers.wait(ticket, None).unwrap();
    fixture.transfers.finish().unwrap();
    assert_eq!(registered(), before - 1);
}

#[test]
fn an_error_of_the_driver_in_the_middle_of_a_copy_is_reported_and_nothing_hangs() {
    for (call, code, kind) in [
        ("cuMemAlloc_v2", 2, GpuKind::OutOfMemory),
        ("cuMemcpyDtoHAsync_v2", 719, GpuKind::Lost),
        ("cuLaunchKernel", 1, GpuKind::Refused),
        ("cuEventSynchronize", 700, GpuKind::Lost),
    ] {
        let mut fixture = Fixture::new(25);
        let (_memory, floats) = fixture.memory(Dtype::F16, 3 * CHUNK);
        let host = fixture.pinned(&vec![0; 12 * CHUNK]);
        fakecuda::with(25, |gpu| gpu.faults.push((call, 0, code)));
        let copy = Copy {
            direction: Direction::D2h,
            device: floats,
            host: host.into(),
            host_dtype: Dtype::F32,
            after: fixture.event(),
        };
        let outcome = fixture.transfers.start(&copy).and_then(|ticket| fixture.transfers.wait(ticket, None));
        assert!(matches!(outcome, Err(Error::Gpu(error)) if error.kind == kind), "{call}");
        // Leaks the fixture: a lost context cannot be waited for.
        std::mem::forget(fixture);
    }
}

#[test]
fn a_new_copy_asks_for_the_oldest_alone() {
    let mut fixture = Fixture::new(26);
    let (_memory, floats) = fixture.memory(Dtype::Bf16, 10);
    let copies = [(Direction::D2h, Dtype::F32), (Direction::H2d, Dtype::F32), (Direction::H2d, Dtype::Bf16)];
    for (direction, host_dtype) in copies.into_iter().cycle().take(30) {
        let host = fixture.pinned(&vec![0; 10 * host_dtype.size()]);
        let copy = Copy { direction, device: floats, host: host.into(), host_dtype, after: After::Now };
        let asked =
            || fakecuda::with(26, |gpu| gpu.calls.iter().filter(|call| **call == "cuEventQuery").count());
        let before = asked();
        let ticket = fixture.transfers.start(&copy).unwrap();
        fixture.transfers.stream_wait(ticket, fixture.stream()).unwrap();
        // The fake driver answers "not ready" once, and then "done".
        assert!(asked() - before <= 6, "{} questions", asked() - before);
    }
}

#[test]
fn a_copy_is_timed_by_the_device() {
    let mut fixture = Fixture::new(27);
    fakecuda::with(27, |gpu| gpu.queues.limits.rates = [1e6, 2e6, 0.0]);
    let (_memory, floats) = fixture.memory(Dtype::Bf16, 4000);
    for (direction, host_dtype, seconds) in [
        (Direction::H2d, Dtype::F32, 0.016),
        (Direction::D2h, Dtype::F32, 0.008),
        (Direction::H2d, Dtype::Bf16, 0.008),
        (Direction::D2h, Dtype::Bf16, 0.004),
    ] {
        let host = fixture.pinned(&vec![0; 4000 * host_dtype.size()]);
        let copy = Copy { direction, device: floats, host: host.into(), host_dtype, after: After::Now };
        let took = fixture.transfers.measure(&copy).unwrap();
        assert!((took / seconds - 1.0).abs() < 1e-3, "{direction:?} {host_dtype:?}: {took}");
        fixture.transfers.finish().unwrap();
    }
}
