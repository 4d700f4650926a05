"""A deployment that runs: started in order, watched until somebody ends it or one of its servers ends, and stopped."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kvx.errors import EngineError
from kvx.serve.deployment import DECODE, PREFILL, Deployment, Member, urls
from kvx.serve.options import ServeOptions
from kvx.serve.router import HINT, RouterSettings
from kvx.servers import Server, Servers, ServerSettings, StoppedBySignal
from kvx.verify.client import Client
from kvx.verify.report import EXTERNAL_HITS

WAITING, STARTING, READY, UNHEALTHY = "waiting", "starting", "ready", "unhealthy"
STOPPING, STOPPED, ENDED = "stopping", "stopped", "ended"  # we stop it, and it is gone; it ended by itself
LOOK_INTERVAL_S = 0.5
ASK_INTERVAL_S = 3.0
ASK_DEADLINE_S = 2.0
_SUCCESS, _RUNNING = "vllm:request_success_total", "vllm:num_requests_running"


@dataclass
class Instance:
    """One server as an operator sees it. Counts are None for the router, and until they have been asked for."""

    name: str
    role: str
    url: str
    side_port: int | None
    log: Path
    state: str = WAITING
    since_s: float = field(default_factory=time.monotonic)
    served: int | None = None
    running: int | None = None
    external_tokens: int | None = None
    server: Server | None = None

    def become(self, state: str) -> None:
        if state != self.state:
            self.state, self.since_s = state, time.monotonic()


class View(Protocol):
    """Where a deployment says how it is. `wants_counts`: whether engines are asked for their counters."""

    @property
    def wants_counts(self) -> bool: ...

    def show(self, instances: Sequence[Instance]) -> None: ...

    def say(self, text: str, *, alarm: bool = False) -> None: ...


def serve(options: ServeOptions, deployment: Deployment, view: View) -> int:
    """Start everything, watch it, and stop it: 0 when somebody ended it, 1 when a server ended by itself.

    A server that is not ready within `start_timeout`, or whose port was taken meanwhile, counts as one that ended.
    """
    with Servers(Path(options.logs) if options.logs else None) as servers:
        run = _Run(options, deployment, servers, view)
        try:
            run.start()
            run.watch()
        except (KeyboardInterrupt, StoppedBySignal):
            pass
        except EngineError as error:
            run.has_lost = True
            view.say(f"kvx: {error}", alarm=True)  # now: stopping the others takes a while
        run.say_stopping()
    run.say_stopped()
    return 1 if run.has_lost else 0


class _Run:
    def __init__(self, options: ServeOptions, deployment: Deployment, servers: Servers, view: View) -> None:
        self._options, self._deployment, self._servers, self._view = options, deployment, servers, view
        self._engines = {member.name: _engine_instance(member, servers.logs) for member in deployment.members}
        self._instances = list(self._engines.values())
        self._router: Instance | None = None
        if deployment.router is not None:
            self._router = _router_instance(deployment.router, servers.logs)
            self._instances.append(self._router)
        self.has_lost = False

    def start(self) -> None:
        self._view.show(self._instances)
        for wave in self._deployment.waves():
            for member in wave:
                self._launch(self._engines[member.name], member.engine)
            self._wait([self._engines[member.name] for member in wave])
        router = self._deployment.router
        if router is not None and self._router is not None:
            self._launch(self._router, router)
            self._wait([self._router])
        self._view.say(_ready_text(self._deployment))

    def watch(self) -> None:
        """Until an interrupt, or the first server that ends by itself; with `keep_going`, the last one."""
        client = Client(ASK_DEADLINE_S)
        try:
            asked_s = time.monotonic()
            while True:
                self._notice_lost()
                if self.has_lost and not (self._options.keep_going and self._some_run()):
                    return
                if time.monotonic() - asked_s > ASK_INTERVAL_S:
                    self._ask(client)
                    asked_s = time.monotonic()
                self._view.show(self._instances)
                time.sleep(LOOK_INTERVAL_S)
        finally:
            client.close()

    def say_stopping(self) -> None:
        self._view.say("stopping: first the router, then decode, then prefill; Ctrl-C again kills them at once")
        for instance in self._instances:
            if instance.server is not None:
                instance.become(STOPPING if instance.server.is_running() else ENDED)
        self._view.show(self._instances)

    def say_stopped(self) -> None:
        for instance in self._instances:
            if instance.state == STOPPING:
                instance.become(STOPPED)
        self._view.show(self._instances)
        self._view.say("all of it is stopped")

    def _launch(self, instance: Instance, settings: ServerSettings) -> None:
        instance.server = self._servers.start(settings)
        instance.become(STARTING)

    def _wait(self, started: Sequence[Instance]) -> None:
        servers = [instance.server for instance in started if instance.server is not None]

        def waiting(_server: Server, _seconds: float) -> None:
            self._view.show(self._instances)

        self._servers.wait_healthy(self._options.start_timeout, waiting, servers)
        for instance in started:
            instance.become(READY)
        self._view.show(self._instances)

    def _notice_lost(self) -> None:
        """Say of each server that has ended by itself, once, how it did."""
        for instance in self._instances:
            if instance.server is None or instance.state == ENDED or instance.server.is_running():
                continue
            self.has_lost = True
            instance.become(ENDED)
            try:
                instance.server.check()
            except EngineError as error:
                self._view.say(f"kvx: {error}", alarm=True)

    def _some_run(self) -> bool:
        return any(instance.state != ENDED for instance in self._instances)

    def _ask(self, client: Client) -> None:
        for instance in self._instances:
            server = instance.server
            if server is None or instance.state == ENDED:
                continue
            instance.become(READY if server.is_healthy() else UNHEALTHY)
            if not self._view.wants_counts or instance is self._router or instance.state != READY:
                continue
            try:
                counters = client.counters(server.url)
            except EngineError:
                continue  # busy; what it said before is shown
            instance.served = sum(int(n) for name, n in counters.items() if name.startswith(_SUCCESS))
            instance.running = int(counters.get(_RUNNING, 0))
            instance.external_tokens = int(counters.get(EXTERNAL_HITS, 0))


def _engine_instance(member: Member, logs: Path) -> Instance:
    url = f"http://{member.engine.host}:{member.engine.port}"
    return Instance(member.name, member.role, url, member.side_port, logs / f"{member.name}.log")


def _router_instance(router: RouterSettings, logs: Path) -> Instance:
    return Instance(router.name, "router", router.url, None, logs / f"{router.name}.log")


def _ready_text(deployment: Deployment) -> str:
    model = deployment.served_model_name
    if deployment.router is not None:
        return f"ready: {deployment.router.url}/v1, model {model}; Ctrl-C stops it"
    prefill, decode = (", ".join(urls(deployment.members, role)) for role in (PREFILL, DECODE))
    return (
        f"ready, but without vllm-router ({HINT}) there is no one URL: prefill {prefill}; decode {decode}; "
        f"model {model}; Ctrl-C stops it"
    )
