"""`kvx verify` over two hosts, as an operator runs it: prefill and decode in network namespaces of their own.

A link that is cut in the middle of a transfer is a row of the table: `network_cut`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from network import Hosts
from servers_world import SECRET, places_of

pytestmark = [pytest.mark.faults, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(960)]

QUESTIONS = 8
DEADLINE_S = 900


def write_places(path: Path, hosts: Hosts) -> Path:
    """A text, a list of texts and a number look alike in JSON and TOML."""
    lines = ["[options]", "allow_unauthenticated_data_plane = true"]
    for role, place in places_of(hosts).items():
        lines.append(f"[{role}]")
        lines += [f"{name} = {json.dumps(value)}" for name, value in place.described().items() if name != "environment"]
        lines += [f"environment.{name} = {json.dumps(value)}" for name, value in place.environment.items()]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(("connectors", "connector"), [("auto", "nixl"), ("mooncake", "mooncake")])
def test_eight_answers_are_those_of_one_server(
    hosts: Hosts, model: Path, tmp_path: Path, connectors: str, connector: str
) -> None:
    report, before = tmp_path / "report.json", hosts.bytes_sent()
    ended = subprocess.run(
        [
            sys.executable, "-m", "kvx.cli.main", "verify", "--connector", connectors, "--limit", str(QUESTIONS),
            "--places", str(write_places(tmp_path / "places.toml", hosts)),
            "--report", str(report), "--logs", str(tmp_path),
        ],
        env={**os.environ, "KVX_SECRET": SECRET},
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-3000:]
    found = json.loads(report.read_text())
    assert found["identical"] == found["questions"] == QUESTIONS
    assert found["digests"]["checked"] > found["digests"]["mismatched"] == 0
    assert found["transfer"]["by_connector"] == {connector: QUESTIONS}
    passed = hosts.bytes_sent() - before
    assert passed >= found["transfer"]["bytes"] > 0
    if connectors == "auto":
        log = (tmp_path / "decode.log").read_text()
        assert "is read through nixl (not ipc: its network namespace is" in log
    print(f"{connectors}: {found['transfer']['bytes']} bytes moved, {passed} passed over the link")
