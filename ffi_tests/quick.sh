#!/bin/sh
# The inner loop: fast tests to run after a change of a Rust or C file, before the whole `make test`.
#
# The C programs and the ABI tests use the debug library of the other tests, so no second build is needed. Left out: Python,
# the preload library under other programs, Arm, and tests that take more than a few seconds.
set -eu
cd "$(dirname "$0")/.."
export SPILLWAY_TEST_QUICK=1
# Unit tests of several seconds: crashes and hangs at every write, all values of a type, the exhaustive search over plans, simulated grids.
slow='tier::tests::crash tier::tests::hang choose::tests all_patterns_come_back a_transfer_that_hangs narrow_states_on_the_gpu
if_all_copies_have_failed what_was_given_up_does_not'
programs='copies fork io_round_trip null pinned_memory plan status structs swap last_error panic tier_steps'

cargo fmt --all --check
packaging/python_lint.sh
skipped=
for name in $slow; do skipped="$skipped --skip $name"; done
# shellcheck disable=SC2086 # lists of words
cargo test --quiet --workspace --lib --bins -- $skipped
cargo test --quiet --workspace --test abi --test golden --test kernels --test tidy
# shellcheck disable=SC2086 # a list of words
cargo test --quiet --workspace --test c -- $programs
