//! Two owners of one tier, as on two mounts whose locks do not reach each other: a simulated disk has no lock. No
//! acknowledged commit is lost without an error at one of them.
#![forbid(unsafe_code)]

use std::sync::{Arc, Mutex};

use super::*;
use crate::error::{Error, TierKind};

/// A call of an owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Call {
    Open,
    /// Writes all extents with the contents of this step.
    Put(u64),
    Commit(u64),
    Close,
    /// Ends without a close.
    Kill,
}

/// One owner and what it was told.
#[derive(Debug)]
struct User {
    tier: Option<Tier>,
    disk: Disk,
    /// Errors of its calls.
    errors: Vec<Error>,
    /// Its last acknowledged step.
    acknowledged: Option<u64>,
}

/// The steps that were acknowledged, in order, and each with the step on which it is based.
#[derive(Debug, Default)]
struct History {
    acknowledged: Vec<u64>,
    based_on: std::collections::HashMap<u64, Option<u64>>,
}

impl User {
    fn new(disk: &Disk) -> User {
        User { tier: None, disk: disk.clone(), errors: Vec::new(), acknowledged: None }
    }

    fn call(&mut self, call: Call, history: &Mutex<History>) {
        let outcome = match (call, &self.tier) {
            (Call::Open, _) => Tier::open(on_disks(std::slice::from_ref(&self.disk), &[])).map(|tier| {
                self.acknowledged = tier.opened().step;
                self.tier = Some(tier);
            }),
            (_, None) => Ok(()),
            (Call::Put(step), Some(tier)) => {
                (0..STREAMS.len()).try_for_each(|n| write(tier, n, seed_of(step, n), &ExtentPlacement::Auto))
            }
            (Call::Commit(step), Some(tier)) => {
                history.lock().unwrap().based_on.insert(step, self.acknowledged);
                tier.commit(step, &step.to_le_bytes()).map(|()| {
                    history.lock().unwrap().acknowledged.push(step);
                    self.acknowledged = Some(step);
                })
            }
            (Call::Close, Some(_)) => self.tier.take().map_or(Ok(()), |tier| tier.close(PATIENCE)),
            (Call::Kill, Some(_)) => {
                self.tier = None;
                Ok(())
            }
        };
        self.errors.extend(outcome.err());
    }
}

/// Opens the tier as a later process does. Every acknowledged step is in the history of what is found, or an owner got
/// an error. What is found is one whole step.
fn check(disk: &Disk, users: &[&User], history: &History, strict: bool, message: &str) {
    let tier = Tier::open(on_disks(std::slice::from_ref(disk), &[])).unwrap();
    let mut found = vec![tier.opened().step];
    if let Some(step) = found[0] {
        let whole = (0..STREAMS.len()).map(|n| read(&tier, n, seed_of(step, n)));
        let whole: Vec<_> = whole.collect();
        let intact = whole.iter().all(|read| *read == Ok(true));
        let told = users.iter().any(|user| !user.errors.is_empty());
        assert!(intact || !strict && told, "{message}: step {step} is mixed: {whole:?}");
    }
    while let Some(Some(step)) = found.last() {
        found.push(history.based_on.get(step).copied().flatten());
    }
    let lost: Vec<u64> =
        history.acknowledged.iter().copied().filter(|step| !found.contains(&Some(*step))).collect();
    let told = users.iter().any(|user| user.errors.iter().any(Error::is_fenced));
    assert!(lost.is_empty() || !strict && told, "{message}: found {found:?}, lost {lost:?} without an error");
    for error in users.iter().flat_map(|user| &user.errors) {
        assert!(error.is_fenced() || matches!(error, Error::Busy(_)), "{message}: {error}");
    }
}

/// All orders of two lists of calls.
fn merges(first: &[Call], second: &[Call]) -> Vec<Vec<(usize, Call)>> {
    match (first, second) {
        ([], rest) => vec![rest.iter().map(|call| (1, *call)).collect()],
        (rest, []) => vec![rest.iter().map(|call| (0, *call)).collect()],
        ([head, tail @ ..], [other, others @ ..]) => {
            let begin = |user, call, rest: Vec<Vec<_>>| {
                rest.into_iter().map(move |rest| [vec![(user, call)], rest].concat())
            };
            begin(0, *head, merges(tail, second)).chain(begin(1, *other, merges(first, others))).collect()
        }
    }
}

#[test]
fn in_every_order_of_the_calls_of_two_owners_no_acknowledged_commit_is_lost_or_mixed() {
    let _core = OneCore::take();
    let a = [Call::Open, Call::Put(1), Call::Commit(1), Call::Put(2), Call::Commit(2), Call::Close];
    let b = [Call::Open, Call::Put(11), Call::Commit(11), Call::Put(12), Call::Commit(12), Call::Kill];
    let (mut fenced, mut both) = (0, 0);
    for order in merges(&a, &b) {
        let (disk, history) = (Disk::default(), Mutex::default());
        let mut users = [User::new(&disk), User::new(&disk)];
        order.iter().for_each(|(user, call)| users[*user].call(*call, &history));
        let history = history.into_inner().unwrap();
        let errors = users.iter().flat_map(|user| &user.errors).filter(|error| error.is_fenced()).count();
        fenced += usize::from(errors > 0);
        both +=
            usize::from(history.acknowledged.iter().any(|step| *step < 10) && history.acknowledged.len() > 2);
        let [first, second] = &users;
        check(&disk, &[first, second], &history, true, &format!("{order:?}"));
    }
    assert!(fenced > 500 && both > 50, "{fenced} {both}");
}

