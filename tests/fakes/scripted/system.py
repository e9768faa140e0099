"""A router, a prefill and a decode worker of a scripted model, each in a process of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvrelay.fleet.embedded import EmbeddedRedis
from tests.fakes.service_processes import ServiceProcesses

DEMO_MODEL = Path(__file__).parents[3] / "models" / "demo"
MAX_MODEL_LEN = 1 << 18
TURN = "<|im_start|>user\n"
"""Begins a turn of the user or of tools."""

TEMPLATE = """\
{%- set first = messages[0] if messages and messages[0].role in ('system', 'developer') else none -%}
{%- macro text(content) -%}
    {%- if content is string -%}{{ content }}
    {%- elif content -%}{%- for part in content -%}{{ part.text }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- if first or tools -%}
    {{- '<|im_start|>system\\n' -}}
    {%- if first -%}{{ text(first.content) + '\\n\\n' }}{%- endif -%}
    {%- if tools -%}
        {{- '# Tools\\n\\n<tools>' -}}
        {%- for tool in tools -%}{{- '\\n' + tool | tojson -}}{%- endfor -%}
        {{- '\\n</tools>\\n\\nAnswer a call as <tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call>' -}}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'tool' -%}
        {{- '<|im_start|>user\\n<tool_response>\\n' + text(message.content) + '\\n</tool_response><|im_end|>\\n' -}}
    {%- elif message.role in ('system', 'developer') -%}
        {%- if not loop.first -%}{{- '<|im_start|>system\\n' + text(message.content) + '<|im_end|>\\n' -}}{%- endif -%}
    {%- else -%}
        {{- '<|im_start|>' + message.role + '\\n' -}}
        {%- if message.reasoning_content -%}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}
        {%- endif -%}
        {{- text(message.content) -}}
        {%- for call in message.tool_calls or [] -%}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson -}}
            {{- '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def write_model(directory: Path) -> Path:
    """Writes the files that simulated workers and routers read, and returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("generation_config.json", "tokenizer.json"):
        shutil.copy(DEMO_MODEL / name, directory / name)
    for name, change in (
        ("config.json", {"max_position_embeddings": MAX_MODEL_LEN}),
        ("tokenizer_config.json", {"model_max_length": MAX_MODEL_LEN}),
    ):
        content = json.loads((DEMO_MODEL / name).read_text(encoding="utf-8"))
        (directory / name).write_text(json.dumps(content | change), encoding="utf-8")
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return directory


MODEL = "scripted"
ROOT = Path(__file__).parents[3]
BLOCK_SIZE = 16
POOL_BLOCKS = 1 << 14


class ScriptedSystem(ServiceProcesses):
    """`rules`: see `worker.Rule`. Use it as a context."""

    def __init__(self, directory: Path, rules: Sequence[Mapping[str, Any]]) -> None:
        script = directory / "script.json"
        redis = EmbeddedRedis()
        super().__init__(directory, redis.url, {"KVRELAY_TEST_SCRIPT": str(script)})
        self.stack.enter_context(redis)
        script.write_text(json.dumps(list(rules)), encoding="utf-8")
        self.model = MODEL
        port = self.hold_port()
        self.http = self.client(port)
        self.base_url = f"http://127.0.0.1:{port}"
        try:
            self._start_all(directory, port)
            self.wait_until(lambda: len(self.ready_workers(self.http)) == 2)
        except BaseException:
            self.__exit__()
            raise

    def requests(self) -> list[dict[str, Any]]:
        """Records of the requests that ended."""
        records: list[dict[str, Any]] = self.http.get("/requests").raise_for_status().json()["requests"]
        return records

    def _start_all(self, directory: Path, port: int) -> None:
        model, profile = write_model(directory / "model"), directory / "profile.json"
        costs = {"fixed_s": 0, "token_s": 0, "pair_s": 0, "kv_bytes_per_token": 8}
        sizes = {"kv_tokens": BLOCK_SIZE * POOL_BLOCKS, "transfer_bytes_s": 1e9}
        profile.write_text(json.dumps({"name": "scripted", **costs, **sizes}), encoding="utf-8")
        named = ["--model", str(model), "--served-model-name", MODEL]
        worker = [*named, "--backend", "simulated", "--profile", str(profile), "--overlap", "off"]
        worker += ["--block-size", str(BLOCK_SIZE), "--token-budget", "8192"]
        for role in ("prefill", "decode"):
            self.start(role, "tests.fakes.scripted.worker", role, "--worker-id", f"{role}-0", *worker)
        flags = ["--port", str(port), "--local-prefill-tokens", "0", "--max-attempts", "10"]
        self.start("router", "kvrelay_router", *named, *flags)
