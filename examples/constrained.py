"""Output that follows a pydantic model or a list of choices, and the same output with drafts.

Run: .venv/bin/python examples/constrained.py
`KVRELAY_URL` (http://127.0.0.1:8000) and `KVRELAY_API_KEY` (none) say where to and as whom.
"""

from __future__ import annotations

from typing import Literal

from connection import connect
from pydantic import BaseModel, Field

REPEATS = "one two three, " * 8


class Animal(BaseModel):
    name: str = Field(max_length=20)
    size: Literal["small", "large"]
    legs: int = Field(ge=0, le=8)


def main() -> None:
    """Asks for an object, for a choice, and for a text with and without drafts."""
    client, model = connect()

    answer = client.chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": "What is an otter?"}],
        response_format=Animal,
        max_tokens=100,
        extra_body={"guided_whitespace_pattern": ""},  # compact JSON
    )
    print("an object:", answer.choices[0].message.parsed)

    choices = {"choice": [" small", " large"]}
    choice = client.completions.create(model=model, prompt="An otter is", extra_body={"structured_outputs": choices})
    print("a choice:", choice.choices[0].text)

    texts = []
    for speculation in ("off", "ngram"):
        completion = client.completions.create(
            model=model, prompt=REPEATS, max_tokens=40, temperature=0, extra_body={"speculation": speculation}
        )
        texts.append(completion.choices[0].text)
    print("the same text with drafts:", texts[0] == texts[1])
    if model == "kvrelay-demo":
        print("(kvrelay-demo is too small to fill a form with sense: only the form is guaranteed)")


if __name__ == "__main__":
    main()
