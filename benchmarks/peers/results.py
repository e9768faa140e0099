"""Results of a run as JSON lines, written as they are measured, from which the page can be made again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT_VERSION = 1


class BadResults(Exception):
    """The file is no result of this benchmark. The message names the line."""


@dataclass(frozen=True, slots=True)
class Started:
    """A server that became ready. `commands`: its processes, with placeholders for paths and ports."""

    server: str
    round: int
    seconds: float
    about: str
    commands: list[str]
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class Measurement:
    """One load on one server in one round. `values`: figures by key, in seconds or per second, without those that could
    not be measured. `load_average`: of the machine before the load."""

    server: str
    round: int
    load: str
    values: dict[str, float]
    num_requests: int
    num_failed: int
    load_average: float
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Failure:
    """A server that was not measured in a round, or not with one load."""

    server: str
    round: int
    error: str
    load: str = ""


Result = Started | Measurement | Failure
_KINDS: dict[str, type[Result]] = {"started": Started, "measurement": Measurement, "failure": Failure}


@dataclass(slots=True)
class Run:
    """Settings and results of a run. `about`: case, model, load, machine, command and order."""

    about: dict[str, Any]
    results: list[Result] = field(default_factory=list)

    @property
    def measurements(self) -> list[Measurement]:
        return [each for each in self.results if isinstance(each, Measurement)]

    @property
    def failures(self) -> list[Failure]:
        return [each for each in self.results if isinstance(each, Failure)]

    @property
    def servers(self) -> list[str]:
        """All servers in the order given."""
        return [str(name) for name in self.about["servers"]]

    @property
    def loads(self) -> list[str]:
        """Loads in the order of measurement."""
        return list(dict.fromkeys(each.load for each in self.measurements))

    def started(self, server: str) -> Started | None:
        """The server's first start."""
        found = (each for each in self.results if isinstance(each, Started) and each.server == server)
        return next(found, None)

    def values(self, server: str, load: str, key: str) -> dict[int, float]:
        """A figure by round."""
        chosen = (each for each in self.measurements if (each.server, each.load) == (server, load))
        return {each.round: each.values[key] for each in chosen if key in each.values}


class ResultFile:
    """Appends each result to a file at once, so that a broken-off run keeps what it has."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        path.write_text(_line({"kind": "run", "version": FORMAT_VERSION, "about": dict(about)}), encoding="utf-8")

    def add(self, result: Result) -> None:
        kind = next(name for name, cls in _KINDS.items() if isinstance(result, cls))
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_line({"kind": kind, **asdict(result)}))


def read_run(path: Path) -> Run:
    """Reads a file of ResultFile. Raises BadResults, OSError."""
    run: Run | None = None
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            content = json.loads(text)
            kind = content.pop("kind")
            if kind == "run":
                if content["version"] != FORMAT_VERSION:
                    raise BadResults(f"{path}: version {content['version']}, not {FORMAT_VERSION}")
                run = Run(content["about"])
            elif run is not None:
                run.results.append(_KINDS[kind](**content))
        except (json.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
            raise BadResults(f"{path}, line {number}: {error!r}") from error
    if run is None:
        raise BadResults(f"{path}: no line of kind run")
    return run


def _line(content: Mapping[str, Any]) -> str:
    return json.dumps(content, allow_nan=False) + "\n"
