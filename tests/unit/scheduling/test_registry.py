"""Schedulers by name, and what the configuration says about names that make no sense."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from kvrelay import scheduler_names as scheduler_names_module
from kvrelay.config.loader import ConfigError, load_config
from kvrelay.config.worker import WorkerConfig
from kvrelay.kv.pool import BlockPool
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.scheduler_names import BUILT_IN_SCHEDULERS, ENTRY_POINT_GROUP, UnknownScheduler, scheduler_names
from kvrelay.scheduling import policies as registry
from kvrelay.scheduling.policies import SarathiPolicy
from kvrelay.scheduling.scheduler import Scheduler, make_scheduler
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings
from kvrelay.worker.startup import scheduler_settings

OWN = EntryPoint("own", f"{__name__}:OwnPolicy", ENTRY_POINT_GROUP)


class OwnPolicy(SarathiPolicy):
    """As another package would offer it."""


def make(name: str) -> Scheduler:
    pool, limits = BlockPool(8, 16), SchedulerLimits(8, 4, 64, frozenset())
    return make_scheduler(name, limits, pool, PrefixCache(pool), SchedulerSettings())


def offer(monkeypatch: pytest.MonkeyPatch, *offers: EntryPoint) -> None:
    def entry_points(group: str, name: str | None = None) -> list[EntryPoint]:
        assert group == "kvrelay.schedulers"
        return [entry_point for entry_point in offers if name in (None, entry_point.name)]

    monkeypatch.setattr(registry, "entry_points", entry_points)
    monkeypatch.setattr(scheduler_names_module, "entry_points", entry_points)
    monkeypatch.setattr(EntryPoint, "load", lambda self: OwnPolicy)


def config(*flags: str) -> WorkerConfig:
    return load_config(WorkerConfig, ["--model", "m", *flags], environ={}, role="decode")


def test_every_built_in_name_makes_its_scheduler() -> None:
    names = {name: type(make(name).policy).__name__ for name in registry.BUILT_IN}
    assert names == {
        "sarathi": "SarathiPolicy",
        "vllm": "VllmPolicy",
        "simple_chunking": "SimpleChunkingPolicy",
        "orca": "OrcaPolicy",
        "faster_transformer": "FasterTransformerPolicy",
    }
    assert tuple(registry.BUILT_IN) == BUILT_IN_SCHEDULERS


def test_an_entry_point_offers_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, OWN)
    assert scheduler_names()[-1] == "own"
    assert isinstance(make("own").policy, OwnPolicy)
    assert make("own").policy is not make("own").policy, "a policy may have state"
    assert config("--scheduler", "own").scheduler == "own"


def test_a_built_in_name_cannot_be_taken_over_and_an_own_one_not_be_offered_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offer(monkeypatch, EntryPoint("sarathi", "x:y", ENTRY_POINT_GROUP), OWN, OWN)
    assert type(make("sarathi").policy) is SarathiPolicy
    with pytest.raises(UnknownScheduler, match="offered more than once"):
        make("own")


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(UnknownScheduler, match="must be one of sarathi, vllm, simple_chunking, orca"):
        make("fifo")


def test_the_configuration_reaches_the_policy() -> None:
    flags = (
        "--queue-order",
        "lpm",
        "--chunking",
        "dynamic",
        "--new-token-ratio",
        "0.4",
    )
    expected = SchedulerSettings("lpm", chunking="dynamic", new_token_ratio=0.4, jump_forward=True)
    assert scheduler_settings(config(*flags)) == expected
    assert scheduler_settings(config()) == SchedulerSettings(jump_forward=True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--scheduler", "fifo"), r"--scheduler = 'fifo': must be one of sarathi, .*faster_transformer"),
        (("--queue-order", "lifo"), r"--queue-order = 'lifo': must be one of fcfs, lpm, dfs_weight, priority, sjf"),
        (("--chunking", "odd"), r"--chunking = 'odd': must be one of fixed, dynamic"),
        (("--new-token-ratio", "1.5"), r"--new-token-ratio = '1.5': must be a number, 0 to 1"),
        (("--scheduler", "orca", "--chunking", "dynamic"), "chunking = dynamic needs a scheduler that cuts prompts"),
    ],
)
def test_values_that_make_no_sense_are_refused_at_the_door(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(*flags)
