//! Reads the fields of a model's JSON description, with limits, and names what is missing or wrong.
#![forbid(unsafe_code)]

use std::cell::RefCell;

use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// Largest value of a field: sums of products of the fields stay within 128 bits.
pub const MOST: u64 = 1 << 32;
/// Most layers.
const MOST_LAYERS: u64 = 1 << 20;

/// The fields of one JSON object.
pub struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// Names of required fields that are absent.
    missing: RefCell<Vec<String>>,
}

impl<'a> Fields<'a> {
    /// The fields of `map`.
    pub fn new(map: &'a Map<String, Value>) -> Fields<'a> {
        Fields { map, missing: RefCell::default() }
    }

    /// A text field; `None` if it is absent.
    pub fn text(&self, name: &'static str) -> Result<Option<&'a str>> {
        match self.map.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong(name, other, "a text".to_string())),
        }
    }

    /// A number from 1 to [`MOST`]; `None` if it is absent or null.
    pub fn number(&self, name: &'static str) -> Result<Option<u64>> {
        self.up_to(name, MOST)
    }

    /// A number from 1 to `most`; `None` if it is absent or null.
    pub fn up_to(&self, name: &'static str, most: u64) -> Result<Option<u64>> {
        match self.map.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match whole(value).filter(|number| (1..=most).contains(number)) {
                Some(number) => Ok(Some(number)),
                None => Err(wrong(name, value, format!("a whole number from 1 to {most}"))),
            },
        }
    }

    /// A number with a default for an absent field and one for null.
    pub fn or_null(&self, name: &'static str, absent: u64, null: u64) -> Result<u64> {
        match self.map.get(name) {
            None => Ok(absent),
            Some(Value::Null) => Ok(null),
            Some(_) => Ok(self.number(name)?.unwrap_or(null)),
        }
    }

    /// A required number, under the first of the names that is present. If it is absent, 1, and [`Fields::check`]
    /// fails.
    pub fn need(&self, names: &[&'static str]) -> Result<u64> {
        self.need_up_to(names, MOST)
    }

    /// The required number of layers, as [`Fields::need`].
    pub fn layers(&self, names: &[&'static str]) -> Result<u64> {
        self.need_up_to(names, MOST_LAYERS)
    }

    /// As [`Fields::need`], with another limit.
    pub fn need_up_to(&self, names: &[&'static str], most: u64) -> Result<u64> {
        for name in names {
            if let Some(number) = self.up_to(name, most)? {
                return Ok(number);
            }
        }
        self.missing.borrow_mut().push(names.join(" or "));
        Ok(1)
    }

    /// A boolean with a default.
    pub fn flag(&self, name: &'static str, default: bool) -> Result<bool> {
        match self.map.get(name) {
            None | Some(Value::Null) => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(wrong(name, other, "true or false".to_string())),
        }
    }

    /// Names of the required fields that were absent so far.
    pub fn missing(&self) -> Vec<String> {
        self.missing.borrow().clone()
    }

    /// Fails if a required field is absent, and names all of them.
    pub fn check(&self) -> Result<()> {
        match self.missing() {
            missing if missing.is_empty() => Ok(()),
            missing => Err(Error::invalid("config", format!("lacks {}", missing.join(", ")))),
        }
    }
}

/// A number without a fraction, also where it is written as 7e9.
fn whole(value: &Value) -> Option<u64> {
    let float = || value.as_f64().filter(|number| number.fract() == 0.0 && *number >= 0.0);
    value.as_u64().or_else(|| float().map(|number| number as u64))
}

fn wrong(name: &'static str, value: &Value, wanted: String) -> Error {
    const MOST_SHOWN: usize = 40;
    let text = value.to_string();
    let shown: String = text.chars().take(MOST_SHOWN).collect();
    let dots = if shown.len() < text.len() { "..." } else { "" };
    Error::invalid(name, format!("is {shown}{dots}, but must be {wanted}"))
}
