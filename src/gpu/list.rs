//! The tensors of one call as the kernels read them.
//!
//! - Tensors of one kernel are adjacent, and one launch steps them all. A tensor is a row of a table in device memory;
//!   a single tensor is a parameter of the launch instead, and needs no table.
//! - The tiles of all rows have one numbering, and each warp steps one tile. The sum of squares of a tile is stored at
//!   its number.
//! - A second launch adds the sums of each segment, which is up to [`SEGMENT`] tiles of one tensor. The host adds the
//!   segments of each tensor and then the tensors, by the functions that do it for a step on the processor.

use std::collections::HashMap;

use super::kernels::{Batch, DeviceTensor, Fold, KernelName, Kernels, Row, Rule, SEGMENT, SHARE};
use super::module::Function;
use super::stream::Stream;
use super::sums::{Count, Sums};
use crate::dtype::Dtype;
use crate::error::Result;
use crate::kernel::{AdamRule, squares};
use crate::optim::parallel;
use crate::sys::try_vec;

/// One tensor and the coefficients of its step.
#[derive(Debug, Clone, Copy)]
pub struct Job {
    /// Coefficients.
    pub rule: AdamRule,
    /// The tensor's arrays.
    pub tensor: DeviceTensor,
}

/// The parts of a step that a call runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StepPass {
    Step,
    Squares,
    Both,
}

/// The tensors of one call.
#[derive(Debug)]
pub(super) struct List {
    groups: Vec<Group>,
    rows: Vec<Row>,
    /// Different coefficients, by the number in the rows.
    rules: Vec<Rule>,
    tiles: u64,
    /// First tile and number of tiles of each segment, in the order of the caller's tensors.
    segments: Vec<[u64; 2]>,
    /// Number of segments of each of the caller's tensors.
    counts: Vec<usize>,
}

/// Adjacent rows of one kernel, and their tiles.
#[derive(Debug, Clone, Copy)]
struct Group {
    step: Function,
    squares: Function,
    begin: u64,
    end: u64,
}

impl Group {
    fn function(&self, part: StepPass) -> Function {
        if part == StepPass::Squares { self.squares } else { self.step }
    }
}

impl List {
    /// Lists the tensors of `jobs`. Errors: arrays that do not belong together, and types without a kernel.
    pub(super) fn new(kernels: &Kernels, jobs: &[Job]) -> Result<List> {
        let kinds = Kinds::of(jobs)?;
        let mut list = List {
            groups: Vec::new(),
            rows: try_vec::with_capacity("listing tensors", jobs.len())?,
            rules: Vec::new(),
            tiles: 0,
            segments: Vec::new(),
            counts: try_vec::with_capacity("listing tensors", jobs.len())?,
        };
        let mut firsts = try_vec::from_fn("listing tensors", jobs.len(), |_| 0)?;
        let mut numbers = HashMap::new();
        for (kind, (kernel, grad)) in kinds.kernels.into_iter().enumerate() {
            let begin = list.tiles;
            for (index, job) in jobs.iter().enumerate() {
                if kinds.of_job[index] != kind || job.tensor.grad.is_empty() {
                    continue;
                }
                let rule = number_of(&mut list.rules, &mut numbers, Rule::from(&job.rule));
                let row = Row::new(&job.tensor, list.tiles, rule);
                firsts[index] = list.tiles;
                list.tiles += row.tiles();
                list.rows.push(row);
            }
            list.groups.push(Group {
                step: kernels.function(kernel)?,
                squares: kernels.function(KernelName::squares(grad))?,
                begin,
                end: list.tiles,
            });
        }
        for (job, first) in jobs.iter().zip(firsts) {
            let tiles = job.tensor.grad.len().div_ceil(squares::TILE as u64);
            let starts = (0..tiles).step_by(SEGMENT as usize);
            list.counts.push(tiles.div_ceil(SEGMENT) as usize);
            list.segments.extend(starts.map(|start| [first + start, SEGMENT.min(tiles - start)]));
        }
        Ok(list)
    }

    /// How many sums of squares the list has.
    pub(super) fn count(&self) -> Count {
        Count { tiles: self.tiles, segments: self.segments.len() }
    }

    /// Most likely different for lists of different tensors, and equal for the next step of the same ones.
    pub(super) fn key(&self) -> (usize, u64) {
        (self.rows.len(), self.rows.first().map_or(0, Row::target))
    }

    /// The contents of the table, or None if there is none: the coefficients unless all are the same, the rows, the
    /// segments, and the row at which every [`SHARE`] tiles begin.
    pub(super) fn table(&self) -> Result<Option<Vec<u64>>> {
        if self.rows.len() < 2 {
            return Ok(None);
        }
        let [_, rows, segments, starts] = self.places();
        let mut words = try_vec::with_capacity("listing tensors", starts + self.tiles as usize / 2)?;
        if self.rules.len() > 1 {
            words.extend(pairs(self.rules.iter().flat_map(|rule| rule.0)));
        }
        debug_assert_eq!(words.len(), rows);
        words.extend(self.rows.iter().flat_map(Row::words));
        words.extend(Row::end(self.tiles).words());
        debug_assert_eq!(words.len(), segments);
        words.extend(self.segments.iter().flatten());
        words.extend(pairs(self.starts()));
        Ok(Some(words))
    }

