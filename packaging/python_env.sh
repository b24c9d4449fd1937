#!/bin/sh
# Creates the Python environment of tests, demo and bench in a cache outside the repository, and prints the
# path of its python.
#
#   packaging/python_env.sh            prints the path of the python
#   packaging/python_env.sh --export   prints shell lines: SPILLWAY_PYTHON, SPILLWAY_OLD_DEEPSPEED,
#                                      TORCH_EXTENSIONS_DIR, CXX, PATH, PYTHONDONTWRITEBYTECODE
#   packaging/python_env.sh --demo     the same lines; installs only what the demo uses: torch, numpy, one DeepSpeed
#
# Demo and tests share one environment: the tests add the rest. A second run with the same requirements changes nothing.
# SPILLWAY_CACHE moves the cache, PYTHON names the interpreter.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
cache=${SPILLWAY_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/spillway}
venv=$cache/venv
# Oldest first; the newest is in requirements-demo.txt.
older='0.14.0 0.16.9 0.18.9'
old=$cache/deepspeed-${older%% *}
# Each in a folder of its own: its requirements would replace numpy and bring packages that HybridDeviceOptimizer does not need.
megatron_core='0.12.3 0.14.0 0.16.1'

main() {
    mkdir -p "$cache"
    exec 9>"$cache/lock"
    if ! flock -n 9; then
        say "waiting for another set-up of $cache"
        flock 9
    fi
    part=test
    [ "${1:-}" != --demo ] || part=demo
    # What has the packages of the tests has those of the demo.
    if ! fresh "$part" && ! { [ $part = demo ] && fresh test; }; then
        rm -f "$cache/stamp-$part"
        "set_up_$part" >&2
        wanted_by "$part" >"$cache/stamp-$part"
    fi
    exec 9>&-
    answer "${1:-}"
}

fresh() {
    [ -x "$venv/bin/python" ] && [ "$(cat "$cache/stamp-$1" 2>/dev/null)" = "$(wanted_by "$1")" ]
}

wanted_by() {
    cat "$here/python_env.sh" "$here/python/requirements-demo.txt" "$here/python/requirements-$1.txt" | sha256sum | cut -d' ' -f1
}

# Python compiles a module at its first import, so the installer need not compile those that nobody imports.
set_up_demo() {
    python=$(find_python)
    say "setting up $venv (torch and DeepSpeed; some minutes, once)"
    "$venv/bin/python" -c '' 2>/dev/null || "$python" -m venv --clear "$venv"
    install_into "$venv" demo
    mkdir -p "$cache/torch_extensions"
    write_compiler
}

set_up_test() {
    fresh demo || set_up_demo
    say "adding the other packages of the tests"
    install_into "$venv" test
    for version in $older; do
        into_folder deepspeed "$version" --no-build-isolation
    done
    for version in $megatron_core; do
        into_folder megatron-core "$version"
    done
}

install_into() {
    "$1/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile -r "$here/python/requirements-$2.txt"
}

# Installs one version of a package, without what it requires, into the folder PACKAGE-VERSION of the cache.
into_folder() {
    folder=$cache/$1-$2
    [ ! -d "$folder" ] || return 0
    rm -rf "$folder.part"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder.part" "$1==$2" ${3:+"$3"}
    mv "$folder.part" "$folder"
}

# The compiler of DeepSpeed's ops. DeepSpeed requests debug information, which doubles the time of a compilation and
# does not change the code.
write_compiler() {
    mkdir -p "$cache/bin"
    printf '#!/bin/sh\nexec c++ "$@" -g0\n' >"$cache/bin/c++"
    chmod +x "$cache/bin/c++"
}

find_python() {
    python=${PYTHON:-python3}
    if ! command -v "$python" >/dev/null || ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        install_packages python3 python3-venv python3-pip
    fi
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "$python is older than Python 3.11"
    echo "$python"
}

install_packages() {
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        fail "missing system packages; run: apt-get install $*"
    fi
    say "installing $*"
    apt-get update -qq >&2
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >&2
}

answer() {
    if [ -z "$1" ]; then
        echo "$venv/bin/python"
        return
    fi
    echo "export SPILLWAY_PYTHON='$venv/bin/python'"
    echo "export SPILLWAY_OLD_DEEPSPEED='$old'"
    echo "export TORCH_EXTENSIONS_DIR='$cache/torch_extensions'"
    echo "export CXX='$cache/bin/c++'"
    echo "export PATH='$venv/bin':\"\$PATH\""
    # Without compiled modules on the disk, each process would compile torch's thousand modules again.
    echo "unset PYTHONDONTWRITEBYTECODE"
}

say() {
    echo "python_env: $*" >&2
}

fail() {
    say "$*"
    exit 1
}

main "$@"
