"""A list of workers in the router's configuration, and processes that have no Redis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from kvrelay.config import ConfigError, RouterConfig, WorkerConfig, load_config
from kvrelay.config.loader import resolve
from kvrelay.config.router import static_worker_address
from kvrelay.config.up_config import UpConfig
from tests.fakes.command import command

drain = command("drain")

MODEL = {"KVRELAY_MODEL": "org/model"}
ONE, OTHER = "http://10.0.0.2:8081", "http://[::1]:8081"
NO_REDIS = "--redis=none"


def router(argv: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> RouterConfig:
    return load_config(RouterConfig, argv, environ={**MODEL, **(environ or {})})


def worker(argv: Sequence[str]) -> WorkerConfig:
    return load_config(WorkerConfig, argv, environ=MODEL, role="decode")


def test_the_list_comes_from_flags_the_environment_or_the_file(tmp_path: Path) -> None:
    assert router().static_workers == ()
    both = (ONE, OTHER)
    assert router([f"--static-worker={ONE}", f"--static-worker={OTHER}"]).static_workers == both
    assert router([f"--static-workers={ONE}, {OTHER}"]).static_workers == both
    assert router(environ={"KVRELAY_STATIC_WORKERS": f"{ONE},{OTHER}"}).static_workers == both
    path = tmp_path / "k.toml"
    path.write_text(f'[router]\nstatic_workers = ["{ONE}", "{OTHER}"]\n')
    assert router(["--config", str(path)]).static_workers == both
    assert router(["--config", str(path), f"--static-worker={ONE}"]).static_workers == (ONE,)


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
        router([f"--static-worker={ONE}", f"--static-worker={url}"])
    assert str(raised.value).startswith("--static-workers = ")
    assert url in str(raised.value)


def test_a_router_without_redis_needs_the_list() -> None:
    assert not router([NO_REDIS, f"--static-worker={ONE}"]).uses_redis
    assert router([f"--static-worker={ONE}"]).uses_redis
    with pytest.raises(ConfigError, match="redis_url = none needs static_workers"):
        router([NO_REDIS])


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
