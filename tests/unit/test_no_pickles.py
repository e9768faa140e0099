"""Nothing that we read can run code: no pickles in any disguise, in anything that is shipped."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHIPPED = [ROOT / "shared", ROOT / "services", ROOT / "examples", ROOT / "models" / "build", ROOT / "deploy"]
MODULES = frozenset({"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "copyreg"})
PICKLING_MODULES = frozenset({"multiprocessing", "concurrent.futures.process"})
"""Whose queues, pipes, pools and managers pickle what goes through them."""
METHODS = frozenset({"send_pyobj", "recv_pyobj", "send_serialized_pyobj", "read_pickle", "to_pickle"})
NAMES = frozenset({"ProcessPoolExecutor", "Unpickler"})
LOADERS = {("torch", "load"): ("weights_only", True), ("np", "load"): ("allow_pickle", False)}
LOADERS[("numpy", "load")] = LOADERS[("np", "load")]
YAML_LOADERS = frozenset({"load", "load_all", "full_load", "unsafe_load"})


def findings(tree: ast.AST) -> Iterator[str]:
    """What could read or write a pickle."""
    for node in ast.walk(tree):
        where = f"line {getattr(node, 'lineno', 0)}"
        match node:
            case ast.Import(names):
                for name in names:
                    yield from _module(name.name, where)
            case ast.ImportFrom(module=str(module), names=names):
                yield from _module(module, where)
                yield from (f"{where}: {name.name}" for name in names if name.name in NAMES)
            case ast.Attribute(attr=name) if name in METHODS | NAMES:
                yield f"{where}: {name}"
            case ast.Call(func=ast.Attribute(value=ast.Name(module), attr=name), keywords=keywords):
                if module == "yaml" and name in YAML_LOADERS:
                    yield f"{where}: yaml.{name}"
                if (module, name) in LOADERS:
                    keyword, wanted = LOADERS[module, name]
                    given = {each.arg: getattr(each.value, "value", None) for each in keywords}
                    if given.get(keyword) is not wanted:
                        yield f"{where}: {module}.{name} without {keyword}={wanted}"


def _module(name: str, where: str) -> Iterator[str]:
    if name.split(".")[0] in MODULES or any(name == each or name.startswith(f"{each}.") for each in PICKLING_MODULES):
        yield f"{where}: {name}"


def test_no_source_reads_or_writes_pickles() -> None:
    sources = [path for directory in SHIPPED for path in directory.rglob("*.py")]
    assert len(sources) > 150
    found = [f"{path.relative_to(ROOT)}, {what}" for path in sources for what in findings(ast.parse(path.read_text()))]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import multiprocessing.connection",
        "from multiprocessing import Queue",
        "from concurrent.futures import ProcessPoolExecutor",
        "import concurrent.futures as f\nf.ProcessPoolExecutor()",
        "socket.send_pyobj(1)",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "np.load(f)",
        "yaml.load(f)",
    ],
)
def test_the_test_would_find(source: str) -> None:
    assert list(findings(ast.parse(source)))


@pytest.mark.parametrize(
    "source", ["torch.load(f, weights_only=True)", "np.load(f, allow_pickle=False)", "json.load(f)"]
)
def test_the_test_lets_pass(source: str) -> None:
    assert not list(findings(ast.parse(source)))
