"""What drafts gain on edits and on outputs like earlier ones, and what they cost on text that does not repeat.

Usage: python -m benchmarks.speculation [--rounds 5] [--write benchmarks/results/speculation.md]

The model has random weights, and a head that makes it continue a fixed order of all tokens: its greedy output is the
text of the prompt without the prompt's changes, as an edit is. Other outputs are sampled at temperature 1 from random
weights: over the whole vocabulary nothing repeats; over a few tokens, repetitions are found that predict little. In
"earlier outputs" requests come one after the other; their prompts do not contain their outputs, and the outputs
overlap. Runs with the methods take turns in one process on one thread; CPU time is the least of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvrelay.engine.causal_model import CausalModel, load_model, open_source
from kvrelay.engine.transformers_runner import TransformersRunner
from kvrelay.kv.ablations import NullCache
from kvrelay.kv.hashing import root_hash
from kvrelay.kv.pool import BlockPool
from kvrelay.kv.table import BlockTable
from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.messages import PeerRef
from kvrelay.protocol.sampling import Sampling, SpeculationMethod
from kvrelay.scheduling.plan import SequenceOutput
from kvrelay.scheduling.policies.scheduler_registry import make_scheduler
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings
from kvrelay.scheduling.sequence import Sequence, TokenBuffer
from kvrelay.scheduling.speculation.speculation_settings import SpeculationSettings
from kvrelay.worker.step_loop import StepCallbacks, StepLoop

VOCAB_SIZE = 4096
BLOCK_SIZE = 16
NUM_BLOCKS = 2048
NUM_PROMPT, NUM_OUTPUT = 256, 192
EVERY = 24  # one token in so many of the prompt differs from the output
NUM_STARTS = 64
Waves = list[list[list[int]]]
"""Prompts that are decoded at once; the next ones begin when all of them have ended."""

FEW_TOKENS = 12
METHODS: tuple[SpeculationMethod, ...] = ("off", "ngram", "suffix")
HEADER = (
    "| Workload | Sequences | At once | Steps per token, off | ngram | suffix | Accepted of drafted, ngram | suffix "
    "| CPU s, off | ngram | suffix | Speedup, ngram | suffix |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)
REPORT = f"""# Drafts without a second model

Written by `python -m benchmarks.speculation`. A Llama of 6 layers of width 512 with random weights in float32 on one
thread of a CPU that other work shared; sequences of {NUM_PROMPT} prompt and {NUM_OUTPUT} output tokens.
Edits repeat the prompt, of which one token in {EVERY} is changed. "Earlier outputs" begin at one of {NUM_STARTS} places
of one text that the prompts do not contain. Runs with `speculation` off, `ngram` and `suffix` took turns; CPU time is
the least of {{rounds}} runs, prompts included. Outputs were equal in all. Steps and drafts depend a little on the
measured times of steps.

{{table}}
"""


@dataclass(frozen=True, slots=True)
class Result:
    """Of one run. `outputs`: the tokens of each sequence."""

    cpu_s: float
    num_steps: int
    num_drafted: int
    num_accepted: int
    outputs: list[list[int]]


def make_model(directory: Path, order: list[int] | None) -> CausalModel:
    """A model of random weights; with `order` its most likely token is the one behind the newest in that order."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    if order is not None:
        with torch.no_grad():
            embeddings = torch.randn(VOCAB_SIZE, config.hidden_size)
            model.model.embed_tokens.weight.copy_(embeddings)
            following = torch.tensor(order).roll(-1)
            model.lm_head.weight[following] = embeddings[torch.tensor(order)]
    model.save_pretrained(directory)
    return load_model(open_source(str(directory), "float32", max_model_len=1024), BLOCK_SIZE)


def edits(order: list[int], count: int) -> list[list[int]]:
    """Prompts: a text with changes, and its beginning again, from which the model goes on without the changes."""
    rng, prompts = random.Random(1), []
    for _ in range(count):
        start = rng.randrange(VOCAB_SIZE - NUM_PROMPT)
        text = order[start : start + NUM_PROMPT]
        changed = [rng.randrange(VOCAB_SIZE) if rng.random() < 1 / EVERY else token for token in text]
        prompts.append([*changed, *text[:8]])
    return prompts


def like_earlier_ones(order: list[int], count: int) -> Waves:
    """Prompts that no output repeats, one after the other, whose outputs overlap."""
    rng = random.Random(4)
    waves: Waves = []
    for _ in range(count):
        start = rng.randrange(NUM_STARTS)
        waves.append([[*rng.choices(order[NUM_STARTS + NUM_OUTPUT + 8 :], k=NUM_PROMPT), *order[start : start + 8]]])
    return waves


