//! The placement of every subgroup: the processor that updates it, and the memory of its state.
#![forbid(unsafe_code)]

use crate::error::{Error, Result};

/// The processor that updates a subgroup, and where the state is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// The CPU; the state is in host memory.
    Cpu,
    /// The GPU; the state is in host memory, and is fetched and flushed in every step.
    Gpu,
    /// The GPU; the state is in GPU memory.
    Resident,
}

/// The placement of every subgroup, for one step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    placements: Vec<Placement>,
}

impl Plan {
    /// A plan with these placements; residents may be at any position.
    pub fn of(placements: Vec<Placement>) -> Plan {
        Plan { placements }
    }

    /// A plan with all `count` subgroups on the CPU.
    pub fn cpu(count: usize) -> Plan {
        Plan::of(vec![Placement::Cpu; count])
    }

    /// `gpu` subgroups on the GPU, spread evenly among the subgroups that are not resident, and `residents` at the end.
    /// The gradients of the last subgroups arrive last, and the next forward pass needs their parameters first. Where
    /// possible, CPU subgroups are first and last among the others, so that GPU work hides their transfers. Fails if
    /// `gpu + residents` exceeds `count`.
    pub fn even(count: usize, gpu: usize, residents: usize) -> Result<Plan> {
        let dynamic = dynamic_of(count, residents)?;
        if gpu > dynamic {
            let reason = format!("is {gpu}, but only {dynamic} subgroups are not resident");
            return Err(Error::invalid("parameter", reason));
        }
        let share =
            |index: usize| (index as u128 * gpu as u128 + dynamic as u128 / 2) / dynamic.max(1) as u128;
        Ok(Plan::with_residents(dynamic, residents, |index| share(index + 1) > share(index)))
    }

    /// Every `stride`-th subgroup on the GPU, after `stride - 1` on the CPU, as in Deep Optimizer States Algorithm 1
    /// (0-based i with (i + 1) % stride == 0). The last `residents` subgroups are resident. Stride 1 puts all others on
    /// the GPU, stride 0 all on the CPU. Fails if `residents` exceeds `count`.
    pub fn stride(count: usize, stride: usize, residents: usize) -> Result<Plan> {
        let dynamic = dynamic_of(count, residents)?;
        Ok(Plan::with_residents(dynamic, residents, |index| stride > 0 && (index + 1).is_multiple_of(stride)))
    }

    fn with_residents(dynamic: usize, residents: usize, on_gpu: impl Fn(usize) -> bool) -> Plan {
        let placement = |index| if on_gpu(index) { Placement::Gpu } else { Placement::Cpu };
        Plan::of(
            (0..dynamic).map(placement).chain(std::iter::repeat_n(Placement::Resident, residents)).collect(),
        )
    }

    /// The placements, in order of subgroups.
    pub fn placements(&self) -> &[Placement] {
        &self.placements
    }

    /// The placement of a subgroup. Panics if the index is out of range.
    pub fn placement(&self, subgroup: usize) -> Placement {
        self.placements[subgroup]
    }

    /// Number of subgroups.
    pub fn count(&self) -> usize {
        self.placements.len()
    }

    /// The indices of the subgroups of one placement, ascending.
    pub fn on(&self, placement: Placement) -> impl Iterator<Item = usize> + '_ {
        self.placements.iter().enumerate().filter(move |(_, at)| **at == placement).map(|(index, _)| index)
    }

    /// A letter for each subgroup: c on the CPU, G on the GPU, R resident.
    pub fn letters(&self) -> String {
        let letter = |placement: &Placement| match placement {
            Placement::Cpu => 'c',
            Placement::Gpu => 'G',
            Placement::Resident => 'R',
        };
        self.placements.iter().map(letter).collect()
    }

    /// Number of subgroups of one placement.
    pub fn count_on(&self, placement: Placement) -> usize {
        self.on(placement).count()
    }
}

fn dynamic_of(count: usize, residents: usize) -> Result<usize> {
    count.checked_sub(residents).ok_or_else(|| {
        Error::invalid("residents", format!("is {residents}, but there are {count} subgroups"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn even_plans_hold_the_number_asked_for_with_gaps_that_differ_by_one_at_most() {
        for count in 0..40 {
            for residents in [0, 1, 7] {
                for gpu in 0..=count {
                    let Ok(plan) = Plan::even(count, gpu, residents) else {
                        assert!(gpu + residents > count);
                        continue;
                    };
                    assert_eq!(
                        (plan.count_on(Placement::Gpu), plan.count_on(Placement::Resident)),
                        (gpu, residents)
                    );
                    assert!(
                        plan.placements()
                            .iter()
                            .rev()
                            .take(residents)
                            .all(|placement| *placement == Placement::Resident)
                    );
                    let at: Vec<usize> = plan.on(Placement::Gpu).collect();
                    let gaps: Vec<usize> = at.windows(2).map(|pair| pair[1] - pair[0]).collect();
                    if let (Some(least), Some(most)) = (gaps.iter().min(), gaps.iter().max()) {
                        assert!(most - least <= 1, "{}", plan.letters());
                    }
                    let dynamic = count - residents;
                    if gpu > 0 && 2 * gpu < dynamic {
                        assert_eq!(
                            (plan.placement(0), plan.placement(dynamic - 1)),
                            (Placement::Cpu, Placement::Cpu)
                        );
                    }
                }
            }
        }
        assert_eq!(Plan::even(9, 3, 0).unwrap().letters(), "cGccGccGc");
    }

    #[test]
    fn strides_are_those_of_algorithm_1() {
        assert_eq!(Plan::stride(8, 3, 2).unwrap().letters(), "ccGccGRR");
        assert_eq!(Plan::stride(5, 2, 0).unwrap().letters(), "cGcGc");
        assert_eq!(Plan::stride(3, 1, 0).unwrap().letters(), "GGG");
        assert_eq!(Plan::stride(3, 0, 0).unwrap().letters(), "ccc");
        assert!(Plan::stride(3, 2, 4).is_err());
    }
}
