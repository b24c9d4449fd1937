//! One request. This file refuses every request that Linux's aio would refuse at submission, in the same order and with
//! the same errno. All others become ring entries.

use io_uring::squeue::{Entry, Flags};
use io_uring::{opcode, types};
use libc::{EBADF, EFAULT, EINVAL, EOPNOTSUPP, c_int, iovec};

use crate::abi::{
    CMD_FDSYNC, CMD_FSYNC, CMD_POLL, CMD_PREAD, CMD_PREADV, CMD_PWRITE, CMD_PWRITEV, FLAG_IOPRIO, FLAG_RESFD,
    Iocb,
};
use crate::memory::{Checked, last_errno};

/// The kernel transfers at most this number of bytes at once.
const MAX_TRANSFER: u64 = 0x7fff_f000;
const MAX_IOVECS: u64 = 1024;
const RWF_HIPRI: u32 = 1;
const RWF_KNOWN: u32 = 0x1ff;

/// The value that is written to an eventfd for each completion.
static ONE: u64 = 1;

/// A copied request; the program may free or reuse its own after submission.
pub struct Request {
    /// The fields as the program wrote them.
    pub iocb: Iocb,
    /// The request's address in the program: the event's `obj`.
    pub obj: u64,
    /// Number of bytes in a complete transfer.
    pub bytes: u64,
    /// The program requested the cancellation.
    pub cancelled: bool,
    /// A buffered transfer, which Linux performs inside io_submit.
    pub at_once: bool,
    /// A transfer of a file or a block device through the page cache.
    buffered: bool,
    /// A copy, because the program may have freed its array when the entry must be submitted again.
    iovecs: Box<[iovec]>,
}

// SAFETY: the pointers in `iovecs` are only passed to the kernel and never dereferenced in this library.
unsafe impl Send for Request {}

impl Request {
    /// Copies and checks the request at `obj`.
    pub fn check(obj: u64, iocb: Iocb, memory: &mut Checked) -> Result<Request, c_int> {
        let mode = access_mode(iocb.fd)?;
        if iocb.flags & FLAG_RESFD != 0 {
            check_eventfd(iocb.resfd as c_int)?;
        }
        let mut request = Request {
            iocb,
            obj,
            bytes: 0,
            cancelled: false,
            at_once: false,
            buffered: false,
            iovecs: Box::default(),
        };
        match iocb.opcode {
            CMD_PREAD | CMD_PREADV | CMD_PWRITE | CMD_PWRITEV => request.check_transfer(mode, memory)?,
            CMD_FSYNC | CMD_FDSYNC => {
                let plain = iocb.buf == 0 && iocb.offset == 0 && iocb.nbytes == 0 && iocb.rw_flags == 0;
                if !plain || matches!(file_type(iocb.fd), Some(libc::S_IFIFO | libc::S_IFSOCK)) {
                    return Err(EINVAL);
                }
            }
            CMD_POLL => {
                let plain = iocb.offset == 0 && iocb.nbytes == 0 && iocb.rw_flags == 0;
                if !plain || iocb.buf > u64::from(u16::MAX) {
                    return Err(EINVAL);
                }
            }
            _ => return Err(EINVAL),
        }
        Ok(request)
    }

    fn check_transfer(&mut self, mode: c_int, memory: &mut Checked) -> Result<(), c_int> {
        if self.iocb.rw_flags & !RWF_KNOWN != 0 {
            return Err(EOPNOTSUPP);
        }
        let barred = if self.is_read() { libc::O_WRONLY } else { libc::O_RDONLY };
        if mode & libc::O_ACCMODE == barred || mode & libc::O_PATH != 0 {
            return Err(EBADF);
        }
        // Only a read-only descriptor can be a directory, and directories have no asynchronous reads.
        if mode & libc::O_ACCMODE == libc::O_RDONLY && file_type(self.iocb.fd) == Some(libc::S_IFDIR) {
            return Err(EINVAL);
        }
        self.bytes = match self.iocb.opcode {
            CMD_PREADV | CMD_PWRITEV => self.copy_iovecs(memory)?,
            _ => {
                check_range(self.iocb.buf, self.iocb.nbytes)?;
                self.iocb.nbytes.min(MAX_TRANSFER)
            }
        };
        self.buffered = mode & libc::O_DIRECT == 0 && file_type(self.iocb.fd).is_some_and(ends);
        self.at_once = self.buffered && self.iocb.flags & FLAG_IOPRIO == 0;
        match self.iocb.offset {
            ..0 => Err(EINVAL),
            offset if offset.checked_add(self.bytes as i64).is_none() => Err(EINVAL),
            _ => Ok(()),
        }
    }

