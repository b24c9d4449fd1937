//! A discrete-event simulation of the devices.
//!
//! Each device has five engines, which serve one operation at a time: processors, copies to the device, copies from it,
//! sends, and a core of the CPU for optimizers that wait for each other. Asynchronous optimizers and validations need no
//! engine. An engine serves operations in the order in which they become ready. Of several that are ready, checkpoints
//! are sent last: nothing waits for them yet.
//!
//! Positions: every begin and every end gets the next number. They are the total order of the plan's invariants.
#![forbid(unsafe_code)]

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::super::events::{Successors, Time};
use super::graph::{Graph, Kind, Operation};
use super::memory::Change;
use super::{Shape, filled, reserve, reserved};
use crate::error::{Error, Result};

const ENGINES: usize = 5;

/// Operations with their times and positions, and the dependencies of each.
pub struct Simulated {
    pub operations: Vec<Operation>,
    pub dependencies: Vec<u32>,
}

/// Simulates all operations.
pub fn run(shape: &Shape, graph: Graph) -> Result<Simulated> {
    let count = graph.operations.len();
    let next = Successors::of(filled(0_u32, count + 1)?, filled(0_u32, graph.edges.len())?, &graph.edges);
    let mut run = Run {
        shape,
        missing: filled(0_u32, count)?,
        queues: (0..shape.devices as usize * ENGINES).map(|_| BinaryHeap::new()).collect(),
        busy: filled(false, shape.devices as usize * ENGINES)?,
        dirty: Vec::new(),
        active: BinaryHeap::new(),
        operations: graph.operations,
        receipts: filled(u32::MAX, count)?,
        now: 0.0,
        position: 0,
        ended: 0,
    };
    for (before, after) in &graph.edges {
        run.missing[*after as usize] += 1;
        if run.operations[*after as usize].kind.is_receive() {
            run.receipts[*before as usize] = *after;
        }
    }
    let ready: Vec<u32> = (0..count as u32).filter(|number| run.missing[*number as usize] == 0).collect();
    for number in ready {
        run.ready(number)?;
    }
    run.finish(&next)?;
    let (operations, dependencies) = with_dependencies(run.operations, &graph.edges)?;
    Ok(Simulated { operations, dependencies })
}

struct Run<'a> {
    shape: &'a Shape,
    operations: Vec<Operation>,
    /// The receipt of each send.
    receipts: Vec<u32>,
    /// Number of dependencies that have not ended.
    missing: Vec<u32>,
    queues: Vec<BinaryHeap<Reverse<(bool, u32)>>>,
    busy: Vec<bool>,
    /// Engines that may have become able to begin an operation.
    dirty: Vec<usize>,
    active: BinaryHeap<Reverse<(Time, u32)>>,
    now: f64,
    position: u32,
    ended: usize,
}

