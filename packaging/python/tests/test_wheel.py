"""Proves that the wheel contains the package, the license, all binaries and the .pth file. They work after
installation, and building the wheel leaves the source tree unchanged."""

import os
import shutil
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
    binaries = {"spillway/libspillway.so", "spillway/libspillway_preload.so", "spillway/spillway-tool"}
    assert {"spillway.pth", "spillway/py.typed", *binaries} <= names
    assert [name for name in names if name.endswith("/licenses/LICENSE")]
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


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The folder of an installed wheel, and an environment in which only this package is found."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "-q", "--target", folder, wheel],
                   check=True)
    environment = {name: value for name, value in os.environ.items() if name != "SPILLWAY_LIBRARY"}
    return folder, {**environment, "PYTHONPATH": str(folder)}


def test_the_installed_commands_run(installed, tmp_path):
    folder, environment = installed

    def run(*words):
        return subprocess.run(words, env=environment, capture_output=True, text=True, cwd=tmp_path, check=True).stdout
    for command in ([folder / "bin" / "spillway"], [sys.executable, "-m", "spillway"]):
        assert run(*command, "--version") == "spillway 0.1.0\n"
        assert run(*command, "preload-path") == f"{folder}/spillway/libspillway_preload.so\n"
        assert run(*command, "library-path") == f"{folder}/spillway/libspillway.so\n"
    assert "serial update" in run(folder / "bin" / "spillway", "plan")


def test_the_installed_preload_library_serves_libaio(installed, tmp_path):
    folder, environment = installed
    code = ("import ctypes; this = ctypes.CDLL(None); print(hasattr(this, 'io_submit'));"
            "print('libspillway_preload' in open('/proc/self/maps').read())")
    environment = {**environment, "LD_PRELOAD": str(folder / "spillway" / "libspillway_preload.so")}
    printed = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True).stdout
    assert printed == "True\nTrue\n"


def test_the_installed_library_has_object_stores(installed, tmp_path):
    folder, environment = installed
    environment = {**environment, "AWS_ENDPOINT_URL": "nowhere", "AWS_ACCESS_KEY_ID": "name", "AWS_SECRET_ACCESS_KEY": "secret"}
    code = ("import spillway\n"
            "try: spillway.Tier(['s3://bucket'], job='wheel')\n"
            "except spillway.InvalidArgumentError as error: print(error)")
    printed = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True,
                             cwd=tmp_path).stdout
    assert "nowhere" in printed


def test_a_missing_neighbour_of_the_prebuilt_library_is_named(repository, tmp_path):
    shutil.copy(os.environ["SPILLWAY_LIBRARY"], tmp_path / "libspillway.so")
    done = subprocess.run([sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path,
                           repository / "packaging" / "python"], capture_output=True, text=True,
                          env={**os.environ, "SPILLWAY_PREBUILT_LIB": str(tmp_path / "libspillway.so")})
    assert done.returncode != 0 and "libspillway_preload.so is missing" in done.stdout + done.stderr


def test_a_prebuilt_library_that_is_missing_is_named(repository, tmp_path):
    done = subprocess.run([sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path,
                           repository / "packaging" / "python"], capture_output=True, text=True,
                          env={**os.environ, "SPILLWAY_PREBUILT_LIB": "/nonexistent/lib.so"})
    assert done.returncode != 0 and "SPILLWAY_PREBUILT_LIB names /nonexistent/lib.so" in done.stdout + done.stderr
