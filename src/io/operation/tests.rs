//! Handles, outcomes and expiry of operations, without a driver.
#![forbid(unsafe_code)]

use super::*;

/// A sync in the kernel.
fn under_way(handle: u64, submitted: Instant, deadline: Option<Instant>) -> Operation {
    Operation {
        handle,
        action: Action::Sync,
        file: Arc::new(File::named("file", 7, None)),
        offset: 0,
        span: Span::empty(),
        piece: 512,
        lease: Lease::default(),
        submitted,
        deadline,
        started: true.into(),
        expired: false.into(),
    }
}

#[test]
fn handles_leave_the_top_bit_free_however_many_were_given() {
    let mut state = EngineState { generation: GENERATIONS - 1, ..EngineState::default() };
    let given: Vec<u64> =
        (0..3).map(|_| state.admit(|handle| under_way(handle, Instant::now(), None)).0).collect();
    assert!(given.iter().all(|handle| handle >> 63 == 0 && state.entry(*handle).is_ok()), "{given:x?}");
}

#[test]
fn a_device_is_free_again_although_the_outcome_was_taken_while_files_were_being_closed() {
    let shared = DriverLink::new(None);
    let now = Instant::now();
    let handle = shared.state.lock().admit(|handle| under_way(handle, now, Some(now))).0;
    drop(shared.expire(shared.state.lock(), now));
    shared.turns.fetch_add(2, Ordering::Release);
    drop(shared.expire(shared.state.lock(), now));
    assert_eq!(shared.state.lock().stuck.get(&7), Some(&1));
    // As in `DriverLink::finish` before it closes files; a waiter takes the outcome meanwhile.
    let op = shared.state.lock().entry(handle).unwrap().op.take().unwrap();
    assert!(matches!(shared.state.lock().take(handle), Ok(Some(Err(_)))));
    let ended = Ended::new(&op, Ok(1));
    shared.state.lock().end(ended, &shared.counters, &mut Vec::new());
    assert!(shared.state.lock().stuck.is_empty() && shared.state.lock().entries.is_empty());
}

#[test]
fn time_in_which_the_process_did_not_run_is_no_stall() {
    let io_timeout = Duration::from_secs(1);
    let shared = DriverLink::new(Some(io_timeout));
    let now = Instant::now();
    let long_ago = now - Duration::from_secs(10);
    let handle = shared.state.lock().admit(|handle| under_way(handle, long_ago, Some(long_ago))).0;
    // The check planned for `long_ago` happens now.
    shared.state.lock().watchdog = Watchdog::planned_for(long_ago);
    let (state, next, expired) = shared.expire(shared.state.lock(), now);
    drop(state);
    assert!(!expired && next.is_some_and(|next| next > now && next < now + io_timeout));
    assert!(shared.state.lock().stuck.is_empty());
    let later = now + Duration::from_millis(60);
    // The driver has not waited again yet.
    shared.turns.fetch_add(1, Ordering::Release);
    let (state, _, expired) = shared.expire(shared.state.lock(), later);
    drop(state);
    assert!(!expired);
    // The driver has waited again and found nothing.
    shared.turns.fetch_add(1, Ordering::Release);
    let (state, _, expired) = shared.expire(shared.state.lock(), later);
    drop(state);
    assert!(expired && matches!(shared.state.lock().take(handle), Ok(Some(Err(_)))));
}

#[test]
fn a_stop_before_the_first_check_is_no_stall() {
    let shared = DriverLink::new(Some(Duration::from_secs(1)));
    let now = Instant::now();
    let long_ago = now - Duration::from_secs(10);
    shared.state.lock().admit(|handle| under_way(handle, long_ago, None));
    let (state, next, expired) = shared.expire(shared.state.lock(), now);
    assert!(!expired && state.deadlines.is_empty() && next.is_some());
}

#[test]
fn a_completion_ends_a_stall_of_the_operations_beside_it() {
    let shared = DriverLink::new(Some(Duration::from_secs(1)));
    let now = Instant::now();
    let long_ago = now - Duration::from_secs(10);
    let given = now + Duration::from_secs(60);
    let stalls = shared.state.lock().admit(|handle| under_way(handle, long_ago, None)).0;
    shared.state.lock().admit(|handle| under_way(handle, long_ago, Some(given)));
    // The check planned for now happens in time.
    shared.state.lock().watchdog = Watchdog::planned_for(now);
    let (state, _, expired) = shared.expire(shared.state.lock(), now);
    assert!(!expired && state.deadlines.iter().any(|(_, handle)| *handle == stalls));
    drop(state);
    shared.progress.fetch_add(1, Ordering::Release);
    shared.turns.fetch_add(2, Ordering::Release);
    let (state, _, expired) = shared.expire(shared.state.lock(), now);
    let left: Vec<_> = state.deadlines.iter().map(|(deadline, _)| *deadline).collect();
    assert!(!expired && left == [given], "{left:?}");
}
