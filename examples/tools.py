"""A model that calls a tool `define(word)`, whose result it then uses.

Run: KVRELAY_URL=http://127.0.0.1:8000 .venv/bin/python examples/tools.py
The model must be trained to call tools, as Qwen/Qwen3-0.6B is; the demo model is not, which the program says. Any
OpenAI endpoint will do.
`KVRELAY_URL` (http://127.0.0.1:8000) and `KVRELAY_API_KEY` (none) say where to and as whom.
"""

from __future__ import annotations

import json
from typing import Any

from connection import URL, connect
from openai import BadRequestError

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


ADVICE = "serve a model that is trained to call tools, such as Qwen/Qwen3-0.6B (`kvrelay up Qwen/Qwen3-0.6B`)"


def define(word: str) -> str:
    return MEANINGS.get(word.lower(), "unknown")


def main() -> None:
    """Asks for the meaning of a word until the model answers without a call."""
    client, model = connect()
    messages: list[Any] = [{"role": "user", "content": "What is an otter? Look it up."}]
    while True:
        try:
            answer = client.chat.completions.create(model=model, messages=messages, tools=[TOOL])
        except BadRequestError as error:
            reason = error.response.json()["error"]["message"]
            raise SystemExit(f"{URL} refuses tools for {model}: {reason}; {ADVICE}") from None
        message = answer.choices[0].message
        if len(messages) == 1 and not message.tool_calls:
            raise SystemExit(f"{model} answered without a call of the tool, {message.content!r}; {ADVICE}")
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
