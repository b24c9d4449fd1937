//! Checks bounds: each span begins or ends at a memory page that no code may access.
//!
//! A read past an end changes no result, so the canaries of `check` miss it; here the read faults and stops the test.

use crate::{cases, kernels};
use sampled::Sample;
use spillway_kernels::dtype::{Dtype, Floats, FloatsMut};
use spillway_kernels::*;

/// Without the check, a kernel would read the missing state through a null address.
#[test]
fn a_tensor_without_a_state_that_the_rule_keeps_is_an_error() {
    let rule = crate::sample::adam_rule(WeightDecay::None);
    for kernel in kernels() {
        let (mut param, grad) = (vec![1.0f32; 40], vec![1.0f32; 40]);
        let states = States { param: FloatsMut::F32(&mut param), exp_avg: None, exp_avg_sq: None };
        let bare = Tensor::new(states, Floats::F32(&grad), None).unwrap();
        let refused = rule.step(kernel, bare, false).unwrap_err();
        assert!(refused.to_string().contains("exp_avg: is missing"), "{refused}");
        let states = States { param: FloatsMut::F32(&mut param), exp_avg: None, exp_avg_sq: None };
        let bare = Tensor::new(states, Floats::F32(&grad), None).unwrap();
        assert!(rule.undo(kernel, bare, None).is_err());
        assert_eq!(param, vec![1.0; 40]);
    }
}

/// After a split inside a chunk, the log of the second part would be too short.
#[test]
#[should_panic(expected = "a tensor is split only between tiles")]
fn a_tensor_is_not_cut_inside_a_chunk() {
    let (mut param, grad) = (vec![1.0f32; 40], vec![1.0f32; 40]);
    let states = States { param: FloatsMut::F32(&mut param), exp_avg: None, exp_avg_sq: None };
    let _ = Tensor::new(states, Floats::F32(&grad), None).unwrap().split_at(7);
}

const LENGTHS: [usize; 14] = [1, 3, 4, 5, 15, 16, 17, 63, 65, 255, 256, 257, 1023, 4097];

/// Mapped pages with a forbidden page on either side.
struct Guarded {
    start: *mut u8,
    bytes: usize,
}

/// The end of the span that touches a forbidden page.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Flush {
    Begin,
    End,
}

fn page() -> usize {
    // SAFETY: the call only reads a constant of the system.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap()
}

impl Guarded {
    fn new(bytes: usize) -> Guarded {
        let page = page();
        let bytes = bytes.next_multiple_of(page);
        // SAFETY: a new mapping; only its inner pages are made accessible.
        let start = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let all = libc::mmap(std::ptr::null_mut(), bytes + 2 * page, libc::PROT_NONE, flags, -1, 0);
            assert_ne!(all, libc::MAP_FAILED);
            let start = all.byte_add(page);
            assert_eq!(libc::mprotect(start, bytes, libc::PROT_READ | libc::PROT_WRITE), 0);
            // Huge values, whose steps overflow: their log takes the most space.
            start.cast::<u8>().write_bytes(0x7f, bytes);
            start
        };
        Guarded { start: start.cast(), bytes }
    }

    fn address(&self, bytes: usize, flush: Flush) -> *mut u8 {
        self.start.wrapping_add(if flush == Flush::Begin { 0 } else { self.bytes - bytes })
    }

    fn bytes(&mut self, n: usize, flush: Flush) -> &mut [u8] {
        // SAFETY: accessible memory of at least n bytes, borrowed together with the mapping.
        unsafe { std::slice::from_raw_parts_mut(self.address(n, flush), n) }
    }

    /// `n` elements at one side of the pages.
    fn floats(&mut self, dtype: Dtype, n: usize, flush: Flush) -> FloatsMut<'_> {
        fn slice<'a, T>(address: *mut u8, n: usize) -> &'a mut [T] {
            // SAFETY: the caller passes accessible, aligned memory of n elements, for which every bit pattern is a
            // value, and keeps the mapping borrowed.
            unsafe { std::slice::from_raw_parts_mut(address.cast(), n) }
        }
        let address = self.address(n * dtype.size(), flush);
        match dtype {
            Dtype::F32 => FloatsMut::F32(slice(address, n)),
            Dtype::F16 => FloatsMut::F16(slice(address, n)),
            Dtype::Bf16 => FloatsMut::Bf16(slice(address, n)),
        }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        let page = page();
        // SAFETY: this is the whole mapping of `new`, and no borrow of it remains.
        unsafe { libc::munmap(self.start.wrapping_sub(page).cast(), self.bytes + 2 * page) };
    }
}

