//! The structs that libaio and its callers share, laid out as in `<libaio.h>` on 64-bit little-endian machines.

#[cfg(not(all(target_pointer_width = "64", target_endian = "little")))]
compile_error!("the layout of libaio's records is implemented for 64-bit little-endian machines only");

pub const CMD_PREAD: u16 = 0;
pub const CMD_PWRITE: u16 = 1;
pub const CMD_FSYNC: u16 = 2;
pub const CMD_FDSYNC: u16 = 3;
pub const CMD_POLL: u16 = 5;
pub const CMD_PREADV: u16 = 7;
pub const CMD_PWRITEV: u16 = 8;

/// `flags`: `resfd` is an eventfd that receives a notice of the completion.
pub const FLAG_RESFD: u32 = 1;
/// `flags`: `reqprio` is an I/O priority.
pub const FLAG_IOPRIO: u32 = 2;

/// One request. For a poll, `buf` holds the event mask; for vectored transfers `buf` and `nbytes` are the vector.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Iocb {
    pub data: u64,
    pub key: u32,
    pub rw_flags: u32,
    pub opcode: u16,
    pub reqprio: i16,
    pub fd: i32,
    pub buf: u64,
    pub nbytes: u64,
    pub offset: i64,
    pub reserved: u64,
    pub flags: u32,
    pub resfd: u32,
}

/// One completion: `res` is bytes, a poll mask, or a negated errno.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct IoEvent {
    pub data: u64,
    pub obj: u64,
    pub res: i64,
    pub res2: i64,
}

const _: () = assert!(size_of::<Iocb>() == 64 && size_of::<IoEvent>() == 32);
const _: () = assert!(std::mem::offset_of!(Iocb, buf) == 24 && std::mem::offset_of!(Iocb, resfd) == 60);
