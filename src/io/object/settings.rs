//! How to reach a store: what the variables of the AWS tools say.
#![forbid(unsafe_code)]

use rusty_s3::{Bucket, Credentials, UrlStyle};
use ureq::tls::{PemItem, RootCerts, parse_pem};

use super::Address;
use crate::error::{Error, Result};

const KEY: &str = "AWS_ACCESS_KEY_ID";
const SECRET: &str = "AWS_SECRET_ACCESS_KEY";
const TOKEN: &str = "AWS_SESSION_TOKEN";
const ENDPOINTS: [&str; 2] = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"];
const REGIONS: [&str; 2] = ["AWS_REGION", "AWS_DEFAULT_REGION"];
const ROOTS: &str = "AWS_CA_BUNDLE";

/// A bucket, who asks, and whom to trust.
#[derive(Debug)]
pub(super) struct Settings {
    pub(super) bucket: Bucket,
    pub(super) credentials: Credentials,
    /// `None` for the usual authorities.
    pub(super) roots: Option<RootCerts>,
}

impl Settings {
    pub(super) fn of_environment(address: &Address) -> Result<Settings> {
        Settings::of(address, |name| std::env::var(name).ok().filter(|value| !value.trim().is_empty()))
    }

    fn of(address: &Address, variable: impl Fn(&str) -> Option<String>) -> Result<Settings> {
        let first = |names: &[&str]| names.iter().find_map(|name| variable(name));
        let needed = |name: &'static str| {
            let missing = || Error::invalid(name, format!("is not set; {} needs it", address.text()));
            variable(name).ok_or_else(missing)
        };
        let (key, secret) = (needed(KEY)?, needed(SECRET)?);
        let credentials = match variable(TOKEN) {
            Some(token) => Credentials::new_with_token(key, secret, token),
            None => Credentials::new(key, secret),
        };
        let (region, endpoint) = (first(&REGIONS), first(&ENDPOINTS));
        let region = match (region, &endpoint) {
            (Some(region), _) => region,
            // Most stores of one's own have no regions and sign with this one.
            (None, Some(_)) => "us-east-1".to_string(),
            (None, None) => {
                let words = format!("is not set, nor is AWS_ENDPOINT_URL; {} needs one", address.text());
                return Err(Error::invalid(REGIONS[0], words));
            }
        };
        // A certificate of AWS holds for one label before its own name.
        let style = match endpoint.is_some() || address.bucket.contains('.') {
            true => UrlStyle::Path,
            false => UrlStyle::VirtualHost,
        };
        let endpoint = endpoint.unwrap_or_else(|| format!("https://s3.{region}.amazonaws.com"));
        let wrong = |reason: String| Error::invalid(ENDPOINTS[1], format!("{endpoint:?}: {reason}"));
        if !endpoint.starts_with("http://") && !endpoint.starts_with("https://") {
            return Err(wrong("neither http:// nor https://".to_string()));
        }
        let url = endpoint.parse().map_err(|error| wrong(format!("{error}")))?;
        let bucket = Bucket::new(url, style, address.bucket.clone(), region)
            .map_err(|error| wrong(error.to_string()))?;
        let roots = variable(ROOTS).map(|path| roots(&path)).transpose()?;
        Ok(Settings { bucket, credentials, roots })
    }
}

/// The authorities of a file, for stores of one's own.
fn roots(path: &str) -> Result<RootCerts> {
    let wrong = |reason: String| Error::invalid(ROOTS, format!("{path}: {reason}"));
    let bytes = std::fs::read(path).map_err(|error| wrong(error.to_string()))?;
    let mut certificates = Vec::new();
    for item in parse_pem(&bytes) {
        match item {
            Ok(PemItem::Certificate(certificate)) => certificates.push(certificate),
            Ok(_) => {}
            Err(error) => return Err(wrong(error.to_string())),
        }
    }
    match certificates.is_empty() {
        true => Err(wrong("it holds no certificate".to_string())),
        false => Ok(RootCerts::new_with_certs(&certificates)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> Result<Settings> {
        let address = Address::parse("s3://bucket/a").unwrap();
        let find = |name: &str| variables.iter().find(|(known, _)| *known == name);
        Settings::of(&address, |name| find(name).map(|(_, value)| value.to_string()))
    }

    fn named(outcome: Result<Settings>) -> String {
        match outcome.unwrap_err() {
            Error::InvalidArgument { argument, .. } => argument.into_owned(),
            other => panic!("{other}"),
        }
    }

    const WHO: [(&str, &str); 2] = [(KEY, "k"), (SECRET, "s")];

    fn with(more: &[(&'static str, &'static str)]) -> Result<Settings> {
        of(&[&WHO, more].concat())
    }

    #[test]
    fn what_is_missing_is_named() {
        assert_eq!(named(of(&[])), KEY);
        assert_eq!(named(of(&WHO[..1])), SECRET);
        assert_eq!(named(with(&[])), REGIONS[0]);
        assert_eq!(named(with(&[("AWS_ENDPOINT_URL", "store:9000")])), "AWS_ENDPOINT_URL");
        assert_eq!(named(with(&[("AWS_ENDPOINT_URL", "http://")])), "AWS_ENDPOINT_URL");
        assert_eq!(named(with(&[("AWS_REGION", "r"), (ROOTS, "no/such/file")])), ROOTS);
    }

    #[test]
    fn addresses_follow_the_endpoint() {
        let url = |outcome: Result<Settings>| outcome.unwrap().bucket.object_url("x").to_string();
        assert_eq!(url(with(&[("AWS_DEFAULT_REGION", "r")])), "https://bucket.s3.r.amazonaws.com/x");
        let own = ("AWS_ENDPOINT_URL", "http://store:9000");
        assert_eq!(url(with(&[own])), "http://store:9000/bucket/x");
        let both = [own, ("AWS_ENDPOINT_URL_S3", "http://first:9000"), ("AWS_REGION", "r")];
        let found = with(&both).unwrap();
        assert_eq!(found.bucket.region(), "r");
        assert_eq!(found.bucket.object_url("x").as_str(), "http://first:9000/bucket/x");
    }
}
