"""The same requests on the same model and device by the engine and by transformers' own continuous batching."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import transformers
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from benchmarks.gpu.figures import figures, ratios
from benchmarks.gpu.loop import Job, serve
from benchmarks.gpu.part import Part, WrongResults
from kvrelay.engine.load.causal_model import make_dummy
from kvrelay.engine.run.graph_sizes import default_sizes
from kvrelay.engine.run.transformers_runner import TransformersRunner

ABOUT = (
    "All requests at once, greedily, without stop tokens and without shared prefixes, in one process, in turns: our "
    "step loop with its scheduler (no HTTP, no handoff), and `generate_batch` of transformers with its defaults, its "
    "manager kept from turn to turn, and 0.6 of the memory that is free for its cache. Both have the same weights. "
    "First tokens count from the moment that the requests were handed in; the gap is a request's mean. Ratios above 1: "
    "ours is faster."
)
_TOKEN_BUDGET = 2048


@dataclass
class Turn:
    """One run of all requests."""

    tokens_a_second: float
    first_token_s: float  # medians over requests
    worst_first_token_s: float
    gap_s: float
    tokens: list[list[int]]


def run(part: Part) -> None:
    """A row each, and one with ratios."""
    scale = part.scale
    requests = make_requests(part)
    num_tokens = sum(len(prompt) + scale.request_output for prompt in requests)
    runner = part.runner(num_tokens + 32 * len(requests), default_sizes(len(requests)))
    peer = Peer(part)
    turns: dict[str, list[Turn]] = {"kvrelay": [], "transformers": []}
    works: dict[str, Callable[[], Turn]] = {
        "kvrelay": lambda: ours(part, runner, requests),
        "transformers": lambda: peer.turn(requests),
    }
    try:
        for repeat in range(scale.repeats + 1):
            if repeat > 1 and not part.recorder.has_time(f"repeats from {repeat} on"):
                break
            for name, work in works.items():
                turn = work()
                print(f"  turn {repeat}, {name}: {turn.tokens_a_second:.0f} tokens a second", flush=True)
                if repeat:
                    turns[name].append(turn)
    finally:
        peer.close()
        for name, each in turns.items():
            _report(part, name, each)
    _compare(part, turns["kvrelay"], turns["transformers"])


def make_requests(part: Part) -> list[np.ndarray]:
    """Random prompts, of an eighth of the longest length to all of it."""
    scale, random = part.scale, np.random.default_rng(3)
    lengths = random.integers(scale.request_prompt // 8, scale.request_prompt, scale.requests)
    return [random.integers(5, scale.config["vocab_size"], int(length)).astype(np.int32) for length in lengths]


def ours(part: Part, runner: TransformersRunner, requests: list[np.ndarray]) -> Turn:
    jobs = [Job(prompt, part.scale.request_output) for prompt in requests]
    course = serve(runner, jobs, token_budget=_TOKEN_BUDGET)
    times = [job.token_times for job in course.jobs]
    return _turn(times, course.wall_s, [job.tokens for job in course.jobs])


class Peer:
    """transformers' model with the same weights, and its manager."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._model: PreTrainedModel = make_dummy(part.model().source, "sdpa").eval()
        self._output = part.scale.request_output
        # By default it takes nearly all memory that is free, and leaves none for our next turn.
        self._settings: dict[str, Any] = {"max_memory_percent": 0.6}
        if part.device.type == "cpu":
            self._settings = {"max_memory_percent": 0.02, "max_batch_tokens": 256}

    def turn(self, requests: list[np.ndarray]) -> Turn:
        """Raises AssertionError where a request fails."""
        config = GenerationConfig(max_new_tokens=self._output, do_sample=False, eos_token_id=-1, pad_token_id=0)
        started = time.perf_counter()
        outputs = self._model.generate_batch(  # type: ignore[operator]
            [prompt.tolist() for prompt in requests],
            generation_config=config,
            continuous_batching_config=ContinuousBatchingConfig(**self._settings),
            record_timestamps=True,
            persistent_manager=True,
        )
        assert len(outputs) == len(requests), "transformers lost requests"
        for output in outputs.values():
            assert output.error is None, output.error
            assert len(output.generated_tokens) == self._output
        times = [[at - started for at in output.timestamps] for output in outputs.values()]
        return _turn(times, max(each[-1] for each in times), [o.generated_tokens for o in outputs.values()])

    def close(self) -> None:
        """Notes what it took, and ends its thread."""
        manager = getattr(self._model, "_cached_continuous_batching_manager", None)
        taken = getattr(getattr(manager, "continuous_batching_config", None), "use_cuda_graph", None)
        attention = self._model.config._attn_implementation
        self._part.recorder.note(
            f"transformers {transformers.__version__} with attention by {attention}, CUDA graphs {taken}."
        )
        self._model.destroy_cached_continuous_batching_manager()  # type: ignore[operator]


def _turn(times: list[list[float]], wall_s: float, tokens: list[list[int]]) -> Turn:
    first = [each[0] for each in times]
    gaps = [(each[-1] - each[0]) / (len(each) - 1) for each in times]
    count = sum(map(len, times))
    return Turn(count / wall_s, statistics.median(first), max(first), statistics.median(gaps), tokens)


def _report(part: Part, name: str, turns: list[Turn]) -> None:
    if turns:
        part.recorder.row(
            "Beside transformers",
            engine=name,
            tokens_a_second=figures([turn.tokens_a_second for turn in turns], 0),
            first_token_ms=figures([1e3 * turn.first_token_s for turn in turns], 1),
            last_first_token_ms=figures([1e3 * turn.worst_first_token_s for turn in turns], 1),
            gap_ms=figures([1e3 * turn.gap_s for turn in turns], 2),
        )


def _compare(part: Part, mine: list[Turn], theirs: list[Turn]) -> None:
    part.recorder.row(
        "Beside transformers",
        engine="ratio",
        tokens_a_second=ratios([t.tokens_a_second for t in mine], [t.tokens_a_second for t in theirs]),
        first_token_ms=ratios([t.first_token_s for t in theirs], [t.first_token_s for t in mine]),
        last_first_token_ms=ratios([t.worst_first_token_s for t in theirs], [t.worst_first_token_s for t in mine]),
        gap_ms=ratios([t.gap_s for t in theirs], [t.gap_s for t in mine]),
    )
    equal = [a == b for a, b in zip(mine[-1].tokens, theirs[-1].tokens, strict=True)]
    first = [a[0] == b[0] for a, b in zip(mine[-1].tokens, theirs[-1].tokens, strict=True)]
    if part.scale.dtype == "float32" and not all(equal):
        raise WrongResults(f"of {len(equal)} outputs in float32 only {sum(equal)} are those of transformers")
    part.recorder.note(
        f"Of {len(equal)} outputs {sum(equal)} are equal token for token, {sum(first)} in their first token "
        "(random weights give near ties, which 16-bit types break either way)."
    )
