"""What tokenizing costs the router with and without its memories of pieces and spans, by how much it has seen.

- the router's benchmarks: prompts of 2,000 characters of 18 words, as in router_load.py, each once; and with beginnings
  of 1,000 characters that 16 of them share,
- distinct: windows of 2,000 characters of this repository's documents and sources, none of which comes twice,
- conversations: eight turns, each a window; the whole conversation is tokenized at each turn, as clients send it.

CPU time of one thread a text, all ways in turns with the same texts; the memories begin empty and the first quarter of
the texts is not counted.

Usage: python -m benchmarks.tokenizing [--model DIR] [--seed 3]
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path

import tokenizers

from benchmarks.router_load import prompt_text
from kvrelay.config.demo import demo_model_path
from kvrelay_router.text.pieces import piece_cache_of
from kvrelay_router.text.service import TextService
from kvrelay_router.text.spans import SpanCache

ROOT = Path(__file__).parents[1]
WINDOW_CHARS = 2000
NUM_TURNS = 8
NUM_PROMPTS = 400


def windows(pattern: str, draw: random.Random) -> list[str]:
    """Of the files of that name in the repository, in any order."""
    texts = [path.read_text() for path in sorted(ROOT.glob(pattern))]
    cut = [text[start : start + WINDOW_CHARS] for text in texts for start in range(0, len(text), WINDOW_CHARS)]
    draw.shuffle(cut)
    return [each for each in cut if len(each) == WINDOW_CHARS]


def conversations(turns: list[str]) -> list[str]:
    """What is sent at each turn of them."""
    return ["".join(turns[number - number % NUM_TURNS : number + 1]) for number in range(len(turns))]


def cpu_us(encode: Callable[[str], list[int]], text: str) -> float:
    began = time.thread_time()
    encode(text)
    return (time.thread_time() - began) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(demo_model_path()))
    parser.add_argument("--seed", type=int, default=3)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    documents, sources = windows("docs/*.md", draw), windows("s*/**/*.py", draw)
    shared = [prompt_text(WINDOW_CHARS // 2, draw) for _ in range(16)]
    loads = {
        "the router's benchmarks": [prompt_text(WINDOW_CHARS, draw) for _ in range(NUM_PROMPTS)],
        "with shared beginnings": [
            f"{draw.choice(shared)} {prompt_text(WINDOW_CHARS // 2, draw)}" for _ in range(NUM_PROMPTS)
        ],
        "distinct documents": documents,
        "distinct sources": sources,
        "conversations about documents": conversations(documents),
        "conversations about sources": conversations(sources),
    }
    print(
        "| texts | number | characters | us as a whole | by pieces | by spans | ratio |\n|---|---|---|---|---|---|---|"
    )
    for name, texts in loads.items():
        # Each with its caches:
        backend, *others = (TextService.load(arguments.model).tokenizer.backend for _ in range(3))
        memory, below = map(piece_cache_of, others)
        if memory is None or below is None:
            raise SystemExit("the parts of this tokenizer do not show that its texts may be cut")
        spans = SpanCache(below.encode)

        def whole(text: str, backend: tokenizers.Tokenizer = backend) -> list[int]:
            ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
            return ids

        ways = (whole, memory.encode, spans.encode)
        times = [[cpu_us(way, text) for way in ways] for text in texts][len(texts) // 4 :]
        as_whole, by_pieces, by_spans = (sum(each) / len(times) for each in zip(*times, strict=True))
        num_chars = sum(map(len, texts)) / len(texts)
        row = f"| {name} | {len(times)} | {num_chars:,.0f} | {as_whole:,.0f} | {by_pieces:,.0f} | {by_spans:,.0f} |"
        print(f"{row} {by_spans / by_pieces:.2f} |")


if __name__ == "__main__":
    main()
