//! Sets of small numbers: processors and NUMA nodes, in the system's list and mask notations.
//!
//! Invariants:
//! - A number is below [`LIMIT`], so that a text from outside cannot ask for much memory.
//! - The last word is not 0: equal sets are equal values.
#![forbid(unsafe_code)]

use std::fmt;

use serde::{Serialize, Serializer};

/// Numbers of a set are below this one. Linux supports 8192 processors and 1024 nodes.
pub const LIMIT: u32 = 1 << 16;

/// A set of numbers below [`LIMIT`].
#[derive(Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Bitmap(Vec<u64>);

impl Bitmap {
    /// The empty set.
    pub const fn new() -> Bitmap {
        Bitmap(Vec::new())
    }

    /// Parses a list such as "0-3,8". An empty text is the empty set. `None` if it is not such a list.
    pub fn parse_list(text: &str) -> Option<Bitmap> {
        let mut set = Bitmap::new();
        for part in text.trim().split(',').filter(|_| !text.trim().is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (first.trim().parse::<u32>().ok()?, last.trim().parse::<u32>().ok()?);
            if first > last || last >= LIMIT {
                return None;
            }
            (first..=last).for_each(|number| set.insert(number));
        }
        Some(set)
    }

    /// Parses a mask of hexadecimal words of 32 bits such as "f,00000003", the highest first. `None` if it is not one.
    pub fn parse_mask(text: &str) -> Option<Bitmap> {
        let mut set = Bitmap::new();
        for (at, word) in text.trim().rsplit(',').enumerate() {
            let word = word.trim();
            let word = u32::from_str_radix(word.strip_prefix("0x").unwrap_or(word), 16).ok()?;
            let base = u32::try_from(at).ok()?.checked_mul(32)?;
            for bit in (0..32).filter(|bit| word >> bit & 1 == 1) {
                (base + bit < LIMIT).then(|| set.insert(base + bit))?;
            }
        }
        Some(set)
    }

    /// Adds a number below [`LIMIT`]; others are ignored.
    pub fn insert(&mut self, number: u32) {
        if number >= LIMIT {
            return;
        }
        let word = number as usize / 64;
        if self.0.len() <= word {
            self.0.resize(word + 1, 0);
        }
        self.0[word] |= 1 << (number % 64);
    }

    /// True if the set has this number.
    pub fn contains(&self, number: u32) -> bool {
        self.0.get(number as usize / 64).is_some_and(|word| word >> (number % 64) & 1 == 1)
    }

    /// The numbers, in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        let bits = |word: u64| (0..64).filter(move |bit| word >> bit & 1 == 1);
        self.0.iter().enumerate().flat_map(move |(at, word)| bits(*word).map(move |bit| at as u32 * 64 + bit))
    }

    /// The lowest number.
    pub fn first(&self) -> Option<u32> {
        self.iter().next()
    }

    /// Number of members.
    pub fn len(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// True for the empty set.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Members of both sets.
    #[must_use]
    pub fn and(&self, other: &Bitmap) -> Bitmap {
        Bitmap::trimmed(self.0.iter().zip(&other.0).map(|(one, two)| one & two).collect())
    }

    /// Members of either set.
    #[must_use]
    pub fn or(&self, other: &Bitmap) -> Bitmap {
        let word = |set: &Bitmap, at: usize| set.0.get(at).copied().unwrap_or(0);
        Bitmap((0..self.0.len().max(other.0.len())).map(|at| word(self, at) | word(other, at)).collect())
    }

    /// Members of this set that the other one lacks.
    #[must_use]
    pub fn minus(&self, other: &Bitmap) -> Bitmap {
        let word = |at: usize| other.0.get(at).copied().unwrap_or(0);
        Bitmap::trimmed(self.0.iter().enumerate().map(|(at, one)| one & !word(at)).collect())
    }

    /// True if the other set has every member of this one.
    pub fn is_subset(&self, other: &Bitmap) -> bool {
        self.minus(other).is_empty()
    }

    /// True if the sets have a member in common.
    pub fn meets(&self, other: &Bitmap) -> bool {
        !self.and(other).is_empty()
    }

    fn trimmed(mut words: Vec<u64>) -> Bitmap {
        let len = words.iter().rposition(|word| *word != 0).map_or(0, |last| last + 1);
        words.truncate(len);
        Bitmap(words)
    }
}

impl FromIterator<u32> for Bitmap {
    fn from_iter<T: IntoIterator<Item = u32>>(numbers: T) -> Bitmap {
        let mut set = Bitmap::new();
        numbers.into_iter().for_each(|number| set.insert(number));
        set
    }
}

/// The list notation: "0-3,8".
impl fmt::Display for Bitmap {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut comma = "";
        let mut numbers = self.iter().peekable();
        while let Some(first) = numbers.next() {
            let mut last = first;
            while numbers.next_if_eq(&(last + 1)).is_some() {
                last += 1;
            }
            if last == first {
                write!(out, "{comma}{first}")?
            } else {
                write!(out, "{comma}{first}-{last}")?
            }
            comma = ",";
        }
        Ok(())
    }
}

impl fmt::Debug for Bitmap {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{{{self}}}")
    }
}

impl Serialize for Bitmap {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_masks_are_read_and_written_as_the_kernel_writes_them() {
        for (list, mask) in [
            ("0", "1"),
            ("0-3,8", "0000010f"),
            ("31-33", "3,80000000"),
            ("0-71,144", "00010000,00000000,000000ff,ffffffff,ffffffff"),
            ("", "00000000,00000000"),
        ] {
            let set = Bitmap::parse_list(list).unwrap();
            assert_eq!(Bitmap::parse_mask(mask), Some(set.clone()), "{mask}");
            assert_eq!((set.to_string(), set.iter().count()), (list.to_string(), set.len()));
        }
        assert_eq!(Bitmap::parse_list(" 3,1-2\n").unwrap().to_string(), "1-3");
        for wrong in ["a", "1-", "-1", "3-1", "1,,2", "0-65536", "0-4294967295", "1 2", "0x3"] {
            assert_eq!(Bitmap::parse_list(wrong), None, "{wrong}");
        }
        for wrong in ["", "g", "1,", "100000000", &format!("1{}", ",0".repeat(1 << 12))] {
            assert_eq!(Bitmap::parse_mask(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn operations_agree_with_sets_of_numbers() {
        use std::collections::BTreeSet;
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..500 {
            let mut draw =
                |most: u32| (0..random.u32(0..40)).map(|_| random.u32(0..most)).collect::<BTreeSet<u32>>();
            let (one, two) = (draw(200), draw(90));
            let set = |of: &BTreeSet<u32>| of.iter().copied().collect::<Bitmap>();
            let (a, b) = (set(&one), set(&two));
            assert_eq!(a.and(&b), set(&(&one & &two)));
            assert_eq!(a.or(&b), set(&(&one | &two)));
            assert_eq!(a.minus(&b), set(&(&one - &two)));
            assert_eq!((a.is_subset(&b), a.meets(&b)), (one.is_subset(&two), !one.is_disjoint(&two)));
            assert_eq!(Bitmap::parse_list(&a.to_string()), Some(a));
        }
    }
}