    /// The word at which each part of the table begins.
    fn places(&self) -> [usize; 4] {
        let rules = if self.rules.len() > 1 { self.rules.len() } else { 0 };
        let rows = (rules * size_of::<Rule>()).div_ceil(size_of::<u64>());
        let segments = rows + (self.rows.len() + 1) * Row::WORDS;
        [0, rows, segments, segments + 2 * self.segments.len()]
    }

    /// The row of each tile whose number is a multiple of [`SHARE`].
    fn starts(&self) -> impl Iterator<Item = u32> {
        self.rows.iter().enumerate().flat_map(|(index, row)| {
            let marks = row.first.div_ceil(SHARE)..(row.first + row.tiles()).div_ceil(SHARE);
            marks.map(move |_| index as u32)
        })
    }

    /// Enqueues the kernels of a call. After an error some of them are queued. `table` is the address of the table,
    /// which has been uploaded in order on `stream`; `sums` has room for the list.
    pub(super) fn launch(
        &self,
        kernels: &Kernels,
        stream: &Stream,
        part: StepPass,
        table: Option<u64>,
        sums: Option<&Sums>,
    ) -> Result<()> {
        let Some(row) = self.rows.first() else { return Ok(()) };
        let [rules, rows, segments, starts] = self.places().map(|word| {
            let bytes = (word * size_of::<u64>()) as u64;
            table.map_or(0, |table| table + bytes)
        });
        let rules = if self.rules.len() > 1 { rules } else { 0 };
        let tiles = sums.map_or(0, Sums::tiles);
        for groups in self.groups.chunk_by(|a, b| a.function(part) == b.function(part)) {
            let (begin, end) = (groups[0].begin, groups[groups.len() - 1].end);
            let batch =
                Batch { rows, starts, begin, end, tiles, rules, ..Batch::of_row(*row, self.rules[0]) };
            // SAFETY: the function of these rows. Their arrays have passed the check of `DeviceTensor`. The table is
            // there in order on the stream, and the sums have room for every tile.
            unsafe { kernels.run(groups[0].function(part), stream, batch) }?;
        }
        let Some(sums) = sums else { return Ok(()) };
        let out = sums.segments(self.count());
        let fold = Fold {
            segments,
            tiles: self.tiles,
            count: self.segments.len() as u64,
            sums: tiles,
            out: out.address(),
        };
        // SAFETY: as above; without a table the segments are those of the only row.
        unsafe { kernels.fold(stream, fold) }?;
        stream.download(out, &sums.host(self.count()))
    }

    /// The sum of squares of all tensors from the sums of their segments, with the bits of a step on the processor.
    pub(super) fn sum(&self, segments: &[f64]) -> f64 {
        let mut rest = segments;
        let tensors = self.counts.iter().map(|count| {
            let (own, after) = rest.split_at(*count);
            rest = after;
            if let [one] = own { *one } else { squares::sum(own) }
        });
        parallel::sum_of(&tensors.collect::<Vec<f64>>())
    }
}

/// The kernels of a call.
struct Kinds {
    /// Each kernel, and the type of its gradients.
    kernels: Vec<(KernelName, Dtype)>,
    /// The number of its kernel for each job.
    of_job: Vec<usize>,
}

impl Kinds {
    fn of(jobs: &[Job]) -> Result<Kinds> {
        let mut kernels = Vec::new();
        let mut of_job = try_vec::with_capacity("listing tensors", jobs.len())?;
        for job in jobs {
            job.tensor.check()?;
            let kind = (KernelName::adam(&job.rule, &job.tensor), job.tensor.grad.dtype());
            let known = kernels.iter().position(|known| *known == kind);
            of_job.push(known.unwrap_or(kernels.len()));
            if known.is_none() {
                kernels.push(kind);
            }
        }
        Ok(Kinds { kernels, of_job })
    }
}

/// The number of a rule, which is added to `rules` if it is new.
fn number_of(rules: &mut Vec<Rule>, numbers: &mut HashMap<Rule, u64>, rule: Rule) -> u64 {
    let next = rules.len() as u64;
    if rules.last() == Some(&rule) {
        return next - 1;
    }
    let number = *numbers.entry(rule).or_insert(next);
    if number == next {
        rules.push(rule);
    }
    number
}

/// Two numbers in each word, the first one at the lower address. GPUs and their hosts are little-endian.
fn pairs(numbers: impl Iterator<Item = u32>) -> impl Iterator<Item = u64> {
    let mut numbers = numbers.fuse();
    std::iter::from_fn(move || {
        let low = numbers.next()?;
        Some(u64::from(low) | u64::from(numbers.next().unwrap_or(0)) << 32)
    })
}
