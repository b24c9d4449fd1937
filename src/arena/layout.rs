//! The format of an arena's memory. Pure.
//!
//! ```text
//! 0        header, 64 bytes: magic, version, counts, size, identity, owner, checksum
//! 64       a description of each region, 96 bytes: name, offset, length
//! ...      a control block of each region, 64 bytes: sequence, generation, writer, bell
//! ...      the bell of the verdicts and the decision word, 64 bytes
//! ...      a slot of each process, 128 bytes: joined, left, two posted results
//! ...      the regions, each from a page on
//! ```
//!
//! Invariants:
//! - Header and descriptions never change once the magic is stored. The checksum covers both.
//! - Numbers are little-endian. Offsets follow from names, lengths and counts alone: a header with other offsets is
//!   refused, so no offset of a damaged or foreign header is ever used.
#![forbid(unsafe_code)]

use crate::checksum;
use crate::error::{Error, Result};
use crate::sys::memory::BASE_PAGE;
use crate::sys::try_vec;

/// The first bytes of an arena.
pub const MAGIC: [u8; 8] = *b"SPWARENA";
/// Version of this format.
pub const VERSION: u32 = 2;
/// Most regions of an arena.
pub const MAX_REGIONS: usize = 1 << 16;
/// Most processes that post verdicts.
pub const MAX_PROCESSES: u32 = 1 << 12;
/// Most bytes of a region's name.
pub const NAME_BYTES: usize = 64;

pub const HEADER: usize = 64;
const DESCRIPTION: usize = 96;
const CONTROL: usize = 64;
const SLOT: usize = 128;
/// The checksum covers the header up to here, and the descriptions.
const SUMMED: usize = 56;

/// A region to make.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegionSpec {
    /// Its name: 1 to [`NAME_BYTES`] bytes, unique in the arena.
    pub name: String,
    /// Its length in bytes, at least 1.
    pub bytes: u64,
}

/// A region and its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Region {
    pub name: String,
    pub offset: usize,
    pub bytes: usize,
}

/// Places of all parts of an arena.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    pub regions: Vec<Region>,
    pub processes: u32,
    /// Bytes of the whole arena.
    pub total: usize,
    controls: usize,
    slots: usize,
}

/// Fields of the header besides the layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// A random number of this arena.
    pub id: u64,
    /// Process id of the owner.
    pub owner: u32,
}

impl Layout {
    /// Places the regions. `whole` rounds the size of the arena up to pages. Errors: no or too many regions or
    /// processes; an invalid name or length; more bytes than the address space.
    pub fn new(
        specs: &[RegionSpec],
        processes: u32,
        whole: impl Fn(usize) -> Option<usize>,
    ) -> Result<Layout> {
        if !(1..=MAX_REGIONS).contains(&specs.len()) {
            let reason = format!("{} regions; an arena has 1 to {MAX_REGIONS}", specs.len());
            return Err(Error::invalid("region_count", reason));
        }
        if processes > MAX_PROCESSES {
            let reason = format!("is {processes}, but the limit is {MAX_PROCESSES}");
            return Err(Error::invalid("processes", reason));
        }
        check_names(specs)?;
        let controls = (HEADER + specs.len() * DESCRIPTION).next_multiple_of(CONTROL);
        let slots = controls + (specs.len() + 1) * CONTROL;
        let mut end = slots + processes as usize * SLOT;
        let mut regions = try_vec::with_capacity("listing the regions", specs.len())?;
        for (index, spec) in specs.iter().enumerate() {
            let too_large = || Error::invalid(format!("regions[{index}].bytes"), "exceeds the address space");
            let offset = end.checked_next_multiple_of(BASE_PAGE).ok_or_else(too_large)?;
            let bytes = usize::try_from(spec.bytes).map_err(|_| too_large())?;
            if bytes == 0 {
                return Err(Error::invalid(format!("regions[{index}].bytes"), "is 0"));
            }
            end = offset.checked_add(bytes).ok_or_else(too_large)?;
            regions.push(Region { name: spec.name.clone(), offset, bytes });
        }
        let total = whole(end).filter(|total| isize::try_from(*total).is_ok());
        let total = total.ok_or_else(|| Error::invalid("regions", "exceed the address space"))?;
        Ok(Layout { regions, processes, total, controls, slots })
    }

    /// The bytes of header and descriptions. The magic is left out: it is stored last.
    pub fn encode(&self, identity: Identity) -> Result<Vec<u8>> {
        let size = HEADER + self.regions.len() * DESCRIPTION;
        let mut out = try_vec::from_fn("writing the header of an arena", size, |_| 0_u8)?;
        out[..8].copy_from_slice(&MAGIC);
        out[8..12].copy_from_slice(&VERSION.to_le_bytes());
        out[12..16].copy_from_slice(&(self.regions.len() as u32).to_le_bytes());
        out[16..20].copy_from_slice(&self.processes.to_le_bytes());
        out[20..24].copy_from_slice(&identity.owner.to_le_bytes());
        out[24..32].copy_from_slice(&(self.total as u64).to_le_bytes());
        out[32..40].copy_from_slice(&identity.id.to_le_bytes());
        for (region, to) in self.regions.iter().zip(out[HEADER..].chunks_exact_mut(DESCRIPTION)) {
            to[..region.name.len()].copy_from_slice(region.name.as_bytes());
            to[64..72].copy_from_slice(&(region.offset as u64).to_le_bytes());
            to[72..80].copy_from_slice(&(region.bytes as u64).to_le_bytes());
        }
        let sum = sum(&out);
        out[SUMMED..HEADER].copy_from_slice(&sum.to_le_bytes());
        out[..8].fill(0);
        Ok(out)
    }

