//! The protocol in simulated time: claims that race, owners that stop, and accesses that take long.
#![forbid(unsafe_code)]

use std::cell::RefCell;

use super::*;

/// The pages of a lock file that several mounts share, without any lock.
#[derive(Debug, Default)]
struct Pages(RefCell<[Vec<u8>; 2]>);

impl Register for Pages {
    fn read(&self, part: LockPage) -> io::Result<Option<Vec<u8>>> {
        Ok(Some(self.0.borrow()[part as usize].clone()))
    }

    fn write(&self, part: LockPage, bytes: &[u8; PAGE]) -> io::Result<()> {
        self.0.borrow_mut()[part as usize] = bytes.to_vec();
        Ok(())
    }
}

/// A process of another machine, which nobody here can prove dead.
fn elsewhere(claim: &str, leased: bool) -> OwnerRecord {
    let text = |text: &str| text.to_string();
    let holder = Holder {
        host: format!("node-{claim}"),
        machine: format!("machine-{claim}"),
        boot: text("boot"),
        namespace: text("pid"),
        pid: 7,
        started: 1,
    };
    OwnerRecord { claim: text(claim), held: true, leased, holder }
}

/// Claims at `now`; returns the outcome and the time that it took.
fn claim(register: &Pages, own: &OwnerRecord, now: Instant) -> (ClaimState, Duration) {
    let mut claiming = Claiming::new(own.clone(), TIMING, now);
    let mut waited = Duration::ZERO;
    loop {
        match claiming.step(register, &|| now + waited).unwrap() {
            ClaimState::Wait(time) => waited += time,
            other => return (other, waited),
        }
    }
}

#[test]
fn a_blank_or_returned_directory_is_claimed_after_the_settling_time_and_at_once_without_a_lease() {
    let (register, now) = (Pages::default(), Instant::now());
    let (first, second) = (elsewhere("a", true), elsewhere("b", true));
    assert_eq!(claim(&register, &first, now), (ClaimState::Owned, TIMING.settle));
    give_back(&register, &first).unwrap();
    assert_eq!(claim(&register, &second, now), (ClaimState::Owned, TIMING.settle));
    assert_eq!(
        whose(&register, &first).unwrap(),
        Whose::Other("process 7 on node-b, started at tick 1".to_string())
    );
    let register = Pages::default();
    assert_eq!(claim(&register, &elsewhere("a", false), now), (ClaimState::Owned, Duration::ZERO));
    assert_eq!(claim(&register, &elsewhere("b", false), now), (ClaimState::Owned, Duration::ZERO));
}

#[test]
fn a_lease_without_heartbeats_is_waited_out_and_one_with_heartbeats_is_respected() {
    let (register, now) = (Pages::default(), Instant::now());
    let (first, second) = (elsewhere("a", true), elsewhere("b", true));
    claim(&register, &first, now);
    assert_eq!(renew(&register, &first, 1).unwrap(), Whose::Own);
    let mut claiming = Claiming::new(second.clone(), TIMING, now);
    let mut waited = Duration::ZERO;
    let outcome = loop {
        match claiming.step(&register, &|| now + waited).unwrap() {
            ClaimState::Wait(time) => waited += time,
            other => break other,
        }
        if waited >= TIMING.period {
            renew(&register, &first, 2).unwrap();
        }
    };
    assert!(matches!(&outcome, ClaimState::Held(text) if text.contains("node-a")), "{outcome:?}");
    assert_eq!(claim(&register, &second, now), (ClaimState::Owned, TIMING.quiet + TIMING.settle));
    assert!(matches!(renew(&register, &first, 3).unwrap(), Whose::Other(_)));
    // A late heartbeat replaces no record.
    assert_eq!(whose(&register, &second).unwrap(), Whose::Own);
}

