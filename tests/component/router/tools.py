"""A model whose template shows tools, and what it says when it calls one."""

from __future__ import annotations

from typing import Any

from kvrelay.protocol.sampling import Sampling
from tests.component.router.rig import Router
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


async def sampling_of(router: Router, path: str = "/v1/chat/completions", **fields: Any) -> Sampling:
    """What a worker gets for a request with these fields."""
    answer = await router.post(path, **{"messages": HELLO, **fields})
    assert answer.status_code == 200, answer.text
    return router.dispatcher.requests[-1].sampling
