"""The router's configuration: further models, origins of web pages, a list of workers, and limits of single keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from pydantic import ValidationError

from kvrelay.cli.launch_plan import to_argv
from kvrelay.config import ConfigError, RouterConfig, WorkerConfig, load_config
from kvrelay.config.loader import resolve
from kvrelay.config.router import static_worker_address
from kvrelay.config.up_config import UpConfig
from kvrelay.fleet.key_limits import SharedLimits
from kvrelay_router.access.key_ring import AcceptedKeys
from kvrelay_router.server import _limits
from tests.fakes.command import command

TWO = """
[[fleet]]
model = "org/second"
served_model_name = "second, 2nd"
tool_parser = "hermes"

[[fleet]]
model = "org/third"
served_model_name = "third"
"""


def config(tmp_path: Path, text: str, **fields: object) -> RouterConfig:
    path = tmp_path / "fleets.toml"
    path.write_text(text)
    return RouterConfig(**{"model": "org/first", "fleets_file": path, **fields})


def test_without_a_file_there_is_one_fleet() -> None:
    alone = RouterConfig(model="org/first")
    assert alone.fleets() == (alone,)


def test_a_fleet_has_its_own_fields_and_the_routers_others(tmp_path: Path) -> None:
    router = config(tmp_path, TWO, tool_parser="mistral", message_port=7000, router_id="r", max_peers=90)
    fleets = router.fleets()
    assert [each.model for each in fleets] == ["org/first", "org/second", "org/third"]
    assert [each.model_names for each in fleets] == [("org/first",), ("second", "2nd"), ("third",)]
    assert [each.tool_parser for each in fleets] == ["mistral", "hermes", "auto"]
    assert [each.message_port for each in fleets] == [7000, 7001, 7002]
    assert {each.max_peers for each in fleets} == {30}
    assert {each.router_id for each in fleets} == {"r"}
    assert {each.message_port for each in config(tmp_path, TWO).fleets()} == {0}
    with pytest.raises(ValidationError, match="one for each fleet"):
        config(tmp_path, TWO, message_port=65534)


def test_routers_of_the_same_models_count_the_limits_of_keys_together(tmp_path: Path) -> None:
    entry = '[[fleet]]\nmodel = "org/{0}"\nserved_model_name = "org/{0}"\n'
    configs = []
    for first, *others in (["a", "b", "c"], ["c", "b", "a"], ["a"], ["b"]):
        path = tmp_path / f"{first}{len(others)}.toml"
        path.write_text("".join(entry.format(each) for each in others))
        configs.append(RouterConfig(model=f"org/{first}", fleets_file=path if others else None))
    keys = [tuple(limits._keys("key")) for each in configs if isinstance(limits := _limits(each), SharedLimits)]
    assert keys[0] == keys[1] and len(set(keys)) == 3
    assert "{org/a}" in keys[2][0], "a router of one model keeps its name"


FLEET = '[[fleet]]\nmodel = "org/m"\nserved_model_name = '


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "must hold 1 to 63"),
        ("fleet = 3\n", "and nothing else"),
        ('x = 1\n[[fleet]]\nmodel = "org/m"\nserved_model_name = "m"\n', "nothing else"),
        ("[[fleet]\n", "not valid TOML"),
        ('[[fleet]]\nmodel = "org/m"\n', "number 1: served_model_name is needed"),
        ('[[fleet]]\nmodel = ""\nserved_model_name = "n"\n', "number 1: model: must be text that is not empty"),
        (f'{FLEET}"m"\nmodle = "m"\n', "modle is not a known field; did you mean model"),
        (f'{FLEET}"m, "\n', "1 to 200 characters"),
        (f'{FLEET}"org/first"\n', "'org/first' is the name of org/first and of org/m"),
        (f'{FLEET}"m"\n{FLEET}"n, m"\n', "'m' is the name of org/m and of org/m"),
        ('[[fleet]]\nmodel = "./no such model"\nserved_model_name = "m"\n', "there is no directory"),
    ],
)
def test_a_bad_file_is_refused_with_its_fault(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ValidationError) as caught:
        config(tmp_path, text)
    assert named in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="cannot read"):
        RouterConfig(model="org/first", fleets_file=tmp_path / "none.toml")


# -- origins of web pages that may use the api -----------------------------------------------------------------------


def router(argv: Sequence[str]) -> RouterConfig:
    return load_config(RouterConfig, argv, environ={"KVRELAY_MODEL": "org/model"})


@pytest.mark.parametrize(
    "origin", ["*", "https://chat.example", "http://localhost:3000", "http://[::1]:3000", "chrome-extension://abcdef"]
)
def test_origins(origin: str) -> None:
    argv = [f"--allowed-origin={origin}", "--allowed-origin=http://other.example", f"--allowed-origin={origin}"]
    assert router(argv).allowed_origins == (origin, "http://other.example")
    passed_on = to_argv({"allowed_origins": (origin, "http://other.example")}, RouterConfig)
    assert router(passed_on).allowed_origins == (origin, "http://other.example")


@pytest.mark.parametrize("origin", ["chat.example", "https://", "https://chat.example/", "https://*.example/x", "null"])
def test_what_is_no_origin(origin: str) -> None:
    with pytest.raises(ConfigError, match="is not an origin"):
        router([f"--allowed-origin={origin}"])


# -- a list of workers in the router's configuration, and processes that have no redis ----------------------------


drain = command("drain")

MODEL = {"KVRELAY_MODEL": "org/model"}
ONE, OTHER = "http://10.0.0.2:8081", "http://[::1]:8081"
NO_REDIS = "--redis=none"


def router_of(argv: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> RouterConfig:
    return load_config(RouterConfig, argv, environ={**MODEL, **(environ or {})})


def worker(argv: Sequence[str]) -> WorkerConfig:
    return load_config(WorkerConfig, argv, environ=MODEL, role="decode")


def test_the_list_comes_from_flags_the_environment_or_the_file(tmp_path: Path) -> None:
    assert router_of().static_workers == ()
    both = (ONE, OTHER)
    assert router_of([f"--static-worker={ONE}", f"--static-worker={OTHER}"]).static_workers == both
    assert router_of([f"--static-workers={ONE}, {OTHER}"]).static_workers == both
    assert router_of(environ={"KVRELAY_STATIC_WORKERS": f"{ONE},{OTHER}"}).static_workers == both
    path = tmp_path / "k.toml"
    path.write_text(f'[router]\nstatic_workers = ["{ONE}", "{OTHER}"]\n')
    assert router_of(["--config", str(path)]).static_workers == both
    assert router_of(["--config", str(path), f"--static-worker={ONE}"]).static_workers == (ONE,)


def test_an_address_is_a_host_and_a_port() -> None:
    assert static_worker_address(ONE) == ("10.0.0.2", 8081)
    assert static_worker_address(f"{OTHER}/") == ("::1", 8081)


@pytest.mark.parametrize(
    "url",
    [
        "10.0.0.2:8081",
        "https://10.0.0.2:8081",
        "tcp://10.0.0.2:8081",
        "http://10.0.0.2",
        "http://:8081",
        "http://10.0.0.2:0",
        "http://10.0.0.2:99999",
        "http://10.0.0.2:8081/worker",
        "http://10.0.0.2:8081?x=1",
        "http://me@10.0.0.2:8081",
        "http://[::1:8081",
    ],
)
def test_a_bad_address_names_the_flag(url: str) -> None:
    with pytest.raises(ConfigError) as raised:
        router_of([f"--static-worker={ONE}", f"--static-worker={url}"])
    assert str(raised.value).startswith("--static-workers = ")
    assert url in str(raised.value)


def test_a_router_without_redis_needs_the_list() -> None:
    assert not router_of([NO_REDIS, f"--static-worker={ONE}"]).uses_redis
    assert router_of([f"--static-worker={ONE}"]).uses_redis
    with pytest.raises(ConfigError, match="redis_url = none needs static_workers"):
        router_of([NO_REDIS])


def test_a_worker_without_redis_needs_its_page() -> None:
    config = worker([NO_REDIS, "--http-port=8081"])
    assert not config.uses_redis
    assert not config.publishes_prefixes
    assert worker(["--http-port=8081"]).publishes_prefixes
    with pytest.raises(ConfigError, match="redis_url = none needs http_port"):
        worker([NO_REDIS])


def test_commands_that_need_redis_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="KVRELAY_REDIS_URL = 'none': kvrelay up needs Redis"):
        resolve(UpConfig, {}, {"KVRELAY_REDIS_URL": "none"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVRELAY_STATIC_WORKERS", ONE)
        assert drain(["w0", "--redis", "none", "--model", "org/model"]) == 2
    assert "redis_url is none" in capsys.readouterr().err


# -- limits of single keys from a file -------------------------------------------------------------------------------


def test_a_keys_own_entry_wins_and_the_rest_is_as_for_all(tmp_path: Path) -> None:
    path = tmp_path / "limits.toml"
    path.write_text('[[key]]\nkey = "sk-a"\nconcurrency = 8\n\n[[key]]\nkey = "sk-b"\nleast_priority = -5\n')
    config = RouterConfig(
        api_keys=("sk-a", "sk-b", "sk-c"),
        key_requests_per_minute=60,
        key_concurrency=2,
        key_least_priority=0,
        key_limits_file=path,
    )
    accepted = AcceptedKeys.of(config)
    a, b = accepted.own["sk-a"], accepted.own["sk-b"]
    assert (a.limits.concurrency, a.limits.requests_per_minute, a.least_priority) == (8, 60, 0)
    assert (b.limits.concurrency, b.least_priority) == (2, -5)
    assert accepted.rules.limits.concurrency == 2


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (
            '[[key]]\nkey = "sk-secret"\nconcurrency = 0\n',
            "number 1: concurrency: must be a whole number, 1 to",
        ),
        ('[[key]]\nkey = "sk-secret"\nburts = 1\n', "number 1: burts is not a known field; did you mean burst?"),
        ('[[key]]\nkey = "sk-secret"\ntenant = "a b"\n', "number 1: tenant: must be 1 to 64 of the characters"),
        ("[[key]]\nburst = 1\n", "number 1: key is needed"),
        ('concurrency = "sk-secret"\n', "[[key]] tables"),
        ("[[key]\n", "not valid TOML"),
        ('[[key]]\nkey = "sk-secret"\nrequests_per_minute = 1e-300\n', "must be a number, 0.001 to"),
        ('[[key]]\nkey = "sk-secret"\n', "number 1 has a key that is neither in api_keys"),
        ('[[key]]\nkey = "sk-known"\n' * 2, "number 2 has the key of an earlier one"),
    ],
)
def test_a_bad_file_is_refused_by_field_and_shows_no_key(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "limits.toml"
    path.write_text(text)
    with pytest.raises(ValidationError) as caught:
        RouterConfig(api_keys=("sk-known",), key_limits_file=path)
    assert named in str(caught.value) and "sk-secret" not in str(caught.value)
