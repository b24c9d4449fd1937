//! What an export says about itself: a file `manifest.json` in a directory, or the metadata of a safetensors file. And the
//! header of such a file.
//!
//! Invariants:
//! - A header or a manifest may hold anything. It is read only up to a limit, and every range in it is checked against
//!   the length of the file before it is used.
//! - A manifest of a known version has the keys of that version, and no other. A key that is not known is damage: the checksum
//!   covers the known ones alone.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::extent::PAGE;
use super::storage::failed;
use crate::checksum;
use crate::error::{Doing, Error, Result, TierError, TierKind};
use crate::sys::{private_files, try_vec};

/// Name of the manifest in a directory.
pub(super) const MANIFEST: &str = "manifest.json";
const FORMAT: &str = "spillway tier export";
const VERSION: u32 = 1;
/// Maximum length of a manifest, in bytes.
const MAX_MANIFEST: u64 = 1 << 30;
/// Maximum length of the header of a safetensors file, as its format says.
const MAX_HEADER: u64 = 100_000_000;
/// Bytes before the header: its length.
const LENGTH: u64 = 8;
/// The key of the manifest in the metadata.
const KEY: &str = "spillway";

/// What a manifest of any version has.
#[derive(Debug, Deserialize)]
struct Kind {
    format: String,
    version: u32,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Manifest {
    format: String,
    version: u32,
    pub(super) job: String,
    pub(super) rank: u32,
    pub(super) world: u32,
    pub(super) step: u64,
    /// Payload of the commit, in hexadecimal.
    payload: String,
    /// True if extents of the commit were left out.
    #[serde(default)]
    pub(super) partial: bool,
    pub(super) extents: Vec<Exported>,
    /// [`Manifest::own_checksum`], in hexadecimal.
    checksum: String,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Exported {
    pub(super) name: String,
    pub(super) streams: Vec<Stream>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Stream {
    /// The file in the directory, or the tensor.
    pub(super) place: String,
    pub(super) bytes: u64,
    /// [`sum_of`] the stream, in hexadecimal.
    pub(super) checksum: String,
}

/// Hexadecimal digits of a [`sum_of`].
pub(super) fn digits(sum: u64) -> String {
    format!("{sum:016x}")
}

/// Sum of the pages of a part that begins at byte `from` of its stream, a whole number of pages. The sum of a stream is
/// that of its parts, in any order, modulo 2^64.
pub(super) fn sum_of(from: u64, bytes: &[u8]) -> u64 {
    let pages = bytes.chunks(PAGE as usize).zip(from / PAGE..);
    pages.fold(0, |sum, (page, number)| {
        let mut pair = [0; 16];
        pair[..8].copy_from_slice(&number.to_le_bytes());
        pair[8..].copy_from_slice(&checksum::of(page).to_le_bytes());
        sum.wrapping_add(checksum::of(&pair))
    })
}

impl Manifest {
    pub(super) fn new(job: &str, (rank, world): (u32, u32), step: u64, payload: &[u8]) -> Manifest {
        Manifest {
            format: FORMAT.to_string(),
            version: VERSION,
            job: job.to_string(),
            rank,
            world,
            step,
            payload: payload.iter().map(|byte| format!("{byte:02x}")).collect(),
            partial: false,
            extents: Vec::new(),
            checksum: digits(0),
        }
    }

    /// Checksum of all other fields.
    fn own_checksum(&mut self) -> Result<String> {
        let stated = std::mem::take(&mut self.checksum);
        let text = serde_json::to_vec(self).map_err(|error| not_json(&error))?;
        self.checksum = stated;
        Ok(digits(checksum::of(&text)))
    }

    /// Sets the checksum of the complete manifest.
    pub(super) fn seal(&mut self) -> Result<()> {
        self.checksum = self.own_checksum()?;
        Ok(())
    }

    pub(super) fn json(&self) -> Result<Vec<u8>> {
        serde_json::to_vec_pretty(self).map_err(|error| not_json(&error))
    }

    /// Reads the manifest of a directory.
    pub(super) fn read(path: &Path) -> Result<Manifest> {
        let mut message = Vec::new();
        let fail = |error| failed(Doing::Opening, path, error, "");
        let file = private_files::open_to_check(path).map_err(fail)?;
        let bytes = file.metadata().map_err(fail)?.len();
        if bytes > MAX_MANIFEST {
            return Err(damaged(
                path,
                format!("it has {bytes} bytes, but the limit of a manifest is {MAX_MANIFEST}"),
            ));
        }
        file.take(MAX_MANIFEST).read_to_end(&mut message).map_err(fail)?;
        Manifest::parse(path, &message)
    }

    fn parse(path: &Path, message: &[u8]) -> Result<Manifest> {
        let wrong = |error: serde_json::Error| damaged(path, error.to_string());
        let Kind { format, version } = serde_json::from_slice(message).map_err(wrong)?;
        if format != FORMAT {
            return Err(unknown(path, format!("its format {format:?} is unknown")));
        }
        if version != VERSION {
            let reason = format!("its version is {version}, but this library reads {VERSION}");
            return Err(unknown(path, reason));
        }
        let mut manifest: Manifest = serde_json::from_slice(message).map_err(wrong)?;
        let (own, stated) = (manifest.own_checksum()?, &manifest.checksum);
        if own != *stated {
            let reason = format!("its checksum is {own}, but it states {stated:?}; it was changed");
            return Err(damaged(path, reason));
        }
        Ok(manifest)
    }

    /// The payload; `path` is for messages.
    pub(super) fn payload(&self, path: &Path) -> Result<Vec<u8>> {
        parse_hex(&self.payload).ok_or_else(|| damaged(path, "its payload is not hexadecimal".to_string()))
    }
}

/// Error of an export that is not as it was written.
pub(super) fn damaged(path: &Path, message: String) -> Error {
    TierError::at(TierKind::Corrupt, path.to_string_lossy(), message)
}

/// Error of what is no export of a version that this library reads.
pub(super) fn unknown(path: &Path, message: String) -> Error {
    TierError::at(TierKind::Format, path.to_string_lossy(), message)
}

fn not_json(error: &serde_json::Error) -> Error {
    Error::System { what: "writing a manifest", reason: error.to_string() }
}

fn parse_hex(text: &str) -> Option<Vec<u8>> {
    let digits: Option<Vec<u8>> = text.chars().map(|digit| digit.to_digit(16).map(|n| n as u8)).collect();
    let digits = digits.filter(|digits| digits.len().is_multiple_of(2))?;
    Some(digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect())
}

/// A tensor of a safetensors file.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Tensor {
    pub(super) dtype: String,
    pub(super) shape: Vec<u64>,
    /// First byte behind the header, and the byte after the last one.
    pub(super) data_offsets: [u64; 2],
}

/// The header of a safetensors file.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Header {
    #[serde(rename = "__metadata__", default, skip_serializing_if = "BTreeMap::is_empty")]
    metadata: BTreeMap<String, String>,
    #[serde(flatten)]
    pub(super) tensors: BTreeMap<String, Tensor>,
}

/// Bytes of an element of a dtype of safetensors; `None` if the dtype is unknown.
pub(super) fn item_bytes(dtype: &str) -> Option<u64> {
    match dtype {
        "F64" | "I64" | "U64" => Some(8),
        "F32" | "I32" | "U32" => Some(4),
        "F16" | "BF16" | "I16" | "U16" => Some(2),
        "I8" | "U8" | "BOOL" | "F8_E4M3" | "F8_E5M2" => Some(1),
        _ => None,
    }
}

impl Header {
    /// Adds a tensor of one dimension behind the others.
    pub(super) fn add(&mut self, name: &str, dtype: &str, elements: u64, from: u64, to: u64) -> Result<()> {
        let tensor = Tensor { dtype: dtype.to_string(), shape: vec![elements], data_offsets: [from, to] };
        if name == "__metadata__" || self.tensors.insert(name.to_string(), tensor).is_some() {
            let reason = format!(
                "two tensors of the file would have the name {name:?}, or it is reserved; export these extents to \
                 files of their own"
            );
            return Err(Error::invalid("names", reason));
        }
        Ok(())
    }

