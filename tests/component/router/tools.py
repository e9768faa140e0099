"""A model whose template shows tools, and what it says when it calls one."""

from __future__ import annotations

from typing import Any

from tests.fakes.text_model import CHATML

HELLO: list[Any] = [{"role": "user", "content": "Weather in Zürich?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "Looks.", "parameters": PARAMETERS}}
ARGUMENTS = '{"city": "Zürich \\"🦦\\""}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
THINKING = "<think>\nHm 🦦\n</think>\n\n"
TOOLS = "{%- if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif -%}"
CALLS = "{%- for m in messages %}{% for c in m.tool_calls or [] %}[{{ c.function.arguments.city }}]{% endfor %}"
TEMPLATE = TOOLS + CALLS + "{% endfor -%}" + CHATML.replace("tool", "tool_") + '{# <tool_call> "name" </think> #}'
