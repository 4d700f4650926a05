"""The wheel by itself: in an environment with kvx's own needs and nothing else, outside the clone."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow

CORE = """
import importlib, pkgutil, sys
import kvx
left_out = ("cli", "testing", "verify", "vllm", "bench", "servers", "page", "doctor", "serve",
    "processes", "guard")  # of the command line's extra
names = [m.name for m in pkgutil.walk_packages(kvx.__path__, "kvx.") if not m.name.startswith(
    tuple(f"kvx.{name}" for name in left_out))]
for name in names:
    importlib.import_module(name)
unwanted = {"vllm", "pytest", "typer", "rich", "httpx", "psutil", "nixl", "mooncake"} & set(sys.modules)
assert not unwanted, unwanted

from kvx.cache import ExtensibleKVCache
from kvx.drivers.host import HostDriver
from kvx.spec import Segment, SegmentTable
driver = HostDriver()
granule = driver.granularity_bytes
table = SegmentTable((Segment(0, granule, 8),), 8, 8 * granule, granule)
cache = ExtensibleKVCache(driver, table)
cache.open()
cache.commit(1)
cache.set_views([cache.buffer.view(8, granule)])
cache.extend_kv_cache(4)
assert cache.committed_bytes == 4 * granule
cache.close()

from kvx import registry
from kvx.errors import ConnectorUnavailable
assert {"nixl", "mooncake", "ipc", "cpu_offload"} <= set(registry.known_connectors())
assert [found.name for found in registry.connector_classes(["ipc", "cpu_offload"])] == ["ipc", "cpu_offload"]
try:
    registry.connector_classes(["nixl"])
except ConnectorUnavailable as error:
    assert "kvx[nixl]" in str(error), error
else:
    raise AssertionError("nixl is here")
print(len(names), "modules,", kvx.__file__)
"""


def needs(name: str, found: set[str]) -> None:
    """`found` gets the distribution and all that it requires, extras left out."""
    if name in found:
        return
    found.add(name)
    for requirement in distribution(name).requires or ():
        if "extra ==" in requirement:
            continue
        wanted = re.split(r"[^A-Za-z0-9_.-]", requirement, maxsplit=1)[0]
        try:
            needs(wanted.lower().replace("_", "-"), found)
        except ModuleNotFoundError:
            continue  # for another platform


def top_level(name: str) -> Iterator[Path]:
    """What a distribution has put right into the folder of packages."""
    one = distribution(name)
    folder = Path(str(one.locate_file("")))
    yield from {folder / file.parts[0] for file in one.files or () if file.parts[0] not in ("..", "__pycache__")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, ROOT]
    subprocess.run(command, check=True, capture_output=True)
    (made,) = folder.glob("kvx-*.whl")
    return made


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that knows kvx's wheel and, from here, what its metadata says that it needs."""
    folder = tmp_path_factory.mktemp("empty")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    found: set[str] = set()
    for name in required(wheel):
        needs(name, found)
    for path in {path for name in found for path in top_level(name)}:
        if path.exists() and not (packages / path.name).exists():
            (packages / path.name).symlink_to(path)
    return folder / "bin" / "python"


def required(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    return [line.removeprefix("Requires-Dist: ") for line in lines if re.match(r"Requires-Dist: [^;]+$", line)]


def run(python: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder)}
    return subprocess.run([python, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_the_core_needs_torch_numpy_and_two_for_the_wire(wheel: Path) -> None:
    assert sorted(required(wheel)) == ["msgspec", "numpy", "pyzmq", "torch"]


def test_the_core_works_outside_the_clone(python: Path, tmp_path: Path) -> None:
    done = run(python, tmp_path, "-c", CORE)
    assert done.returncode == 0, done.stderr
    assert str(python.parents[1]) in done.stdout, "not the clone's"


def test_the_command_line_says_which_extra_it_is(python: Path, tmp_path: Path) -> None:
    done = run(python, tmp_path, "-c", "from kvx.cli.main import main; main()")
    assert done.returncode != 0
    assert "kvx[cli]" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_not_python_is_in_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    for path in (ROOT / "kvx").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc":
            assert str(path.relative_to(ROOT)) in names
    assert "kvx_connectors/nixl.py" in names
