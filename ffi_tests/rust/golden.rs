//! Proves that the Rust functions give the bits of kernels/*.json, which kernels/golden.py computed on rational numbers.
//! (ffi_tests/c/golden.c reads the same files through the C functions.)

use serde_json::Value;
use spillway::dtype::{Dtype, Floats, FloatsMut, bf16, f16};
use spillway::error::Result;
use spillway::kernel::{States, Tensor};
use spillway::optim;
use spillway::optim::StepStats;
use spillway::optim::adam::AdamOptions;
use spillway::optim::optimizers::{AdagradOptions, LionOptions, SignumOptions};
use spillway::optim::parallel::Job;

/// One span as bits, and as elements of its type.
enum Span {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
}

impl Span {
    fn read(text: &Value, dtype: &Value) -> Option<Span> {
        let text = text.as_str().expect("bits are text");
        if text.is_empty() {
            return None;
        }
        Some(match dtype.as_str().expect("a type is text") {
            "f32" => Span::F32(digits(text, 8).map(|bits| f32::from_bits(bits as u32)).collect()),
            "f16" => Span::F16(digits(text, 4).map(|bits| f16::from_bits(bits as u16)).collect()),
            "bf16" => Span::Bf16(digits(text, 4).map(|bits| bf16::from_bits(bits as u16)).collect()),
            other => panic!("{other} is not a type"),
        })
    }

    fn zeros(dtype: Dtype, n: usize) -> Span {
        match dtype {
            Dtype::F32 => Span::F32(vec![0.0; n]),
            Dtype::F16 => Span::F16(vec![f16::ZERO; n]),
            Dtype::Bf16 => Span::Bf16(vec![bf16::ZERO; n]),
        }
    }

    fn dtype(&self) -> Dtype {
        match self {
            Span::F32(_) => Dtype::F32,
            Span::F16(_) => Dtype::F16,
            Span::Bf16(_) => Dtype::Bf16,
        }
    }

    fn shared(&self) -> Floats<'_> {
        match self {
            Span::F32(values) => Floats::F32(values),
            Span::F16(values) => Floats::F16(values),
            Span::Bf16(values) => Floats::Bf16(values),
        }
    }

    fn exclusive(&mut self) -> FloatsMut<'_> {
        match self {
            Span::F32(values) => FloatsMut::F32(values),
            Span::F16(values) => FloatsMut::F16(values),
            Span::Bf16(values) => FloatsMut::Bf16(values),
        }
    }

    /// Bits, every NaN of f32 as one.
    fn bits(&self) -> Vec<u32> {
        match self {
            Span::F32(values) => {
                values.iter().map(|x| if x.is_nan() { 0x7fc0_0000 } else { x.to_bits() }).collect()
            }
            Span::F16(values) => values.iter().map(|x| x.to_bits().into()).collect(),
            Span::Bf16(values) => values.iter().map(|x| x.to_bits().into()).collect(),
        }
    }
}

fn digits(text: &str, width: usize) -> impl Iterator<Item = u64> {
    assert!(text.len().is_multiple_of(width), "{} digits", text.len());
    (0..text.len())
        .step_by(width)
        .map(move |at| u64::from_str_radix(&text[at..at + width], 16).expect("bits are hexadecimal"))
}

/// Steps once, with the options of the case.
fn step(
    optimizer: &str,
    options: &Value,
    step: u64,
    spans: &mut [Option<Span>; 4],
    grad: &Span,
) -> Result<StepStats> {
    let [param, exp_avg, exp_avg_sq, copy] = spans;
    let states = States {
        param: param.as_mut().expect("every case has a parameter").exclusive(),
        exp_avg: exp_avg.as_mut().map(Span::exclusive),
        exp_avg_sq: exp_avg_sq.as_mut().map(Span::exclusive),
    };
    let tensor = Tensor::new(states, grad.shared(), copy.as_mut().map(Span::exclusive))?;
    let real = |name: &str| options[name].as_f64().unwrap_or_else(|| panic!("options have {name}"));
    let (lr, weight_decay, grad_scale) = (real("lr"), real("weight_decay"), real("grad_scale"));
    match optimizer {
        "adam" => {
            let (beta1, beta2, eps) = (real("beta1"), real("beta2"), real("eps"));
            let decoupled = real("weight_decay_mode") == 0.0;
            let bias_correction = real("no_bias_correction") == 0.0;
            let options = AdamOptions {
                decoupled,
                step,
                lr,
                beta1,
                beta2,
                eps,
                weight_decay,
                grad_scale,
                bias_correction,
                stochastic_seed: None,
            };
            optim::step(&mut [Job { optimizer: options.rule()?, tensor }], true)
        }
        "adagrad" => {
            let (lr_decay, eps) = (real("lr_decay"), real("eps"));
            let options = AdagradOptions { step, lr, lr_decay, eps, weight_decay, grad_scale };
            optim::step(&mut [Job { optimizer: options.rule()?, tensor }], true)
        }
        "lion" => {
            let options =
                LionOptions { lr, beta1: real("beta1"), beta2: real("beta2"), weight_decay, grad_scale };
            optim::step(&mut [Job { optimizer: options.rule()?, tensor }], true)
        }
        "signum" => {
            let options = SignumOptions { lr, momentum: real("momentum"), weight_decay, grad_scale };
            optim::step(&mut [Job { optimizer: options.rule()?, tensor }], true)
        }
        other => panic!("{other} is not an optimizer"),
    }
}

