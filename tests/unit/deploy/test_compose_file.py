"""What deploy/compose.yaml promises, read from the file; tests/faults/test_compose.py runs it where an engine is."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvrelay.config.loader import resolve
from kvrelay.config.router import RouterConfig
from kvrelay.config.worker import WorkerConfig

DEPLOY = Path(__file__).parents[3] / "deploy"
WORKERS = ("prefill", "decode", "prefill-ranks", "decode-ranks", "prefill-gpu", "decode-gpu")
KVRELAY = ("router", *WORKERS)
WITHOUT_A_SHELL = ("collector", "tempo")
"""Images with nothing in them that could ask."""


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    return read


def test_routers_and_workers_can_be_scaled(services: dict[str, Any]) -> None:
    for name in KVRELAY:
        service = services[name]
        assert not {"container_name", "ports", "hostname"} & set(service), name
        names = {"KVRELAY_WORKER_ID", "KVRELAY_ROUTER_ID", "KVRELAY_ADVERTISE_HOST"}
        assert not names & set(service["environment"]), name
        assert service["command"] == [name.partition("-")[0]]
    assert services["router"]["deploy"]["replicas"] == 2


def test_the_balancer_alone_is_reachable_and_reaches_routers_alone(services: dict[str, Any]) -> None:
    networks = {name: set(each["networks"]) for name, each in services.items()}
    published = {name for name, each in services.items() if "ports" in each}
    assert published == {name for name in services if "outside" in networks[name]} == {"balancer", "grafana"}
    assert {name for name in services if "front" in networks[name]} == {"balancer", "router"}
    assert "inside" not in networks["balancer"]


def test_each_image_is_built_once(services: dict[str, Any]) -> None:
    users: dict[str, list[str]] = {}
    for name in KVRELAY:
        users.setdefault(services[name]["image"], []).append(name)
    assert {image: len(names) for image, names in users.items()} == {
        "${KVRELAY_IMAGE:-kvrelay:cpu}": 5, "${KVRELAY_GPU_IMAGE:-kvrelay:cuda}": 2
    }  # fmt: skip
    for names in users.values():
        assert sum("build" in services[name] for name in names) == 1
        assert all("build" in services[name] or services[name]["pull_policy"] == "never" for name in names)


def test_deploy_roll_knows_every_service_of_kvrelay() -> None:
    (listed,) = re.findall(r"for each in ([a-z -]+); do roll", (DEPLOY / "roll").read_text())
    assert sorted(listed.split()) == sorted(KVRELAY)


def test_every_service_is_hardened_and_checked(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["user"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        ends = service["restart"] == "no"
        assert service.get("healthcheck", {}).get("test") or ends or name in WITHOUT_A_SHELL, name
        assert ends or not service["user"].startswith("0"), name
        assert "privileged" not in service and "cap_add" not in service, name
        if name in KVRELAY:
            assert service["depends_on"]["redis"] == {"condition": "service_healthy"}


def test_a_container_may_drain_before_it_is_killed(services: dict[str, Any]) -> None:
    for name in KVRELAY:
        drain_s = int(_filled_in(services[name]["environment"]["KVRELAY_DRAIN_TIMEOUT_S"], {}))
        assert int(services[name]["stop_grace_period"].removesuffix("s")) >= drain_s + 10


def test_every_variable_is_a_field(services: dict[str, Any], tmp_path: Path) -> None:
    for name in KVRELAY:
        config = RouterConfig if name == "router" else WorkerConfig
        fields = {f"KVRELAY_{field.upper()}" for field in config.model_fields}
        names = set(services[name]["environment"])
        assert {each for each in names if not each.startswith("OTEL_")} <= fields, name


def _filled_in(value: str, variables: dict[str, str]) -> str:
    return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda match: variables.get(match[1], match[2]), value)


@pytest.mark.parametrize(
    ("variables", "gpus", "shares"),
    [
        ({}, ["0", "1"], [0.9, 0.9]),
        (
            {
                "KVRELAY_DECODE_GPU": "0",
                "KVRELAY_PREFILL_MEMORY_UTILIZATION": "0.35",
                "KVRELAY_DECODE_MEMORY_UTILIZATION": "0.55",
            },
            ["0", "0"],
            [0.35, 0.55],
        ),
    ],
)
def test_workers_on_gpus_have_one_each(
    services: dict[str, Any], variables: dict[str, str], gpus: list[str], shares: list[float]
) -> None:
    found = []
    for name in ("prefill-gpu", "decode-gpu"):
        service = services[name]
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"]) and "count" not in device
        environ = {key: _filled_in(value, variables) for key, value in service["environment"].items()}
        environ |= {"KVRELAY_MODEL": "org/model", "KVRELAY_REDIS_PASSWORD_FILE": ""}
        config = resolve(WorkerConfig, {}, environ, role=service["command"][0])
        assert config.device == "cuda" and service["image"] == "${KVRELAY_GPU_IMAGE:-kvrelay:cuda}"
        (gpu,) = device["device_ids"]
        found.append((_filled_in(gpu, variables), config.memory_utilization))
    assert found == list(zip(gpus, shares, strict=True))


@pytest.mark.parametrize(
    ("variables", "sizes"),
    [
        ({}, [(2, 1), (2, 1)]),
        (
            {"KVRELAY_PREFILL_TENSOR_PARALLEL_SIZE": "1", "KVRELAY_DECODE_PIPELINE_PARALLEL_SIZE": "2"},
            [(1, 1), (2, 2)],
        ),
    ],
)
def test_each_role_has_ranks_of_its_own(
    services: dict[str, Any], variables: dict[str, str], sizes: list[tuple[int, int]]
) -> None:
    found = []
    for name in ("prefill-ranks", "decode-ranks"):
        service = services[name]
        environ = {key: _filled_in(value, variables) for key, value in service["environment"].items()}
        environ |= {"KVRELAY_MODEL": "org/model", "KVRELAY_REDIS_PASSWORD_FILE": ""}
        config = resolve(WorkerConfig, {}, environ, role=service["command"][0])
        assert config.num_local_ranks == config.num_ranks - 1, "all in one container"
        found.append((config.tensor_parallel_size, config.pipeline_parallel_size))
    assert found == sizes


def test_workers_share_what_one_of_them_compiles(services: dict[str, Any]) -> None:
    workers = {name: each for name, each in services.items() if each.get("command") in (["prefill"], ["decode"])}
    assert len(workers) == 6
    for name, service in workers.items():
        assert "kernel-cache:/var/cache/kvrelay" in service["volumes"], name
        assert not any("/var/cache/kvrelay" in mount for mount in service["tmpfs"]), name
    dockerfile = (DEPLOY / "docker" / "Dockerfile").read_text()
    targets = [part for part in dockerfile.split("\nFROM ") if "USER 10001" in part]
    assert len(targets) == 2
    for target in targets:
        assert "-o 10001 -g 10001 -m 0700 /var/cache/kvrelay" in target, "or the volume is root's"


def test_secrets_are_made_once_and_can_be_read(services: dict[str, Any], tmp_path: Path) -> None:
    """By the command of the service `secrets`, with its directories in another place."""
    service = services["secrets"]
    assert service["entrypoint"] == ["sh", "/make-secrets"] and "./make-secrets:/make-secrets:ro" in service["volumes"]
    files = {Path(each).name: tmp_path / Path(each).relative_to("/secrets") for each in service["command"]}
    (tmp_path / "api").mkdir()
    files["api_keys"].write_text("")  # an empty one is made again

    def make() -> dict[str, str]:
        subprocess.run(["sh", DEPLOY / "make-secrets", *files.values()], check=True)
        assert all(path.stat().st_mode & 0o777 == 0o444 for path in files.values())
        return {name: path.read_text() for name, path in files.items()}

    first = make()
    assert make() == first and len(set(first.values())) == 3
    config = resolve(
        RouterConfig,
        {},
        {
            "KVRELAY_MODEL": "org/model",
            "KVRELAY_API_KEYS_FILE": str(files["api_keys"]),
            "KVRELAY_REDIS_PASSWORD_FILE": str(files["redis_password"]),
        },
    )
    assert [key.get_secret_value() for key in config.api_keys] == [first["api_keys"].strip()]
    assert f":{first['redis_password']}@" in config.redis_url


def test_secrets_are_mounted_by_those_that_read_them_and_after_they_are_made(services: dict[str, Any]) -> None:
    """Each in a volume of its own: `NAME:/run/secrets/NAME:ro`, made by the service `secrets` at `/secrets/NAME`."""
    made = {mount.rsplit(":", 1)[1]: mount.rsplit(":", 1)[0] for mount in services["secrets"]["volumes"][1:]}
    readers: dict[str, set[str]] = {}
    for name, service in services.items():
        mounts = [mount for mount in service.get("volumes", ()) if ":/run/secrets/" in mount]
        for mount in mounts:
            volume, place, mode = mount.rsplit(":", 2)
            assert mode == "ro" and made[place.removeprefix("/run")] == volume
            readers.setdefault(Path(place).name, set()).add(name)
        if mounts:
            assert service["depends_on"]["secrets"] == {"condition": "service_completed_successfully"}, name
        text = yaml.safe_dump(service)
        named = set(re.findall(r"/run/secrets/(\w+)/\w+", text))
        assert named == {Path(mount.rsplit(":", 2)[1]).name for mount in mounts}, name
    assert readers == {"redis": {"redis", *KVRELAY}, "api": {"router"}, "grafana": {"grafana"}}


def test_nothing_has_to_be_done_before_the_first_start() -> None:
    """No secret comes from a file of the host, and every volume with a default name is declared."""
    content = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert "secrets" not in content
    text = (DEPLOY / "compose.yaml").read_text()
    defaults = set(re.findall(r"KVRELAY_\w+_DIR:-([a-z-]+)\}", text))
    assert defaults == {"api-keys", "redis-password", "grafana-password", "tls"} <= set(content["volumes"])
