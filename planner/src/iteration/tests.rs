//! The model beside the rows of ffi_tests/bench/records/gpu_iteration.json, and the record of what it predicts.
#![forbid(unsafe_code)]

use std::path::Path;

use serde_json::Value;

use super::*;

/// The H100 with 16 cores of gpu_iteration.json and gpu_update.json. Its CPU steps 4.85 G parameters a second alone, at 28
/// bytes each. The interleaved update gave 186 GB/s to steps and copies together. torch's fused step of float32 states,
/// which is at the limit of device memory, gave 2.57 TB/s.
const MEASURED: Machine =
    Machine { out: 52e9, back: 53e9, memory: 186e9, cpu: 4.85e9 * 28.0, device: 2.57e12 };
/// Float32 master and moments read and written, a 16-bit gradient and weight, and 1.2 bytes of the log.
const OFFLOAD: Optimizer = Optimizer {
    gradient: 2.0,
    weight: 2.0,
    touched: 29.2,
    steps: Steps::Confirmed,
    returns: Returns::Stepped,
    verdict: 0.0,
};
const WIDTH: u64 = 1536;
const WORDS: u64 = 32768;
const BLOCKS: usize = 16;

/// The tensors of the measured GPT, in the order of its parameters: 553.8 M parameters in 132 tensors.
fn tensors() -> Vec<u64> {
    let square = WIDTH * WIDTH;
    let block = [WIDTH, WIDTH, WIDTH, WIDTH, 3 * square, square, 4 * square, 4 * square];
    let table = [WORDS * WIDTH];
    [&table[..], &block.repeat(BLOCKS), &[WIDTH, WIDTH], &table].concat()
}

/// Tensors in buckets of 64 MiB as `offload` has them, with the bytes that each should have: the first ones begin at a
/// sixteenth, each twice the one before. In the order of backward.
fn cut() -> Vec<(Vec<u64>, u64)> {
    const MOST: u64 = 64 << 20;
    let mut found = vec![(Vec::new(), MOST / 16)];
    for tensor in tensors() {
        let (members, most) = found.last_mut().unwrap();
        if 2 * members.iter().sum::<u64>() >= *most {
            let next = MOST.min(2 * *most);
            found.push((vec![tensor], next));
        } else {
            members.push(tensor);
        }
    }
    found.iter_mut().for_each(|(members, _)| members.reverse());
    found.reverse();
    found
}

/// The parameters of each part of these buckets. A tensor of more bytes than its bucket should have is divided, and a
/// bucket that has one by halves.
fn divided() -> Vec<Vec<u64>> {
    fn parts(tensors: &[u64], most: u64) -> Vec<u64> {
        if tensors.iter().all(|tensor| 2 * tensor <= most) {
            return vec![tensors.iter().sum()];
        }
        if let [tensor] = tensors {
            let piece = 1_u64 << (most / 2).ilog2();
            return (0..*tensor).step_by(piece as usize).map(|start| piece.min(tensor - start)).collect();
        }
        let (left, right) = tensors.split_at(tensors.len() / 2);
        [parts(left, most), parts(right, most)].concat()
    }
    cut().iter().map(|(members, most)| parts(members, *most)).collect()
}

/// As the measured code had them: one part each.
fn undivided() -> Vec<Vec<u64>> {
    cut().iter().map(|(members, _)| vec![members.iter().sum()]).collect()
}

/// Backward takes time in proportion to parameters. Only the embedding, the last, takes none: it has no matrix product.
/// Parts of a bucket are complete at once. The last `tail` buckets stay.
fn backward(buckets: &[Vec<u64>], seconds: f64, tail: usize) -> Vec<Bucket> {
    let size = |bucket: &Vec<u64>| bucket.iter().sum::<u64>();
    let (last, products) = buckets.split_last().unwrap();
    assert_eq!(size(last), WORDS * WIDTH);
    let total: u64 = products.iter().map(size).sum();
    let mut found = Vec::new();
    for (place, bucket) in buckets.iter().enumerate() {
        let takes = if place < products.len() { size(bucket) as f64 / total as f64 } else { 0.0 };
        for (number, parameters) in bucket.iter().enumerate() {
            let backward = if number == 0 { seconds * takes } else { 0.0 };
            found.push(Bucket { parameters: *parameters, backward, stays: place + tail >= buckets.len() });
        }
    }
    found
}