fn check_case(optimizer: &str, case: &Value) {
    let name = &case["name"];
    let n = case["n"].as_u64().expect("n is a number") as usize;
    let param = Span::read(&case["param0"], &case["param"]);
    let copy = match case["copy"].as_str() {
        Some("f16") => Some(Span::zeros(Dtype::F16, n)),
        Some("bf16") => Some(Span::zeros(Dtype::Bf16, n)),
        _ => None,
    };
    let exp_avg = Span::read(&case["exp_avg"], &case["state"]);
    let exp_avg_sq = Span::read(&case["exp_avg_sq"], &case["state"]);
    let mut spans = [param, exp_avg, exp_avg_sq, copy];
    assert!(spans.iter().flatten().all(|span| span.bits().len() == n), "{optimizer} {name}: n is {n}");
    let first = case["options"]["step"].as_u64().unwrap_or(1);
    for (index, expected) in case["steps"].as_array().expect("steps are a list").iter().enumerate() {
        let grad = Span::read(&expected["grad"], &case["grad"]).expect("a step has a gradient");
        let stats = step(optimizer, &case["options"], first + index as u64, &mut spans, &grad);
        let stats = stats.unwrap_or_else(|error| panic!("{optimizer} {name}: {error}"));
        for (span, field) in spans.iter().zip(["param", "exp_avg", "exp_avg_sq", "param_copy"]) {
            let dtype = match span {
                Some(span) => Value::from(span.dtype().name()),
                None => Value::Null,
            };
            let wanted = Span::read(&expected[field], &dtype);
            let (got, wanted) = (span.as_ref().map(Span::bits), wanted.as_ref().map(Span::bits));
            assert!(got == wanted, "{optimizer} {name}, step {index}, {field}:\n{got:x?}\n{wanted:x?}");
        }
        let sum = digits(expected["sum_squares"].as_str().expect("bits"), 16).next().map(f64::from_bits);
        let sum = sum.expect("a sum");
        assert_eq!(stats.nonfinite, expected["nonfinite"] == 1, "{optimizer} {name}, step {index}");
        let same = stats.sum_squares.to_bits() == sum.to_bits() || stats.sum_squares.is_nan() && sum.is_nan();
        assert!(same, "{optimizer} {name}, step {index}: {} is not {sum}", stats.sum_squares);
    }
}

fn check_file(text: &str, at_least: usize) {
    let file: Value = serde_json::from_str(text).expect("kernels/*.json are JSON");
    let optimizer = file["optimizer"].as_str().expect("a file names its optimizer");
    let cases = file["cases"].as_array().expect("cases are a list");
    assert!(cases.len() >= at_least, "{optimizer} has {} cases", cases.len());
    cases.iter().for_each(|case| check_case(optimizer, case));
}

#[test]
fn adam_has_the_golden_bits() {
    check_file(include_str!("../../kernels/adam.json"), 20);
}

#[test]
fn adagrad_has_the_golden_bits() {
    check_file(include_str!("../../kernels/adagrad.json"), 20);
}

#[test]
fn lion_has_the_golden_bits() {
    check_file(include_str!("../../kernels/lion.json"), 20);
}

#[test]
fn signum_has_the_golden_bits() {
    check_file(include_str!("../../kernels/signum.json"), 20);
}

#[test]
fn the_files_are_what_their_generator_writes() {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/golden.py");
    let output = std::process::Command::new("python3").args([script, "--check"]).output();
    let output = output.expect("python3 is missing: run packaging/system_packages.sh");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
