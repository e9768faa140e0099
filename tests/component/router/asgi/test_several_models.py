"""A router with the fleets of two models: each request goes to the fleet of its model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from importlib.metadata import version
from typing import Any

import pytest
import pytest_asyncio

from kvrelay.telemetry.metrics import Instruments
from kvrelay.text.request.validation import ModelLimits
from kvrelay.text.service import ChatOptions, TextService
from kvrelay_router.openai.api_service import FurtherModel
from kvrelay_router.openai.request_metrics import RequestMetrics
from tests.component.router.rig import MODEL, Router, running_router
from tests.fakes.scripted_dispatcher import Script, ScriptedDispatcher
from tests.fakes.text_model import write_text_model
from tests.fakes.waiting import until

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "otter"}]}
GENERATIONS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "otter"}),
    ("/v1/chat/completions", CHAT),
    ("/invocations", {"prompt": "otter"}),
    ("/invocations", CHAT),
    ("/v1/messages", {**CHAT, "max_tokens": 5}),
    ("/v1/responses", {"input": "otter"}),
]


@pytest.fixture(scope="module")
def other_text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextService]:
    """With a chat template of its own."""
    template = "{% for message in messages %}{{ message['role'] }} says {{ message['content'] }}{% endfor %}"
    service = TextService.load(str(write_text_model(tmp_path_factory.mktemp("other-model"), template)))
    yield service
    service.close()


class Pair:
    """A router with two models. The second one has a text service of its own, with another chat template."""

    def __init__(self, other_text: TextService) -> None:
        self.instruments = Instruments()
        self.metrics = RequestMetrics(MODEL, self.instruments)
        self.other = ScriptedDispatcher(lambda request, sequence: Script([]))
        self.other.model_limits = ModelLimits(256, 400, 64, 200, 16)
        self.further = FurtherModel(("other", "2nd"), self.other, other_text)
        self.router: Router

    @property
    def num_requests(self) -> tuple[int, int]:
        return len(self.router.dispatcher.requests), len(self.other.requests)


@pytest_asyncio.fixture
async def pair(text: TextService, other_text: TextService) -> AsyncIterator[Pair]:
    pair = Pair(other_text)
    async with running_router(text, metrics=pair.metrics, further=[pair.further]) as pair.router:
        pair.other.script = pair.router.dispatcher.script
        yield pair


async def test_all_models_are_listed(pair: Pair) -> None:
    models = (await pair.router.openai.models.list()).data
    assert [(each.id, each.model_dump()["root"], each.model_dump()["max_model_len"]) for each in models] == [
        (MODEL, MODEL, 512),
        ("alias", MODEL, 512),
        ("other", "other", 256),
        ("2nd", "other", 256),
    ]
    assert (await pair.router.openai.models.retrieve("2nd")).id == "2nd"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), GENERATIONS)
async def test_a_request_goes_to_the_fleet_of_its_model(
    pair: Pair, path: str, body: dict[str, Any], stream: bool
) -> None:
    for model, expected in ((MODEL, (1, 0)), ("other", (1, 1)), ("2nd", (1, 2)), ("alias", (2, 2))):
        answer = await pair.router.post(path, **body, model=model, stream=stream)
        assert answer.status_code == 200, answer.text
        assert pair.num_requests == expected
        assert f'"{model}"' in answer.text
    points = pair.instruments.samples()["gen_ai.server.request.duration"]
    counts = {dict(point.labels)["gen_ai.request.model"]: sum(point.value.counts) for point in points}  # type: ignore[union-attr]
    assert counts == {MODEL: 2, "other": 2}


async def test_a_prompt_is_rendered_and_tokenized_for_its_model(pair: Pair) -> None:
    prompts = []
    for model, text, context in ((MODEL, pair.router.text, 512), ("other", pair.further.text, 256)):
        answer = (await pair.router.post("/tokenize", **CHAT, model=model)).json()
        expected = await text.encode_chat(CHAT["messages"], ChatOptions())
        assert (answer["tokens"], answer["max_model_len"]) == (expected, context)
        counted = await pair.router.post("/v1/messages/count_tokens", **CHAT, model=model)
        assert counted.json() == {"input_tokens": len(expected)}
        counted = await pair.router.post("/v1/responses/input_tokens", input=CHAT["messages"], model=model)
        assert counted.json()["input_tokens"] == len(expected)
        prompts.append(expected)
    assert prompts[0] != prompts[1]


async def test_a_fleet_without_workers_leaves_the_other_served(pair: Pair) -> None:
    pair.other.is_ready, pair.other.model_limits = False, None
    assert (await pair.router.post("/v1/completions", prompt="x", model="other")).status_code == 503
    assert (await pair.router.post("/v1/completions", prompt="x")).status_code == 200
    ready = await pair.router.http.get("/ready")
    assert ready.status_code == 200
    assert {name: each["ready"] for name, each in ready.json()["models"].items()} == {MODEL: True, "other": False}
    listed = (await pair.router.http.get("/v1/models")).json()["data"]
    assert [each["max_model_len"] for each in listed] == [512, 512, None, None]
    pair.router.dispatcher.is_ready = False
    assert (await pair.router.http.get("/ready")).status_code == 503
    pair.other.is_ready, pair.other.model_limits = True, ModelLimits(256, 400, 64, 200, 16)
    assert (await pair.router.http.get("/ready")).status_code == 200
    assert (await pair.router.post("/v1/completions", prompt="x", model="other")).status_code == 200


async def test_requests_of_all_models_are_found(pair: Pair) -> None:
    names = ["first", "second", "third"]
    for name, model in zip(names, (MODEL, "other", MODEL), strict=True):
        headers = {"x-request-id": name}
        body = {"model": model, "prompt": "x"}
        assert (await pair.router.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
        assert (await pair.router.http.get(f"/requests/{name}")).status_code == 200
        assert len((await pair.router.http.get(f"/requests/{name}/timeline")).json()["timelines"]) == 1
    newest_first = [each.request_id for each in reversed([*pair.router.dispatcher.requests, *pair.other.requests])]
    newest_first = [newest_first[1], newest_first[0], newest_first[2]]
    listed = (await pair.router.http.get("/requests")).json()["requests"]
    assert [each["request_id"] for each in listed] == newest_first
    fleet = (await pair.router.http.get("/fleet")).json()
    assert fleet.pop("time_unix_ms") > 0
    assert fleet == {
        "workers": [],
        "models": {MODEL: {}, "other": {}},
        "memory": pair.router.memory.as_json(),
        "version": version("kvrelay"),
    }


async def test_limits_of_requests_hold_for_all_models_together(text: TextService, other_text: TextService) -> None:
    further = Pair(other_text).further
    resume = asyncio.Event()
    async with running_router(text, further=[further], max_requests=1) as router:
        waiting = Script(router.tokens("otter"), hang_after=0, resume=resume)
        router.dispatcher.script = lambda request, sequence: waiting
        held = asyncio.create_task(router.post("/v1/completions", prompt="x"))
        await until(lambda: bool(router.dispatcher.requests))
        assert (await router.post("/v1/completions", prompt="x", model="other")).status_code == 429
        resume.set()
        assert (await held).status_code == 200
        assert (await router.post("/v1/completions", prompt="x", model="other")).status_code == 200
