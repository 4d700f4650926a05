"""What the machine and this process's limits allow: locked memory, file descriptors, shared memory, RDMA."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvx.doctor.findings import Finding, error, ok, skipped, warning

MIB = 1 << 20
SHARED_MEMORY = Path("/dev/shm")
# vLLM's processes pass messages through rings of some 160 MiB there, filled as they are used; Docker gives 64 MiB.
LEAST_SHARED_BYTES, ENOUGH_SHARED_BYTES = 64 * MIB, 1024 * MIB
# Each peer takes tens of descriptors: a link, its monitor, and the sockets, pipes and devices of two agents.
LEAST_FILES, ENOUGH_FILES = 1024, 4096
NIC_FOLDER, VERBS_FOLDER = Path("/sys/class/infiniband"), Path("/dev/infiniband")
PEER_MEMORY_MODULE = Path("/sys/module/nvidia_peermem")
# The kernel from which a GPU's memory can be exported as a dma-buf.
DMA_BUF_KERNEL = (5, 12)


@dataclass(frozen=True)
class Nic:
    """`state`: the port's, as the kernel says it."""

    name: str
    state: str

    @property
    def is_active(self) -> bool:
        return self.state == "ACTIVE"


@dataclass(frozen=True)
class Rdma:
    """What there is for RDMA. `has_devices`: this process can open the NICs' device files."""

    nics: tuple[Nic, ...] = ()
    has_devices: bool = False

    @property
    def usable(self) -> bool:
        return self.has_devices and any(nic.is_active for nic in self.nics)


def read_rdma(nic_folder: Path | None = None, verbs_folder: Path | None = None) -> Rdma:
    folder, devices = nic_folder or NIC_FOLDER, verbs_folder or VERBS_FOLDER
    nics = [Nic(path.name, _state_of(path)) for path in sorted(folder.iterdir())] if folder.is_dir() else []
    return Rdma(tuple(nics), any(os.access(path, os.R_OK | os.W_OK) for path in devices.glob("uverbs*")))


def _state_of(nic: Path) -> str:
    """Of its first port: "4: ACTIVE" is what the file says."""
    try:
        return (nic / "ports/1/state").read_text().partition(":")[2].strip() or "unknown"
    except OSError:
        return "unknown"


def check_memlock(rdma: Rdma, soft_bytes: int | None = None) -> Finding:
    """`soft_bytes`: this process's own limit where not given."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if soft_bytes is None else soft_bytes
    if limit == resource.RLIM_INFINITY:
        return ok("memlock", "unlimited")
    text = f"at most {limit >> 10} KiB may be locked"
    if not rdma.usable:
        return ok("memlock", f"{text}; without RDMA nothing needs more")
    return error(
        "memlock",
        f"{text} (RLIMIT_MEMLOCK), and {', '.join(nic.name for nic in rdma.nics)} could do RDMA",
        "an RDMA registration locks every page of the KV cache: it fails, or the library goes over TCP without a word",
        "ulimit -l unlimited before the engine; docker run --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity",
    )


def check_files(limits: tuple[int, int] | None = None) -> Finding:
    """`limits`: soft and hard, this process's own where not given. vLLM raises the soft one as far as it may."""
    soft, hard = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft} open files, {'any number' if hard == resource.RLIM_INFINITY else hard} after vLLM has raised it"
    if hard == resource.RLIM_INFINITY or hard >= ENOUGH_FILES:
        return ok("file descriptors", text)
    make = error if hard < LEAST_FILES else warning
    return make(
        "file descriptors",
        text,
        f"each HTTP client and each peer of an engine takes some; {ENOUGH_FILES} are enough for most deployments",
        "ulimit -n 65536 before the engine; docker run --ulimit nofile=65536; systemd: LimitNOFILE=65536",
    )


def check_shared_memory(folder: Path | None = None) -> Finding:
    folder = folder or SHARED_MEMORY
    try:
        found = os.statvfs(folder)
    except OSError as problem:
        return error(
            "shared memory", f"{folder} cannot be used: {problem.strerror}",
            "vLLM's processes and UCX pass messages there, and do not start without it",
            f"mount -t tmpfs -o size=8g tmpfs {folder}",
        )  # fmt: skip
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    text = f"{free // MIB} MiB of {total // MIB} MiB free in {folder}"
    if free >= ENOUGH_SHARED_BYTES:
        return ok("shared memory", text)
    make = error if free < LEAST_SHARED_BYTES else warning
    full = total >= ENOUGH_SHARED_BYTES
    fix = (
        f"delete what killed processes left there (ls -lS {folder})" if full else
        "docker run --shm-size=8g (or --ipc=host); Kubernetes: an emptyDir with medium: Memory mounted there"
    )  # fmt: skip
    return make(
        "shared memory",
        text,
        "vLLM's processes and UCX pass messages there; when it is full, a write to it ends the process with SIGBUS",
        fix,
    )


def check_verbs_library(connectors: Sequence[str], rdma: Rdma, library: str = "libibverbs.so.1") -> Finding:
    """Whether the dynamic linker finds libibverbs, for those that need it."""
    try:
        ctypes.CDLL(library)
    except OSError:
        pass
    else:
        return ok("libibverbs", "found")
    fix = "apt-get install libibverbs1"
    if "mooncake" in connectors:
        return error(
            "libibverbs", f"no {library}", "Mooncake is linked to it, and does not load without it, for TCP as well",
            fix,
        )  # fmt: skip
    if rdma.nics:
        return warning("libibverbs", f"no {library}", "programs that ship none of their own cannot use the NICs", fix)
    return skipped("libibverbs", f"no {library}; neither an RDMA NIC nor a connector asks for it")


def check_rdma(rdma: Rdma) -> Finding:
    if not rdma.nics:
        return skipped("RDMA", "no RDMA NIC; between hosts, transfers go over TCP")
    text = ", ".join(f"{nic.name} ({nic.state})" for nic in rdma.nics)
    why = "transfers go over TCP without a word, many times slower"
    if not rdma.has_devices:
        return warning(
            "RDMA", f"{text}, but this process may open none of {VERBS_FOLDER}/uverbs*", why,
            "docker run --device=/dev/infiniband; Kubernetes: the network operator's RDMA device plug-in",
        )  # fmt: skip
    if not rdma.usable:
        return warning("RDMA", f"{text}: no port is active", why, "check cables and ibstat; RoCE: ip link set DEV up")
    return ok("RDMA", text)


def check_dma_buf(rdma: Rdma, gpus_export_dma_buf: bool | None, kernel: str | None = None) -> Finding:
    """Whether NICs reach GPU memory by themselves. `gpus_export_dma_buf`: None where there is no GPU."""
    if not rdma.usable or gpus_export_dma_buf is None:
        return skipped("dma-buf", "needs an RDMA NIC and a GPU; not both are here")
    release = kernel or platform.release()
    numbers = tuple(int(part) for part in release.partition("-")[0].split(".")[:2] if part.isdecimal())
    if gpus_export_dma_buf and numbers >= DMA_BUF_KERNEL:
        return ok("dma-buf", f"the GPUs export their memory, kernel {release}")
    if PEER_MEMORY_MODULE.exists():
        return ok("dma-buf", "the module nvidia_peermem is loaded")
    found = f"kernel {release}" if gpus_export_dma_buf else "the GPU driver exports no dma-buf"
    return warning(
        "dma-buf", f"{found}, and nvidia_peermem is not loaded",
        "NICs cannot reach GPU memory: every transfer between hosts takes a detour through host memory",
        "install NVIDIA's open kernel modules and a kernel from 5.12 on, or modprobe nvidia_peermem",
    )  # fmt: skip
