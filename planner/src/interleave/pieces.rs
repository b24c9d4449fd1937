//! The GPU commands of a step, in pieces: one array of a state, the update and flush of a slot, or a resident.
//!
//! A piece is enqueued when its copies can start, or nearly so: before it, the enqueueing thread waits for events of
//! earlier pieces. Two rules follow from how a device serves its queues.
//! - A copy that waits in a queue keeps later copies of its direction waiting, those of other streams too. On an H100,
//!   uploads of the CPU's subgroups began when the last queued prefetch had ended, and the CPU was idle meanwhile. So a
//!   prefetch is enqueued once its slot is free, and at most [`ARRAYS_AHEAD`] arrays are queued.
//! - A device can queue about a thousand operations. A call that enqueues one more blocks, and blocks every other
//!   launch of the process.
//!
//! No piece waits for CPU updates.
#![forbid(unsafe_code)]

use std::iter;

use super::placements::{Placement, Plan};
use super::schedule::{Command, Edge, Lane, LaneEvent, STATES, Sink, StateArray, Work, parts};
use super::{GpuGrads, Shape};
use Command::{Record, Run, Wait};

/// Maximal number of queued operations of a step, well below the limit of a device.
const MOST_QUEUED: u64 = 640;
/// Maximal number of residents with queued updates.
const RESIDENTS_AHEAD: usize = 32;
/// Maximal number of arrays whose prefetch is queued: one that is copied, and one that keeps the link busy meanwhile.
/// An upload waits for no more than these.
const ARRAYS_AHEAD: usize = 2;

/// The GPU work that is enqueued together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Piece {
    /// Fetches an array of a state into a slot; with the last array, a gradient that is in host memory.
    Fetch {
        /// Index of the subgroup.
        subgroup: usize,
        /// Index of the slot.
        slot: usize,
        /// The array.
        state: StateArray,
    },
    /// Updates the subgroup in a slot, and flushes its state.
    Step {
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
    /// The subgroup whose GPU work is enqueued with this piece; `None` if pieces of it follow.
    pub const fn completes(self) -> Option<usize> {
        match self {
            Piece::Fetch { .. } => None,
            Piece::Step { subgroup, .. } | Piece::Resident { subgroup } => Some(subgroup),
        }
    }
}

/// A piece, and the events that must be reached before it is enqueued.
pub type Due = (Piece, Vec<LaneEvent>);

/// The pieces of a step in the order in which they are enqueued. Residents are spread evenly among the fetched
/// subgroups, so that their updates fill the waits for transfers.
pub fn pieces(shape: &Shape, plan: &Plan) -> Vec<Due> {
    let fetched: Vec<usize> = plan.on(Placement::Gpu).collect();
    let residents: Vec<usize> = plan.on(Placement::Resident).collect();
    let resident = |nth: usize| {
        let earlier = nth.checked_sub(RESIDENTS_AHEAD).map(|earlier| LaneEvent::Ready(residents[earlier]));
        (Piece::Resident { subgroup: residents[nth] }, earlier.into_iter().collect())
    };
    if fetched.is_empty() {
        return (0..residents.len()).map(resident).collect();
    }
    let among = |nth: usize| residents.len() * nth / fetched.len();
    (0..fetched.len())
        .flat_map(|nth| through_slot(shape, &fetched, nth).chain((among(nth)..among(nth + 1)).map(resident)))
        .collect()
}

/// The pieces of the `nth` fetched subgroup.
fn through_slot(shape: &Shape, fetched: &[usize], nth: usize) -> impl Iterator<Item = Due> + use<> {
    let (subgroup, slots) = (fetched[nth], shape.slots);
    let slot = nth % slots;
    let unflushed = nth.checked_sub(most_unflushed(shape)).map(|earlier| LaneEvent::Home(fetched[earlier]));
    let fetch = move |(place, state): (usize, StateArray)| {
        let earlier = (nth * STATES.len() + place).checked_sub(ARRAYS_AHEAD).map(|earlier| {
            LaneEvent::Fetched(earlier / STATES.len() % slots, STATES[earlier % STATES.len()])
        });
        let free = (nth >= slots).then_some(LaneEvent::SlotFree(slot, state));
        let room = unflushed.filter(|_| place == 0).into_iter().chain(free).chain(earlier).collect();
        (Piece::Fetch { subgroup, slot, state }, room)
    };
    STATES.into_iter().enumerate().map(fetch).chain(iter::once((Piece::Step { subgroup, slot }, Vec::new())))
}

/// Maximal number of fetched subgroups whose flush is queued, if many chunks make it smaller than the number of slots.
/// The minimum is two, which keeps the copies of both directions busy.
fn most_unflushed(shape: &Shape) -> usize {
    let chunks = shape.largest().div_ceil(shape.chunk.max(1));
    // Operations of one subgroup: 7 copies per chunk (three states in both directions, one gradient), and about 30
    // waits, records and launches.
    let operations = chunks.saturating_mul(7).saturating_add(30);
    let fits = usize::try_from(MOST_QUEUED / operations).unwrap_or(usize::MAX).max(2);
    if fits < shape.slots { fits } else { usize::MAX }
}

/// Makes the enqueueing thread wait until a piece may be enqueued.
pub fn room<E>(events: &[LaneEvent], emit: &mut impl Sink<E>) -> Result<(), E> {
    events.iter().try_for_each(|event| emit(Wait(Lane::Caller, *event, Edge::RoomBeforeEnqueue)))
}

