#!/bin/sh
# Installs missing Debian packages that the tests and the demo need. Without root rights it prints the command instead.
#
#   packaging/system_packages.sh [PACKAGE...]     those of the tests, and further packages
#   packaging/system_packages.sh --demo           those of the demo
set -eu

demo="gcc g++ libc6-dev python3 python3-venv"
tests="$demo pkg-config libaio-dev fio valgrind cmake luajit git util-linux mount e2fsprogs hwloc-nox iproute2 glusterfs-server"
wanted="$tests $*"
[ "${1:-}" != --demo ] || wanted=$demo

missing=""
for package in $wanted; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
done
[ -n "$missing" ] || exit 0
if ! command -v apt-get >/dev/null; then
    echo "spillway: not a Debian system; tests may need the equivalents of:$missing" >&2
    exit 0
fi
if [ "$(id -u)" != 0 ]; then
    echo "spillway: some packages are missing; run: sudo apt-get install$missing" >&2
    exit 1
fi
echo "spillway: installing$missing" >&2
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
