#!/bin/sh
# Makes a small virtual environment in DIR that sees the packages of the cached one and has the spillway wheel
# installed, and prints its python. The cached environment itself stays as it is, whatever checkout uses it.
#
#   packaging/python_overlay.sh DIR        SPILLWAY_PREBUILT_LIB as for the wheel
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
overlay=${1:?usage: python_overlay.sh DIR}
base=$("$here/python_env.sh")

packages_of() {
    "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

"$base" -m venv --without-pip "$overlay"
echo "import site; site.addsitedir('$(packages_of "$base")')" \
    >"$(packages_of "$overlay/bin/python")/cached-environment.pth"
"$base" -m pip --python "$overlay/bin/python" install --quiet --disable-pip-version-check --no-deps --force-reinstall \
    --no-build-isolation "$here/python" >&2
echo "$overlay/bin/python"
