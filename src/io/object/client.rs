//! Requests to an S3-compatible store, over HTTP with signed addresses.
//!
//! Invariants:
//! - A request succeeded only if its status is the one that says so and every byte came: a cut-off body is a failure of
//!   the connection.
//! - What may pass (server trouble, too many requests, a lost connection) is tried again, a bounded number of times and
//!   within the patience of one request. A request that ran out of time is not: the server hangs, and the engine above
//!   has given up the path.
//! - No message holds a signed address.
//! - Requests go to the store itself, whatever HTTP_PROXY and its like say: a proxy that is there for web pages is no place
//!   for the state of a run.
#![forbid(unsafe_code)]

use std::fmt;
use std::io::Read;
use std::time::{Duration, Instant};

use rusty_s3::actions::{ListObjectsV2, S3Action};
use rusty_s3::{Bucket, Credentials, UrlStyle};
use ureq::http::{Response, StatusCode};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body};

use super::settings::{ROOTS, Settings};
use super::{Address, Answer, Listed, Refusal, Store};
use crate::error::{Error, Result};

/// Tries of a request, and the pause before the second, which doubles.
const TRIES: u32 = 4;
const PAUSE: Duration = Duration::from_millis(200);
/// Patience where nobody says otherwise, and that of requests whose failure costs little.
const PATIENCE: Duration = Duration::from_secs(60);
const SHORT_PATIENCE: Duration = Duration::from_secs(10);
/// Larger answers are none of a store.
const MOST_LISTING: u64 = 64 << 20;
const MOST_WORDS: u64 = 64 << 10;
/// Bytes read at a time.
const READ_BYTES: usize = 256 << 10;

pub(super) struct Client {
    agent: Agent,
    bucket: Bucket,
    credentials: Credentials,
    patience: Duration,
}

/// A try that failed.
struct Failure {
    refusal: Refusal,
    passing: bool,
}

type Try<T> = std::result::Result<T, Failure>;

impl Client {
    pub(super) fn of_environment(address: &Address, patience: Option<Duration>) -> Result<Client> {
        let settings = Settings::of_environment(address)?;
        let url = settings.endpoint.parse().map_err(|error| settings.wrong_endpoint(error))?;
        let style = if settings.path_style { UrlStyle::Path } else { UrlStyle::VirtualHost };
        let bucket = Bucket::new(url, style, address.bucket.clone(), settings.region.clone())
            .map_err(|error| settings.wrong_endpoint(error))?;
        let Settings { key, secret, token, roots, .. } = settings;
        let credentials = match token {
            Some(token) => Credentials::new_with_token(key, secret, token),
            None => Credentials::new(key, secret),
        };
        let mut config = Agent::config_builder().proxy(None).http_status_as_error(false).max_redirects(0);
        if let Some(path) = roots {
            config = config.tls_config(TlsConfig::builder().root_certs(trusted(&path)?).build());
        }
        let idle = super::folder::MAX_REQUESTS as usize;
        let config = config.max_idle_connections(idle).max_idle_connections_per_host(idle);
        let agent = config.build().new_agent();
        Ok(Client { agent, bucket, credentials, patience: patience.unwrap_or(PATIENCE) })
    }

    /// Tries until it succeeds, fails for good, or has no tries or time left.
    fn insist<T>(&self, patience: Duration, mut attempt: impl FnMut(Duration) -> Try<T>) -> Answer<T> {
        let began = Instant::now();
        let (mut tries, mut pause) = (0, PAUSE);
        loop {
            tries += 1;
            let left = patience.saturating_sub(began.elapsed());
            let Failure { mut refusal, passing } = match attempt(left) {
                Ok(answer) => return Ok(answer),
                Err(failure) => failure,
            };
            if !passing || tries == TRIES || began.elapsed() + pause >= patience {
                if tries > 1 {
                    refusal.words = format!("{}, {tries} times", refusal.words);
                }
                return Err(refusal);
            }
            std::thread::sleep(pause);
            pause *= 2;
        }
    }

    fn sign<'a>(&self, action: &impl S3Action<'a>) -> String {
        // Servers whose clocks differ by minutes take it as well.
        action.sign(Duration::from_secs(900) + self.patience).into()
    }

    fn list_page(
        &self,
        prefix: &str,
        token: Option<&str>,
        left: Duration,
    ) -> Try<(Vec<Listed>, Option<String>)> {
        let mut action = self.bucket.list_objects_v2(Some(&self.credentials));
        action.with_prefix(prefix);
        if let Some(token) = token {
            action.with_continuation_token(token);
        }
        let request = self.agent.get(self.sign(&action)).config().timeout_global(Some(left)).build();
        let mut response = answered(request.call(), is_ok)?;
        let body = response.body_mut().with_config().limit(MOST_LISTING).read_to_string().map_err(lost)?;
        let page = ListObjectsV2::parse_response(&body)
            .map_err(|error| for_good(format!("a listing that cannot be read: {error}")))?;
        let objects = page.contents.into_iter().map(|one| {
            let missing = || for_good(format!("a listing without the size of {}", one.key));
            Ok(Listed { len: one.size.ok_or_else(missing)?, key: one.key })
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
            return Err(for_good(format!("asked for {expected}, the server sent {stated:?}")));
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
                return Err(cut_off(done + read, len));
            }
            part(done, &buffer[..read]);
            done += read;
        }
    }
}

