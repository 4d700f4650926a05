import pytest

from kvx.verify.bench import BenchSettings, Round, build, percentile, read_handoffs
from kvx.verify.engines import RunSettings


def test_percentile_interpolates():
    assert percentile([4.0, 1.0, 3.0, 2.0, 5.0], 50) == 3.0
    assert percentile([1.0, 2.0], 50) == 1.5
    assert percentile([7.0], 99) == 7.0
    assert percentile(list(range(101)), 99) == 99


def test_handoff_log_leaves_an_unfinished_line_for_later():
    text = '{"request": "a", "asked_s": 1.0, "arrived_s": 1.5}\n{"request": "b", "as'
    assert read_handoffs(text) == [0.5]
    assert read_handoffs("") == []


def test_report_holds_medians_spread_and_the_ratio_of_neighbours(tmp_path):
    def one(factor):
        return Round([factor], [factor / 2], [factor, factor], [factor, 3 * factor])

    rounds = {"kvx": [one(1.0), one(2.0), one(3.0)], "stock": [one(2.0), one(8.0), one(6.0)]}
    report = build(BenchSettings(run=RunSettings(model=tmp_path), pairs=3, requests=2), rounds, {"move": 0.5})
    first = report["metrics"]["first_token_s"]
    assert first["kvx"] == {"median": 2.0, "lowest": 1.0, "highest": 3.0}
    assert first["ratio"] == {"median": 0.5, "lowest": 0.25, "highest": 0.5}
    assert report["metrics"]["handoff_p50_s"]["kvx"]["median"] == pytest.approx(4.0)
    assert report["metrics"]["prefill_s"]["stock"]["median"] == 3.0
    assert report["handoffs"]["kvx"]["count"] == 6
    assert report["phases_s"] == {"move": 0.5}
