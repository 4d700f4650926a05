"""How the half of a diagnosis that waits comes to its end."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from kvx.cli import doctor


@pytest.fixture(autouse=True)
def handler() -> object:
    before = signal.getsignal(signal.SIGINT)
    yield before
    signal.signal(signal.SIGINT, before)


def test_the_first_interrupt_is_noted_and_the_second_one_raised() -> None:
    is_over = doctor._interrupted()
    os.kill(os.getpid(), signal.SIGINT)
    assert is_over.wait(20)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(20)


def test_a_library_that_does_not_end_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    monkeypatch.setattr(doctor, "CLOSE_S", 0.05)
    never, closed = threading.Event(), threading.Event()
    doctor._close_in_time(closed.set)
    assert (closed.is_set(), statuses) == (True, [])
    doctor._close_in_time(lambda: bool(never.wait(30)))
    never.set()
    assert statuses == [0]
    assert "has not ended within 0.05 s" in capsys.readouterr().err
