//! HTTP requests to an S3-compatible store, with signed URLs.
//!
//! Invariants:
//! - A request succeeds only with the expected status and the complete body; a truncated body is a connection failure.
//! - A listing has one time limit and a limit of names, whatever the server continues to send.
//! - Transient failures (server errors, too many requests, a lost connection) are retried a bounded number of times,
//!   within the timeout of one request. A timeout is not retried: the server hangs, and the engine above has failed the
//!   path.
//! - No message contains a signed URL, a key, a session token or a signature, whatever servers and parsers return:
//!   every error passes through [`Secrets`]. A signed URL contains the key's name, the token and the signature, and is
//!   used only to send the request.
//! - Requests go directly to the store and ignore HTTP_PROXY and similar variables. A proxy for web traffic must not
//!   carry the state of a training run.
#![forbid(unsafe_code)]

use std::fmt;
use std::io::Read;
use std::panic::{self, AssertUnwindSafe};
use std::time::{Duration, Instant};

use rusty_s3::actions::{ListObjectsV2, S3Action};
use rusty_s3::{Bucket, Credentials, UrlStyle};
use ureq::http::{Response, StatusCode};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body};

use crate::secrets::{Secrets, printable};
use crate::settings::{ROOTS, StoreSettings};
use crate::store::{Address, Error, ObjectMeta, Store, StoreError, StoreResult};
use crate::volume::MAX_REQUESTS;

/// Tries of a request, and the pause before the second try, which doubles each time.
const TRIES: u32 = 4;
const PAUSE: Duration = Duration::from_millis(200);
/// Default timeout of a request, and the timeout of deletions, whose failure costs little.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
const DELETE_TIMEOUT: Duration = Duration::from_secs(10);
/// Limits on the size of a listing and of an error body; larger responses are rejected.
const MAX_LISTING: u64 = 64 << 20;
const MAX_ERROR_BODY: u64 = 64 << 10;
/// Most objects of a listing: 32 TiB in objects of the usual size.
const MAX_OBJECTS: usize = 4 << 20;
/// Bytes per read of a response body.
const READ_BYTES: usize = 256 << 10;

pub(super) struct Client {
    agent: Agent,
    bucket: Bucket,
    credentials: Credentials,
    secrets: Secrets,
    timeout: Duration,
}

/// A failed try.
struct Failure {
    error: StoreError,
    transient: bool,
}

type Try<T> = Result<T, Failure>;

impl Client {
    pub(super) fn of(
        settings: StoreSettings,
        address: &Address,
        timeout: Option<Duration>,
    ) -> Result<Client, Error> {
        let url = settings.endpoint.parse().map_err(|error| settings.wrong_endpoint(error))?;
        let style = if settings.path_style { UrlStyle::Path } else { UrlStyle::VirtualHost };
        let bucket = Bucket::new(url, style, address.bucket.clone(), settings.region.clone())
            .map_err(|error| settings.wrong_endpoint(error))?;
        let StoreSettings { key, secret, token, roots, .. } = settings;
        let secrets = Secrets::new([key.as_str(), secret.as_str(), token.as_deref().unwrap_or_default()]);
        let credentials = match token {
            Some(token) => Credentials::new_with_token(key, secret, token),
            None => Credentials::new(key, secret),
        };
        let mut config = Agent::config_builder().proxy(None).http_status_as_error(false).max_redirects(0);
        if let Some(path) = roots {
            config = config.tls_config(TlsConfig::builder().root_certs(trusted(&path)?).build());
        }
        let idle = MAX_REQUESTS as usize;
        let config = config.max_idle_connections(idle).max_idle_connections_per_host(idle);
        let agent = config.build().new_agent();
        Ok(Client { agent, bucket, credentials, secrets, timeout: timeout.unwrap_or(REQUEST_TIMEOUT) })
    }

    /// Retries until the request succeeds, fails permanently, or has no tries or time left.
    fn retry<T>(&self, timeout: Duration, attempt: impl FnMut(Duration) -> Try<T>) -> StoreResult<T> {
        self.retry_since(Instant::now(), timeout, attempt)
    }

