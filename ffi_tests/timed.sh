#!/bin/sh
# Runs a Rust test program and prints the seconds of each test at the end of its line. Cargo calls this
# script as its `runner`.
#
# The libtest option is unstable; RUSTC_BOOTSTRAP allows it for this one program. Programs without
# libtest lack the option.
case $(basename "$1") in
    c-*) exec "$@" ;;
    *) RUSTC_BOOTSTRAP=1 exec "$@" -Z unstable-options --report-time ;;
esac
