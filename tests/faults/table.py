"""The table of faults: every cell runs, or is listed here with the reason why it cannot occur."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

CONNECTORS = ("nixl", "mooncake", "ipc", "cpu_offload")
POLICIES = ("recompute", "fail")
FAULTS = (
    "kill",
    "stop",
    "network_cut",
    "restart",
    "abort_greet",
    "abort_claim",
    "abort_move",
    "abort_check",
    "lease_expiry",
    "host_full",
    "extend_reader",
    "extend_owner",
    "sleep_reader",
    "sleep_owner",
)
_NO_PEER = "its peer is host memory of its own process"
NOT_POSSIBLE = {
    ("ipc", "network_cut"): "its peers are on the same host, reached through no network",
    ("cpu_offload", "kill"): _NO_PEER + ", which dies with it",
    ("cpu_offload", "stop"): _NO_PEER + ", which stops with it",
    ("cpu_offload", "network_cut"): _NO_PEER + ", reached through no network",
    ("cpu_offload", "restart"): _NO_PEER + ", which restarts with it",
    ("cpu_offload", "abort_greet"): _NO_PEER + ": nobody is greeted",
    ("cpu_offload", "abort_claim"): _NO_PEER + ": nothing is claimed, the pool pins blocks at once",
    ("cpu_offload", "abort_check"): "digests are compared inside `poll`, on the engine's own thread",
    ("cpu_offload", "lease_expiry"): _NO_PEER + ": nobody else has a lease of its blocks",
    ("cpu_offload", "extend_owner"): _NO_PEER + ": owner and reader are one; see extend_reader",
    ("cpu_offload", "sleep_owner"): _NO_PEER + ": owner and reader are one; see sleep_reader",
}
# One of each connector, for every run of the tests.
QUICK = {(name, "kill", "recompute") for name in ("nixl", "mooncake", "ipc")} | {
    ("cpu_offload", "abort_move", "recompute")
}


_RECOMPUTE = ("recompute",)
_OVER_A_LINK = dict.fromkeys(("stop", "network_cut", "abort_move", "lease_expiry", "kill"), POLICIES)
_INSIDE_A_HOST = dict.fromkeys(("stop", "abort_claim", "lease_expiry", "kill"), POLICIES)
# What real vLLM servers go through, and under which policies; a restart (half a minute) and an abort inside one server
# under one. All other cells are without a meaning there: vLLM on a CPU grows its cache in its start alone, and cannot
# sleep; and how far a request is, is seen from outside by the bytes on a link only.
ON_VLLM: dict[str, dict[str, tuple[str, ...]]] = {
    "nixl": {**_OVER_A_LINK, "restart": _RECOMPUTE},
    "mooncake": {**_OVER_A_LINK, "restart": _RECOMPUTE},
    "ipc": {**_INSIDE_A_HOST, "restart": _RECOMPUTE},
    "cpu_offload": {"abort_move": _RECOMPUTE},
}


@dataclass(frozen=True, order=True)
class Cell:
    """`on`: the engines, without a model or vLLM's servers."""

    connector: str
    fault: str
    policy: str
    on: str = "engines"

    def __str__(self) -> str:
        return f"{self.connector}-{self.fault}-{self.policy}" + (f"-{self.on}" if self.on != "engines" else "")

    @property
    def reason(self) -> str:
        """Why it cannot occur; empty where it can."""
        return NOT_POSSIBLE.get((self.connector, self.fault), "")


ON_ENGINES = tuple(Cell(*names) for names in product(CONNECTORS, FAULTS, POLICIES))
ON_SERVERS = tuple(
    Cell(connector, fault, policy, "vllm")
    for connector, faults in ON_VLLM.items()
    for fault, policies in faults.items()
    for policy in policies
)
ALL = ON_ENGINES + ON_SERVERS
# Cells of one connector and policy share engines, so they come one after the other.
RUN = sorted((cell for cell in ON_ENGINES if not cell.reason), key=lambda cell: (cell.connector, cell.policy))


def missing(outcomes: dict[str, str]) -> dict[str, str]:
    """Cells that have neither run to their end nor a reason, and what became of them instead."""
    return {
        str(cell): outcomes.get(str(cell), "not run")
        for cell in ALL
        if not cell.reason and outcomes.get(str(cell)) not in {"passed", "failed"}
    }
