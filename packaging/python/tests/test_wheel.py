"""Proves that the wheel holds the package, the library and the .pth, and that building it leaves the source tree as
it was."""

import os
import subprocess
import sys
import zipfile

import pytest


@pytest.fixture(scope="module")
def wheel(repository, tmp_path_factory):
    source = repository / "packaging" / "python"
    before = listing(source)
    out = tmp_path_factory.mktemp("wheel")
    environment = {**os.environ, "SPILLWAY_PREBUILT_LIB": os.environ["SPILLWAY_LIBRARY"]}
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", out, source],
                   env=environment, check=True)
    assert listing(source) == before
    built, = out.iterdir()
    return built


def listing(folder):
    return sorted(path for path in folder.rglob("*") if not {"__pycache__", ".pytest_cache"} & set(path.parts))


def test_the_wheel_serves_every_python_3_on_this_platform(wheel):
    assert wheel.name.startswith("spillway-0.1.0-py3-none-linux_")


def test_the_wheel_holds_package_library_and_pth(wheel, repository):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"spillway.pth", "spillway/libspillway.so"} <= names
    sources = repository / "packaging" / "python" / "spillway"
    assert {f"spillway/{path.relative_to(sources)}" for path in sources.rglob("*.py")} <= names
    assert not [name for name in names if "test" in name]


def test_the_installed_package_finds_its_own_library(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    environment = {name: value for name, value in os.environ.items() if name != "SPILLWAY_LIBRARY"}
    code = "import spillway; print(spillway.library_version(), spillway.library_path())"
    printed = subprocess.run([sys.executable, "-c", code], env={**environment, "PYTHONPATH": str(tmp_path)}, check=True,
                             capture_output=True, text=True, cwd=tmp_path).stdout.split()
    assert printed == ["0.1.0", str(tmp_path / "spillway" / "libspillway.so")]


def test_a_prebuilt_library_that_is_missing_is_named(repository, tmp_path):
    done = subprocess.run([sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path,
                           repository / "packaging" / "python"], capture_output=True, text=True,
                          env={**os.environ, "SPILLWAY_PREBUILT_LIB": "/nonexistent/lib.so"})
    assert done.returncode != 0 and "SPILLWAY_PREBUILT_LIB names /nonexistent/lib.so" in done.stdout + done.stderr