/// A batch: the milliseconds of the floor, and of its backward.
#[derive(Clone, Copy)]
struct Batch {
    size: u64,
    floor: f64,
    backward: f64,
}

/// The floor's own step moves 14 bytes of device memory per parameter.
const FLOOR_STEP_BYTES: f64 = 14.0;
const BATCHES: [Batch; 2] =
    [Batch { size: 16, floor: 116.9, backward: 75.0 }, Batch { size: 32, floor: 224.8, backward: 150.0 }];
/// In the trace of batch 16, 132 waits for the device lengthen backward from 75 to 120 ms.
const WAITS: f64 = 45.0;
/// In that trace, 23.5 ms are between the last gradient and the first weight; 10.8 of them are the step of the last bucket.
const COMPARISONS: f64 = 12.7e-3;

/// Seconds of the forward of the floor.
fn forward(batch: Batch) -> f64 {
    let parameters: u64 = tensors().iter().sum();
    let step = parameters as f64 * FLOOR_STEP_BYTES / MEASURED.device;
    (batch.floor - batch.backward) / 1e3 - step
}

/// Milliseconds of an iteration, and those that the floor's forward and backward do not hide.
fn model(
    batch: Batch,
    waits: f64,
    buckets: &[Vec<u64>],
    machine: &Machine,
    optimizer: &Optimizer,
) -> (f64, f64) {
    let buckets = backward(buckets, (batch.backward + waits) / 1e3, 0);
    let found = predict(machine, forward(batch), &buckets, optimizer).unwrap();
    (1e3 * found.seconds, 1e3 * found.exposed + waits)
}

/// With a tail of this number of buckets.
fn with_tail(batch: Batch, tail: usize) -> (f64, f64) {
    let buckets = backward(&divided(), batch.backward / 1e3, tail);
    let found = predict(&MEASURED, forward(batch), &buckets, &OFFLOAD).unwrap();
    (1e3 * found.seconds, 1e3 * found.exposed)
}

/// The tail of `tail="auto"`, if it tries all: the shortest whose exposed time is at most a twentieth of backward above the
/// least.
fn auto(batch: Batch) -> usize {
    let exposed: Vec<f64> = (0..=cut().len()).map(|tail| with_tail(batch, tail).1).collect();
    let least = exposed.iter().copied().fold(f64::INFINITY, f64::min);
    exposed.iter().position(|exposed| *exposed <= least + 0.05 * batch.backward.max(least)).unwrap()
}

/// torchao steps each tensor with torch's fused step, which had 1/1.17 of our rate. 16-bit weight and moments read and
/// written, and a 16-bit gradient. Its only stream brings weights after the last gradient.
fn torchao(batch: Batch) -> (f64, f64) {
    let machine = Machine { cpu: MEASURED.cpu / 1.17, ..MEASURED };
    let own = Optimizer { touched: 14.0, steps: Steps::Final, returns: Returns::AfterGradients, ..OFFLOAD };
    let alone: Vec<Vec<u64>> = tensors().into_iter().rev().map(|tensor| vec![tensor]).collect();
    model(batch, 0.0, &alone, &machine, &own)
}

fn offload(batch: Batch, optimizer: Optimizer) -> (f64, f64) {
    model(batch, 0.0, &divided(), &MEASURED, &optimizer)
}

/// With one wait for each parameter in backward, and all weights after the verdict.
fn waiting(batch: Batch) -> (f64, f64) {
    let own = Optimizer { returns: Returns::AfterVerdict, verdict: COMPARISONS, ..OFFLOAD };
    model(batch, WAITS, &undivided(), &MEASURED, &own)
}

/// A step that waits for the norm has no log.
fn after_norm(steps: Steps) -> Optimizer {
    Optimizer { touched: 28.0, steps, ..OFFLOAD }
}

fn record(name: &str) -> Value {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../ffi_tests/bench/records");
    serde_json::from_str(&std::fs::read_to_string(folder.join(name)).unwrap()).unwrap()
}

/// The measured milliseconds of an optimizer.
fn measured(optimizer: &str, batch: Batch, clipped: &str) -> f64 {
    let record = record("gpu_iteration.json");
    let is_it = |row: &&Value| {
        let case = &row["case"];
        (case["model"].as_str(), case["optimizer"].as_str()) == (Some("554 M"), Some(optimizer))
            && (case["batch"].as_u64(), case["clipped"].as_str()) == (Some(batch.size), Some(clipped))
    };
    record["rows"].as_array().unwrap().iter().find(is_it).unwrap()["figures"]["ms"]["median"]
        .as_f64()
        .unwrap()
}

