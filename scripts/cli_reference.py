"""Write docs/cli.md, the reference of all commands, from the commands themselves."""

from __future__ import annotations

import html
import sys
from pathlib import Path

from typer.testing import CliRunner

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"


def reference() -> str:
    """The page. The width of a terminal does not matter to it."""
    from typer.cli import app

    made = CliRunner().invoke(app, ["kvx.cli.app", "utils", "docs", "--name", "kvx", "--title", "Command line"])
    if made.exit_code:
        sys.exit(f"typer could not describe the commands: {made.output}")
    return html.unescape(made.output).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
