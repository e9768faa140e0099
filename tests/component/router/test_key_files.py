"""API keys change with their files, without a restart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from kvrelay.config import RouterConfig
from kvrelay.text.service import TextService
from kvrelay_router.access import key_ring
from kvrelay_router.access.key_ring import follow_key_files
from kvrelay_router.asgi.app import create_app
from kvrelay_router.openai.api_service import ApiSettings
from tests.component.router.rig import MODEL
from tests.fakes.scripted_dispatcher import Script, ScriptedDispatcher
from tests.fakes.waiting import until


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_ring, "LOOK_INTERVAL_S", 0.02)


@asynccontextmanager
async def served(text: TextService, config: RouterConfig) -> AsyncIterator[httpx.AsyncClient]:
    settings = ApiSettings.from_config(config)
    dispatcher = ScriptedDispatcher(lambda request, sequence: Script([]))
    app = create_app(settings, dispatcher, text)
    following = asyncio.create_task(follow_key_files(config, settings.keys))
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
            yield client
        assert not following.done()
    finally:
        following.cancel()


async def status(client: httpx.AsyncClient, key: str, priority: int = 0) -> int:
    body = {"model": MODEL, "prompt": "x", "priority": priority, "max_tokens": 1}
    answer = await client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
    return answer.status_code


async def until_status(client: httpx.AsyncClient, wanted: int, key: str, priority: int = 0) -> None:
    async with asyncio.timeout(30):
        while await status(client, key, priority) != wanted:
            await asyncio.sleep(0.01)


async def test_keys_are_added_limited_and_removed(text: TextService, tmp_path: Path) -> None:
    keys, limits = tmp_path / "keys", tmp_path / "limits.toml"
    keys.write_text("one\n")
    limits.write_text("")
    config = RouterConfig(model=MODEL, api_keys=("own",), api_keys_file=keys, key_limits_file=limits)
    async with served(text, config) as client:
        assert [await status(client, key) for key in ("own", "one", "two")] == [200, 200, 401]
        keys.write_text("one\ntwo\n")
        await until_status(client, 200, "two")
        limits.write_text('[[key]]\nkey = "two"\nleast_priority = 0\n')
        await until_status(client, 400, "two", -1)
        limits.write_text("")
        replacement = tmp_path / "new"  # as Kubernetes replaces a secret
        replacement.write_text("two\n")
        replacement.rename(keys)
        await until_status(client, 401, "one")
        assert [await status(client, key, -1) for key in ("own", "two")] == [200, 200]


async def test_a_file_with_a_fault_changes_nothing_and_shows_no_key(
    text: TextService, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys, limits = tmp_path / "keys", tmp_path / "limits.toml"
    keys.write_text("sk-one\n")
    limits.write_text("")
    config = RouterConfig(model=MODEL, api_keys_file=keys, key_limits_file=limits)
    caplog.set_level("INFO", "kvrelay_router")
    async with served(text, config) as client:
        for path, content, fault in (
            (keys, "# none\n", "holds no key"),
            (limits, '[[key]]\nkey = "sk-gone"\n', "neither in api_keys nor"),
            (keys, None, "cannot read"),
        ):
            caplog.clear()
            if content is None:
                path.unlink()
            else:
                path.write_text(content)
            await until(lambda fault=fault: fault in caplog.text)  # type: ignore[misc]
            assert await status(client, "sk-one") == 200
            keys.write_text("sk-one\nsk-two\n")
            limits.write_text("")
            await until_status(client, 200, "sk-two")
            keys.write_text("sk-one\n")
            await until_status(client, 401, "sk-two")
            assert "sk-" not in caplog.text
