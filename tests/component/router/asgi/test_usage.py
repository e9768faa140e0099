"""Who called what: the access log, and tokens by key."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

import pytest
from pydantic import SecretStr

from kvrelay.config import RouterConfig
from kvrelay.logs import extra_fields
from kvrelay.telemetry.metrics import Instruments
from kvrelay.text.service import TextService
from kvrelay_router.access.key_ring import AcceptedKeys, KeyRing
from kvrelay_router.openai import request_metrics
from kvrelay_router.openai.request_metrics import RequestMetrics
from tests.component.router.rig import MODEL, running_router
from tests.fakes.waiting import until

LIMITS = '[[key]]\nkey = "sk-ann"\nname = "ann"\n'


def keys(tmp_path: Path, *names: str) -> KeyRing:
    path = tmp_path / "limits.toml"
    path.write_text(LIMITS)
    return KeyRing(AcceptedKeys.of(RouterConfig(api_keys=tuple(map(SecretStr, names)), key_limits_file=path)))


def tokens(instruments: Instruments) -> Counter[tuple[str, str]]:
    """By key's name and kind."""
    found = Counter[tuple[str, str]]()
    for point in instruments.samples()["kvrelay.usage.tokens"]:
        labels = dict(point.labels)
        assert labels["model"] == MODEL and isinstance(point.value, int)
        found[labels["key"], labels["kind"]] += point.value
    return found


@pytest.mark.parametrize("stream", [False, True])
async def test_a_generation_is_one_line_without_text_and_key(
    text: TextService, tmp_path: Path, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    instruments = Instruments()
    metrics = RequestMetrics(MODEL, instruments, logs_access=True)
    caplog.set_level(logging.INFO, "kvrelay.access")
    async with running_router(text, metrics=metrics, keys=keys(tmp_path, "sk-ann", "sk-bob")) as router:
        body = {"model": MODEL, "prompt": "a secret", "n": 2, "stream": stream}
        for key in ("sk-ann", "sk-bob", "sk-eve"):
            headers = {"authorization": f"Bearer {key}", "x-request-id": f"of-{key[3:]}"}
            await router.http.post("/v1/completions", json=body, headers=headers)
        await router.http.post("/v1/completions", json=body | {"n": 0}, headers={"authorization": "Bearer sk-ann"})
        await router.http.get("/v1/models", headers={"authorization": "Bearer sk-ann"})
        await until(lambda: len(caplog.records) == 4)
    ann, bob, eve, bad = (extra_fields(record) for record in caplog.records)
    assert (ann["key"], ann["request_id"], ann["status"], ann["model"]) == ("ann", "of-ann", 200, MODEL)
    assert ann["duration_ms"] >= ann["ttft_ms"] >= 0
    assert ann["input_tokens"] > 0 and ann["output_tokens"] > 0
    assert len(bob["key"]) == 8 and bob["key"] not in ("ann", "sk-bob"), "a digest"
    assert "key" not in eve and (eve["status"], eve["error"]) == (401, "401")
    assert (bad["key"], bad["status"], bad["output_tokens"]) == ("ann", 400, 0)
    whole = "".join(f"{record.getMessage()} {vars(record)}" for record in caplog.records)
    assert "secret" not in whole and "sk-" not in whole
    counted = tokens(instruments)
    for each in (ann, bob):
        for kind in ("input", "output"):
            assert counted[each["key"], kind] == each[f"{kind}_tokens"]


async def test_the_log_can_be_switched_off(text: TextService, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvrelay.access")
    async with running_router(text, metrics=RequestMetrics(MODEL)) as router:
        await router.http.post("/v1/completions", json={"model": MODEL, "prompt": "x"})
    assert not caplog.records


async def test_keys_are_bounded(text: TextService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_metrics, "MOST_KEY_NAMES", 2)
    instruments = Instruments()
    names = [f"sk-{number}" for number in range(5)]
    async with running_router(
        text, metrics=RequestMetrics(MODEL, instruments), keys=keys(tmp_path, "sk-ann", *names)
    ) as router:
        for key in ["sk-ann", *names, "sk-ann"]:
            body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
            await router.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
    found = tokens(instruments)
    assert len({key for key, _ in found}) == 3
    assert found["other", "input"] == 2 * found["ann", "input"] > 0
