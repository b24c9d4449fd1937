#!/bin/sh
# Creates the Python environment that builds the docs, in a cache outside the repository, and prints the
# path of its python.
#
#   packaging/docs_env.sh
#
# A second run with the same requirements changes nothing. SPILLWAY_CACHE moves the cache, PYTHON names the interpreter.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
requirements=$here/../docs/requirements.txt
cache=${SPILLWAY_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/spillway}/docs
python=${PYTHON:-python3}

mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9
wanted=$(cat "$requirements" "$here/docs_env.sh" | sha256sum | cut -d' ' -f1)
if [ "$(cat "$cache/stamp" 2>/dev/null)" != "$wanted" ] || [ ! -x "$cache/venv/bin/python" ]; then
    rm -f "$cache/stamp"
    echo "docs_env: setting up $cache/venv (Sphinx and matplotlib from PyPI, once)" >&2
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        "$here/system_packages.sh" python3 python3-venv >&2
    fi
    "$python" -m venv --clear "$cache/venv"
    "$cache/venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$requirements" >&2
    echo "$wanted" >"$cache/stamp"
fi
echo "$cache/venv/bin/python"
