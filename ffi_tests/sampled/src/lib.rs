//! Which cases of an exhaustive test `make test` runs: a random sample. `make test-long` runs all of them.
//!
//! A test that fails shows its seed. With this SPILLWAY_SEED it chooses the same cases again.

use std::time::SystemTime;

/// True in `make test-long`, which sets SPILLWAY_TEST_LONG.
pub fn long() -> bool {
    std::env::var_os("SPILLWAY_TEST_LONG").is_some_and(|value| !value.is_empty())
}

/// The random choices of one test.
pub struct Sample(fastrand::Rng);

impl Sample {
    /// The seed is SPILLWAY_SEED, or else a new one.
    #[expect(clippy::new_without_default, reason = "each sample prints its seed")]
    pub fn new() -> Sample {
        let named = std::env::var("SPILLWAY_SEED").ok().filter(|seed| !seed.is_empty());
        let seed = named.map(|seed| seed.parse().expect("SPILLWAY_SEED is a number"));
        let since = SystemTime::UNIX_EPOCH.elapsed().expect("the clock is later than 1970");
        let seed = seed.unwrap_or(u64::from(since.subsec_nanos()));
        if !long() {
            println!("a sample of the cases: SPILLWAY_SEED={seed} repeats it");
        }
        Sample(fastrand::Rng::with_seed(seed))
    }

    /// `count` of the cases, in their order; in `make test-long` all of them.
    pub fn of<T>(&mut self, count: usize, cases: impl IntoIterator<Item = T>) -> Vec<T> {
        let mut cases: Vec<(usize, T)> = cases.into_iter().enumerate().collect();
        if !long() {
            self.0.shuffle(&mut cases);
            cases.truncate(count);
            cases.sort_by_key(|(place, _)| *place);
        }
        cases.into_iter().map(|(_, case)| case).collect()
    }
}
