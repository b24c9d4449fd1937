//! Endpoint and credentials of a store, from the environment variables of the AWS tools.
#![forbid(unsafe_code)]

use crate::secrets::shown;
use crate::store::{Address, Error};

const KEY: &str = "AWS_ACCESS_KEY_ID";
const SECRET: &str = "AWS_SECRET_ACCESS_KEY";
const TOKEN: &str = "AWS_SESSION_TOKEN";
const ENDPOINTS: [&str; 2] = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"];
const REGIONS: [&str; 2] = ["AWS_REGION", "AWS_DEFAULT_REGION"];
/// A PEM file of certificate authorities.
pub const ROOTS: &str = "AWS_CA_BUNDLE";

/// Endpoint, credentials and trusted authorities of a store.
#[derive(Clone, PartialEq, Eq)]
pub struct StoreSettings {
    /// Access key id.
    pub key: String,
    /// Secret access key.
    pub secret: String,
    /// Session token of temporary credentials.
    pub token: Option<String>,
    /// Region for request signatures.
    pub region: String,
    /// URL of the store: `http://HOST:PORT` or `https://HOST`.
    pub endpoint: String,
    /// Variable that has it, or could.
    pub endpoint_from: &'static str,
    /// True if the bucket name is the first part of the path; false if it is part of the host name.
    pub path_style: bool,
    /// PEM file of the authorities to trust; `None` for the default ones.
    pub roots: Option<String>,
}

impl StoreSettings {
    /// Reads the settings with `variable`; the error names the missing or invalid variable.
    pub fn of<E: From<Error>>(
        address: &Address,
        variable: impl Fn(&'static str) -> Result<Option<String>, E>,
    ) -> Result<StoreSettings, E> {
        let first = |names: [&'static str; 2]| {
            let found = names.map(|name| Ok::<_, E>(variable(name)?.map(|value| (name, value))));
            let [one, other] = found;
            Ok::<_, E>(one?.or(other?))
        };
        let needed = |name: &'static str| {
            let missing = || Error::invalid(name, format!("is not set; {} needs it", address.text()));
            variable(name)?.ok_or_else(missing).map_err(E::from)
        };
        let (key, secret) = (needed(KEY)?, needed(SECRET)?);
        let endpoint = first(ENDPOINTS)?;
        let region = match (first(REGIONS)?, &endpoint) {
            (Some((_, region)), _) => region,
            // Most private stores have no regions and sign with this one.
            (None, Some(_)) => "us-east-1".to_string(),
            (None, None) => {
                let message =
                    format!("is not set, and AWS_ENDPOINT_URL neither; {} needs one of them", address.text());
                return Err(Error::invalid(REGIONS[0], message).into());
            }
        };
        // AWS's wildcard certificate covers one label before the host name, so it excludes bucket names with dots.
        let path_style = endpoint.is_some() || address.bucket.contains('.');
        let (endpoint_from, endpoint) =
            endpoint.unwrap_or_else(|| (ENDPOINTS[1], format!("https://s3.{region}.amazonaws.com")));
        if !endpoint.starts_with("http://") && !endpoint.starts_with("https://") {
            let reason = format!("{:?} must begin with http:// or https://", shown(&endpoint));
            return Err(Error::invalid(endpoint_from, reason).into());
        }
        if endpoint.contains('@') {
            let reason = format!(
                "{:?} contains a user or a password; set {KEY} and {SECRET} instead",
                shown(&endpoint)
            );
            return Err(Error::invalid(endpoint_from, reason).into());
        }
        Ok(StoreSettings {
            key,
            secret,
            token: variable(TOKEN)?,
            region,
            endpoint,
            endpoint_from,
            path_style,
            roots: variable(ROOTS)?,
        })
    }

    /// The error of an endpoint that is not a valid URL.
    pub fn wrong_endpoint(&self, reason: impl ToString) -> Error {
        Error::invalid(self.endpoint_from, format!("{:?}: {}", shown(&self.endpoint), reason.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHO: [(&str, &str); 2] = [(KEY, "k"), (SECRET, "s")];

    fn of(variables: &[(&str, &str)]) -> Result<StoreSettings, Error> {
        let address = Address::parse("s3://bucket/a").unwrap();
        let find = |name: &str| variables.iter().find(|(known, _)| *known == name);
        StoreSettings::of(&address, |name| Ok(find(name).map(|(_, value)| value.to_string())))
    }

    fn with(more: &[(&'static str, &'static str)]) -> Result<StoreSettings, Error> {
        of(&[&WHO, more].concat())
    }

    #[test]
    fn what_is_missing_is_named() {
        let named = |outcome: Result<StoreSettings, Error>| match outcome.err().unwrap() {
            Error::Invalid { argument, .. } => argument,
            other => panic!("{other}"),
        };
        assert_eq!(named(of(&[])), KEY);
        assert_eq!(named(of(&WHO[..1])), SECRET);
        assert_eq!(named(with(&[])), REGIONS[0]);
        assert_eq!(named(with(&[("AWS_ENDPOINT_URL", "store:9000")])), "AWS_ENDPOINT_URL");
    }

    #[test]
    fn a_password_in_an_endpoint_is_refused_and_never_shown() {
        for (endpoint, variable) in [
            "http://me:hunter2@store:9000",
            "http://hunter2@store",
            "me:hunter2@store",
            "ftp://me:hunter2@store",
            "https://me:hunter2/@store/?hunter2",
        ]
        .into_iter()
        .zip(ENDPOINTS.into_iter().cycle())
        {
            let error = with(&[(variable, endpoint)]).err().unwrap().to_string();
            assert!(error.contains(&format!("{variable}:")) && !error.contains("hunter2"), "{error}");
        }
        let odd = with(&[("AWS_ENDPOINT_URL", "http://store:no/?hunter2")]).ok().unwrap();
        let error = odd.wrong_endpoint("invalid port").to_string();
        assert!(error.contains("store:no") && !error.contains("hunter2"), "{error}");
    }

    #[test]
    fn the_endpoint_decides_over_region_and_style() {
        let amazon = with(&[("AWS_DEFAULT_REGION", "r")]).ok().unwrap();
        assert_eq!((amazon.endpoint.as_str(), amazon.path_style), ("https://s3.r.amazonaws.com", false));
        let own = ("AWS_ENDPOINT_URL", "http://store:9000");
        let found = with(&[own, (TOKEN, "t")]).ok().unwrap();
        assert_eq!((found.endpoint.as_str(), found.region.as_str()), (own.1, "us-east-1"));
        assert_eq!((found.path_style, found.token.as_deref()), (true, Some("t")));
        let both = with(&[own, ("AWS_ENDPOINT_URL_S3", "https://first"), ("AWS_REGION", "r")]).ok().unwrap();
        assert_eq!((both.endpoint.as_str(), both.region.as_str()), ("https://first", "r"));
    }
}
