"""Two engines and all between them, in one thread: real `HandoffWorker`s on a clock, a network, a transfer library and
memory that the test plays. Nothing here knows how a hand-off works; it knows whose each block is and what is in it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import torch
from fake_connector import BASE, region
from simulated_network import Network, Poller
from test_handshake import INFO
from test_pulls import LAYER

from kvx import handoff
from kvx.connector import Capabilities, Connector, Copies, Op, Transfer, TransferState
from kvx.engine_side import HandoffSettings, Pull, Waiting
from kvx.geometry import GroupGeometry
from kvx.handoff import HandoffWorker
from kvx.peer import Peer
from kvx.ranks import Share
from kvx.secret import Secret

# BLOCK_BYTES of each KV head.
BLOCKS, BLOCK_BYTES, TOKENS, TOKEN_BYTES = 12, 512, 16, 32
# A lease shorter than the deadlines: it is what ends things.
LEASE_S, GRACE_S, LONGEST_S, DEADLINE_S, DRAIN_S = 4.0, 1.0, 15.0, 5.0, 4.0
# How often an engine looks while something is in flight, and how exact its timers are (ZeroMQ's milliseconds).
LOOK_S, EXACT_S = 0.25, 0.005
SECRET = Secret(b"a secret of tests")


@dataclass(eq=False)
class Read:
    """One transfer inside the library: pieces of a block each, (remote, local) offsets."""

    reader: Engine
    owner: Engine
    owner_life: int
    generation: int
    pieces: list[tuple[int, int]]
    moved: int = 0
    is_broken: bool = False
    is_over: bool = False


class SimulatedLibrary(Connector):
    name = "simulated"
    capabilities = Capabilities(operations=frozenset({Op.READ}), notify=False, memory=frozenset({"cpu"}))

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine, self._clock = engine, engine.clock

    @property
    def reads(self) -> list[Read]:
        return [transfer.handle for transfer in self._pending if isinstance(transfer.handle, Read)]

    def _metadata(self) -> bytes:
        return msgspec.msgpack.encode((self.engine.name, self.engine.life, self.engine.generation))

    def _connect(self, library_metadata: bytes) -> Peer:
        name, life, generation = msgspec.msgpack.decode(library_metadata, type=tuple[str, int, int])
        return Peer(name, 0, self._regions, library=(self.engine.world.engines[name], life, generation))

    def _submit(self, transfer: Transfer, copies: Copies, notify: bytes) -> None:
        owner, life, generation = transfer.peer.library  # type: ignore[misc]
        pieces = [
            (int(remote - BASE + start), int(local - BASE + start))
            for remote, local, length in zip(copies.remote, copies.local, copies.length, strict=True)
            for start in range(0, int(length), TOKEN_BYTES * TOKENS)
        ]
        transfer.handle = Read(self.engine, owner, life, generation, pieces)

    def _progress(self) -> list[tuple[str, bytes]]:
        for transfer in list(self._pending):
            read = transfer.handle
            assert isinstance(read, Read)
            late = transfer.stop_cause is not None and self._clock() >= transfer.stop_time + DRAIN_S
            if read.is_over or late:
                done = not read.is_broken and read.moved == len(read.pieces)
                self._finish(transfer, TransferState.DONE if done else TransferState.FAILED)
        return []

    def _open(self, regions: Sequence[Any]) -> None: ...

    def _cancel(self, transfer: Transfer) -> None: ...

    def _disconnect(self, peer: Peer) -> None: ...

    def _close(self) -> None: ...


class SimulatedExecutor:
    """Takes digests when the test says so."""

    jobs: list[SimulatedExecutor] = []  # noqa: RUF012  one list for all, emptied with each world

    def __init__(self, *given: Any, **named: Any) -> None:
        self.waiting: list[tuple[Future[Any], Callable[[], Any]]] = []
        self.jobs.append(self)

    def submit(self, take: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, take))
        return future

    def work(self) -> None:
        waiting, self.waiting = self.waiting, []
        for future, take in waiting:
            future.set_running_or_notify_cancel()
            future.set_result(take())

    def shutdown(self, wait: bool, cancel_futures: bool) -> None:
        for future, _ in self.waiting:
            future.cancel()
        self.waiting.clear()


class SimulatedWorker(HandoffWorker):
    """The real one, whose turns the world takes."""

    def __init__(self, engine: Engine, settings: HandoffSettings, secret: Secret | None) -> None:
        info = msgspec.structs.replace(INFO, **{"engine_id": engine.name, **engine.info})
        super().__init__(settings, info, [engine.library], secret=secret, clock=engine.clock)
        self._network = engine.world.network

    def _new_sockets(self) -> tuple[Any, Any]:
        return self._network, Poller()

    def _start(self) -> None:
        self._thread = threading.current_thread()

    @property
    def has_work(self) -> bool:
        return bool(self._notes or self._poller.poll())

    def turn(self) -> None:
        self._guarded(self._turn)

    def sleeps_s(self) -> float:
        """How long it would now sleep, when nothing wakes it."""
        return self._sleep_ms() / 1000

    def _sleep_ms(self) -> int:
        self._poll_s = 0.0  # of real time
        return super()._sleep_ms()

    def die(self) -> None:
        """As after SIGKILL: nobody is told."""
        self._network.die(self._server.socket, [link.socket for link in self._puller.links])  # type: ignore[arg-type]
        self._thread = None
        with self._wake_lock:
            handoff.os.close(self._wake_fd)
            self._wake_fd = -1


@dataclass(eq=False)
class Held:
    """A hold of the model: blocks that are one request's until kvx says that they may be freed."""

    name: str
    number: int
    blocks: list[int]
    num_tokens: int
    began: float