    fn copy_iovecs(&mut self, memory: &mut Checked) -> Result<u64, c_int> {
        if self.iocb.nbytes > MAX_IOVECS {
            return Err(EINVAL);
        }
        let mut copied = Vec::with_capacity(self.iocb.nbytes as usize);
        let mut bytes = 0u64;
        for index in 0..self.iocb.nbytes {
            let address = self.iocb.buf.checked_add(index * size_of::<iovec>() as u64).ok_or(EFAULT)?;
            let vector: iovec = memory.read(address)?;
            if (vector.iov_len as isize) < 0 {
                return Err(EINVAL);
            }
            check_range(vector.iov_base as u64, vector.iov_len as u64)?;
            bytes = bytes.saturating_add(vector.iov_len as u64).min(MAX_TRANSFER);
            copied.push(vector);
        }
        self.iovecs = copied.into_boxed_slice();
        Ok(bytes)
    }

    pub fn is_read(&self) -> bool {
        matches!(self.iocb.opcode, CMD_PREAD | CMD_PREADV)
    }

    pub fn is_write(&self) -> bool {
        matches!(self.iocb.opcode, CMD_PWRITE | CMD_PWRITEV)
    }

    /// May stay pending forever, like a poll or a read of a pipe; a transfer of a file always ends.
    pub fn may_never_end(&self) -> bool {
        self.iocb.opcode == CMD_POLL || file_type(self.iocb.fd).is_some_and(|kind| !ends(kind))
    }

    /// The transfer, as one system call.
    pub fn transfer(&self) -> Transfer {
        let vectored = matches!(self.iocb.opcode, CMD_PREADV | CMD_PWRITEV);
        let single = iovec { iov_base: self.iocb.buf as *mut _, iov_len: self.bytes as usize };
        Transfer {
            read: self.is_read(),
            fd: self.iocb.fd,
            offset: self.iocb.offset,
            flags: self.flags(),
            buffers: if vectored { Buffers::Many(&raw const *self.iovecs) } else { Buffers::One(single) },
        }
    }

    /// The ring entries: the operation, and the write to its eventfd, which follows for every result.
    pub fn entries(&self, user_data: u64, hidden: u64) -> (Entry, Option<Entry>) {
        let entry = self.operation().user_data(user_data);
        let flags = if self.outlives_its_thread() { Flags::ASYNC } else { Flags::empty() };
        match self.notice(hidden) {
            Some(notice) => (entry.flags(flags | Flags::IO_HARDLINK), Some(notice)),
            None => (entry.flags(flags), None),
        }
    }

    /// True for a buffered transfer of a thread that may end before it completes. Linux continues such a transfer on the
    /// thread that submitted it, and fails it with EFAULT if that thread has ended; a worker of the kernel stays. The main
    /// thread ends with the process.
    fn outlives_its_thread(&self) -> bool {
        self.buffered && !is_main_thread()
    }

    /// The write to the request's eventfd, if there is one.
    pub fn notice(&self, hidden: u64) -> Option<Entry> {
        if self.iocb.flags & FLAG_RESFD == 0 {
            return None;
        }
        let eventfd = types::Fd(self.iocb.resfd as c_int);
        let notice = opcode::Write::new(eventfd, (&raw const ONE).cast(), size_of::<u64>() as u32);
        Some(notice.build().user_data(hidden))
    }

    /// A ring without polled queues refuses the hint RWF_HIPRI, which Linux's aio ignores.
    fn flags(&self) -> c_int {
        (self.iocb.rw_flags & !RWF_HIPRI) as c_int
    }

