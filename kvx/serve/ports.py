"""The ports of a deployment, as given or free ones."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from kvx.errors import EngineError
from kvx.serve.options import ServeOptions
from kvx.servers import free_ports, free_run, is_free, require_free_port

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 8000
FIRST_PORT_ELSEWHERE = 8100


@dataclass(frozen=True)
class Ports:
    """Of each engine in its order, of clients and of its first rank's side channel; and the router's two."""

    engines: tuple[int, ...]
    sides: tuple[int, ...]
    router: int
    router_metrics: int

    @classmethod
    def chosen(cls, options: ServeOptions, worlds: Sequence[int]) -> Self:
        """On this machine, where all of them must be free; `worlds` are the ranks of each engine.

        Trigger of EngineError: one that was given is taken, or there is no room for all.
        """
        taken: set[int] = set()
        router = _router_port(options)
        taken.add(router)
        if options.first_port:
            engines, sides = _counted(options.first_port, worlds)
            for port in range(options.first_port, sides[-1] + worlds[-1]):
                require_free_port(LOOPBACK, port)
            taken.update(range(options.first_port, sides[-1] + worlds[-1]))
        else:
            engines = tuple(free_run(1, taken) for _ in worlds)
            sides = tuple(free_run(world, taken) for world in worlds)
        return cls(engines, sides, router, free_run(1, taken))

    @classmethod
    def elsewhere(cls, options: ServeOptions, worlds: Sequence[int]) -> Self:
        """On machines that cannot be asked: different ports for all, so that engines may share a machine."""
        router = options.port or DEFAULT_PORT
        engines, sides = _counted(options.first_port or FIRST_PORT_ELSEWHERE, worlds)
        return cls(engines, sides, router, router + 1)


def _router_port(options: ServeOptions) -> int:
    """As given; not given, the default, or where that is taken a free one."""
    if options.port:
        require_free_port(options.host, options.port)
        return options.port
    if options.port is None and is_free(options.host, DEFAULT_PORT):
        return DEFAULT_PORT
    return free_ports(1, options.host)[0]


def _counted(first: int, worlds: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ports one after another: first those of the engines, then as many for each as it has ranks."""
    needed = len(worlds) + sum(worlds)
    if first + needed > 65536:
        raise EngineError(f"first_port {first} leaves no room for {needed} ports below 65536; give a lower one")
    side = first + len(worlds)
    sides = itertools.accumulate(worlds[:-1], initial=side)
    return tuple(range(first, side)), tuple(sides)