    /// Bytes of header and descriptions, from the first [`HEADER`] bytes of an arena of `size` bytes; else why they are
    /// none.
    pub fn described(header: &[u8; HEADER], size: u64) -> std::result::Result<usize, String> {
        if header[..8] != MAGIC {
            return Err("it does not begin with the magic of an arena".to_string());
        }
        let version = u32_at(header, 8);
        if version != VERSION {
            return Err(format!(
                "it has format version {version}, and this library reads version {VERSION}; use one release of \
                 Spillway in all processes"
            ));
        }
        let stated = u64_at(header, 24);
        if stated != size {
            return Err(format!(
                "it has {size} bytes, but its header states {stated}: it was truncated or extended"
            ));
        }
        let (regions, processes) = (u32_at(header, 12) as usize, u32_at(header, 16));
        let bytes = HEADER.saturating_add(regions.saturating_mul(DESCRIPTION));
        match (1..=MAX_REGIONS).contains(&regions) && processes <= MAX_PROCESSES && bytes as u64 <= size {
            true => Ok(bytes),
            false => Err(format!("its header states {regions} regions and {processes} processes")),
        }
    }

    /// Process id of the owner in a header.
    pub fn owner_in(header: &[u8; HEADER]) -> u32 {
        u32_at(header, 20)
    }

    /// Reads header and descriptions, of the length that [`Layout::described`] returned; else why they are damaged.
    pub fn decode(bytes: &[u8]) -> std::result::Result<(Layout, Identity), String> {
        if sum(bytes) != u64_at(bytes, SUMMED) {
            return Err("the checksum of its header does not match".to_string());
        }
        let mut specs = Vec::new();
        for from in bytes[HEADER..].chunks_exact(DESCRIPTION) {
            let end = from[..NAME_BYTES].iter().position(|byte| *byte == 0).unwrap_or(NAME_BYTES);
            let name =
                std::str::from_utf8(&from[..end]).map_err(|_| "a region's name is not UTF-8".to_string())?;
            specs.push(RegionSpec { name: name.to_string(), bytes: u64_at(from, 72) });
        }
        let total = u64_at(bytes, 24) as usize;
        let layout = Layout::new(&specs, u32_at(bytes, 16), |end| (end <= total).then_some(total))
            .map_err(|error| error.to_string())?;
        let offsets = bytes[HEADER..].chunks_exact(DESCRIPTION).map(|from| u64_at(from, 64) as usize);
        match offsets.eq(layout.regions.iter().map(|region| region.offset)) {
            true => Ok((layout, Identity { id: u64_at(bytes, 32), owner: u32_at(bytes, 20) })),
            false => Err("a region has another offset than its length demands".to_string()),
        }
    }

    /// Control block of a region.
    pub fn control(&self, region: usize) -> Control {
        Control(self.controls + region * CONTROL)
    }

    /// The bell of the verdicts: a 32-bit word.
    pub fn verdict_bell(&self) -> usize {
        self.controls + self.regions.len() * CONTROL
    }

    /// The decision word of the verdicts: 64 bits, see `decision`.
    pub fn decision(&self) -> usize {
        self.verdict_bell() + 8
    }

    /// Slot of a process.
    pub fn slot(&self, process: u32) -> Slot {
        Slot(self.slots + process as usize * SLOT)
    }
}

/// Offsets in a control block.
#[derive(Debug, Clone, Copy)]
pub struct Control(usize);

impl Control {
    /// Odd while the region is written. 64 bits.
    pub fn sequence(self) -> usize {
        self.0
    }

    /// The last whole step. 64 bits.
    pub fn generation(self) -> usize {
        self.0 + 8
    }

    /// Process id of the last writer. 64 bits.
    pub fn writer(self) -> usize {
        self.0 + 16
    }

    /// Counts changes. 32 bits.
    pub fn bell(self) -> usize {
        self.0 + 24
    }
}

/// Offsets in a slot.
#[derive(Debug, Clone, Copy)]
pub struct Slot(usize);

impl Slot {
    /// Process id of the process that joined, 0 for none. 64 bits.
    pub fn joined(self) -> usize {
        self.0
    }

    /// The last round that the process left. 64 bits.
    pub fn left(self) -> usize {
        self.0 + 8
    }

    /// Offsets of the two results: the round, the flags, the bits of the sum; 64 bits each.
    pub fn results(self) -> [[usize; 3]; 2] {
        [self.0 + 32, self.0 + 64].map(|at| [at, at + 8, at + 16])
    }
}

fn check_names(specs: &[RegionSpec]) -> Result<()> {
    let mut names = std::collections::BTreeSet::new();
    for (index, spec) in specs.iter().enumerate() {
        let wrong = |reason: String| Error::invalid(format!("regions[{index}].name"), reason);
        if spec.name.is_empty() || spec.name.len() > NAME_BYTES || spec.name.contains('\0') {
            return Err(wrong(format!("{:?} is not 1 to {NAME_BYTES} bytes without NUL", spec.name)));
        }
        if !names.insert(&spec.name) {
            return Err(wrong(format!("{:?} names two regions", spec.name)));
        }
    }
    Ok(())
}

fn sum(bytes: &[u8]) -> u64 {
    let mut sum = checksum::RunningChecksum::default();
    sum.add(&bytes[..SUMMED]);
    sum.add(&bytes[HEADER..]);
    sum.finish()
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}
