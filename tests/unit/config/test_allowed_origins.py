"""Origins of web pages that may use the API: each is one that a browser could send."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvrelay.cli.launch_plan import to_argv
from kvrelay.config import ConfigError, RouterConfig, load_config

pytestmark = pytest.mark.unit


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