/// The second owner comes after each write and each sync of the first one's commit, and also after the last one, when
/// the commit has not returned.
#[test]
fn an_owner_that_comes_in_the_middle_of_a_commit_takes_it_over_or_the_commit_fails() {
    let _core = OneCore::take();
    let histories: [&[Call]; 4] = [
        &[Call::Open],
        &[Call::Open, Call::Put(11), Call::Commit(11)],
        &[Call::Open, Call::Put(11), Call::Commit(11), Call::Put(12), Call::Commit(12)],
        &[Call::Open, Call::Put(11), Call::Commit(11), Call::Kill],
    ];
    let (mut refused, mut passed) = (0, 0);
    for (calls, rest) in histories.into_iter().flat_map(|calls| {
        [&[][..], &[Call::Put(13), Call::Commit(13)], &[Call::Kill]].map(|rest| (calls, rest))
    }) {
        for durability in [Durability::Process, Durability::Data] {
            for events in 1.. {
                let (disk, history) = (Disk::default(), Arc::new(Mutex::new(History::default())));
                let second = Arc::new(Mutex::new(User::new(&disk)));
                let mut first = User::new(&disk);
                let options = TierOptions { durability, ..on_disks(std::slice::from_ref(&disk), &[]) };
                first.tier = Some(Tier::open(options).unwrap());
                for call in [Call::Put(1), Call::Commit(1), Call::Put(2)] {
                    first.call(call, &history);
                }
                let (other, theirs) = (Arc::clone(&second), Arc::clone(&history));
                disk.after_events(events, move || {
                    calls.iter().for_each(|call| other.lock().unwrap().call(*call, &theirs));
                });
                first.call(Call::Commit(2), &history);
                let over = disk.is_hooked();
                first.call(Call::Put(3), &history);
                first.call(Call::Commit(3), &history);
                rest.iter().for_each(|call| second.lock().unwrap().call(*call, &history));
                drop(first.tier.take());
                second.lock().unwrap().tier = None;
                let second = second.lock().unwrap();
                refused += usize::from(first.errors.iter().any(Error::is_fenced));
                passed += usize::from(!over && history.lock().unwrap().acknowledged.contains(&2));
                let message =
                    format!("{durability:?}, {calls:?} after {events} events of the commit, then {rest:?}");
                check(&disk, &[&first, &second], &history.lock().unwrap(), false, &message);
                if over {
                    break;
                }
            }
        }
    }
    assert!(refused > 50, "{refused} {passed}");
}

/// A superblock that another owner wrote is never replaced, even if the record of the owner is the own one again: a
/// server may bring back an older file.
#[test]
fn a_superblock_of_another_owner_is_not_replaced_whatever_the_record_says() {
    let disk = Disk::default();
    let options = || on_disks(std::slice::from_ref(&disk), &[]);
    let tier = Tier::open(options()).unwrap();
    step(&tier, 1).unwrap();
    let record = disk.contents("disk-0/lock");
    let other = Tier::open(options()).unwrap();
    step(&other, 2).unwrap();
    disk.put("disk-0/lock", record);
    for number in [3, 4] {
        let error = tier.commit(number, &[]).unwrap_err();
        assert_eq!(error.tier_kind(), Some(TierKind::Fenced), "{error}");
        assert!(error.to_string().contains("superblock"), "{error}");
    }
    drop((tier, other));
    assert!(is_at(&Tier::open(options()).unwrap(), 2));
}

#[test]
fn an_owner_that_another_replaced_cannot_remove_the_tier() {
    let disk = Disk::default();
    let options = || on_disks(std::slice::from_ref(&disk), &[]);
    let tier = Tier::open(options()).unwrap();
    step(&tier, 1).unwrap();
    let other = Tier::open(options()).unwrap();
    step(&other, 2).unwrap();
    assert!(tier.destroy().unwrap_err().is_fenced());
    step(&other, 3).unwrap();
    drop(other);
    assert!(is_at(&Tier::open(options()).unwrap(), 3));
}

#[test]
fn an_owner_that_another_replaced_writes_no_data_and_fails_no_path() {
    let disk = Disk::default();
    let options = || on_disks(std::slice::from_ref(&disk), &[]);
    let tier = Tier::open(options()).unwrap();
    step(&tier, 1).unwrap();
    let _other = Tier::open(options()).unwrap();
    let before = disk.contents("disk-0/data");
    let error = write(&tier, 0, 5, &ExtentPlacement::Auto).unwrap_err();
    assert!(error.is_fenced() && error.to_string().contains("close this tier"), "{error}");
    // The file may have grown.
    let after = disk.contents("disk-0/data");
    assert!(after.starts_with(&before) && after[before.len()..].iter().all(|byte| *byte == 0));
    assert_eq!(tier.paths()[0].health, crate::tier::Health::Healthy);
    assert!(read(&tier, 0, seed_of(1, 0)).unwrap(), "committed data stays readable");
}