impl Run<'_> {
    /// The engine that serves an operation. `None`: it begins as soon as it is ready.
    fn engine(&self, number: u32) -> Option<usize> {
        let Operation { kind, device, .. } = self.operations[number as usize];
        let engine = match kind {
            Kind::Forward | Kind::Backward | Kind::Recompute => 0,
            Kind::Fetch => 1,
            Kind::Offload => 2,
            Kind::SendActivation | Kind::SendGradient | Kind::SendCheckpoint => 3,
            Kind::Optimize if !self.shape.async_optimizer => 4,
            _ => return None,
        };
        Some(device as usize * ENGINES + engine)
    }

    fn ready(&mut self, number: u32) -> Result<()> {
        match self.engine(number) {
            // A receipt begins and ends with its send.
            _ if self.operations[number as usize].kind.is_receive() => {}
            None => self.begin(number),
            Some(engine) => {
                let last = self.operations[number as usize].kind == Kind::SendCheckpoint;
                self.queues[engine].push(Reverse((last, number)));
                reserve(&mut self.dirty, 1)?;
                self.dirty.push(engine);
            }
        }
        Ok(())
    }

    fn next_position(&mut self) -> u32 {
        self.position += 1;
        self.position - 1
    }

    fn begin(&mut self, number: u32) {
        let receipt = self.receipts[number as usize];
        for number in [number, receipt].into_iter().filter(|number| *number != u32::MAX) {
            let position = self.next_position();
            let operation = &mut self.operations[number as usize];
            (operation.start, operation.begins) = (self.now, position);
        }
        let end = self.now + self.operations[number as usize].seconds;
        self.active.push(Reverse((Time(end), number)));
    }

    fn end(&mut self, number: u32, next: &Successors) -> Result<()> {
        let position = self.next_position();
        let operation = &mut self.operations[number as usize];
        (operation.end, operation.ends) = (self.now, position);
        self.ended += 1;
        if let Some(engine) = self.engine(number) {
            self.busy[engine] = false;
            reserve(&mut self.dirty, 1)?;
            self.dirty.push(engine);
        }
        let receipt = self.receipts[number as usize];
        if receipt != u32::MAX {
            self.end(receipt, next)?;
        }
        for after in next.after(number) {
            self.missing[*after as usize] -= 1;
            if self.missing[*after as usize] == 0 {
                self.ready(*after)?;
            }
        }
        Ok(())
    }

    fn finish(&mut self, next: &Successors) -> Result<()> {
        loop {
            self.dirty.sort_unstable();
            self.dirty.dedup();
            for engine in std::mem::take(&mut self.dirty) {
                if !self.busy[engine]
                    && let Some(Reverse((_, number))) = self.queues[engine].pop()
                {
                    self.busy[engine] = true;
                    self.begin(number);
                }
            }
            let Some(Reverse((time, number))) = self.active.pop() else { break };
            self.now = time.0;
            self.end(number, next)?;
            while let Some(Reverse((same, number))) = self.active.peek().copied()
                && same == time
            {
                self.active.pop();
                self.end(number, next)?;
            }
        }
        match self.ended == self.operations.len() {
            true => Ok(()),
            false => {
                let reason = format!(
                    "{} of {} operations wait for each other",
                    self.operations.len() - self.ended,
                    self.operations.len()
                );
                Err(Error::Internal(format!("a pipeline schedule has a deadlock: {reason}")))
            }
        }
    }
}

/// Gives each operation its range of a list of dependencies.
fn with_dependencies(
    mut operations: Vec<Operation>,
    edges: &[(u32, u32)],
) -> Result<(Vec<Operation>, Vec<u32>)> {
    let mut sorted: Vec<(u32, u32)> = reserved(edges.len())?;
    sorted.extend(edges.iter().map(|(before, after)| (*after, *before)));
    sorted.sort_unstable();
    sorted.dedup();
    let mut dependencies: Vec<u32> = reserved(sorted.len())?;
    for (after, before) in sorted {
        let operation = &mut operations[after as usize];
        if operation.dependencies == 0 {
            operation.first_dependency = dependencies.len() as u32;
        }
        operation.dependencies += 1;
        dependencies.push(before);
    }
    Ok((operations, dependencies))
}

impl Simulated {
    /// Sorts the operations by device and position, and renumbers them everywhere.
    pub fn sort_by_device(&mut self, changes: &mut [Change]) -> Result<()> {
        let count = self.operations.len();
        let mut order: Vec<u32> = reserved(count)?;
        order.extend(0..count as u32);
        order.sort_unstable_by_key(|number| {
            let operation = &self.operations[*number as usize];
            (operation.device, operation.begins)
        });
        let mut number = filled(0_u32, count)?;
        order.iter().enumerate().for_each(|(new, old)| number[*old as usize] = new as u32);
        let mut sorted: Vec<Operation> = reserved(count)?;
        sorted.extend(order.iter().map(|old| self.operations[*old as usize]));
        self.operations = sorted;
        self.dependencies.iter_mut().for_each(|before| *before = number[*before as usize]);
        changes.iter_mut().for_each(|change| change.operation = number[change.operation as usize]);
        Ok(())
    }
}
