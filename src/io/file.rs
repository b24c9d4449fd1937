//! An open file: past the page cache where the file system agrees, and through it for what direct I/O cannot do.
#![forbid(unsafe_code)]

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use arc_swap::ArcSwapOption;

use super::plan::{Alignment, Route};
use crate::error::{Error, IoError, IoKind, Result, TierError, TierKind};
use crate::sys::file::{self, Access, DirectNeed, Facts, FileSystem, Identity, RequestLimits};
use crate::sys::memory::BASE_PAGE;
use crate::sys::own;

/// A file that operations work on.
#[derive(Debug)]
pub struct File {
    key: u64,
    name: String,
    writable: bool,
    identity: Identity,
    /// When it was last looked at.
    length: AtomicU64,
    source: Source,
    need: Option<Alignment>,
    direct_refused: AtomicBool,
    buffered_reason: Mutex<Option<String>>,
    limits: Option<RequestLimits>,
    _keeps: Keeps,
}

/// What lives as long as the file, and so as long as any operation on it: the lock that guards the file.
#[derive(Default)]
struct Keeps(Option<Arc<dyn Any + Send + Sync>>);

impl fmt::Debug for Keeps {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_tuple("Keeps").field(&self.0.is_some()).finish()
    }
}

#[derive(Debug)]
enum Source {
    Real {
        main: fs::File,
        buffered: OnceLock<fs::File>,
    },
    /// The backend knows it by its name.
    Named,
}

impl File {
    /// Opens `path`; without O_DIRECT if `direct` is false or the file system refuses it.
    pub fn open(path: &Path, access: Access, direct: bool) -> Result<File> {
        File::opened_by(path, access, direct, |direct| file::open(path, access, direct))
    }

    /// The same with another way to open, which is told whether O_DIRECT is wanted. `path` is for messages.
    pub fn opened_by(
        path: &Path,
        access: Access,
        direct: bool,
        open: impl Fn(bool) -> io::Result<fs::File>,
    ) -> Result<File> {
        let name = path.to_string_lossy().into_owned();
        let fail = |error: io::Error| failure("opening", &name, 0, 0, &error);
        if !direct {
            let main = open(false).map_err(fail)?;
            return File::assemble(
                main,
                false,
                name,
                access,
                Some("switched off by the options".to_string()),
            );
        }
        match open(true) {
            Ok(main) => File::assemble(main, true, name, access, None),
            // O_CREAT may have made the file before O_DIRECT was refused: it is opened, not left behind empty.
            Err(refusal) if refusal.raw_os_error() == Some(libc::EINVAL) => {
                let main = open(false).map_err(fail)?;
                File::assemble(
                    main,
                    false,
                    name,
                    access,
                    Some("the file system refuses O_DIRECT".to_string()),
                )
            }
            Err(error) => Err(fail(error)),
        }
    }

    /// Takes a duplicate of a descriptor, which keeps its own O_DIRECT setting.
    pub fn of_descriptor(fd: i32, access: Access) -> Result<File> {
        let name = format!("descriptor {fd}");
        let (main, direct) = file::duplicate(fd).map_err(|error| failure("opening", &name, 0, 0, &error))?;
        if access != Access::Read && file::appends(&main) {
            let words =
                format!("{fd} was opened with O_APPEND: the system writes at the end, not at the offset");
            return Err(Error::invalid("request.fd", words));
        }
        let reason = (!direct).then(|| "the caller's descriptor has no O_DIRECT".to_string());
        File::assemble(main, direct, name, access, reason)
    }

    fn assemble(
        main: fs::File,
        direct: bool,
        name: String,
        access: Access,
        reason: Option<String>,
    ) -> Result<File> {
        let facts = file::facts(&main).map_err(|error| failure("opening", &name, 0, 0, &error))?;
        if !facts.seekable {
            return Err(Error::invalid(
                "path",
                format!("{name} is neither a regular file nor a block device"),
            ));
        }
        let page = BASE_PAGE as u64;
        let (need, reason) = match if direct { file::direct_need(&main) } else { DirectNeed::Refused } {
            DirectNeed::Stated { memory, offset } => (Some((memory, offset)), reason),
            DirectNeed::Unknown => (Some((page, page)), reason),
            DirectNeed::Refused => {
                (None, reason.or_else(|| Some("the file system says that this file cannot".to_string())))
            }
        };
        let need =
            need.map(|(memory, offset)| Alignment { memory: memory.max(512), offset: offset.max(page) });
        // A main descriptor with O_DIRECT on a file that cannot is replaced by a buffered one at its first use.
        let buffered = OnceLock::new();
        Ok(File {
            key: next_key(),
            name,
            writable: access != Access::Read,
            identity: facts.identity,
            length: facts.len.into(),
            direct_refused: AtomicBool::new(need.is_none()),
            source: Source::Real { main, buffered },
            need: need.or(direct.then_some(Alignment { memory: page, offset: page })),
            buffered_reason: Mutex::new(reason),
            limits: limits_of(facts.identity.device),
            _keeps: Keeps::default(),
        })
    }

    /// The same file, which keeps `other` until it is closed: after the last operation that uses it.
    pub fn keeping(self, other: Arc<dyn Any + Send + Sync>) -> File {
        File { _keeps: Keeps(Some(other)), ..self }
    }

    /// A file that its engine's backend knows by its name, with the alignment that the backend asks for.
    pub fn named(name: &str, device: u64, need: Option<Alignment>) -> File {
        let key = next_key();
        File {
            key,
            name: name.to_string(),
            writable: true,
            identity: Identity { device, inode: key },
            length: 0.into(),
            source: Source::Named,
            need,
            direct_refused: AtomicBool::new(need.is_none()),
            buffered_reason: Mutex::new(None),
            limits: None,
            _keeps: Keeps::default(),
        }
    }