@dataclass(eq=False)
class Pulled:
    name: str
    of: str
    number: int
    blocks: list[int]
    first_token: int
    num_tokens: int
    began: float
    # Offsets that were written to.
    written: set[int] = field(default_factory=set)


class Scheduler:
    """What an engine's scheduler does, whose allocator knows whose each block is. Who is one has a way to its ranks:
    `hold`, `pull_from`, `wait`, `drop`, `cancel`, `ticket`, `overwrite`.
    """

    world: World
    is_alive: bool
    is_ready: bool
    reads: list[Read]  # what its library moves
    holds: dict[str, Held]
    pulls: dict[str, Pulled]
    free: list[int]
    owner_of: dict[int, str]

    def prefill(self, count: int) -> None:
        if not self.is_ready or len(self.free) < count:
            return
        number = next(self.world.numbers)
        held = Held(f"h{number}", number, self._allocate(count, f"h{number}"), count * TOKENS, self.world.now)
        self.world.held[held.name] = held
        self.world.tickets[held.name] = self.ticket(held.name, held.num_tokens)
        self.hold(held)

    def pull(self, owner: Scheduler, held: Held | None, first_block: int, gives_up: bool) -> None:
        """Of a request that nobody holds, where there is none."""
        number = next(self.world.numbers)
        of = held.name if held is not None else f"h{number}"
        count = len(held.blocks) if held is not None else 1
        first_block = min(first_block, count - 1)
        if not self.is_ready or len(self.free) < count:
            return
        if of not in self.world.tickets and owner.is_alive:
            self.world.tickets[of] = owner.ticket(of, TOKENS)
        pulled = Pulled(
            f"p{number}", of, held.number if held is not None else -1,
            [] if gives_up else self._allocate(count, f"p{number}"), first_block * TOKENS,
            0 if gives_up else (count - first_block) * TOKENS, self.world.now,
        )  # fmt: skip
        self.pull_from(owner, pulled)

    def _allocate(self, count: int, name: str) -> list[int]:
        blocks = self.free[:count]
        del self.free[:count]
        for block in blocks:
            assert block not in self.owner_of
            self.owner_of[block] = name
        return blocks

    def _let_go(self, blocks: list[int], name: str) -> None:
        """And the next one writes there at once."""
        for block in blocks:
            assert self.owner_of.pop(block) == name
        self.overwrite(blocks)
        self.free += blocks


