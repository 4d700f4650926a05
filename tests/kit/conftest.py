"""The example's module is found where it lies; that it can be installed is a test of its own."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples/file_connector"))