    /// As `retry`, for a request of several that share a timeout since `began`.
    fn retry_since<T>(
        &self,
        began: Instant,
        timeout: Duration,
        mut attempt: impl FnMut(Duration) -> Try<T>,
    ) -> StoreResult<T> {
        let (mut tries, mut pause) = (0, PAUSE);
        loop {
            tries += 1;
            let left = timeout.saturating_sub(began.elapsed());
            // The client of HTTP panics where it cannot start the thread that resolves a name.
            let answer = panic::catch_unwind(AssertUnwindSafe(|| attempt(left))).unwrap_or_else(|_| {
                Err(permanent(
                    "the HTTP client failed, as it does where no thread can be started".to_string(),
                ))
            });
            let Failure { mut error, transient } = match answer {
                Ok(answer) => return Ok(answer),
                Err(failure) => failure,
            };
            if !transient || tries == TRIES || began.elapsed() + pause >= timeout {
                error.message = printable(&self.secrets.redact(&error.message));
                if tries > 1 {
                    error.message = format!("{} ({tries} attempts)", error.message);
                }
                return Err(error);
            }
            std::thread::sleep(pause);
            pause *= 2;
        }
    }

    fn sign<'a>(&self, action: &impl S3Action<'a>) -> String {
        // Valid for 15 minutes beyond the timeout, so servers whose clocks differ by minutes accept it.
        action.sign(Duration::from_secs(900) + self.timeout).into()
    }

    fn list_page(
        &self,
        prefix: &str,
        token: Option<&str>,
        left: Duration,
    ) -> Try<(Vec<ObjectMeta>, Option<String>)> {
        let mut action = self.bucket.list_objects_v2(Some(&self.credentials));
        action.with_prefix(prefix);
        if let Some(token) = token {
            action.with_continuation_token(token);
        }
        let request = self.agent.get(self.sign(&action)).config().timeout_global(Some(left)).build();
        let mut response = answered(request.call(), is_ok)?;
        let body = response.body_mut().with_config().limit(MAX_LISTING).read_to_string().map_err(lost)?;
        let page = ListObjectsV2::parse_response(&body)
            .map_err(|error| permanent(format!("the server's listing cannot be parsed: {error}")))?;
        let objects = page.contents.into_iter().map(|one| {
            let missing = || permanent(format!("the server's listing has no size of {}", one.key));
            Ok(ObjectMeta { len: one.size.ok_or_else(missing)?, key: one.key })
        });
        Ok((objects.collect::<Try<_>>()?, page.next_continuation_token))
    }

    fn get_once(
        &self,
        key: &str,
        from: u64,
        len: u64,
        left: Duration,
        part: &mut dyn FnMut(usize, &[u8]),
    ) -> Try<()> {
        let action = self.bucket.get_object(Some(&self.credentials), key);
        let range = format!("bytes={from}-{}", from + len - 1);
        let request = self.agent.get(self.sign(&action)).header("range", range);
        let request = request.config().timeout_global(Some(left)).build();
        let mut response = answered(request.call(), |status| *status == StatusCode::PARTIAL_CONTENT)?;
        let expected = format!("bytes {from}-{}/", from + len - 1);
        let stated = response.headers().get("content-range").and_then(|value| value.to_str().ok());
        if !stated.is_some_and(|stated| stated.starts_with(&expected)) {
            return Err(permanent(format!("requested {expected}, but the server sent {stated:?}")));
        }
        let mut reader = response.body_mut().with_config().limit(len + 1).reader();
        let mut buffer = vec![0; READ_BYTES.min(len as usize + 1)];
        let mut done = 0;
        loop {
            let read = reader.read(&mut buffer).map_err(|error| lost(error.into()))?;
            if read == 0 && done == len as usize {
                return Ok(());
            }
            if read == 0 || done + read > len as usize {
                return Err(truncated(done + read, len));
            }
            part(done, &buffer[..read]);
            done += read;
        }
    }
}

impl Store for Client {
    fn put(&self, key: &str, bytes: &[u8]) -> StoreResult<()> {
        self.retry(self.timeout, |left| {
            let action = self.bucket.put_object(Some(&self.credentials), key);
            let request = self.agent.put(self.sign(&action)).config().timeout_global(Some(left)).build();
            drain(answered(request.send(bytes), is_ok)?)
        })
    }

