//! Recordings of Adam steps, so that DeepSpeed's `ds_adam_rollback` restores every bit.
//!
//! `SPILLWAY_DEEPSPEED_UNDO` selects the steps, as for the Python package: "always" all, "never" none, else those of
//! optimizers of which a step was rolled back before.
//!
//! Invariants:
//! - A recording belongs to an optimizer and the address of `exp_avg`: SuperOffload passes the other tensors at changing
//!   addresses.
//! - A recording in use is not in the table, so no other thread finds it, and the lock is not held during a step.

use std::collections::{BTreeMap, BTreeSet};
use std::ptr;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use super::library::{Spillway, Tensor, Undo, UndoOptions};
use crate::environment::{self, NotText};
use crate::report::{self, Level};

struct Recording {
    undo: Undo,
    elements: u64,
}

// SAFETY: the library lets any thread use a handle, one at a time.
unsafe impl Send for Recording {}

#[derive(Default)]
struct Table {
    recordings: BTreeMap<(i32, usize), Recording>,
    rolled_back: BTreeSet<i32>,
}

/// `spw_undo_mode`: differences of the bits.
const DELTA: u32 = 0;

static TABLE: Mutex<Table> = Mutex::new(Table { recordings: BTreeMap::new(), rolled_back: BTreeSet::new() });
/// Whether the table may have an entry: steps without rollbacks take no lock.
static USED: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);

/// The steps that are recorded.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    Always,
    Never,
    /// Those of optimizers of which a step was rolled back before.
    Auto,
}

impl Mode {
    /// The setting that records every step, as the end of a message; empty if it is set.
    pub fn advice(self) -> &'static str {
        match self {
            Mode::Always => "",
            Mode::Never | Mode::Auto => "; SPILLWAY_DEEPSPEED_UNDO=always records all steps",
        }
    }
}

/// `SPILLWAY_DEEPSPEED_UNDO`, read once.
pub fn mode() -> Mode {
    static MODE: OnceLock<Mode> = OnceLock::new();
    let ignored = |NotText(name)| {
        report::say(Level::Warn, || format!("{name} is ignored, because its value is not UTF-8"));
    };
    let word = || environment::word("SPILLWAY_DEEPSPEED_UNDO").inspect_err(|error| ignored(*error));
    *MODE.get_or_init(|| match word().ok().flatten().as_deref() {
        Some("always") => Mode::Always,
        Some("never") => Mode::Never,
        _ => Mode::Auto,
    })
}

/// True if the next step of an optimizer must be recorded.
pub fn wanted(id: i32) -> bool {
    match mode() {
        Mode::Always => true,
        Mode::Never => false,
        Mode::Auto => is_used() && table().rolled_back.contains(&id),
    }
}

/// Calls `body` with the recording of a tensor, or with null if there is none and `make` is false.
pub fn with<T>(
    spillway: &Spillway,
    id: i32,
    tensor: &Tensor,
    make: bool,
    body: impl FnOnce(Undo) -> T,
) -> Result<T, String> {
    if !make && !is_used() {
        return Ok(body(ptr::null_mut()));
    }
    let key = (id, tensor.exp_avg as usize);
    let mut found = table().recordings.remove(&key);
    if make && found.as_ref().is_none_or(|found| found.elements < tensor.n) {
        if let Some(small) = found.take() {
            // SAFETY: the handle is open, and this is its last use.
            unsafe { (spillway.undo_close)(small.undo) };
        }
        found = Some(open(spillway, tensor.n)?);
    }
    let result = body(found.as_ref().map_or(ptr::null_mut(), |found| found.undo));
    if let Some(found) = found {
        USED.store(true, std::sync::atomic::Ordering::Release);
        table().recordings.insert(key, found);
    }
    Ok(result)
}

/// Notes a rollback: the optimizer's later steps are recorded.
pub fn rolled_back(id: i32) {
    USED.store(true, std::sync::atomic::Ordering::Release);
    table().rolled_back.insert(id);
}

/// Drops the recordings of an optimizer.
pub fn forget(spillway: &Spillway, id: i32) {
    if !is_used() {
        return;
    }
    let mut table = table();
    table.rolled_back.remove(&id);
    let keys: Vec<_> = table.recordings.range((id, 0)..=(id, usize::MAX)).map(|(key, _)| *key).collect();
    for dropped in keys.iter().filter_map(|key| table.recordings.remove(key)).collect::<Vec<_>>() {
        // SAFETY: the handle is open, and this is its last use.
        unsafe { (spillway.undo_close)(dropped.undo) };
    }
}

fn open(spillway: &Spillway, elements: u64) -> Result<Recording, String> {
    let options = UndoOptions {
        struct_size: size_of::<UndoOptions>() as u32,
        mode: DELTA,
        elements: elements.max(1),
        tensors: 1,
    };
    let mut undo = ptr::null_mut();
    // SAFETY: both are locals.
    match unsafe { (spillway.undo_open)(&raw const options, &raw mut undo) } {
        0 => Ok(Recording { undo, elements }),
        _ => Err(spillway.last_error()),
    }
}

fn is_used() -> bool {
    USED.load(std::sync::atomic::Ordering::Acquire)
}

fn table() -> MutexGuard<'static, Table> {
    TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}
