"""Builds the wheel: the package, the library, the preload library, the command line tool, and the .pth file that activates
the hooks under DeepSpeed and Megatron.

cargo builds the binaries: in the repository around this folder, or in the folder `rust` of a source distribution, which
has a copy of its Rust sources. SPILLWAY_CARGO_FEATURES=spillway/s3 adds object stores, and SPILLWAY_CARGO_PROFILE names
another profile than `release`. Or the binaries are the library that SPILLWAY_PREBUILT_LIB names and the two files beside it; with
SPILLWAY_WHEEL_WITHOUT_TOOL=1 the tool may be missing. Everything is built in a scratch folder, so that the source tree stays as it is.

The version is that of Cargo.toml."""

import atexit
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = pathlib.Path(__file__).resolve().parent
RUST = HERE / "rust" if (HERE / "rust").is_dir() else HERE.parent.parent
# What cargo needs: the crates of the workspace. It reads the manifests of all members.
RUST_SOURCES = (
    "Cargo.toml",
    "Cargo.lock",
    "build.rs",
    "LICENSE",
    "src",
    "cli",
    "include",
    "kernels",
    "planner",
    "stores",
    "packaging/preload",
    "ffi_tests/fakecuda",
    "ffi_tests/header",
    "ffi_tests/sampled",
)


def version():
    return re.search(r'^version = "(.*)"$', (RUST / "Cargo.toml").read_text(), re.MULTILINE)[1]


def readme():
    """README.md without relative links, which lead nowhere on a package index: the name of the page in the repository stands there."""
    folder = "packaging/python"
    return re.sub(
        r"\[[^\]]*\]\((?![a-z]+:|#)([^)\s]+)\)",
        lambda link: f"`{os.path.normpath(os.path.join(folder, link[1]))}`",
        (HERE / "README.md").read_text(),
    )


class BuildWithLibrary(build_py):
    """Adds the binaries to the package and the .pth at the root of site-packages."""

    def run(self):
        super().run()
        root = pathlib.Path(self.build_lib)
        for file, name in binaries():
            shutil.copy2(file, root / "spillway" / name)
        shutil.copy2(HERE / "spillway.pth", root / "spillway.pth")
        (root / "spillway" / "_version.py").write_text(f'"""The version."""\n\nVERSION = "{version()}"\n')


class SourceDistribution(sdist):
    """Adds the Rust sources."""

    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        for name in RUST_SOURCES:
            source, copy = RUST / name, pathlib.Path(base_dir) / "rust" / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, copy, ignore=shutil.ignore_patterns("target", "__pycache__"))
            else:
                shutil.copy2(source, copy)


class PlatformWheel(bdist_wheel):
    """One wheel for every Python 3, since the library is reached through ctypes."""

    def get_tag(self):
        return "py3", "none", sysconfig.get_platform().replace("-", "_").replace(".", "_")


class BinaryDistribution(Distribution):
    def has_ext_modules(self):
        return True


def binaries():
    """The files to package, with their names in the package."""
    library = library_path()
    files = [
        (library, "libspillway.so"),
        (library.with_name("libspillway_preload.so"), "libspillway_preload.so"),
        (library.with_name("spillway"), "spillway-tool"),
    ]
    if os.environ.get("SPILLWAY_WHEEL_WITHOUT_TOOL") == "1" and not files[2][0].is_file():
        files.pop()
    for file, _ in files:
        if not file.is_file():
            sys.exit(f"{file} is missing, which belongs beside {library}: build it with `make lib`")
    return files


def library_path():
    """The library to package, built with what belongs beside it if none is named."""
    prebuilt = os.environ.get("SPILLWAY_PREBUILT_LIB")
    if prebuilt:
        if not os.path.isfile(prebuilt):
            sys.exit(f"SPILLWAY_PREBUILT_LIB names {prebuilt}, which is no file")
        return pathlib.Path(prebuilt)
    if not (RUST / "Cargo.toml").is_file():
        sys.exit(f"no Cargo.toml in {RUST}: build from a checkout, or name the library in SPILLWAY_PREBUILT_LIB")
    profile = os.environ.get("SPILLWAY_CARGO_PROFILE") or "release"
    features = os.environ.get("SPILLWAY_CARGO_FEATURES")
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or RUST / "target")
    subprocess.run(
        [
            "cargo",
            "build",
            "--locked",
            "--profile",
            profile,
            "--package",
            "spillway",
            "--package",
            "spillway-cli",
            "--package",
            "spillway-preload",
            *(["--features", features] if features else []),
            "--target-dir",
            str(target),
        ],
        cwd=RUST,
        check=True,
    )
    # The profile `dev` has a folder of another name.
    return target / {"dev": "debug"}.get(profile, profile) / "libspillway.so"


def scratch():
    """Options that move build folders and metadata out of the source tree."""
    folder = tempfile.mkdtemp(prefix="spillway-build-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return {"build": {"build_base": folder}, "egg_info": {"egg_base": folder}, "bdist_wheel": {"bdist_dir": os.path.join(folder, "wheel")}}


setup(
    version=version(),
    long_description=readme(),
    long_description_content_type="text/markdown",
    cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": PlatformWheel, "sdist": SourceDistribution},
    distclass=BinaryDistribution,
    options=scratch(),
)
