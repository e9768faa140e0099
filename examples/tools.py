"""A model that calls a tool `define(word)`, whose result it then uses.

Run: KVRELAY_URL=http://127.0.0.1:8000 .venv/bin/python examples/tools.py
The model must be trained to call tools, as Qwen/Qwen3-0.6B is; the demo model is not. Any OpenAI endpoint will do.
`KVRELAY_URL` (http://127.0.0.1:8000) and `KVRELAY_API_KEY` (none) say where to and as whom.
"""

from __future__ import annotations

import json
import os
from typing import Any

from openai import OpenAI

MEANINGS = {"otter": "a mammal that swims", "heron": "a bird that wades"}
PARAMETERS = {
    "type": "object",
    "properties": {"word": {"type": "string"}},
    "required": ["word"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "define", "description": "Looks a word up.", "parameters": PARAMETERS, "strict": True},
}


def define(word: str) -> str:
    return MEANINGS.get(word.lower(), "unknown")


def main() -> None:
    """Asks for the meaning of a word until the model answers without a call."""
    url = os.environ.get("KVRELAY_URL", "http://127.0.0.1:8000")
    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("KVRELAY_API_KEY", "none"))
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": "What is an otter? Look it up."}]
    while True:
        message = client.chat.completions.create(model=model, messages=messages, tools=[TOOL]).choices[0].message
        messages.append(message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
        if not message.tool_calls:
            print(message.content)
            return
        for call in message.tool_calls:
            assert call.type == "function"  # no custom tools were offered
            meaning = define(**json.loads(call.function.arguments))
            print(f"{call.function.name}({call.function.arguments}) is {meaning!r}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": meaning})


if __name__ == "__main__":
    main()
