"""The plug-in's hooks and the record of vLLM's signatures. Needs no engine."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from kvx.errors import EngineError
from kvx.vllm import compat, hooks, seam

PLUGIN = Path(compat.__file__).parent


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "kvx_hook_target"
    (tmp_path / f"{name}.py").write_text(
        "def add(a, b):\n    return a + b\n\nclass Box:\n    def value(self, extra):\n        return 1 + extra\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


def test_a_hook_waits_for_the_import_and_then_stands_in_place(package: str) -> None:
    hooks.wrap(package, "add", lambda original, a, b: original(a, b) * 10)
    hooks.wrap(package, "Box.value", lambda original, box, extra: original(box, extra) + 100)
    assert package not in sys.modules
    module = __import__(package)
    assert module.add(1, 2) == 30
    assert module.Box().value(1) == 102
    assert hooks.is_wrapped(package, "Box.value")


def test_a_hook_on_an_imported_module_is_applied_at_once_and_only_once(package: str) -> None:
    module = __import__(package)

    def wrapper(original: object, a: int, b: int) -> int:
        return original(a, b) + 1  # type: ignore[operator, no-any-return]

    hooks.wrap(package, "add", wrapper)
    hooks.wrap(package, "add", wrapper)
    assert module.add(1, 2) == 4


def test_a_name_that_vllm_does_not_have_breaks_nothing(package: str) -> None:
    module = __import__(package)
    hooks.wrap(package, "Missing.value", lambda original: original())
    hooks.wrap(package, "missing", lambda original: original())
    assert module.add(1, 2) == 3


def test_both_known_releases_are_recorded_and_every_touched_function_exists_in_both() -> None:
    recorded = compat.recorded_signatures()
    assert set(recorded) == {known.release for known in compat.KNOWN}
    for release, signatures in recorded.items():
        assert set(signatures) == set(compat.TOUCHED), release
        assert None not in signatures.values(), release


def test_every_hook_is_on_a_recorded_function() -> None:
    touched = set(compat.TOUCHED)
    assert {f"{target.module}:{target.name}" for target in seam.TARGETS} <= touched


def test_every_method_of_vllms_interface_that_the_bridge_overrides_is_recorded() -> None:
    """From the source, so that it holds where vLLM is not installed."""
    bridge = next(node for node in tree_of("bridge.py").body if getattr(node, "name", "") == "KvxConnector")
    overridden = {node.name for node in bridge.body if isinstance(node, ast.FunctionDef)} - {"scheduler", "worker"}
    recorded = {target.rpartition(".")[2] for target in compat.TOUCHED if "kv_connector.v1.base" in target}
    assert overridden <= recorded


def test_every_function_of_vllm_that_the_plugin_imports_is_recorded() -> None:
    recorded = {target.rpartition(":")[2].rpartition(".")[2] for target in compat.TOUCHED}
    imported = {
        alias.name
        for path in PLUGIN.glob("*.py")
        for node in ast.walk(tree_of(path.name))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm.")
        for alias in node.names
    }
    functions = {name for name in imported if name.islower() and "_" in name}
    assert functions
    assert functions <= recorded


def tree_of(name: str) -> ast.Module:
    return ast.parse((PLUGIN / name).read_text())


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0", "dev"])
def test_an_unknown_vllm_is_refused_by_one_sentence_that_names_the_known_ones(version: str) -> None:
    with pytest.raises(EngineError, match=r"it knows 0\.32, 0\.33") as caught:
        compat.check_version(version)
    assert version in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_function_with_another_signature_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = "vllm.v1.worker.utils:allocate_kv_cache"
    monkeypatch.setattr(compat, "TOUCHED", (changed,))
    monkeypatch.setattr(compat, "recorded_signatures", lambda: {"0.32": {changed: "a, b="}})
    monkeypatch.setattr(compat, "live_signature", lambda target: "a")
    with pytest.raises(EngineError, match="allocate_kv_cache"):
        compat.check_seam("0.32.0", "cpu")


def test_the_installed_vllm_has_the_recorded_signatures() -> None:
    spec = pytest.importorskip("importlib.util").find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vllm is not installed")
    root = Path(spec.origin).parent.parent
    for release, signatures in compat.record([root]).items():
        assert signatures == compat.recorded_signatures()[release]
