//! Checksums, by which a program finds out whether memory has changed, and copies of many pieces of memory.

use std::ffi::c_void;

use crate::capi::optim::tensor::is_memory;
use crate::capi::prelude::*;
use crate::optim::{checksums, copies};
use crate::sys::try_vec;

/// Writes a checksum of each of `count` pieces of memory to `sums_out`. After a change the checksum differs, except with a
/// probability of 1 in 2^64. `data[i]` is the address of `bytes[i]` bytes of host memory. It may have any alignment, and
/// may be NULL if `bytes[i]` is 0. The pieces may overlap. All threads of the library read them, in one pass. A checksum
/// depends on the bytes alone. That of up to 256 KiB is their XXH3-64. That of more bytes is the XXH3-64 of the checksums
/// of each 256 KiB, as little-endian words. After an error nothing is written.
///
/// # Safety
/// `data` and `bytes` point to `count` values, `sums_out` to room for as many. No other thread writes the memory during
/// the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_checksums(
    data: In<*const c_void>,
    bytes: In<u64>,
    count: u64,
    sums_out: Out<u64>,
) -> spw_status {
    guard(|| {
        let (data, bytes) = (data.array(count, "data")?, bytes.array(count, "bytes")?);
        if count > 0 {
            sums_out.required("sums_out")?;
        }
        let mut all = try_vec::with_capacity("listing the memory", data.len())?;
        for (index, (start, length)) in data.iter().zip(bytes).enumerate() {
            // SAFETY: the caller lends the memory.
            all.push(unsafe { memory("data", *start, *length, index) }?);
        }
        sums_out.put_all(checksums::of_all(&all)?);
        Ok(())
    })
}

/// Copies `count` pieces of host memory: `bytes[i]` bytes from `from[i]` to `to[i]`. Addresses may have any alignment, and
/// may be NULL if `bytes[i]` is 0. All threads of the library copy. Memory that is read may overlap; a piece that is
/// written overlaps no other piece of the call. After an error nothing is written.
///
/// # Safety
/// `to`, `from` and `bytes` point to `count` values. No other thread writes the memory that is read during the call, nor
/// uses the memory that is written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_copies(
    to: In<*mut c_void>,
    from: In<*const c_void>,
    bytes: In<u64>,
    count: u64,
) -> spw_status {
    guard(|| {
        let (to, from) = (to.array(count, "to")?, from.array(count, "from")?);
        let bytes = bytes.array(count, "bytes")?;
        let mut pieces = try_vec::with_capacity("listing the memory", to.len())?;
        for (index, ((to, from), length)) in to.iter().zip(from).zip(bytes).enumerate() {
            // SAFETY: the caller lends both, and no other piece overlaps what is written.
            let pair =
                unsafe { (memory_mut("to", *to, *length, index)?, memory("from", *from, *length, index)?) };
            pieces.push(pair);
        }
        copies::all(&mut pieces)
    })
}

/// # Safety
/// `start` is NULL or points to `length` bytes, which no code writes during `'a`.
unsafe fn memory<'a>(argument: &str, start: *const c_void, length: u64, index: usize) -> Result<&'a [u8]> {
    check_memory(argument, start, length, index)?;
    if length == 0 {
        return Ok(&[]);
    }
    // SAFETY: not NULL, and a length that a slice can have; the caller lends the bytes.
    Ok(unsafe { std::slice::from_raw_parts(start.cast(), length as usize) })
}

/// # Safety
/// `start` is NULL or points to `length` bytes, which no other code uses during `'a`.
unsafe fn memory_mut<'a>(
    argument: &str,
    start: *mut c_void,
    length: u64,
    index: usize,
) -> Result<&'a mut [u8]> {
    check_memory(argument, start, length, index)?;
    if length == 0 {
        return Ok(&mut []);
    }
    // SAFETY: not NULL, and a length that a slice can have; the caller lends the bytes.
    Ok(unsafe { std::slice::from_raw_parts_mut(start.cast(), length as usize) })
}

/// The error of an element of `argument` that cannot be `length` bytes of memory.
fn check_memory(argument: &str, start: *const c_void, length: u64, index: usize) -> Result<()> {
    if length > 0 && start.is_null() {
        return Err(Error::invalid(
            format!("{argument}[{index}]"),
            format!("is NULL, but has {length} bytes"),
        ));
    }
    if length > 0 && !is_memory(start.addr(), length) {
        let reason = format!("{length} bytes from {start:p} exceed the address space");
        return Err(Error::invalid(format!("bytes[{index}]"), reason));
    }
    Ok(())
}