    fn get(&self, key: &str, from: u64, len: u64, part: &mut dyn FnMut(usize, &[u8])) -> StoreResult<()> {
        match len {
            0 => Ok(()),
            _ => self.retry(self.timeout, |left| self.get_once(key, from, len, left, part)),
        }
    }

    fn delete(&self, key: &str) -> StoreResult<()> {
        self.retry(self.timeout.min(DELETE_TIMEOUT), |left| {
            let action = self.bucket.delete_object(Some(&self.credentials), key);
            let request = self.agent.delete(self.sign(&action)).config().timeout_global(Some(left)).build();
            match answered(request.call(), StatusCode::is_success) {
                Err(failure) if failure.error.errno == libc::ENOENT => Ok(()),
                other => drain(other?),
            }
        })
    }

    fn list(&self, prefix: &str) -> StoreResult<Vec<ObjectMeta>> {
        let (mut all, mut token) = (Vec::new(), None);
        let began = Instant::now();
        loop {
            let asked = token.as_deref();
            if began.elapsed() >= self.timeout {
                let message = format!(
                    "the server's listing is not complete after {:?}; allow a longer I/O timeout",
                    self.timeout
                );
                return Err(StoreError { errno: libc::ETIMEDOUT, message });
            }
            let (page, next) =
                self.retry_since(began, self.timeout, |left| self.list_page(prefix, asked, left))?;
            all.extend(
                page.into_iter().filter(|object| object.key.starts_with(prefix) && is_plain(&object.key)),
            );
            if all.len() > MAX_OBJECTS {
                let message = format!("the server's listing has more than {MAX_OBJECTS} objects");
                return Err(permanent(message).error);
            }
            if next.is_some() && next == token {
                return Err(
                    permanent("the server's listing repeats its continuation token".to_string()).error
                );
            }
            match next {
                Some(next) => token = Some(next),
                None => return Ok(all),
            }
        }
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_tuple("Client").field(&self.bucket.name()).finish()
    }
}

/// The certificate authorities in a PEM file, for private stores.
fn trusted(path: &str) -> Result<RootCerts, Error> {
    let wrong = |reason: String| Error::invalid(ROOTS, format!("{path}: {reason}"));
    let bytes = std::fs::read(path).map_err(|error| wrong(error.to_string()))?;
    let mut certificates = Vec::new();
    for item in parse_pem(&bytes) {
        if let PemItem::Certificate(found) = item.map_err(|error| wrong(error.to_string()))? {
            certificates.push(found);
        }
    }
    match certificates.is_empty() {
        true => Err(wrong("the file contains no certificate".to_string())),
        false => Ok(RootCerts::new_with_certs(&certificates)),
    }
}

/// The response, if its status means success.
fn answered(
    sent: Result<Response<Body>, ureq::Error>,
    success: fn(&StatusCode) -> bool,
) -> Try<Response<Body>> {
    let mut response = sent.map_err(lost)?;
    let status = response.status();
    if success(&status) {
        return Ok(response);
    }
    let body = response.body_mut().with_config().limit(MAX_ERROR_BODY).lossy_utf8(true).read_to_string();
    let (error, transient) = StoreError::of_status(status.as_u16(), &body.unwrap_or_default());
    Err(Failure { error, transient })
}

fn is_ok(status: &StatusCode) -> bool {
    *status == StatusCode::OK
}

/// False for a name that is another one once it stands in a URL.
fn is_plain(key: &str) -> bool {
    key.split('/').all(|part| part != "." && part != "..")
}

/// Reads the rest of a response, so that its connection can serve the next request.
fn drain(mut response: Response<Body>) -> Try<()> {
    let body = response.body_mut().with_config().limit(MAX_ERROR_BODY).read_to_vec();
    body.map(|_| ()).map_err(lost)
}

/// Classifies a connection failure.
fn lost(error: ureq::Error) -> Failure {
    let late = matches!(&error, ureq::Error::Timeout(_))
        || matches!(&error, ureq::Error::Io(error) if error.kind() == std::io::ErrorKind::TimedOut);
    let transient = matches!(
        error,
        ureq::Error::Io(_)
            | ureq::Error::ConnectionFailed
            | ureq::Error::HostNotFound
            | ureq::Error::Protocol(_)
    );
    let message = match error {
        ureq::Error::BadUri(_) => {
            "AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL is not a valid server address".to_string()
        }
        other => format!("no response from the server: {other}"),
    };
    let errno = if late { libc::ETIMEDOUT } else { libc::EIO };
    Failure { error: StoreError { errno, message }, transient: transient && !late }
}

