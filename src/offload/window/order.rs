//! The rule of a window: which unit gets which place, which one is fetched before its use, and what a copy waits for. No
//! I/O and no locks.
//!
//! Invariants:
//! - A place with users is not filled.
//! - A unit without users in a place has the values of its home, or will have them, or its copy has failed.
//! - A place keeps the marks of its readers until a copy that waits for them takes them, and again if that copy fails.
#![forbid(unsafe_code)]

use std::collections::HashMap;

use crate::error::{Error, Result};

/// Marks of a place from which on marks that are reached are dropped: a place that stays full would collect them.
const MANY_MARKS: usize = 8;

/// Pairs of uses that are remembered for each unit. A program whose order changes all the time would collect more of them.
const MANY_PAIRS: usize = 8;

/// The state of a window. `M` marks the end of a reader's work.
#[derive(Debug, Clone)]
pub struct Order<M> {
    slots: usize,
    /// Number of uses to look ahead.
    reach: usize,
    units: Vec<Unit>,
    places: Vec<Place<M>>,
    /// Units in slots, the one used longest ago first.
    here: Vec<usize>,
    /// The unit that followed each pair of uses.
    pub(super) after: HashMap<Uses, usize>,
    /// The last two units that were used.
    used: Uses,
}

type Uses = (Option<usize>, Option<usize>);

#[derive(Debug, Clone, Default)]
struct Unit {
    /// The place of a unit that stays.
    own: Option<usize>,
    place: Option<usize>,
    users: usize,
    /// Its home has changed, or its copy has failed, since the place was filled.
    stale: bool,
    /// Its home may be written: no copy begins before its use.
    changing: bool,
}

#[derive(Debug, Clone)]
struct Place<M> {
    unit: Option<usize>,
    marks: Vec<M>,
}

/// A copy that is to be started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fill {
    /// The unit.
    pub unit: usize,
    /// The place that it gets.
    pub place: usize,
}

