#!/bin/sh
# Creates a Python environment of tools in a cache outside the repository, and prints its folder `bin`.
#
#   packaging/tool_env.sh NAME REQUIREMENTS CONTENT     NAME: its folder in the cache; CONTENT: words for the message
#
# A second run with the same requirements changes nothing. SPILLWAY_CACHE moves the cache, PYTHON names the interpreter.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
name=$1 requirements=$2 content=$3
cache=${SPILLWAY_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/spillway}/$name
python=${PYTHON:-python3}

mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9
wanted=$(cat "$requirements" "$here/tool_env.sh" | sha256sum | cut -d' ' -f1)
if [ "$(cat "$cache/stamp" 2>/dev/null)" != "$wanted" ] || [ ! -x "$cache/venv/bin/python" ]; then
    rm -f "$cache/stamp"
    echo "spillway: setting up $cache/venv ($content, once)" >&2
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        "$here/system_packages.sh" python3 python3-venv >&2
    fi
    "$python" -m venv --clear "$cache/venv"
    "$cache/venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$requirements" >&2
    echo "$wanted" >"$cache/stamp"
fi
echo "$cache/venv/bin"
