//! The extents that hold the subgroups' state: at most one for each kind of master; the newest one is valid.
//!
//! Invariants:
//! - Generations increase over all extents of a tier. Of a subgroup's extents, the one with the higher generation
//!   was written last, also after a rollback or a crash.
//! - The older extent keeps its storage until the newer one is committed.
#![forbid(unsafe_code)]

use super::encoding::{self, Encoding, Master, Moments};
use crate::error::{Error, Result};
use crate::tier::Tier;

/// Number of kinds of masters.
const KINDS: usize = Master::ALL.len();

#[derive(Debug)]
struct Subgroup {
    elements: u64,
    /// One for each kind of master.
    stored: [Option<u32>; KINDS],
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
            elements.iter().map(|elements| Subgroup { elements: *elements, stored: [None; KINDS] });
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
            let known = self.subgroups[subgroup].stored[usual as usize].is_some();
            let extent = self.written_as(tier, subgroup, usual)?;
            made.extend((!known).then_some(extent));
            let (_, found, _) = self.newest(tier, subgroup)?;
            // Masters that could not be split are full.
            if found != usual && (usual, found) != (Master::Split, Master::Full) {
                let found = found.name();
                let reason = format!(
                    "subgroup {subgroup} is stored with {found} master weights; open it with {found} master weights"
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
            for (subgroup, (ours, theirs)) in ours.chunks(KINDS).zip(theirs.chunks(KINDS)).enumerate() {
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

    /// The extents with these moments: for each subgroup one for each kind of master.
    fn numbers(&self, tier: &Tier, moments: Moments) -> Vec<Option<u32>> {
        let all = Encoding::with(moments);
        let names: Vec<String> =
            (0..self.subgroups.len()).flat_map(|number| all.map(|one| one.extent(number))).collect();
        tier.numbers(names.iter().map(String::as_str))
    }

    /// Finds the extents by name, for example after a rollback.
    pub(super) fn find(&mut self, tier: &Tier) {
        let numbers = self.numbers(tier, self.usual.moments);
        for (subgroup, found) in self.subgroups.iter_mut().zip(numbers.chunks(KINDS)) {
            subgroup.stored.copy_from_slice(found);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.subgroups.len()
    }

    pub(super) fn elements(&self, subgroup: usize) -> usize {
        self.subgroups[subgroup].elements as usize
    }

    /// The extent for a master of this kind, created if there is none.
    pub(super) fn written_as(&mut self, tier: &Tier, subgroup: usize, master: Master) -> Result<u32> {
        let encoding = Encoding { master, ..self.usual };
        let found = &mut self.subgroups[subgroup];
        // Called for existing extents, too: `define` cancels a pending removal.
        let extent = tier.define(&encoding.extent(subgroup), &encoding::streams(encoding, found.elements))?;
        found.stored[master as usize] = Some(extent);
        Ok(extent)
    }

    /// The extent that holds a subgroup's current state, how param is stored, and its generation (0 if there is no state).
    pub(super) fn newest(&self, tier: &Tier, subgroup: usize) -> Result<(u32, Master, u64)> {
        let usual = self.usual.master;
        let others = Master::ALL.into_iter().filter(|master| *master != usual);
        let mut newest: Option<(u32, Master, u64)> = None;
        for master in [usual].into_iter().chain(others) {
            if let Some(extent) = self.subgroups[subgroup].stored[master as usize] {
                let age = tier.extent(extent)?.generation;
                newest = newest.filter(|newest| newest.2 >= age).or(Some((extent, master, age)));
            }
        }
        newest.ok_or_else(|| Error::invalid("subgroup", format!("{subgroup} has no extent")))
    }

    /// Marks extents that are older than the current state for removal by the next commit.
    pub(super) fn remove_older(&mut self, tier: &Tier) -> Result<()> {
        let others: Vec<_> = self.other_moments().map(|other| self.numbers(tier, other)).collect();
        for number in 0..self.len() {
            let newest = self.newest(tier, number)?.0;
            let mut others: Vec<_> =
                others.iter().flat_map(|all| all[KINDS * number..][..KINDS].to_vec()).collect();
            for older in self.subgroups[number].stored.iter_mut().chain(&mut others) {
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
