//! The compiled ops of this process, found by the address of a call.
//!
//! Invariants:
//! - The list only grows, without a lock: a forked child finds it whole. An op in it is never unloaded.
//! - An op's number is its place in the list. It is part of the ids of its optimizers.

use std::ffi::{CStr, CString, c_int, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

use libc::{dl_phdr_info, size_t};

use crate::report::{self, Level};

/// The kinds of optimizers.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Adam,
    Adagrad,
    Lion,
}

/// The functions of an op, by their C++ names.
#[derive(Clone, Copy)]
pub enum Name {
    AdamCreate,
    AdamStep,
    AdamRollback,
    AdamDestroy,
    AdagradCreate,
    AdagradStep,
    AdagradDestroy,
    LionCreate,
    LionStep,
    LionDestroy,
}

/// In the order of `Name`.
const SYMBOLS: [&CStr; 10] = [
    c"_Z21create_adam_optimizerifffffbb",
    c"_Z12ds_adam_stepimfffffbRN2at6TensorES1_S1_S1_",
    c"_Z16ds_adam_rollbackimfffffbRN2at6TensorES1_S1_S1_",
    c"_Z22destroy_adam_optimizeri",
    c"_Z24create_adagrad_optimizerifffb",
    c"_Z15ds_adagrad_stepimfffRN2at6TensorES1_S1_",
    c"_Z25destroy_adagrad_optimizeri",
    c"_Z21create_lion_optimizeriffffb",
    c"_Z12ds_lion_stepimffffRN2at6TensorES1_S1_",
    c"_Z22destroy_lion_optimizeri",
];

/// One library that contains DeepSpeed's optimizers.
pub struct Op {
    path: CString,
    addresses: std::ops::Range<usize>,
    number: u32,
    own: [usize; SYMBOLS.len()],
    said: AtomicU32,
    /// Hashes of the warnings that were logged; 0 is a free place.
    warned: [AtomicU64; WARNINGS],
    next: *const Op,
}

/// Different warnings that an op logs.
const WARNINGS: usize = 16;

/// Ids of one op that are served, from 0.
const IDS: u32 = 1 << 20;
/// Ops that are served; their ids end below -2^30, far from those of Python's op.
const OPS: u32 = 1 << 10;

static FIRST: AtomicPtr<Op> = AtomicPtr::new(ptr::null_mut());

impl Op {
    /// The op whose code contains this address; `None` if no loaded library does.
    pub fn of(address: usize) -> Option<&'static Op> {
        let mut known = FIRST.load(Ordering::Acquire);
        if let Some(op) = Op::among(known, address) {
            return Some(op);
        }
        let mut made = Box::new(Op::load(address)?);
        loop {
            // SAFETY: ops are never freed.
            made.number = unsafe { known.as_ref() }.map_or(0, |first| first.number + 1);
            made.next = known;
            let new = Box::into_raw(made);
            match FIRST.compare_exchange(known, new, Ordering::AcqRel, Ordering::Acquire) {
                // SAFETY: the list owns it from now on, and never frees it.
                Ok(_) => return Some(unsafe { &*new }),
                Err(changed) => {
                    // SAFETY: `into_raw` gave this pointer, and no other thread has seen it.
                    made = unsafe { Box::from_raw(new) };
                    known = changed;
                    if let Some(op) = Op::among(known, address) {
                        return Some(op);
                    }
                }
            }
        }
    }

    fn among(first: *const Op, address: usize) -> Option<&'static Op> {
        let mut next = first;
        // SAFETY: ops are never freed, and a pointer in the list is null or an op.
        while let Some(op) = unsafe { next.as_ref() } {
            if op.addresses.contains(&address) {
                return Some(op);
            }
            next = op.next;
        }
        None
    }

    fn load(address: usize) -> Option<Op> {
        let (path, addresses) = library_of(address)?;
        // The handle is kept, so that the library stays.
        let name = if path.is_empty() { ptr::null() } else { path.as_ptr() };
        // SAFETY: the name is null or ends with NUL; with NOLOAD no code runs.
        let handle = unsafe { libc::dlopen(name, libc::RTLD_NOW | libc::RTLD_NOLOAD | libc::RTLD_NODELETE) };
        let handle = NonNull::new(handle)?;
        let own = SYMBOLS.map(|symbol| {
            // SAFETY: the handle is open, and the name ends with NUL.
            let found = unsafe { libc::dlsym(handle.as_ptr(), symbol.as_ptr()) } as usize;
            if is_in_this_library(found) { 0 } else { found }
        });
        Some(Op {
            path,
            addresses,
            number: 0,
            own,
            said: AtomicU32::new(0),
            warned: Default::default(),
            next: ptr::null(),
        })
    }

    /// The address of the op's own function.
    pub fn own(&self, name: Name) -> Option<usize> {
        Some(self.own[name as usize]).filter(|address| *address != 0)
    }

    /// The id of Spillway's optimizer for an id of this op; `None` if it cannot be represented.
    pub fn id(&self, id: c_int) -> Option<i32> {
        let id = u32::try_from(id).ok().filter(|id| *id < IDS && self.number < OPS)?;
        Some(i32::MIN + (self.number * IDS + id) as i32)
    }

    /// A message of Spillway with the op's own ids in place of Spillway's.
    pub fn in_own_ids(&self, message: &str) -> String {
        let first = i64::from(i32::MIN) + i64::from(self.number) * i64::from(IDS);
        let own = |word: &str| {
            let id = word.parse::<i64>().ok()?.checked_sub(first)?;
            (0..IDS.into()).contains(&id).then(|| id.to_string())
        };
        let words = message.split(' ').map(|word| own(word).unwrap_or_else(|| word.to_string()));
        words.collect::<Vec<_>>().join(" ")
    }

    /// Logs a warning of this op, unless the same one was logged before. Takes no lock: a forked child may call it.
    pub fn warn(&self, message: &str) {
        let mut hasher = DefaultHasher::new();
        message.hash(&mut hasher);
        let hash = hasher.finish().max(1);
        let say =
            |line: &str| report::say(Level::Warn, || format!("{}: {line}", self.path.to_string_lossy()));
        for (number, place) in self.warned.iter().enumerate() {
            match place.compare_exchange(0, hash, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) if number + 1 == WARNINGS => {
                    return say(&format!("{message}; other reasons after this one are not logged"));
                }
                Ok(_) => return say(message),
                Err(known) if known == hash => return,
                Err(_) => {}
            }
        }
    }

    /// Logs a line of this op once for each `topic`.
    pub fn say_once(&self, topic: u32, level: Level, message: impl FnOnce() -> String) {
        if self.said.fetch_or(1 << topic, Ordering::Relaxed) & (1 << topic) == 0 {
            report::say(level, || format!("{}: {}", self.path.to_string_lossy(), message()));
        }
    }
}

