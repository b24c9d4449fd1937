//! Copies between the framework's device memory and pinned host memory: gradients to the host, parameters to the
//! device.
//!
//! A call adds a copy to the queue of its direction. The thread of the direction gives it to the driver (see `lane`),
//! where it waits on the device for the framework's event or stream.
//!
//! Invariants:
//! - A call makes no call of the driver but the mark of what its copy waits for, which is one operation on the framework's
//!   stream, or two behind an event. It waits for no copy, and not for the registration of memory.
//! - Neither direction waits for the other one.
//! - A copy holds its pinned memory until the copy's event is done.
//! - No copy uses pageable memory.
//! - No lock is held during a wait, nor during a call of the driver.

use std::sync::Arc;
use std::time::Duration;

pub use super::copy::{After, Copy, Direction};
use super::device::Device;
use super::kernels::Kernels;
use super::lane::Lane;
use super::marks::Marks;
use super::stream::{ForeignStream, GpuEvent};
use super::tickets::{Request, Tickets, in_flight};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::sys::sync::{Lock, Signal, deadline_after};
use crate::sys::threads;

/// The copies of one device. Thread-safe.
#[derive(Debug)]
pub struct Transfers {
    device: Arc<Device>,
    marks: Marks,
    shared: Arc<TransferQueues>,
    threads: Arc<Threads>,
}

/// What the callers and the threads share.
#[derive(Debug)]
struct TransferQueues {
    tickets: Tickets,
    /// Taken by the thread of the direction.
    lanes: [Lock<Option<Lane>>; 2],
    /// The code of the casts stays loaded until they are over.
    _kernels: Arc<Kernels>,
}

/// The threads of both directions. Apart from [`TransferQueues`], so that a thread lets go of that before it counts as ended.
#[derive(Debug, Default)]
struct Threads {
    run: Lock<[bool; 2]>,
    ended: Signal,
}

impl Transfers {
    /// Prepares copies in chunks of `chunk_bytes` bytes on the link.
    pub fn new(device: &Arc<Device>, kernels: &Arc<Kernels>, chunk_bytes: u64) -> Result<Transfers> {
        let chunk_elements = (chunk_bytes / Dtype::F32.size() as u64).max(1);
        let lane = |direction| -> Result<Lock<Option<Lane>>> {
            Ok(Lock::new(Some(Lane::new(device, kernels, direction, chunk_elements)?)))
        };
        let shared = TransferQueues {
            tickets: Tickets::default(),
            lanes: [lane(Direction::D2h)?, lane(Direction::H2d)?],
            _kernels: Arc::clone(kernels),
        };
        Ok(Transfers {
            device: Arc::clone(device),
            marks: Marks::new(device),
            shared: Arc::new(shared),
            threads: Arc::default(),
        })
    }

    /// Adds a copy to the queue of its direction, and returns its ticket.
    pub fn start(&self, copy: &Copy) -> Result<u64> {
        self.add(copy, None)
    }

    /// Runs a copy, blocks until it is done, and returns its seconds on the device.
    pub fn measure(&self, copy: &Copy) -> Result<f64> {
        let [begun, done] = [GpuEvent::timing(&self.device)?, GpuEvent::timing(&self.device)?].map(Arc::new);
        let ticket = self.add(copy, Some([Arc::clone(&begun), Arc::clone(&done)]))?;
        self.wait(ticket, None)?;
        begun.seconds_to(&done)
    }

    fn add(&self, copy: &Copy, timed: Option<[Arc<GpuEvent>; 2]>) -> Result<u64> {
        copy.check()?;
        self.device.usable()?;
        let mark = self.mark(copy.after)?;
        self.start_thread(copy.direction)?;
        self.shared.tickets.add(Request { copy: copy.clone(), mark, timed, lease: copy.host.lease() })
    }