#[test]
fn an_owner_that_this_machine_knows_is_refused_or_replaced_without_a_wait() {
    let now = Instant::now();
    let me = (*Holder::this_process()).clone();
    let of =
        |claim: &str| OwnerRecord { claim: claim.to_string(), held: true, leased: true, holder: me.clone() };
    let register = Pages::default();
    claim(&register, &of("mine"), now);
    let next = of("next");
    hold("mine");
    assert!(matches!(claim(&register, &next, now), (ClaimState::Held(_), Duration::ZERO)));
    let_go("mine");
    assert_eq!(claim(&register, &next, now), (ClaimState::Owned, TIMING.settle));
}

#[test]
fn a_record_that_is_not_readable_is_waited_out() {
    let (register, now) = (Pages::default(), Instant::now());
    register.write(LockPage::Record, &[b'x'; PAGE]).unwrap();
    assert_eq!(
        claim(&register, &elsewhere("a", true), now),
        (ClaimState::Owned, TIMING.quiet + TIMING.settle)
    );
}

/// A process in simulated time: it claims, keeps its lease, and writes data while the lease is valid. It is the owner
/// from its first heartbeat.
struct Actor {
    own: OwnerRecord,
    state: State,
    /// When it acts next, in milliseconds.
    due: u64,
    /// When its last access ended.
    free: u64,
    /// End of the valid lease.
    valid: u64,
}

enum State {
    Claims(Box<Claiming>),
    /// The next access is that of the heartbeat, of the record, or a write of data.
    Beats,
    Reads {
        began: u64,
    },
    Writes,
    Over,
}

/// No write of data that began in a valid lease reaches the server after another process owns the directory, if it takes
/// at most this long.
const LONGEST_WRITE: u64 = 9_000;

fn below(random: &mut u64, limit: u64) -> u64 {
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    (*random >> 11) % limit
}

/// Time that an access or a pause takes: mostly short, sometimes longer than every limit of the protocol.
fn stall(random: &mut u64) -> u64 {
    const STALLS: [u64; 8] = [0, 0, 1, 30, 400, 1_200, 9_000, 40_000];
    let most = [3, 5, 6, 7, 8][below(random, 5) as usize];
    STALLS[below(random, most) as usize]
}

