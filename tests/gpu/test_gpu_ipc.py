"""Copies of many runs in one launch, and a peer's memory mapped here, on a real GPU."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from gpu_helpers import MIB, keep_busy
from kvx_connectors.ipc import IpcConnector

from kvx.connector import Op, TransferState
from kvx.drivers import cuda_copier
from kvx.drivers.copier import copier_for
from kvx.drivers.cuda import CudaDriver
from kvx.drivers.cuda_copier import CudaCopier
from kvx.drivers.host import HostDriver
from kvx.errors import TransferError
from kvx.plan import RUN_DTYPE, Runs
from kvx.region import MemoryRegion
from kvx.tensor import tensor_over
from kvx.vmm import Reservation

NBYTES = 64 * MIB
BLOCK = 64 << 10

OWNER = """
    import sys, torch
    from kvx_connectors.ipc import IpcConnector
    from kvx.drivers.cuda import CudaDriver
    from kvx.region import MemoryRegion
    from kvx.tensor import tensor_over
    from kvx.vmm import Reservation

    nbytes = int(sys.argv[1])
    torch.zeros(1, device="cuda")
    memory = Reservation(CudaDriver(0), nbytes)
    memory.reserve()
    memory.commit_range(0, nbytes)
    words = tensor_over(memory).view(torch.int64)
    torch.arange(len(words), out=words)
    torch.cuda.synchronize()
    connector = IpcConnector()
    connector.open([MemoryRegion(memory.address, nbytes, 0, memory.mappings[0])], 1)
    print(connector.metadata().hex(), flush=True)
    for line in sys.stdin:
        if line == "close\\n":
            connector.close()
            print("closed", flush=True)
        else:
            print(int(words[int(line)].item()), flush=True)
    connector.close()
    del words
    memory.release()
