"""Rules of the sources: no pickles, monotonic clocks, a layer for every part, and the order of a run's files."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.each_test_once import TESTS, places

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


# -- durations and deadlines are measured with monotonic clocks. every use of the wall clock is name -----------------


WALL_CLOCK = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"}
ALLOWED = {
    "services/router/kvrelay_router/asgi/operations.py": "when `/fleet` was asked, for charts",
    "services/router/kvrelay_router/dispatch/placement.py": "when a decision was made, for people",
    "services/router/kvrelay_router/dispatch/records.py": "when a request came, for people",
    "services/router/kvrelay_router/openai/api_service.py": "`created` of answers",
    "services/router/kvrelay_router/responses/responses_format.py": "`created_at` of responses",
    "shared/kvrelay/text/chat_template.py": "the date that templates ask for",
    "shared/kvrelay/backends/cpu_build.py": "the age of files that killed compilations left",
    "shared/kvrelay/messaging/messenger.py": "names of incarnations; a start with an earlier clock is accepted, too",
    "shared/kvrelay/telemetry/event_log.py": "times of lines",
    "shared/kvrelay/telemetry/handoffs.py": "times of stages, to compare processes",
    "shared/kvrelay/telemetry/step_observer.py": "times of lines",
    "shared/kvrelay/telemetry/otlp.py": "times of samples, as OTLP wants them",
    "shared/kvrelay/telemetry/tracer.py": "times of spans and stages, to compare processes",
}


def wall_clock_uses(source: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            found.add(f"{owner}.{node.attr}")
        elif isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
            found |= {f"{node.module}.{each.name}" for each in node.names}
    return found & WALL_CLOCK


def test_the_wall_clock_is_read_only_for_times_that_are_shown_or_compared_between_machines() -> None:
    folders = (ROOT / "services", ROOT / "shared" / "kvrelay")
    files = {path for folder in folders for path in folder.rglob("*.py")}
    users = {str(path.relative_to(ROOT)) for path in files if wall_clock_uses(path.read_text(encoding="utf-8"))}
    assert users == set(ALLOWED)


def test_uses_are_found_however_they_are_spelled() -> None:
    assert wall_clock_uses("import time\nclock = time.time")
    assert wall_clock_uses("from time import time_ns")
    assert wall_clock_uses("import datetime\ndatetime.datetime.now()")
    assert not wall_clock_uses("import time\ntime.monotonic()")


# -- the layers that the linter of imports checks have a place for every part of the product -------------------------


ON_TOP = {"kvrelay.__init__", "kvrelay.__main__"}


def test_every_part_is_in_a_layer() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(each["layers"] for each in settings["contracts"] if each["type"] == "layers")
    named = {part for layer in layers for part in re.split(r" [|:] ", layer)}
    shared = (ROOT / "shared" / "kvrelay").iterdir()
    parts = {f"kvrelay.{each.stem}" for each in shared if each.suffix == ".py" or (each / "__init__.py").exists()}
    assert named == parts - ON_TOP | {*settings["root_packages"]} - {"kvrelay"}


# -- the order in which a run in several processes begins the files of tests -----------------------------------------


FOLDERS = ("component/a", "e2e", "e2e/demo_stack", "unit/b")
FILES = [TESTS / folder / f"test_{number}.py" for folder in FOLDERS for number in range(20)]


def test_folders_run_side_by_side_and_only_short_files_at_the_end() -> None:
    found = places(FILES)
    assert list(found) == FILES
    ordered = sorted(FILES, key=found.__getitem__)
    assert all(file.parent.name == "demo_stack" for file in ordered[:20])
    assert {file.relative_to(TESTS).parts[0] for file in ordered[20:30]} == {"component", "e2e", "unit"}
    assert all(file.parent.name == "b" for file in ordered[-2:])
    for folder in FOLDERS:
        of_folder = [file for file in ordered if file.parent == TESTS / folder]
        assert of_folder == [file for file in FILES if file.parent == TESTS / folder], "as they were collected"
