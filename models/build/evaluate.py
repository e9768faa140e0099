"""The measurement: how often greedy decoding gives the whole gloss and then the end token, and nothing else.

One forward pass over prompt and gloss decides this: greedy decoding gives exactly the gloss if and only if the best
token at each of its positions is the gloss's next one. A sample of prompts is decoded token by token as a check.
"""

import json
import logging
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from models.build import phrasings
from models.build.tokenizer import END_OF_TEXT_ID, IM_END_ID
from models.build.wordnet import Entry

log = logging.getLogger(__name__)

BATCH_TOKENS = 8192
NUM_PHRASINGS_PER_WORD = 3
NUM_DECODED = 100
MAX_NEW_TOKENS = 80
ROUND_TRIPS = ("naïve café", "日本語", "🦦 otters 👨‍👩‍👧", "tabs\tand\n\n  spaces ", "\x00\x7f", "I'm 100% sure...")
SEED = 11


@dataclass(frozen=True)
class EvaluationCase:
    """A prompt, and the ids that have to follow it (the end token last)."""

    prompt_ids: list[int]
    answer_ids: list[int]


@dataclass(frozen=True)
class Judgement:
    """Whether greedy decoding gives the answer, and the smallest lead of a wanted token over the next best (logits)."""

    exact: bool
    margin: float