"""


@pytest.fixture
def copier(driver: CudaDriver) -> Iterator[CudaCopier]:
    found = copier_for(driver.device)
    assert isinstance(found, CudaCopier)
    yield found
    found.close()


@pytest.mark.parametrize(
    "sizes",
    [[1], [16] * 100, [7, 300, 4096, 5000, 1 << 20, 3], [100_000] * 64, [1 << 24], [24] * cuda_copier.MANY_RUNS],
)
def test_runs_of_any_size_and_alignment(copier: CudaCopier, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_copier, "BIG_BYTES", 1)
    nbytes = np.array(sizes, np.int64)
    starts = np.cumsum(nbytes + 33) - nbytes
    source = torch.randint(0, 256, (int(starts[-1] + nbytes[-1] + 64),), dtype=torch.uint8, device="cuda")
    found, expected = torch.zeros_like(source), torch.zeros_like(source)
    order = np.random.default_rng(1).permutation(len(sizes))
    targets = np.zeros_like(starts)
    targets[order] = np.cumsum(nbytes[order] + 17) - nbytes[order]
    for to, at, size in zip(targets, starts, nbytes, strict=True):
        expected[to : to + size] = source[at : at + size]
    torch.cuda.synchronize()  # the copier's stream waits for no other

    copying = copier.start(targets + found.data_ptr(), starts + source.data_ptr(), nbytes)
    copying.wait()

    assert copying.is_done()
    assert bool((found == expected).all())


def test_copies_wait_for_the_stream_that_wrote(copier: CudaCopier) -> None:
    source, found = torch.zeros(1024, device="cuda"), torch.zeros(1024, device="cuda")
    torch.cuda.synchronize()
    keep_busy(0.1)
    source.fill_(5)
    after = torch.cuda.current_stream().cuda_stream
    one = np.array([0], np.int64)
    copying = copier.start(one + found.data_ptr(), one + source.data_ptr(), one + 4096, after=after)
    assert not copying.is_done()
    copying.wait()
    assert bool((found == 5).all())


def test_pinned_host_memory_both_ways(copier: CudaCopier) -> None:
    host = Reservation(HostDriver(), 4 * MIB)
    host.reserve()
    host.commit_range(0, 4 * MIB)
    copier.register_host(host.address, 4 * MIB)
    numbers = torch.randint(0, 256, (2 * MIB,), dtype=torch.uint8, device="cuda")
    back = torch.zeros_like(numbers)
    torch.cuda.synchronize()
    starts = np.random.default_rng(2).permutation(64) * (32 << 10)
    size = np.full(64, 32 << 10, np.int64)
    copier.start(starts + host.address, np.sort(starts) + numbers.data_ptr(), size).wait()
    copier.start(np.sort(starts) + back.data_ptr(), starts + host.address, size).wait()
    assert bool((back == numbers).all())
    copier.unregister_host(host.address)
    host.release()


class Owner:
    def __init__(self) -> None:
        command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(OWNER), str(NBYTES)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.metadata = bytes.fromhex(self.line())

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, f"the owner ended: {self.process.wait()}"
        return line

    def ask(self, word: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        return self.line()


@pytest.fixture
def owner(driver: CudaDriver) -> Iterator[Owner]:
    found = Owner()
    yield found
    assert found.process.stdin is not None
    assert found.process.stdout is not None
    found.process.stdin.close()
    found.process.wait(60)
    found.process.stdout.close()


class Reader:
    """A connector over zeroed memory of our own, connected to the owner."""

    def __init__(self, driver: CudaDriver, owner: Owner) -> None:
        self.memory = Reservation(driver, NBYTES)
        self.memory.reserve()
        self.memory.commit_range(0, NBYTES)
        self.connector = IpcConnector()
        self.connector.open([MemoryRegion(self.memory.address, NBYTES, 0, self.memory.mappings[0])], 1)
        self.peer = self.connector.connect(owner.metadata)
        self.words = tensor_over(self.memory).view(torch.int64)
        self.words.zero_()
        torch.cuda.synchronize()

    def transfer(self, op: Op, runs: Runs) -> TransferState:
        self.connector.submit(op, self.peer, runs, deadline_s=10)
        deadline_s = time.monotonic() + 10
        while time.monotonic() < deadline_s:
            for transfer in self.connector.poll().finished:
                return transfer.state
        raise AssertionError("no end of a transfer")

    def close(self) -> None:
        self.connector.close()
        del self.words
        self.memory.release()


@pytest.fixture
def reader(driver: CudaDriver, owner: Owner) -> Iterator[Reader]:
    found = Reader(driver, owner)
    yield found
    found.close()


def blocks(seed: int) -> tuple[Runs, np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(seed)
    source, destination = (numbers.permutation(NBYTES // BLOCK)[:500] * BLOCK for _ in range(2))
    rows = np.zeros(500, RUN_DTYPE)
    rows["source"], rows["destination"], rows["length"], rows["count"] = source, destination, BLOCK, 1
    return Runs(rows), source, destination


def test_permuted_blocks_of_another_process(reader: Reader) -> None:
    runs, source, destination = blocks(1)
    expected = torch.zeros_like(reader.words)
    for at, to in zip((source // 8).tolist(), (destination // 8).tolist(), strict=True):
        expected[to : to + BLOCK // 8] = torch.arange(at, at + BLOCK // 8, device="cuda")

    assert reader.transfer(Op.READ, runs) is TransferState.DONE

    assert bool((reader.words == expected).all())


def test_blocks_written_to_another_process(reader: Reader, owner: Owner) -> None:
    reader.words.fill_(-7)
    torch.cuda.synchronize()
    runs, _, destination = blocks(2)
    assert reader.transfer(Op.WRITE, runs) is TransferState.DONE
    assert owner.ask(str(int(destination[3]) // 8)) == "-7"


def test_a_killed_owner_is_let_go(reader: Reader, owner: Owner) -> None:
    owner.process.kill()
    owner.process.wait()
    deadline_s = time.monotonic() + 10
    with pytest.raises(TransferError, match="has ended or changed its memory"):
        while time.monotonic() < deadline_s:
            state = reader.transfer(Op.READ, blocks(3)[0])
            assert state is TransferState.DONE, "its memory stays ours until we let go"


def test_an_owner_that_closes_gets_its_memory_back(reader: Reader, owner: Owner) -> None:
    mapped = reader.peer.library
    assert not mapped._is_retired
    assert owner.ask("close") == "closed"  # returns when the reader has unmapped
    assert mapped._is_retired
    assert mapped._reservation.committed_bytes == 0
    with pytest.raises(TransferError, match="has ended or changed its memory"):
        reader.transfer(Op.READ, blocks(4)[0])
