"""The author's path: the scaffold, and every block of docs/writing-a-connector.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from kvx.cli.new_connector import write_connector
from kvx.errors import ConnectorError

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs/writing-a-connector.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[str, str]]:
    return [(kind, text) for kind, text in BLOCK.findall(GUIDE.read_text("utf-8")) if kind in ("sh", "python")]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment of its own to install into, which sees the packages of this one."""
    venv.create(tmp_path / "venv", with_pip=False)
    (folder,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    # As a site folder, so that what is installed there as editable is seen, too.
    (folder / "others.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    tools = os.pathsep.join([str(tmp_path / "venv/bin"), os.path.dirname(sys.executable), os.environ["PATH"]])
    return {**os.environ, "PATH": tools, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


@pytest.mark.matrix
@pytest.mark.transfer
def test_every_block_of_the_guide_works(tmp_path: Path, environment: dict[str, str]) -> None:
    work = tmp_path / "work"
    work.mkdir()
    found = blocks()
    assert {kind for kind, _ in found} == {"sh", "python"}
    for kind, text in found:
        command = ["bash", "-euo", "pipefail", "-c", text] if kind == "sh" else ["python", "-W", "error", "-c", text]
        done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{text}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"


def test_the_guide_names_only_tests_that_exist() -> None:
    from kvx.testing import ConnectorTests

    named = set(re.findall(r"`(test_\w+)`", GUIDE.read_text("utf-8")))
    assert named
    assert not [name for name in named if not hasattr(ConnectorTests, name)]


@pytest.mark.parametrize(
    "name", ["", "Relay", "../relay", "1relay", "re-lay", "_relay", "a__b", "relay_", "class", "r r"]
)
def test_a_name_that_cannot_be_used_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConnectorError, match="cannot be called"):
        write_connector(name, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["nixl", "auto"])
def test_a_name_that_is_taken_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConnectorError, match="known already"):
        write_connector(name, tmp_path)


def test_what_is_there_already_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "kvx-relay").mkdir()
    (tmp_path / "kvx-relay/mine.txt").write_text("mine")
    with pytest.raises(ConnectorError, match="kvx-relay exists already"):
        write_connector("relay", tmp_path)
    assert [path.name for path in (tmp_path / "kvx-relay").iterdir()] == ["mine.txt"]


def test_a_failure_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ConnectorError, match="No space left on device"):
        write_connector("relay", tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_scaffold_is_well_kept(tmp_path: Path) -> None:
    """By the rules of kvx itself."""
    folder = write_connector("my_own_2", tmp_path / "new")
    assert folder == tmp_path / "new/kvx-my-own-2"
    assert "class MyOwn2Connector(Connector):" in (folder / "kvx_my_own_2.py").read_text()
    for command in (["ruff", "check"], ["ruff", "format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", *command, "--config", ROOT / "pyproject.toml", folder],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", folder / "kvx_my_own_2.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
