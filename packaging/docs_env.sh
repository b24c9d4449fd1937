#!/bin/sh
# Creates the Python environment that builds the docs, and prints the path of its python.
#
#   packaging/docs_env.sh
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
bin=$("$here/tool_env.sh" docs "$here/../docs/requirements.txt" 'Sphinx and matplotlib from PyPI')
echo "$bin/python"
