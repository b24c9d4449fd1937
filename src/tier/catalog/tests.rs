//! Every order of writes, moves, reads, snapshots, commits and rollbacks of small tiers, compared with a disk that remembers
//! what each of its pages holds.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::tier::extent::PAGE;
use crate::tier::paths::{Allocated, AllocationRequest, ExtentPlacement, FoundCopies, Space};

/// Blocks of each extent; a version takes one page more, for the header of its chunk.
const BLOCKS: u64 = 2;

#[derive(Debug, Clone, Copy)]
enum Action {
    Write(u32),
    EndWrite {
        fails: bool,
    },
    Read(u32),
    EndRead,
    Snapshot(View),
    EndSnapshot,
    Pin(u32),
    Revert,
    EndPin,
    BeginCommit,
    BeginBeside,
    /// As `BeginBeside`, by a tiered update whose extent is 0.
    BeginByUpdate,
    /// The update has written what it had in memory.
    NameDeferred,
    Move(u32),
    Publish {
        known: bool,
    },
    GiveUpCommit,
    Rollback,
    Remove(u32),
}

/// A page of the disk: path and number.
type Page = (u32, u64);
/// What a page holds: extent and generation.
type Stored = (u32, u64);

#[derive(Debug, Clone)]
struct World {
    catalog: Catalog,
    disk: BTreeMap<Page, Stored>,
    writes: Vec<(Reservation, Vec<Chunk>)>,
    reads: Vec<Held>,
    snapshots: Vec<HeldContents<Held>>,
    /// Extents and what they held, in pins.
    pins: Vec<(u32, Arc<Shape>, Option<Arc<Contents>>)>,
    /// What a commit beside writes must name, by extent; `None` if another commit or none is in flight.
    named: Option<BTreeMap<u32, Former>>,
    /// The extents that there were at its begin.
    there: BTreeSet<u32>,
    /// Extents of which it must name what their writes install.
    awaited: BTreeSet<u32>,
    /// True while extent 0 is deferred.
    deferred: bool,
    /// The superblocks that a crash may find; the last known one first.
    durable: Vec<Superblock>,
    /// The commit before, at which other tiers may still be.
    previous: Option<Superblock>,
    step: u64,
    generation: u64,
}

impl World {
    /// Extents that were written and committed once, on two paths that hold `pages` pages.
    fn new(extents: u32, pages: u64, keeps_before: bool) -> World {
        let path = |number| {
            let space = Space::new(pages * PAGE, pages * PAGE, []).unwrap();
            PathState::present(format!("path-{number}"), false, space, FoundCopies::default(), 0)
        };
        let catalog = Catalog::new(Paths::new((0..2).map(path).collect()), None, keeps_before);
        let mut world = World {
            catalog,
            disk: BTreeMap::new(),
            writes: Vec::new(),
            reads: Vec::new(),
            snapshots: Vec::new(),
            pins: Vec::new(),
            named: None,
            there: BTreeSet::new(),
            awaited: BTreeSet::new(),
            deferred: false,
            durable: Vec::new(),
            previous: None,
            step: 0,
            generation: 0,
        };
        for number in 0..extents {
            let shape = Shape::new(&[BLOCKS * PAGE], PAGE).unwrap();
            assert_eq!(world.catalog.define(&format!("extent-{number}"), shape).unwrap(), number);
            assert!(world.act(Action::Write(number)) && world.act(Action::EndWrite { fails: false }));
        }
        assert!(world.act(Action::BeginCommit) && world.act(Action::Publish { known: true }));
        world
    }

