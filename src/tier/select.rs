//! Which extents, and which bytes of them, an export or an import takes.
#![forbid(unsafe_code)]

use std::ops::Range;

use crate::error::Error;

/// A choice of extents by name, and of a range.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selection {
    /// Patterns, one of which a name must match; none: every name. `*` matches any number of characters, `?` one character.
    pub names: Vec<String>,
    /// Bytes that are taken of each stream; `None`: all.
    pub range: Option<Range<u64>>,
}

impl Selection {
    /// True if the extent with this name is taken.
    pub fn takes(&self, name: &str) -> bool {
        self.names.is_empty() || self.names.iter().any(|pattern| matches(pattern, name))
    }

    /// True if everything is taken.
    pub fn is_whole(&self) -> bool {
        self.names.is_empty() && self.range.is_none()
    }

    /// The bytes that are taken of a stream with `bytes` bytes.
    pub fn of_stream(&self, bytes: u64) -> Range<u64> {
        let range = self.range.clone().unwrap_or(0..bytes);
        range.start.min(bytes)..range.end.min(bytes)
    }

    /// The error if no extent of `place` is taken.
    pub fn nothing(&self, place: &str) -> Error {
        let reason = format!(
            "no extent of {place} has such a name: {}; `spillway tier ls` lists them",
            self.names.join(", ")
        );
        Error::invalid("names", reason)
    }
}

/// True if `name` matches a pattern with `*` and `?`.
fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) = (pattern.chars().collect(), name.chars().collect());
    let (mut at, mut next) = (0, 0);
    // After a star: its place in the pattern, and how far the name is matched by it.
    let mut star: Option<(usize, usize)> = None;
    while next < name.len() {
        match pattern.get(at) {
            Some('*') => {
                star = Some((at, next));
                at += 1;
            }
            Some(letter) if *letter == '?' || *letter == name[next] => (at, next) = (at + 1, next + 1),
            _ => match star {
                Some((place, taken)) => {
                    star = Some((place, taken + 1));
                    (at, next) = (place + 1, taken + 1);
                }
                None => return false,
            },
        }
    }
    pattern[at..].iter().all(|letter| *letter == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_as_those_of_a_shell() {
        for (pattern, name, is) in [
            ("a*c", "abbbc", true),
            ("a*c", "abbb", false),
            ("*", "", true),
            ("", "", true),
            ("", "a", false),
            ("?", "é", true),
            ("subgroup-*1", "subgroup-000011", true),
            ("*a*b*", "xxaxxbxx", true),
            ("a", "ab", false),
        ] {
            assert_eq!(matches(pattern, name), is, "{pattern} {name}");
        }
        // A pattern that is slow for matchers that go back to every star.
        assert!(!matches(&"*a".repeat(30), &"a".repeat(255).replacen('a', "b", 250)));
    }

    #[test]
    fn a_range_never_passes_the_end() {
        let of = |range| Selection { names: Vec::new(), range: Some(range) }.of_stream(10);
        assert_eq!((of(0..5), of(5..50), of(20..30)), (0..5, 5..10, 10..10));
    }
}
