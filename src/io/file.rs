//! An open file: direct I/O where the file system allows it, the page cache for everything else.
#![forbid(unsafe_code)]

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwapOption;

use super::plan::{Alignment, Route};
use crate::error::{Doing, Error, IoError, IoKind, Result, TierError, TierKind};
use crate::sys::file::{self, Access, DirectAlignment, FileInfo, FileSystem, Identity, RequestLimits};
use crate::sys::memory::BASE_PAGE;
use crate::sys::private_files;
use crate::sys::sync::Lock;

/// A file that operations read and write.
#[derive(Debug)]
pub struct File {
    key: u64,
    name: String,
    writable: bool,
    identity: Identity,
    /// Length in bytes when it was last checked.
    length: AtomicU64,
    source: Source,
    alignment: Option<Alignment>,
    direct_refused: AtomicBool,
    buffered_reason: Lock<Option<String>>,
    limits: Option<RequestLimits>,
    _keep_alive: KeepAlive,
}

/// An object that lives as long as the file, and so as long as any operation on it: the lock that guards the file.
#[derive(Default)]
struct KeepAlive(Option<Arc<dyn Any + Send + Sync>>);

impl fmt::Debug for KeepAlive {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_tuple("KeepAlive").field(&self.0.is_some()).finish()
    }
}

#[derive(Debug)]
enum Source {
    Real {
        main: fs::File,
        buffered: OnceLock<fs::File>,
    },
    /// A file without a descriptor; the backend identifies it by its name.
    Named,
}

impl File {
    /// Opens `path`; without O_DIRECT if `direct` is false or the file system refuses it.
    pub fn open(path: &Path, access: Access, direct: bool) -> Result<File> {
        File::open_with(path, access, direct, |direct| file::open(path, access, direct))
    }

    /// Like [`File::open`] with a caller-supplied `open`, whose argument says whether to use O_DIRECT. `path` is for
    /// messages.
    pub fn open_with(
        path: &Path,
        access: Access,
        direct: bool,
        open: impl Fn(bool) -> io::Result<fs::File>,
    ) -> Result<File> {
        let name = path.to_string_lossy().into_owned();
        let fail = |error: io::Error| failure(Doing::Opening, &name, 0, 0, &error);
        if !direct {
            let main = open(false).map_err(fail)?;
            return File::assemble(main, false, name, access, Some("disabled by the options".to_string()));
        }
        match open(true) {
            Ok(main) => File::assemble(main, true, name, access, None),
            // O_CREAT may have created the file before O_DIRECT was refused, so the file is opened again, not left
            // behind empty.
            Err(refusal) if refusal.raw_os_error() == Some(libc::EINVAL) => {
                let main = open(false).map_err(fail)?;
                File::assemble(
                    main,
                    false,
                    name,
                    access,
                    Some("the file system does not support O_DIRECT".to_string()),
                )
            }
            Err(error) => Err(fail(error)),
        }
    }

    /// Duplicates a descriptor, which keeps its own O_DIRECT setting. `name` is for messages.
    pub fn of_descriptor(fd: i32, name: String, access: Access) -> Result<File> {
        let (main, direct) =
            file::duplicate(fd).map_err(|error| failure(Doing::Opening, &name, 0, 0, &error))?;
        if access != Access::Read && file::appends(&main) {
            let words =
                format!("{fd} was opened with O_APPEND, which ignores the offset; open it without O_APPEND");
            return Err(Error::invalid("request.fd", words));
        }
        let reason = (!direct).then(|| "the descriptor was opened without O_DIRECT".to_string());
        File::assemble(main, direct, name, access, reason)
    }