    /// Sets the manifest that the metadata hold.
    pub(super) fn describe(&mut self, manifest: &Manifest) -> Result<()> {
        let text = serde_json::to_string(manifest).map_err(|error| not_json(&error))?;
        self.metadata.insert(KEY.to_string(), text);
        Ok(())
    }

    /// The bytes before those of the tensors, a whole number of pages: direct I/O then needs no copies.
    pub(super) fn packed(&self) -> Result<Vec<u8>> {
        let text = serde_json::to_vec(self).map_err(|error| not_json(&error))?;
        let all = (LENGTH + text.len() as u64).next_multiple_of(PAGE);
        if all - LENGTH > MAX_HEADER {
            let reason = format!(
                "the header of {} tensors has {} bytes, and a safetensors file has at most {MAX_HEADER}; export to \
                 several files by name",
                self.tensors.len(),
                all - LENGTH
            );
            return Err(Error::invalid("names", reason));
        }
        let mut bytes = (all - LENGTH).to_le_bytes().to_vec();
        bytes.extend_from_slice(&text);
        bytes.resize(all as usize, b' ');
        Ok(bytes)
    }

    /// Reads the header of a file, with the manifest if Spillway wrote it, and the offset of the first tensor. The tensors
    /// have as many bytes as dtype and shape say, and are the whole file behind the header.
    pub(super) fn read(path: &Path) -> Result<(Header, Option<Manifest>, u64)> {
        let fail = |error| failed(Doing::Opening, path, error, "");
        let mut file = private_files::open_to_check(path).map_err(fail)?;
        let bytes = file.metadata().map_err(fail)?.len();
        let wrong = |message: String| unknown(path, format!("it is no safetensors file: {message}"));
        let mut length = [0; LENGTH as usize];
        if bytes < LENGTH {
            return Err(wrong(format!("it has {bytes} bytes")));
        }
        file.read_exact(&mut length).map_err(fail)?;
        let length = u64::from_le_bytes(length);
        if length > MAX_HEADER.min(bytes - LENGTH) {
            return Err(wrong(format!("its header has {length} bytes, and the file {bytes}")));
        }
        let text = read_exactly(&mut file, length, path)?;
        let mut header: Header = serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
        let manifest =
            header.metadata.remove(KEY).map(|text| Manifest::parse(path, text.as_bytes())).transpose()?;
        let (begin, content) = (LENGTH + length, bytes - LENGTH - length);
        header.check(content).map_err(|message| match manifest {
            Some(_) => damaged(path, message),
            None => wrong(message),
        })?;
        Ok((header, manifest, begin))
    }

