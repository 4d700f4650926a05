"""A connector through a directory of files, for engines that share a disk: WRITE only, no library at all.

Each opening has an inbox, a folder of its own in KVX_FILE_FOLDER. A transfer is one file in the receiver's inbox, and
its name's ending says how far it is; every step is one rename, or one deletion, which only one side can win:

    .part     the sender writes it           -> .ready   by the sender, once it is on the disk
    .ready    waits for the receiver's poll  -> .taken   by the receiver; or deleted by a sender that gave up
    .taken    the receiver checks and copies -> .done or .refused, which the sender reads as the answer, and deletes

The receiver keeps a lock on its inbox. Where that is free, it is dead, and nothing will be copied any more.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
import time
import uuid
import zlib
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np

from kvx.connector import Capabilities, Connector, Copies, Op, Transfer, TransferState
from kvx.errors import ConnectorError, HandshakeError, LayoutError, TransferError
from kvx.peer import Peer
from kvx.region import MemoryRegion

FOLDER_VARIABLE = "KVX_FILE_FOLDER"
DRAIN_S = 1.0  # how long a receiver that has taken a file may copy before its sender gives up
_NAME = re.compile(r"[0-9a-f]{32}")


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What comes before a file's bytes: where they belong in the receiver's memory, and their checksum."""

    addresses: list[int]
    lengths: list[int]
    crc32: int


