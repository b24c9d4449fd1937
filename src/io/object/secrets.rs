//! What no message may hold: keys, session tokens, signatures, passwords in addresses.
//!
//! A request is signed in its address, and servers, proxies and parsers repeat what they were sent. Words from outside
//! pass through here before they become a part of an error or of the log.
#![forbid(unsafe_code)]

const HIDDEN: &str = "[withheld]";
/// Shorter texts are no secrets, and would be found in ordinary words.
const LEAST: usize = 4;
/// Hexadecimal digits of a signature.
const SIGNATURE: usize = 64;

/// Texts to keep out of messages.
#[derive(Clone, Default)]
pub struct Secrets(Vec<String>);

impl Secrets {
    /// Of these credentials, as they are and as they stand in an address.
    pub fn new<'a>(texts: impl IntoIterator<Item = &'a str>) -> Secrets {
        let long = texts.into_iter().filter(|text| text.len() >= LEAST);
        let mut all: Vec<String> = long.flat_map(|text| [text.to_string(), encoded(text)]).collect();
        // A text that holds another is looked for first.
        all.sort_by_key(|text| std::cmp::Reverse(text.len()));
        Secrets(all)
    }

    /// The words without credentials, signatures and signed parts of addresses.
    pub fn keep_out_of(&self, words: &str) -> String {
        let words = self.0.iter().fold(words.to_string(), |words, secret| words.replace(secret, HIDDEN));
        without_signatures(&without_signed_query(&words))
    }
}

/// As the query of an address holds it.
fn encoded(text: &str) -> String {
    let one = |byte: u8| match byte {
        b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => char::from(byte).to_string(),
        other => format!("%{other:02X}"),
    };
    text.bytes().map(one).collect()
}

/// Leaves out whatever begins with a signature's parameter, up to the end of the address.
fn without_signed_query(words: &str) -> String {
    const MARK: &str = "x-amz-";
    let lower = words.to_ascii_lowercase();
    let (mut out, mut from) = (String::new(), 0);
    while let Some(found) = lower[from..].find(MARK) {
        let start = from + found;
        let rest = &words[start..];
        let end = rest.find(|c: char| c.is_whitespace() || "\"'<>()".contains(c)).unwrap_or(rest.len());
        out.push_str(&words[from..start]);
        // The name alone, without a value, says nothing.
        out.push_str(if rest[..end].contains('=') { HIDDEN } else { &rest[..end] });
        from = start + end;
    }
    out + &words[from..]
}

fn without_signatures(words: &str) -> String {
    let mut out = String::new();
    let mut digits = String::new();
    for c in words.chars().chain(['\n']) {
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

/// An address as a message may show it: its scheme, host and path, without a user, a password or a query.
pub fn shown(address: &str) -> String {
    let (scheme, rest) = address.split_once("://").map_or(("", address), |(scheme, rest)| (scheme, rest));
    // The last one: a password may hold any character.
    let host = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
    let host = host.split(['?', '#']).next().unwrap_or_default();
    let user = if rest.contains('@') { format!("{HIDDEN}@") } else { String::new() };
    let scheme = if address.contains("://") { format!("{scheme}://") } else { String::new() };
    // A scheme that holds a user is none.
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
        for words in [
            "the key AKIAEXAMPLE does not exist",
            "http://h/b/k?X-Amz-Credential=AKIAEXAMPLE%2F2026&X-Amz-Security-Token=to%2Fken%3D%3D failed",
            "se/cr+et= se%2Fcr%2Bet%3D to/ken==",
            &format!("signature {signature} is wrong"),
            &format!("<a href=\"http://h?x-amz-signature={signature}\">"),
        ] {
            let kept = secrets.keep_out_of(words);
            for secret in ["AKIAEXAMPLE", "cr+et", "cr%2Bet", "ken", &signature] {
                assert!(!kept.contains(secret), "{secret} in {kept}");
            }
            assert!(kept.contains(HIDDEN), "{kept}");
        }
        for plain in ["HTTP 404 NoSuchBucket: no: b", "x-amz-date is missing", "größer als 9", "deadbeef"] {
            assert_eq!(secrets.keep_out_of(plain), plain);
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
