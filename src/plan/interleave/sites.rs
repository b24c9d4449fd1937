//! The update site of every subgroup.
#![forbid(unsafe_code)]

use crate::error::{Error, Result};

/// The processor that updates a subgroup, and where the state is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Site {
    /// The CPU; the state is in host memory.
    Cpu,
    /// The GPU; the state is in host memory, and is fetched and flushed in every step.
    Gpu,
    /// The GPU; the state is in GPU memory.
    Resident,
}

/// The site of every subgroup, for one step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    sites: Vec<Site>,
}

impl Plan {
    /// A plan with these sites; residents may be at any position.
    pub fn of(sites: Vec<Site>) -> Plan {
        Plan { sites }
    }

    /// A plan with all `count` subgroups on the CPU.
    pub fn cpu(count: usize) -> Plan {
        Plan::of(vec![Site::Cpu; count])
    }

    /// `gpu` subgroups on the GPU, spread evenly among the subgroups that are not resident, and `residents` at the end.
    /// The gradients of the last subgroups arrive last, and the next forward pass needs their parameters first. Where
    /// possible, CPU subgroups are first and last among the others, so that GPU work hides their transfers. Fails if
    /// `gpu + residents` exceeds `count`.
    pub fn even(count: usize, gpu: usize, residents: usize) -> Result<Plan> {
        let dynamic = dynamic_of(count, residents)?;
        if gpu > dynamic {
            return Err(Error::invalid("gpu", format!("{gpu} of {dynamic} subgroups that are not resident")));
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
        let site = |index| if on_gpu(index) { Site::Gpu } else { Site::Cpu };
        Plan::of((0..dynamic).map(site).chain(std::iter::repeat_n(Site::Resident, residents)).collect())
    }

    /// The sites, in order of subgroups.
    pub fn sites(&self) -> &[Site] {
        &self.sites
    }

    /// The site of a subgroup. Panics if the index is out of range.
    pub fn site(&self, subgroup: usize) -> Site {
        self.sites[subgroup]
    }

    /// Number of subgroups.
    pub fn count(&self) -> usize {
        self.sites.len()
    }

    /// The indices of the subgroups of one site, ascending.
    pub fn on(&self, site: Site) -> impl Iterator<Item = usize> + '_ {
        self.sites.iter().enumerate().filter(move |(_, at)| **at == site).map(|(index, _)| index)
    }

    /// Number of subgroups of one site.
    pub fn count_on(&self, site: Site) -> usize {
        self.on(site).count()
    }
}

fn dynamic_of(count: usize, residents: usize) -> Result<usize> {
    count
        .checked_sub(residents)
        .ok_or_else(|| Error::invalid("residents", format!("{residents} of {count} subgroups")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn letters(plan: &Plan) -> String {
        let letter = |site: &Site| match site {
            Site::Cpu => 'c',
            Site::Gpu => 'G',
            Site::Resident => 'R',
        };
        plan.sites().iter().map(letter).collect()
    }

    #[test]
    fn even_plans_hold_the_number_asked_for_with_gaps_that_differ_by_one_at_most() {
        for count in 0..40 {
            for residents in [0, 1, 7] {
                for gpu in 0..=count {
                    let Ok(plan) = Plan::even(count, gpu, residents) else {
                        assert!(gpu + residents > count);
                        continue;
                    };
                    assert_eq!((plan.count_on(Site::Gpu), plan.count_on(Site::Resident)), (gpu, residents));
                    assert!(plan.sites().iter().rev().take(residents).all(|site| *site == Site::Resident));
                    let at: Vec<usize> = plan.on(Site::Gpu).collect();
                    let gaps: Vec<usize> = at.windows(2).map(|pair| pair[1] - pair[0]).collect();
                    if let (Some(least), Some(most)) = (gaps.iter().min(), gaps.iter().max()) {
                        assert!(most - least <= 1, "{}", letters(&plan));
                    }
                    let dynamic = count - residents;
                    if gpu > 0 && 2 * gpu < dynamic {
                        assert_eq!((plan.site(0), plan.site(dynamic - 1)), (Site::Cpu, Site::Cpu));
                    }
                }
            }
        }
        assert_eq!(letters(&Plan::even(9, 3, 0).unwrap()), "cGccGccGc");
    }

    #[test]
    fn strides_are_those_of_algorithm_1() {
        assert_eq!(letters(&Plan::stride(8, 3, 2).unwrap()), "ccGccGRR");
        assert_eq!(letters(&Plan::stride(5, 2, 0).unwrap()), "cGcGc");
        assert_eq!(letters(&Plan::stride(3, 1, 0).unwrap()), "GGG");
        assert_eq!(letters(&Plan::stride(3, 0, 0).unwrap()), "ccc");
        assert!(Plan::stride(3, 2, 4).is_err());
    }
}
