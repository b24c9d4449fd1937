//! The extents that hold the subgroups' state: at most one per encoding; the newer one is valid.
//!
//! Invariants:
//! - Generations increase over all extents of a tier. Of a subgroup's two extents, the one with the higher generation
//!   was written last, also after a rollback or a crash.
//! - The older extent keeps its storage until the newer one is committed.
#![forbid(unsafe_code)]

use super::encoding::{self, Encoding};
use crate::error::{Error, Result};
use crate::tier::Tier;

#[derive(Debug)]
struct Subgroup {
    elements: u64,
    whole: Option<u32>,
    split: Option<u32>,
}

#[derive(Debug)]
pub(super) struct Extents {
    usual: Encoding,
    subgroups: Vec<Subgroup>,
}

fn name(subgroup: usize, encoding: Encoding) -> String {
    match encoding {
        Encoding::Full => format!("subgroup-{subgroup:06}"),
        Encoding::SplitMaster => format!("subgroup-{subgroup:06}-split"),
    }
}

/// Name and dtype of each stream of the extent with this name; `None` if it is no subgroup's.
pub fn tensors_of(extent: &str) -> Option<&'static [(&'static str, &'static str)]> {
    let number = extent.strip_prefix("subgroup-")?;
    let number: usize = number.strip_suffix("-split").unwrap_or(number).parse().ok()?;
    let encoding =
        [Encoding::Full, Encoding::SplitMaster].into_iter().find(|one| name(number, *one) == extent)?;
    Some(encoding::tensors(encoding))
}

impl Extents {
    /// Finds existing extents, and defines the missing extents of the usual encoding. An error leaves the tier
    /// unchanged.
    pub(super) fn define(tier: &Tier, elements: &[u64], usual: Encoding) -> Result<Extents> {
        let subgroups =
            elements.iter().map(|elements| Subgroup { elements: *elements, whole: None, split: None });
        let mut extents = Extents { usual, subgroups: subgroups.collect() };
        extents.find(tier);
        let mut made = Vec::new();
        let defined = extents.define_all(tier, &mut made);
        if defined.is_err() {
            made.into_iter().try_for_each(|extent| tier.remove(extent))?;
        }
        defined.map(|()| extents)
    }

    /// Defines the extents of the usual encoding, and appends newly created ones to `made`.
    fn define_all(&mut self, tier: &Tier, made: &mut Vec<u32>) -> Result<()> {
        let usual = self.usual;
        for subgroup in 0..self.len() {
            let Subgroup { whole, split, .. } = &self.subgroups[subgroup];
            let known = if usual == Encoding::Full { whole.is_some() } else { split.is_some() };
            let extent = self.written_as(tier, subgroup, usual)?;
            made.extend((!known).then_some(extent));
            let (_, found, _) = self.newest(tier, subgroup)?;
            if found == Encoding::SplitMaster && usual == Encoding::Full {
                let reason = format!(
                    "subgroup {subgroup} is stored with split master weights; open it with split master weights"
                );
                return Err(Error::invalid("options", reason));
            }
        }
        Ok(())
    }

    /// Finds the extents by name, for example after a rollback.
    pub(super) fn find(&mut self, tier: &Tier) {
        let encodings = [Encoding::Full, Encoding::SplitMaster];
        let names: Vec<String> =
            (0..self.subgroups.len()).flat_map(|number| encodings.map(|one| name(number, one))).collect();
        let numbers = tier.numbers(names.iter().map(String::as_str));
        for (subgroup, found) in self.subgroups.iter_mut().zip(numbers.chunks(2)) {
            (subgroup.whole, subgroup.split) = (found[0], found[1]);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.subgroups.len()
    }

    pub(super) fn elements(&self, subgroup: usize) -> usize {
        self.subgroups[subgroup].elements as usize
    }

    /// The extent of an encoding, created if there is none.
    pub(super) fn written_as(&mut self, tier: &Tier, subgroup: usize, encoding: Encoding) -> Result<u32> {
        let found = &mut self.subgroups[subgroup];
        // Called for existing extents, too: `define` cancels a pending removal.
        let extent = tier.define(&name(subgroup, encoding), &encoding::streams(encoding, found.elements))?;
        match encoding {
            Encoding::Full => found.whole = Some(extent),
            Encoding::SplitMaster => found.split = Some(extent),
        }
        Ok(extent)
    }

    /// The extent that holds a subgroup's current state, its encoding, and its generation (0 if there is no state).
    pub(super) fn newest(&self, tier: &Tier, subgroup: usize) -> Result<(u32, Encoding, u64)> {
        let Subgroup { whole, split, .. } = &self.subgroups[subgroup];
        let generation = |extent: &Option<u32>| match extent {
            Some(extent) => tier.extent(*extent).map(|info| Some((*extent, info.generation))),
            None => Ok(None),
        };
        let whole = generation(whole)?.map(|(extent, age)| (extent, Encoding::Full, age));
        let split = generation(split)?.map(|(extent, age)| (extent, Encoding::SplitMaster, age));
        let (usual, other) = match self.usual {
            Encoding::Full => (whole, split),
            Encoding::SplitMaster => (split, whole),
        };
        let newest = usual.into_iter().chain(other).reduce(|a, b| if b.2 > a.2 { b } else { a });
        newest.ok_or_else(|| Error::invalid("subgroup", format!("{subgroup} has no extent")))
    }

    /// Marks extents that are older than the current state for removal by the next commit.
    pub(super) fn remove_older(&self, tier: &Tier) -> Result<()> {
        for (number, subgroup) in self.subgroups.iter().enumerate() {
            let newest = self.newest(tier, number)?.0;
            for older in [subgroup.whole, subgroup.split].into_iter().flatten().filter(|one| *one != newest) {
                if tier.extent(older)?.generation > 0 {
                    tier.remove(older)?;
                }
            }
        }
        Ok(())
    }
}