    fn assemble(
        main: fs::File,
        direct: bool,
        name: String,
        access: Access,
        reason: Option<String>,
    ) -> Result<File> {
        let info = file::info(&main).map_err(|error| failure(Doing::Opening, &name, 0, 0, &error))?;
        if !info.seekable {
            return Err(Error::invalid(
                "path",
                format!("{name} is neither a regular file nor a block device"),
            ));
        }
        let page = BASE_PAGE as u64;
        let (alignment, reason) =
            match if direct { file::direct_alignment(&main) } else { DirectAlignment::Refused } {
                DirectAlignment::Stated { memory, offset } => (Some((memory, offset)), reason),
                DirectAlignment::Unknown => (Some((page, page)), reason),
                DirectAlignment::Refused => (
                    None,
                    reason
                        .or_else(|| Some("the file system reports no direct I/O for this file".to_string())),
                ),
            };
        let alignment =
            alignment.map(|(memory, offset)| Alignment { memory: memory.max(512), offset: offset.max(page) });
        // If the file does not support direct I/O, its first use replaces an O_DIRECT main descriptor by a buffered
        // one.
        let buffered = OnceLock::new();
        Ok(File {
            key: next_key(),
            name,
            writable: access != Access::Read,
            identity: info.identity,
            length: info.len.into(),
            direct_refused: AtomicBool::new(alignment.is_none()),
            source: Source::Real { main, buffered },
            alignment: alignment.or(direct.then_some(Alignment { memory: page, offset: page })),
            buffered_reason: Lock::new(reason),
            limits: limits_of(info.identity.device),
            _keep_alive: KeepAlive::default(),
        })
    }

    /// Makes the file keep `other` alive until it is closed, after the last operation that uses the file.
    pub fn keep_alive(self, other: Arc<dyn Any + Send + Sync>) -> File {
        File { _keep_alive: KeepAlive(Some(other)), ..self }
    }

    /// A file without a descriptor that the backend identifies by `name`, with the alignment that the backend requires.
    pub fn named(name: &str, device: u64, alignment: Option<Alignment>) -> File {
        let key = next_key();
        File {
            key,
            name: name.to_string(),
            writable: true,
            identity: Identity { device, inode: key },
            length: 0.into(),
            source: Source::Named,
            alignment,
            direct_refused: AtomicBool::new(alignment.is_none()),
            buffered_reason: Lock::new(None),
            limits: None,
            _keep_alive: KeepAlive::default(),
        }
    }

    /// A number that this process assigns to no other open file, before or later.
    pub fn key(&self) -> u64 {
        self.key
    }

    /// The file as the caller named it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// True if the file was opened for writing.
    pub fn writable(&self) -> bool {
        self.writable
    }

    /// Device and inode of the file.
    pub fn identity(&self) -> Identity {
        self.identity
    }

    /// True if the file has a name in some directory; false if it was removed, or if that is unknown.
    pub fn has_a_name(&self) -> bool {
        match &self.source {
            Source::Real { main, .. } => file::info(main).is_ok_and(|info| info.links > 0),
            Source::Named => false,
        }
    }

    /// Records the length of the file in bytes, as just observed.
    pub fn note_length(&self, length: u64) {
        self.length.store(length, Ordering::Relaxed);
    }

    /// True if the file ended before `end` when its length was last recorded.
    pub fn may_end_before(&self, end: u64) -> bool {
        self.length.load(Ordering::Relaxed) < end
    }

    /// The file system of the file; `None` if it is unknown.
    pub fn file_system(&self) -> Option<FileSystem> {
        match &self.source {
            Source::Real { main, .. } => file::file_system(main).ok(),
            Source::Named => None,
        }
    }

    /// The largest request that the device accepts; `None` if unknown.
    pub fn limits(&self) -> Option<RequestLimits> {
        self.limits
    }

    /// Alignment for direct I/O; `None` if everything goes through the page cache.
    pub fn direct(&self) -> Option<Alignment> {
        self.alignment.filter(|_| !self.direct_refused.load(Ordering::Relaxed))
    }

    /// Sends everything through the page cache from now on. The first recorded reason is kept.
    pub fn refuse_direct(&self, reason: String) {
        self.direct_refused.store(true, Ordering::Relaxed);
        self.buffered_reason.lock().get_or_insert(reason);
    }

    /// Why the file uses the page cache; `None` if it uses direct I/O.
    pub fn buffered_reason(&self) -> Option<String> {
        self.buffered_reason.lock().clone()
    }