    /// The format leaves no bytes between tensors or behind the last one, and no two tensors share bytes.
    fn check(&self, content: u64) -> std::result::Result<(), String> {
        let mut tensors: Vec<_> = self.tensors.iter().collect();
        tensors.sort_by_key(|(_, tensor)| tensor.data_offsets);
        let mut end = 0;
        for (name, tensor) in tensors {
            tensor.check(content).map_err(|message| format!("tensor {name:?}: {message}"))?;
            if tensor.data_offsets[0] != end {
                return Err(format!(
                    "tensor {name:?} begins at byte {}, but the tensor before it ends at {end}",
                    tensor.data_offsets[0]
                ));
            }
            end = tensor.data_offsets[1];
        }
        match end == content {
            true => Ok(()),
            false => Err(format!("its tensors end at byte {end} of {content}")),
        }
    }
}

fn read_exactly(file: &mut File, length: u64, path: &Path) -> Result<Vec<u8>> {
    let mut text = try_vec::with_capacity("reading a header", length as usize)?;
    let read = file.take(length).read_to_end(&mut text);
    match read.map(|read| read as u64 == length) {
        Ok(true) => Ok(text),
        Ok(false) => Err(failed(Doing::Reading, path, io::ErrorKind::UnexpectedEof.into(), "")),
        Err(error) => Err(failed(Doing::Reading, path, error, "")),
    }
}

impl Tensor {
    /// Length in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.data_offsets[1] - self.data_offsets[0]
    }