const FLOOR: &str = "torch fused, everything on the GPU, bf16 states";
const TORCHAO: &str = "torchao CPUOffloadOptimizer, bf16 states";

#[test]
fn the_last_bucket_is_the_embedding_alone_and_the_others_cover_the_rest() {
    let sizes = undivided().concat();
    assert_eq!((tensors().len(), tensors().iter().sum::<u64>()), (132, sizes.iter().sum()));
    assert_eq!(sizes.last(), Some(&(WORDS * WIDTH)));
    assert!(sizes.iter().all(|size| *size > 0));
}

#[test]
fn parts_have_the_parameters_of_their_buckets_and_the_embedding_has_24() {
    let sums: Vec<u64> = divided().iter().map(|parts| parts.iter().sum()).collect();
    assert_eq!(sums, undivided().concat());
    assert_eq!(divided().last(), Some(&vec![2 << 20; 24]));
}

/// A row of the record.
struct Row {
    optimizer: &'static str,
    clipped: &'static str,
    ms: f64,
    exposed: f64,
    measured: Option<f64>,
}

/// The rows of a batch.
fn rows(batch: Batch) -> Vec<Row> {
    let row = |optimizer, clipped, (ms, exposed), measured| Row { optimizer, clipped, ms, exposed, measured };
    let took = |optimizer, clipped| Some(measured(optimizer, batch, clipped));
    let repeated = Optimizer { steps: Steps::Repeated, ..OFFLOAD };
    let mut found = vec![
        row(TORCHAO, "none", torchao(batch), took(TORCHAO, "none")),
        row("offload, as measured", "none", waiting(batch), took("spillway offload", "none")),
    ];
    if batch.size == 16 {
        let took = took("spillway offload, overlap=False", "every step");
        let late = model(batch, 0.0, &undivided(), &MEASURED, &after_norm(Steps::AfterBackward));
        found.push(row("offload, overlap=False", "every step", late, took));
    }
    found.extend([
        row("offload", "none", offload(batch, OFFLOAD), None),
        row("offload, tail=1", "none", with_tail(batch, 1), None),
        row("offload, tail=\"auto\"", "none", with_tail(batch, auto(batch)), None),
        row("offload", "one step", offload(batch, repeated), None),
        row("offload", "every step", offload(batch, after_norm(Steps::AfterNorm)), None),
    ]);
    found
}

#[test]
fn measured_rows_are_reproduced_within_15_percent() {
    for batch in BATCHES {
        assert_eq!(batch.floor, measured(FLOOR, batch, "none"));
        let measured: Vec<(f64, f64)> =
            rows(batch).iter().filter_map(|row| row.measured.map(|took| (row.ms, took))).collect();
        assert_eq!(measured.len(), if batch.size == 16 { 3 } else { 2 });
        for (ms, took) in measured {
            assert!((ms / took - 1.0).abs() < 0.15, "batch {}: {ms} is not {took}", batch.size);
        }
    }
}

#[test]
fn the_record_has_the_figures_of_the_model() {
    let record = record("gpu_iteration_model.json");
    let recorded = record["rows"].as_array().unwrap();
    let found: Vec<(Batch, Row)> =
        BATCHES.into_iter().flat_map(|batch| rows(batch).into_iter().map(move |row| (batch, row))).collect();
    assert_eq!(recorded.len(), found.len());
    for (recorded, (batch, row)) in recorded.iter().zip(found) {
        let case = &recorded["case"];
        assert_eq!(
            (case["optimizer"].as_str(), case["batch"].as_u64(), case["clipped"].as_str()),
            (Some(row.optimizer), Some(batch.size), Some(row.clipped))
        );
        let figure = |name: &str| recorded["figures"][name].as_f64();
        let near = |name: &str, wanted: f64, most: f64| {
            assert!(
                figure(name).is_some_and(|seen| (seen - wanted).abs() < most),
                "{recorded}: {name} {wanted}"
            );
        };
        near("model_ms", row.ms, 0.06);
        near("exposed_ms", row.exposed, 0.06);
        near("to_floor", row.ms / batch.floor, 0.0006);
        assert_eq!(figure("measured_ms"), row.measured);
        match row.measured {
            Some(took) => near("to_measured", row.ms / took, 0.0006),
            None => assert_eq!(figure("to_measured"), None),
        }
    }
}

