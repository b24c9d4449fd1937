"""Proves that the wheel contains the package, the license, all binaries and the .pth file. They work after
installation, and building the wheel leaves the source tree unchanged. Packages and source distribution are complete,
and have the version of Cargo.toml."""

import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

import spillway


@pytest.fixture(scope="module")
def wheel(repository, tmp_path_factory):
    source = repository / "packaging" / "python"
    before = listing(source)
    out = tmp_path_factory.mktemp("wheel")
    environment = {**os.environ, "SPILLWAY_PREBUILT_LIB": os.environ["SPILLWAY_LIBRARY"]}
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", out, source], env=environment, check=True
    )
    assert listing(source) == before
    (built,) = out.iterdir()
    return built


def listing(folder):
    return sorted(path for path in folder.rglob("*") if not {"__pycache__", ".pytest_cache"} & set(path.parts))


def test_the_wheel_serves_every_python_3_on_this_platform(wheel):
    assert wheel.name.startswith(f"spillway-{spillway.__version__}-py3-none-linux_")


def test_the_page_on_a_package_index_has_no_dead_links_and_names_pages_that_exist(wheel, repository):
    with zipfile.ZipFile(wheel) as opened:
        (metadata,) = (opened.read(name).decode() for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
    headers, text = metadata.split("\n\n", 1)
    assert "Description-Content-Type: text/markdown" in headers and text.startswith("# spillway for Python")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert not [link for link in links if not link.startswith("https://")]
    pages = re.findall(r"`((?:docs|ffi_tests)/[\w./]+\.md)`", text)
    assert len(pages) >= 12 and all((repository / page).is_file() for page in pages)


def test_a_packaged_wheel_has_the_tag_that_auditwheel_finds(repository, tmp_path):
    """package.sh computes the tag from the versions of symbols, and fails if auditwheel finds another one."""
    if shutil.which("dpkg-deb") is None:
        pytest.skip("dpkg-deb is missing: not a Debian system")
    library, machine = os.environ["SPILLWAY_LIBRARY"], platform.machine()
    subprocess.run(
        [repository / "packaging" / "package.sh", machine, library, tmp_path],
        check=True,
        env={**os.environ, "PYTHON": sys.executable, "PIP_NO_BUILD_ISOLATION": "no"},
    )
    (wheel,) = tmp_path.glob("*.whl")
    (tag,) = re.findall(r"-(manylinux_2_\d+_\w+)\.whl$", wheel.name)
    shown = subprocess.run([sys.executable, "-m", "auditwheel", "show", wheel], capture_output=True, text=True, check=True)
    assert f'platform tag: "{tag}"' in " ".join(shown.stdout.split())
    version = spillway.__version__
    assert {path.name for path in tmp_path.iterdir()} - {wheel.name} == {
        f"spillway-{version}-linux-{machine}.tar.gz",
        *(f"{name}_{version}_{debian_architecture()}.deb" for name in ("spillway", "libspillway-dev")),
    }
    for name, wanted in (
        ("spillway", r"/usr/lib/[^ ]*/libspillway\.so\.2 -> libspillway\.so\." + re.escape(version)),
        ("libspillway-dev", r"/usr/lib/[^ ]*/libspillway\.so -> libspillway\.so\.2"),
    ):
        package = tmp_path / f"{name}_{version}_{debian_architecture()}.deb"
        listed = subprocess.run(["dpkg-deb", "--contents", package], capture_output=True, text=True, check=True).stdout
        assert re.search(wanted, listed) and f"/usr/share/doc/{name}/copyright" in listed, listed
        fields = subprocess.run(["dpkg-deb", "--field", package, "Version", "Depends"], capture_output=True, text=True, check=True).stdout
        assert f"Version: {version}\n" in fields and "libc6" in fields


def debian_architecture():
    return subprocess.run(["dpkg", "--print-architecture"], capture_output=True, text=True, check=True).stdout.strip()


def test_the_source_distribution_has_what_cargo_needs(repository, tmp_path):
    """cargo resolves every crate of the unpacked sources with the lock file, without network. `make packages-test` builds
    a wheel from them."""
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=repository / "packaging" / "python", check=True, capture_output=True)
    (archive,) = tmp_path.iterdir()
    assert archive.name == f"spillway-{spillway.__version__}.tar.gz"
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    rust = tmp_path / f"spillway-{spillway.__version__}" / "rust"
    subprocess.run(
        ["cargo", "tree", "--quiet", "--offline", "--locked", "--workspace", "--features", "spillway/s3"],
        cwd=rust,
        check=True,
        capture_output=True,
        text=True,
    )
    tracked = subprocess.run(
        ["git", "ls-files", "src", "kernels", "include", "packaging/preload"], cwd=repository, check=True, capture_output=True, text=True
    ).stdout.split()
    assert [name for name in tracked if not (rust / name).is_file()] == []


