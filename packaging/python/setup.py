"""Builds the wheel: the package, libspillway.so and the .pth file that activates the DeepSpeed hook.

The library is built by cargo in the repository around this folder, or is the file SPILLWAY_PREBUILT_LIB names.
Everything is built in a scratch folder, so that the source tree stays as it is."""

import atexit
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = pathlib.Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent


class BuildWithLibrary(build_py):
    """Adds the library beside the package and the .pth at the root of site-packages."""

    def run(self):
        super().run()
        root = pathlib.Path(self.build_lib)
        shutil.copy2(library(), root / "spillway" / "libspillway.so")
        shutil.copy2(HERE / "spillway.pth", root / "spillway.pth")


class PlatformWheel(bdist_wheel):
    """One wheel for every Python 3, since the library is reached through ctypes."""

    def get_tag(self):
        return "py3", "none", sysconfig.get_platform().replace("-", "_").replace(".", "_")


class BinaryDistribution(Distribution):
    def has_ext_modules(self):
        return True


def library():
    """The library to package, built if none is named."""
    prebuilt = os.environ.get("SPILLWAY_PREBUILT_LIB")
    if prebuilt:
        if not os.path.isfile(prebuilt):
            sys.exit(f"SPILLWAY_PREBUILT_LIB names {prebuilt}, which is no file")
        return prebuilt
    if not (REPOSITORY / "Cargo.toml").is_file():
        sys.exit(f"no Cargo.toml in {REPOSITORY}: build from a checkout, or name the library in SPILLWAY_PREBUILT_LIB")
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or REPOSITORY / "target")
    subprocess.run(["cargo", "build", "--release", "--lib", "--target-dir", str(target)], cwd=REPOSITORY, check=True)
    return target / "release" / "libspillway.so"


def scratch():
    """Options that move build folders and metadata out of the source tree."""
    folder = tempfile.mkdtemp(prefix="spillway-build-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return {"build": {"build_base": folder}, "egg_info": {"egg_base": folder},
            "bdist_wheel": {"bdist_dir": os.path.join(folder, "wheel")}}


setup(cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": PlatformWheel}, distclass=BinaryDistribution,
      options=scratch())
