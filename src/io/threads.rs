//! The backend of worker threads, started on demand: pread and pwrite for machines without io_uring, or requests to an
//! object store. Each lane has its own workers.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::backend::{Action, Backend, Completion, LANES, Piece, Sleep, Wake, doze};
use crate::sys::file;
use crate::sys::threads;

#[derive(Default)]
struct Desk {
    state: Mutex<State>,
    for_work: [Condvar; LANES],
    news: Condvar,
}

#[derive(Default)]
struct State {
    lines: [Line; LANES],
    done: Vec<Completion>,
    woken: bool,
    closing: bool,
}

#[derive(Default)]
struct Line {
    pieces: VecDeque<Piece>,
    idle: usize,
    workers: usize,
}

/// Executes a piece on a worker thread.
pub(super) type Serve = Arc<dyn Fn(&Piece) -> Completion + Send + Sync>;

pub(super) struct Threads {
    desk: Arc<Desk>,
    limit: usize,
    name: &'static str,
    serve: Serve,
}

impl Threads {
    /// Up to `limit` workers for each lane on the system's files.
    pub(super) fn new(limit: usize) -> Threads {
        Threads::serving("threads", limit, Arc::new(|piece| Completion::of(piece.token, run(piece))))
    }

    /// Up to `limit` workers for each lane that execute pieces with `serve`.
    pub(super) fn serving(name: &'static str, limit: usize, serve: Serve) -> Threads {
        Threads { desk: Arc::default(), limit: limit.max(1), name, serve }
    }

    /// Like [`Threads::new`], with a call to `before_write` before every write.
    #[cfg(test)]
    pub(super) fn held(limit: usize, before_write: impl Fn() + Send + Sync + 'static) -> Threads {
        let serve = move |piece: &Piece| {
            if piece.action == Action::Write {
                before_write();
            }
            Completion::of(piece.token, run(piece))
        };
        Threads::serving("test", limit, Arc::new(serve))
    }

    fn start_worker(&self, lane: usize) -> io::Result<()> {
        let (desk, serve) = (Arc::clone(&self.desk), Arc::clone(&self.serve));
        threads::spawn_quiet("spillway-io-worker", move || desk.work(lane, &*serve))
    }
}

impl Backend for Threads {
    fn name(&self) -> &'static str {
        self.name
    }

    fn push(&mut self, piece: Piece) {
        let lane = piece.action.lane();
        let mut state = self.desk.lock();
        let line = &mut state.lines[lane];
        line.pieces.push_back(piece);
        if line.pieces.len() > line.idle && line.workers < self.limit && self.start_worker(lane).is_ok() {
            line.workers += 1;
        }
        self.desk.for_work[lane].notify_one();
    }

    fn wait(&mut self, sleep: Sleep, done: &mut Vec<Completion>) -> io::Result<()> {
        let mut state = self.desk.lock();
        for (lane, line) in state.lines.iter_mut().enumerate() {
            if line.workers == 0 && !line.pieces.is_empty() {
                self.start_worker(lane)?;
                line.workers += 1;
            }
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
        self.desk.for_work.iter().for_each(Condvar::notify_all);
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

    fn work(&self, lane: usize, serve: &dyn Fn(&Piece) -> Completion) {
        let mut state = self.lock();
        loop {
            if let Some(piece) = state.lines[lane].pieces.pop_front() {
                drop(state);
                let completion = serve(&piece);
                // The file closes here, before any waiter learns that the operation finished.
                drop(piece);
                state = self.lock();
                state.done.push(completion);
                self.news.notify_one();
            } else if state.closing {
                return;
            } else {
                state.lines[lane].idle += 1;
                state = self.for_work[lane].wait(state).unwrap_or_else(PoisonError::into_inner);
                state.lines[lane].idle -= 1;
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
        Action::Allocate { bytes } => file::allocate_at(fd, piece.offset, bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::file::File;
    use crate::io::plan::Route;
    use crate::sys::span::Span;
    use std::sync::mpsc;

    #[test]
    fn reads_do_not_wait_for_the_workers_of_writes() {
        let (release, held) = mpsc::channel::<()>();
        let held = Mutex::new(held);
        let serve: Serve = Arc::new(move |piece| {
            if piece.action == Action::Write {
                held.lock().unwrap().recv().unwrap();
            }
            Completion::of(piece.token, 0)
        });
        let mut backend = Threads::serving("test", 1, serve);
        for (token, action) in [(1, Action::Write), (2, Action::Write), (3, Action::Read)] {
            let file = Arc::new(File::named("file", 1, None));
            let (route, span) = (Route::Buffered, Span::empty());
            backend.push(Piece {
                token,
                action,
                file,
                route,
                offset: 0,
                span,
                region: None,
                busy_file: false,
            });
        }
        let mut done = Vec::new();
        for sent in 0..3 {
            while done.len() <= sent {
                backend.wait(Sleep { completions: 1, until: None }, &mut done).unwrap();
            }
            release.send(()).unwrap();
        }
        assert_eq!(done.iter().map(|completion| completion.token).collect::<Vec<_>>(), [3, 1, 2]);
    }
}