    /// Opens the descriptor of `route` if it is not open yet.
    pub fn prepare(&self, route: Route) -> Result<()> {
        match &self.source {
            // Two threads may open it concurrently; the second descriptor is closed again.
            Source::Real { main, buffered }
                if route == Route::Buffered && self.alignment.is_some() && buffered.get().is_none() =>
            {
                let second = file::reopen_buffered(main, self.writable)
                    .map_err(|error| failure(Doing::Opening, &self.name, 0, 0, &error))?;
                file::no_readahead(&second);
                let _ = buffered.set(second);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// The descriptor of `route`. Call [`File::prepare`] first.
    pub fn fd(&self, route: Route) -> BorrowedFd<'_> {
        match &self.source {
            Source::Real { main, buffered } => match route {
                Route::Direct => main.as_fd(),
                Route::Buffered => buffered.get().unwrap_or(main).as_fd(),
            },
            Source::Named => unreachable!("its backend uses no descriptors"),
        }
    }

    /// Lets bytes of another file also be bytes of this one, without a copy; see `sys::file::share_blocks`.
    pub fn share_blocks(&self, source: &File, from: u64, to: u64, len: u64) -> io::Result<()> {
        match (&source.source, &self.source) {
            (Source::Real { main: source, .. }, Source::Real { main, .. }) => {
                file::share_blocks(source.as_fd(), from, main.as_fd(), to, len)
            }
            _ => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// The offset of the first data at or after `from`; holes are skipped; `None` at the end of the file. A file
    /// without a descriptor reports data only at offset 0.
    pub fn next_data(&self, from: u64) -> Option<u64> {
        match &self.source {
            Source::Real { main, .. } => file::next_data(main, from),
            Source::Named => (from == 0).then_some(0),
        }
    }

    /// Reserves device space for the part of `offset..end` that lies past the end of the file.
    pub fn preallocate(&self, offset: u64, end: u64) -> Result<()> {
        let main = match &self.source {
            Source::Real { main, .. } => main,
            Source::Named => return Ok(()),
        };
        let fail = |error: io::Error| failure(Doing::Preallocating, &self.name, offset, end - offset, &error);
        let FileInfo { len, .. } = file::info(main).map_err(fail)?;
        if end > len {
            file::preallocate(main, len.max(offset), end)
                .map_err(|error| self.with_free_space(fail(error)))?;
        }
        self.note_length(len.max(end));
        Ok(())
    }

    /// Refuses a file length that exceeds the process's size limit or the free space of the device.
    pub fn check_room(&self, from: u64, end: u64) -> Result<()> {
        let checked = file::check_size_limit(end).and_then(|()| match &self.source {
            Source::Real { main, .. } => file::check_free_space(main, from, end),
            Source::Named => Ok(()),
        });
        let bytes = end.saturating_sub(from);
        checked.map_err(|error| {
            self.with_free_space(failure(Doing::Preallocating, &self.name, from, bytes, &error))
        })
    }

    /// Adds the free bytes of the file system to an error that reports a full device.
    pub fn with_free_space(&self, error: Error) -> Error {
        match (error, &self.source) {
            (Error::Io(mut inner), Source::Real { main, .. }) if inner.kind == IoKind::NoSpace => {
                if let Some(free) = file::free_bytes_of(main) {
                    inner.detail = format!(
                        "the file system has only {free} bytes free; free space on it, or use another one"
                    );
                }
                Error::Io(inner)
            }
            (other, _) => other,
        }
    }
}

/// The request limits of a device, queried once: reading them costs more than opening the file itself. If the limits
/// shrink later, the device splits the requests.
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

/// The error of a failed system call on a file, or of a refused file at a fixed name.
pub(super) fn failure(doing: Doing, name: &str, offset: u64, bytes: u64, error: &io::Error) -> Error {
    if private_files::is_refusal(error) {
        return TierError::at(TierKind::Foreign, name, error.to_string());
    }
    IoError::of(error, doing, name).at(offset, bytes).into()
}
