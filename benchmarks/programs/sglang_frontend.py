"""Programs in SGLang's language, against any OpenAI endpoint. Runs in an interpreter that has `sglang` installed, and
needs nothing of this repository: its arguments are one JSON line on stdin, and its answers one on stdout.

An answer to {"program": NAME, "arguments": [...], "num_threads": N} is {"seconds": S, "texts": [...]}; with the line
`{}` the process ends.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any


def main() -> None:
    base_url, model = sys.argv[1:3]
    os.environ.setdefault("OPENAI_API_KEY", "none")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to stderr
    tiktoken: Any = import_module("tiktoken")

    # The backend counts tokens by a vocabulary that it downloads. Programs without `select` do not use it.
    tiktoken.get_encoding = lambda _: _NoTokenizer()
    sglang: Any = import_module("sglang")

    backend = sglang.OpenAI(model, base_url=f"{base_url}/v1", api_key="none", is_chat_model=False)
    programs = _programs(sglang)
    for line in sys.stdin:
        request = json.loads(line)
        if not request:
            return
        answers.write(json.dumps(_answer(programs[request["program"]], backend, request)) + "\n")
        answers.flush()


class _NoTokenizer:
    n_vocab = 1
    _mergeable_ranks: Mapping[bytes, int] = MappingProxyType({})
    _special_tokens = MappingProxyType({"<|endoftext|>": 0})

    def decode(self, _: Any) -> str:
        return " "

    def encode(self, _: Any) -> list[int]:
        return [0]


def _answer(program: Any, backend: Any, request: dict[str, Any]) -> dict[str, Any]:
    begin = time.perf_counter()
    if request["num_threads"] == 1:
        # `run` returns before the last calls have ended: without reading its text, programs would overlap.
        texts = [program.run(backend=backend, temperature=0, **each).text() for each in request["arguments"]]
    else:
        states = program.run_batch(
            request["arguments"], backend=backend, temperature=0, num_threads=request["num_threads"], progress_bar=False
        )
        texts = [state.text() for state in states]
    return {"seconds": time.perf_counter() - begin, "texts": texts}


def _programs(sgl: Any) -> dict[str, Any]:
    def few_shot(s: Any, examples: str, question: str) -> None:
        s += examples + question
        s += "\nAnswer:" + sgl.gen("answer", max_tokens=1)

    def skeleton(s: Any, question: str) -> None:
        s += f"Question: {question}\nSkeleton of the answer, in 5 short points:"
        s += sgl.gen("skeleton", max_tokens=64)
        points = s.fork(5)
        for number, point in enumerate(points):
            point += f"\nPoint {number + 1} in full:" + sgl.gen("text", max_tokens=64)
        for number, point in enumerate(points):
            s += f"\nPoint {number + 1} in full:" + point["text"]
        s += "\nSummary:" + sgl.gen("summary", max_tokens=32)

    def judge(s: Any, essay: str) -> None:
        s += f"Essay: {essay}\n"
        dimensions = ("clarity", "order", "evidence", "tone")
        parts = s.fork(len(dimensions))
        for part, dimension in zip(parts, dimensions, strict=True):
            part += f"Judged by its {dimension}:" + sgl.gen("judgement", max_tokens=64)
        for part, dimension in zip(parts, dimensions, strict=True):
            s += f"Judged by its {dimension}:" + part["judgement"]
        s += "\nSummary:" + sgl.gen("summary", max_tokens=48)

    def retrieval(s: Any, documents: str, question: str) -> None:
        s += f"{documents}\nQuestion: {question}\nAnswer:" + sgl.gen("answer", max_tokens=48)

    functions = {"few-shot-20": few_shot, "skeleton-of-thought": skeleton, "judge": judge, "rag": retrieval}
    return {name: sgl.function(function) for name, function in functions.items()}


if __name__ == "__main__":
    main()
