"""Real distributions on sys.path, one of them faulty: a sentence that names it, and the others go on working."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvx.errors import ConnectorError, ConnectorUnavailable
from kvx.registry import connector_class, connector_classes, known_connectors

GOOD = """
from kvx.connector import Capabilities, Connector, Op

class Good(Connector):
    name = "{name}"
    capabilities = Capabilities(operations=frozenset({{Op.READ}}), notify=False, memory=frozenset({{"cpu"}}))
    def _open(self, regions): ...
    def _metadata(self): return b""
    def _connect(self, library_metadata): ...
    def _submit(self, transfer, copies, notify): ...
    def _progress(self): return []
    def _cancel(self, transfer): ...
    def _disconnect(self, peer): ...
    def _close(self): ...
"""
FAULTY = GOOD.format(name="faulty")
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Make a distribution: its module, and a dist-info folder with the entry point."""
    before = set(sys.modules)

    def make(distribution: str, source: str, name: str = "faulty", attribute: str = "Good") -> None:
        folder, module = tmp_path / distribution, distribution.replace("-", "_")
        info = folder / f"{module}-1.0.dist-info"
        info.mkdir(parents=True)
        (folder / f"{module}.py").write_text(source)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[kvx.connectors]\n{name} = {module}:{attribute}\n")
        monkeypatch.syspath_prepend(str(folder))
        importlib.invalidate_caches()

    yield make
    for module in set(sys.modules) - before:
        if module.startswith("faulty_") or module == "good_one":
            del sys.modules[module]


def refusal(name: str = "faulty") -> str:
    with pytest.raises(ConnectorError) as raised:
        connector_class(name)
    text = str(raised.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("source", "attribute", "expected"),
    [
        ("import no_such_library", "Good", "is not installed (No module named 'no_such_library')"),
        ("raise RuntimeError('no device')", "Good", "'faulty_one:Good' fails to import: RuntimeError: no device"),
        ("def broken(:", "Good", "'faulty_one:Good' fails to import: SyntaxError"),
        (FAULTY, "Bad", "'faulty_one:Bad' fails to import: AttributeError"),
        (FAULTY, "Good:", "'faulty_one:Good:' fails to import"),
        (FAULTY, "frozenset", "fails to import: AttributeError"),
        (FAULTY, "Op", "'faulty_one:Op' is no kvx.Connector subclass"),
        (FAULTY, "Connector", "lacks the methods _cancel, _close, _connect"),
        (GOOD.format(name="other"), "Good", "calls itself 'other', its entry point 'faulty'"),
        (FAULTY + "    capabilities = {'operations': ['read']}\n", "Good", "a kvx.connector.Capabilities is needed"),
        (FAULTY.replace("{Op.READ}", ""), "Good", "declares the operations frozenset()"),
        (FAULTY.replace("{Op.READ}", "{'teleport'}"), "Good", "declares the operations frozenset({'teleport'})"),
        (FAULTY.replace("frozenset({Op.READ})", "[Op.READ]"), "Good", "a frozenset of Op.READ, Op.WRITE or both"),
        (FAULTY.replace('{"cpu"}', '{"tpu"}'), "Good", "declares the memory kinds frozenset({'tpu"),
        (FAULTY.replace('{"cpu"}', ""), "Good", "declares the memory kinds frozenset()"),
        (FAULTY.replace("notify=False", "notify=None"), "Good", "declares notify as None"),
    ],
)  # fmt: skip
def test_a_faulty_distribution_is_named_and_the_others_work(
    install: Install, source: str, attribute: str, expected: str
) -> None:
    install("faulty-one", source, attribute=attribute)
    install("good-one", GOOD.format(name="good"), name="good")
    text = refusal()
    assert "faulty-one" in text
    assert expected in text
    assert {"faulty", "good", "nixl", "mooncake", "ipc"} <= set(known_connectors())
    assert connector_class("good")().name == "good"


def test_a_name_that_two_distributions_register_is_refused_for_both(install: Install) -> None:
    install("faulty-one", FAULTY)
    install("faulty-two", FAULTY)
    install("good-one", GOOD.format(name="good"), name="good")
    assert "registered twice, by faulty-one and faulty-two" in refusal()
    assert connector_class("good")().name == "good"


def test_a_second_copy_of_a_distribution_on_the_path_is_the_first_one(install: Install, tmp_path: Path) -> None:
    install("good-one", GOOD.format(name="good"), name="good")
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "good-one", copy)
    sys.path.append(str(copy))  # monkeypatch puts sys.path back
    assert connector_class("good")().name == "good"


@pytest.mark.parametrize("text", ["[kvx.connectors]\nfaulty\n", "[kvx.connectors]\nfaulty = a:b\nmore\n"])
def test_unreadable_entry_points_cost_only_their_own_distribution(
    install: Install, tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    install("faulty-one", FAULTY)
    install("good-one", GOOD.format(name="good"), name="good")
    (tmp_path / "faulty-one" / "faulty_one-1.0.dist-info" / "entry_points.txt").write_text(text)
    importlib.invalidate_caches()
    assert connector_class("good")().name == "good"
    assert "unknown connector 'faulty'; known connectors: " in refusal()
    assert "faulty" not in known_connectors()
    assert "connectors of distribution faulty_one-1.0.dist-info are left out: its metadata is unreadable" in caplog.text


@pytest.mark.parametrize(
    ("metadata", "why"),
    [(b"Name: \xe9\n", "its metadata is unreadable"), (b"Version: 1\n", "it has no name"), (None, "")],
)
def test_unreadable_metadata_costs_only_its_own_distribution(
    install: Install, tmp_path: Path, caplog: pytest.LogCaptureFixture, metadata: bytes | None, why: str
) -> None:
    install("faulty-one", FAULTY)
    install("good-one", GOOD.format(name="good"), name="good")
    file = tmp_path / "faulty-one" / "faulty_one-1.0.dist-info" / "METADATA"
    if metadata is None:
        file.unlink()
    else:
        file.write_bytes(metadata)
    importlib.invalidate_caches()
    assert connector_class("good")().name == "good"
    assert "faulty" not in known_connectors()
    assert f"connectors of distribution faulty_one-1.0.dist-info are left out: {why}" in caplog.text


def test_a_stranger_cannot_take_a_name_of_kvx(install: Install) -> None:
    install("faulty-one", GOOD.format(name="nixl"), name="nixl")
    assert "connector 'nixl' is registered twice, by faulty-one and kvx" in refusal("nixl")


def test_auto_goes_without_what_cannot_be_used(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    install("faulty-one", GOOD.format(name="nixl"), name="nixl")
    assert [found.name for found in connector_classes(["auto"])] == ["ipc"]
    assert "auto goes without connector nixl: connector 'nixl' is registered twice" in caplog.text


def test_what_a_connector_says_of_its_missing_library_is_passed_on(install: Install) -> None:
    install(
        "faulty-one",
        "from kvx.errors import ConnectorUnavailable\n"
        "raise ConnectorUnavailable('it needs libfoo.so.1, which is missing', 'apt-get install libfoo1')\n",
    )
    with pytest.raises(ConnectorUnavailable) as raised:
        connector_class("faulty")
    assert str(raised.value) == "it needs libfoo.so.1, which is missing; to use it: apt-get install libfoo1"
    assert raised.value.hint == "apt-get install libfoo1"
