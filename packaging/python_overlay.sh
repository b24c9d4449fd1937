#!/bin/sh
# Creates a small virtual environment in DIR that contains the spillway wheel and sees the packages of the
# cached environment. Prints the path of its python. The cached environment itself stays unchanged, so several
# checkouts can share it.
#
#   packaging/python_overlay.sh DIR [PYTHON]    SPILLWAY_PREBUILT_LIB has the same effect as for the wheel
#
# PYTHON is the python of the cached environment; by default packaging/python_env.sh creates that of the tests.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
overlay=${1:?usage: python_overlay.sh DIR [PYTHON]}
base=${2:-$("$here/python_env.sh")}

packages_of() {
    "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

"$base" -m venv --without-pip "$overlay"
echo "import site; site.addsitedir('$(packages_of "$base")')" \
    >"$(packages_of "$overlay/bin/python")/cached-environment.pth"
"$base" -m pip --python "$overlay/bin/python" install --quiet --disable-pip-version-check --no-deps --force-reinstall \
    --no-build-isolation "$here/python" >&2
echo "$overlay/bin/python"
