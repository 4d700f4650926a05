"""What the documentation says is shown by a test is shown by a test."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEST = re.compile(r"`((?:tests|kvx/testing)/[\w/]+\.py)::(\w+)`")
NEEDS_NO_TEST = ("| logs |",)


@cache
def names_in(path: Path) -> frozenset[str]:
    return frozenset(
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )


def missing(text: str) -> list[str]:
    """Tests that are named and do not exist."""
    return [
        f"{path}::{name}"
        for path, name in TEST.findall(text)
        if not (ROOT / path).is_file() or name not in names_in(ROOT / path)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_test_that_is_named_exists(page: Path) -> None:
    assert missing(page.read_text()) == []


def test_every_promise_of_the_failure_model_names_a_test() -> None:
    rows = promises((ROOT / "docs" / "failure-model.md").read_text())
    assert len(rows) > 50
    bare = [row for row in rows if not TEST.search(row) and not row.startswith(NEEDS_NO_TEST)]
    assert bare == []


def promises(text: str) -> list[str]:
    """Rows of tables whose last column says what shows them."""
    found, is_inside = [], False
    for line in text.splitlines():
        if line.endswith("| shown by |"):
            is_inside = True
        elif not line.startswith("|"):
            is_inside = False
        elif is_inside and not line.startswith("|---"):
            found.append(line)
    return found


def test_a_name_that_is_wrong_is_found() -> None:
    right = f"`tests/unit/{Path(__file__).name}::test_a_name_that_is_wrong_is_found`"
    assert missing(right) == []
    for wrong in (right.replace("is_wrong", "is_no"), right.replace("test_promises", "no_promises")):
        assert len(missing(wrong)) == 1
    assert promises(f"| a | shown by |\n|---|---|\n| x | {right} |\n\n| other |\n|---|\n| y |") == [f"| x | {right} |"]