/// Passes the commands of a piece to `emit`.
pub fn enqueue<E>(shape: &Shape, piece: Piece, emit: &mut impl Sink<E>) -> Result<(), E> {
    match piece {
        Piece::Fetch { subgroup, slot, state } => fetch(shape, subgroup, slot, state, emit),
        Piece::Step { subgroup, slot } => step(shape, subgroup, slot, emit),
        Piece::Resident { subgroup } => {
            emit(Wait(Lane::Resident, LaneEvent::Settled(subgroup), Edge::SettledBeforeStep))?;
            before_gpu_step(Lane::Resident, subgroup, emit)?;
            emit(Run(Lane::Resident, Work::ResidentStep { subgroup }))?;
            emit(Record(Lane::Resident, LaneEvent::Ready(subgroup)))
        }
    }
}

/// The array whose fetch completes a slot.
const LAST: StateArray = STATES[STATES.len() - 1];

fn fetch<E>(
    shape: &Shape,
    subgroup: usize,
    slot: usize,
    state: StateArray,
    emit: &mut impl Sink<E>,
) -> Result<(), E> {
    emit(Wait(Lane::H2d, LaneEvent::Home(subgroup), Edge::HomeBeforeFetch))?;
    emit(Wait(Lane::H2d, LaneEvent::SlotFree(slot, state), Edge::SlotFreeBeforeFetch))?;
    for part in parts(shape, subgroup) {
        emit(Run(Lane::H2d, Work::Prefetch { subgroup, slot, state, part }))?;
    }
    if state == LAST && shape.gpu_grads == GpuGrads::Fetched {
        emit(Wait(Lane::H2d, LaneEvent::GradHome(subgroup), Edge::GradHomeBeforeFetch))?;
        for part in parts(shape, subgroup) {
            emit(Run(Lane::H2d, Work::FetchGrad { subgroup, slot, part }))?;
        }
    }
    emit(Record(Lane::H2d, LaneEvent::Fetched(slot, state)))
}

fn step<E>(shape: &Shape, subgroup: usize, slot: usize, emit: &mut impl Sink<E>) -> Result<(), E> {
    emit(Wait(Lane::Gpu, LaneEvent::Fetched(slot, LAST), Edge::FetchBeforeStep))?;
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

fn before_gpu_step<E>(lane: Lane, subgroup: usize, emit: &mut impl Sink<E>) -> Result<(), E> {
    emit(Wait(lane, LaneEvent::Grad(subgroup), Edge::GradBeforeStep))?;
    emit(Wait(lane, LaneEvent::ParamFree(subgroup), Edge::ReadBeforeWrite))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The slots and arrays that are queued, and the events that the next pieces wait for.
    fn fetches(all: &[Due]) -> Vec<(usize, StateArray, &[LaneEvent])> {
        let fetch = |due: &'_ Due| match due.0 {
            Piece::Fetch { subgroup, state, .. } => Some((subgroup, state)),
            _ => None,
        };
        all.iter()
            .filter_map(|due| fetch(due).map(|(subgroup, state)| (subgroup, state, &due.1[..])))
            .collect()
    }

    #[test]
    fn an_array_is_enqueued_when_its_slot_is_free_and_at_most_one_waits_for_the_link() {
        let [first, second, last] = STATES;
        let shape = Shape { slots: 2, ..Shape::uniform(9, 100) };
        let mut placements = vec![Placement::Gpu; 9];
        (placements[1], placements[4], placements[8]) =
            (Placement::Resident, Placement::Cpu, Placement::Resident);
        let all = pieces(&shape, &Plan::of(placements));
        let completed: Vec<usize> = all.iter().filter_map(|(piece, _)| piece.completes()).collect();
        assert_eq!(completed, [0, 2, 3, 1, 5, 6, 7, 8]);
        let fetches = fetches(&all);
        assert_eq!(fetches.len(), 6 * 3);
        assert_eq!(fetches[0], (0, first, &[][..]));
        assert_eq!(fetches[1], (0, second, &[][..]));
        assert_eq!(fetches[2], (0, last, &[LaneEvent::Fetched(0, first)][..]));
        assert_eq!(fetches[4], (2, second, &[LaneEvent::Fetched(0, last)][..]));
        assert_eq!(
            fetches[6],
            (3, first, &[LaneEvent::SlotFree(0, first), LaneEvent::Fetched(1, second)][..])
        );
        assert_eq!(
            fetches[7],
            (3, second, &[LaneEvent::SlotFree(0, second), LaneEvent::Fetched(1, last)][..])
        );
    }

    #[test]
    fn many_chunks_leave_room_for_fewer_subgroups() {
        let with = |chunk| most_unflushed(&Shape { slots: 4, chunk, ..Shape::uniform(9, 1000) });
        assert_eq!([with(1000), with(100), with(40), with(10)], [usize::MAX, usize::MAX, 3, 2]);
        let all =
            pieces(&Shape { slots: 4, chunk: 40, ..Shape::uniform(9, 1000) }, &Plan::even(9, 9, 0).unwrap());
        assert_eq!(fetches(&all)[9].2, [LaneEvent::Home(0), LaneEvent::Fetched(2, STATES[1])]);
    }

    #[test]
    fn residents_alone_are_held_back_too() {
        let all = pieces(&Shape::uniform(40, 100), &Plan::of(vec![Placement::Resident; 40]));
        assert_eq!(all[31], (Piece::Resident { subgroup: 31 }, Vec::new()));
        assert_eq!(all[32], (Piece::Resident { subgroup: 32 }, vec![LaneEvent::Ready(0)]));
    }
}