    /// Takes an action; false if it is not possible now.
    fn act(&mut self, action: Action) -> bool {
        let committing = self.catalog.between_commits().is_err();
        let alone = committing && !self.catalog.commits_beside();
        let was_deferred = self.deferred;
        let possible = match action {
            Action::Write(extent) => self.begin_write(extent, &WriteOrigin::Caller),
            Action::EndWrite { fails } => self.end_write(fails),
            Action::Read(extent) => {
                self.catalog.begin_read(extent, None, |_| Ok(())).map(|held| self.reads.push(held)).is_ok()
            }
            Action::EndRead => {
                let read = self.reads.pop();
                read.iter().for_each(|held| self.catalog.end_read(&held.contents));
                read.is_some()
            }
            Action::Snapshot(view) => match self.catalog.snapshot(view) {
                Ok(snapshot) => {
                    assert_eq!((view, snapshot.lost.len()), (view, 0));
                    self.check_committed(&snapshot);
                    self.snapshots.push(snapshot);
                    true
                }
                Err(_) => false,
            },
            Action::EndSnapshot => {
                let snapshot = self.snapshots.pop();
                let all = snapshot.iter().flat_map(|snapshot| &snapshot.extents);
                all.for_each(|held| self.catalog.end_snapshot(&held.contents));
                snapshot.is_some()
            }
            Action::Pin(extent) => match (self.catalog.pin(extent), self.catalog.shape(extent)) {
                (Ok(contents), Ok(shape)) => {
                    self.pins.push((extent, shape, contents));
                    true
                }
                _ => false,
            },
            Action::Revert => self.pins.last().is_some_and(|(extent, _, contents)| {
                let reverted = self.catalog.revert(*extent, contents.as_ref()).is_ok();
                let now = self.catalog.get(*extent).ok().and_then(|extent| extent.current.as_ref());
                assert!(!reverted || same(now, contents.as_ref()));
                reverted
            }),
            Action::EndPin => {
                let pin = self.pins.pop();
                let held = pin.iter().filter_map(|(_, _, contents)| contents.as_ref());
                held.for_each(|contents| self.catalog.end_snapshot(contents));
                pin.is_some()
            }
            Action::BeginCommit => {
                let ready = !self.catalog.is_writing() && self.catalog.failed().is_none();
                let begun = ready && self.catalog.begin_commit().is_ok();
                self.previous.take_if(|_| begun);
                begun
            }
            Action::BeginBeside | Action::BeginByUpdate => {
                let deferred: &[u32] = if matches!(action, Action::BeginByUpdate) { &[0] } else { &[] };
                let ready = self.catalog.failed().is_none();
                let begun = ready && self.catalog.begin_commit_beside(deferred).is_ok();
                if begun {
                    self.previous = None;
                    self.deferred = !deferred.is_empty();
                    self.there = self.catalog.numbered().map(|(number, _)| number).collect();
                    let writing = |number: &u32| self.catalog.get(*number).is_ok_and(|extent| extent.writing);
                    let others = self.there.iter().filter(|number| !deferred.contains(number));
                    self.awaited = others.copied().filter(writing).collect();
                    self.named = Some(BTreeMap::new());
                    self.there.clone().into_iter().for_each(|number| self.name(number));
                }
                begun
            }
            Action::NameDeferred => {
                let writing = self.catalog.get(0).is_ok_and(|extent| extent.writing);
                let named = self.deferred && !writing && self.catalog.name_deferred(&[0]).is_ok();
                if named {
                    self.deferred = false;
                    self.name(0);
                }
                named
            }
            Action::Move(extent) if alone => match self.catalog.current(extent) {
                Ok(contents) => {
                    self.begin_write(extent, &WriteOrigin::Commit(contents)) && self.end_write(false)
                }
                Err(_) => false,
            },
            Action::Publish { known } if committing => {
                assert_eq!(self.catalog.awaits(), !self.awaited.is_empty());
                let may = !self.catalog.awaits() && !self.deferred && self.catalog.named_failure().is_none();
                if may {
                    self.publish(known);
                }
                may
            }
            Action::GiveUpCommit if committing => {
                self.catalog.end_commit();
                (self.named, self.awaited, self.deferred) = (None, BTreeSet::new(), false);
                true
            }
            Action::Move(_) | Action::Publish { .. } | Action::GiveUpCommit => false,
            Action::Rollback if !self.catalog.is_writing() && self.catalog.rollback().is_ok() => {
                let unchanged = |extent: &Extent| extent.is_committed() && !extent.removed;
                assert!(self.catalog.numbered().all(|(_, extent)| unchanged(extent)));
                true
            }
            Action::Rollback => false,
            Action::Remove(extent) => self.catalog.remove(extent).is_ok(),
        };
        let own = matches!(action, Action::Remove(0)) && was_deferred;
        let only_between = matches!(action, Action::Rollback | Action::Remove(_)) && !own;
        let not_alone = only_between || matches!(action, Action::Write(_) | Action::Revert);
        assert!(!(possible && committing && only_between), "{action:?} during a commit");
        assert!(!(possible && alone && not_alone), "{action:?} during a commit that excludes writes");
        possible
    }