#[test]
fn of_processes_that_race_stop_and_resume_no_two_write_data_at_once() {
    let (mut owned, mut refused, mut fenced) = (0, 0, 0);
    for seed in 1..2_500_u64 {
        let (base, register) = (Instant::now(), Pages::default());
        let mut random = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let at = |time: u64| base + Duration::from_millis(time);
        let mut actors: Vec<Actor> = ["a", "b", "c"]
            .map(|name| {
                let own = elsewhere(name, true);
                let due = stall(&mut random);
                Actor {
                    state: State::Claims(Box::new(Claiming::new(own.clone(), TIMING, at(due)))),
                    own,
                    due,
                    free: due,
                    valid: 0,
                }
            })
            .into();
        let mut owner = None;
        for _ in 0..200 {
            let next = (0..actors.len()).filter(|n| !matches!(actors[*n].state, State::Over));
            let Some(turn) = next.min_by_key(|n| actors[*n].due) else { break };
            let (before, after) = (stall(&mut random), stall(&mut random));
            let actor = &mut actors[turn];
            // The access happens now; the process began it `before` earlier, and learns of its end `after` later.
            let (began, now) = (actor.due.saturating_sub(before).max(actor.free), actor.due);
            let mut wait = stall(&mut random);
            actor.state = match std::mem::replace(&mut actor.state, State::Over) {
                State::Claims(mut claiming) => {
                    let calls = RefCell::new(0);
                    let clock = || {
                        *calls.borrow_mut() += 1;
                        at(if *calls.borrow() == 1 { began } else { now + after })
                    };
                    match claiming.step(&register, &clock).unwrap() {
                        ClaimState::Owned => State::Beats,
                        ClaimState::Held(_) => {
                            refused += 1;
                            State::Over
                        }
                        ClaimState::Wait(time) => {
                            wait += time.as_millis() as u64;
                            State::Claims(claiming)
                        }
                    }
                }
                State::Beats => {
                    register.write(LockPage::Heartbeat, &heartbeat(&actor.own.claim, now).unwrap()).unwrap();
                    State::Reads { began }
                }
                State::Reads { began } => match whose(&register, &actor.own).unwrap() {
                    Whose::Own => {
                        if actor.valid == 0 {
                            owned += 1;
                            owner = Some(turn);
                        }
                        actor.valid = began + TIMING.valid.as_millis() as u64;
                        State::Writes
                    }
                    _ => {
                        fenced += 1;
                        State::Over
                    }
                },
                State::Writes if began < actor.valid && now - began <= LONGEST_WRITE => {
                    assert_eq!(owner, Some(turn), "seed {seed}: {} wrote at {now} ms", actor.own.claim);
                    if below(&mut random, 20) == 0 { State::Over } else { State::Beats }
                }
                State::Writes => State::Beats,
                State::Over => State::Over,
            };
            // The next access begins after this one has ended, and happens after it has begun.
            actor.free = now + after;
            actor.due = actor.free + wait + stall(&mut random);
            if matches!(actor.state, State::Over) && below(&mut random, 2) == 0 {
                // Another process starts.
                let own = OwnerRecord { claim: format!("{}+", actor.own.claim), ..actor.own.clone() };
                let claiming = Claiming::new(own.clone(), TIMING, at(actor.due));
                *actor = Actor {
                    own,
                    state: State::Claims(Box::new(claiming)),
                    due: actor.due,
                    free: actor.due,
                    valid: 0,
                };
            }
        }
    }
    assert!(owned > 1000 && refused > 1000 && fenced > 50, "{owned} {refused} {fenced}");
}

#[test]
fn machines_without_an_id_are_told_apart_by_their_starts() {
    let of = |machine: &str, boot: &str| Holder {
        host: "localhost".to_string(),
        machine: machine.to_string(),
        boot: boot.to_string(),
        namespace: "one".to_string(),
        pid: u32::MAX,
        started: 1,
    };
    let life = |theirs: Holder, mine: Holder| theirs.life(&mine, "p/lock/other");
    assert_eq!(life(of("", "monday"), of("", "tuesday")), Life::Unknown, "it may be another machine");
    assert_eq!(life(of("id", "monday"), of("id", "tuesday")), Life::Dead);
    assert_eq!(life(of("id", "monday"), of("", "tuesday")), Life::Unknown);
    assert_eq!(life(of("", "monday"), of("", "monday")), Life::Dead, "this machine has no such process");
}

#[test]
fn a_key_that_this_process_does_not_hold_is_of_a_dead_holder() {
    let me = Holder::this_process();
    assert_eq!(me.life(&me, "a key"), Life::Dead);
    hold("a key");
    assert_eq!(me.life(&me, "a key"), Life::Alive);
    let_go("a key");
    assert_eq!(me.life(&me, "a key"), Life::Dead);
}

#[test]
fn a_lock_file_names_an_owner_that_has_ended_only_if_this_machine_can_prove_it() {
    let me = Holder::this_process();
    let text = |holder: Holder| {
        let record = OwnerRecord { claim: "a lock's key".to_string(), held: true, leased: true, holder };
        String::from_utf8(record.page().unwrap().to_vec()).unwrap()
    };
    let ended = Holder { pid: i32::MAX as u32, ..(*me).clone() };
    assert!(owner_has_ended(&text(ended.clone())));
    assert!(!owner_has_ended(&text(Holder { machine: "other".to_string(), ..ended })));
    hold("a lock's key");
    assert!(!owner_has_ended(&text((*me).clone())));
    let_go("a lock's key");
    assert!(!owner_has_ended("") && !owner_has_ended("process 7\n"));
}
