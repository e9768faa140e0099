"""Formats are found by the chat template."""

from __future__ import annotations

import pytest

from kvrelay_router.output_parsing.dialect import find_dialect

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ('<tool_call>\n{"name": "', "hermes"),
        ('<tool_call>\n<function={{ tool_call["name"] }}>\n<parameter=', None),  # Qwen3-Coder
        ('<tool_call>{{ tc["name"] }}\n<arg_key>', None),  # GLM 4.5
        ('<|start_header_id|>assistant{"name": "\' + name + \'", "parameters": ', "llama3_json"),
        ("{{ messages }}", None),
    ],
)
def test_the_template_shows_the_tool_format(template: str, name: str | None) -> None:
    tools = find_dialect("auto", "none", template).tools
    assert (None if tools is None else tools.name) == name