    /// The commit beside writes must name what the extent holds now, unless it waits for a write.
    fn name(&mut self, number: u32) {
        if self.awaited.contains(&number) || (self.deferred && number == 0) {
            return;
        }
        let Ok(Extent { shape, current: Some(contents), .. }) = self.catalog.get(number) else { return };
        let held = Former { shape: Arc::clone(shape), contents: Arc::clone(contents) };
        self.named.iter_mut().for_each(|named| drop(named.insert(number, held.clone())));
    }

    /// A snapshot has exactly the versions of the last commit that is known to have succeeded.
    fn check_committed(&self, snapshot: &HeldContents<Held>) {
        let named = (0..).zip(&self.durable[0].extents).filter_map(|(number, extent)| {
            let ExtentRecord { version: Some(version), .. } = extent.as_ref()? else { return None };
            Some((number, version.generation))
        });
        let held = snapshot.extents.iter().map(|held| (held.subject.extent, held.subject.generation));
        assert!(named.eq(held), "the snapshot is of another commit");
        assert_eq!(snapshot.step, self.durable[0].step);
    }

    fn begin_write(&mut self, extent: u32, origin: &WriteOrigin) -> bool {
        let Ok(reserved) = self.catalog.begin_write(extent, origin) else { return false };
        assert!(self.catalog.begin_write(extent, origin).is_err(), "two writers");
        assert!(self.reads.iter().all(|held| {
            held.subject.extent != extent
                || self.catalog.current(extent).unwrap().number != held.contents.number
        }));
        if !reserved.moves {
            assert!(reserved.subject.generation > self.generation, "a generation is used twice");
            self.generation = reserved.subject.generation;
        }
        let (shape, excluded) = (Arc::clone(&reserved.subject.shape), [false; 2]);
        let request =
            AllocationRequest { shape: &shape, first: 0, count: shape.blocks(), excluded: &excluded };
        let placement = ExtentPlacement::Striped(vec![(0, 1), (1, 1)]);
        match self.catalog.paths_mut().allocate(request, &placement, reserved.home) {
            Ok(Allocated::Chunks(chunks)) => {
                for page in pages(&shape, &chunks) {
                    self.disk.insert(page, (extent, reserved.subject.generation));
                }
                self.writes.push((reserved, chunks));
                true
            }
            Ok(Allocated::Grow { .. }) => panic!("the files have their full length"),
            Err(error) => {
                self.catalog.fail(&reserved, &error);
                false
            }
        }
    }

    fn end_write(&mut self, fails: bool) -> bool {
        let Some((reserved, chunks)) = self.writes.pop() else { return false };
        if fails {
            self.catalog.paths_mut().free_chunks(&reserved.subject.shape, &chunks);
            self.catalog.fail(&reserved, &Error::Busy("a device".to_string()));
            assert!(self.catalog.failed().is_some());
        } else {
            let generation = self.catalog.install(&reserved, chunks, Arc::from(Vec::new())).unwrap();
            assert_eq!(generation, reserved.subject.generation);
        }
        if self.awaited.remove(&reserved.subject.extent) {
            self.name(reserved.subject.extent);
        }
        true
    }

    fn publish(&mut self, known: bool) {
        self.step += 1;
        let frame = Superblock {
            tier: 1,
            sequence: 0,
            session: 1,
            step: Some(self.step),
            path: 0,
            block_bytes: PAGE,
            job: "run".to_string(),
            host: "node".to_string(),
            rank: 0,
            world: 1,
            generation: 0,
            payload: Vec::new(),
            paths: Vec::new(),
            extents: Vec::new(),
        };
        let superblock = self.catalog.superblock(frame, true, |_| 0);
        superblock.encode().expect("an open accepts it");
        if let Some(named) = self.named.take() {
            let found = (0..)
                .zip(&superblock.extents)
                .filter_map(|(number, extent)| Some((number, extent.as_ref()?.version.as_ref()?.generation)));
            let listed =
                (0..).zip(&superblock.extents).filter_map(|(number, extent)| extent.as_ref().map(|_| number));
            assert!(listed.clone().all(|number: u32| self.there.contains(&number)), "it was defined later");
            let removed = |number: u32| self.catalog.get(number).unwrap().removed;
            let wanted = named.iter().filter(|(number, _)| !removed(**number));
            let wanted = wanted.map(|(number, held)| (*number, held.contents.version.generation));
            assert!(found.eq(wanted), "the commit names what it did not find at its begin");
        }
        assert!(self.durable.iter().all(|older| older.sequence < superblock.sequence));
        self.catalog.use_sequence(&superblock);
        if known {
            let beside = self.catalog.commits_beside() && self.catalog.keeps_before;
            self.previous = self.durable.drain(..).next().filter(|_| beside);
            self.catalog.committed(self.step, &[]);
        } else {
            self.catalog.in_doubt();
        }
        self.durable.push(superblock);
        self.catalog.end_commit();
    }