def test_the_version_is_stated_in_one_place(repository):
    """Cargo.toml has the version. The generated header and the changelog agree, and no other file of the packages has it."""
    version = spillway.__version__
    assert f'\nversion = "{version}"\n' in (repository / "Cargo.toml").read_text()
    assert f'#define SPW_VERSION "{version}"\n' in (repository / "include" / "spillway" / "base.h").read_text()
    assert re.search(rf"^## {re.escape(version)}\b", (repository / "CHANGELOG.md").read_text(), re.MULTILINE)
    tracked = subprocess.run(
        ["git", "ls-files", "packaging", "Makefile"], cwd=repository, check=True, capture_output=True, text=True
    ).stdout.split()
    others = [
        name
        for name in tracked
        if "/tests/" not in name
        and not name.startswith("packaging/python/requirements")
        and re.search(rf"(?<![\d.]){re.escape(version)}(?![\d.])", (repository / name).read_text(errors="replace"))
    ]
    # A crate of the workspace; it is published nowhere.
    assert others == ["packaging/preload/Cargo.toml"]


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
    printed = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "PYTHONPATH": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    ).stdout.split()
    assert printed == [spillway.__version__, str(tmp_path / "spillway" / "libspillway.so")]


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The folder of an installed wheel, and an environment in which only this package is found."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "-q", "--target", folder, wheel], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "SPILLWAY_LIBRARY"}
    return folder, {**environment, "PYTHONPATH": str(folder)}


def test_the_installed_commands_run(installed, tmp_path):
    folder, environment = installed

    def run(*words):
        return subprocess.run(words, env=environment, capture_output=True, text=True, cwd=tmp_path, check=True).stdout

    for command in ([folder / "bin" / "spillway"], [sys.executable, "-m", "spillway"]):
        assert run(*command, "--version") == f"spillway {spillway.__version__}\n"
        assert run(*command, "preload-path") == f"{folder}/spillway/libspillway_preload.so\n"
        assert run(*command, "library-path") == f"{folder}/spillway/libspillway.so\n"
    assert "serial update" in run(folder / "bin" / "spillway", "plan")


def test_the_installed_preload_library_serves_libaio(installed, tmp_path):
    folder, environment = installed
    code = (
        "import ctypes; this = ctypes.CDLL(None); print(hasattr(this, 'io_submit'));"
        "print('libspillway_preload' in open('/proc/self/maps').read())"
    )
    environment = {**environment, "LD_PRELOAD": str(folder / "spillway" / "libspillway_preload.so")}
    printed = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True).stdout
    assert printed == "True\nTrue\n"


def test_the_installed_library_has_object_stores(installed, tmp_path):
    folder, environment = installed
    environment = {**environment, "AWS_ENDPOINT_URL": "nowhere", "AWS_ACCESS_KEY_ID": "name", "AWS_SECRET_ACCESS_KEY": "secret"}
    code = "import spillway\ntry: spillway.Tier(['s3://bucket'], job='wheel')\nexcept spillway.InvalidArgumentError as error: print(error)"
    printed = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True, cwd=tmp_path).stdout
    assert "nowhere" in printed


def test_a_missing_neighbour_of_the_prebuilt_library_is_named(repository, tmp_path):
    shutil.copy(os.environ["SPILLWAY_LIBRARY"], tmp_path / "libspillway.so")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, repository / "packaging" / "python"],
        capture_output=True,
        text=True,
        env={**os.environ, "SPILLWAY_PREBUILT_LIB": str(tmp_path / "libspillway.so")},
    )
    assert done.returncode != 0 and "libspillway_preload.so is missing" in done.stdout + done.stderr


def test_a_prebuilt_library_that_is_missing_is_named(repository, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, repository / "packaging" / "python"],
        capture_output=True,
        text=True,
        env={**os.environ, "SPILLWAY_PREBUILT_LIB": "/nonexistent/lib.so"},
    )
    assert done.returncode != 0 and "SPILLWAY_PREBUILT_LIB names /nonexistent/lib.so" in done.stdout + done.stderr
