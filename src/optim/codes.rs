//! 8-bit moments to f32 and back, by all threads.
#![forbid(unsafe_code)]

use crate::error::Result;
use crate::kernel::{BLOCK, CHUNK, Codes, Moment};
use crate::sys::{threads, try_vec};

/// Writes the values of all codes to `to`. Fails before anything is changed. Panics if lengths do not fit each other.
pub fn decode(moment: Moment, codes: Codes<'_>, to: &mut [f32]) -> Result<()> {
    let kernel = super::kernel()?;
    each(codes, to.chunks_mut(CHUNK), |codes, to| codes.decode(kernel, moment, to))
}

/// Replaces codes and scales by those of `from`, rounded to the nearest code. As [`decode`].
pub fn encode(moment: Moment, from: &[f32], codes: Codes<'_>) -> Result<()> {
    let kernel = super::kernel()?;
    each(codes, from.chunks(CHUNK), |codes, from| codes.encode(kernel, moment, from, None))
}

/// Does `work` on the codes and the values of each chunk.
fn each<T: Send>(
    codes: Codes<'_>,
    values: impl Iterator<Item = T>,
    work: impl Fn(&mut Codes<'_>, &mut T) + Sync,
) -> Result<()> {
    let elements = codes.codes.len();
    let mut parts = try_vec::with_capacity("listing the parts of a moment", elements.div_ceil(CHUNK))?;
    let chunks = codes.codes.chunks_mut(CHUNK).zip(codes.scales.chunks_mut(CHUNK / BLOCK));
    parts.extend(chunks.map(|(codes, scales)| Codes { codes, scales }).zip(values));
    let work = |(codes, values): &mut (Codes<'_>, T)| work(codes, values);
    match elements {
        // To wake a worker would take longer.
        ..=CHUNK => parts.iter_mut().for_each(work),
        _ => threads::each(&mut parts, work)?,
    }
    Ok(())
}
