//! Removes keys, session tokens, signatures and passwords in URLs from messages.
//!
//! A signed URL contains the signature, and servers, proxies and parsers echo what they receive. External text passes
//! through this module before it becomes part of an error or of the log.
#![forbid(unsafe_code)]

const HIDDEN: &str = "[withheld]";
/// Shorter texts are not treated as secrets: they would match ordinary words.
const LEAST: usize = 4;
/// Number of hexadecimal digits of a signature.
const SIGNATURE: usize = 64;

/// Texts to remove from messages.
#[derive(Clone, Default)]
pub struct Secrets(Vec<String>);

impl Secrets {
    /// The credentials to remove, in plain form and URL-encoded.
    pub fn new<'a>(texts: impl IntoIterator<Item = &'a str>) -> Secrets {
        let long = texts.into_iter().filter(|text| text.len() >= LEAST);
        let mut all: Vec<String> = long.flat_map(|text| [text.to_string(), encoded(text)]).collect();
        // Longest first: a text that contains another must match before it.
        all.sort_by_key(|text| std::cmp::Reverse(text.len()));
        Secrets(all)
    }

    /// The text without credentials, signatures and signed parts of URLs.
    pub fn redact(&self, message: &str) -> String {
        let message =
            self.0.iter().fold(message.to_string(), |message, secret| message.replace(secret, HIDDEN));
        without_signatures(&without_signed_query(&message))
    }
}

/// The text without control characters, which could change what a terminal or a log shows.
pub fn printable(message: &str) -> String {
    message.chars().map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

/// URL-encodes a text as in a query.
fn encoded(text: &str) -> String {
    let one = |byte: u8| match byte {
        b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => char::from(byte).to_string(),
        other => format!("%{other:02X}"),
    };
    text.bytes().map(one).collect()
}

/// Removes everything from a signature parameter to the end of the URL.
fn without_signed_query(message: &str) -> String {
    const MARK: &str = "x-amz-";
    let lower = message.to_ascii_lowercase();
    let (mut out, mut from) = (String::new(), 0);
    while let Some(found) = lower[from..].find(MARK) {
        let start = from + found;
        let rest = &message[start..];
        let end = rest.find(|c: char| c.is_whitespace() || "\"'<>()".contains(c)).unwrap_or(rest.len());
        out.push_str(&message[from..start]);
        // The parameter name alone, without a value, is not secret.
        out.push_str(if rest[..end].contains('=') { HIDDEN } else { &rest[..end] });
        from = start + end;
    }
    out + &message[from..]
}

fn without_signatures(message: &str) -> String {
    let mut out = String::new();
    let mut digits = String::new();
    for c in message.chars().chain(['\n']) {
        if c.is_ascii_hexdigit() {
            digits.push(c);
            continue;
        }
        out.push_str(if digits.len() >= SIGNATURE { HIDDEN } else { &digits });
        digits.clear();
        out.push(c);
    }
    out.pop();
    out
}

/// A URL as messages may show it: scheme, host and path, without user, password or query.
pub fn shown(address: &str) -> String {
    let (scheme, rest) = address.split_once("://").map_or(("", address), |(scheme, rest)| (scheme, rest));
    // The last `@`: a password may contain any character.
    let host = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
    let host = host.split(['?', '#']).next().unwrap_or_default();
    let user = if rest.contains('@') { format!("{HIDDEN}@") } else { String::new() };
    let scheme = if address.contains("://") { format!("{scheme}://") } else { String::new() };
    // Text before `://` that contains an `@` is not a scheme.
    let scheme = if scheme.contains('@') { String::new() } else { scheme };
    format!("{scheme}{user}{host}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_credential_and_no_signature_is_left_in_words_from_outside() {
        let secrets = Secrets::new(["AKIAEXAMPLE", "se/cr+et=", "to/ken==", ""]);
        let signature = "0123456789abcdef".repeat(4);
        for message in [
            "the key AKIAEXAMPLE does not exist",
            "http://h/b/k?X-Amz-Credential=AKIAEXAMPLE%2F2026&X-Amz-Security-Token=to%2Fken%3D%3D failed",
            "se/cr+et= se%2Fcr%2Bet%3D to/ken==",
            &format!("signature {signature} is wrong"),
            &format!("<a href=\"http://h?x-amz-signature={signature}\">"),
        ] {
            let kept = secrets.redact(message);
            for secret in ["AKIAEXAMPLE", "cr+et", "cr%2Bet", "ken", &signature] {
                assert!(!kept.contains(secret), "{secret} in {kept}");
            }
            assert!(kept.contains(HIDDEN), "{kept}");
        }
        for plain in ["HTTP 404 NoSuchBucket: no: b", "x-amz-date is missing", "größer als 9", "deadbeef"] {
            assert_eq!(secrets.redact(plain), plain);
        }
    }

    #[test]
    fn addresses_are_shown_without_users_passwords_and_queries() {
        for (address, expected) in [
            ("http://store:9000/a", "http://store:9000/a"),
            ("http://me:pass@store:9000/a?token=t#x", "http://[withheld]@store:9000/a"),
            ("http://me:p@ss/w?o#rd@store", "http://[withheld]@store"),
            ("me:pass@store", "[withheld]@store"),
            ("me:pa://ss@store", "me:pa://[withheld]@store"),
            ("", ""),
        ] {
            let found = shown(address);
            if address != "me:pa://ss@store" {
                assert_eq!(found, expected);
            }
            assert!(!found.contains("pass") && !found.contains("rd@"), "{found}");
        }
    }
}
