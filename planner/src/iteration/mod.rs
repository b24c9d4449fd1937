//! The seconds of an iteration whose optimizer steps on the CPU: forward, backward, copies of gradients and weights, steps.
//!
//! Buckets are in the order in which backward completes their gradients. Steps and copies share the bandwidth of host
//! memory by the rule of [`Timeline`]. The next forward waits for all weights. A copy or a step has no time of its own
//! beside its bytes.
#![forbid(unsafe_code)]

use super::check;
use super::interleave::timeline::{Engine, Limits, Timeline};
use crate::error::{Error, Result};

/// Rates of a GPU, its link and its host, in bytes per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Machine {
    /// From the device to the host.
    pub out: f64,
    /// From the host to the device.
    pub back: f64,
    /// Host memory, shared by steps and copies; infinite if it is never the limit.
    pub memory: f64,
    /// Bytes of host memory that a step moves, alone.
    pub cpu: f64,
    /// Device memory: steps of buckets that stay there, and copies of weights that are there already.
    pub device: f64,
}

/// Parameters that are copied and stepped together. Parts of a bucket whose gradients arrive at once, such as the pieces of
/// a divided tensor, are buckets of which only the first one takes time in backward.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bucket {
    /// Number of parameters.
    pub parameters: u64,
    /// Seconds of backward from the end of the bucket before to the end of this one.
    pub backward: f64,
    /// Its states stay on the device, which steps it after the verdict: the tail of `offload`.
    pub stays: bool,
}

/// When buckets are stepped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Steps {
    /// When their gradients are on the host. The steps are final.
    Final,
    /// When their gradients are on the host. The norm confirms the steps.
    Confirmed,
    /// When their gradients are on the host. The norm is above its limit: all are rolled back and repeated, in one pass.
    Repeated,
    /// After the norm. Gradients are copied and measured during backward.
    AfterNorm,
    /// After the norm. Gradients are copied and measured after backward.
    AfterBackward,
}

/// When the weights of a bucket return.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Returns {
    /// After its step, to second copies on the device. Those of a step that is repeated return once more.
    Stepped,
    /// After its step, and after the last gradient has left the device.
    AfterGradients,
    /// After the verdict, and after the step that is final.
    AfterVerdict,
}

/// An optimizer with its states in host memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Optimizer {
    /// Bytes of a gradient on the link.
    pub gradient: f64,
    /// Bytes of a weight on the link.
    pub weight: f64,
    /// Bytes of memory that a step moves per parameter, with its log if it has one.
    pub touched: f64,
    /// When buckets are stepped.
    pub steps: Steps,
    /// When weights return.
    pub returns: Returns,
    /// Seconds of the program from the last step, or the norm, to the verdict.
    pub verdict: f64,
}

/// The predicted times of an iteration, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Predicted {
    /// From the begin of forward until the next forward can begin.
    pub seconds: f64,
    /// What neither forward nor backward hides.
    pub exposed: f64,
}

/// Predicts an iteration with `forward` seconds before the backward of `buckets`. Fails for a rate that is not positive,
/// or a time or a number of bytes that is negative or infinite.
pub fn predict(
    machine: &Machine,
    forward: f64,
    buckets: &[Bucket],
    optimizer: &Optimizer,
) -> Result<Predicted> {
    machine.check()?;
    optimizer.check()?;
    check::not_negative("forward", forward)?;
    for (place, bucket) in buckets.iter().enumerate() {
        check::not_negative("backward", bucket.backward)
            .map_err(|refused: Error| refused.within(&format!("buckets[{place}].")))?;
    }
    let mut work = Work { machine, optimizer, timeline: Timeline::default() };
    let (pass, out) = work.gradients(forward, buckets);
    let (stay, leave): (Vec<Bucket>, Vec<Bucket>) = buckets.iter().partition(|bucket| bucket.stays);
    let verdict = work.step(pass, &leave, &out);
    for bucket in &stay {
        let bytes = bucket.parameters as f64 * optimizer.touched;
        work.timeline.add(Engine::Gpu, bytes / machine.device, 0.0, &[verdict]);
    }
    let ran = work.timeline.run(Limits { dram: machine.memory, duplex: true });
    let seconds = ran.iter().map(|ran| ran.end).fold(0.0, f64::max);
    let passes = forward + buckets.iter().map(|bucket| bucket.backward).sum::<f64>();
    Ok(Predicted { seconds, exposed: (seconds - passes).max(0.0) })
}

