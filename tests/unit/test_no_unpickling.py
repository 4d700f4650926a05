"""Nothing in kvx or its connectors turns bytes into objects or code by a format that runs what it reads."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "kvx").rglob("*.py"), *(ROOT / "connectors").rglob("*.py")])
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle", "yaml"}
CALLS = {"eval", "exec"}
# NIXL's deserialize_descs unpickles; torch.load and numpy.load can be told not to, which nobody here needs.
METHODS = {"deserialize_descs", "allow_pickle", "recv_pyobj", "send_pyobj"}
LOADERS = {("torch", "load"), ("np", "load"), ("numpy", "load")}


def found_in(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in MODULES:
            yield node.module
        elif isinstance(node, ast.Name) and node.id in CALLS:
            yield node.id
        elif isinstance(node, ast.keyword) and node.arg in METHODS:
            yield node.arg
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr in METHODS or (owner, node.attr) in LOADERS:
                yield node.attr
        elif isinstance(node, ast.Constant) and node.value in MODULES:
            yield node.value  # import_module("pickle")


def test_no_source_unpickles_or_evaluates() -> None:
    assert len(SOURCES) > 50
    found = {str(path.relative_to(ROOT)): names for path in SOURCES if (names := list(found_in(path.read_text())))}
    assert found == {}


@pytest.mark.parametrize(
    "source",
    ["import pickle", "import cloudpickle as c", "from pickle import loads", "from torch import load; import marshal",
     "x = eval('1')", "run = exec", "agent.deserialize_descs(b'')", "torch.load(f)", "np.load(f, allow_pickle=True)",
     "import_module('pickle')", "socket.recv_pyobj()"],
)  # fmt: skip
def test_the_search_finds_what_it_is_for(source: str) -> None:
    assert list(found_in(source))
