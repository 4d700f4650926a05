"""Wrap a function of a module that may not have been imported yet.

vLLM loads its plug-ins early, in every process, in the middle of its own imports. Importing vLLM modules from there
would import most of vLLM in processes that never need it, and in an order that vLLM does not expect. So a hook waits:
it is applied when its module is imported, or at once when that has happened already.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Wrapper = Callable[..., Any]
"""Called as `wrapper(original, *args, **kwargs)` in the place of the original."""

_waiting: dict[str, list[Callable[[ModuleType], None]]] = {}


def when_imported(module_name: str, apply: Callable[[ModuleType], None]) -> None:
    """Call `apply(module)` once `module_name` has been executed; at once when it already has been."""
    module = sys.modules.get(module_name)
    if module is not None and not _is_executing(module):
        apply(module)
        return
    _waiting.setdefault(module_name, []).append(apply)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def wrap(module_name: str, qualified_name: str, wrapper: Wrapper) -> None:
    """Put `wrapper` around `module_name.qualified_name` (`"function"` or `"Class.method"`), as soon as it exists.

    A name that the module does not have is left alone here: `compat.check_seam` names it when kvx is asked for, so that
    a plug-in that nobody asked for never breaks a start.
    """

    def apply(module: ModuleType) -> None:
        owner, name = _resolve(module, qualified_name)
        original = None if owner is None else getattr(owner, name, None)
        if owner is None or original is None or getattr(original, "__kvx_wrapper__", None) is wrapper:
            return

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        wrapped.__kvx_wrapper__ = wrapper  # type: ignore[attr-defined]
        setattr(owner, name, wrapped)

    when_imported(module_name, apply)


def is_wrapped(module_name: str, qualified_name: str) -> bool:
    """Whether a hook of kvx stands around that name in this process."""
    module = sys.modules.get(module_name)
    owner, name = (None, "") if module is None else _resolve(module, qualified_name)
    return owner is not None and hasattr(getattr(owner, name, None), "__kvx_wrapper__")


def _resolve(module: ModuleType, qualified_name: str) -> tuple[Any, str]:
    owner: Any = module
    *parents, name = qualified_name.split(".")
    for parent in parents:
        owner = getattr(owner, parent, None)
    return owner, name


def _is_executing(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: lets the other finders find a module, and runs its hooks after it has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _waiting:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    _run_hooks_after(spec.loader, fullname)
                return spec
        return None


def _run_hooks_after(loader: Any, fullname: str) -> None:
    """The loader belongs to this one spec, so its `exec_module` can be replaced without touching other modules."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        for apply in _waiting.pop(fullname, []):
            apply(module)

    loader.exec_module = exec_module
