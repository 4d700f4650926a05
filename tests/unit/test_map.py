"""`kvx map`: what it works out of a report, and what it says in a terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from map_cases import report, status
from typer.testing import CliRunner, Result

from kvx.cli.app import app
from kvx.errors import DatasetError, KVXError
from kvx.picture import WARM_UP, comparisons, engine_map, engines_of


def run(*words: object) -> Result:
    return CliRunner().invoke(app, ["map", *map(str, words)], env={"COLUMNS": "160", "NO_COLOR": "1"})


def test_neighbouring_segments_of_one_stride_are_one_band() -> None:
    narrow, wide = engine_map("prefill", status()).segments
    assert (narrow.count, narrow.offset_bytes, wide.count, wide.offset_bytes) == (30, 0, 1, 30 * 1000 * 4096)
    assert (narrow.capacity_bytes, wide.capacity_bytes) == (1000 * 4096, 2000 * 4096)
    assert (narrow.registered_bytes, narrow.held_bytes) == (900 * 4096, 50 * 4096)
    assert narrow.committed_bytes == 900 * 4096
    assert sum(band.count * band.capacity_bytes for band in (narrow, wide)) == 32 * 1000 * 4096


def test_committed_bytes_are_whole_granules() -> None:
    found = status()
    found["cache"]["blocks_final"] = 901
    assert engine_map("prefill", found).segments[0].committed_bytes == 910 * 4096


def test_the_time_between_commit_and_extend_is_the_engines_own() -> None:
    steps = engine_map("prefill", status()).timeline
    assert [step.name for step in steps] == ["reserve", "commit", WARM_UP, "extend", "open"]
    assert (steps[2].start_s, steps[2].duration_s) == (1.0, 13.0)
    assert steps[0].start_s == 0


def test_an_older_report_has_one_segment() -> None:
    found = status()
    for name in ("segments", "granularity_bytes", "ledger"):
        del found["cache"][name]
    del found["held"]
    (band,) = engine_map("prefill", found).segments
    assert band.capacity_bytes == 32 * 1000 * 4096


def test_each_question_and_what_differs_in_it() -> None:
    found = comparisons(report())
    assert [one.index for one in found if not one.is_identical] == [1, 2, 3]
    first, second, third = found[1:4]
    assert (first.differs_at, first.baseline.first) == (20, 14)
    assert (first.baseline.ids[6], first.candidate.ids[6]) == (1020, 77)
    assert first.blame.startswith("block 8 of the prompt (tokens 128 to 143), layer group group0")
    assert (second.error, second.blame) == ("500", "")
    assert (third.differs_at, third.candidate.ids) == (9, (1003, 1004, 1005, 1006, 1007, 1008))
    assert not found[12].blame, "question 1 is not question 12"


@pytest.mark.parametrize("value", [{}, {"engines": {}}, {"engines": {"prefill": {}}}])
def test_what_is_no_report_is_named(value: dict[str, object]) -> None:
    with pytest.raises(DatasetError, match=r"kvx (verify|map)"):
        engines_of(value)


def test_the_terminal_shows_the_picture(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(report()))
    result = run(path)
    assert result.exit_code == 0, result.output
    assert "40 blocks at warm-up -> 900, addresses for 1,000; 50 held" in result.output
    assert "███▓▓▓" in result.output
    assert "▓······" in result.output
    assert "question 1: differs at token 20: block 8 of the prompt" in result.output
    assert "10 of 13 answers identical" in result.output
    assert "question 11: computed again: block 0 of the prompt" in result.output
    assert "\x1b" not in result.output


def test_a_running_engine_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr("kvx.handshake.request_status", lambda host, port: asked.append((host, port)) or status())
    page = tmp_path / "map.html"
    result = run("--server", "127.0.0.1:5600", "--server", "[::1]:5601", "--html", page)
    assert result.exit_code == 0, result.output
    assert asked == [("127.0.0.1", 5600), ("::1", 5601)]
    assert "<h2>[::1]:5601</h2>" in page.read_text()


def test_bad_input_is_a_sentence(tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    for words, said in (
        ([tmp_path / "none.json"], "No such file"),
        ([broken], "is no JSON"),
        (["--server", "here"], "is no HOST:PORT"),
    ):
        result = run(*words, "--html", tmp_path / "page.html")
        assert isinstance(result.exception, KVXError)
        assert said in str(result.exception)
        assert not (tmp_path / "page.html").exists()
    assert run().exit_code == 2
    assert run(broken, "--server", "127.0.0.1:1").exit_code == 2
