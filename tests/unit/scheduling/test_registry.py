"""Schedulers by name, and what the configuration says about names that make no sense."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest

from kvrelay.config.loader import ConfigError, load_config
from kvrelay.config.worker import WorkerConfig
from kvrelay.kv.pool import BlockPool
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.scheduling.policies import scheduler_registry as registry
from kvrelay.scheduling.policies.sarathi import SarathiScheduler
from kvrelay.scheduling.policies.scheduler_registry import UnknownScheduler, make_scheduler, scheduler_names
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings

pytestmark = pytest.mark.unit
OWN = EntryPoint("own", f"{__name__}:OwnScheduler.build", registry.ENTRY_POINT_GROUP)


class OwnScheduler(SarathiScheduler):
    """As another package would offer it."""


def make(name: str) -> object:
    pool = BlockPool(8, 16)
    return make_scheduler(name, SchedulerLimits(8, 4, 64, frozenset()), pool, PrefixCache(pool), SchedulerSettings())


def offer(monkeypatch: pytest.MonkeyPatch, *offers: EntryPoint) -> None:
    def entry_points(group: str, name: str | None = None) -> list[EntryPoint]:
        assert group == "kvrelay.schedulers"
        return [entry_point for entry_point in offers if name in (None, entry_point.name)]

    monkeypatch.setattr(registry, "entry_points", entry_points)
    monkeypatch.setattr(EntryPoint, "load", lambda self: OwnScheduler.build)


def config(*flags: str) -> WorkerConfig:
    return load_config(WorkerConfig, ["--model", "m", *flags], environ={}, role="decode")


def test_every_built_in_name_makes_its_scheduler() -> None:
    names = {name: type(make(name)).__name__ for name in registry.BUILT_IN}
    assert names == {
        "sarathi": "SarathiScheduler",
        "vllm": "VllmScheduler",
        "simple_chunking": "SimpleChunkingScheduler",
        "orca": "OrcaScheduler",
        "faster_transformer": "FasterTransformerScheduler",
    }


def test_an_entry_point_offers_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, OWN)
    assert scheduler_names()[-1] == "own"
    assert isinstance(make("own"), OwnScheduler)
    assert config("--scheduler", "own").scheduler == "own"


def test_a_built_in_name_cannot_be_taken_over_and_an_own_one_not_be_offered_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offer(monkeypatch, EntryPoint("sarathi", "x:y", registry.ENTRY_POINT_GROUP), OWN, OWN)
    assert type(make("sarathi")) is SarathiScheduler
    with pytest.raises(UnknownScheduler, match="offered more than once"):
        make("own")


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(UnknownScheduler, match="must be one of sarathi, vllm, simple_chunking, orca"):
        make("fifo")


def test_the_configuration_reaches_the_policy() -> None:
    flags = (
        "--queue-order",
        "lpm",
        "--queue-starvation-bound",
        "9",
        "--chunking",
        "dynamic",
        "--new-token-ratio",
        "0.4",
    )
    settings = config(*flags, "--retraction", "least_progress").scheduler_settings
    assert settings == SchedulerSettings("lpm", 9, "dynamic", "least_progress", 0.4)
    assert config().scheduler_settings == SchedulerSettings()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--scheduler", "fifo"), r"--scheduler = 'fifo': must be one of sarathi, .*faster_transformer"),
        (("--queue-order", "lifo"), r"--queue-order = 'lifo': .*\(allowed: fcfs, lpm, dfs_weight, priority, sjf"),
        (("--chunking", "odd"), r"--chunking = 'odd': .*\(allowed: fixed, dynamic\)"),
        (("--retraction", "all"), r"--retraction = 'all': .*\(allowed: latest, least_progress\)"),
        (("--queue-starvation-bound", "0"), r"--queue-starvation-bound = '0': .*\(allowed: 1 to"),
        (("--new-token-ratio", "1.5"), r"--new-token-ratio = '1.5': .*\(allowed: 0 to 1\)"),
        (("--scheduler", "orca", "--chunking", "dynamic"), "chunking = dynamic needs a scheduler that cuts prompts"),
    ],
)
def test_values_that_make_no_sense_are_refused_at_the_door(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(*flags)


@pytest.mark.parametrize(
    "values",
    [
        {"queue_order": "lifo"},
        {"chunking": "odd"},
        {"retraction": "all"},
        {"queue_starvation_bound": 0},
        {"new_token_ratio": -0.1},
    ],
)
def test_settings_refuse_them_too(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        SchedulerSettings(**values)
