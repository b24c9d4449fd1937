//! The encodings of a subgroup's stored state, on the tier and in memory.
//!
//! | master | streams | bytes per parameter, with f32 moments | with bf16 moments | with 8-bit moments |
//! |---|---|---|---|---|
//! | full | param, exp_avg, exp_avg_sq | 12 | 8 | 6.13 |
//! | split | exp_avg, exp_avg_sq, low halves of param, table | 10, plus about 0.01 for the table | 6, plus as much | 4.13, plus as much |
//! | low | low bits of param, exp_avg, exp_avg_sq | 10 | 6 | 4.13 |
//!
//! The table holds a checksum of param, a count, and the [`Exception`]s. The stream of an 8-bit moment has the codes, and
//! from the next even byte on the bf16 scale of each block. Callers read and write states as f32: narrow moments are exact
//! in f32, and are rounded to nearest when they are written. They read and write low bits as numbers from 0 to 65,535.
//!
//! Invariants:
//! - The moments of a tier have one encoding. Masters that cannot be split are full beside split ones. Low bits have no
//!   masters of another kind beside them.
//! - Splitting does not change param.
//! - Joining gives exactly the param that was split, or an error if the 16-bit copy does not belong to it.
#![forbid(unsafe_code)]

use crate::dtype::{Dtype, Floats, FloatsMut, bf16, f16};

use super::master::{self, Exception};
use crate::checksum;
use crate::error::{Error, Result};
use crate::kernel::bytes_together;
use crate::sys::memory::BASE_PAGE;
use crate::sys::span::{self, Span};

/// Streams of a subgroup's state when it is whole: param, exp_avg, exp_avg_sq.
pub const STREAMS: usize = 3;

/// How param is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Master {
    /// As f32.
    Full,
    /// Without the upper halves, which are rebuilt from the 16-bit copy that the model holds.
    Split,
    /// As the low bits that belong to a bf16 parameter of the caller (see the kernels' `split`). An f32 parameter of the
    /// caller has none.
    Low,
}

impl Master {
    /// All kinds, in the order of their discriminants.
    pub const ALL: [Master; 3] = [Master::Full, Master::Split, Master::Low];

    /// Its name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Master::Full => "full",
            Master::Split => "split",
            Master::Low => "low bits of",
        }
    }

    /// What the name of an extent has at its end.
    fn suffix(self) -> &'static str {
        match self {
            Master::Full => "",
            Master::Split => "-split",
            Master::Low => "-low",
        }
    }
}

/// How exp_avg and exp_avg_sq are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moments {
    /// As f32.
    F32,
    /// As bf16.
    Bf16,
    /// As codes of 8 bits.
    Codes,
}

impl Moments {
    /// All encodings.
    pub const ALL: [Moments; 3] = [Moments::F32, Moments::Bf16, Moments::Codes];

    /// Their name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Moments::F32 => "f32",
            Moments::Bf16 => "bf16",
            Moments::Codes => "8-bit",
        }
    }

    /// What the name of an extent has behind the subgroup's number.
    fn suffix(self) -> &'static str {
        match self {
            Moments::F32 => "",
            Moments::Bf16 => "-bf16",
            Moments::Codes => "-codes",
        }
    }

    /// The type in which a step has them.
    pub fn stepped_as(self) -> Dtype {
        match self {
            Moments::F32 | Moments::Codes => Dtype::F32,
            Moments::Bf16 => Dtype::Bf16,
        }
    }

    /// Bytes of one of them; `None` past 2^64.
    pub fn bytes(self, elements: u64) -> Option<u64> {
        match self {
            Moments::F32 => elements.checked_mul(4),
            Moments::Bf16 => elements.checked_mul(2),
            Moments::Codes => bytes_together(elements),
        }
    }
}

/// How a subgroup's state is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Encoding {
    /// How param is stored.
    pub master: Master,
    /// How the moments are stored.
    pub moments: Moments,
}

impl Encoding {
    /// Everything in f32.
    pub const FULL: Encoding = Encoding { master: Master::Full, moments: Moments::F32 };
    /// A split master and f32 moments.
    pub const SPLIT: Encoding = Encoding { master: Master::Split, moments: Moments::F32 };