impl Store for Client {
    fn put(&self, key: &str, bytes: &[u8]) -> Answer<()> {
        self.insist(self.patience, |left| {
            let action = self.bucket.put_object(Some(&self.credentials), key);
            let request = self.agent.put(self.sign(&action)).config().timeout_global(Some(left)).build();
            drain(answered(request.send(bytes), is_ok)?)
        })
    }

    fn get(&self, key: &str, from: u64, len: u64, part: &mut dyn FnMut(usize, &[u8])) -> Answer<()> {
        match len {
            0 => Ok(()),
            _ => self.insist(self.patience, |left| self.get_once(key, from, len, left, part)),
        }
    }

    fn delete(&self, key: &str) -> Answer<()> {
        self.insist(self.patience.min(SHORT_PATIENCE), |left| {
            let action = self.bucket.delete_object(Some(&self.credentials), key);
            let request = self.agent.delete(self.sign(&action)).config().timeout_global(Some(left)).build();
            match answered(request.call(), StatusCode::is_success) {
                Err(failure) if failure.refusal.errno == libc::ENOENT => Ok(()),
                other => drain(other?),
            }
        })
    }

    fn list(&self, prefix: &str) -> Answer<Vec<Listed>> {
        let (mut all, mut token) = (Vec::new(), None);
        loop {
            let asked = token.as_deref();
            let (page, next) = self.insist(self.patience, |left| self.list_page(prefix, asked, left))?;
            all.extend(page.into_iter().filter(|object| object.key.starts_with(prefix)));
            if next.is_some() && next == token {
                return Err(for_good("a listing that does not go on".to_string()).refusal);
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

/// The authorities of a file, for stores of one's own.
fn trusted(path: &str) -> Result<RootCerts> {
    let wrong = |reason: String| Error::invalid(ROOTS, format!("{path}: {reason}"));
    let bytes = std::fs::read(path).map_err(|error| wrong(error.to_string()))?;
    let mut certificates = Vec::new();
    for item in parse_pem(&bytes) {
        if let PemItem::Certificate(found) = item.map_err(|error| wrong(error.to_string()))? {
            certificates.push(found);
        }
    }
    match certificates.is_empty() {
        true => Err(wrong("it holds no certificate".to_string())),
        false => Ok(RootCerts::new_with_certs(&certificates)),
    }
}

/// The answer, if its status is the one that means success.
fn answered(
    sent: std::result::Result<Response<Body>, ureq::Error>,
    success: fn(&StatusCode) -> bool,
) -> Try<Response<Body>> {
    let mut response = sent.map_err(lost)?;
    let status = response.status();
    if success(&status) {
        return Ok(response);
    }
    let body = response.body_mut().with_config().limit(MOST_WORDS).lossy_utf8(true).read_to_string();
    let (refusal, passing) = Refusal::of_status(status.as_u16(), &body.unwrap_or_default());
    Err(Failure { refusal, passing })
}

fn is_ok(status: &StatusCode) -> bool {
    *status == StatusCode::OK
}

/// Takes what is left of an answer, so that its connection serves the next request.
fn drain(mut response: Response<Body>) -> Try<()> {
    let body = response.body_mut().with_config().limit(MOST_WORDS).read_to_vec();
    body.map(|_| ()).map_err(lost)
}

/// What a connection's failure means.
fn lost(error: ureq::Error) -> Failure {
    let late = matches!(&error, ureq::Error::Timeout(_))
        || matches!(&error, ureq::Error::Io(error) if error.kind() == std::io::ErrorKind::TimedOut);
    let passing = matches!(
        error,
        ureq::Error::Io(_)
            | ureq::Error::ConnectionFailed
            | ureq::Error::HostNotFound
            | ureq::Error::Protocol(_)
    );
    let words = match error {
        ureq::Error::BadUri(_) => "AWS_ENDPOINT_URL is no address of a server".to_string(),
        other => format!("no answer from the server: {other}"),
    };
    let errno = if late { libc::ETIMEDOUT } else { libc::EIO };
    Failure { refusal: Refusal { errno, words }, passing: passing && !late }
}

fn cut_off(got: usize, len: u64) -> Failure {
    let words = format!("the server sent {got} bytes of {len}");
    Failure { refusal: Refusal { errno: libc::EIO, words }, passing: true }
}

fn for_good(words: String) -> Failure {
    Failure { refusal: Refusal { errno: libc::EIO, words }, passing: false }
}