    /// Marks what a copy waits for. Now, and not when the thread takes the copy: the framework may queue more work then,
    /// and that work may wait for this process.
    fn mark(&self, after: After) -> Result<Option<GpuEvent>> {
        if after == After::Now {
            return Ok(None);
        }
        let mark = GpuEvent::new(&self.device)?;
        match after {
            After::Now => {}
            After::Event(event) => self.marks.behind(event, &mark)?,
            After::Stream(stream) => stream.record(&mark)?,
        }
        Ok(Some(mark))
    }

    fn start_thread(&self, direction: Direction) -> Result<()> {
        let place = direction as usize;
        let mut run = self.threads.run.lock();
        if run[place] {
            return Ok(());
        }
        let (shared, threads) = (Arc::clone(&self.shared), Arc::clone(&self.threads));
        let name = ["spillway-d2h", "spillway-h2d"][place];
        threads::spawn_quiet(name, move || {
            let lane = shared.lanes[place].lock().take();
            if let Some(mut lane) = lane {
                lane.serve(&shared.tickets);
            }
            drop(shared);
            threads.run.lock()[place] = false;
            threads.ended.notify_all();
        })
        .map_err(|error| Error::system("starting the thread of the copies of a direction", &error))?;
        run[place] = true;
        Ok(())
    }

    /// Blocks the calling thread until a copy is done, for at most `timeout`. Other threads may use the object
    /// meanwhile. Errors: `Timeout`, or the failure of the copy.
    pub fn wait(&self, ticket: u64, timeout: Option<Duration>) -> Result<()> {
        self.device.usable()?;
        let until = deadline_after(timeout);
        let Some(event) = self.shared.tickets.given(ticket, until)? else { return Ok(()) };
        if event.wait_until(until)? { Ok(()) } else { Err(in_flight(ticket)) }
    }

    /// As [`Transfers::wait`], for at most the device's patience.
    pub fn wait_patiently(&self, ticket: u64) -> Result<()> {
        self.device.usable()?;
        let until = self.device.patience();
        match self.shared.tickets.given(ticket, Some(until)) {
            Ok(None) => Ok(()),
            Ok(Some(event)) => event.wait(),
            Err(Error::Timeout(_)) => Err(self.gave_up()),
            Err(error) => Err(error),
        }
    }

    /// Makes later work on a framework stream wait for a copy. Blocks until the driver has the copy, for at most the
    /// device's patience: a stream cannot wait for what the driver does not have.
    pub fn stream_wait(&self, ticket: u64, stream: ForeignStream) -> Result<()> {
        self.device.usable()?;
        let given = self.shared.tickets.given(ticket, Some(self.device.patience()));
        given?.map_or(Ok(()), |event| stream.wait(&event))
    }

    /// Blocks until all copies are done. Errors: `Timeout` after the device's patience.
    pub fn finish(&self) -> Result<()> {
        self.device.usable()?;
        let last = self.shared.tickets.all_given(Some(self.device.patience()));
        last.ok_or_else(|| self.gave_up())?.iter().try_for_each(GpuEvent::wait)?;
        for direction in [Direction::D2h, Direction::H2d] {
            self.shared.tickets.forget_done(direction.streams());
        }
        Ok(())
    }

    fn gave_up(&self) -> Error {
        self.device.waited(false);
        self.device.hangs()
    }
}

impl Drop for Transfers {
    fn drop(&mut self) {
        // A forked child has no such threads, and their locks may stay held.
        if !self.device.is_own() {
            return;
        }
        self.shared.tickets.close();
        let until = self.device.patience();
        let any = |run: &mut [bool; 2]| run.contains(&true);
        let run = *self.threads.ended.wait_while(self.threads.run.lock(), Some(until), any);
        // Owners free their memory as soon as this object is gone. With a lost context there is nothing to wait for.
        if run.contains(&true) || matches!(self.finish(), Err(Error::Timeout(_))) {
            // The device may still use what the copies hold, and the code of the casts.
            std::mem::forget(Arc::clone(&self.shared));
        }
    }
}