    fn check(&self, content: u64) -> std::result::Result<(), String> {
        let Tensor { dtype, shape, data_offsets: [from, to] } = self;
        if from > to || *to > content {
            return Err(format!("its bytes are {from} to {to} of {content}"));
        }
        let item = item_bytes(dtype).ok_or_else(|| format!("its dtype {dtype:?} is unknown"))?;
        match shape.iter().try_fold(item, |bytes, length| bytes.checked_mul(*length)) {
            Some(bytes) if bytes == to - from => Ok(()),
            _ => Err(format!("it has {} bytes for {dtype} of shape {shape:?}", to - from)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sum_of_a_stream_is_that_of_its_parts_in_any_order() {
        let bytes: Vec<u8> = (0..20_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        let parts = [(8192, 20_000), (0, 4096), (4096, 8192)];
        let sum = parts
            .iter()
            .fold(0_u64, |sum, (from, to)| sum.wrapping_add(sum_of(*from as u64, &bytes[*from..*to])));
        assert_eq!(sum, sum_of(0, &bytes));
        let mut other = bytes.clone();
        other.swap(100, 101);
        assert_ne!(sum_of(0, &other), sum);
        let mut pages = bytes[4096..8192].to_vec();
        pages.extend_from_slice(&bytes[..4096]);
        pages.extend_from_slice(&bytes[8192..]);
        assert_ne!(sum_of(0, &pages), sum, "two pages changed places");
    }

    #[test]
    fn an_unknown_key_is_damage_in_a_known_version_and_another_version_is_named() {
        let mut manifest = Manifest::new("run", (0, 1), 7, b"payload");
        let stream = Stream { place: "a".to_string(), bytes: 4, checksum: digits(1) };
        manifest.extents.push(Exported { name: "a".to_string(), streams: vec![stream] });
        manifest.seal().unwrap();
        let whole: serde_json::Value = serde_json::from_slice(&manifest.json().unwrap()).unwrap();
        let parse =
            |value: &serde_json::Value| Manifest::parse(Path::new("m"), &serde_json::to_vec(value).unwrap());
        parse(&whole).unwrap();
        for place in ["", "/extents/0", "/extents/0/streams/0"] {
            let mut changed = whole.clone();
            changed.pointer_mut(place).unwrap()["more"] = 1.into();
            let error = parse(&changed).unwrap_err();
            assert_eq!(error.tier_kind(), Some(TierKind::Corrupt), "{error}");
            assert!(error.to_string().contains("unknown field `more`"), "{error}");
            // A later version may have this key.
            changed["version"] = (VERSION + 1).into();
            let error = parse(&changed).unwrap_err();
            assert_eq!(error.tier_kind(), Some(TierKind::Format), "{error}");
            assert!(error.to_string().contains("its version is 2"), "{error}");
        }
    }

    #[test]
    fn a_header_that_lies_is_refused_without_an_allocation() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file.safetensors");
        let tensor = |offsets: &str, shape: &str| {
            format!("{{\"a\":{{\"dtype\":\"F32\",\"shape\":{shape},\"data_offsets\":{offsets}}}}}")
        };
        let file = |length: u64, text: &str| [&length.to_le_bytes(), text.as_bytes(), &[0; 16]].concat();
        let whole = |text: &str| file(text.len() as u64, text);
        let mut cases =
            vec![vec![], vec![1; 7], file(1 << 63, ""), file(u64::MAX, "{}"), file(100, "{}"), whole("[]")];
        cases.extend(
            [("[0,17]", "[4]"), ("[8,4]", "[1]"), ("[0,8]", "[4]"), ("[0,0]", "[4611686018427387905]")]
                .map(|(offsets, shape)| whole(&tensor(offsets, shape))),
        );
        // Two tensors that share bytes, that leave some between them, and that leave some at the end of the 16 bytes.
        let pair = |offsets: &str, shape: &str| {
            let (first, second) = (tensor("[0,8]", "[2]"), tensor(offsets, shape).replace("{\"a\"", "\"b\""));
            whole(&format!("{},{second}", first.strip_suffix('}').unwrap()))
        };
        cases.extend(
            [("[4,16]", "[3]"), ("[12,16]", "[1]"), ("[8,12]", "[1]")]
                .map(|(offsets, shape)| pair(offsets, shape)),
        );
        cases.extend([whole(&"[".repeat(10_000)), whole("{\"__metadata__\":{\"spillway\":\"{}\"}}")]);
        for bytes in cases {
            std::fs::write(&path, &bytes).unwrap();
            let error = Header::read(&path).unwrap_err();
            let manifest = bytes.windows(8).any(|word| word == b"spillway");
            let kind = if manifest { TierKind::Corrupt } else { TierKind::Format };
            assert_eq!(error.tier_kind(), Some(kind), "{error}");
        }
        std::fs::write(&path, whole(&tensor("[0,16]", "[2,2]"))).unwrap();
        let (header, manifest, _) = Header::read(&path).unwrap();
        assert_eq!((header.tensors["a"].bytes(), manifest.is_none()), (16, true));
        std::fs::write(&path, pair("[8,16]", "[2]")).unwrap();
        assert_eq!(Header::read(&path).unwrap().0.tensors["b"].bytes(), 8);
    }
}