fn truncated(got: usize, len: u64) -> Failure {
    let message = format!("the server sent only {got} of {len} bytes");
    Failure { error: StoreError { errno: libc::EIO, message }, transient: true }
}

fn permanent(message: String) -> Failure {
    Failure { error: StoreError { errno: libc::EIO, message }, transient: false }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpListener;

    use super::*;

    /// A server that answers each request with 403 and echoes the request in its message.
    fn parrot() -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            while let Ok((mut stream, _)) = listener.accept() {
                let mut heard = vec![0; 64 << 10];
                let read = stream.read(&mut heard).unwrap_or(0);
                let said = String::from_utf8_lossy(&heard[..read]).into_owned();
                let body = format!(
                    "<Error><Code>AccessDenied</Code><Message>\u{1b}[31m\u{7}{said}</Message></Error>"
                );
                let head = format!("HTTP/1.1 403 Forbidden\r\ncontent-length: {}\r\n", body.len());
                let _ = stream.write_all(format!("{head}connection: close\r\n\r\n{body}").as_bytes());
            }
        });
        format!("http://{address}")
    }

    /// A server whose listing has this number of pages. Each page has one name of the prefix, and one that a URL would
    /// normalise.
    fn lister(pages: u64) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            for page in 1.. {
                let Ok((mut stream, _)) = listener.accept() else { return };
                let _ = stream.read(&mut vec![0; 64 << 10]);
                let one = |key: &str| format!("<Contents><Key>{key}</Key><Size>1</Size></Contents>");
                let body = format!(
                    "<ListBucketResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><Name>b</Name>{}{}{}\
                     </ListBucketResult>",
                    if page < pages {
                        format!("<NextContinuationToken>{page}</NextContinuationToken>")
                    } else {
                        String::new()
                    },
                    one(&format!("a/{page}")),
                    one("a/../../x"),
                );
                let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n", body.len());
                let _ = stream.write_all(format!("{head}connection: close\r\n\r\n{body}").as_bytes());
            }
        });
        format!("http://{address}")
    }

    fn client(endpoint: String, timeout: Duration) -> Client {
        let settings = StoreSettings {
            key: "AKIAEXAMPLE".to_string(),
            secret: "secret/of+mine".to_string(),
            token: Some("token/of+mine==".to_string()),
            region: "us-east-1".to_string(),
            endpoint,
            endpoint_from: "AWS_ENDPOINT_URL",
            path_style: true,
            roots: None,
        };
        Client::of(settings, &Address::parse("s3://bucket/a").unwrap(), Some(timeout)).unwrap()
    }

    #[test]
    fn a_listing_that_never_ends_fails_after_one_timeout() {
        let error = client(lister(u64::MAX), Duration::from_millis(300)).list("a/").unwrap_err();
        assert_eq!(error.errno, libc::ETIMEDOUT, "{error:?}");
    }

    #[test]
    fn names_that_a_url_would_change_are_not_listed() {
        let listed = client(lister(3), Duration::from_secs(60)).list("a/").unwrap();
        let keys: Vec<&str> = listed.iter().map(|object| object.key.as_str()).collect();
        assert_eq!(keys, ["a/1", "a/2", "a/3"]);
    }

    #[test]
    fn what_a_server_repeats_of_a_signed_request_is_in_no_message() {
        let client = client(parrot(), Duration::from_secs(60));
        let message = [
            client.put("a/b", b"bytes").unwrap_err().message,
            client.get("a/b", 0, 5, &mut |_, _| ()).unwrap_err().message,
            client.delete("a/b").unwrap_err().message,
            client.list("a/").unwrap_err().message,
            format!("{client:?}"),
        ];
        for message in message {
            assert!(message.contains("AccessDenied") || message.starts_with("Client"), "{message}");
            assert!(!message.contains(char::is_control), "{message:?}");
            for secret in ["AKIAEXAMPLE", "mine", "Signature=", "Credential="] {
                assert!(!message.contains(secret), "{secret} in {message}");
            }
        }
    }
}
