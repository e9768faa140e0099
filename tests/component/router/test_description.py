"""The API's description: its schemas resolve, answers follow them, and schemathesis finds no difference."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from kvrelay.text.service import TextService
from tests.component.router.rig import MODEL, Router
from tests.component.router.test_error_forms import BODIES, HELLO
from tests.component.router.tools import CALL, THINKING, TOOL

ROOT = Path(__file__).parents[3]
FUNCTION = {"type": "function", **TOOL["function"]}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *BODIES.items(),
    ("/v1/completions", {"prompt": ["otter", [5, 6]], "logprobs": 2, "prompt_logprobs": 1, "return_token_ids": True}),
    ("/v1/chat/completions", {"messages": HELLO, "tools": [TOOL], "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", {"messages": HELLO, "prompt_logprobs": 1, "return_token_ids": True, "n": 2}),
    ("/invocations", {"prompt": "otter"}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 90, "thinking": {"type": "enabled"}}),
    ("/v1/responses", {"input": HELLO, "tools": [FUNCTION], "top_logprobs": 1, "reasoning": {"effort": "low"}}),
    ("/v1/responses", {"input": "otter", "max_output_tokens": 1, "metadata": {"a": "b"}, "instructions": "Swim."}),
    ("/v1/select", {"messages": HELLO, "choices": ["x", "y"], "normalization": "unconditional"}),
    ("/tokenize", {"messages": HELLO, "tools": [TOOL], "return_token_strs": True}),
]
OUTPUTS = (f"{THINKING}I look. {CALL}\n{CALL}", "An otter is a mammal.", "")


@pytest.fixture
def text(tools_text: TextService) -> TextService:
    """Of the router."""
    return tools_text


async def described(router: Router) -> dict[str, Any]:
    document: dict[str, Any] = (await router.http.get("/openapi.json")).json()
    return document


def references(part: Any) -> set[str]:
    if isinstance(part, list):
        return set().union(*map(references, part))
    if not isinstance(part, dict):
        return set()
    own = {part["$ref"]} if isinstance(part.get("$ref"), str) else set()
    return own.union(*map(references, part.values()))


def check(document: dict[str, Any], path: str, method: str, answer: httpx.Response) -> None:
    """Raises ValidationError for an answer that is not as described."""
    answers = document["paths"][path][method]["responses"]
    found = answers.get(str(answer.status_code)) or answers[f"{answer.status_code // 100}XX"]
    schema = found["content"][answer.headers["content-type"].partition(";")[0]]["schema"]
    jsonschema.validate(
        answer.json(), {**schema, "components": document["components"]}, jsonschema.Draft202012Validator
    )


async def test_every_reference_resolves_to_a_schema(router: Router) -> None:
    document = await described(router)
    names = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert references(document) <= names
    for operations in document["paths"].values():
        for each in operations.values():
            bodies = each.get("requestBody", {}).get("content", {})
            for content in [bodies, *(answer.get("content", {}) for answer in each["responses"].values())]:
                for media in content.values():
                    jsonschema.Draft202012Validator.check_schema(media["schema"])


async def test_bodies_say_what_they_take(router: Router) -> None:
    document = await described(router)
    for path, body in VARIANTS:
        operation = document["paths"][path]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        check_body = jsonschema.Draft202012Validator({**schema, "components": document["components"]})
        assert check_body.is_valid({"model": MODEL, **body}), (path, body)
        assert not check_body.is_valid({**body, "model": "other"})
    chat, response = (
        document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
        for path in ("/v1/chat/completions", "/v1/responses")
    )
    for stop, is_valid in (("x", True), (["x", "y"], True), (None, True), ("", False), ([1], False), (1, False)):
        assert jsonschema.Draft202012Validator(chat["stop"]).is_valid(stop) is is_valid
    assert not jsonschema.Draft202012Validator(response["input"]).is_valid(None)


@pytest.mark.parametrize("output", OUTPUTS)
async def test_answers_are_as_described(router: Router, output: str) -> None:
    document = await described(router)
    router.answers(output)
    response_ids = []
    for path, body in VARIANTS:
        answer = await router.post(path, **body)
        assert answer.status_code == 200, answer.text
        check(document, path, "post", answer)
        check(document, path, "post", await router.http.post(path, json={"model": 1, **body}))
        if path == "/v1/responses":
            response_ids.append(answer.json()["id"])
    for response_id in response_ids:
        for end in ("", "/input_items"):
            answer = await router.http.get(f"/v1/responses/{response_id}{end}")
            check(document, f"/v1/responses/{{response_id}}{end}", "get", answer)
        answer = await router.http.delete(f"/v1/responses/{response_id}")
        check(document, "/v1/responses/{response_id}", "delete", answer)
    for path in ("/v1/models", "/health", "/ping", "/ready", "/version", "/fleet", "/requests"):
        check(document, path, "get", await router.http.get(path))
    check(document, "/v1/models/{model_id}", "get", await router.http.get(f"/v1/models/{MODEL}"))
    check(document, "/requests/{request_id}", "get", await router.http.get("/requests/x"))


async def test_a_key_is_part_of_it_where_one_is_needed(router: Router, make_router: Any) -> None:
    open_paths = {"/health", "/ping", "/ready", "/version", "/dashboard"}
    async with make_router(api_keys=("key",)) as closed:
        answer = await closed.http.get("/openapi.json", headers={"authorization": "Bearer key"})
        for path, operations in answer.json()["paths"].items():
            for each in operations.values():
                assert each.get("security", []) == ([] if path in open_paths else [{"bearer": []}])
    assert "securitySchemes" not in (await described(router))["components"]


RUNS = {
    "random requests, and those that follow answers": ["--phases", "fuzzing,stateful", "--max-examples", "3"],
    "bounds, but of chats": ["--phases", "coverage", "--exclude-path-regex", "chat|messages|responses|invocations"],
    "everything": ["--max-examples", "20"],
}


@pytest.mark.everyday(2)
@pytest.mark.parametrize("name", list(RUNS))
async def test_schemathesis_finds_no_difference(router: Router, tmp_path: Path, name: str) -> None:
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(ROOT / "schemathesis.toml"), "run"]
    options = ["--seed", "7", "--generation-database", "none", "--no-color", *RUNS[name]]
    process = await asyncio.create_subprocess_exec(
        *command,
        f"{router.url}/openapi.json",
        *options,
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "200"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    found = re.search(r"(\d+) generated, (\d+) passed", output.decode())
    assert found is not None and found[1] == found[2] and int(found[1]) > 50, output.decode()
    assert json.loads((await router.http.get("/health")).text) == {"status": "ok"}