    /// The encodings with these moments, in the order of [`Master::ALL`].
    pub fn with(moments: Moments) -> [Encoding; 3] {
        Master::ALL.map(|master| Encoding { master, moments })
    }

    /// Name of the extent of a subgroup in this encoding.
    pub fn extent(self, subgroup: usize) -> String {
        format!("subgroup-{subgroup:06}{}{}", self.moments.suffix(), self.master.suffix())
    }
}

/// Name and dtype of each stream of an extent with this name and number of streams; `None` if it is no subgroup's.
pub fn tensors_of(extent: &str, streams: usize) -> Option<&'static [(&'static str, &'static str)]> {
    let number = extent.strip_prefix("subgroup-")?.split('-').next()?.parse().ok()?;
    let mut all = Moments::ALL.into_iter().flat_map(Encoding::with);
    all.find(|one| one.extent(number) == extent).map(tensors).filter(|tensors| tensors.len() == streams)
}

/// Name and dtype of the tensor that an export makes of each stream of an extent. Streams that are no optimizer's states
/// have this dtype.
pub fn exported_tensors(extent: &str, streams: usize, dtype: &str) -> Vec<(String, String)> {
    match tensors_of(extent, streams) {
        Some(tensors) => {
            tensors.iter().map(|(name, dtype)| (format!("{extent}.{name}"), dtype.to_string())).collect()
        }
        None if streams == 1 => vec![(extent.to_string(), dtype.to_string())],
        None => (0..streams).map(|number| (format!("{extent}.{number}"), dtype.to_string())).collect(),
    }
}

/// Number of 16-bit words before the exceptions, and in each exception.
const TABLE_HEAD: usize = 8;
const EXCEPTION: usize = 6;

/// Capacity of a table. Random weights need one eighth of the first term.
fn most_exceptions(elements: u64) -> u64 {
    elements / (1 << 14) + 16
}

/// Bytes of a table.
pub fn table_bytes(elements: u64) -> u64 {
    2 * (TABLE_HEAD as u64 + EXCEPTION as u64 * most_exceptions(elements))
}

fn pages(bytes: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(BASE_PAGE as u64)
}

/// Bytes of a full f32 param in whole pages; `None` past 2^64.
pub fn master_bytes(elements: u64) -> Option<u64> {
    pages(elements.checked_mul(4)?.max(1))
}

/// Bytes that an encoding takes, each stream in whole pages; `None` past 2^64.
pub fn stored_bytes(encoding: Encoding, elements: u64) -> Option<u64> {
    elements.checked_mul(4)?;
    encoding.moments.bytes(elements)?;
    streams(encoding, elements).into_iter().try_fold(0_u64, |sum, bytes| sum.checked_add(pages(bytes)?))
}

/// Bytes of each stream of an encoding, in their order.
pub fn streams(encoding: Encoding, elements: u64) -> Vec<u64> {
    // A caller with more elements than that is refused by `stored_bytes`.
    let moment = encoding.moments.bytes(elements).unwrap_or(u64::MAX);
    match encoding.master {
        Master::Full => vec![4 * elements, moment, moment],
        Master::Split => vec![moment, moment, 2 * elements, table_bytes(elements)],
        Master::Low => vec![2 * elements, moment, moment],
    }
}

/// Name and dtype of each stream of an encoding, in their order. The dtypes are those of safetensors.
pub fn tensors(encoding: Encoding) -> &'static [(&'static str, &'static str)] {
    match (encoding.master, encoding.moments) {
        (Master::Full, Moments::F32) => &[("param", "F32"), ("exp_avg", "F32"), ("exp_avg_sq", "F32")],
        (Master::Full, Moments::Bf16) => &[("param", "F32"), ("exp_avg", "BF16"), ("exp_avg_sq", "BF16")],
        (Master::Split, Moments::F32) => {
            &[("exp_avg", "F32"), ("exp_avg_sq", "F32"), ("param_low", "U16"), ("param_table", "U16")]
        }
        (Master::Split, Moments::Bf16) => {
            &[("exp_avg", "BF16"), ("exp_avg_sq", "BF16"), ("param_low", "U16"), ("param_table", "U16")]
        }
        (Master::Full, Moments::Codes) => {
            &[("param", "F32"), ("exp_avg_codes", "U8"), ("exp_avg_sq_codes", "U8")]
        }
        (Master::Low, Moments::F32) => &[("param_low", "U16"), ("exp_avg", "F32"), ("exp_avg_sq", "F32")],
        (Master::Low, Moments::Bf16) => &[("param_low", "U16"), ("exp_avg", "BF16"), ("exp_avg_sq", "BF16")],
        (Master::Low, Moments::Codes) => {
            &[("param_low", "U16"), ("exp_avg_codes", "U8"), ("exp_avg_sq_codes", "U8")]
        }
        (Master::Split, Moments::Codes) => &[
            ("exp_avg_codes", "U8"),
            ("exp_avg_sq_codes", "U8"),
            ("param_low", "U16"),
            ("param_table", "U16"),
        ],
    }
}

