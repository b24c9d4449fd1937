//! The two forms that a subgroup's state has on the tier, and where they lie in a buffer.
//!
//! | form | streams | bytes a parameter |
//! |---|---|---|
//! | whole | param, exp_avg, exp_avg_sq | 12 |
//! | split | exp_avg, exp_avg_sq, low halves of param, table | 10, and the table's 0.01 |
//!
//! A buffer holds param, exp_avg and exp_avg_sq, and for the split form the table behind them, each from a page on. Low
//! halves lie where param was. The table is a checksum of param, a count, and the [`Exception`]s.
//!
//! Invariants:
//! - Splitting loses the upper halves in memory: what stays there is stored whole.
//! - Joining gives exactly the param that was split, or says that the copy is not the one that belongs to it.
#![forbid(unsafe_code)]

use crate::dtype::bf16;

use super::master::{self, Exception};
use crate::checksum;
use crate::error::{Error, Result};
use crate::pool::buffer::Buffer;
use crate::sys::memory::BASE_PAGE;
use crate::sys::span::Span;

/// Streams of a subgroup's state in memory: param, exp_avg, exp_avg_sq.
pub const STREAMS: usize = 3;

/// How a subgroup's state is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// All of it.
    Whole,
    /// Without the upper halves of param, which follow from the 16-bit copy that the model holds.
    Split,
}

/// The state of one subgroup in host memory.
#[derive(Debug)]
pub struct State<'a> {
    /// Master weights.
    pub param: &'a mut [f32],
    /// First moment.
    pub exp_avg: &'a mut [f32],
    /// Second moment.
    pub exp_avg_sq: &'a mut [f32],
}

/// Words of 16 bits before the exceptions, and of each of them.
const TABLE_HEAD: usize = 8;
const EXCEPTION: usize = 6;

/// Exceptions that fit into a table; of random weights there are eight times fewer than the first term.
fn most_exceptions(elements: u64) -> u64 {
    elements / (1 << 14) + 16
}

fn table_bytes(elements: u64) -> u64 {
    2 * (TABLE_HEAD as u64 + EXCEPTION as u64 * most_exceptions(elements))
}

fn pages(bytes: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(BASE_PAGE as u64)
}

/// Bytes of a buffer for `elements`; `None` past 2^64.
pub fn buffer_bytes(usual: Form, elements: u64) -> Option<u64> {
    let whole = pages(elements.checked_mul(4)?)?.checked_mul(STREAMS as u64)?;
    match usual {
        Form::Whole => Some(whole),
        Form::Split => whole.checked_add(pages(table_bytes(elements))?),
    }
}

/// Bytes that a form takes on the tier, each stream in whole pages; `None` past 2^64.
pub fn stored_bytes(form: Form, elements: u64) -> Option<u64> {
    elements.checked_mul(4)?;
    streams(form, elements).into_iter().try_fold(0_u64, |sum, bytes| sum.checked_add(pages(bytes)?))
}

/// Bytes of the streams of a form, in their order.
pub fn streams(form: Form, elements: u64) -> Vec<u64> {
    match form {
        Form::Whole => vec![4 * elements; STREAMS],
        Form::Split => vec![4 * elements, 4 * elements, 2 * elements, table_bytes(elements)],
    }
}

/// Where the streams of a form lie in a buffer.
pub fn spans(form: Form, buffer: Span, elements: usize) -> Vec<Span> {
    let stride = stride(elements);
    let part = |stream: usize| buffer.part(stream * stride, 4 * elements);
    match form {
        Form::Whole => (0..STREAMS).map(part).collect(),
        Form::Split => {
            let table = buffer.part(STREAMS * stride, table_bytes(elements as u64) as usize);
            vec![part(1), part(2), buffer.part(0, 2 * elements), table]
        }
    }
}

/// The state in a buffer.
pub fn state(buffer: &mut Buffer, elements: usize) -> Result<State<'_>> {
    let stride = stride(elements) / 4;
    let (param, rest) = buffer.floats()?.split_at_mut(stride);
    let (exp_avg, exp_avg_sq) = rest.split_at_mut(stride);
    Ok(State {
        param: &mut param[..elements],
        exp_avg: &mut exp_avg[..elements],
        exp_avg_sq: &mut exp_avg_sq[..elements],
    })
}

/// Puts low halves and table into a buffer, which holds no param any more; the form in which it is to be stored: whole,
/// and as it was, if the table has no room for all exceptions.
pub fn split(buffer: &mut Buffer, elements: usize) -> Result<Form> {
    let sum = buffer.span().part(0, 4 * elements).with_bytes(checksum::of);
    let most = most_exceptions(elements as u64) as usize;
    let Some(exceptions) = master::exceptions(&buffer.floats()?[..elements], most) else {
        return Ok(Form::Whole);
    };
    let words = buffer.words()?;
    master::pack(&mut words[..2 * elements]);
    let table = &mut words[STREAMS * stride(elements) / 2..][..table_bytes(elements as u64) as usize / 2];
    table.fill(0);
    put(&mut table[..4], sum);
    put(&mut table[4..TABLE_HEAD], exceptions.len() as u64);
    for (words, exception) in table[TABLE_HEAD..].chunks_exact_mut(EXCEPTION).zip(&exceptions) {
        put(&mut words[..4], exception.element);
        put(&mut words[4..], exception.bits.into());
    }
    Ok(Form::Split)
}

