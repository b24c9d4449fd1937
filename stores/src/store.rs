//! A bucket of a store: its address, its requests, and their errors.
#![forbid(unsafe_code)]

use std::fmt::Debug;

use crate::secrets;

/// Begins the address of an object store.
const SCHEME: &str = "s3://";

/// True if a path is an address of an object store (`s3://...`), not a directory.
pub fn is_address(path: &str) -> bool {
    path.starts_with(SCHEME)
}

/// An argument or variable that the caller must correct, or a part that was not built in.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// An argument, or a variable of the environment.
    #[error("{argument}: {reason}")]
    Invalid {
        /// Its name.
        argument: &'static str,
        /// Why it is refused.
        reason: String,
    },
    /// The feature `http` is missing.
    #[error("this crate was built without its feature http")]
    NoClient,
}

impl Error {
    /// The error of an argument.
    pub(crate) fn invalid(argument: &'static str, reason: impl Into<String>) -> Error {
        Error::Invalid { argument, reason: reason.into() }
    }
}

/// A bucket, and the prefix of the names of objects in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// Name of the bucket.
    pub bucket: String,
    /// Empty, or ends with a slash.
    pub prefix: String,
}

impl Address {
    /// Parses `s3://bucket/prefix`. The error is that of the argument "directory".
    pub fn parse(text: &str) -> Result<Address, Error> {
        let rest = text.strip_prefix(SCHEME).unwrap_or(text);
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let prefix = prefix.trim_end_matches('/');
        let named = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
        if bucket.is_empty() || !bucket.chars().all(named) {
            let reason = format!("{:?} names no bucket; use s3://BUCKET/PREFIX", secrets::shown(text));
            return Err(Error::invalid("directory", reason));
        }
        if prefix.chars().any(char::is_control)
            || prefix.split('/').any(|part| part.is_empty() || part == "." || part == "..")
                && !prefix.is_empty()
        {
            return Err(Error::invalid("directory", format!("{text:?} has a part that is empty, . or ..")));
        }
        let prefix = if prefix.is_empty() { String::new() } else { format!("{prefix}/") };
        Ok(Address { bucket: bucket.to_string(), prefix })
    }

    /// The address as the user wrote it, without a final slash; for messages.
    pub fn text(&self) -> String {
        format!("{SCHEME}{}/{}", self.bucket, self.prefix).trim_end_matches('/').to_string()
    }
}

/// The error of a failed request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreError {
    /// The errno for the failure: ENOENT, EACCES, ENOSPC, ETIMEDOUT, EBADF or EIO.
    pub errno: i32,
    /// Status and message of the server, or the failure of the connection.
    pub message: String,
}

impl StoreError {
    /// The error for an HTTP status other than success, and whether a retry may succeed.
    pub fn of_status(status: u16, body: &str) -> (StoreError, bool) {
        let within = |tag: &str| {
            let (_, rest) = body.split_once(&format!("<{tag}>"))?;
            rest.split_once(&format!("</{tag}>")).map(|(text, _)| text.trim())
        };
        let code = within("Code").unwrap_or_default();
        let errno = match status {
            401 | 403 => libc::EACCES,
            404 => libc::ENOENT,
            507 => libc::ENOSPC,
            _ => libc::EIO,
        };
        let transient = matches!(status, 408 | 429 | 500 | 502 | 503 | 504) || code == "RequestTimeout";
        let said = [Some(code), within("Message"), within("BucketName")].into_iter().flatten();
        let said: Vec<&str> = said.filter(|text| !text.is_empty()).collect();
        let message = format!("HTTP {status} {}", said.join(": ")).trim().to_string();
        (StoreError { errno, message }, transient)
    }
}

/// An object in a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectMeta {
    /// Full name of the object.
    pub key: String,
    /// Size in bytes.
    pub len: u64,
}

/// Result of a request.
pub type StoreResult<T> = Result<T, StoreError>;

/// A bucket of a store. A completed request is visible to every later one, and survives a power failure.
pub trait Store: Send + Sync + Debug {
    /// Stores a whole object.
    fn put(&self, key: &str, bytes: &[u8]) -> StoreResult<()>;

    /// Reads bytes `from..from + len` of an object. `part` receives each part with its offset among those bytes. A
    /// retry starts again at offset 0.
    fn get(&self, key: &str, from: u64, len: u64, part: &mut dyn FnMut(usize, &[u8])) -> StoreResult<()>;

    /// Deletes an object; a missing object is not an error.
    fn delete(&self, key: &str) -> StoreResult<()>;

    /// All objects whose names begin with `prefix`.
    fn list(&self, prefix: &str) -> StoreResult<Vec<ObjectMeta>>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_told_from_a_directory() {
        assert!(is_address("s3://b") && !is_address("/mnt/s3://b") && !is_address("s3"));
    }

    #[test]
    fn addresses_name_a_bucket_and_perhaps_a_prefix() {
        let of = |text| Address::parse(text).map(|found| (found.bucket, found.prefix)).ok();
        let is = |bucket: &str, prefix: &str| Some((bucket.to_string(), prefix.to_string()));
        assert_eq!(of("s3://b"), is("b", ""));
        assert_eq!(of("s3://b/"), is("b", ""));
        assert_eq!(of("s3://b-1.x/a/c//"), is("b-1.x", "a/c/"));
        for wrong in ["s3://", "s3:///a", "s3://a b", "s3://b/a//c", "s3://b/../c", "s3://b/a\n"] {
            assert_eq!(of(wrong), None, "{wrong}");
        }
        let secret = Address::parse("s3://key:hunter2@b/a").unwrap_err().to_string();
        assert!(secret.contains("names no bucket") && !secret.contains("hunter2"), "{secret}");
        assert_eq!(Address::parse("s3://b/a/").unwrap().text(), "s3://b/a");
    }

    #[test]
    fn statuses_mean_what_they_say() {
        let of = |status, body: &str| {
            let (StoreError { errno, message }, transient) = StoreError::of_status(status, body);
            (errno, transient, message)
        };
        let body = "<Error><Code>NoSuchBucket</Code><Message>no</Message><BucketName>b</BucketName></Error>";
        assert_eq!(of(404, body), (libc::ENOENT, false, "HTTP 404 NoSuchBucket: no: b".to_string()));
        assert_eq!(of(403, ""), (libc::EACCES, false, "HTTP 403".to_string()));
        assert_eq!(of(507, "").0, libc::ENOSPC);
        for status in [429, 500, 502, 503, 504] {
            assert_eq!((of(status, "").0, of(status, "").1), (libc::EIO, true));
        }
        assert!(of(400, "<Code>RequestTimeout</Code>").1 && !of(400, "<Code>InvalidRequest").1);
    }
}
