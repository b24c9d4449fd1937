#!/bin/sh
# Creates a Debian root without a compiler, with python3-minimal, numpy and pip's wheel, in a cache outside the
# repository, and prints its path. Tests install packages in a copy of it.
#
#   packaging/clean_root.sh
#
# A second run changes nothing. SPILLWAY_CACHE moves the cache. Exit status 77: the machine cannot create a root, and the
# last line says why.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
cache=${SPILLWAY_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/spillway}/root
packages=python3-minimal,python3-numpy,python3-pip-whl

main() {
    [ "$(id -u)" = 0 ] || skip 'only root can create and enter another root'
    command -v apt-get >/dev/null || skip 'no Debian system'
    mkdir -p "$cache"
    exec 9>"$cache/lock"
    flock 9
    wanted=$(sha256sum <"$here/clean_root.sh" | cut -d' ' -f1)
    if [ "$(cat "$cache/stamp" 2>/dev/null)" != "$wanted" ]; then
        rm -rf "$cache/stamp" "$cache/root"
        set_up >&2
        echo "$wanted" >"$cache/stamp"
    fi
    echo "$cache/root"
}

set_up() {
    "$here/system_packages.sh" mmdebstrap
    echo "clean_root: creating $cache/root (about 280 MB, once)"
    # The sources and settings of this machine, so that the mirror which it uses is used here too.
    sources='' settings=''
    for file in /etc/apt/sources.list /etc/apt/sources.list.d/debian.sources; do
        [ ! -s "$file" ] || sources="$sources $file"
    done
    for file in /etc/apt/apt.conf.d/*; do
        if grep -q '^Acquire' "$file"; then settings="$settings --aptopt=$file"; fi
    done
    . /etc/os-release
    # shellcheck disable=SC2086 # both lists are words
    mmdebstrap --quiet --mode=root --variant=apt --include="$packages" $settings "$VERSION_CODENAME" "$cache/root" \
        $sources >"$cache/log" 2>&1 || skip "mmdebstrap failed: see $cache/log"
}

skip() {
    echo "clean_root: $*" >&2
    exit 77
}

main
