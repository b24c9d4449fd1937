#!/bin/sh
# Installs the packages of `make dist` in a Debian root without a compiler, and uses them there. Builds the source
# distribution.
#
#   ffi_tests/packages/run.sh [DIST]      without DIST, the packages of this machine are built first
#
# Exit status 77: the machine cannot create a root; the last line says why.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
work=$target/packages
machine=$(uname -m)
passed=0
failed=0

main() {
    debian=$("$root/packaging/clean_root.sh") || exit $?
    mkdir -p "$work"
    dist=${1:-$work/dist}
    [ $# -gt 0 ] || "$root/packaging/dist.sh" "$dist" "$machine"
    dist=$(CDPATH='' cd -- "$dist" && pwd)
    rm -rf "$work/guest"
    mkdir "$work/guest"
    cp "$dist"/spillway-*_"$machine".whl "$dist"/spillway_*_"$(dpkg --print-architecture)".deb \
        "$root/ffi_tests/arm/wheel.py" "$work/guest"
    check 'the wheel runs on glibc 2.28, and auditwheel agrees' tag
    check 'the wheel installs in the root, steps, and has the tool and the preload library' in_root from_wheel
    check 'the Debian packages have every file of make install' contents
    check 'a C program that was built with the Debian packages runs in the root' built_with_packages
    check 'the source distribution builds a wheel offline, and that wheel has the same digest' from_source
    echo "$passed passed, $failed failed, 0 ignored (output in $work)"
    [ $failed = 0 ]
}

# check NAME COMMAND...
check() {
    log=$work/$(printf '%s' "$1" | tr -c 'a-zA-Z0-9' _).log began=$(date +%s) name=$1
    shift
    # Outside of a condition, because inside one the shell would continue after a failed command.
    set +e
    (set -e && "$@") </dev/null >"$log" 2>&1
    status=$?
    set -e
    if [ $status = 0 ]; then
        passed=$((passed + 1))
        echo "ok      $name ($(($(date +%s) - began)) s)"
        sed -n 's/^measured: /        /p' "$log"
    else
        failed=$((failed + 1))
        echo "FAILED  $name"
        tail -n 15 "$log" | sed 's/^/        /'
    fi
}

# Runs a function of guest.sh in a copy of the root. The copy lies in memory and ends with the command.
in_root() {
    mkdir -p "$work/copy"
    cp "$root/ffi_tests/packages/guest.sh" "$work/guest/"
    unshare --mount --propagation private sh -eu -c '
        mount -t tmpfs tmpfs "$1/copy"
        mkdir "$1/copy/upper" "$1/copy/work" "$1/copy/merged"
        mount -t overlay overlay -o "lowerdir=$2,upperdir=$1/copy/upper,workdir=$1/copy/work" "$1/copy/merged"
        cp -r "$1/guest" "$1/copy/merged/packages"
        mount -t proc proc "$1/copy/merged/proc"
        exec env -i PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root chroot "$1/copy/merged" sh -eu /packages/guest.sh "$3"
    ' sh "$work" "$debian" "$1" >"$work/said" 2>&1 || { cat "$work/said"; return 1; }
    cat "$work/said"
    sed -n 's|^/usr/local/lib/.*/libspillway.so [a-z0-9_]* ||p' "$work/said" >"$work/digest.$1"
}

tag() {
    wheel=$(ls "$work"/guest/*.whl)
    version=$(printf '%s' "$wheel" | sed -n "s/.*-manylinux_2_\([0-9]*\)_$machine.whl/\1/p")
    [ "$version" -le 28 ]
    "$("$root/packaging/dist_env.sh")/python" -m auditwheel show "$wheel" | tee "$work/audit"
    tr '\n' ' ' <"$work/audit" | grep -q "\"manylinux_2_${version}_$machine\""
}

# The Debian packages and `make install` differ in the folder of libraries.
contents() {
    rm -rf "$work/debian" "$work/installed"
    mkdir -p "$work/debian"
    for package in "$dist"/spillway_*_"$(dpkg --print-architecture)".deb "$dist"/libspillway-dev_*_"$(dpkg --print-architecture)".deb; do
        dpkg-deb -x "$package" "$work/debian"
    done
    mkdir -p "$work/installed"
    tar -C "$work/installed" -xzf "$dist"/spillway-*-linux-"$machine".tar.gz
    (cd "$work/debian/usr" && find . ! -type d ! -path './share/doc/*' | sed "s|/$machine-linux-gnu||" | sort) >"$work/files.debian"
    (cd "$work/installed/usr/local" && find . ! -type d | sort) >"$work/files.installed"
    diff "$work/files.installed" "$work/files.debian"
    grep -q . "$work/files.installed"
}

built_with_packages() {
    usr=$work/debian/usr
    flags=$(PKG_CONFIG_PATH=$usr/lib/$machine-linux-gnu/pkgconfig pkg-config --define-variable=prefix="$usr" --cflags --libs spillway)
    # shellcheck disable=SC2086 # flags are words
    cc -std=c11 -Wall -Wextra -Werror "$root/examples_c/adam.c" $flags -lm -o "$work/guest/adam"
    in_root from_debian
}

# Without optimisation, because the digest does not depend on it.
from_source() {
    rm -rf "$work/source"
    mkdir "$work/source"
    CARGO_NET_OFFLINE=true CARGO_PROFILE_DEV_OPT_LEVEL=0 SPILLWAY_CARGO_PROFILE=dev CARGO_TARGET_DIR=$work/target \
        "$("$root/packaging/dist_env.sh")/python" -m pip wheel --quiet --disable-pip-version-check --no-deps -w "$work/source" \
        "$dist/spillway-$(sed -n 's/^version = "\(.*\)"$/\1/p' "$root/Cargo.toml" | head -n 1).tar.gz"
    expected=$(cat "$work/digest.from_wheel")
    rm "$work"/guest/*.whl
    cp "$work"/source/*.whl "$work/guest"
    in_root from_wheel
    [ "$(cat "$work/digest.from_wheel")" = "$expected" ]
}

main "$@"
