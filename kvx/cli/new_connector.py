"""`kvx new-connector NAME`: a distribution of its own, which installs and passes the conformance kit as it is."""

from __future__ import annotations

import keyword
import re
import shutil
from importlib import resources
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from kvx.errors import ConnectorError
from kvx.registry import AUTO, known_connectors
from kvx.vmm import Transaction

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_FILES = {
    "pyproject.toml": "pyproject.toml.txt",
    "README.md": "README.md.txt",
    "$module.py": "module.py.txt",
    "tests/test_$name.py": "test.py.txt",
}


def new_connector_command(
    name: Annotated[str, typer.Argument(help="The connector's name: small letters, digits, single underscores.")],
    to: Annotated[Path, typer.Option(help="Folder in which the new one is made.")] = Path(),
) -> None:
    """Write a connector of your own: a distribution that installs and passes the conformance kit as it is.

    Example: kvx new-connector relay
    """
    made = write_connector(name, to)
    typer.echo(f"{made}: fill the hooks of kvx_{name}.py, and keep its tests green")


def write_connector(name: str, to: Path) -> Path:
    """The folder that was made. ConnectorError for a name that cannot be used, or a folder that exists."""
    _require_usable(name)
    words = {
        "name": name,
        "distribution": f"kvx-{name.replace('_', '-')}",
        "module": f"kvx_{name}",
        "class_name": "".join(part.capitalize() for part in name.split("_")) + "Connector",
    }
    folder = to / words["distribution"]
    templates = resources.files("kvx.cli") / "scaffold"
    try:
        to.mkdir(parents=True, exist_ok=True)
        with Transaction() as transaction:
            folder.mkdir()
            transaction.callback(shutil.rmtree, folder, ignore_errors=True)
            for target, template in _FILES.items():
                path = folder / Template(target).substitute(words)
                path.parent.mkdir(exist_ok=True)
                path.write_text(Template((templates / template).read_text("utf-8")).substitute(words), "utf-8")
            transaction.commit()
    except FileExistsError as error:
        raise ConnectorError(f"{error.filename} exists already; choose another name or --to") from error
    except OSError as error:
        raise ConnectorError(f"{folder} cannot be made: {error.strerror}; choose another --to") from error
    return folder


def _require_usable(name: str) -> None:
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ConnectorError(
            f"a connector cannot be called {name!r}: small letters and digits are needed, a letter first, words joined "
            "by single underscores"
        )
    if name in (AUTO, *known_connectors()):
        raise ConnectorError(f"a connector called {name!r} is known already; choose another name")
