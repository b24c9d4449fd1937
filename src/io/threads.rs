//! The backend of worker threads, started as they are needed: pread and pwrite for machines without io_uring, requests to
//! an object store.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::backend::{Action, Backend, Completion, Piece, Sleep, Wake, doze};
use crate::sys::file;
use crate::sys::threads;

#[derive(Default)]
struct Desk {
    state: Mutex<State>,
    for_work: Condvar,
    news: Condvar,
}

#[derive(Default)]
struct State {
    pieces: VecDeque<Piece>,
    done: Vec<Completion>,
    idle: usize,
    workers: usize,
    woken: bool,
    closing: bool,
}

/// What a worker does with a piece.
pub(super) type Serve = Arc<dyn Fn(&Piece) -> Completion + Send + Sync>;

pub(super) struct Threads {
    desk: Arc<Desk>,
    limit: usize,
    name: &'static str,
    serve: Serve,
}

impl Threads {
    /// Up to `limit` workers on the system's files.
    pub(super) fn new(limit: usize) -> Threads {
        Threads::serving("threads", limit, Arc::new(|piece| Completion::of(piece.token, run(piece))))
    }

    /// Up to `limit` workers that serve pieces this way.
    pub(super) fn serving(name: &'static str, limit: usize, serve: Serve) -> Threads {
        Threads { desk: Arc::default(), limit: limit.max(1), name, serve }
    }

    fn start_worker(&self) -> io::Result<()> {
        let (desk, serve) = (Arc::clone(&self.desk), Arc::clone(&self.serve));
        threads::spawn_quiet("spillway-io-worker", move || desk.work(&*serve))
    }
}

impl Backend for Threads {
    fn name(&self) -> &'static str {
        self.name
    }

    fn push(&mut self, piece: Piece) {
        let mut state = self.desk.lock();
        state.pieces.push_back(piece);
        if state.pieces.len() > state.idle && state.workers < self.limit && self.start_worker().is_ok() {
            state.workers += 1;
        }
        self.desk.for_work.notify_one();
    }

    fn wait(&mut self, sleep: Sleep, done: &mut Vec<Completion>) -> io::Result<()> {
        let mut state = self.desk.lock();
        if state.workers == 0 && !state.pieces.is_empty() {
            self.start_worker()?;
            state.workers += 1;
        }
        while sleep.completions > 0 && state.done.is_empty() && !state.woken {
            let (locked, in_time) = doze(&self.desk.news, state, sleep.until);
            state = locked;
            if !in_time {
                break;
            }
        }
        state.woken = false;
        done.append(&mut state.done);
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Wake> {
        Arc::clone(&self.desk) as Arc<dyn Wake>
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.desk.lock().closing = true;
        self.desk.for_work.notify_all();
    }
}

impl Wake for Desk {
    fn wake(&self) {
        self.lock().woken = true;
        self.news.notify_one();
    }
}

impl Desk {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self, serve: &dyn Fn(&Piece) -> Completion) {
        let mut state = self.lock();
        loop {
            if let Some(piece) = state.pieces.pop_front() {
                drop(state);
                let completion = serve(&piece);
                // The file closes here, before anybody is told that the operation is over.
                drop(piece);
                state = self.lock();
                state.done.push(completion);
                self.news.notify_one();
            } else if state.closing {
                return;
            } else {
                state.idle += 1;
                state = self.for_work.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.idle -= 1;
            }
        }
    }
}

fn run(piece: &Piece) -> i32 {
    let fd = piece.file.fd(piece.route);
    match piece.action {
        Action::Read => file::read_at(fd, piece.span, piece.offset),
        Action::Write => file::write_at(fd, piece.span, piece.offset),
        Action::Sync => file::sync_data(fd),
    }
}
