//! The backend of worker threads, started on demand: pread and pwrite for machines without io_uring, or requests to an
//! object store. Each direction has its own workers.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use super::backend::{Action, Backend, Completion, DIRECTIONS, Piece, Sleep, Wake};
use crate::sys::file;
use crate::sys::sync::{Lock, Signal};
use crate::sys::threads;

#[derive(Default)]
struct WorkQueue {
    state: Lock<QueueState>,
    work_added: [Signal; DIRECTIONS],
    completed: Signal,
}

#[derive(Default)]
struct QueueState {
    directions: [WorkerQueue; DIRECTIONS],
    done: Vec<Completion>,
    woken: bool,
    closing: bool,
}

#[derive(Default)]
struct WorkerQueue {
    pieces: VecDeque<Piece>,
    idle: usize,
    workers: usize,
}

/// Executes a piece on a worker thread.
pub(super) type Serve = Arc<dyn Fn(&Piece) -> Completion + Send + Sync>;

pub(super) struct Threads {
    queue: Arc<WorkQueue>,
    limit: usize,
    name: &'static str,
    serve: Serve,
}

impl Threads {
    /// Up to `limit` workers for each direction on the system's files.
    pub(super) fn new(limit: usize) -> Threads {
        Threads::serving("threads", limit, Arc::new(|piece| Completion::of(piece.token, run(piece))))
    }

    /// Up to `limit` workers for each direction that execute pieces with `serve`.
    pub(super) fn serving(name: &'static str, limit: usize, serve: Serve) -> Threads {
        Threads { queue: Arc::default(), limit: limit.max(1), name, serve }
    }

    /// Like [`Threads::new`], with a call to `before_write` before every write.
    #[cfg(test)]
    pub(super) fn with_hook(limit: usize, before_write: impl Fn() + Send + Sync + 'static) -> Threads {
        let serve = move |piece: &Piece| {
            if piece.action == Action::Write {
                before_write();
            }
            Completion::of(piece.token, run(piece))
        };
        Threads::serving("test", limit, Arc::new(serve))
    }

    fn start_worker(&self, direction: usize) -> io::Result<()> {
        let (queue, serve) = (Arc::clone(&self.queue), Arc::clone(&self.serve));
        threads::spawn_quiet("spillway-io-worker", move || queue.work(direction, &*serve))
    }
}

impl Backend for Threads {
    fn name(&self) -> &'static str {
        self.name
    }

    fn push(&mut self, piece: Piece) {
        let direction = piece.action.direction();
        let mut state = self.queue.state.lock();
        let queue = &mut state.directions[direction];
        queue.pieces.push_back(piece);
        if queue.pieces.len() > queue.idle
            && queue.workers < self.limit
            && self.start_worker(direction).is_ok()
        {
            queue.workers += 1;
        }
        self.queue.work_added[direction].notify_one();
    }

    fn wait(&mut self, sleep: Sleep, done: &mut Vec<Completion>) -> io::Result<()> {
        let mut state = self.queue.state.lock();
        for (direction, queue) in state.directions.iter_mut().enumerate() {
            if queue.workers == 0 && !queue.pieces.is_empty() {
                self.start_worker(direction)?;
                queue.workers += 1;
            }
        }
        while sleep.completions > 0 && state.done.is_empty() && !state.woken {
            let (locked, in_time) = self.queue.completed.wait_until(state, sleep.until);
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
        Arc::clone(&self.queue) as Arc<dyn Wake>
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.queue.state.lock().closing = true;
        self.queue.work_added.iter().for_each(Signal::notify_all);
    }
}

impl Wake for WorkQueue {
    fn wake(&self) {
        self.state.lock().woken = true;
        self.completed.notify_one();
    }
}

impl WorkQueue {
    fn work(&self, direction: usize, serve: &dyn Fn(&Piece) -> Completion) {
        let mut state = self.state.lock();
        loop {
            if let Some(piece) = state.directions[direction].pieces.pop_front() {
                drop(state);
                let completion = serve(&piece);
                // The file closes here, before any waiter learns that the operation finished.
                drop(piece);
                state = self.state.lock();
                state.done.push(completion);
                self.completed.notify_one();
            } else if state.closing {
                return;
            } else {
                state.directions[direction].idle += 1;
                state = self.work_added[direction].wait(state);
                state.directions[direction].idle -= 1;
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
        let held = Lock::new(held);
        let serve: Serve = Arc::new(move |piece| {
            if piece.action == Action::Write {
                held.lock().recv().unwrap();
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
