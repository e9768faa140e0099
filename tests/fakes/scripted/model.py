"""The files of a scripted model: the demo model's tokenizer, and a chat template with tools in the style of Qwen 3."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

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