/// Makes param from low halves, table and `copy`. An error if `copy` is not the copy of the param that was split.
pub fn join(buffer: &mut Buffer, elements: usize, copy: &[bf16]) -> Result<()> {
    let wrong = |reason: &str| Err(Error::invalid("param_copy", reason));
    if copy.len() != elements {
        return wrong("is needed for every element: the stored state is split");
    }
    let (states, table) = buffer.words()?.split_at_mut(STREAMS * stride(elements) / 2);
    let (sum, count) = (get(&table[..4]), get(&table[4..TABLE_HEAD]));
    let count = usize::try_from(count).unwrap_or(usize::MAX).min(most_exceptions(elements as u64) as usize);
    let exceptions: Vec<Exception> = table[TABLE_HEAD..]
        .chunks_exact(EXCEPTION)
        .take(count)
        .map(|words| Exception { element: get(&words[..4]), bits: get(&words[4..]) as u32 })
        .collect();
    let inside = master::unpack(copy, &exceptions, &mut states[..2 * elements]);
    let found = buffer.span().part(0, 4 * elements).with_bytes(checksum::of);
    match inside && found == sum {
        true => Ok(()),
        false => wrong("does not hold the 16-bit weights that belong to the stored state"),
    }
}

/// Bytes from stream to stream in a buffer.
fn stride(elements: usize) -> usize {
    (4 * elements).next_multiple_of(BASE_PAGE)
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
    use crate::pool::region::Backing;

    /// A buffer with these masters, as [`split`] leaves it; the form, and the copy.
    fn stored(masters: &[f32]) -> (Buffer, Form, Vec<bf16>) {
        let bytes = buffer_bytes(Form::Split, masters.len() as u64).unwrap() as usize;
        let mut buffer = Buffer::open(bytes, Backing { huge: false, lock: false, node: None }).unwrap();
        state(&mut buffer, masters.len()).unwrap().param.copy_from_slice(masters);
        let form = split(&mut buffer, masters.len()).unwrap();
        assert!(form == Form::Split || state(&mut buffer, masters.len()).unwrap().param == masters);
        (buffer, form, masters.iter().map(|x| bf16::from_f32(*x)).collect())
    }

    #[test]
    fn what_is_split_is_joined_again_for_every_size_and_only_with_its_copy() {
        for elements in [0, 1, 2, 3, 1023, 1024, 1025, 2048, 5000, 70_001] {
            let masters: Vec<f32> =
                (0..elements).map(|i| (i as f32 * 0.731).sin() / (1 + i % 7) as f32).collect();
            let (mut buffer, form, copy) = stored(&masters);
            assert_eq!(form, Form::Split);
            join(&mut buffer, elements, &copy).unwrap();
            assert_eq!(state(&mut buffer, elements).unwrap().param, masters);
            for place in [0, elements / 2, elements.saturating_sub(1)] {
                let mut wrong = copy.clone();
                let Some(weight) = wrong.get_mut(place) else { continue };
                *weight = bf16::from_bits(weight.to_bits() ^ 1);
                assert!(join(&mut buffer, elements, &wrong).is_err(), "{elements} elements, {place}");
            }
            assert!(join(&mut buffer, elements + 1, &copy).is_err());
        }
    }

    #[test]
    fn exceptions_are_kept_as_far_as_the_table_goes_and_then_all_is_whole() {
        let tie = f32::from_bits(0x3f81_8000);
        let most = most_exceptions(3000) as usize;
        for (ties, expected) in [(1, Form::Split), (most, Form::Split), (most + 1, Form::Whole)] {
            let mut masters = vec![0.5; 3000];
            (0..ties).for_each(|i| masters[i * 170 % 3000] = tie);
            let (mut buffer, form, copy) = stored(&masters);
            assert_eq!(form, expected, "{ties}");
            if form == Form::Split {
                join(&mut buffer, 3000, &copy).unwrap();
                assert_eq!(state(&mut buffer, 3000).unwrap().param, masters);
            }
        }
    }

    #[test]
    fn the_streams_of_a_form_lie_apart_inside_the_buffer() {
        for elements in [0, 1, 1024, 1025, 70_001] {
            for form in [Form::Whole, Form::Split] {
                let bytes = buffer_bytes(form, elements as u64).unwrap() as usize;
                let buffer = Buffer::open(bytes, Backing { huge: false, lock: false, node: None }).unwrap();
                let spans = spans(form, buffer.span(), elements);
                let lengths: Vec<u64> = spans.iter().map(|span| span.len() as u64).collect();
                assert_eq!(lengths, streams(form, elements as u64));
                let mut sorted = spans.clone();
                sorted.sort_by_key(|span| (span.address(), span.len()));
                assert!(sorted.windows(2).all(|pair| pair[0].address() + pair[0].len() <= pair[1].address()));
                assert!(spans.iter().all(|span| span.address().is_multiple_of(BASE_PAGE)));
            }
        }
    }
}
