//! The GPU commands of a step, in pieces of one subgroup each.
//!
//! A device can queue about a thousand operations. A call that enqueues one more blocks, and blocks every other launch
//! of the process. So a step is enqueued piece by piece: before a piece, the enqueueing thread may have to wait for an
//! event of an earlier piece. No piece waits for CPU updates.
#![forbid(unsafe_code)]

use std::iter;

use super::placements::{Placement, Plan};
use super::schedule::{Command, Edge, Lane, LaneEvent, STATES, Sink, Work, parts};
use super::{GpuGrads, Shape};
use Command::{Record, Run, Wait};

/// Maximal number of queued operations of a step, well below the limit of a device.
const MOST_QUEUED: u64 = 640;
/// Maximal number of residents with queued updates.
const RESIDENTS_AHEAD: usize = 32;

/// The GPU work for one subgroup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Piece {
    /// Fetches the state into a slot, updates it and flushes it.
    Fetched {
        /// Index of the subgroup.
        subgroup: usize,
        /// Index of the slot.
        slot: usize,
    },
    /// Updates a resident in place.
    Resident {
        /// Index of the subgroup.
        subgroup: usize,
    },
}

impl Piece {
    /// The subgroup that the piece belongs to.
    pub const fn subgroup(self) -> usize {
        match self {
            Piece::Fetched { subgroup, .. } | Piece::Resident { subgroup } => subgroup,
        }
    }
}

/// The pieces of a step in the order in which they are enqueued, each with the event that must complete before it is
/// enqueued. Residents are spread evenly among the fetched subgroups, so that their updates fill the waits for
/// transfers.
pub fn pieces(shape: &Shape, plan: &Plan) -> Vec<(Piece, Option<LaneEvent>)> {
    let fetched: Vec<usize> = plan.on(Placement::Gpu).collect();
    let residents: Vec<usize> = plan.on(Placement::Resident).collect();
    let ahead = most_ahead(shape);
    let before = |all: &[usize], nth: usize, ahead: usize| nth.checked_sub(ahead).map(|earlier| all[earlier]);
    let resident = |nth: usize| {
        let event = before(&residents, nth, RESIDENTS_AHEAD).map(LaneEvent::Ready);
        (Piece::Resident { subgroup: residents[nth] }, event)
    };
    let all = (0..fetched.len()).flat_map(|nth| {
        let (subgroup, slot) = (fetched[nth], nth % shape.slots);
        let event = before(&fetched, nth, ahead).map(LaneEvent::Home);
        let among = |nth: usize| residents.len() * nth / fetched.len();
        iter::once((Piece::Fetched { subgroup, slot }, event))
            .chain((among(nth)..among(nth + 1)).map(resident))
    });
    if fetched.is_empty() { (0..residents.len()).map(resident).collect() } else { all.collect() }
}

/// Maximal number of fetched subgroups in flight: one more than the slots, or fewer if subgroups have many chunks. The
/// minimum is two, which keeps the copies of both directions busy.
fn most_ahead(shape: &Shape) -> usize {
    let chunks = shape.largest().div_ceil(shape.chunk.max(1));
    // Operations of one subgroup: 7 copies per chunk (three states in both directions, one gradient), and about 30
    // waits, records and launches.
    let operations = chunks.saturating_mul(7).saturating_add(30);
    let fits = usize::try_from(MOST_QUEUED / operations).unwrap_or(usize::MAX);
    (shape.slots + 1).min(fits.max(2))
}

/// Makes the enqueueing thread wait for `event`, after which the device queue has room for the piece.
pub fn room<E>(event: Option<LaneEvent>, emit: &mut impl Sink<E>) -> Result<(), E> {
    event.map_or(Ok(()), |event| emit(Wait(Lane::Caller, event, Edge::RoomBeforeEnqueue)))
}

/// Passes the commands of a piece to `emit`.
pub fn enqueue<E>(shape: &Shape, piece: Piece, emit: &mut impl Sink<E>) -> Result<(), E> {
    match piece {
        Piece::Fetched { subgroup, slot } => through_slot(shape, subgroup, slot, emit),
        Piece::Resident { subgroup } => {
            emit(Wait(Lane::Resident, LaneEvent::Settled(subgroup), Edge::SettledBeforeStep))?;
            before_gpu_step(Lane::Resident, subgroup, emit)?;
            emit(Run(Lane::Resident, Work::ResidentStep { subgroup }))?;
            emit(Record(Lane::Resident, LaneEvent::Ready(subgroup)))
        }
    }
}

