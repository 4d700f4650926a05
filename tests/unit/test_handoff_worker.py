"""The hand-off's thread and the calls of the engine, with a connector that the test plays."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from fake_connector import FakeConnector, region
from test_handshake import INFO
from test_pulls import LAYER

from kvx.errors import ConnectorStateError
from kvx.handoff import HandoffSettings, HandoffWorker, Pull

VIEWS = {"a": torch.zeros(100, 1, 16, 8)}


def make_worker(connector: FakeConnector, **settings: object) -> HandoffWorker:
    worker = HandoffWorker(HandoffSettings(**settings), INFO, [connector])  # type: ignore[arg-type]
    worker.open([LAYER], VIEWS, 100, 1, "LBHNC")
    return worker


@pytest.fixture
def worker() -> Iterator[HandoffWorker]:
    connector = FakeConnector()
    connector.open([region(0, 100 * 512)], 1)
    made = make_worker(connector, transfer_deadline_s=1.0)
    yield made
    made.close()


def a_pull(port: int, **fields: object) -> Pull:
    given = {"request_id": "r", "remote_request_id": "theirs", "remote_engine_id": "e", "host": "127.0.0.1",
             "port": port, "blocks": [[7, 8]], "first_token": 0, "num_tokens": 32, **fields}  # fmt: skip
    return Pull(**given)  # type: ignore[arg-type]


def test_leases_end_whatever_happens_to_the_pulls(worker: HandoffWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker._puller, "tick", lambda now: 1 / 0)
    worker.hold("h", [[1]], 16, lease_s=0.05)
    assert worker.wait(5)
    assert worker.poll().expired == {"h"}
    assert worker.status()["side_channel"]["internal_errors"] > 0


def test_a_request_is_pulled_again_only_after_its_outcome_was_taken(worker: HandoffWorker) -> None:
    worker.pull(a_pull(worker.port))
    with pytest.raises(ConnectorStateError, match="being pulled already"):
        worker.pull(a_pull(worker.port))
    worker.cancel("r")
    assert worker.wait(5)
    assert dict(worker.poll().failed) == {"r": "cancelled by the engine"}
    worker.pull(a_pull(worker.port))


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", -1), ("a" * 64, 5000), ("127.0.0.1", 0), ("\udc80", 5000)])
def test_a_malformed_address_fails_its_pull_at_once(worker: HandoffWorker, host: str, port: int) -> None:
    began = time.monotonic()
    worker.pull(a_pull(port, host=host))
    assert worker.wait(5)
    assert list(worker.poll().failed) == ["r"]
    assert time.monotonic() - began < 0.9, "not by its deadline"
    assert worker.status()["side_channel"]["internal_errors"] == 0
