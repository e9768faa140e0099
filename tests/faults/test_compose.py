"""deploy/compose.yaml on a real Docker engine, with TLS: built, used, scaled, changed and killed under load, removed.

KVRELAY_DOCKER=docker scripts/test tests/faults/test_compose.py
"""

from __future__ import annotations

import asyncio
import functools
import json
import ssl
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.faults.compose_stack import PROMPTS, Compose, answer, engine, load, make_certificate, stream, until

NO_ENGINE = engine()
pytestmark = [
    pytest.mark.skipif(NO_ENGINE is not None, reason=str(NO_ENGINE)),
    pytest.mark.timeout(1500),
]


@pytest.fixture(scope="module")
def compose(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compose]:
    """Two workers of each role, healthy; taken down at the end, with nothing left."""
    compose = Compose(tmp_path_factory.mktemp("tls"))
    try:
        compose("up", "--build", "--wait", "--scale", "prefill=2", "--scale", "decode=2")
        yield compose
    finally:
        compose("down", "--volumes", "--rmi", "local")
    label = f"label=com.docker.compose.project={compose.project}"
    left = [compose.docker(kind, "ls", "--quiet", "--filter", label) for kind in ("network", "volume")]
    assert [*left, compose.docker("ps", "--all", "--quiet", "--filter", label)] == ["", "", ""]


def health(container: dict[str, Any]) -> str:
    return str(container["State"]["Health"]["Status"])


async def until_healthy(compose: Compose, service: str) -> None:
    async def is_healthy() -> bool:
        return all(health(each) == "healthy" for each in await asyncio.to_thread(compose.containers, service))

    await until(is_healthy, lambda: f"{service} to be healthy: {compose('ps', '--all')}")


def test_the_stock_client_is_served_and_others_are_not(compose: Compose) -> None:
    containers = compose.containers()
    ended = [each["State"]["ExitCode"] for each in containers if each["State"]["Status"] == "exited"]
    assert ended == [0], "the one that made the secrets"
    assert [health(each) for each in containers if each["State"]["Status"] != "exited"] == 8 * ["healthy"]
    http = openai.DefaultHttpxClient(verify=compose.trusted)
    client = openai.OpenAI(base_url=f"{compose.url()}/v1", api_key=compose.api_key, http_client=http)
    messages: Any = [{"role": "user", "content": "What is an otter?"}]
    answer = client.chat.completions.create(model="kvrelay-demo", messages=messages, temperature=0)
    assert "mammal" in str(answer.choices[0].message.content)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="sk-another").models.list()


def test_containers_may_do_little_and_publish_one_port_on_loopback(compose: Compose) -> None:
    published = []
    for container in compose.containers():
        host = container["HostConfig"]
        assert host["ReadonlyRootfs"] and not host["Privileged"], container["Name"]
        assert host["CapDrop"] == ["ALL"] and not host["CapAdd"], container["Name"]
        assert "no-new-privileges:true" in host["SecurityOpt"], container["Name"]
        name = container["Id"]
        if container["State"]["Status"] == "exited":  # the one that made the secrets
            continue
        assert compose.docker("exec", name, "id", "-u").strip() != "0", container["Name"]
        status = compose.docker("exec", name, "sh", "-c", "cat /proc/1/status")
        assert "CapEff:\t0000000000000000" in status, container["Name"]
        secret = compose("exec", "-T", "router", "cat", "/run/secrets/redis/redis_password").strip()
        assert secret not in json.dumps(container["Config"]) and secret not in compose.docker("logs", name)
        published += [port["HostIp"] for ports in host["PortBindings"].values() for port in ports]
        drain_s = 30 if container["Config"]["Image"] == compose.image else 0
        assert container["Config"]["StopTimeout"] > drain_s
    assert published == ["127.0.0.1"]


async def until_nothing_is_held(compose: Compose) -> None:
    fleet: dict[str, Any] = {}

    async def is_clean() -> bool:
        nonlocal fleet
        async with compose.client() as http:
            fleet = (await http.get("/fleet")).json()
        held = [n for w in fleet["workers"] for o, n in w["blocks"].items() if o not in ("free", "cached", "total")]
        return len(fleet["workers"]) == 4 and not any(held)

    await until(is_clean, lambda: f"blocks of the streams that ended to be free: {fleet}")


