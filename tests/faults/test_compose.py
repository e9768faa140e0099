"""deploy/compose.yaml on a real Docker engine: built, used, scaled, its containers killed under load, and taken down.

KVRELAY_DOCKER=docker scripts/test tests/faults/test_compose.py
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.faults.compose_stack import Compose, engine, load, stream, until

NO_ENGINE = engine()
pytestmark = [
    pytest.mark.skipif(NO_ENGINE is not None, reason=str(NO_ENGINE)),
    pytest.mark.timeout(1500),
]


@pytest.fixture(scope="module")
def compose() -> Iterator[Compose]:
    """Two workers of each role, healthy; taken down at the end, with nothing left."""
    compose = Compose()
    try:
        compose("up", "--build", "--wait", "--scale", "prefill=2", "--scale", "decode=2")
        yield compose
    finally:
        compose("down", "--volumes")
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
    assert [health(each) for each in containers if each["State"]["Status"] != "exited"] == 6 * ["healthy"]
    client = openai.OpenAI(base_url=f"{compose.url()}/v1", api_key=compose.api_key)
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
        drain_s = 30 if "kvrelay" in container["Config"]["Image"] else 0
        assert container["Config"]["StopTimeout"] > drain_s
    assert published == ["127.0.0.1"]


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


async def test_the_death_of_the_sole_router_ends_its_streams_and_nothing_else(compose: Compose) -> None:
    await compose.until_ready(prefill=2, decode=2)
    before = {each["Id"]: each["State"]["StartedAt"] for each in compose.containers()}
    (router,) = [container["Id"] for container in compose.containers("router")]
    async with compose.client() as http:
        whole = await stream(http, "The boat", 40)
        streams = [asyncio.create_task(stream(http, f"Number {number}", 2000)) for number in range(4)]

        async def are_running() -> bool:
            requests = (await http.get("/fleet")).json()["requests"]
            return bool(requests["running"] == len(streams))

        await until(are_running, lambda: "the streams to run")
        await asyncio.to_thread(compose.docker, "kill", router)
        outcomes = await asyncio.gather(*streams, return_exceptions=True)
        assert all(isinstance(outcome, httpx.HTTPError) for outcome in outcomes), outcomes
    await asyncio.to_thread(compose.docker, "start", router)
    fleet = await compose.until_ready(prefill=2, decode=2)
    async with compose.client() as http:
        assert await stream(http, "The boat", 40) == whole

        async def is_clean() -> bool:
            nonlocal fleet
            fleet = (await http.get("/fleet")).json()
            held = [n for w in fleet["workers"] for o, n in w["blocks"].items() if o not in ("free", "cached", "total")]
            return not any(held)

        await until(is_clean, lambda: f"blocks of the streams that ended to be free: {fleet['workers']}")
    after = {each["Id"]: each["State"]["StartedAt"] for each in compose.containers()}
    assert {name for name in after if after[name] != before[name]} == {router}


def test_stopping_ends_every_service_by_itself_with_status_0(compose: Compose) -> None:
    compose("stop")
    ends = {each["Name"]: each["State"]["ExitCode"] for each in compose.containers()}
    assert set(ends.values()) == {0}, ends
