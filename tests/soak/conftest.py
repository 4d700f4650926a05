from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

for folder in ("transfer", "faults"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))

from engine_process import running_fork_server


@pytest.fixture(scope="session")
def fork_server() -> Iterator[None]:
    with running_fork_server():
        yield