async def test_a_third_decode_worker_joins_under_its_own_name_and_leaves_by_draining(compose: Compose) -> None:
    await asyncio.to_thread(compose, "up", "--wait", "--scale", "prefill=2", "--scale", "decode=3")
    fleet = await compose.until_ready(prefill=2, decode=3)
    names = {worker["worker_id"] for worker in fleet["workers"]}
    assert len(names) == 5
    async with load(compose) as running:
        await running.more(6)
        await asyncio.to_thread(compose, "up", "--wait", "--scale", "prefill=2", "--scale", "decode=2")
        await running.more(6)
    await compose.until_ready(prefill=2, decode=2)


@pytest.mark.parametrize("service", ["prefill", "decode", "redis"])
async def test_the_death_of_a_worker_or_of_redis_under_load_fails_no_request(compose: Compose, service: str) -> None:
    await compose.until_ready(prefill=2, decode=2)
    async with load(compose) as running:
        await running.more(6)
        victims = [container["Id"] for container in compose.containers(service)]
        for victim in victims:
            await asyncio.to_thread(compose.docker, "kill", victim)
            await running.more(24)
            await asyncio.to_thread(compose.docker, "start", victim)
            await until_healthy(compose, service)
            await compose.until_ready(prefill=2, decode=2)
        await running.more(12)


async def test_a_killed_router_breaks_only_the_streams_that_it_had_begun(compose: Compose) -> None:
    """The other one serves what it had not answered yet, and all that comes later."""
    await compose.until_ready(prefill=2, decode=2)
    before = {each["Id"]: each["State"]["StartedAt"] for each in compose.containers()}
    victim = compose.containers("router")[0]
    victims_id = f"router-{victim['Config']['Hostname']}"
    prompts = [f"Number {number}" for number in range(6)]
    async with compose.client() as http:
        expected = await asyncio.gather(*(stream(http, prompt, 1500) for prompt in prompts))
        owners: dict[str, str] = {}
        streams = [
            asyncio.create_task(stream(http, prompt, 1500, functools.partial(owners.__setitem__, prompt)))
            for prompt in prompts
        ]
        unanswered = [asyncio.create_task(answer(http, prompt, 1500)) for prompt in prompts]

        async def have_begun() -> bool:
            return len(owners) == len(streams)

        await until(have_begun, lambda: f"the streams to begin: {owners}")
        assert set(owners.values()) > {victims_id}
        await asyncio.to_thread(compose.docker, "kill", victim["Id"])
        async with asyncio.timeout(10):
            await asyncio.gather(*(answer(http, prompt, 5) for prompt in prompts))
        outcomes = await asyncio.gather(*streams, return_exceptions=True)
        for prompt, outcome, text in zip(prompts, outcomes, expected, strict=True):
            if owners[prompt] == victims_id:
                assert isinstance(outcome, httpx.RemoteProtocolError), prompt
            else:
                assert outcome == text
        assert await asyncio.gather(*unanswered) == expected
    await asyncio.to_thread(compose.docker, "start", victim["Id"])
    await until_healthy(compose, "router")
    await until_nothing_is_held(compose)
    after = {each["Id"]: each["State"]["StartedAt"] for each in compose.containers()}
    assert {name for name in after if after[name] != before[name]} == {victim["Id"]}


async def roll_under_load(compose: Compose, *arguments: str, returncode: int = 0) -> str:
    """The output of `deploy/roll` beside 300 requests, none of which fails or answers otherwise."""
    async with load(compose) as running:
        await running.more(6)
        rolled = await asyncio.to_thread(compose.roll, *arguments)
        assert rolled.returncode == returncode, rolled
        await running.more(max(12, 300 - running.num_done))
    await compose.until_ready(prefill=2, decode=2)
    return rolled.stdout + rolled.stderr


def of_kvrelay(compose: Compose) -> dict[str, dict[str, Any]]:
    return {each["Id"]: each for role in ("router", "prefill", "decode") for each in compose.containers(role)}