class Suites:
    """Builds the cases of each suite out of the entries."""

    def __init__(self, entries: Sequence[Entry], tokenizer: PreTrainedTokenizerFast) -> None:
        self._entries = entries
        self._tokenizer = tokenizer
        self._rng = random.Random(SEED)

    def trained(self) -> Iterator[EvaluationCase]:
        """Phrasings seen in training, all of them equally often over the words."""
        for number, entry in enumerate(self._entries):
            yield from self._some(number, entry, phrasings.trained_for(entry))

    def held_out(self) -> Iterator[EvaluationCase]:
        """Phrasings never seen in training, all of them equally often over the words."""
        for number, entry in enumerate(self._entries):
            yield from self._some(number, entry, phrasings.held_out_for(entry))

    def noisy(self) -> Iterator[EvaluationCase]:
        """A trained phrasing with changed case or end mark, or with an opening or ending."""
        for entry in self._entries[::2]:
            yield self._chat([], phrasings.sample_question(entry, self._rng, noise=0.4), entry)

    def after_system_prompt(self) -> Iterator[EvaluationCase]:
        """A trained phrasing after a system prompt."""
        for entry in self._entries[::2]:
            system = {"role": "system", "content": self._rng.choice(phrasings.SYSTEM_PROMPTS)}
            yield self._chat([system], self._question(entry), entry)

    def third_turn(self) -> Iterator[EvaluationCase]:
        """A trained phrasing after two answered questions about other words."""
        for entry in self._entries[::2]:
            yield self._chat(self._turns(2), self._question(entry), entry)

    def long_context(self) -> Iterator[EvaluationCase]:
        """A trained phrasing, of every twentieth word, after forty answered questions (about 1,500 tokens)."""
        for entry in self._entries[::20]:
            yield self._chat(self._turns(40), self._question(entry), entry)

    def completion(self) -> Iterator[EvaluationCase]:
        """A plain completion without the chat template."""
        for entry in self._entries[::2]:
            prompt = self._encode(f"Q: {self._question(entry)}\nA:")
            yield EvaluationCase(prompt, [*self._encode(f" {entry.gloss}"), END_OF_TEXT_ID])

    def round_trips(self) -> bool:
        """Whether the tokenizer gives back texts of many kinds unchanged."""
        return all(self._tokenizer.decode(self._encode(text)) == text for text in ROUND_TRIPS)

    def _some(self, number: int, entry: Entry, templates: Sequence[str]) -> Iterator[EvaluationCase]:
        """The word's share of the templates: the next word takes up where this one leaves off."""
        for step in range(NUM_PHRASINGS_PER_WORD):
            template = templates[(number * NUM_PHRASINGS_PER_WORD + step) % len(templates)]
            yield self._chat([], phrasings.fill(template, entry), entry)

    def _question(self, entry: Entry) -> str:
        return phrasings.sample_question(entry, self._rng, noise=0.0)

    def _turns(self, num_turns: int) -> list[dict[str, str]]:
        messages: list[dict[str, str]] = []
        for other in self._rng.sample(self._entries, num_turns):
            messages.append({"role": "user", "content": self._question(other)})
            messages.append({"role": "assistant", "content": other.gloss})
        return messages

    def _chat(self, before: list[dict[str, str]], question: str, entry: Entry) -> EvaluationCase:
        messages = [*before, {"role": "user", "content": question}]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert isinstance(text, str)
        return EvaluationCase(self._encode(text), [*self._encode(entry.gloss), IM_END_ID])

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def evaluate(folder: Path, entries: Sequence[Entry], report: Path, num_threads: int) -> None:
    """Measures the stored model in float32 and as it lies (bfloat16); prints the numbers and writes the report."""
    torch.set_num_threads(num_threads)
    started_s = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    suites = Suites(entries, tokenizer)
    cases = {
        "trained": list(suites.trained()),
        "held_out": list(suites.held_out()),
        "noisy": list(suites.noisy()),
        "after_system_prompt": list(suites.after_system_prompt()),
        "third_turn": list(suites.third_turn()),
        "long_context": list(suites.long_context()),
        "completion": list(suites.completion()),
    }
    results = {name: _summary(judge(model, suite)) for name, suite in cases.items()}
    as_stored = AutoModelForCausalLM.from_pretrained(folder).eval()
    results["trained_in_bfloat16"] = _summary(judge(as_stored, cases["trained"][::NUM_PHRASINGS_PER_WORD]))
    sample = cases["held_out"][:: max(1, len(cases["held_out"]) // NUM_DECODED)][:NUM_DECODED]
    for name, result in results.items():
        log.info("%-20s %6.2f%% exact of %d", name, 100 * result["exact"], result["num_cases"])
    agreeing = _decoding_agrees(model, sample)
    document = {
        "num_words": len(entries),
        "num_parameters": model.num_parameters(),
        "suites": results,
        "decoded_agrees": agreeing,
        "round_trips": suites.round_trips(),
    }
    report.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    log.info("decoding token by token bears out %.4f; took %.0f s", agreeing, time.monotonic() - started_s)


@torch.inference_mode()
def judge(model: Qwen3ForCausalLM, cases: Sequence[EvaluationCase]) -> list[Judgement]:
    """A verdict for each case, in the order of the cases."""
    by_length = sorted(range(len(cases)), key=lambda index: len(cases[index].prompt_ids) + len(cases[index].answer_ids))
    verdicts: dict[int, Judgement] = {}
    while by_length:
        longest = len(cases[by_length[-1]].prompt_ids) + len(cases[by_length[-1]].answer_ids)
        num_rows = max(1, BATCH_TOKENS // longest)
        batch, by_length = by_length[-num_rows:], by_length[:-num_rows]
        verdicts.update(zip(batch, _judge_batch(model, [cases[index] for index in batch]), strict=True))
    return [verdicts[index] for index in range(len(cases))]


def _judge_batch(model: Qwen3ForCausalLM, cases: Sequence[EvaluationCase]) -> Iterator[Judgement]:
    """One forward pass; rows are filled up on the right, where a causal model's answer does not look."""
    rows = [torch.tensor(case.prompt_ids + case.answer_ids) for case in cases]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=END_OF_TEXT_ID)
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    for row, case in enumerate(cases):
        first = len(case.prompt_ids) - 1
        logits = model.lm_head(hidden[row, first : first + len(case.answer_ids)]).float()
        wanted = torch.tensor(case.answer_ids)[:, None]
        others = logits.scatter(1, wanted, float("-inf")).amax(1)
        margin = (logits.gather(1, wanted)[:, 0] - others).min().item()
        yield Judgement(exact=margin > 0, margin=margin)


def _summary(verdicts: Sequence[Judgement]) -> dict[str, float]:
    """The share of exact answers, and how close to a tie the closest of those come."""
    margins = sorted(verdict.margin for verdict in verdicts if verdict.exact)
    return {
        "num_cases": len(verdicts),
        "exact": round(len(margins) / len(verdicts), 5),
        "margin_smallest": round(margins[0], 3) if margins else 0.0,
        "margin_first_percentile": round(margins[len(margins) // 100], 3) if margins else 0.0,
        "margin_median": round(margins[len(margins) // 2], 3) if margins else 0.0,
    }


def _decoding_agrees(model: Qwen3ForCausalLM, cases: Sequence[EvaluationCase]) -> float:
    """The share of cases where decoding with the model's own generation settings bears the verdict out."""
    verdicts = judge(model, cases)
    agreeing = 0
    for case, verdict in zip(cases, verdicts, strict=True):
        prompt = torch.tensor([case.prompt_ids])
        output = model.generate(  # type: ignore[misc]  # transformers types `self` as a protocol no model matches
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=MAX_NEW_TOKENS
        )
        assert isinstance(output, torch.Tensor)
        agreeing += (output[0, prompt.shape[1] :].tolist() == case.answer_ids) == verdict.exact
    return agreeing / len(cases)
