"""The conformance kit on the file connector, and what a kit cannot know: its directory."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
import pytest
from kvx_file_connector import FOLDER_VARIABLE, FileConnector

from kvx.connector import Connector, Op, Transfer, TransferState
from kvx.drivers.host import HostDriver
from kvx.errors import ConnectorError, HandshakeError
from kvx.testing import ConnectorTests, FaultTests
from kvx.testing.memory import KitMemory
from kvx.testing.peer_engine import runs_of


class TestFileConnector(ConnectorTests):
    # The same for peers in other processes, which import this file, too.
    environ: ClassVar = {FOLDER_VARIABLE: os.path.join(tempfile.gettempdir(), f"kvx-file-connector-{os.getuid()}")}

    def make_connector(self) -> Connector:
        return FileConnector()


class TestFileConnectorFaults(FaultTests):
    kit = TestFileConnector


Sides = tuple[list[FileConnector], list[KitMemory]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "shared"))
    return tmp_path / "shared"


@pytest.fixture
def sides(folder: Path) -> Iterator[Sides]:
    """Two connectors in this process, each on memory of its own."""
    assert not folder.exists()
    memories = [KitMemory(HostDriver()) for _ in range(2)]
    connectors = [FileConnector() for _ in range(2)]
    for memory, connector in zip(memories, connectors, strict=True):
        memory.open()
        memory.fill(1)
        connector.open(memory.regions(), 1)
    yield connectors, memories
    for memory, connector in zip(memories, connectors, strict=True):
        connector.close()
        memory.close()


def write(sender: FileConnector, receiver: FileConnector, deadline_s: float = 10.0) -> Transfer:
    return sender.submit(
        Op.WRITE, sender.connect(receiver.metadata()), runs_of([(0, 4096, 100), (200, 0, 50)]), deadline_s=deadline_s
    )


def test_without_a_folder_it_says_which_variable_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    memory = KitMemory(HostDriver())
    memory.open()
    with pytest.raises(ConnectorError, match=f"set {FOLDER_VARIABLE}"):
        FileConnector().open(memory.regions(), 1)
    memory.close()


def test_a_transfer_is_done_after_the_acknowledgement_only(sides: Sides) -> None:
    (sender, receiver), memories = sides
    transfer = write(sender, receiver)
    for _ in range(10):
        assert sender.poll().finished == ()
    receiver.poll()
    assert memories[1].read(4096, 100) == memories[0].read(0, 100)
    assert sender.poll().finished == (transfer,)
    assert transfer.state is TransferState.DONE


@pytest.mark.parametrize("harm", ["flip", "shorten", "lengthen", "address", "no header", "link"])
def test_a_file_that_was_tampered_with_is_refused_and_touches_nothing(sides: Sides, folder: Path, harm: str) -> None:
    (sender, receiver), memories = sides
    transfer = write(sender, receiver)
    (file,) = folder.glob("*/*.ready")
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = msgspec.msgpack.decode(content[8 : 8 + size])
    header["addresses"][1] = memories[1].base_address - 64
    moved = msgspec.msgpack.encode(header)
    harmed = {
        "flip": content[:-1] + bytes([content[-1] ^ 1]),
        "shorten": content[:-1],
        "lengthen": content + b"\0",
        "address": len(moved).to_bytes(8, "little") + moved + content[8 + size :],
        "no header": b"\xff" * len(content),
        "link": content,
    }[harm]
    if harm == "link":
        (folder.parent / "elsewhere").write_bytes(content)
        file.unlink()
        file.symlink_to(folder.parent / "elsewhere")
    else:
        file.write_bytes(harmed)
    before = memories[1].snapshot()
    receiver.poll()
    assert np.array_equal(memories[1].snapshot(), before)
    assert sender.poll().finished == (transfer,)
    assert transfer.state is TransferState.FAILED
    assert "refused" in str(transfer.cause)


@pytest.mark.parametrize("name", ["..", "/etc", "a" * 31, "A" * 32, "a" * 32 + "/..", ""])
def test_an_inbox_that_leads_elsewhere_is_refused(sides: Sides, name: str) -> None:
    (sender, receiver), _ = sides
    wire = msgspec.msgpack.decode(receiver.metadata())
    with pytest.raises(HandshakeError, match="32 hexadecimal digits"):
        sender.connect(msgspec.msgpack.encode({**wire, "library": name.encode()}))


def test_an_inbox_that_is_a_link_is_refused(sides: Sides, folder: Path) -> None:
    (sender, receiver), _ = sides
    wire = msgspec.msgpack.decode(receiver.metadata())
    (folder / ("a" * 32)).symlink_to(folder / wire["library"].decode())
    with pytest.raises(ConnectorError, match="no inbox"):
        sender.connect(msgspec.msgpack.encode({**wire, "library": b"a" * 32}))


def test_a_deadline_takes_the_file_back(sides: Sides, folder: Path) -> None:
    (sender, receiver), memories = sides
    before = memories[1].snapshot()
    transfer = write(sender, receiver, deadline_s=0.01)
    time.sleep(0.02)
    assert sender.poll().finished == (transfer,)
    assert not list(folder.glob("*/*.ready"))
    receiver.poll()
    assert np.array_equal(memories[1].snapshot(), before)


def test_nothing_is_left_in_the_folder_and_nothing_else_is_touched(sides: Sides, folder: Path) -> None:
    (sender, receiver), _ = sides
    (folder / "notes.txt").write_text("mine")
    (folder / ("b" * 32)).mkdir()  # an engine that was killed left it
    third = FileConnector()
    memory = KitMemory(HostDriver())
    memory.open()
    third.open(memory.regions(), 1)
    assert not (folder / ("b" * 32)).exists()
    write(sender, receiver)
    for connector in (third, sender, receiver):
        connector.close()
    memory.close()
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