/// Stores f32 numbers, given as their bytes, in `to`. 16 bits are rounded to nearest even.
pub fn store(from: &[u8], to: FloatsMut<'_>) {
    fn put<T>(from: &[u8], to: &mut [T], rounded: fn(f32) -> T) {
        let numbers = from.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes));
        to.iter_mut().zip(numbers).for_each(|(to, number)| *to = rounded(number));
    }
    match to {
        FloatsMut::F32(to) => put(from, to, |number| number),
        FloatsMut::Bf16(to) => put(from, to, |number| bf16::from_bits(master::rounded(number.to_bits()))),
        FloatsMut::F16(to) => put(from, to, f16::from_f32),
    }
}

/// Copies stored numbers to `to`, as f32.
pub fn load(from: Floats<'_>, to: Span) {
    match from {
        Floats::F32(from) => to.write(span::bytes_of(from)),
        Floats::Bf16(from) => load_wide(from, to),
        Floats::F16(from) => load_wide(from, to),
    }
}

/// Copies numbers to `to`, as f32.
fn load_wide<T: Copy + Into<f32>>(from: &[T], to: Span) {
    let mut wide = [0.0; 1024];
    for (number, from) in from.chunks(wide.len()).enumerate() {
        wide.iter_mut().zip(from).for_each(|(wide, from)| *wide = (*from).into());
        to.part(4 * wide.len() * number, 4 * from.len()).write(span::bytes_of(&wide[..from.len()]));
    }
}

/// Stores low bits that are f32 numbers from 0 to 65,535, given as their bytes.
pub fn store_low(from: &[u8], low: &mut [u16]) {
    let numbers = from.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes));
    low.iter_mut().zip(numbers).for_each(|(low, number)| *low = number as u16);
}

/// Copies low bits to `to`, as f32 numbers.
pub fn load_low(low: &[u16], to: Span) {
    load_wide(low, to);
}

/// Fills low halves and table from param. False if the table has no room for all exceptions.
pub fn split(param: &[f32], low: &mut [u16], table: &mut [u16]) -> bool {
    let most = most_exceptions(param.len() as u64) as usize;
    let Some(exceptions) = master::exceptions(param, most) else { return false };
    master::pack(param, low);
    table.fill(0);
    put(&mut table[..4], sum(param));
    put(&mut table[4..TABLE_HEAD], exceptions.len() as u64);
    for (words, exception) in table[TABLE_HEAD..].chunks_exact_mut(EXCEPTION).zip(&exceptions) {
        put(&mut words[..4], exception.element);
        put(&mut words[4..], exception.bits.into());
    }
    true
}

/// Rebuilds param from low halves, table and `copy`. Errors: `copy` is not the 16-bit copy of the param that was split.
pub fn join(copy: &[bf16], low: &[u16], table: &[u16], param: &mut [f32]) -> Result<()> {
    if copy.len() != param.len() {
        return Err(missing_weights());
    }
    let count = usize::try_from(get(&table[4..TABLE_HEAD])).unwrap_or(usize::MAX);
    let exceptions: Vec<Exception> = table[TABLE_HEAD..]
        .chunks_exact(EXCEPTION)
        .take(count)
        .map(|words| Exception { element: get(&words[..4]), bits: get(&words[4..]) as u32 })
        .collect();
    match master::unpack(copy, low, &exceptions, param) && sum(param) == get(&table[..4]) {
        true => Ok(()),
        false => Err(wrong_weights()),
    }
}

