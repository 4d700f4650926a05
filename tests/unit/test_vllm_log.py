"""What kvx's core tells is seen where vLLM's own lines are."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from kvx.vllm.log import log_as_vllm

NAMES = ("vllm", "kvx", "kvx_connectors")


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """As in a process that has imported vLLM; everything is put back."""
    found = [logging.getLogger(name) for name in NAMES]
    before = [(one.handlers, one.level, one.propagate) for one in found]
    for one in found:
        one.handlers, one.propagate = [], True
        one.setLevel(logging.NOTSET)
    yield
    for one, (handlers, level, propagate) in zip(found, before, strict=True):
        one.handlers, one.propagate = handlers, propagate
        one.setLevel(level)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def configured(name: str) -> Lines:
    lines, logger = Lines(), logging.getLogger(name)
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    return lines


def test_core_and_connectors_speak_through_vllms_handlers_once() -> None:
    lines = configured("vllm")
    for _ in range(2):
        log_as_vllm()
    logging.getLogger("kvx.owners").info("read through nixl")
    logging.getLogger("kvx_connectors.nixl").info("listens")
    logging.getLogger("kvx.owners").debug("too much")
    assert lines.lines == ["read through nixl", "listens"]


def test_who_has_said_where_it_goes_is_left_alone() -> None:
    vllms, own = configured("vllm"), configured("kvx")
    log_as_vllm()
    logging.getLogger("kvx.owners").info("read through nixl")
    assert (vllms.lines, own.lines) == ([], ["read through nixl"])
