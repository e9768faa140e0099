"""What rounding weights to 8 or 4 bits needs to know of the model's own weights, and what it costs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel

from kvrelay.backends.backend import AttentionBackend, KVLayout
from kvrelay.engine.load.probe import own_logits, paged_logits, random_prompts
from kvrelay.engine.run.attention import Forward

_log = logging.getLogger(__name__)
_COSTLY = 0.1  # nats of KL divergence above which the cost is a warning
_MAX_TOKENS = 256
_TEXT = """\
The harbour was quiet that morning. Two fishing boats had come in before dawn, and the crews were sorting crabs
into wooden boxes while gulls waited on the sea wall. Anna counted the boxes twice, wrote the number in her notebook and
went up to the office, where the telephone had been ringing for some time. "We need forty kilos by noon," said the voice
at the other end. She looked at the clock: it was ten past eight. If the van left within the hour, it would reach the
city before the market closed. In 1987 her father had made the same journey every day for a year, and he liked to say
that a good price depends on three things: the weather, the season and the patience of the seller. The function below
returns the mean of a list of numbers, or zero if the list is empty: def mean(values): return sum(values) / len(values)
if values else 0.0"""


class QuantizationCost:
    """Runs a text through the model's own weights while these exist."""

    @torch.inference_mode()
    def __init__(self, model: PreTrainedModel, name: str, max_model_len: int) -> None:
        """Takes the text in the tokens of the model `name`, or random tokens if that has no tokenizer."""
        self._prompt = _tokens_of_text(model, name, min(_MAX_TOKENS, max_model_len))
        self.importance: dict[torch.nn.Linear, torch.Tensor] = {}
        """The mean square of each input of a linear layer, float32 `[num_in]`. The same bits on machines of one kind,
        on whose workers weights are to be rounded alike."""
        with _one_thread(), _watching_inputs(model, self.importance):
            self._own = torch.log_softmax(own_logits(model, [self._prompt])[0], dim=-1)

    @torch.inference_mode()
    def report(self, quantization: str, forward: Forward, layout: KVLayout, backend: AttentionBackend) -> None:
        """Logs the cost, as a warning if it is large."""
        found = torch.log_softmax(paged_logits(forward, [self._prompt], layout, backend)[0], dim=-1)
        divergence = float((self._own.exp() * (self._own - found)).sum(dim=-1).mean())
        same = float((self._own.argmax(-1) == found.argmax(-1)).float().mean())
        _log.log(
            logging.WARNING if not divergence <= _COSTLY else logging.INFO,
            "quantization = %s: over %d tokens of text the KL divergence from the model's own weights is %.4f nats, "
            "perplexity %.4g (own %.4g), and %.1f%% of the most likely tokens are the same",
            quantization,
            len(self._prompt),
            divergence,
            self._perplexity(found),
            self._perplexity(self._own),
            100 * same,
        )

    def _perplexity(self, log_probabilities: torch.Tensor) -> float:
        targets = self._prompt[1:, None]
        return float(log_probabilities[:-1].gather(1, targets).mean().neg().exp())


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _watching_inputs(model: PreTrainedModel, squares: dict[torch.nn.Linear, torch.Tensor]) -> Iterator[None]:
    def watch(module: Any, args: tuple[torch.Tensor, ...]) -> None:
        # The first token is not typical: all others attend to it, and some of its activations are a thousand times as
        # large as theirs.
        x = args[0].flatten(0, -2)
        squares[module] = x[min(1, len(x) - 1) :].float().square().mean(dim=0)

    with ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                hooks.callback(module.register_forward_pre_hook(watch).remove)
        yield


def _tokens_of_text(model: PreTrainedModel, name: str, most: int) -> torch.Tensor:
    token_ids: list[int] = []
    reason: object = "it has no tokens"  # of a directory without one transformers may make an empty one
    try:
        token_ids = AutoTokenizer.from_pretrained(name, trust_remote_code=False)(_TEXT)["input_ids"]
    except Exception as error:  # transformers raises many types for a missing or odd tokenizer
        reason = error
    if token_ids:
        return torch.tensor(token_ids[:most])
    _log.info("quantization: its cost is measured with random tokens, since the tokenizer cannot be read: %s", reason)
    return random_prompts(model, (most,))[0]
