"""The `kvx` command: errors become one sentence and a non-zero exit, never a traceback."""

from __future__ import annotations

import sys
from importlib import import_module

_HINT = "the kvx command needs its extra: pip install 'kvx[cli]'"


def main() -> None:
    """Run the command line, or say what to install when its own libraries are missing."""
    try:
        app = import_module("kvx.cli.app")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("typer", "rich", "psutil", "httpx", "packaging"):
            raise
        sys.exit(f"kvx: no module {error.name}; {_HINT}")
    app.run()


if __name__ == "__main__":
    main()
