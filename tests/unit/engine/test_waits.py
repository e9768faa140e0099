"""A step waits for its device once: what would make the host wait is counted, op by op."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kvrelay.engine.run import device
from kvrelay.engine.run.attention import ATTENTION_NAME, attending, register, split_head
from kvrelay.engine.run.graph_check import Waits
from kvrelay.engine.sample.candidates import best_candidates
from kvrelay.engine.sample.logprobs import token_logprobs
from kvrelay.engine.sample.sampler import Sampler
from kvrelay.protocol.sampling import BeamSpec, Sampling
from kvrelay.step.batch import CandidatesWanted
from tests.fakes.late_copies import LateCopies
from tests.tiny_models import ARCHITECTURES
from tests.unit.engine.test_architectures import SERVED

GREEDY = Sampling(temperature=0.0)
PENALISED = Sampling(temperature=0.7, presence_penalty=1.0, logit_bias={3: 1.0}, min_tokens=2, seed=5)


@pytest.mark.parametrize(
    "batch",
    [
        [GREEDY] * 4,
        [GREEDY, Sampling(temperature=0.8, seed=1), Sampling(temperature=1.0, top_p=0.9, seed=2)],
        [Sampling(temperature=1.0, top_k=20, min_p=0.05, seed=index) for index in range(3)],
        [PENALISED, Sampling(temperature=0.0, repetition_penalty=1.3)],
        [GREEDY, Sampling(temperature=0.0, logprobs=0), Sampling(temperature=0.0, logprobs=5)],
        [PENALISED, Sampling(temperature=1.0, top_p=0.999, logprobs=2, seed=3), GREEDY, Sampling(seed=4, logprobs=0)],
    ],
    ids=["greedy", "mixed", "limited", "penalised", "logprobs", "all"],
)
def test_a_draw_begins_without_a_wait_and_lands_with_its_own(
    batch: list[Sampling], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = LateCopies(monkeypatch)
    sampler = Sampler(500, (498, 499), torch.device("cpu"))
    keys = [(f"request-{index}", 0, 0) for index in range(len(batch))]
    for key, sampling in zip(keys, batch, strict=True):
        sampler.add(key, sampling, [1, 2, 3], 2)
    logits = torch.randn(len(batch), 500, generator=torch.Generator().manual_seed(0)) * 3
    with Waits() as waits:
        draw = sampler.begin(keys, np.full(len(batch), 3), logits)
        sampler.last_on_device(keys)
        sampler.last_on_device(keys[::-1])
    assert waits.ops == []
    assert copies.landed == []
    with_logprobs = any(sampling.logprobs is not None for sampling in batch)
    assert copies.num_started == 1 + with_logprobs
    draw.land()
    assert sorted(copies.landed) == list(range(copies.num_started))


def test_log_probabilities_and_candidates_come_back_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the copy of what was drawn."""
    copies = []
    start_copy = device.start_copy

    def counting(source: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        copies.append(tuple(source.shape))
        return start_copy(source)

    def refused(*_: Any) -> None:
        raise AssertionError("another copy to the host")

    monkeypatch.setattr(device, "start_copy", counting)
    for name in ("tolist", "item", "__array__"):
        monkeypatch.setattr(torch.Tensor, name, refused)
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    entries = token_logprobs(logits, np.array([4, 5, 6]), np.array([2, 0, 5]))
    assert [len(entry.top_ids) for entry in entries] == [2, 0, 5]
    assert copies == [(3, 11)]
    sampler = Sampler(50, (48, 49), torch.device("cpu"))
    key = ("request", 0, 0)
    spec = BeamSpec(width=3, num_returned=1, length_penalty=1.0, early_stopping=False)
    sampler.add(key, Sampling(beams=spec), [1], 1)
    beam = CandidatesWanted(6, np.array([1], np.int32), 1)
    with Waits() as waits:
        found = best_candidates(sampler, [key] * 3, [beam] * 3, np.full(3, 1), logits)
    assert [len(each.token_ids) for each in found] == [6, 6, 6]
    assert copies == [(3, 11), (3, 13)]
    assert waits.ops == []


class NoAttention:
    def attend(self, layer: int, query: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.zeros_like(query, memory_format=torch.contiguous_format)


META = torch.device("meta")  # has no values to ask for, and is not where the host's numbers lie


def forward(config: Any) -> list[str]:
    """What waits in a forward of a model of this config, on another device than the CPU."""
    register()
    with META:
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME
        ).eval()
    token_ids = torch.zeros(1, 4, dtype=torch.int64, device=META)
    backbone, head = split_head(model)
    waits = Waits()
    with torch.inference_mode(), attending(NoAttention()), waits:
        hidden = backbone(input_ids=token_ids, position_ids=token_ids, use_cache=False).last_hidden_state
        head.set(hidden)
        model(inputs_embeds=hidden, use_cache=False)
    return waits.ops


CONFIGS = {name: make() for name, make in ARCHITECTURES.items()} | SERVED


@pytest.mark.parametrize("name", CONFIGS)
def test_no_forward_waits(name: str) -> None:
    assert forward(CONFIGS[name]) == []


def test_a_forward_that_looks_at_its_positions_is_found() -> None:
    """Dynamic scaling compares the largest position with a length."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = LlamaConfig(
        **{**ARCHITECTURES["llama"]().to_dict(), "rope_parameters": rope, "max_position_embeddings": 64}
    )
    with pytest.raises(RuntimeError, match="item"):
        forward(config)


def test_what_waits() -> None:
    numbers, chosen = torch.arange(4), torch.tensor([True, False, True, True])
    with Waits() as waits:
        _ = numbers[chosen]
        _ = bool((numbers > 2).any())
        _ = numbers.nonzero()
        _ = torch.repeat_interleave(numbers, numbers)
        _ = numbers.to(META)
    assert len(waits.ops) == 5
    with Waits() as waits:
        _ = numbers[torch.tensor([1, 2])] * torch.tensor(0.5)
        _ = numbers.repeat_interleave(2)
        _ = numbers.to(torch.float32)
        _ = torch.where(chosen, numbers, 0)
    assert waits.ops == []
