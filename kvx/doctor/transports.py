"""Which ways the transfer libraries take, by what they did in a round trip between two processes of this host."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from kvx_connectors.mooncake_settings import settings_of_environment

from kvx.addresses import is_loopback
from kvx.doctor.findings import Finding, error, ok, skipped, warning
from kvx.doctor.half import Trip
from kvx.doctor.network import Peer
from kvx.doctor.process import Failed
from kvx.engine_settings import UCX_TRANSPORTS
from kvx.errors import ConnectorError, PeerDead
from kvx.registry import AUTO

HERE, ELSEWHERE = "intra-node", "inter-node"
_LANES = re.compile(rf"UCX\s+INFO\s.*/moving ({HERE}|{ELSEWHERE}) cfg#\d+ (.*)")
_LANE = re.compile(r"[\w]+/[\w:.-]+")
# UCX's ways between processes of one host that copy memory instead of sending it.
SHARED_MEMORY = frozenset({"cma", "posix", "sysv", "xpmem", "knem", "cuda_ipc"})
_STAGES = {
    "library": "its library does not load",
    "memory": "the memory for the trip is not to be had",
    "open": "its back end does not start",
    "listen": "the side channel cannot listen",
    "there": "64 MiB did not arrive at the other process",
    "back": "64 MiB did not come back",
    "compare": "what came back is not what went",
}


def lanes_of(words: str) -> dict[str, tuple[str, ...]]:
    """By UCX's own log at level info: transport/device of each kind of connection that transfers went over."""
    found: dict[str, tuple[str, ...]] = {}
    for line in words.splitlines():
        if match := _LANES.search(line):
            found[match[1]] = tuple(dict.fromkeys(_LANE.findall(match[2])))
    return found


def check_connector(name: str, failed: Failed | None) -> Finding:
    """Whether a connector's library loads and starts. `failed`: what became of a half with it instead."""
    check = f"connector {name}"
    if failed is None:
        return ok(check, "loads, starts, and registers memory")
    what = _STAGES.get(failed.stage, f"its process fails at {failed.stage}")
    return error(
        check, f"{what}: {failed.text}", "an engine with this connector ends at its start with the same words",
        failed.hint or "do what the text says, or configure another connector",
    )  # fmt: skip


def check_trip(check: str, outcome: Trip | Failed) -> Finding:
    if isinstance(outcome, Trip):
        mib = outcome.nbytes >> 20
        return ok(
            check, f"{mib} MiB by {outcome.connector}, there in {outcome.there_s:.2f} s and back in "
            f"{outcome.back_s:.2f} s, every byte the same (sha256 {outcome.digest[:16]})",
        )  # fmt: skip
    dead = PeerDead.cause
    ended = outcome.cause == dead or outcome.text.startswith(dead) or "no answer" in outcome.text
    what = _STAGES.get(outcome.stage, f"failed at {outcome.stage}")
    return error(
        check, f"{what}: {outcome.text}", "every hand-off would fail like this, and its prompt be computed again",
        "see why the other process ended, and start it again" if ended else
        "do what the text says; if it names no cause: let both hosts reach each other's ports (docs/security.md)",
    )  # fmt: skip


def check_ucx(device: str, words: str, environ: Mapping[str, str] = os.environ) -> Finding:
    """The transports that UCX took between two processes of this host; `words`: what it printed meanwhile."""
    wanted, good = environ.get("UCX_TLS"), UCX_TRANSPORTS["cpu" if device == "cpu" else "cuda"]
    given = "UCX_TLS is not set" if wanted is None else f"UCX_TLS={wanted}"
    if device != "cpu" and wanted is not None and wanted != "all" and "cuda" not in wanted:
        return error(
            "UCX transports", f"{given}, for GPU memory", "without cuda_copy and cuda_ipc, UCX moves no GPU memory",
            f"export UCX_TLS={good} (or unset it)",
        )  # fmt: skip
    lanes = lanes_of(words).get(HERE)
    if lanes is None:
        return skipped("UCX transports", f"{given}; UCX has not said what it took")
    text = f"between processes of this host: {', '.join(lanes)} ({given})"
    if any(lane.partition("/")[0] in SHARED_MEMORY for lane in lanes):
        return ok("UCX transports", text)
    allowed = wanted is None or wanted == "all" or bool(SHARED_MEMORY & set(wanted.split(",")))
    fix = (
        "let processes read each other: docker run --cap-add SYS_PTRACE, sysctl kernel.yama.ptrace_scope=0, one user"
        if allowed else f"export UCX_TLS={good} (or unset it)"
    )  # fmt: skip
    return warning(
        "UCX transports", text,
        "no shared memory among them: inside one host every byte goes through sockets, several times slower", fix,
    )  # fmt: skip


def check_mooncake(connectors: Sequence[str], elsewhere: Sequence[Peer]) -> Finding | None:
    """Where Mooncake tells peers to connect to, in settings of its own; None where it is not configured."""
    if "mooncake" not in connectors:
        return None
    check = "Mooncake's address"
    try:
        found = settings_of_environment()
    except ConnectorError as problem:
        return error(check, str(problem), "an engine with it ends at its start", "correct that variable")
    if elsewhere and is_loopback(found.host):
        return error(
            check, f"KVX_MOONCAKE_HOST is {found.host}, but the peer {', '.join(map(str, elsewhere))} is on another "
            "machine", "it is told to read from loopback, which leads to itself",
            "export KVX_MOONCAKE_HOST=the IPv4 address of this machine that peers reach",
        )  # fmt: skip
    return ok(check, f"{found.host}, over {found.protocol}")


def check_growing_memory(connectors: Sequence[str], device: str, peer_is_here: bool) -> Finding:
    """UCX has no fast way over GPU memory that grows, between two processes of one host."""
    check = "GPU memory inside one host"
    if device == "cpu" or not peer_is_here:
        return skipped(check, "no GPU" if device == "cpu" else "no peer on this host")
    if "nixl" not in connectors or "ipc" in connectors or AUTO in connectors:
        return ok(check, f"connectors {', '.join(connectors)}")
    return warning(
        check, f"connectors {', '.join(connectors)}",
        "UCX cannot share memory that grows: between two engines of one host NIXL moves 0.4 GB/s, ipc hundreds",
        '"connectors": ["auto"], which takes ipc inside a host and nixl between hosts',
    )  # fmt: skip
