"""What the connector `ipc` does on a thread of its own: hand out our memory's descriptors, notice peers that end.

Sockets are Unix sockets in the abstract namespace, which belongs to a network namespace and leaves no file behind. A
connection stays open for as long as one side may have the other's memory mapped: its end says that a peer is gone,
or has let go.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvx.errors import ConnectorError, KVXError
from kvx.metrics import is_logged

logger = logging.getLogger(__name__)

FDS_A_MESSAGE = 200  # the kernel passes at most 253
ANSWER_S = 2.0
MOST_CONNECTIONS = 1024
NO_DESCRIPTORS_S = 0.05
"""How long the thread rests when the process has no descriptor left for a caller, who waits meanwhile."""
LET_GO_S = 2.0
"""How long `stop` waits for readers to unmap our memory. One that is stopped keeps it until it goes on."""
_CREDENTIALS = struct.Struct("3i")


class Listener:
    """`export` gives new descriptors of all our allocations, for the caller to close."""

    def __init__(self, name: str, export: Callable[[], list[int]]) -> None:
        self._name, self._export = name, export
        self._selector = selectors.DefaultSelector()
        self._watched: dict[socket.socket, Callable[[], None]] = {}
        self._notes: deque[Callable[[], None]] = deque()
        self._wake_fd = -1
        self._num_refused = 0
        self._stopping_until: float | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Listen, on a thread. ConnectorError when the socket cannot be had."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listening.bind(abstract(self._name))
            listening.listen(64)
            listening.setblocking(False)
            self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError as error:
            listening.close()
            raise ConnectorError(f"no socket for sharing memory: {error}") from error
        self._selector.register(self._wake_fd, selectors.EVENT_READ, self._on_wake)
        self._selector.register(listening, selectors.EVENT_READ, lambda: self._accept(listening))
        self._listening = listening
        self._thread = threading.Thread(target=self._run, name="kvx-ipc", daemon=True)
        self._thread.start()

    def watch(self, connection: socket.socket, on_end: Callable[[], None]) -> None:
        """Call `on_end`, on the thread, when the other side closes `connection`; `let_go` closes ours."""
        self._post(lambda: self._add(connection, on_end))

    def let_go(self, connection: socket.socket) -> None:
        """Close a watched connection: the owner may take it that we have nothing of its memory mapped."""
        self._post(lambda: self._remove(connection))

    def stop(self) -> None:
        """Tell every reader that our memory goes, and return when they have let go of it, or after LET_GO_S."""
        if self._thread is None:
            return
        self._post(self._begin_to_stop)
        self._thread.join()
        self._thread = None
        os.close(self._wake_fd)

    def _post(self, note: Callable[[], None]) -> None:
        self._notes.append(note)
        os.eventfd_write(self._wake_fd, 1)

    # The thread

    def _run(self) -> None:
        while self._stopping_until is None or (self._watched and time.monotonic() < self._stopping_until):
            wait_s = None if self._stopping_until is None else self._stopping_until - time.monotonic()
            for key, _ in self._selector.select(wait_s):
                try:
                    key.data()
                except Exception:
                    logger.exception("sharing memory")
        for connection in list(self._watched):
            self._remove(connection)
        self._selector.close()

    def _on_wake(self) -> None:
        os.eventfd_read(self._wake_fd)
        while self._notes:
            self._notes.popleft()()

    def _begin_to_stop(self) -> None:
        self._stopping_until = time.monotonic() + LET_GO_S
        self._selector.unregister(self._listening)
        self._listening.close()
        for connection in self._watched:
            with contextlib.suppress(OSError):  # it has ended already
                connection.shutdown(socket.SHUT_WR)

    def _accept(self, listening: socket.socket) -> None:
        try:
            connection, _ = listening.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                time.sleep(NO_DESCRIPTORS_S)
            return  # otherwise it gave up meanwhile
        try:
            require_same_user(connection)
            if len(self._watched) >= MOST_CONNECTIONS:
                raise ConnectorError(f"{len(self._watched)} processes have our memory already; that is enough")
            connection.settimeout(ANSWER_S)
            send_all(connection, self._export())
        except (OSError, KVXError) as error:
            self._num_refused += 1
            if is_logged(self._num_refused):
                logger.warning("memory is not shared with a process that asked (no. %d): %s", self._num_refused, error)
            connection.close()
            return
        self._add(connection, lambda: self._remove(connection))

    def _add(self, connection: socket.socket, on_end: Callable[[], None]) -> None:
        self._watched[connection] = on_end
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._on_readable(connection))

    def _on_readable(self, connection: socket.socket) -> None:
        """Nothing is ever said after the descriptors: it has ended. Ours stays open until `let_go`."""
        self._selector.unregister(connection)
        self._watched[connection]()

    def _remove(self, connection: socket.socket) -> None:
        self._watched.pop(connection, None)
        if connection.fileno() >= 0 and connection in self._selector.get_map():
            self._selector.unregister(connection)
        with contextlib.suppress(OSError):  # it has ended already
            connection.shutdown(socket.SHUT_RDWR)  # a forked child may have the socket too, so closing ends nothing
        connection.close()


def abstract(name: str) -> str:
    return f"\0kvx-ipc-{name}"


def require_same_user(connection: socket.socket) -> None:
    """ConnectorError when the process at the other end is not our user's."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(raw)
    if user != os.geteuid():
        raise ConnectorError(
            f"process {process} of user {user} is at the other end; memory is shared with user {os.geteuid()} only"
        )


def send_all(connection: socket.socket, fds: Sequence[int]) -> None:
    """Send descriptors and close ours."""
    try:
        for first in range(0, len(fds), FDS_A_MESSAGE):
            part = fds[first : first + FDS_A_MESSAGE]
            socket.send_fds(connection, [len(part).to_bytes(2, "little")], part)
    finally:
        for fd in fds:
            os.close(fd)


def ask(name: str, count: int) -> tuple[socket.socket, list[int]]:
    """(connection, descriptors) from the listener of that name; ConnectorError when there are not `count` of them."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fds: list[int] = []
    deadline_s = time.monotonic() + ANSWER_S
    try:
        _connect(connection, name, deadline_s)
        require_same_user(connection)
        while len(fds) < count:
            connection.settimeout(max(0.001, deadline_s - time.monotonic()))
            said, some, _, _ = socket.recv_fds(connection, 2, FDS_A_MESSAGE, socket.MSG_CMSG_CLOEXEC)
            fds += some
            if not some or len(said) != 2 or len(some) != int.from_bytes(said, "little"):
                raise ConnectorError(f"the peer sent {len(fds)} descriptors of memory, {count} are needed")
        if len(fds) != count:
            raise ConnectorError(f"the peer sent {len(fds)} descriptors of memory, {count} are needed")
        connection.setblocking(False)
    except BaseException as error:
        connection.close()
        for fd in fds:
            os.close(fd)
        if isinstance(error, OSError):
            raise ConnectorError(
                f"the peer's memory cannot be had ({error}): it has ended, or its memory has changed; shake hands again"
            ) from error
        raise
    return connection, fds


def _connect(connection: socket.socket, name: str, deadline_s: float) -> None:
    """A full backlog answers at once, with EAGAIN, whatever the timeout."""
    while True:
        connection.settimeout(max(0.001, deadline_s - time.monotonic()))
        try:
            connection.connect(abstract(name))
            return
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.01)
