//! Stored numbers and strings: little endian, no padding. Every read checks its bounds.
#![forbid(unsafe_code)]

/// Parser of untrusted bytes. Every getter returns `None` past the end.
#[derive(Debug, Clone, Copy)]
pub(super) struct Decoder<'a> {
    bytes: &'a [u8],
}

impl<'a> Decoder<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Decoder<'a> {
        Decoder { bytes }
    }

    pub(super) fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.bytes.split_at_checked(len)?;
        self.bytes = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    pub(super) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    pub(super) fn u128(&mut self) -> Option<u128> {
        self.array().map(u128::from_le_bytes)
    }

    /// Bytes, preceded by their length as u32.
    pub(super) fn bytes(&mut self) -> Option<&'a [u8]> {
        let len = self.u32()?;
        self.take(len as usize)
    }

    pub(super) fn string(&mut self) -> Option<String> {
        String::from_utf8(self.bytes()?.to_vec()).ok()
    }

    /// A number of items of at least `least` bytes each. A count that exceeds the remaining bytes is `None`, so a
    /// corrupt count cannot cause a large allocation.
    pub(super) fn count(&mut self, least: usize) -> Option<usize> {
        let count = self.u32()? as usize;
        (count <= self.bytes.len() / least).then_some(count)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }
}

/// Encoder of values.
#[derive(Debug, Default)]
pub(super) struct Encoder {
    bytes: Vec<u8>,
}

impl Encoder {
    pub(super) fn raw(&mut self, bytes: &[u8]) -> &mut Self {
        self.bytes.extend_from_slice(bytes);
        self
    }

    pub(super) fn u32(&mut self, value: u32) -> &mut Self {
        self.raw(&value.to_le_bytes())
    }

    pub(super) fn u64(&mut self, value: u64) -> &mut Self {
        self.raw(&value.to_le_bytes())
    }

    pub(super) fn u128(&mut self, value: u128) -> &mut Self {
        self.raw(&value.to_le_bytes())
    }

    /// The length must fit into u32: names and payloads are limited where they enter the tier.
    pub(super) fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.u32(bytes.len() as u32).raw(bytes)
    }

    pub(super) fn finish(self) -> Vec<u8> {
        self.bytes
    }
}
