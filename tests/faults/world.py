"""Three engine processes: a peer that trouble comes to, one that is well, and the reader of both."""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine_process import Remote
from fault_engine import FaultConfig, FaultEngine
from network import Network, until

DEADLINE_S, LEASE_S, GRACE_S = 3.0, 6.0, 0.5
# A library's drain, and what a busy machine with two cores adds.
DRAIN_S = 3.0
TOKENS = 128
SECRET = "tickets of the engines that faults come to"
OFFLOAD_BLOCKS = TOKENS // 16
SLACK = {"file descriptors": 4, "threads": 0, "shared memory mappings": 0, "mappings": 32}
"""How much more than at first a process may hold after any number of faults: libraries keep some memory and some
connections for later. One more of either at each fault is more than that in the end."""


class World:
    """`sound` is cleared by a test that fails in it: the next one gets another.

    `settings`: of the hand-off, where they are not those of the table of faults.
    """

    def __init__(
        self, connector: str, policy: str, network: Network | None, *, engine: type[FaultEngine] = FaultEngine,
        num_blocks: int = 64, settings: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.connector, self.policy, self.network = connector, policy, network
        self.offloads = connector == "cpu_offload"
        self._engine, self._num_blocks = engine, num_blocks
        self.settings = {
            "transfer_deadline_s": DEADLINE_S, "lease_s": LEASE_S, "grace_s": GRACE_S, "max_hold_s": 1.5,
            "verify": "all", "failure_policy": policy, "allow_unauthenticated_data_plane": True, **(settings or {}),
        }  # fmt: skip
        self.sound, self._numbers, self._started = True, itertools.count(1), list[Remote]()
        self._first: dict[int | None, dict[str, int]] = {}

    def open(self) -> None:
        self._shared_memory = Path(tempfile.mkdtemp(prefix="kvx-faults-", dir="/dev/shm"))
        is_root = os.geteuid() == 0  # a quick cell does without; nothing is in the folder then
        self._seen_folder = str(self._shared_memory) if is_root else None
        self._temporary = Path(tempfile.mkdtemp(prefix="kvx-faults-"))
        if self.network is not None:
            self.network.open()
        self.peer, self.well, self.reader = (self._start(name) for name in ("peer", "well", "reader"))
        for engine in (self.peer, self.well, self.reader):
            engine.ready()
        for engine in (self.peer, self.reader):  # libraries take some things for good with the first change
            engine.grow()
            engine.nap()
        for _ in range(3):
            self.hand_off(self.peer, self.well)

    def close(self) -> None:
        for engine in self._started:
            if engine.process.is_alive():
                engine.signal(signal.SIGCONT)
                engine.stop()
        left = self.files()
        for folder in (self._shared_memory, self._temporary):
            shutil.rmtree(folder)
        if self.network is not None:
            self.network.close()
        assert not left, f"killed engines left {left}"

    def restart_peer(self, *, same_port: bool) -> None:
        """The same name and agent, at the address of before or at another one."""
        self.begin_restart(same_port=same_port)
        self.peer.ready()

    def begin_restart(self, *, same_port: bool) -> None:
        """The same, without waiting until it is ready."""
        port = self.peer.port if same_port else 0
        self.peer.stop()
        self.peer = self._start("peer", port)

    def restart_reader(self) -> None:
        """The same name, at another address."""
        self.reader.stop()
        self.reader = self._start("reader").ready()

    def files(self) -> list[str]:
        """What lies in the engines' /dev/shm (seen as root only) and among their temporary files."""
        return [str(path) for folder in (self._shared_memory, self._temporary) for path in folder.iterdir()]

    # Requests

    def new(self) -> tuple[str, int]:
        """A request's name and seed, and so its content, that no other one has."""
        number = next(self._numbers)
        return f"r{number}", 10 * number

    @functools.cache  # noqa: B019  a world lives as long as its tests
    def answer(self, seed: int) -> str:
        """The right one, of an engine that nothing happens to."""
        answer: str = self.well.compute(TOKENS, seed)
        return answer

    def begin(self, owner: Remote, *, gated: bool = False, lease_s: float | None = None) -> tuple[str, int]:
        name, seed = self.new()
        place = owner.prefill(name, TOKENS, seed, lease_s)
        self.reader.resume(name, place, TOKENS, seed, gated)
        return name, seed

    def begin_unanswered(self) -> tuple[str, int]:
        """A request whose owner has stopped meanwhile."""
        name, seed = self.new()
        place = self.peer.prefill(name, TOKENS, seed)
        self.peer.signal(signal.SIGSTOP)
        self.reader.resume(name, place, TOKENS, seed)
        return name, seed

    def begin_gated(self, owner: Remote, lease_s: float | None = None) -> tuple[str, int]:
        """A request whose first piece has been read, and which stays there."""
        name, seed = self.begin(owner, gated=True, lease_s=lease_s)
        until(self.reader.is_gated)
        return name, seed

    def hand_off(self, *owners: Remote) -> None:
        """One request of each engine, at once: all of them right, and by transfer."""
        requests = [self.begin(owner) for owner in owners]
        for name, seed in requests:
            ended = self.reader.outcome(name, DEADLINE_S + DRAIN_S)
            assert ended is not None, f"{name} has no end"
            assert (ended["error"], ended["answer"]) == ("", self.answer(seed)), ended

    def recover(self) -> None:
        """The peer is read again by itself; what was lost on the way is sent again within seconds."""
        deadline = time.monotonic() + 20
        while True:
            name, seed = self.begin(self.peer)
            ended = self.reader.outcome(name, DEADLINE_S + DRAIN_S)
            assert ended is not None
            if not ended["error"]:
                assert ended["answer"] == self.answer(seed)
                return
            assert time.monotonic() < deadline, ended

    # What must hold afterwards

    def engines(self) -> list[Remote]:
        return [self.peer, self.well, self.reader]

    def require_blocks_back(self) -> None:
        bound_s = sum(self.settings[name] for name in ("transfer_deadline_s", "lease_s", "grace_s")) + DRAIN_S
        used: dict[str, int] = {}

        def are_back() -> bool:
            used.update({engine.config.engine_id: engine.num_used() for engine in self.engines()})
            return not any(used.values())

        until(are_back, bound_s, lambda: f"blocks that nobody gave back: {used}")

    def note_footprints(self) -> None:
        """What each process held when it was first seen, at the begin of a test."""
        for engine in self.engines():
            self._first.setdefault(engine.process.pid, engine.footprint())

    def require_nothing_leaked(self) -> None:
        """Of the processes that lived through it. Libraries let go on threads of their own."""
        growth: dict[str, int] = {}

        def is_clean() -> bool:
            growth.clear()
            for engine in self.engines():
                now = engine.footprint()
                first = self._first.get(engine.process.pid, now)
                growth.update({f"{engine.config.engine_id}: {what}": now[what] - first[what] for what in SLACK})
            return all(more <= SLACK[name.partition(": ")[2]] for name, more in growth.items())

        until(is_clean, 8.0, lambda: f"left behind: {growth}")

    def require_no_internal_errors(self) -> None:
        for engine in self.engines():
            assert engine.status()["side_channel"]["internal_errors"] == 0
            assert engine.status()["digests"]["mismatched"] == 0

    def _start(self, name: str, port: int = 0) -> Remote:
        host, network, environ = "127.0.0.1", None, {"KVX_SECRET": SECRET, "TMPDIR": str(self._temporary)}
        if self.network is not None:
            side = 0 if name == "peer" else 1
            host, network = self.network.addresses[side], self.network.names[side]
            environ |= {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "all", "KVX_MOONCAKE_HOST": host}
        settings = {**self.settings, "side_channel_host": host, "side_channel_port": port}
        connector = "nixl" if self.offloads else self.connector
        config = FaultConfig(
            name, agent_name=f"{name} of the faults", connectors=(connector,), settings=settings, environ=environ,
            num_blocks=self._num_blocks, capacity_blocks=self._num_blocks + 448, network=network,
            offloads=self.offloads, shared_memory=self._seen_folder,
        )  # fmt: skip
        self._started.append(Remote(config, self._engine))
        return self._started[-1]