    fn operation(&self) -> Entry {
        let iocb = &self.iocb;
        let fd = types::Fd(iocb.fd);
        let (offset, len) = (iocb.offset as u64, self.bytes as u32);
        let (vector, count) = (self.iovecs.as_ptr(), self.iovecs.len() as u32);
        let flags = self.flags();
        let prio = if iocb.flags & FLAG_IOPRIO != 0 { iocb.reqprio as u16 } else { 0 };
        match iocb.opcode {
            CMD_PREAD => {
                let read = opcode::Read::new(fd, iocb.buf as *mut u8, len);
                read.offset(offset).rw_flags(flags).ioprio(prio).build()
            }
            CMD_PWRITE => {
                let write = opcode::Write::new(fd, iocb.buf as *const u8, len);
                write.offset(offset).rw_flags(flags).ioprio(prio).build()
            }
            CMD_PREADV => {
                let read = opcode::Readv::new(fd, vector, count);
                read.offset(offset).rw_flags(flags).ioprio(prio).build()
            }
            CMD_PWRITEV => {
                let write = opcode::Writev::new(fd, vector, count);
                write.offset(offset).rw_flags(flags).ioprio(prio).build()
            }
            CMD_FDSYNC => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
            CMD_FSYNC => opcode::Fsync::new(fd).build(),
            _ => opcode::PollAdd::new(fd, iocb.buf as u32).build(),
        }
    }
}

/// A transfer by one system call.
pub struct Transfer {
    read: bool,
    fd: c_int,
    offset: i64,
    flags: c_int,
    buffers: Buffers,
}

enum Buffers {
    One(iovec),
    /// The vectors of a request, which stay in the table until its event is fetched.
    Many(*const [iovec]),
}

impl Transfer {
    /// Returns the number of transferred bytes, or the negated errno.
    ///
    /// # Safety
    /// The request is still in the table; its buffers belong to the program until their completion.
    pub unsafe fn perform(&self) -> i32 {
        let vectors: *const [iovec] = match &self.buffers {
            Buffers::One(single) => std::slice::from_ref(single),
            Buffers::Many(vectors) => *vectors,
        };
        let transfer = if self.read { libc::preadv2 } else { libc::pwritev2 };
        let count = vectors.len() as c_int;
        // SAFETY: as the caller guarantees; the kernel checks the addresses in the vectors.
        let moved = unsafe { transfer(self.fd, vectors.cast(), count, self.offset, self.flags) };
        // At most MAX_TRANSFER.
        if moved < 0 { -last_errno() } else { moved as i32 }
    }
}

/// The checks that Linux's aio makes before it takes a slot of the context.
pub fn check_fields(iocb: &Iocb) -> Result<(), c_int> {
    if iocb.reserved != 0 || (iocb.nbytes as i64) < 0 { Err(EINVAL) } else { Ok(()) }
}

/// Addresses in the kernel's half are refused at submission. An unmapped address fails in its completion.
fn check_range(address: u64, bytes: u64) -> Result<(), c_int> {
    match address.checked_add(bytes.min(MAX_TRANSFER)) {
        Some(end) if (end as i64) >= 0 => Ok(()),
        _ => Err(EFAULT),
    }
}

fn access_mode(fd: c_int) -> Result<c_int, c_int> {
    // SAFETY: F_GETFL has no pointer argument.
    match unsafe { libc::fcntl(fd, libc::F_GETFL) } {
        -1 => Err(EBADF),
        mode => Ok(mode),
    }
}

fn check_eventfd(fd: c_int) -> Result<(), c_int> {
    access_mode(fd)?;
    match std::fs::read_link(format!("/proc/self/fd/{fd}")) {
        Ok(target) if !target.as_os_str().as_encoded_bytes().starts_with(b"anon_inode:[eventfd") => {
            Err(EINVAL)
        }
        _ => Ok(()),
    }
}

fn is_main_thread() -> bool {
    // SAFETY: neither call takes an argument or fails.
    unsafe { libc::syscall(libc::SYS_gettid) == libc::c_long::from(libc::getpid()) }
}

/// True if a transfer of a file of this kind always ends.
fn ends(kind: libc::mode_t) -> bool {
    matches!(kind, libc::S_IFREG | libc::S_IFBLK)
}

/// `None` for a descriptor that is closed.
fn file_type(fd: c_int) -> Option<libc::mode_t> {
    // SAFETY: `stat` is plain data, and fstat fills it or fails.
    unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        (libc::fstat(fd, &raw mut stat) == 0).then_some(stat.st_mode & libc::S_IFMT)
    }
}
