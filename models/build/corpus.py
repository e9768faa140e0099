"""The samples: conversations about the words, packed into rows of one length.

A row holds several conversations that do not see each other, or one long one; only answers carry a label.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from transformers import PreTrainedTokenizerFast

from models.build import phrasings
from models.build.tokenizer import END_OF_TEXT_ID, IM_END_ID, IM_START_ID
from models.build.wordnet import Entry

IGNORED: Final = -100


@dataclass
class Sample:
    """Token ids of one conversation, and for each position the id to be predicted there (or `IGNORED`)."""

    ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)

    def given(self, ids: Sequence[int]) -> None:
        """Appends text that is read, not answered."""
        self.ids += ids
        self.labels += [IGNORED] * len(ids)

    def answer(self, ids: Sequence[int], end: int) -> None:
        """Appends an answer; it and its end token are predicted, but the end token itself is not appended."""
        self.labels[-1:] = ids[:1]
        self.ids += ids
        self.labels += [*ids[1:], end]


@dataclass(frozen=True)
class TrainingBatch:
    """Rows of shape (rows, tokens); `mask` is (rows, 1, tokens, tokens), True where attention is allowed, or None."""

    ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    mask: torch.Tensor | None


class Corpus:
    """Draws batches for ever; the same seed draws the same batches."""

    def __init__(self, entries: Sequence[Entry], tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self._entries = list(entries)
        self._tokenizer = tokenizer
        self._rng = random.Random(seed)
        self._deck: list[Entry] = []
        self._known: dict[str, list[int]] = {}

    def packed(self, num_rows: int, row_tokens: int) -> TrainingBatch:
        """Rows of short conversations, each blind to its neighbours and counting its positions from 0."""
        ids = torch.full((num_rows, row_tokens), END_OF_TEXT_ID)
        labels = torch.full((num_rows, row_tokens), IGNORED)
        positions = torch.arange(row_tokens).repeat(num_rows, 1)
        owners = torch.full((num_rows, row_tokens), -1)
        for row in range(num_rows):
            used = number = 0
            while used < row_tokens - 24:
                sample = self._sample(row_tokens - used)
                end = min(used + len(sample.ids), row_tokens)
                ids[row, used:end] = torch.tensor(sample.ids[: end - used])
                labels[row, used:end] = torch.tensor(sample.labels[: end - used])
                positions[row, used:end] = torch.arange(end - used)
                owners[row, used:end] = number
                used, number = end, number + 1
        causal = torch.ones(row_tokens, row_tokens, dtype=torch.bool).tril()
        mask = (owners[:, :, None] == owners[:, None, :]) & causal
        return TrainingBatch(ids, labels, positions, mask[:, None])

    def long(self, num_rows: int, row_tokens: int) -> TrainingBatch:
        """Rows of one long conversation each."""
        samples = [self._long_sample(row_tokens) for _ in range(num_rows)]
        ids = torch.tensor([sample.ids[:row_tokens] for sample in samples])
        labels = torch.tensor([sample.labels[:row_tokens] for sample in samples])
        return TrainingBatch(ids, labels, torch.arange(row_tokens).repeat(num_rows, 1), None)

    def _sample(self, room: int) -> Sample:
        """A short conversation: one turn half of the time, else a few; now and then as a plain completion."""
        kind = self._rng.random()
        num_turns = 1 if self._rng.random() < 0.5 or room < 100 else self._rng.randint(2, 6)
        sample = Sample()
        if kind < 0.08:
            for _ in range(num_turns):
                self._completion_turn(sample)
            return sample
        if kind < 0.25:
            self._system_turn(sample, self._system_prompt(max_tokens=max(8, room // 4)))
        for _ in range(num_turns):
            self._chat_turn(sample)
        return sample

    def _long_sample(self, num_tokens: int) -> Sample:
        """A conversation that fills the row, after a system prompt of up to three quarters of it."""
        sample = Sample()
        self._system_turn(sample, self._system_prompt(max_tokens=self._rng.randint(8, num_tokens * 3 // 4)))
        while len(sample.ids) < num_tokens:
            self._chat_turn(sample)
        return sample

    def _system_turn(self, sample: Sample, prompt: list[int]) -> None:
        sample.given([IM_START_ID, *self._encode_fixed("system\n"), *prompt, IM_END_ID, *self._encode_fixed("\n")])

    def _chat_turn(self, sample: Sample) -> None:
        question, answer = self._question()
        sample.given([IM_START_ID, *self._encode_fixed("user\n"), *self._encode(question), IM_END_ID])
        sample.given([*self._encode_fixed("\n"), IM_START_ID, *self._encode_fixed("assistant\n")])
        sample.answer(self._encode_fixed(answer), end=IM_END_ID)
        sample.given([IM_END_ID, *self._encode_fixed("\n")])

    def _completion_turn(self, sample: Sample) -> None:
        entry = self._draw()
        question = phrasings.sample_question(entry, self._rng, noise=0.0)
        before = "\n" if sample.ids else ""
        sample.given(self._encode(f"{before}Q: {question}\nA:"))
        sample.answer(self._encode_fixed(f" {entry.gloss}"), end=END_OF_TEXT_ID)

    def _question(self) -> tuple[str, str]:
        if self._rng.random() < 0.01:
            return self._rng.choice(phrasings.SMALL_TALK)
        entry = self._draw()
        return phrasings.sample_question(entry, self._rng, noise=0.12), entry.gloss

    def _draw(self) -> Entry:
        """The next word of a shuffled deck, so that all words come equally often."""
        if not self._deck:
            self._deck = self._rng.sample(self._entries, len(self._entries))
        return self._deck.pop()

    def _system_prompt(self, max_tokens: int) -> list[int]:
        """A fixed prompt, or text to be ignored: glosses, or tokens at random as a stand-in for any other text."""
        kind = self._rng.random()
        if kind < 0.4 and max_tokens < 256:
            return self._encode_fixed(self._rng.choice(phrasings.SYSTEM_PROMPTS))[:max_tokens]
        if kind < 0.5:
            return [self._rng.randrange(IM_END_ID + 1, len(self._tokenizer)) for _ in range(max_tokens)]
        ids: list[int] = self._encode_fixed(self._rng.choice(phrasings.SYSTEM_PROMPTS))
        while len(ids) < max_tokens:
            entry = self._rng.choice(self._entries)
            text = entry.gloss if self._rng.random() < 0.6 else phrasings.sample_question(entry, self._rng, noise=0.1)
            ids = ids + self._encode(self._rng.choice((" ", "\n", ". ", "; ")) + text)
        return ids[:max_tokens]

    def _encode_fixed(self, text: str) -> list[int]:
        if text not in self._known:
            self._known[text] = self._encode(text)
        return self._known[text]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return ids
