#!/bin/sh
# Checks format and lints of all Python files, and that pyright knows the types of all public names. The rules are in
# packaging/python/pyproject.toml.
#
#   packaging/python_lint.sh          fails if a file has another format or a lint
#   packaging/python_lint.sh --fix    formats the files, and mends what can be mended
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
cd "$root"
tools=$(packaging/tool_env.sh lint packaging/python/requirements-lint.txt "ruff and pyright")
ruff=$tools/ruff
config=packaging/python/pyproject.toml
if [ "${1:-}" = --fix ]; then
    "$ruff" check --quiet --no-cache --config "$config" --fix --exit-zero . >/dev/null
    "$ruff" format --quiet --no-cache --config "$config" .
fi
"$ruff" check --quiet --no-cache --config "$config" --output-format concise .
"$ruff" format --quiet --no-cache --config "$config" --check .
"$tools/python" packaging/python_types.py "$tools/basedpyright"