#[test]
fn times_of_a_bucket_add_up_and_scarce_memory_slows_steps_beside_copies() {
    let machine = Machine { out: 2.0, back: 4.0, memory: f64::INFINITY, cpu: 1.0, device: 8.0 };
    let own = Optimizer { gradient: 2.0, weight: 4.0, touched: 3.0, verdict: 5.0, ..OFFLOAD };
    let one = [Bucket { parameters: 1, backward: 1.0, stays: false }];
    let seconds = |own, buckets: &[Bucket]| predict(&machine, 1.0, buckets, &own).unwrap().seconds;
    // Forward, backward, gradient, step, verdict beside weights, and the copy on the device.
    assert_eq!(seconds(own, &one), 1.0 + 1.0 + 1.0 + 3.0 + 5.0 + 1.0);
    let with = |steps, returns| seconds(Optimizer { steps, returns, ..own }, &one);
    assert_eq!(with(Steps::Confirmed, Returns::AfterVerdict), 12.0);
    assert_eq!(with(Steps::Repeated, Returns::Stepped), 3.0 + 3.0 + 5.0 + 3.0 + 1.0);
    // The link still brings the weights of the first step.
    let slow = Machine { back: 0.4, ..machine };
    let repeated = Optimizer { steps: Steps::Repeated, ..own };
    assert_eq!(predict(&slow, 1.0, &one, &repeated).unwrap().seconds, 6.0 + 10.0 + 10.0);
    assert_eq!(with(Steps::AfterNorm, Returns::AfterVerdict), 3.0 + 2.0 + 5.0 + 3.0 + 1.0);
    // The second piece of a tensor leaves while the first one is stepped, and returns when that has returned.
    let pieces = [one[0], Bucket { backward: 0.0, ..one[0] }];
    let still = Optimizer { verdict: 0.0, ..own };
    assert_eq!(seconds(still, &[Bucket { parameters: 2, ..one[0] }]), 2.0 + 2.0 + 6.0 + 2.0 + 2.0);
    assert_eq!(seconds(still, &pieces), 2.0 + 1.0 + 6.0 + 1.0 + 2.0);
    let kept = Bucket { stays: true, ..one[0] };
    assert_eq!(seconds(own, &[kept]), 1.0 + 1.0 + 5.0 + 0.375);
    assert_eq!(seconds(own, &[one[0], kept]), 3.0 + 3.0 + 5.0 + 0.375 + 1.0);
    let two = [one[0]; 2];
    let late = |steps| seconds(Optimizer { steps, touched: 0.0, verdict: 0.0, ..own }, &two);
    assert_eq!((late(Steps::AfterNorm), late(Steps::AfterBackward)), (9.0, 10.0));
    let early =
        Optimizer { steps: Steps::Final, gradient: 2.0, weight: 0.0, touched: 1.0, verdict: 0.0, ..own };
    let shared = |memory| predict(&Machine { memory, ..machine }, 0.0, &two, &early).unwrap();
    assert_eq!(shared(f64::INFINITY), Predicted { seconds: 4.0, exposed: 2.0 });
    // The second gradient and the first step want 3 bytes a second together, and have 2.
    assert_eq!(shared(2.0), Predicted { seconds: 4.5, exposed: 2.5 });
}

#[test]
fn what_is_out_of_range_is_named() {
    let refused = |machine: Machine, forward, own: Optimizer, backward| {
        let buckets = [0.0, backward].map(|backward| Bucket { parameters: 1, backward, stays: false });
        predict(&machine, forward, &buckets, &own).unwrap_err().to_string()
    };
    let starts = |text: String, name: &str| assert!(text.starts_with(name), "{text}");
    starts(refused(Machine { memory: 0.0, ..MEASURED }, 0.0, OFFLOAD, 0.0), "machine.memory");
    starts(refused(MEASURED, f64::NAN, OFFLOAD, 0.0), "forward");
    starts(refused(MEASURED, 0.0, Optimizer { touched: -1.0, ..OFFLOAD }, 0.0), "optimizer.touched");
    starts(refused(MEASURED, 0.0, OFFLOAD, -1.0), "buckets[1].backward");
    assert_eq!(predict(&MEASURED, 0.0, &[], &OFFLOAD).unwrap(), Predicted { seconds: 0.0, exposed: 0.0 });
}
