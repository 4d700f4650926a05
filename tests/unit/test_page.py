"""The page of `kvx map --html` in a real browser: it renders, says nothing on the console, and fetches nothing."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from map_cases import report

from kvx.page import page
from kvx.picture import comparisons, engines_of

pytestmark = pytest.mark.slow  # a browser takes seconds, and is installed for `make test`


def rendered(path: Path, profile: Path) -> tuple[str, str]:
    """The document as the browser has it after loading, and what it said."""
    browser = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)
    assert browser, "no Chromium here: apt-get install chromium (make setup does it as root)"
    done = subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
            "--disable-component-update", "--disable-sync", "--no-first-run", "--enable-logging=stderr",
            f"--user-data-dir={profile}", "--dump-dom", path.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout, done.stderr


def console(said: str) -> list[str]:
    return [line for line in said.splitlines() if "CONSOLE" in line]


def test_the_page_renders(tmp_path: Path) -> None:
    found = report()
    path = tmp_path / "map.html"
    path.write_text(page("r.json", engines_of(found), comparisons(found)))
    document, said = rendered(path, tmp_path / "profile")
    assert console(said) == []
    assert document.count('<section class="engine">') == 2
    assert "<b>900</b> blocks, of which <b>40</b> at warm-up" in document
    assert "10 of 13 identical" in document
    assert document.count('<tr class="differs">') == 3
    assert "<mark>1020</mark>" in document
    assert "<mark>77</mark>" in document
    assert "block 8 of the prompt" in document
    assert document.count("identical, after it was computed again") == 1
    assert "30 segments of 3.9 MiB from offset 0x0" in document
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in document
    assert not re.search(r"<script|(src|href)=|url\(|@import", document), "nothing is fetched, and nothing runs"


def test_a_console_error_would_be_seen(tmp_path: Path) -> None:
    path = tmp_path / "bad.html"
    path.write_text("<!doctype html><script>console.error('seen')</script>")
    _, said = rendered(path, tmp_path / "profile")
    assert any("seen" in line for line in console(said))
