"""Waiting processes of a CPU engine sleep instead of spinning: over vLLM's own shared-memory queue."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator

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


# In a process of its own: vLLM's queues end with their process.
QUEUE = """
import importlib.util, json, os, threading, time

if importlib.util.find_spec("vllm") is None:
    raise SystemExit(77)

from kvx.vllm import parking
from vllm.distributed.device_communicators import shm_broadcast as queues

parking.use("cpu")
original = queues.SpinCondition.wait
queues.SpinCondition.wait = lambda condition, timeout_ms=None: parking.wait(original, condition, timeout_ms)
writer = queues.MessageQueue(1, 1, max_chunk_bytes=1 << 16)
reader = queues.MessageQueue.create_from_handle(writer.export_handle(), 0)
arrived, busy = [], []

def read():
    reader.wait_until_ready()
    arrived.extend(reader.dequeue(timeout=30) for _ in range(300))
    started = time.thread_time()
    arrived.append(reader.dequeue(timeout=30))
    busy.append(time.thread_time() - started)
    arrived.extend(reader.dequeue(timeout=30) for _ in range(10))

thread = threading.Thread(target=read)
thread.start()
writer.wait_until_ready()
for number in range(300):
    writer.enqueue(number)
time.sleep(0.7)
writer.enqueue(300)
parking.RECHECK_MS = 20_000
started = time.monotonic()
for number in range(301, 311):
    time.sleep(0.05)  # nothing tells when the reader has got to its poll
    writer.enqueue(number)
thread.join(60)
print(json.dumps({"arrived": arrived, "busy_s": busy[0], "paced_s": time.monotonic() - started}), flush=True)
os._exit(0)
"""


def test_readers_of_vllms_queue_sleep_and_wake() -> None:
    done = subprocess.run([sys.executable, "-c", QUEUE], capture_output=True, text=True, timeout=120)
    if done.returncode == 77:
        pytest.skip("vLLM is not installed")
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["arrived"] == list(range(311)), "messages in a row, whose notifications may get lost"
    assert found["busy_s"] < 0.35, "half of the wait, where spinning takes all of it"
    assert found["paced_s"] < 20, "a reader was not woken, and looked again by itself"
