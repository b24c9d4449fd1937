//! Operations and their dependencies, as a list that only grows.
#![forbid(unsafe_code)]

use super::reserve;
use crate::error::Result;

/// Kind of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// Forward pass of a stage.
    Forward = 0,
    /// Backward pass of a stage.
    Backward = 1,
    /// Computing the activations of a backward stage again, from its checkpoint.
    Recompute = 2,
    /// Transfer of parameters to the device (the paper's p).
    Fetch = 3,
    /// Transfer of accumulated gradients to host memory (g).
    Offload = 4,
    /// Optimizer step on the CPU (o).
    Optimize = 5,
    /// Sending the output of a forward stage to the device of the next stage.
    SendActivation = 6,
    /// Its receipt.
    ReceiveActivation = 7,
    /// Sending the gradient of a backward stage's input to the device of the stage before.
    SendGradient = 8,
    /// Its receipt.
    ReceiveGradient = 9,
    /// Sending the input of a unit to the device of its backward pass (c).
    SendCheckpoint = 10,
    /// Its receipt.
    ReceiveCheckpoint = 11,
    /// Agreement of all devices that all gradients are finite: before the optimizers, or after asynchronous ones.
    Validate = 12,
}

impl Kind {
    /// Number of kinds.
    pub const COUNT: usize = 13;

    /// True for a pass: work of the device's processors.
    pub fn is_compute(self) -> bool {
        matches!(self, Kind::Forward | Kind::Backward | Kind::Recompute)
    }

    /// True for a receipt, which begins and ends with its send.
    pub fn is_receive(self) -> bool {
        matches!(self, Kind::ReceiveActivation | Kind::ReceiveGradient | Kind::ReceiveCheckpoint)
    }
}

/// No micro-batch, or no peer.
pub const NONE: u32 = u32::MAX;

/// An operation of a device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Operation {
    /// Its kind.
    pub kind: Kind,
    /// The device.
    pub device: u32,
    /// The other device of a message, else [`NONE`].
    pub peer: u32,
    /// The micro-batch; [`NONE`] for parameters, accumulated gradients and optimizers.
    pub micro_batch: u32,
    /// First unit of the operation's stage. For a message, the first unit of the stage that receives.
    pub first_unit: u32,
    /// Number of units of that stage; 1 for a checkpoint.
    pub units: u32,
    /// Bytes of a transfer or message, else 0.
    pub bytes: u64,
    /// Duration in seconds.
    pub seconds: f64,
    /// Start, in seconds from the start of the iteration.
    pub start: f64,
    /// End.
    pub end: f64,
    /// Position of the start among the starts and ends of all operations.
    pub begins: u32,
    /// Position of the end.
    pub ends: u32,
    /// First dependency in the plan's list.
    pub first_dependency: u32,
    /// Number of dependencies.
    pub dependencies: u32,
}

/// Operations, and dependencies as pairs (before, after).
#[derive(Debug, Default)]
pub struct Graph {
    /// All operations; times are not yet known.
    pub operations: Vec<Operation>,
    /// Dependencies as pairs (before, after) of operation numbers.
    pub edges: Vec<(u32, u32)>,
}

impl Graph {
    /// Adds an operation that depends on those in `after`, and returns its number.
    pub fn add(&mut self, operation: Operation, after: &[u32]) -> Result<u32> {
        let number = self.operations.len() as u32;
        reserve(&mut self.operations, 1)?;
        self.operations.push(operation);
        for before in after {
            self.order(*before, number)?;
        }
        Ok(number)
    }

    /// Adds a send and its receipt, and returns the numbers of both.
    pub fn message(&mut self, send: Operation, receive: Kind, after: &[u32]) -> Result<(u32, u32)> {
        let receipt = Operation { kind: receive, device: send.peer, peer: send.device, seconds: 0.0, ..send };
        let send = self.add(send, after)?;
        Ok((send, self.add(receipt, &[send])?))
    }

    /// Makes `after` depend on `before`.
    pub fn order(&mut self, before: u32, after: u32) -> Result<()> {
        reserve(&mut self.edges, 1)?;
        self.edges.push((before, after));
        Ok(())
    }
}
