"""`kvrelay drain` against a real Redis."""

from __future__ import annotations

import asyncio
import secrets

import msgspec
import pytest

from kvrelay.fleet import Registry, WorkerRecord
from kvrelay.fleet.embedded import EmbeddedRedis
from tests.fakes.command import command
from tests.fakes.records import worker_record

drain = command("drain")

HELD = {"worker_id": "w0", "role": "decode"}


def test_drain_marks_waits_and_takes_back(redis_server: EmbeddedRedis, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = f"test-{secrets.token_hex(4)}"
    flags = ["--redis", redis_server.url, "--redis-prefix", prefix, "--served-model-name", "m"]

    async def publish(num_open: float) -> list[WorkerRecord]:
        registry = Registry(redis_server.url, prefix)
        joined = await registry.join(worker_record(**HELD, load={"open": num_open}), 60)
        await registry.renew(msgspec.structs.replace(joined, load={"open": num_open}), 60)
        workers = await registry.list_workers("m")
        await registry.close()
        return workers

    async def publish_of_an_older_version() -> None:
        registry = Registry(redis_server.url, prefix)
        await registry.join(worker_record(**HELD, load={}), 60)
        await registry.close()

    asyncio.run(publish_of_an_older_version())
    assert drain(["w0", *flags, "--wait", "0"]) == 1 and "does not say" in capsys.readouterr().err
    assert drain(["w0", *flags, "--undo"]) == 0
    assert not asyncio.run(publish(1))[0].draining
    assert drain(["nobody", *flags]) == 1 and "there are: w0" in capsys.readouterr().err
    assert drain(["w0", *flags, "--wait", "0.1"]) == 1 and "still has 1 requests" in capsys.readouterr().err
    assert asyncio.run(publish(0))[0].draining
    assert drain(["w0", *flags, "--wait", "10"]) == 0 and "idle" in capsys.readouterr().out
    assert drain(["w0", *flags, "--undo"]) == 0
    assert not asyncio.run(publish(0))[0].draining


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "soon"])
def test_the_wait_must_be_a_time(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        drain(["w0", f"--wait={text}"])
    assert error.value.code == 2 and "must be a number from 0 to 86400" in capsys.readouterr().err