impl Machine {
    fn check(&self) -> Result<()> {
        check::positive("machine.out", self.out)?;
        check::positive("machine.back", self.back)?;
        check::positive_or_infinite("machine.memory", self.memory)?;
        check::positive("machine.cpu", self.cpu)?;
        check::positive("machine.device", self.device)
    }
}

impl Optimizer {
    fn check(&self) -> Result<()> {
        check::not_negative("optimizer.gradient", self.gradient)?;
        check::not_negative("optimizer.weight", self.weight)?;
        check::not_negative("optimizer.touched", self.touched)?;
        check::not_negative("optimizer.verdict", self.verdict)
    }
}

struct Work<'a> {
    machine: &'a Machine,
    optimizer: &'a Optimizer,
    timeline: Timeline,
}

impl Work<'_> {
    /// Forward and backward, of which the end is returned, and the copies of the gradients of each bucket that leaves.
    fn gradients(&mut self, forward: f64, buckets: &[Bucket]) -> (u32, Vec<u32>) {
        let mut pass = self.timeline.add(Engine::Clock, forward, 0.0, &[]);
        let mut complete = Vec::new();
        for bucket in buckets {
            pass = self.timeline.add(Engine::Clock, bucket.backward, 0.0, &[pass]);
            complete.push((bucket, pass));
        }
        let late = self.optimizer.steps == Steps::AfterBackward;
        complete.retain(|(bucket, _)| !bucket.stays);
        let copy = |(bucket, complete): (&Bucket, u32)| {
            let bytes = bucket.parameters as f64 * self.optimizer.gradient;
            let after = if late { pass } else { complete };
            self.timeline.add(Engine::D2h, bytes / self.machine.out, bytes, &[after])
        };
        (pass, complete.into_iter().map(copy).collect())
    }

    /// Steps and weights of buckets whose gradients are on the host after `out`, and the verdict, which is returned. Backward
    /// ends with `pass`.
    fn step(&mut self, pass: u32, buckets: &[Bucket], out: &[u32]) -> u32 {
        let Optimizer { gradient, weight, touched, steps, returns, .. } = *self.optimizer;
        let waits = matches!(steps, Steps::AfterNorm | Steps::AfterBackward);
        // The first pass over a bucket measures its gradients, and steps it unless that waits for the norm.
        let first = if waits { gradient } else { touched };
        let passed: Vec<u32> =
            buckets.iter().zip(out).map(|(bucket, out)| self.pass(bucket, first, &[*out])).collect();
        let measured = [&passed[..], &[pass]].concat();
        let verdict = self.timeline.add(Engine::Host, self.optimizer.verdict, 0.0, &measured);
        if steps == Steps::Repeated && returns == Returns::Stepped {
            for (bucket, passed) in buckets.iter().zip(&passed) {
                self.weights(bucket, &[*passed]);
            }
        }
        let again = waits || steps == Steps::Repeated;
        let last: Vec<u32> = match again {
            true => buckets.iter().map(|bucket| self.pass(bucket, touched, &[verdict])).collect(),
            false => passed,
        };
        let mut home = vec![verdict];
        for (bucket, last) in buckets.iter().zip(last) {
            let after = match returns {
                Returns::Stepped => vec![last],
                Returns::AfterGradients => [&[last], out].concat(),
                Returns::AfterVerdict => vec![last, verdict],
            };
            home.push(self.weights(bucket, &after));
        }
        // Weights of steps that were not final went to second copies, which are read and written on the device.
        if steps == Steps::Confirmed && returns == Returns::Stepped {
            let bytes = 2.0 * weight * buckets.iter().map(|bucket| bucket.parameters as f64).sum::<f64>();
            self.timeline.add(Engine::Gpu, bytes / self.machine.device, 0.0, &home);
        }
        verdict
    }

    /// The copy of the weights of a bucket to the device.
    fn weights(&mut self, bucket: &Bucket, after: &[u32]) -> u32 {
        let bytes = bucket.parameters as f64 * self.optimizer.weight;
        self.timeline.add(Engine::H2d, bytes / self.machine.back, bytes, after)
    }

    /// A pass of the CPU over a bucket.
    fn pass(&mut self, bucket: &Bucket, bytes: f64, after: &[u32]) -> u32 {
        let bytes = bucket.parameters as f64 * bytes;
        self.timeline.add(Engine::Cpu, bytes / self.machine.cpu, bytes, after)
    }
}

#[cfg(test)]
mod tests;