    /// Everything that must stay as it is on the disk.
    fn wanted(&self) -> Vec<(Stored, Vec<Page>)> {
        let mut wanted = Vec::new();
        let mut want = |extent: u32, shape: &Shape, version: &Version| {
            wanted.push(((extent, version.generation), pages(shape, &version.chunks)));
        };
        for superblock in self.durable.iter().chain(&self.previous) {
            for (number, extent) in (0..).zip(&superblock.extents) {
                let Some(ExtentRecord { shape, version: Some(version), .. }) = extent else { continue };
                want(number, shape, version);
            }
        }
        let held = self.snapshots.iter().flat_map(|snapshot| &snapshot.extents).chain(&self.reads);
        held.for_each(|held| want(held.subject.extent, &held.subject.shape, held.contents.version()));
        for (number, held) in self.named.iter().flatten() {
            want(*number, &held.shape, held.contents.version());
        }
        for (extent, shape, contents) in &self.pins {
            contents.iter().for_each(|contents| want(*extent, shape, contents.version()));
        }
        for (number, extent) in self.catalog.numbered() {
            extent.current.iter().for_each(|contents| want(number, &extent.shape, &contents.version));
        }
        for (reserved, chunks) in &self.writes {
            let version = Version { generation: reserved.subject.generation, chunks: chunks.clone() };
            want(reserved.subject.extent, &reserved.subject.shape, &version);
        }
        wanted
    }

    fn check(&self) {
        let wanted = self.wanted();
        for (stored, pages) in &wanted {
            assert!(pages.iter().all(|page| self.disk[page] == *stored), "{stored:?} was overwritten");
        }
        let kept: BTreeSet<Page> = wanted.into_iter().flat_map(|(_, pages)| pages).collect();
        let space = |path: &PathState| (path.space().end() - path.space().free()) / PAGE;
        let used: u64 = self.catalog.paths().iter().map(space).sum();
        let exact = self.durable.len() == 1;
        assert!(used >= kept.len() as u64, "space in use is free");
        assert!(!exact || used == kept.len() as u64, "space is lost");
        for snapshot in &self.snapshots {
            assert!(snapshot.step.is_some_and(|step| step <= self.step));
        }
    }
}

/// The pages that chunks take.
fn pages(shape: &Shape, chunks: &[Chunk]) -> Vec<Page> {
    let of = |chunk: &Chunk| {
        let (path, first) = (chunk.path, chunk.offset / PAGE);
        (first..first + chunk.stored(shape) / PAGE).map(move |page| (path, page))
    };
    chunks.iter().flat_map(of).collect()
}

/// Takes every sequence of `left` actions, and checks the world after each. Returns the number of states.
fn explore(world: &World, actions: &[Action], left: usize) -> u64 {
    world.check();
    if left == 0 {
        return 1;
    }
    let next = actions.iter().filter_map(|action| {
        let mut next = world.clone();
        next.act(*action).then_some(next)
    });
    1 + next.map(|next| explore(&next, actions, left - 1)).sum::<u64>()
}

fn actions(extents: u32) -> Vec<Action> {
    use Action::*;
    let mut actions = vec![
        EndWrite { fails: false },
        EndWrite { fails: true },
        EndRead,
        Snapshot(View::Committed),
        EndSnapshot,
        Revert,
        EndPin,
        BeginCommit,
        BeginBeside,
        BeginByUpdate,
        NameDeferred,
        Publish { known: true },
        Publish { known: false },
        GiveUpCommit,
        Rollback,
    ];
    for extent in 0..extents {
        actions.extend([Write(extent), Read(extent), Move(extent), Remove(extent), Pin(extent)]);
    }
    actions
}

