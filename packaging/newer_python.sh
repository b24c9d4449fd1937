#!/bin/sh
# Creates an environment of another version of Python in the cache, with torch, numpy and pytest, and prints the path of its python.
#
#   packaging/newer_python.sh VERSION [PACKAGE==VERSION...]    VERSION: such as 3.12
#
# Each package comes without what it requires into the folder PACKAGE-VERSION beside the environment.
# Exit status 77: this machine has no such Python.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
version=${1:?usage: newer_python.sh VERSION [PACKAGE==VERSION...]}
shift

# A shim of pyenv may be there and fail.
for python in "python$version" "$(pyenv root 2>/dev/null || true)/versions/$version".*/bin/python; do
    if "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        break
    fi
    python=
done
if [ -z "$python" ]; then
    echo "no Python $version on this machine" >&2
    exit 77
fi

# Python compiles a module at its first import. This variable of pip takes the value of the option that it turns off.
bin=$(PYTHON=$python PIP_NO_COMPILE=no "$here/tool_env.sh" "python$version" "$here/python/requirements-newer.txt" "torch for Python $version")
cache=${bin%/venv/bin}
exec 9>"$cache/lock"
flock 9
for package in "$@"; do
    folder=$cache/${package%%==*}-${package##*==}
    [ ! -d "$folder" ] || continue
    rm -rf "$folder.part"
    "$bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder.part" "$package" >&2
    mv "$folder.part" "$folder"
done
echo "$bin/python"