    /// A number that no other open file of this process has or had.
    pub fn key(&self) -> u64 {
        self.key
    }

    /// The file as the caller named it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// True if it was opened for writing.
    pub fn writable(&self) -> bool {
        self.writable
    }

    /// Which file it is.
    pub fn identity(&self) -> Identity {
        self.identity
    }

    /// Notes its length, as somebody just found it.
    pub fn note_length(&self, length: u64) {
        self.length.store(length, Ordering::Relaxed);
    }

    /// True if it ended before `end` when it was last looked at.
    pub fn may_end_before(&self, end: u64) -> bool {
        self.length.load(Ordering::Relaxed) < end
    }

    /// The file system that it lies on.
    pub fn file_system(&self) -> Option<FileSystem> {
        match &self.source {
            Source::Real { main, .. } => file::file_system(main).ok(),
            Source::Named => None,
        }
    }

    /// What one request to its device may hold.
    pub fn limits(&self) -> Option<RequestLimits> {
        self.limits
    }

    /// What direct I/O needs here; `None` if everything goes through the page cache.
    pub fn direct(&self) -> Option<Alignment> {
        self.need.filter(|_| !self.direct_refused.load(Ordering::Relaxed))
    }

    /// Sends everything through the page cache from now on.
    pub fn refuse_direct(&self, reason: String) {
        self.direct_refused.store(true, Ordering::Relaxed);
        self.buffered_reason.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(reason);
    }

    /// Why the file is not direct, if it is not.
    pub fn buffered_reason(&self) -> Option<String> {
        self.buffered_reason.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Opens the descriptor of `route` if that has not happened yet.
    pub fn prepare(&self, route: Route) -> Result<()> {
        match &self.source {
            // Two threads may both open it; the second one's is closed again.
            Source::Real { main, buffered }
                if route == Route::Buffered && self.need.is_some() && buffered.get().is_none() =>
            {
                let second = file::reopen_buffered(main, self.writable)
                    .map_err(|error| failure("opening", &self.name, 0, 0, &error))?;
                file::no_readahead(&second);
                let _ = buffered.set(second);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// The descriptor of `route`, which was prepared.
    pub fn fd(&self, route: Route) -> BorrowedFd<'_> {
        match &self.source {
            Source::Real { main, buffered } => match route {
                Route::Direct => main.as_fd(),
                Route::Buffered => buffered.get().unwrap_or(main).as_fd(),
            },
            Source::Named => unreachable!("its backend asks for no descriptors"),
        }
    }

    /// Where the first bytes lie at `from` or later that are no hole; `None` at the end. Of a file without a descriptor only
    /// the begin is known.
    pub fn next_data(&self, from: u64) -> Option<u64> {
        match &self.source {
            Source::Real { main, .. } => file::next_data(main, from),
            Source::Named => (from == 0).then_some(0),
        }
    }

    /// Gives bytes `offset..end` a place on the device where they lie past the end of the file.
    pub fn preallocate(&self, offset: u64, end: u64) -> Result<()> {
        let main = match &self.source {
            Source::Real { main, .. } => main,
            Source::Named => return Ok(()),
        };
        let fail = |error: io::Error| failure("preallocating", &self.name, offset, end - offset, &error);
        let Facts { len, .. } = file::facts(main).map_err(fail)?;
        if end > len {
            file::preallocate(main, len.max(offset), end)
                .map_err(|error| self.with_free_space(fail(error)))?;
        }
        self.note_length(len.max(end));
        Ok(())
    }

    /// Refuses a length that this process may not give a file, or that its device has no room for.
    pub fn check_room(&self, from: u64, end: u64) -> Result<()> {
        let checked = file::check_size_limit(end).and_then(|()| match &self.source {
            Source::Real { main, .. } => file::check_free_space(main, from, end),
            Source::Named => Ok(()),
        });
        let bytes = end.saturating_sub(from);
        checked
            .map_err(|error| self.with_free_space(failure("preallocating", &self.name, from, bytes, &error)))
    }

    /// Adds what is free to an error that says that the device is full.
    pub fn with_free_space(&self, error: Error) -> Error {
        match (error, &self.source) {
            (Error::Io(mut inner), Source::Real { .. }) if inner.kind == IoKind::NoSpace => {
                if let Some(free) = file::free_bytes(Path::new(&self.name)) {
                    inner.detail = format!("the file system has {free} bytes free");
                }
                Error::Io(inner)
            }
            (other, _) => other,
        }
    }
}

/// A device's limits, asked for once: the files that tell them cost more than opening the file itself. Whoever changes
/// them later gets requests that the device splits.
fn limits_of(device: u64) -> Option<RequestLimits> {
    static KNOWN: ArcSwapOption<BTreeMap<u64, Option<RequestLimits>>> = ArcSwapOption::const_empty();
    if let Some(known) = KNOWN.load().as_ref().and_then(|known| known.get(&device).copied()) {
        return known;
    }
    let found = file::request_limits(device);
    KNOWN.rcu(|known| {
        let mut known = known.as_deref().cloned().unwrap_or_default();
        known.insert(device, found);
        Some(Arc::new(known))
    });
    found
}

fn next_key() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// The error of a system call on a file, or why a file at a fixed name is not used.
pub(super) fn failure(doing: &'static str, name: &str, offset: u64, bytes: u64, error: &io::Error) -> Error {
    if own::is_refusal(error) {
        return TierError::at(TierKind::Foreign, name, error.to_string());
    }
    let errno = error.raw_os_error().unwrap_or(0);
    let detail = if errno == 0 { error.to_string() } else { String::new() };
    IoError { kind: IoKind::of_errno(errno), doing, path: name.to_string(), offset, bytes, errno, detail }
        .into()
}