#[test]
fn every_order_of_actions_on_one_extent_keeps_what_a_crash_or_a_reader_needs() {
    let states = explore(&World::new(1, 12, false), &actions(1), 6);
    assert!(states > 10_000, "{states}");
}

#[test]
fn every_order_of_actions_on_two_extents_keeps_what_a_crash_or_a_reader_needs() {
    let states = explore(&World::new(2, 12, true), &actions(2), 5);
    assert!(states > 10_000, "{states}");
}

/// The same where most writes find no space.
#[test]
fn every_order_of_actions_on_a_full_disk_keeps_what_a_crash_or_a_reader_needs() {
    explore(&World::new(2, 7, false), &actions(2), 5);
}

#[test]
fn long_random_runs_keep_what_a_crash_or_a_reader_needs() {
    let (mut random, actions) = (fastrand::Rng::with_seed(3), actions(3));
    for keeps_before in [false, true].into_iter().cycle().take(20) {
        let mut world = World::new(3, 24, keeps_before);
        for _ in 0..500 {
            let before = world.clone();
            if !world.act(actions[random.usize(..actions.len())]) {
                world = before;
            }
            world.check();
        }
    }
}

/// A sync of a path fails: what was written there before, or is being written, is not durable, whichever commit names
/// it. Later writes and committed contents are.
#[test]
fn what_a_failed_sync_has_left_is_not_durable_in_any_commit() {
    let mut world = World::new(3, 24, false);
    let unsynced = |world: &World| -> Vec<u32> {
        world.catalog.unsynced().into_iter().map(|(number, _)| number).collect()
    };
    assert!(world.act(Action::Write(0)) && world.act(Action::EndWrite { fails: false }));
    assert!(world.act(Action::Write(1)) && world.act(Action::BeginBeside));
    world.catalog.sync_failed(0, &Error::Busy("a device".to_string()));
    assert!(world.act(Action::EndWrite { fails: false }));
    assert_eq!(unsynced(&world), [0, 1]);
    assert!(world.act(Action::Write(0)) && world.act(Action::EndWrite { fails: false }));
    assert_eq!(unsynced(&world), [0, 1], "the commit names what was there before");
    assert!(world.act(Action::GiveUpCommit));
    assert_eq!(unsynced(&world), [1]);
    assert!(world.act(Action::BeginCommit) && world.act(Action::Move(1)));
    assert!(unsynced(&world).is_empty());
    assert!(world.act(Action::Publish { known: true }));
    world.check();
}

#[test]
fn no_definition_removal_or_description_looks_at_the_other_extents() {
    const COUNT: u32 = 500;
    let mut catalog = Catalog::new(Paths::new(Vec::new()), None, false);
    let shape = || Shape::new(&[1], PAGE).unwrap();
    let defined = |catalog: &mut Catalog, numbers: &mut dyn Iterator<Item = u32>, word: &str| {
        numbers.for_each(|n| assert_eq!(catalog.define(&format!("{word}-{n}"), shape()).unwrap(), n));
    };
    defined(&mut catalog, &mut (0..COUNT), "first");
    for number in (0..COUNT).filter(|number| number % 3 > 0) {
        catalog.remove(number).unwrap();
    }
    assert_eq!(catalog.looked.take(), 0);
    catalog.begin_commit().unwrap();
    catalog.committed(1, &[]);
    catalog.end_commit();
    catalog.looked.set(0);
    for (index, number) in (0..COUNT).step_by(3).enumerate() {
        assert_eq!(catalog.nth_extent(index).unwrap().number, number);
    }
    assert!(catalog.nth_extent(COUNT.div_ceil(3) as usize).is_none());
    assert_eq!(catalog.looked.take(), 0);
    // The lowest unused numbers come first.
    defined(&mut catalog, &mut (0..COUNT).filter(|number| number % 3 > 0), "second");
    (COUNT / 2..COUNT).filter(|number| number % 3 > 0).for_each(|number| catalog.undefine(number));
    [7, 1].into_iter().for_each(|number| catalog.undefine(number));
    let again = [1, 7].into_iter().chain((COUNT / 2..COUNT).filter(|number| number % 3 > 0));
    defined(&mut catalog, &mut again.chain([COUNT]), "third");
    assert_eq!(catalog.nth_extent(COUNT as usize).unwrap().number, COUNT);
    assert_eq!(catalog.looked.take(), 0);
}
