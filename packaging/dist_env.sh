#!/bin/sh
# Creates the Python environment that builds releases, and prints its folder `bin`: zig links against an old glibc,
# cargo-zigbuild calls zig as the linker, auditwheel checks the wheels.
#
#   packaging/dist_env.sh
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
"$here/tool_env.sh" dist "$here/python/requirements-dist.txt" 'zig from PyPI, 100 MB'