def run(model: CausalModel, waves: Waves, sampling: Sampling, method: SpeculationMethod) -> Result:
    """Decodes each wave's prompts at once."""
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    settings = SchedulerSettings(speculation=SpeculationSettings(method))
    limits = SchedulerLimits(2048, 64, 1024, frozenset())
    scheduler = make_scheduler("sarathi", limits, pool, NullCache(), settings)
    loop = StepLoop(TransformersRunner(model, NUM_BLOCKS), scheduler, overlap=False)
    sequences: list[Sequence] = []
    left = list(waves)

    def begin() -> None:
        for prompt in left.pop(0):
            sequences.append(sequence_of(str(len(sequences)), prompt, sampling))
            loop.add(sequences[-1])

    def committed(outputs: list[SequenceOutput]) -> None:
        if scheduler.has_work:
            return
        if left:
            begin()
        else:
            loop.stop()

    def failed(sequences: list[Sequence], kind: FailureKind, cause: str) -> None:
        raise RuntimeError(cause)

    started = time.process_time()
    begin()
    asyncio.run(loop.run(StepCallbacks(lambda plan: None, committed, failed)))
    cpu_s, totals = time.process_time() - started, loop.totals
    outputs = [s.tokens.view(s.num_prompt, s.num_tokens).tolist() for s in sequences]
    return Result(cpu_s, totals.num_steps, totals.num_drafted_tokens, totals.num_accepted_tokens, outputs)


def sequence_of(name: str, prompt: list[int], sampling: Sampling) -> Sequence:
    return Sequence(
        key=(name, 1, 0),
        tokens=TokenBuffer(np.array(prompt, np.int32)),
        num_prompt=len(prompt),
        sampling=sampling,
        root=root_hash(model="benchmark", cache_salt=""),
        table=BlockTable(BLOCK_SIZE),
        router=PeerRef("", "", ""),
        text_owner="",
    )


def compare(name: str, model: CausalModel, waves: Waves, sampling: Sampling, rounds: int) -> str:
    """A line of the table. Raises RuntimeError if drafts change an output."""
    best: dict[SpeculationMethod, Result] = {}
    for _ in range(rounds):
        for method in METHODS:
            result = run(model, waves, sampling, method)
            if method not in best or result.cpu_s < best[method].cpu_s:
                best[method] = result
    off = best["off"]
    if any(result.outputs != off.outputs for result in best.values()):
        raise RuntimeError(f"{name}: drafts changed an output")
    num_tokens = sum(map(len, off.outputs)) / len(waves[0])
    cells = [
        *(f"{best[method].num_steps / num_tokens:.3f}" for method in METHODS),
        *(f"{best[method].num_accepted} of {best[method].num_drafted}" for method in METHODS[1:]),
        *(f"{best[method].cpu_s:.2f}" for method in METHODS),
        *(f"{off.cpu_s / best[method].cpu_s:.2f}" for method in METHODS[1:]),
    ]
    return f"| {name} | {len(off.outputs)} | {len(waves[0])} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", type=Path, help="Markdown file for the results")
    arguments = parser.parse_args()
    rounds: int = arguments.rounds
    torch.set_num_threads(1)
    order = list(range(VOCAB_SIZE))
    random.Random(0).shuffle(order)
    greedy = Sampling(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)
    sampled = Sampling(temperature=1.0, seed=3, max_tokens=NUM_OUTPUT, ignore_eos=True)
    rng = random.Random(2)
    few = msgspec.structs.replace(sampled, allowed_token_ids=tuple(range(FEW_TOKENS)))
    lines = [HEADER]
    print(HEADER)
    with tempfile.TemporaryDirectory() as place:
        copying = make_model(Path(place) / "copying", order)
        for count in (1, 8, 32):
            lines.append(compare("edit", copying, [edits(order, count)], greedy, rounds))
            print(lines[-1], flush=True)
        lines.append(compare("earlier outputs", copying, like_earlier_ones(order, 12), greedy, rounds))
        print(lines[-1], flush=True)
        plain = make_model(Path(place) / "plain", None)
        for count in (1, 32):
            prompts = [rng.choices(range(VOCAB_SIZE), k=NUM_PROMPT) for _ in range(count)]
            lines.append(compare("text without repetition", plain, [prompts], sampled, rounds))
            print(lines[-1], flush=True)
            prompts = [rng.choices(range(FEW_TOKENS), k=NUM_PROMPT) for _ in range(count)]
            lines.append(compare(f"{FEW_TOKENS} tokens at random", plain, [prompts], few, rounds))
            print(lines[-1], flush=True)
    if arguments.write is not None:
        arguments.write.write_text(REPORT.format(table="\n".join(lines), rounds=rounds), encoding="utf-8")


if __name__ == "__main__":
    main()