impl<M> Order<M> {
    /// An empty window with `slots` slots, or fewer if fewer units need one. `stays` says for each unit whether it has a place of its own. Places are
    /// numbered: the slots, then the places of units that stay.
    pub fn new(slots: usize, stays: &[bool]) -> Order<M> {
        let reach = slots.saturating_sub(1);
        let slots = slots.min(stays.iter().filter(|stays| !**stays).count());
        let mut next = slots;
        let mut own = |stays: &bool| {
            next += usize::from(*stays);
            stays.then(|| next - 1)
        };
        let units: Vec<Unit> =
            stays.iter().map(|stays| Unit { own: own(stays), ..Unit::default() }).collect();
        let places = (0..next).map(|_| Place { unit: None, marks: Vec::new() }).collect();
        Order { slots, reach, units, places, here: Vec::new(), after: HashMap::new(), used: (None, None) }
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Units in slots.
    pub fn here(&self) -> &[usize] {
        &self.here
    }

    /// The place of a unit, if it has one.
    pub fn place(&self, unit: usize) -> Option<usize> {
        self.units[unit].place
    }

    /// Begins an iteration: the first use follows no other one, and homes are no longer written.
    pub fn begin(&mut self) {
        self.used = (None, None);
        self.units.iter_mut().for_each(|unit| unit.changing = false);
    }

    /// Adds a user to a unit. Returns the copy to start if the unit is in no place. `Busy` if all slots have users.
    pub fn enter(&mut self, unit: usize) -> Result<Option<Fill>> {
        let Unit { place, stale, .. } = *self.known(unit)?;
        if stale {
            let reason = format!("unit {unit} has changed while it is used; release every use of it first");
            return Err(Error::Busy(reason));
        }
        let fill = match place {
            Some(_) => None,
            None => Some(self.seat(unit, &[]).ok_or_else(|| self.no_slot(unit))?),
        };
        if self.used.1 != Some(unit) {
            if self.after.len() >= MANY_PAIRS * self.units.len() {
                self.after.clear();
            }
            self.after.insert(self.used, unit);
            self.used = (self.used.1, Some(unit));
            if let Some(at) = self.here.iter().position(|other| *other == unit) {
                self.here.remove(at);
                self.here.push(unit);
            }
        }
        self.units[unit].users += 1;
        self.units[unit].changing = false;
        Ok(fill)
    }

    /// The copies to start now for the uses that followed the last ones before. A window of `slots` slots looks
    /// `slots - 1` uses ahead.
    pub fn ahead(&mut self) -> Vec<Fill> {
        let (mut at, mut fills) = (self.used, Vec::new());
        let mut wanted: Vec<usize> = at.1.into_iter().collect();
        for _ in 0..self.reach {
            let Some(next) = self.after.get(&at).copied() else { break };
            if self.units[next].users > 0 || self.units[next].changing {
                break;
            }
            wanted.push(next);
            if self.units[next].place.is_none() {
                let Some(fill) = self.seat(next, &wanted) else { break };
                fills.push(fill);
            }
            at = (at.1, Some(next));
        }
        fills
    }

    /// Ends a use. `mark` is behind the reader's work; marks for which `reached` is true may be forgotten.
    pub fn leave(&mut self, unit: usize, mark: M, reached: impl Fn(&M) -> bool) -> Result<()> {
        self.check_used(unit)?;
        if let Some(place) = self.units[unit].place {
            let marks = &mut self.places[place].marks;
            if marks.len() >= MANY_MARKS {
                marks.retain(|mark| !reached(mark));
            }
            marks.push(mark);
        }
        self.drop_user(unit);
        Ok(())
    }

    /// Removes the use of a caller that gets an error. `filled` is false if the copy has failed.
    pub fn cancel(&mut self, unit: usize, filled: bool) {
        self.units[unit].stale |= !filled;
        self.drop_user(unit);
    }

    /// The home of a unit is going to change, or has changed: its next use needs a new copy.
    pub fn changed(&mut self, unit: usize) -> Result<()> {
        let own = self.known(unit)?;
        (own.stale, own.changing) = (own.place.is_some(), true);
        self.vacate_if_stale(unit);
        Ok(())
    }

    /// Takes what the copy into a place that is enqueued now waits for.
    pub fn take_marks(&mut self, place: usize) -> Vec<M> {
        std::mem::take(&mut self.places[place].marks)
    }

    /// Puts the marks of a copy back that was not enqueued.
    pub fn keep_marks(&mut self, place: usize, marks: Vec<M>) {
        self.places[place].marks.splice(0..0, marks);
    }

    /// The marks of a unit's place, if the next [`Order::leave`] asks which of them are reached.
    pub fn many_marks(&self, unit: usize) -> &[M] {
        let marks = self.units[unit].place.map_or(&[][..], |place| &self.places[place].marks);
        if marks.len() >= MANY_MARKS { marks } else { &[] }
    }

    /// Fails for a unit that has no user.
    pub fn check_used(&mut self, unit: usize) -> Result<()> {
        match self.known(unit)?.users {
            0 => Err(Error::invalid("unit", format!("{unit} is not in use"))),
            _ => Ok(()),
        }
    }

    fn known(&mut self, unit: usize) -> Result<&mut Unit> {
        let count = self.units.len();
        let reason = || format!("is {unit}, but there are {count} units");
        self.units.get_mut(unit).ok_or_else(|| Error::invalid("unit", reason()))
    }

    /// Gives a unit its place, or a slot: an empty one, or that of the unit used longest ago that has no users and is
    /// not wanted.
    fn seat(&mut self, unit: usize, wanted: &[usize]) -> Option<Fill> {
        let place = match self.units[unit].own {
            Some(own) => own,
            None => {
                let empty = self.places[..self.slots].iter().position(|place| place.unit.is_none());
                let place = empty.or_else(|| {
                    let idle = |other: &&usize| self.units[**other].users == 0 && !wanted.contains(other);
                    let victim = *self.here.iter().find(idle)?;
                    let place = self.units[victim].place;
                    self.vacate(victim);
                    place
                })?;
                self.here.push(unit);
                place
            }
        };
        self.places[place].unit = Some(unit);
        self.units[unit].place = Some(place);
        Some(Fill { unit, place })
    }

    fn drop_user(&mut self, unit: usize) {
        self.units[unit].users -= 1;
        self.vacate_if_stale(unit);
    }

    fn vacate_if_stale(&mut self, unit: usize) {
        if self.units[unit].stale && self.units[unit].users == 0 {
            self.vacate(unit);
        }
    }

    fn vacate(&mut self, unit: usize) {
        self.here.retain(|other| *other != unit);
        self.units[unit].stale = false;
        if let Some(place) = self.units[unit].place.take() {
            self.places[place].unit = None;
        }
    }

    fn no_slot(&self, unit: usize) -> Error {
        let (slots, here) = (self.slots, &self.here);
        Error::Busy(format!(
            "unit {unit} finds no slot: all {slots} have users, which are those of units {here:?}; release one of them, \
             or open the window with more slots"
        ))
    }
}
