//! The extents that hold the subgroups' state: at most one for a full master and one for a split one; the newer one is
//! valid.
//!
//! Invariants:
//! - Generations increase over all extents of a tier. Of a subgroup's two extents, the one with the higher generation
//!   was written last, also after a rollback or a crash.
//! - The older extent keeps its storage until the newer one is committed.
#![forbid(unsafe_code)]

use super::encoding::{self, Encoding, Master, Moments};
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

/// Numbers of all extents with states of this number of subgroups, of any encoding.
pub(super) fn all(tier: &Tier, subgroups: usize) -> Vec<u32> {
    let encodings = Moments::ALL.map(Encoding::with).concat();
    let names: Vec<String> =
        (0..subgroups).flat_map(|number| encodings.iter().map(move |one| one.extent(number))).collect();
    tier.numbers(names.iter().map(String::as_str)).into_iter().flatten().collect()
}

impl Extents {
    /// Finds existing extents, and defines the missing extents of the usual encoding. An error leaves the tier
    /// unchanged.
    pub(super) fn define(tier: &Tier, elements: &[u64], usual: Encoding) -> Result<Extents> {
        let subgroups =
            elements.iter().map(|elements| Subgroup { elements: *elements, whole: None, split: None });
        let mut extents = Extents { usual, subgroups: subgroups.collect() };
        extents.check_moments(tier)?;
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
        let usual = self.usual.master;
        for subgroup in 0..self.len() {
            let Subgroup { whole, split, .. } = &self.subgroups[subgroup];
            let known = if usual == Master::Full { whole.is_some() } else { split.is_some() };
            let extent = self.written_as(tier, subgroup, usual)?;
            made.extend((!known).then_some(extent));
            let (_, found, _) = self.newest(tier, subgroup)?;
            if found == Master::Split && usual == Master::Full {
                let reason = format!(
                    "subgroup {subgroup} is stored with split master weights; open it with split master weights"
                );
                return Err(Error::invalid("options", reason));
            }
        }
        Ok(())
    }

    /// Fails if the newest state of a subgroup, as an import may have made it, has moments of another encoding.
    pub(super) fn check_moments(&self, tier: &Tier) -> Result<()> {
        let own = self.usual.moments;
        let newest = |extents: &[Option<u32>]| {
            extents.iter().flatten().try_fold(0, |newest, extent| {
                tier.extent(*extent).map(|extent| extent.generation.max(newest))
            })
        };
        let ours = self.numbers(tier, own);
        for other in self.other_moments() {
            let theirs = self.numbers(tier, other);
            for (subgroup, (ours, theirs)) in ours.chunks(2).zip(theirs.chunks(2)).enumerate() {
                if newest(theirs)? > newest(ours)? {
                    let [own, other] = [own, other].map(Moments::name);
                    let reason = format!(
                        "ask for {own} moments, but subgroup {subgroup} is stored with {other} moments; open it with \
                         {other} moments, or store new states in another job"
                    );
                    return Err(Error::invalid("options", reason));
                }
            }
        }
        Ok(())
    }

    /// The encodings of moments that this update does not have.
    fn other_moments(&self) -> impl Iterator<Item = Moments> {
        let own = self.usual.moments;
        Moments::ALL.into_iter().filter(move |moments| *moments != own)
    }

    /// The extents with these moments: for each subgroup that of a full master and that of a split one.
    fn numbers(&self, tier: &Tier, moments: Moments) -> Vec<Option<u32>> {
        let all = Encoding::with(moments);
        let names: Vec<String> =
            (0..self.subgroups.len()).flat_map(|number| all.map(|one| one.extent(number))).collect();
        tier.numbers(names.iter().map(String::as_str))
    }

    /// Finds the extents by name, for example after a rollback.
    pub(super) fn find(&mut self, tier: &Tier) {
        let numbers = self.numbers(tier, self.usual.moments);
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

    /// The extent for a full or split master, created if there is none.
    pub(super) fn written_as(&mut self, tier: &Tier, subgroup: usize, master: Master) -> Result<u32> {
        let encoding = Encoding { master, ..self.usual };
        let found = &mut self.subgroups[subgroup];
        // Called for existing extents, too: `define` cancels a pending removal.
        let extent = tier.define(&encoding.extent(subgroup), &encoding::streams(encoding, found.elements))?;
        match master {
            Master::Full => found.whole = Some(extent),
            Master::Split => found.split = Some(extent),
        }
        Ok(extent)
    }

    /// The extent that holds a subgroup's current state, how param is stored, and its generation (0 if there is no state).
    pub(super) fn newest(&self, tier: &Tier, subgroup: usize) -> Result<(u32, Master, u64)> {
        let Subgroup { whole, split, .. } = &self.subgroups[subgroup];
        let generation = |extent: &Option<u32>| match extent {
            Some(extent) => tier.extent(*extent).map(|info| Some((*extent, info.generation))),
            None => Ok(None),
        };
        let whole = generation(whole)?.map(|(extent, age)| (extent, Master::Full, age));
        let split = generation(split)?.map(|(extent, age)| (extent, Master::Split, age));
        let (usual, other) = match self.usual.master {
            Master::Full => (whole, split),
            Master::Split => (split, whole),
        };
        let newest = usual.into_iter().chain(other).reduce(|a, b| if b.2 > a.2 { b } else { a });
        newest.ok_or_else(|| Error::invalid("subgroup", format!("{subgroup} has no extent")))
    }

    /// Marks extents that are older than the current state for removal by the next commit.
    pub(super) fn remove_older(&mut self, tier: &Tier) -> Result<()> {
        let others: Vec<_> = self.other_moments().map(|other| self.numbers(tier, other)).collect();
        for number in 0..self.len() {
            let newest = self.newest(tier, number)?.0;
            let mut others: Vec<_> = others.iter().flat_map(|all| all[2 * number..][..2].to_vec()).collect();
            let Subgroup { whole, split, .. } = &mut self.subgroups[number];
            for older in [whole, split].into_iter().chain(&mut others) {
                // Its number is another extent's once it is removed.
                if let Some(extent) = older.take_if(|older| *older != newest)
                    && tier.extent(extent)?.generation > 0
                {
                    tier.remove(extent)?;
                }
            }
        }
        Ok(())
    }
}
