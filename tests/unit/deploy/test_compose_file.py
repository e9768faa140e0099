"""What deploy/compose.yaml promises, read from the file; tests/faults/test_compose.py runs it where an engine is."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvrelay.config.load import resolve
from kvrelay.config.router import RouterConfig
from kvrelay.config.worker import WorkerConfig

DEPLOY = Path(__file__).parents[3] / "deploy"
WORKERS = ("prefill", "decode", "prefill-gpu", "decode-gpu")
KVRELAY = ("router", *WORKERS)
WITHOUT_A_SHELL = ("collector", "tempo")
"""Images with nothing in them that could ask."""


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    return read


def test_workers_can_be_scaled(services: dict[str, Any]) -> None:
    for name in WORKERS:
        service = services[name]
        assert not {"container_name", "ports", "hostname"} & set(service), name
        assert not {"KVRELAY_WORKER_ID", "KVRELAY_ADVERTISE_HOST"} & set(service["environment"]), name
        assert service["command"] == [name.removesuffix("-gpu")]


def test_every_service_is_hardened_and_checked(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["user"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service.get("healthcheck", {}).get("test") or name in WITHOUT_A_SHELL, name
        assert "privileged" not in service and "cap_add" not in service, name
        if name in KVRELAY:
            assert service["depends_on"]["redis"] == {"condition": "service_healthy"}


def test_a_container_may_drain_before_it_is_killed(services: dict[str, Any]) -> None:
    for name in KVRELAY:
        drain_s = int(services[name]["environment"]["KVRELAY_DRAIN_TIMEOUT_S"].partition(":-")[2].rstrip("}"))
        assert int(services[name]["stop_grace_period"].removesuffix("s")) >= drain_s + 10


def test_every_variable_is_a_field(services: dict[str, Any], tmp_path: Path) -> None:
    for name in KVRELAY:
        config = RouterConfig if name == "router" else WorkerConfig
        fields = {f"KVRELAY_{field.upper()}" for field in config.model_fields}
        names = set(services[name]["environment"])
        assert {each for each in names if not each.startswith("OTEL_")} <= fields, name


def test_secrets_are_made_once_and_can_be_read(tmp_path: Path) -> None:
    secrets = tmp_path / "secrets"
    subprocess.run([DEPLOY / "make-secrets", secrets], check=True)
    first = {path.name: path.read_text() for path in secrets.iterdir()}
    subprocess.run([DEPLOY / "make-secrets", secrets], check=True)
    assert {path.name: path.read_text() for path in secrets.iterdir()} == first
    assert secrets.stat().st_mode & 0o777 == 0o700
    config = resolve(
        RouterConfig,
        {},
        {
            "KVRELAY_MODEL": "org/model",
            "KVRELAY_API_KEYS_FILE": str(secrets / "api_keys"),
            "KVRELAY_REDIS_PASSWORD_FILE": str(secrets / "redis_password"),
        },
    )
    assert [key.get_secret_value() for key in config.api_keys] == [first["api_keys"].strip()]
    assert f":{first['redis_password']}@" in config.redis_url
