"""A chat completion, whole and streamed.

Run: .venv/bin/python examples/chat.py [QUESTION]
`KVRELAY_URL` (http://127.0.0.1:8000) and `KVRELAY_API_KEY` (none) say where to and as whom.
"""

from __future__ import annotations

import sys

from connection import connect
from openai.types.chat import ChatCompletionMessageParam


def main() -> None:
    """Asks the same question twice: for the whole answer, and for a stream of it that ends with its usage."""
    client, model = connect()
    question = " ".join(sys.argv[1:]) or "What is an otter?"
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": question}]

    answer = client.chat.completions.create(model=model, messages=messages, temperature=0)
    print("whole:   ", answer.choices[0].message.content)

    stream = client.chat.completions.create(
        model=model, messages=messages, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    print("streamed: ", end="")
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            print(f"\n{chunk.usage.prompt_tokens} prompt tokens, {chunk.usage.completion_tokens} completion tokens")


if __name__ == "__main__":
    main()