class FileConnector(Connector):
    name: ClassVar[str] = "file"
    capabilities: ClassVar[Capabilities] = Capabilities(
        operations=frozenset({Op.WRITE}), notify=False, memory=frozenset({"cpu"}), opens_ports=False
    )

    def __init__(self) -> None:
        super().__init__()
        self._folder, self._inbox, self._inbox_fd = Path(), "", -1
        self._undo = ExitStack()

    def _open(self, regions: Sequence[MemoryRegion]) -> None:  # noqa: ARG002  files need no registration
        if not os.environ.get(FOLDER_VARIABLE):
            raise ConnectorError(f"no folder for hand-offs: set {FOLDER_VARIABLE} to one that both engines see")
        self._folder, self._inbox = Path(os.environ[FOLDER_VARIABLE]).resolve(), uuid.uuid4().hex
        inbox, new = self._folder / self._inbox, self._folder / f"{self._inbox}.new"
        with ExitStack() as undo:
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                _remove_dead(self._folder)
                new.mkdir(mode=0o700)
                undo.callback(shutil.rmtree, new, ignore_errors=True)
                fcntl.flock(undo.enter_context(open(new / "alive", "x")), fcntl.LOCK_EX)
                self._inbox_fd = os.open(new, os.O_DIRECTORY)
                undo.callback(os.close, self._inbox_fd)
                os.rename(new, inbox)  # only now: without its lock it would look like a dead one's
                undo.callback(shutil.rmtree, inbox, ignore_errors=True)
            except OSError as error:
                raise ConnectorError(f"no inbox in {self._folder}: {error}; name a folder to write in") from error
            self._undo = undo.pop_all()

    def _metadata(self) -> bytes:
        return self._inbox.encode()

    def _connect(self, library_metadata: bytes) -> Peer:
        inbox = library_metadata.decode("ascii", "replace")
        if not _NAME.fullmatch(inbox):
            raise HandshakeError(f"a peer calls its inbox {inbox[:80]!r}; 32 hexadecimal digits are needed")
        try:
            fd = os.open(self._folder / inbox, os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError as error:
            raise ConnectorError(f"no inbox {inbox} in {self._folder}: {error}; name one shared folder") from error
        return Peer(name=inbox, generation=0, regions=self._regions, library=fd)

    def _submit(self, transfer: Transfer, copies: Copies, notify: bytes) -> None:
        assert not notify
        transfer.handle = name = uuid.uuid4().hex
        fd, lengths = _folder_of(transfer.peer), copies.length.tolist()
        content = b"".join(ctypes.string_at(*row) for row in zip(copies.local.tolist(), lengths, strict=True))
        encoded = msgspec.msgpack.encode(Header(copies.remote.tolist(), lengths, zlib.crc32(content)))
        try:
            with open(os.open(f"{name}.part", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600, dir_fd=fd), "wb") as file:
                file.write(len(encoded).to_bytes(8, "little") + encoded + content)
                file.flush()
                os.fsync(file)
            os.rename(f"{name}.part", f"{name}.ready", src_dir_fd=fd, dst_dir_fd=fd)
        except OSError as error:
            _delete(fd, f"{name}.part")
            raise TransferError(f"could not write for peer {transfer.peer.name}: {error}") from error

    def _progress(self) -> list[tuple[str, bytes]]:
        for entry in os.listdir(self._inbox_fd):
            if entry.endswith(".ready") and _NAME.fullmatch(entry[:-6]):
                self._receive(entry[:-6])
        for transfer in list(self._pending):
            is_stopped = transfer.stop_cause is not None
            is_late = is_stopped and time.monotonic() > transfer.stop_time + DRAIN_S
            self._look_at(transfer, take_back=is_stopped, give_up=is_late or _is_dead(_folder_of(transfer.peer)))
        return []

    def _look_at(self, transfer: Transfer, *, take_back: bool, give_up: bool) -> None:
        fd, name = _folder_of(transfer.peer), f"peer {transfer.peer.name}"
        if _delete(fd, f"{transfer.handle}.done"):
            self._finish(transfer, TransferState.DONE)
        elif _delete(fd, f"{transfer.handle}.refused"):
            self._finish(transfer, TransferState.FAILED, TransferError(f"{name} refused the file"))
        elif (take_back and _delete(fd, f"{transfer.handle}.ready")) or give_up:
            self._finish(transfer, TransferState.FAILED, TransferError(f"{name} gave no answer"))

    def _receive(self, name: str) -> None:
        fd, answer = self._inbox_fd, "done"
        with suppress(FileNotFoundError):  # its sender gave up
            os.rename(f"{name}.ready", f"{name}.taken", src_dir_fd=fd, dst_dir_fd=fd)
            try:
                self._copy_in(f"{name}.taken")
            except (OSError, msgspec.MsgspecError, OverflowError, LayoutError):
                answer = "refused"
            os.rename(f"{name}.taken", f"{name}.{answer}", src_dir_fd=fd, dst_dir_fd=fd)

    def _copy_in(self, name: str) -> None:
        """Check everything, and only then touch the memory. LayoutError when the file does not hold together."""
        with open(os.open(name, os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=self._inbox_fd), "rb") as file:
            content = file.read()
        end = 8 + int.from_bytes(content[:8], "little")
        header, content = msgspec.msgpack.decode(content[8:end], type=Header), content[end:]
        addresses, lengths = np.array(header.addresses, np.int64), np.array(header.lengths, np.int64)
        fits = len(addresses) == len(lengths) and (lengths > 0).all() and lengths.sum() == len(content)
        if not fits or zlib.crc32(content) != header.crc32:
            raise LayoutError(f"{len(content)} bytes for {len(lengths)} runs do not hold together")
        self._regions.require_inside(addresses - self._regions.base_address, lengths, "destination")
        for address, nbytes, end in zip(header.addresses, header.lengths, np.cumsum(lengths).tolist(), strict=True):
            ctypes.memmove(address, content[end - nbytes : end], nbytes)

    def _cancel(self, transfer: Transfer) -> None:
        """`_progress` takes the file back, or waits for the receiver's answer."""

    def _disconnect(self, peer: Peer) -> None:
        """Take back what was not taken, wait for the rest, and forget where the peer's inbox is."""
        deadline = time.monotonic() + DRAIN_S
        while (transfer := next((item for item in self._pending if item.peer is peer), None)) is not None:
            self._look_at(transfer, take_back=True, give_up=time.monotonic() > deadline)
            time.sleep(0.0005)
        os.close(_folder_of(peer))

    def _close(self) -> None:
        for peer in self._peers.values():
            self._disconnect(peer)
        self._undo.close()


def _folder_of(peer: Peer) -> int:
    assert isinstance(peer.library, int), "a connected peer has its inbox open"
    return peer.library


def _delete(fd: int, name: str) -> bool:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=fd)
        return True
    return False


def _is_dead(inbox_fd: int) -> bool:
    """Its lock is free, or its inbox is gone."""
    with suppress(FileNotFoundError), open(os.open("alive", os.O_RDWR | os.O_NOFOLLOW, dir_fd=inbox_fd)) as alive:
        try:
            fcntl.flock(alive, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _remove_dead(folder: Path) -> None:
    """Inboxes whose engines were killed."""
    for inbox in folder.iterdir():
        if _NAME.fullmatch(inbox.name) and not inbox.is_symlink():
            fd = os.open(inbox, os.O_DIRECTORY | os.O_NOFOLLOW)
            if _is_dead(fd):
                shutil.rmtree(inbox, ignore_errors=True)
            os.close(fd)