fn through_slot<E>(shape: &Shape, subgroup: usize, slot: usize, emit: &mut impl Sink<E>) -> Result<(), E> {
    fetch(shape, subgroup, slot, emit)?;
    emit(Record(Lane::H2d, LaneEvent::SlotFull(slot)))?;
    emit(Wait(Lane::Gpu, LaneEvent::SlotFull(slot), Edge::FetchBeforeStep))?;
    before_gpu_step(Lane::Gpu, subgroup, emit)?;
    emit(Run(Lane::Gpu, Work::GpuStep { subgroup, slot }))?;
    emit(Record(Lane::Gpu, LaneEvent::SlotDone(slot)))?;
    emit(Record(Lane::Gpu, LaneEvent::Ready(subgroup)))?;
    emit(Wait(Lane::D2h, LaneEvent::SlotDone(slot), Edge::StepBeforeFlush))?;
    for state in STATES {
        for part in parts(shape, subgroup) {
            emit(Run(Lane::D2h, Work::Flush { subgroup, slot, state, part }))?;
        }
        emit(Record(Lane::D2h, LaneEvent::SlotFree(slot, state)))?;
    }
    emit(Record(Lane::D2h, LaneEvent::Home(subgroup)))
}

fn fetch<E>(shape: &Shape, subgroup: usize, slot: usize, emit: &mut impl Sink<E>) -> Result<(), E> {
    emit(Wait(Lane::H2d, LaneEvent::Home(subgroup), Edge::HomeBeforeFetch))?;
    for state in STATES {
        emit(Wait(Lane::H2d, LaneEvent::SlotFree(slot, state), Edge::SlotFreeBeforeFetch))?;
        for part in parts(shape, subgroup) {
            emit(Run(Lane::H2d, Work::Prefetch { subgroup, slot, state, part }))?;
        }
    }
    if shape.gpu_grads == GpuGrads::Fetched {
        emit(Wait(Lane::H2d, LaneEvent::GradHome(subgroup), Edge::GradHomeBeforeFetch))?;
        for part in parts(shape, subgroup) {
            emit(Run(Lane::H2d, Work::FetchGrad { subgroup, slot, part }))?;
        }
    }
    Ok(())
}

fn before_gpu_step<E>(lane: Lane, subgroup: usize, emit: &mut impl Sink<E>) -> Result<(), E> {
    emit(Wait(lane, LaneEvent::Grad(subgroup), Edge::GradBeforeStep))?;
    emit(Wait(lane, LaneEvent::ParamFree(subgroup), Edge::ReadBeforeWrite))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_piece_waits_for_the_one_that_makes_room() {
        let shape = Shape { slots: 2, ..Shape::uniform(9, 100) };
        let mut placements = vec![Placement::Gpu; 9];
        (placements[1], placements[4], placements[8]) =
            (Placement::Resident, Placement::Cpu, Placement::Resident);
        let all = pieces(&shape, &Plan::of(placements));
        let fetched: Vec<_> =
            all.iter().filter(|(piece, _)| matches!(piece, Piece::Fetched { .. })).collect();
        let order: Vec<usize> = fetched.iter().map(|(piece, _)| piece.subgroup()).collect();
        assert_eq!(order, [0, 2, 3, 5, 6, 7]);
        let events: Vec<_> = fetched.iter().map(|(_, event)| *event).collect();
        assert_eq!(
            events,
            [None, None, None, Some(LaneEvent::Home(0)), Some(LaneEvent::Home(2)), Some(LaneEvent::Home(3))]
        );
        let residents: Vec<usize> =
            all.iter().map(|(piece, _)| piece.subgroup()).filter(|at| [1, 8].contains(at)).collect();
        assert_eq!((all.len(), residents), (8, vec![1, 8]));
    }

    #[test]
    fn many_chunks_leave_room_for_fewer_subgroups() {
        let with = |chunk| most_ahead(&Shape { slots: 4, chunk, ..Shape::uniform(9, 1000) });
        assert_eq!([with(1000), with(100), with(40), with(10)], [5, 5, 3, 2]);
    }

    #[test]
    fn residents_alone_are_held_back_too() {
        let all = pieces(&Shape::uniform(40, 100), &Plan::of(vec![Placement::Resident; 40]));
        assert_eq!(all[31], (Piece::Resident { subgroup: 31 }, None));
        assert_eq!(all[32], (Piece::Resident { subgroup: 32 }, Some(LaneEvent::Ready(0))));
    }
}