fn all_dtypes() -> impl Iterator<Item = Dtypes> {
    const ALL: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];
    (0..3 * 3 * 3 * 4)
        .map(|i| Dtypes {
            param: ALL[i % 3],
            state: ALL[i / 3 % 3],
            grad: ALL[i / 9 % 3],
            copy: ALL.get(i / 27).copied(),
        })
        .filter(|dtypes| supported(*dtypes))
}

/// Steps spans at forbidden pages with every kernel, type combination, length and side.
fn check<R: Optimizer>(rule: R) {
    let most = LENGTHS[LENGTHS.len() - 1];
    let mut memory: [Guarded; 5] = std::array::from_fn(|_| Guarded::new(most * 4));
    let mut log = Guarded::new(log_bytes(most));
    let mut sample = Sample::new();
    for dtypes in all_dtypes() {
        let lengths = kernels().into_iter().flat_map(|kernel| LENGTHS.map(|n| (kernel, n)));
        for (kernel, n) in cases(&mut sample, lengths) {
            for (flush, squares) in
                [Flush::Begin, Flush::End].into_iter().flat_map(|f| [(f, true), (f, false)])
            {
                let [p, g, m, v, copy] = &mut memory;
                let grad = match g.floats(dtypes.grad, n, flush) {
                    FloatsMut::F32(s) => Floats::F32(s),
                    FloatsMut::F16(s) => Floats::F16(s),
                    FloatsMut::Bf16(s) => Floats::Bf16(s),
                };
                let states = States {
                    param: p.floats(dtypes.param, n, flush),
                    exp_avg: Some(m.floats(dtypes.state, n, flush)),
                    exp_avg_sq: Some(v.floats(dtypes.state, n, flush)),
                };
                let copy = dtypes.copy.map(|dtype| copy.floats(dtype, n, flush));
                let mut tensor = Tensor::new(states, grad, copy).unwrap();
                rule.step(kernel, tensor.reborrow(), squares).unwrap();
                let mut tensor = tensor.with_log(log.bytes(log_bytes(n), flush)).unwrap();
                rule.step(kernel, tensor.reborrow(), squares).unwrap();
                rule.undo(kernel, tensor.reborrow(), Some(1.0)).unwrap();
                tensor.set_total_elements(usize::MAX);
                rule.step(kernel, tensor.reborrow(), squares).unwrap();
                rule.undo(kernel, tensor, None).unwrap();
                assert!(grad_squares(kernel, grad, 1.0) > 0.0 || dtypes.grad == Dtype::F16);
            }
        }
    }
}

#[test]
fn no_kernel_touches_memory_outside_its_spans() {
    check(AdamRule {
        decay: WeightDecay::Decoupled,
        grad_scale: 1.0,
        beta1: 0.9,
        one_minus_beta1: 0.1,
        beta2: 0.99,
        one_minus_beta2: 0.01,
        inv_sqrt_correction2: 1.0,
        eps: 1e-8,
        step_size: -0.1,
        decay_factor: -0.01,
        stochastic: None,
    });
    check(AdagradRule { grad_scale: 1.0, step_size: -0.1, eps: 1e-8, weight_decay: 0.1 });
    check(LionRule {
        grad_scale: 1.0,
        lr: 0.1,
        beta1: 0.9,
        one_minus_beta1: 0.1,
        beta2: 0.99,
        one_minus_beta2: 0.01,
        decay_factor: -0.01,
    });
}
