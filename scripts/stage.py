"""One stage of the measurements on a GPU: its runs, its clock, and the file that has what was found so far."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from say import say

from kvx.spread import spread

HERE = Path(__file__).resolve().parent
FORK_REFUSED = "re-initialize CUDA in forked subprocess"  # torch's words, where an import has started CUDA after all
_LEAST_S = 20.0
_GRACE_S = 20.0  # for `kvx verify` to end its engines


@dataclass
class Stage:
    """`name`.json in the folder has everything, after every run; what runs leave behind lies in `options.logs`."""

    name: str
    options: argparse.Namespace
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    measurements: dict[str, Any] = field(default_factory=dict)
    started_s: float = field(default_factory=time.monotonic)
    machine: Mapping[str, str] = field(default_factory=lambda: machine())

    def skips(self, name: str) -> bool:
        """Whether `--only` leaves a run out."""
        return bool(self.options.only) and name not in self.options.only

    def left_s(self) -> float:
        return float(self.options.minutes) * 60 - (time.monotonic() - self.started_s)

    def engine(
        self, name: str, *flags: str, engine: Mapping[str, Any] | None = None, fork: bool = True, **environment: str
    ) -> dict[str, Any]:
        """Run one engine; what it found, or `{"error": its last lines}`. `fork`: in a copy of this process, whose
        imports are done already; without, in a fresh one, whose status shows how it ended."""
        if self.skips(name):
            return {}
        result = self.path(name)
        result.unlink(missing_ok=True)
        words = [self.options.model, str(self.options.questions), str(result), *flags]
        if engine:
            words += ["--engine", json.dumps(engine)]
        if fork:
            found = self.forked(name, words, environment)
            fork = FORK_REFUSED not in self.log(name).read_text(errors="replace")
        if not fork:
            found = self.command(name, [sys.executable, str(HERE / "gpu_engine.py"), *words], **environment)
        found = {**found, **read_json(result)}
        self.note(name, found)
        return found

    def kvx(self, name: str, *words: str, option: str = "--json", **environment: str) -> dict[str, Any]:
        """Run `kvx` with these words; its report as far as it got, with the status."""
        report = self.path(name)
        report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "kvx.cli.main", *words, option, str(report)]
        found = {**self.command(name, command, **environment), "words": " ".join(["kvx", *words])}
        found |= read_json(report)
        self.note(name, found)
        return found

    def command(self, name: str, command: Sequence[str], **environment: str) -> dict[str, Any]:
        """In the project's folder, in a process group of its own, which ends when the stage's time does."""
        started_s = time.monotonic()
        with self.log(name).open("wb") as output:
            status = self._run(command, output, {**os.environ, **environment})
        return self.ended(name, status, started_s)

    def _run(self, command: Sequence[str], output: BinaryIO, environment: Mapping[str, str]) -> int:
        if self.left_s() < _LEAST_S:
            output.write(b"Error: not run, the time of this stage is up\n")
            return -1
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=HERE.parent, process_group=0
        )
        try:
            process.wait(self.left_s())
        except subprocess.TimeoutExpired:
            end_group(process)
            output.write(b"\nError: ended, the time of this stage is up\n")
        return process.returncode

    def forked(self, name: str, words: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
        """vLLM starts no CUDA when it is imported, so a fork after the import may."""
        import gpu_engine
        from vllm import LLM  # noqa: F401  (the imports are what the fork saves)

        gc.collect()
        gc.freeze()  # or each child would walk the imports' heap, and copy its pages, in every full collection
        started_s = time.monotonic()
        process = os.fork()
        if process == 0:
            with self.log(name).open("wb") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            os.environ.update(environment)
            try:
                gpu_engine.main(words)
            except BaseException:  # noqa: BLE001  (the child must end here, whatever happened)
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        alarm = threading.Timer(max(0.0, self.left_s()), os.kill, (process, signal.SIGKILL))
        alarm.start()
        try:
            _, status = os.waitpid(process, 0)
        finally:
            alarm.cancel()
        return self.ended(name, os.waitstatus_to_exitcode(status), started_s)

    def log(self, name: str) -> Path:
        return self.path(name).with_suffix(".log")

    def path(self, name: str) -> Path:
        """What a run leaves behind."""
        path: Path = self.options.logs / f"{self.name}-{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def ended(self, name: str, status: int, started_s: float) -> dict[str, Any]:
        say(f"{self.name} {name}: status {status} after {time.monotonic() - started_s:.0f} s")
        return {"status": status, "error": last_error(self.log(name).read_text(errors="replace"))}

    def note(self, name: str, found: dict[str, Any]) -> None:
        self.runs[name] = {key: value for key, value in found.items() if key != "tokens"}
        said = ("runner", "blocks", "idle_gib", "ready_s", "sleep", "error")
        say(json.dumps({key: found[key] for key in said if key in found}))
        self.write()

    def measured(self, **values: Any) -> None:
        self.measure({name.replace("__", "."): value for name, value in values.items()})

    def measure(self, values: Mapping[str, Any]) -> None:
        self.measurements.update(values)
        say(json.dumps(values))
        self.write()

    def earlier(self) -> dict[str, dict[str, Any]]:
        """With `--resume`, the runs that the stage's file has already."""
        return dict(read_json(self._file).get("runs", {})) if self.options.resume else {}

    def write(self) -> None:
        only = ["--only", ",".join(self.options.only)] if self.options.only else []
        found = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": " ".join(["scripts/gpu.sh", self.name, *only]),
            "machine": dict(self.machine),
            "measurements": self.measurements,
            "runs": self.runs,
        }
        beside = self._file.with_suffix(".part")
        beside.write_text(json.dumps(found, indent=1) + "\n")
        beside.replace(self._file)  # at no moment is there half a file

    @property
    def _file(self) -> Path:
        path: Path = self.options.folder / f"{self.name}.json"
        return path


def end_group(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C would, so that what it started ends with it; then by force."""
    for number, patience_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            process.wait()
        return


def read_json(path: Path) -> dict[str, Any]:
    """Nothing where there is no file, or one that was cut off."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def machine() -> dict[str, str]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    except OSError:
        said = ""
    names = [line.split(",")[0].strip() for line in said.splitlines()]
    found = {"python": platform.python_version()}
    if names:
        found |= {"gpu": names[0], "gpus": str(len(names)), "nvidia_driver": said.splitlines()[0].split(",")[1].strip()}
    return found


def over_pairs(values: Sequence[float]) -> dict[str, float]:
    return {**spread(values), "pairs": len(values)}


def last_error(log: str) -> str:
    lines = [line for line in log.splitlines() if "Error" in line or "kvx:" in line]
    return lines[-1][-500:] if lines else ""
