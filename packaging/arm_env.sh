#!/bin/sh
# Installs the tools for an Arm build on an x86_64 Debian machine in a cache outside the repository, and prints the
# path. The C cross compiler and qemu come from apt. Beside them the script unpacks a Rust with the Arm standard
# library, an Arm Python with numpy and pip, llvm-mca, and a second qemu. The Rust is Debian's own, because its compiler
# and its Arm standard library are one build. The second qemu accepts no plugins, but can start threads in forked
# children of processes with threads.
#
#   packaging/arm_env.sh            prints the folder; its file `env` holds the settings for cargo
#   packaging/arm_env.sh --export   prints those settings as shell lines
#
# A second run changes nothing. SPILLWAY_CACHE moves the cache. Exit status 77: root must run the command shown.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
cache=${SPILLWAY_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/spillway}/arm
system='gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user'
python='libc6 libgcc-s1 zlib1g libexpat1 libffi8 libbz2-1.0 liblzma5 libcrypt1 libssl3 libuuid1
    libpython3.11-minimal libpython3.11-stdlib python3.11-minimal
    python3-numpy libblas3 liblapack3 libgfortran5 libstdc++6'

main() {
    mkdir -p "$cache"
    exec 9>"$cache/lock"
    if ! flock -n 9; then
        say "waiting for another set-up of $cache"
        flock 9
    fi
    wanted=$(sha256sum <"$here/arm_env.sh" | cut -d' ' -f1)
    if [ "$(cat "$cache/stamp" 2>/dev/null)" != "$wanted" ] || ! have_system; then
        rm -f "$cache/stamp"
        set_up >&2
        echo "$wanted" >"$cache/stamp"
    fi
    exec 9>&-
    if [ "${1:-}" = --export ]; then cat "$cache/env"; else echo "$cache"; fi
}

have_system() {
    command -v aarch64-linux-gnu-gcc >/dev/null && command -v qemu-aarch64 >/dev/null
}

set_up() {
    if ! have_system || ! apt-cache show libstd-rust-web-dev:arm64 >/dev/null 2>&1; then
        install_system
    fi
    say "unpacking the Arm tool chain into $cache (about 230 MB to download, once)"
    rm -rf "$cache/rust" "$cache/python" "$cache/python_tools" "$cache/llvm" "$cache/debs"
    std=$(dependency libstd-rust-web-dev:arm64 'libstd-rust-web-[0-9.]*')
    llvm=$(dependency "$std" 'libllvm[0-9]*')
    unpack rust rustc-web "$std:amd64" libstd-rust-web-dev:amd64 libstd-rust-web-dev:arm64 "$llvm:amd64"
    # shellcheck disable=SC2086 # the list is words
    unpack python $(printf '%s:arm64 ' $python)
    unpack python_tools python3-pip-whl
    unpack llvm "llvm-${llvm#libllvm}"
    mkdir -p "$cache/bin"
    download qemu-user-static
    dpkg-deb --fsys-tarfile "$cache/debs"/*.deb | tar -xO ./usr/bin/qemu-aarch64-static >"$cache/bin/qemu"
    chmod +x "$cache/bin/qemu"
    rm -rf "$cache/debs"
    link_libraries
    write_wrappers
    write_env
}

install_system() {
    if ! command -v apt-get >/dev/null; then
        skip "needs Debian packages: $system"
    elif [ "$(id -u)" != 0 ]; then
        skip "as root: dpkg --add-architecture arm64 && apt-get update && apt-get install $system"
    fi
    say "installing $system"
    dpkg --add-architecture arm64
    apt-get update -qq
    # shellcheck disable=SC2086 # the list is words
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $system >"$cache/apt.log" 2>&1 ||
        fail "apt-get failed: see $cache/apt.log"
}

# Prints the package that $1 depends on and whose name matches $2: names contain versions,
# which security updates change.
dependency() {
    found=$(apt-cache depends "$1" | sed -n "s/.*Depends: \($2\)\(:[a-z0-9]*\)\{0,1\}\$/\1/p" | head -n 1)
    [ -n "$found" ] || fail "$1 depends on no $2"
    echo "$found"
}

# unpack FOLDER PACKAGE...
unpack() {
    folder=$cache/$1
    shift
    mkdir -p "$folder"
    download "$@"
    for deb in "$cache/debs"/*.deb; do
        dpkg -x "$deb" "$folder"
    done
}

download() {
    mkdir -p "$cache/debs"
    (cd "$cache/debs" && rm -f ./*.deb && apt-get -o APT::Sandbox::User=root download -qq "$@")
}

# Creates the links for numpy that update-alternatives would create.
link_libraries() {
    (cd "$cache/python/usr/lib/aarch64-linux-gnu" && ln -sf blas/libblas.so.3 lapack/liblapack.so.3 .)
}

write_wrappers() {
    libraries=$cache/rust/usr/lib/x86_64-linux-gnu
    for tool in rustc rustdoc; do
        binary=$cache/rust/usr/bin/$tool
        [ -x "$binary" ] || binary=$binary-web
        wrap "$tool" "LD_LIBRARY_PATH=$libraries" "$binary"
    done
    mca=$(find "$cache/llvm" -path '*/bin/llvm-mca' | head -n 1)
    [ -n "$mca" ] || fail "no llvm-mca in its package"
    wrap llvm-mca "LD_LIBRARY_PATH=$libraries" "$mca"
    pip=$(find "$cache/python_tools" -name 'pip-*.whl' | head -n 1)
    [ -n "$pip" ] || fail "no pip in its package"
    wrap pip "$cache/bin/python" "$pip/pip"
    wrap python "QEMU_LD_PREFIX=$cache/python" qemu-aarch64 "$cache/python/usr/bin/python3.11"
}

# wrap NAME ENVIRONMENT COMMAND...
wrap() {
    mkdir -p "$cache/bin"
    file=$cache/bin/$1
    shift
    printf '#!/bin/sh\nexec env %s "$@"\n' "$*" >"$file"
    chmod +x "$file"
}

write_env() {
    target=AARCH64_UNKNOWN_LINUX_GNU
    cat >"$cache/env" <<END
export CARGO_BUILD_TARGET=aarch64-unknown-linux-gnu
export RUSTC='$cache/bin/rustc' RUSTDOC='$cache/bin/rustdoc'
export CARGO_TARGET_${target}_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_${target}_RUNNER=qemu-aarch64
export QEMU_LD_PREFIX=/usr/aarch64-linux-gnu
END
}

say() {
    echo "arm_env: $*" >&2
}

fail() {
    say "$*"
    exit 1
}

skip() {
    say "$*"
    exit 77
}

main "$@"