def others(compose: Compose) -> dict[str, str]:
    """When Redis and the balancer started."""
    return {
        each["Id"]: each["State"]["StartedAt"] for role in ("redis", "balancer") for each in compose.containers(role)
    }


async def test_a_changed_setting_reaches_all_containers_without_an_outage(compose: Compose) -> None:
    before, untouched = of_kvrelay(compose), others(compose)
    compose.environment["KVRELAY_LOG_LEVEL"] = "debug"
    said = await roll_under_load(compose)
    after = of_kvrelay(compose)
    assert len(after) == len(before) == 6 == said.count("has replaced") and not before.keys() & after.keys()
    assert all("KVRELAY_LOG_LEVEL=debug" in each["Config"]["Env"] for each in after.values())
    assert others(compose) == untouched
    compose("up", "--wait", "--scale", "prefill=2", "--scale", "decode=2")
    assert compose.roll().stdout == "" and of_kvrelay(compose).keys() == after.keys()


async def test_an_image_that_was_built_again_reaches_all_containers_without_an_outage(compose: Compose) -> None:
    untouched = others(compose)
    before = of_kvrelay(compose)
    compose.docker("build", "--tag", compose.image, "-", given=f"FROM {compose.image}\nLABEL kvrelay.build=2\n")
    await roll_under_load(compose)
    after = of_kvrelay(compose)
    assert len(after) == 6 and not before.keys() & after.keys()
    assert all(each["Config"]["Labels"].get("kvrelay.build") == "2" for each in after.values())
    assert others(compose) == untouched


async def test_without_room_for_a_second_one_the_old_one_stops_first(compose: Compose) -> None:
    before = {each["Id"] for each in compose.containers("decode")}
    await roll_under_load(compose, "--stop-first", "decode")
    after = {each["Id"] for each in compose.containers("decode")}
    assert len(after) == 2 and not before & after


async def test_a_setting_that_is_wrong_ends_the_roll_at_once_and_changes_nothing(compose: Compose) -> None:
    before = of_kvrelay(compose).keys()
    compose.environment["KVRELAY_DTYPE"] = "float23"
    try:
        said = await roll_under_load(compose, returncode=1)
    finally:
        compose.environment["KVRELAY_DTYPE"] = "float32"
    assert "did not become ready" in said and "float23" in said.splitlines()[-1]
    assert of_kvrelay(compose).keys() == before


async def test_a_certificate_is_replaced_without_an_outage_and_a_broken_one_is_refused(compose: Compose) -> None:
    def served() -> str:
        host, port = compose.url().removeprefix("https://").split(":")
        return ssl.get_server_certificate((host, int(port)))

    first, untouched = served(), others(compose)
    assert first == (compose.tls / "tls.crt").read_text()
    make_certificate(compose.tls, "next")
    compose.trusted.load_verify_locations(compose.tls / "next.crt")
    (compose.tls / "next.key").replace(compose.tls / "tls.key")
    said = await roll_under_load(compose, "balancer", returncode=1)
    assert said.count("\n") == 1 and "tls.crt" in said and served() == first
    (compose.tls / "next.crt").replace(compose.tls / "tls.crt")
    await roll_under_load(compose, "balancer")
    assert served() == (compose.tls / "tls.crt").read_text() != first and others(compose) == untouched


async def test_redis_may_be_replaced_under_load_and_the_balancer_serves_http_without_a_certificate(
    compose: Compose,
) -> None:
    async with load(compose) as running:
        await running.more(6)
        await asyncio.to_thread(compose, "up", "--detach", "--force-recreate", "redis")
        await running.more(24)
        await until_healthy(compose, "redis")
        await running.more(24)
    compose.environment["KVRELAY_TLS_DIR"] = ""
    await asyncio.to_thread(compose, "up", "--wait", "--scale", "prefill=2", "--scale", "decode=2")
    async with compose.client() as http:
        assert http.base_url.scheme == "http" and await stream(http, PROMPTS[0])


def test_stopping_ends_every_service_by_itself_with_status_0(compose: Compose) -> None:
    compose("stop")
    ends = {each["Name"]: each["State"]["ExitCode"] for each in compose.containers()}
    assert set(ends.values()) == {0}, ends