@dataclass(eq=False)
class Engine(Scheduler):
    """One engine of one rank over all its lives (a restart begins the next)."""

    world: World
    name: str
    host: str
    clock_offset: float
    port: int = 5000
    life: int = 0
    generation: int = 0
    is_alive: bool = False
    is_stopped: bool = False
    ended: threading.Event | None = None  # of a memory change that has begun
    is_asleep: bool = False
    keeps_content: bool = False
    slack_s: float = 0.0  # for how long it was stopped, of late
    holds: dict[str, Held] = field(default_factory=dict)
    pulls: dict[str, Pulled] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    owner_of: dict[int, str] = field(default_factory=dict)
    num_freed: int = 0
    wakes: float = 0.0
    change_began: float = 0.0
    outcomes: list[tuple[str, str]] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    # What it says of itself where it is not as all others.
    info: dict[str, Any] = field(default_factory=dict)
    layer: GroupGeometry = LAYER
    layout: str = "LBHNC"
    settings: dict[str, Any] = field(default_factory=dict)
    connector: str = "simulated"

    def clock(self) -> float:
        return self.world.now + self.clock_offset

    @property
    def block_bytes(self) -> int:
        return BLOCK_BYTES * self.layer.heads.count

    def start(self) -> None:
        self.life += 1
        self.generation = 1
        self.is_alive, self.is_stopped, self.is_asleep, self.ended, self.slack_s = True, False, False, None, 0.0
        self.memory = np.full(BLOCKS * self.block_bytes, 0xEE, np.uint8)
        self.free, self.owner_of, self.holds, self.pulls, self.num_freed = list(range(BLOCKS)), {}, {}, {}, 0
        self.library = SimulatedLibrary(self)
        self.library.name = self.connector
        self.library.open([region(0, BLOCKS * self.block_bytes)], 1)
        settings = HandoffSettings(
            side_channel_host=self.host, side_channel_port=self.port, lease_s=LEASE_S, grace_s=GRACE_S,
            max_hold_s=LONGEST_S, transfer_deadline_s=DEADLINE_S,
            **{"verify": "all" if self.world.verify else "off", **self.settings},
        )  # fmt: skip
        self.worker = SimulatedWorker(self, settings, SECRET if self.world.has_secret else None)
        view = torch.from_numpy(self.memory).view(torch.float32)
        shaped = view.view(BLOCKS, self.layer.heads.count, TOKENS, TOKEN_BYTES // 4)
        self.worker.open([self.layer], {"a": shaped}, BLOCKS, 1, self.layout)
        self.wakes = self.world.now

    def die(self) -> None:
        self.worker.die()
        self.is_alive = False

    @property
    def is_ready(self) -> bool:
        return self.is_alive and self.ended is None and not self.is_asleep

    @property
    def runs(self) -> bool:
        return self.is_alive and not self.is_stopped

    def run_if_due(self) -> None:
        """Its turns, as long as something wakes it."""
        for _ in range(50):
            if not self.runs or not (self.worker.has_work or self.world.now >= self.wakes):
                return
            self.worker.turn()
            self.wakes = self.world.now + (self.worker.sleeps_s() or LOOK_S)
            try:
                self._hear()
            except AssertionError:
                self.world.is_wrong = True
                raise
            if self.ended is not None and self.ended.is_set():
                self._memory_goes()
        raise AssertionError("it never sleeps")

    # What its scheduler tells it

    def ticket(self, name: str, num_tokens: int) -> str:
        return self.worker.ticket(name, num_tokens)

    def hold(self, held: Held) -> None:
        """Its part of a request is computed, and kept."""
        for position, block in enumerate(held.blocks):
            self._block(block)[:] = self._content(held.number, position)
        self.holds[held.name] = held
        self.worker.hold(held.name, [held.blocks], held.num_tokens)

    def pull_from(self, owner: Scheduler, pulled: Pulled) -> None:
        pulled = self.pulls[pulled.name] = replace(pulled, written=set())
        port, found = self.ranks_of(owner)
        self.worker.pull(
            Pull(
                request_id=pulled.name, remote_request_id=pulled.of, remote_engine_id=owner.name, host=owner.host,
                port=port, blocks=[pulled.blocks], first_token=pulled.first_token,
                num_tokens=pulled.num_tokens, ticket=self.world.tickets.get(pulled.of, ""), shares=found,
            )
        )  # fmt: skip

    def wait(self, owner: Scheduler, held: Held) -> None:
        """A request of it is queued."""
        if self.is_ready:
            port, found = self.ranks_of(owner)
            ranks = tuple(share.owner_rank for share in found) or (0,)
            ticket = self.world.tickets[held.name]
            self.worker.keep(Waiting(f"w{held.name}", held.name, owner.name, owner.host, port, ticket, ranks))

    def ranks_of(self, owner: Scheduler) -> tuple[int, tuple[Share, ...]]:
        """The first port that it asks, and what it reads of whom."""
        return owner.port, ()

    def drop(self, name: str) -> None:
        if self.is_alive:
            self.worker.drop(name)

    def cancel(self, name: str) -> None:
        if self.is_alive:
            self.worker.cancel(name)

    # What befalls it

    def stop_or_go_on(self) -> None:
        if self.is_alive:
            self.is_stopped = not self.is_stopped
            self.wakes = min(self.wakes, self.world.now)

    def change(self, keeps_content: bool) -> None:
        """Its memory is about to go (sleep), or to grow."""
        if not self.is_ready or self.is_stopped:
            return
        self.keeps_content, self.change_began = keeps_content, self.world.now
        self.ended = self.worker._begin_suspending()

    def wake(self) -> None:
        if self.is_alive and self.is_asleep:
            self.is_asleep = False
            self.generation += 1
            self.library.open([region(0, BLOCKS * self.block_bytes)], self.generation)
            self.worker.resume(BLOCKS, self.generation)

    def _memory_goes(self) -> None:
        assert not self.worker._holder._table.holds, "nothing of it is kept any more"
        self.worker._side.end_digests()
        self.library.close()
        self.ended, self.is_asleep = None, True
        if not self.keeps_content:
            self.memory[:] = 0xDD

    def _hear(self) -> None:
        events = self.worker.poll()
        assert not events.released & events.expired
        for name in events.released | events.expired:
            assert name in self.holds, f"{name} was freed twice, or never held"
            self._hold_ended(self.holds.pop(name), name in events.released)
            self.num_freed += 1
        counted = self.worker._side.metrics
        assert counted.released + counted.expired == self.num_freed, "each hold is freed once"
        assert not events.received & events.failed.keys()
        for name in events.received | events.failed.keys():
            assert name in self.pulls, f"{name} ended twice, or never began"
            pulled = self.pulls.pop(name)
            if name in events.received:
                self.use(pulled)
            self._pull_ended(pulled, name in events.received)
            self.reasons |= {name: failure.text for name, failure in events.failed.items()}
            self.outcomes.append((name, events.failed[name].cause if name in events.failed else "received"))

    def _hold_ended(self, held: Held, released: bool) -> None:
        self._let_go(held.blocks, held.name)

    def _pull_ended(self, pulled: Pulled, received: bool) -> None:
        self._let_go(pulled.blocks, pulled.name)

    def use(self, pulled: Pulled) -> None:
        """Decode takes what was read; it must be what was held, to the last byte."""
        if not pulled.num_tokens:
            return
        for position in range(pulled.first_token // TOKENS, len(pulled.blocks)):
            found = self._block(pulled.blocks[position])
            assert (found == self._content(pulled.number, position)).all(), (
                f"{pulled.name} uses what was not {pulled.of}'s"
            )

    # Its memory

    @property
    def reads(self) -> list[Read]:
        return self.library.reads if self.is_alive else []

    def _block(self, block: int) -> Any:
        return self.memory[block * self.block_bytes : (block + 1) * self.block_bytes]

    def _content(self, number: int, position: int) -> Any:
        """What request `number` has in its block at `position`: in no other block, and of no other head."""
        heads = range(self.layer.heads.start, self.layer.heads.end)
        values = np.array([(number + 1, position + 1, head + 1, 0) for head in heads], np.uint32)
        return np.tile(values, BLOCK_BYTES // 16).view(np.uint8).reshape(-1)

    def overwrite(self, blocks: list[int]) -> None:
        for block in blocks:
            self._block(block)[:] = 0xEE

    def write(self, offset: int, data: Any) -> None:
        """By the library, into a pull that is on its way."""
        block = offset // self.block_bytes
        name = self.owner_of.get(block, "")
        assert name in self.pulls, f"block {block} was written to after its pull had ended"
        written = self.pulls[name].written
        assert offset not in written, f"{name} reads a head of block {block} twice"
        written.add(offset)
        self.memory[offset : offset + len(data)] = data


class World:
    """Both engines."""

    def __init__(self, *, verify: bool, has_secret: bool, **of_engines: Any) -> None:
        self.verify, self.has_secret, self.now, self.is_wrong = verify, has_secret, 100.0, False
        self.network, self.numbers = Network(), itertools.count()
        self.held: dict[str, Held] = {}  # all there ever were
        self.tickets: dict[str, str] = {}
        SimulatedExecutor.jobs.clear()
        self.engines: dict[str, Engine] = {}
        self.begin(**of_engines)

    def begin(self, **of_engines: Any) -> None:
        self.prefill = self.add("prefill", "127.0.0.1", 0.0, **of_engines)
        self.decode = self.add("decode", "127.0.0.2", 5000.0, **of_engines)

    def add(self, name: str, host: str, clock_offset: float, **fields: Any) -> Engine:
        """One more engine, which runs."""
        engine = self.engines[name] = Engine(self, name, host, clock_offset, **fields)
        engine.start()
        self.settle()
        return engine

    def settle(self) -> None:
        """Everybody does what can be done now."""
        for engine in self.engines.values():
            engine.run_if_due()

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            wakes = [engine.wakes for engine in self.engines.values() if engine.runs]
            step = min([end, *(max(moment, self.now + 0.001) for moment in wakes)]) - self.now
            self.now += step
            for engine in self.engines.values():
                if engine.is_stopped:
                    engine.slack_s += step
            self.settle()

    def move(self, read: Read, blocks: int, flip: bool = False) -> None:
        """The library reads the next blocks, whatever is in them; of an old mapping, nothing that is of any use."""
        for source, destination in read.pieces[read.moved : read.moved + blocks]:
            read.is_broken |= not read.owner.is_alive or read.owner.life != read.owner_life
            if read.is_broken:
                return
            data = read.owner.memory[source : source + BLOCK_BYTES].copy()
            if read.owner.generation != read.generation:
                data[:] = 0xDD
            data[7] ^= 0x40 if flip else 0
            read.reader.write(destination, data)
            read.moved += 1

    def deliver_some(self, count: int) -> None:
        for _ in range(count):
            if self.network.in_flight:
                self.network.deliver(self.network.in_flight[0])
                self.settle()

    def deliver_all(self) -> None:
        for _ in range(30):
            messages = [item for item in self.network.in_flight if self._is_deliverable(item)]
            if not messages:
                return
            for message in messages:
                if message in self.network.in_flight:
                    self.network.deliver(message)
            self.settle()

    def _is_deliverable(self, message: Any) -> bool:
        connection = message.connection
        return not message.to_server or connection.server is not None or connection.endpoint in self.network.routers

    def recover(self) -> None:
        """Both engines are up, awake and running."""
        for engine in self.engines.values():
            if not engine.is_alive:
                engine.start()
            if engine.is_stopped:
                engine.stop_or_go_on()
            engine.wake()
        self.settle()

    def close(self) -> None:
        for engine in self.engines.values():
            if engine.is_alive:
                engine.die()
