//! The order of accesses: vector clocks over streams and the host find accesses that no event orders.

/// For each actor, the number of its operations that are known to have finished. Actor 0 is the host,
/// the others are streams.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Clock(Vec<u64>);

/// The host.
pub const HOST: usize = 0;

impl Clock {
    /// Operations of `actor` that have finished.
    pub fn of(&self, actor: usize) -> u64 {
        self.0.get(actor).copied().unwrap_or(0)
    }

    /// Adds the knowledge of `other` to this clock.
    pub fn merge(&mut self, other: &Clock) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (own, other) in self.0.iter_mut().zip(&other.0) {
            *own = (*own).max(*other);
        }
    }

    /// Counts one more operation of `actor`.
    pub fn tick(&mut self, actor: usize) {
        if self.0.len() <= actor {
            self.0.resize(actor + 1, 0);
        }
        self.0[actor] += 1;
    }
}

/// An operation, as recorded by the checker.
#[derive(Debug, Clone)]
pub struct Operation {
    /// The actor that runs the operation.
    pub actor: usize,
    /// The operations ordered before this one, itself included.
    pub clock: Clock,
    /// Description for messages.
    pub what: String,
}

impl Operation {
    fn before(&self, other: &Operation) -> bool {
        self.clock.of(self.actor) <= other.clock.of(self.actor)
    }
}

/// A range of bytes that an operation touched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Access {
    /// First byte.
    pub start: u64,
    /// One past the last byte.
    pub end: u64,
    /// True if the operation wrote the bytes.
    pub write: bool,
}

/// All accesses that a later operation could still race with.
#[derive(Debug, Default)]
pub struct Checker {
    seen: Vec<(Operation, Vec<Access>)>,
    /// Pairs of accesses that no event orders.
    pub races: Vec<String>,
}

impl Checker {
    /// Records the accesses of `operation`.
    pub fn note(&mut self, operation: Operation, mut accesses: Vec<Access>) {
        join(&mut accesses);
        for (other, earlier) in &self.seen {
            if other.before(&operation) || operation.before(other) {
                continue;
            }
            if let Some((a, b)) = conflict(earlier, &accesses) {
                let verb = |write| if write { "writes" } else { "reads" };
                self.races.push(format!(
                    "{} {} {:#x}..{:#x} and {} {} {:#x}..{:#x}, unordered",
                    other.what,
                    verb(a.write),
                    a.start,
                    a.end,
                    operation.what,
                    verb(b.write),
                    b.start,
                    b.end
                ));
            }
        }
        self.seen.push((operation, accesses));
    }

    /// Forgets operations that the host knows to have finished. Valid only while nothing is queued, because earlier
    /// queued work has an older clock.
    pub fn settle(&mut self, host: &Clock) {
        self.seen.retain(|(other, _)| other.clock.of(other.actor) > host.of(other.actor));
    }

    /// Forgets accesses to memory that was freed.
    pub fn forget(&mut self, start: u64, end: u64) {
        for (_, accesses) in &mut self.seen {
            accesses.retain(|access| access.end <= start || end <= access.start);
        }
    }
}

/// Sorts the accesses, and merges adjacent ones of the same kind.
fn join(accesses: &mut Vec<Access>) {
    accesses.sort_unstable_by_key(|access| (access.write, access.start));
    accesses.dedup_by(|next, kept| {
        let touches = next.write == kept.write && next.start <= kept.end;
        if touches {
            kept.end = kept.end.max(next.end);
        }
        touches
    });
}

fn conflict(a: &[Access], b: &[Access]) -> Option<(Access, Access)> {
    a.iter().find_map(|a| {
        let clash = |b: &&Access| (a.write || b.write) && a.start < b.end && b.start < a.end;
        b.iter().find(clash).map(|b| (*a, *b))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operation(actor: usize, seen: &[&Operation]) -> Operation {
        let mut clock = Clock::default();
        seen.iter().for_each(|other| clock.merge(&other.clock));
        clock.tick(actor);
        Operation { actor, clock, what: format!("actor {actor}") }
    }

    #[test]
    fn two_writes_race_unless_one_saw_the_other() {
        let access = |write| vec![Access { start: 10, end: 20, write }];
        let first = operation(1, &[]);
        let ordered = operation(2, &[&first]);
        let unordered = operation(3, &[]);
        let mut checker = Checker::default();
        checker.note(first, access(true));
        checker.note(ordered, access(true));
        assert_eq!(checker.races, [""; 0]);
        checker.note(unordered.clone(), vec![Access { start: 20, end: 21, write: true }]);
        assert_eq!(checker.races, [""; 0]);
        checker.note(unordered, access(false));
        assert_eq!(checker.races.len(), 2);
    }

    #[test]
    fn neighbours_are_joined_and_kinds_kept_apart() {
        let of = |start, end, write| Access { start, end, write };
        let mut accesses =
            vec![of(8, 12, false), of(0, 4, false), of(4, 8, false), of(4, 8, true), of(13, 14, true)];
        join(&mut accesses);
        assert_eq!(accesses, [of(0, 12, false), of(4, 8, true), of(13, 14, true)]);
    }
}