/// The name and the addresses of the loaded library that contains an address.
fn library_of(address: usize) -> Option<(CString, std::ops::Range<usize>)> {
    struct Search {
        address: usize,
        found: Option<(CString, std::ops::Range<usize>)>,
    }

    unsafe extern "C" fn look_at(info: *mut dl_phdr_info, _: size_t, search: *mut c_void) -> c_int {
        // SAFETY: the loader passes a record of a loaded library; the last argument is the `Search` below.
        let (info, search) = unsafe { (&*info, &mut *search.cast::<Search>()) };
        if info.dlpi_phdr.is_null() {
            return 0;
        }
        // SAFETY: the loader provides the array and its length.
        let headers = unsafe { slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
        let base = info.dlpi_addr as usize;
        let loaded = headers.iter().filter(|header| header.p_type == libc::PT_LOAD).map(|header| {
            let start = base + header.p_vaddr as usize;
            start..start + header.p_memsz as usize
        });
        let Some(span) = loaded.reduce(|all, one| all.start.min(one.start)..all.end.max(one.end)) else {
            return 0;
        };
        if !span.contains(&search.address) {
            return 0;
        }
        // SAFETY: the loader's name is null or ends with NUL.
        let name = if info.dlpi_name.is_null() { c"" } else { unsafe { CStr::from_ptr(info.dlpi_name) } };
        search.found = Some((name.to_owned(), span));
        1
    }

    let mut search = Search { address, found: None };
    // SAFETY: the callback has this signature, and `search` outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(look_at), (&raw mut search).cast()) };
    search.found
}

/// True for an address in this library, whose functions must not be taken for an op's own.
fn is_in_this_library(address: usize) -> bool {
    address != 0
        && library_of(is_in_this_library as fn(usize) -> bool as usize)
            .is_some_and(|(_, span)| span.contains(&address))
}

/// Counters of one kind of optimizer: served calls, their elements, calls that went to the op's own function.
static COUNTS: [[AtomicU64; 3]; 3] = [const { [const { AtomicU64::new(0) }; 3] }; 3];

impl Kind {
    pub fn named(name: &CStr) -> Option<Kind> {
        [Kind::Adam, Kind::Adagrad, Kind::Lion]
            .into_iter()
            .find(|kind| kind.op_name().as_bytes() == name.to_bytes())
    }

    /// The name of the op in DeepSpeed.
    pub fn op_name(self) -> &'static str {
        match self {
            Kind::Adam => "cpu_adam",
            Kind::Adagrad => "cpu_adagrad",
            Kind::Lion => "cpu_lion",
        }
    }

    pub fn counts(self) -> [u64; 3] {
        [0, 1, 2].map(|index| COUNTS[self as usize][index].load(Ordering::Relaxed))
    }

    pub fn count_served(self, elements: u64) {
        COUNTS[self as usize][0].fetch_add(1, Ordering::Relaxed);
        COUNTS[self as usize][1].fetch_add(elements, Ordering::Relaxed);
    }

    pub fn count_left(self) {
        COUNTS[self as usize][2].fetch_add(1, Ordering::Relaxed);
    }
}
