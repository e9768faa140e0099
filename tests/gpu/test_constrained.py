"""Token masks on a GPU, and constrained sequences in steps that are launched ahead there."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from kvrelay.engine.make import make_runner
from kvrelay.engine.masks import token_masks
from kvrelay.engine.masks.apply import apply_by_torch, apply_masks
from kvrelay.engine.run.graphs import GraphSettings
from kvrelay.kv.pool import BlockPool
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.sampling import Grammar, GrammarKind, Sampling
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.plan import SequenceOutput
from kvrelay.scheduling.scheduler import make_scheduler
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings
from kvrelay.scheduling.sequence import Sequence
from kvrelay.worker.launchers import choose_launcher
from kvrelay.worker.step_loop import StepCallbacks, StepLoop
from tests.fakes.sequences import new_sequence
from tests.fakes.waiting import PATIENCE_S
from tests.gpu.reference import prompts
from tests.gpu.test_graphs import SIZES, DenseBackend, recorder_of
from tests.tiny_models import build_model

SCHEMA = {
    "type": "object",
    "properties": {"kind_of_animal": {"enum": ["otter", "heron"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["kind_of_animal", "age"],
    "additionalProperties": False,
}
GRAMMARS = (
    None,
    Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(SCHEMA), whitespace=""),
    Grammar(kind=GrammarKind.REGEX, text="[a-z]{3,12}"),
    Grammar(kind=GrammarKind.CHOICE, text=json.dumps(["an otter swims", "an otter sleeps", "a heron"])),
)


@pytest.mark.parametrize("vocab_size", [1, 32, 1000, 32_000, 128_256])
@pytest.mark.parametrize("num_rows", [1, 7, 32])
def test_masks_forbid_what_their_bits_do_not_allow(device: torch.device, vocab_size: int, num_rows: int) -> None:
    rng = np.random.default_rng(vocab_size + num_rows)
    rows = sorted(rng.choice(num_rows, max(1, num_rows // 2), replace=False).tolist())
    words = -(-vocab_size // 32)
    masks = [rng.integers(-(2**31), 2**31, words + 3).astype(np.int32) for _ in rows]  # tokenizers may have more tokens
    logits = torch.randn(num_rows, vocab_size + 5)[:, :vocab_size]
    expected, on_device = logits.clone(), logits.to(device)
    packed = torch.from_numpy(np.stack([mask[:words] for mask in masks]))
    apply_by_torch(expected, torch.tensor(rows), packed)
    apply_masks(on_device, rows, masks)
    assert torch.equal(on_device.cpu(), expected)


def outputs_of(directory: Path, device: torch.device, *, ahead: bool) -> tuple[list[list[int]], StepLoop]:
    """Sequences with and without grammars, in float32."""
    graphs = GraphSettings(SIZES, recorder_of) if device.type == "cuda" else None
    runner = make_runner(
        str(directory), dtype="float32", device=device, num_blocks=96, max_model_len=192, graphs=graphs,
        backend=DenseBackend(),
    )  # fmt: skip
    runner.launches_ahead = ahead
    pool = BlockPool(96, runner.spec.block_size)
    limits = SchedulerLimits(64, 16, 192, frozenset(runner.spec.eos_token_ids))
    settings = SchedulerSettings(jump_forward=True, samples_behind=ahead)
    scheduler = make_scheduler("sarathi", limits, pool, PrefixCache(pool), settings)
    loop = StepLoop(runner, scheduler, overlap=ahead, make_launcher=choose_launcher(runner, overlap=ahead))
    found: dict[SequenceKey, list[int]] = {}

    def committed(outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            found.setdefault(output.sequence.key, []).extend(output.token_ids)
        if not scheduler.has_work:
            loop.stop()

    def failed(sequences: list[Sequence], kind: FailureKind, cause: str) -> None:
        raise AssertionError(cause)

    for number, prompt in enumerate(prompts(16, 40)):
        grammar = GRAMMARS[number % len(GRAMMARS)]
        sampling = Sampling(
            temperature=float(number % 3), seed=number, max_tokens=40, ignore_eos=grammar is None, grammar=grammar
        )
        loop.add(new_sequence((str(number), 1, 0), prompt, sampling, runner.spec.block_size))
    asyncio.run(asyncio.wait_for(loop.run(StepCallbacks(lambda plan: None, committed, failed)), PATIENCE_S))
    return [found[key] for key in sorted(found)], loop


def test_float32_tokens_launched_ahead_are_those_of_one_step_after_the_other(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_masks, "PATIENCE_S", 60.0)
    directory = build_model("qwen3", tmp_path)
    alone, _ = outputs_of(directory, device, ahead=False)
    ahead, loop = outputs_of(directory, device, ahead=True)
    assert ahead == alone
    assert loop.totals.num_steps_launched_ahead > 10 and loop.totals.grammar_work.num_forced_tokens > 0
