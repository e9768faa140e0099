"""What a row gives does not depend on the rows beside it, on their number, nor on the number of threads.

The operators here are those of torch on which outputs of the fused layers still rely. Each is given the same rows cut
in many ways. `test_a_split_sum_is_noticed` shows that the check can fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from kvrelay.engine.sample.candidates import best_candidates
from kvrelay.engine.sample.logprobs import token_logprobs
from kvrelay.engine.sample.random_sampling import Limits, _segments, sample_from_all, sample_from_few
from kvrelay.engine.sample.sampler import Sampler
from kvrelay.protocol.sampling import BeamSpec, Sampling
from kvrelay.step.batch import CandidatesWanted

CPU = torch.device("cpu")
ROWS = 17
CUTS = ((0, 1), (3, 4), (16, 17), (0, 2), (5, 8), (1, 9), (0, 16), (0, 17))
VOCAB_SIZES = (320, 1001, 50_257, 151_655)
Operator = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def logits_of(vocab_size: int) -> torch.Tensor:
    return torch.randn(ROWS, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3


def differing(operator: Operator, x: torch.Tensor) -> list[tuple[int, int, int]]:
    """The numbers of threads and the cuts of `x` for which some row's result has other bits than among all rows."""
    torch.set_num_threads(1)
    whole = operator(x.clone())
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for start, end in CUTS:
            if not torch.equal(operator(x[start:end].clone()), whole[start:end]):
                found.append((threads, start, end))
    return found


def test_a_split_sum_is_noticed() -> None:
    """torch divides the sum of one long row among its threads, and not the sums of several."""
    found = differing(lambda x: x.sum(dim=-1), logits_of(151_655))
    assert found and all(threads > 1 and end - start == 1 for threads, start, end in found)


UNIFORMS = torch.rand(ROWS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def limits(count: int) -> Limits:
    return Limits(torch.full((count,), 0.01), torch.full((count,), 100), torch.full((count,), 0.9, dtype=torch.float64))


def as_weights(logits: torch.Tensor) -> torch.Tensor:
    return logits.sub_(logits.amax(dim=-1, keepdim=True)).abs_().add_(1).reciprocal_()


OPERATORS: dict[str, Operator] = {
    "log_softmax": lambda x: x.log_softmax(dim=-1),
    "the most likely tokens": lambda x: x.log_softmax(dim=-1).topk(20, dim=-1).indices,
    "the greatest logit": lambda x: x.amax(dim=-1),
    "argmax": lambda x: torch.from_numpy(x.numpy().argmax(axis=1)),
    "temperature": lambda x: x.sub_(x.amax(dim=-1, keepdim=True)).mul_(1.7),
    "penalties": lambda x: torch.where(x > 0, x / 1.3, x * 1.3) - 0.7,
    "sums of segments": lambda x: _segments(as_weights(x))[1],
    "running sums of few": lambda x: as_weights(x).topk(256, dim=-1).values.to(torch.float64).cumsum(dim=-1),
    "sorting ids": lambda x: x.topk(256, dim=-1).indices.sort(dim=-1).values,
    "logits of 16 bits in 32": lambda x: x.to(torch.bfloat16).float().log_softmax(dim=-1),
}


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_gives_a_row_the_same_bits_in_every_cut(name: str, vocab_size: int) -> None:
    assert differing(OPERATORS[name], logits_of(vocab_size)) == []


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_a_row_is_sampled_alike_in_every_cut(vocab_size: int) -> None:
    weights = as_weights(logits_of(vocab_size))

    def sample(rows: torch.Tensor) -> torch.Tensor:
        start = int((weights == rows[0]).all(dim=-1).nonzero()[0])
        numbers = UNIFORMS[start : start + len(rows)]
        few, is_settled = sample_from_few(rows, limits(len(rows)), numbers)
        return torch.stack([sample_from_all(rows, numbers), few, is_settled.long()], dim=1)

    assert differing(sample, weights) == []


TIED = torch.tensor([3.0, 1, 2, 2, 1, 2, 1, 0, 1, 2]).repeat(40)
BY_ID = sorted(range(len(TIED)), key=lambda token_id: (-float(TIED[token_id]), token_id))


@pytest.mark.parametrize("beside", [0, 3, 45, 250, 399, 400])
def test_of_tokens_that_tie_the_lowest_ids_are_listed(beside: int) -> None:
    counts = [1, 5, 41, 60, 200, 400, beside]
    found = token_logprobs(TIED.repeat(len(counts), 1), np.zeros(len(counts), np.int64), np.array(counts))
    assert [list(each.top_ids) for each in found] == [BY_ID[:count] for count in counts]
    for each, count in zip(found, counts, strict=True):
        assert list(each.top_logprobs) == TIED.log_softmax(dim=-1)[BY_ID[:count]].tolist()


def test_of_candidates_that_tie_the_lowest_ids_are_found() -> None:
    sampler = Sampler(len(TIED), (0,), CPU)
    key = ("request", 0, 0)
    sampler.add(key, Sampling(beams=BeamSpec(width=4, num_returned=4)), [1], 1)
    counts = [1, 5, 41, 60, 200, 400, 900]
    wanted = [CandidatesWanted(count, np.array([1], np.int32), 1) for count in counts]
    rows = len(counts)
    found = best_candidates(sampler, [key] * rows, wanted, np.ones(rows, np.int64), TIED.repeat(rows, 1))
    assert [each.token_ids.tolist() for each in found] == [BY_ID[:count] for count in counts]
