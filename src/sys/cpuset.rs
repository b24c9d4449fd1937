//! The processors that the system grants to threads of this process. Threads of this library ask; the caller's affinity
//! stays as it is.
#![forbid(unsafe_code)]

use std::io;

use nix::sched::CpuSet;

use super::affinity::{bind_own_thread, current};
use super::bitmap::Bitmap;
use super::threads;

/// Processors that a new thread of this process gets if it asks for `wanted`: the system leaves out those that are
/// offline or not in the cpuset. An error if none is left.
pub fn granted(wanted: &Bitmap) -> io::Result<Bitmap> {
    let (send, receive) = std::sync::mpsc::channel();
    let wanted = wanted.clone();
    threads::spawn_quiet("spillway-probe", move || {
        let granted = bind_own_thread(&wanted).and_then(|()| {
            current().ok_or_else(|| io::Error::other("the system does not state the affinity of a thread"))
        });
        let _ = send.send(granted);
    })?;
    receive.recv().unwrap_or_else(|_| Err(io::Error::other("the thread ended early")))
}

/// All processors of this process's cpuset, whatever the affinity of the calling thread.
pub fn widest() -> Option<Bitmap> {
    granted(&(0..CpuSet::count() as u32).collect()).ok()
}
