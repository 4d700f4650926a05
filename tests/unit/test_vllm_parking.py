"""Waiting processes of a CPU engine sleep instead of spinning: over vLLM's own shared-memory queue."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvx.vllm import parking


class Condition:
    """As vLLM's `SpinCondition`: spins until `busy_loop_s` after the last read, then sleeps up to `timeout_ms`."""

    def __init__(self) -> None:
        self.busy_loop_s, self.last_read = 1.0, time.monotonic()
        self.slept_ms: list[int | None] = []

    def wait(self, timeout_ms: int | None = None) -> None:
        if time.monotonic() > self.last_read + self.busy_loop_s:
            self.slept_ms.append(timeout_ms)


@pytest.fixture(autouse=True)
def _off_again() -> Iterator[None]:
    yield
    parking.use("")


@pytest.mark.parametrize(("device", "slept"), [("cpu", [parking.RECHECK_MS]), ("cuda", [])])
def test_only_a_cpu_engine_sleeps_at_once(device: str, slept: list[int]) -> None:
    condition = Condition()
    parking.use(device)
    parking.wait(Condition.wait, condition, 5000)
    assert condition.slept_ms == slept
    assert condition.busy_loop_s == 1.0


def test_what_has_been_idle_sleeps_as_long_as_vllm_says() -> None:
    condition = Condition()
    condition.last_read -= 2.0
    parking.use("cpu")
    parking.wait(Condition.wait, condition, 5000)
    assert condition.slept_ms == [5000]


def test_messages_of_vllms_queue_arrive_while_its_reader_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    queues = pytest.importorskip("vllm.distributed.device_communicators.shm_broadcast", reason="needs vLLM")
    original = queues.SpinCondition.wait
    monkeypatch.setattr(queues.SpinCondition, "wait", lambda *given, **named: parking.wait(original, *given, **named))
    writer = queues.MessageQueue(1, 1, max_chunk_bytes=1 << 16)
    reader = queues.MessageQueue.create_from_handle(writer.export_handle(), 0)
    arrived: list[Any] = []

    def read() -> None:
        reader.wait_until_ready()
        arrived.extend(reader.dequeue(timeout=20) for _ in range(300))

    parking.use("cpu")
    thread = threading.Thread(target=read)
    thread.start()
    writer.wait_until_ready()
    for number in range(300):
        writer.enqueue(number)
    thread.join(30)
    assert arrived == list(range(300))
