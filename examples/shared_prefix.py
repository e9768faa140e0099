"""Prompts that begin alike: what one of them has computed, the next ones find in the cache.

Run: .venv/bin/python examples/shared_prefix.py
`KVRELAY_URL` (http://127.0.0.1:8000) and `KVRELAY_API_KEY` (none) say where to and as whom.
"""

from __future__ import annotations

import secrets
import time

from connection import connect
from openai.types import Completion

QUESTIONS = ("What is an otter?", "What is a river?", "What does able mean?", "Define absence.")


def main() -> None:
    """Asks four questions under one long preamble, one after the other, then again under another salt."""
    client, model = connect()
    # A line of its own for this run, so that nothing of it is cached yet.
    preamble = f"<|im_start|>system\nRun {secrets.token_hex(4)}. " + "Answer in one sentence. " * 60 + "<|im_end|>\n"

    def ask(question: str, salt: str | None) -> Completion:
        prompt = f"{preamble}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        return client.completions.create(
            model=model, prompt=prompt, temperature=0, max_tokens=24, extra_body={"cache_salt": salt}
        )

    for salt in (None, "another tenant"):
        print(f"cache_salt: {salt}")
        for question in QUESTIONS:
            began = time.perf_counter()
            usage = ask(question, salt).usage
            assert usage is not None and usage.prompt_tokens_details is not None
            cached = usage.prompt_tokens_details.cached_tokens
            print(f"  {usage.prompt_tokens} prompt tokens, {cached} cached, {time.perf_counter() - began:.3f} s")


if __name__ == "__main__":
    main()