/// A split param was asked for without 16-bit weights.
pub(super) fn missing_weights() -> Error {
    let reason = "must have a 16-bit weight for every element: the stored master weights are split";
    Error::invalid("weights", reason)
}

/// The 16-bit weights belong to another state.
pub(super) fn wrong_weights() -> Error {
    Error::invalid("weights", "do not match the stored state; pass the 16-bit weights of the same step")
}

fn sum(param: &[f32]) -> u64 {
    checksum::of(span::bytes_of(param))
}

fn put(words: &mut [u16], number: u64) {
    words.iter_mut().enumerate().for_each(|(place, word)| *word = (number >> (16 * place)) as u16);
}

fn get(words: &[u16]) -> u64 {
    words.iter().rev().fold(0, |number, word| number << 16 | u64::from(*word))
}

#[cfg(test)]
mod tests {
    use super::*;

    type Halves = (Vec<u16>, Vec<u16>);

    /// Low halves and table of these masters (`None` if the table is too small), and their 16-bit copy.
    fn stored(masters: &[f32]) -> (Option<Halves>, Vec<bf16>) {
        let mut low = vec![0xdead; masters.len()];
        let mut table = vec![0xdead; table_bytes(masters.len() as u64) as usize / 2];
        let split = split(masters, &mut low, &mut table);
        (split.then_some((low, table)), masters.iter().map(|x| bf16::from_f32(*x)).collect())
    }

    #[test]
    fn what_is_split_is_joined_again_for_every_size_and_only_with_its_copy() {
        for elements in [0, 1, 2, 3, 1023, 1024, 1025, 2048, 5000, 70_001] {
            let masters: Vec<f32> =
                (0..elements).map(|i| (i as f32 * 0.731).sin() / (1 + i % 7) as f32).collect();
            let (stored, mut copy) = stored(&masters);
            let (low, table) = stored.unwrap();
            let mut joined = vec![f32::NAN; elements];
            join(&copy, &low, &table, &mut joined).unwrap();
            assert_eq!(joined, masters);
            for place in [0, elements / 2, elements.saturating_sub(1)] {
                let mut wrong = copy.clone();
                let Some(weight) = wrong.get_mut(place) else { continue };
                *weight = bf16::from_bits(weight.to_bits() ^ 1);
                assert!(join(&wrong, &low, &table, &mut joined).is_err(), "{elements} elements, {place}");
            }
            copy.push(bf16::ZERO);
            assert!(join(&copy, &low, &table, &mut joined).is_err());
        }
    }

    #[test]
    fn exceptions_are_kept_as_far_as_the_table_goes() {
        let tie = f32::from_bits(0x3f81_8000);
        let most = most_exceptions(3000) as usize;
        for (ties, fits) in [(1, true), (most, true), (most + 1, false)] {
            let mut masters = vec![0.5; 3000];
            (0..ties).for_each(|i| masters[i * 170 % 3000] = tie);
            let (stored, copy) = stored(&masters);
            assert_eq!(stored.is_some(), fits, "{ties}");
            if let Some((low, table)) = stored {
                let mut joined = vec![f32::NAN; 3000];
                join(&copy, &low, &table, &mut joined).unwrap();
                assert_eq!(joined, masters);
                // The element 0 is an exception, which its copy does not determine. The copy is checked all the same.
                let mut wrong = copy.clone();
                wrong[0] = bf16::from_bits(wrong[0].to_bits() ^ 1);
                assert!(join(&wrong, &low, &table, &mut joined).is_err());
            }
        }
    }

    #[test]
    fn a_table_that_says_anything_is_no_panic() {
        let (stored, copy) = stored(&[0.25; 3000]);
        let (low, mut table) = stored.unwrap();
        for words in [&[0xffff; 4][..], &[1, 0, 0, 0]] {
            table[4..TABLE_HEAD].copy_from_slice(words);
            table[TABLE_HEAD..].fill(0xffff);
            assert!(join(&copy, &low, &table, &mut vec![0.0; 3000]).is_err());
        }
    }
}
