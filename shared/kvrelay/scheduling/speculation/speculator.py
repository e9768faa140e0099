"""Guesses the next tokens of sequences from text that repeats. The step that computes the guesses verifies them.

No drafts are made if they are often rejected, or if the step has so many tokens that each costs its time. Long matches
predict more than short ones, and the sequence's own text more than that of others, so acceptance rates are by the kind
of the match: its length, in classes of a power of two, and whose text it is in.

Where drafts do not pay, the token that would be the first one is remembered, and compared with the token that comes.
So the acceptance rates stay true without drafts that cost time.

The continuations of earlier places of one match are the paths below one node of a suffix tree. The likeliest path goes
from each node to the child that most of them go to, and a token's share of those at its node estimates its probability
(Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications", 2025).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvrelay.kv.hashing import BlockHash
from kvrelay.scheduling.memory.block_manager import BlockManager
from kvrelay.scheduling.plan import PlannedRow, StepPlan, work_of
from kvrelay.scheduling.scheduler_settings import NUM_SPECULATIVE_TOKENS, SpeculationSettings
from kvrelay.scheduling.sequence import Sequence, SequenceState
from kvrelay.scheduling.speculation.earlier_outputs import EarlierOutputs, NgramIndex
from kvrelay.scheduling.step_cost import CalibratedCost, StepCost

MARGIN = 1.25  # a draft must gain this many times its estimated cost
_FORGETTING = 0.9  # weight of a sequence's earlier drafts when newer ones are verified
_FORGETTING_OF_ALL = 0.99
_PRIOR_WEIGHT = 2.0
_FIRST_RATE = 0.7
_LONGEST_PAUSE = 8  # exponent of two, in steps
_SHORTER = 2  # powers of two by which a right guess shortens the pause
_MOST_RATE = 0.995


def kind_of(length: int, *, from_earlier: bool = False) -> int:
    """The kind of a match of so many tokens, in the sequence's own text or in earlier outputs."""
    return 2 * length.bit_length() + from_earlier


class AcceptanceRate:
    """The share of drafts that were accepted, of those before which all were. A draft that only part of the earlier
    places continue with counts as that part of a draft."""

    __slots__ = ("accepted", "forgetting", "tried")

    def __init__(self, forgetting: float = _FORGETTING) -> None:
        self.forgetting = forgetting
        self.accepted = self.tried = 0.0

    def verified(self, shares: Seq[float], num_accepted: int) -> None:
        """Drafts with these shares were verified."""
        self.accepted = self.accepted * self.forgetting + num_accepted
        self.tried = self.tried * self.forgetting + sum(shares[: num_accepted + 1])

    def estimate(self, prior: float) -> float:
        return (self.accepted + prior * _PRIOR_WEIGHT) / (self.tried + _PRIOR_WEIGHT)


class AcceptanceRates(defaultdict[int, AcceptanceRate]):
    """Acceptance rates by the kind of the match."""

    def __init__(self, forgetting: float = _FORGETTING) -> None:
        super().__init__(lambda: AcceptanceRate(forgetting))


class DraftLength:
    """The number of drafts for one sequence after another of a step.

    A step of N tokens that brings each of B sequences a token takes f + cN. One more token, accepted with probability
    q, raises the tokens per second if q / c > B / (f + cN). The i-th draft is accepted with the i-th power of the
    acceptance rate, times the shares of the drafts up to it.
    """

    def __init__(self) -> None:
        self._all = AcceptanceRates(_FORGETTING_OF_ALL)
        self._least_probability = 0.0

    def begin_step(self, cost: StepCost, num_sequences: int, num_tokens: int) -> None:
        """A step of so many sequences and tokens is planned."""
        step_s = cost.fixed_s + cost.token_s * num_tokens
        self._least_probability = MARGIN * cost.token_s * num_sequences / step_s if step_s > 0 else 1.0

    @property
    def may_pay(self) -> bool:
        """Returns whether drafts that are nearly always accepted would pay in this step."""
        return self._least_probability < _MOST_RATE

    def choose(self, own: AcceptanceRates, kind: int, shares: Seq[float]) -> tuple[int, float]:
        """Returns how many of the drafts with these shares pay, behind a match of this kind, for a sequence with these
        rates; and how many tokens they are expected to bring."""
        rate = min(_MOST_RATE, own[kind].estimate(self._all[kind].estimate(_FIRST_RATE)))
        count, expected, probability = 0, 0.0, 1.0
        for share in shares:
            probability *= rate * share
            if probability <= self._least_probability:
                break
            count += 1
            expected += probability
        return count, expected

    def verified(self, own: AcceptanceRates, kind: int, shares: Seq[float], num_accepted: int) -> None:
        """Drafts with these shares, or a guess, of a sequence behind a match of this kind were verified."""
        own[kind].verified(shares, num_accepted)
        self._all[kind].verified(shares, num_accepted)


class Pause:
    """Steps in which a sequence looks for no drafts, since they do not pay."""

    __slots__ = ("_exponent", "_until")

    def __init__(self) -> None:
        self._exponent = self._until = 0

    def is_over(self, step: int) -> bool:
        """Returns whether the sequence looks for drafts in this step."""
        return step >= self._until

    def begin(self, step: int) -> None:
        """Drafts do not pay. Each pause is twice as long as the one before."""
        self._exponent = min(_LONGEST_PAUSE, self._exponent + 1)
        self._until = step + (1 << self._exponent)

    def shorten(self, step: int) -> None:
        """A guess was right."""
        self._exponent = max(0, self._exponent - _SHORTER)
        self._until = min(self._until, step + (1 << self._exponent) - 1)

    def end(self) -> None:
        """Drafts were accepted."""
        self._exponent = self._until = 0


INDEXED_PER_STEP = 8192
"""Tokens that are indexed before a step, at most: a few milliseconds. The rest of long prompts is indexed before the
next ones."""

TextOwner = tuple[str, BlockHash]
"""An owner of text, and the root of the hashes of its blocks, which differs between cache salts."""


@dataclass(frozen=True, slots=True)
class _Guess:
    """`token_id` may come at `position`, by a match of this kind."""

    position: int
    token_id: int
    kind: int
    shares: Seq[float]


@dataclass(frozen=True, slots=True)
class Continuation:
    """Tokens that may follow a match of this kind. `shares`: of each token, among the places where all before it
    followed."""

    kind: int
    token_ids: Seq[int] | NDArray[np.int32]
    shares: Seq[float]


def likeliest(paths: Seq[Seq[int]], count: int) -> tuple[list[int], list[float]]:
    """Returns the likeliest path through these continuations, at most `count` tokens, and their shares. Of equally
    frequent tokens the one of the first path is taken. A path that ends counts as one that goes elsewhere."""
    token_ids: list[int] = []
    shares: list[float] = []
    together = paths
    for at in range(count):
        if len(together) == 1:
            rest = together[0][at:count]
            token_ids += rest
            shares += [1.0] * len(rest)
            break
        counts: dict[int, int] = {}
        for path in together:
            if at < len(path):
                counts[path[at]] = counts.get(path[at], 0) + 1
        if not counts:
            break
        token_id = max(counts, key=counts.__getitem__)
        token_ids.append(token_id)
        shares.append(counts[token_id] / len(together))
        together = [path for path in together if at < len(path) and path[at] == token_id]
    return token_ids, shares


@dataclass(slots=True)
class SequenceDrafts:
    """The speculator's state of one sequence. `owner`: that whose earlier outputs are looked up; None: none are.
    `with_shares`: all places of a match are looked at, not only the latest. `kind` and `shares` describe the latest
    drafts."""

    index: NgramIndex
    owner: TextOwner | None
    with_shares: bool
    rates: AcceptanceRates = field(default_factory=AcceptanceRates)
    pause: Pause = field(default_factory=Pause)
    guess: _Guess | None = None
    kind: int = 0
    shares: Seq[float] = ()


class Speculator:
    """Makes drafts for the sequences of one scheduler."""

    def __init__(self, settings: SpeculationSettings) -> None:
        self.sequences: dict[Sequence, SequenceDrafts] = {}
        """The sequences here that may have drafts."""
        self._settings = settings
        self._lengths = DraftLength()
        self._cost = CalibratedCost()
        self._num_to_index = 0
        self._step = 0
        shortest, longest = settings.prompt_lookup_min, settings.prompt_lookup_max
        self.earlier = EarlierOutputs(settings.suffix_cache_tokens, shortest, longest)
        self._certain = (1.0,) * NUM_SPECULATIVE_TOKENS

    def begin(self, sequence: Sequence) -> None:
        """A sequence joins. Prefill workers, forks and prompts that are only scored have no drafts."""
        sampling, settings = sequence.sampling, self._settings
        method = sampling.speculation or settings.method
        if method == "off" or sequence.prefill_only or sequence.forks is not None or sampling.max_tokens < 2:
            return
        index = NgramIndex(sequence.tokens, settings.prompt_lookup_min, settings.prompt_lookup_max)
        owner = None
        if method == "suffix" and sequence.origin.text_owner is not None:
            owner = sequence.origin.text_owner, sequence.root
        self.sequences[sequence] = SequenceDrafts(index, owner, method == "suffix")

    def ended(self, sequence: Sequence) -> None:
        """A sequence leaves. Its output is kept for later ones of the same owner."""
        known = self.sequences.pop(sequence, None)
        if known is not None and known.owner is not None:
            self.earlier.add(known.owner, sequence.tokens.view(sequence.num_prompt, sequence.num_tokens))

    def begin_step(self, num_sequences: int, num_tokens: int) -> None:
        """Drafts are wanted for a step that has so many sequences and tokens already."""
        self._lengths.begin_step(self._cost.current, num_sequences, num_tokens)
        self._num_to_index = INDEXED_PER_STEP
        if self._lengths.may_pay:
            # Half of it, so that many outputs that end at once do not hold up the prompts of those that run.
            self._num_to_index -= self.earlier.index(INDEXED_PER_STEP // 2)

    def add_guesses(
        self, places: Seq[int], rows: list[PlannedRow], blocks: BlockManager, *, num_spare: int, num_kept: int
    ) -> bool:
        """Adds drafts to the rows at these places, at most `num_spare` tokens together. Returns whether there are any.

        `num_kept` blocks stay available, so drafts preempt no sequence. None is beyond its sequence's max_length, so a
        sequence needs no more blocks than with one token per step.
        """
        num_drafts = 0
        self.begin_step(len(rows), sum(row.num_tokens for row in rows))
        for place in places:
            row, sequence = rows[place], rows[place].sequence
            if not row.sample or sequence.state is not SequenceState.RUNNING:
                continue
            table, end = sequence.table, row.position + row.num_tokens
            num_slots = table.capacity_tokens + max(0, blocks.num_available - num_kept) * table.block_size - end
            most = min(num_spare - num_drafts, num_slots, sequence.max_length - end - 1)
            drafts = self.draft(sequence, most)
            if drafts is not None and blocks.grow(sequence, end + len(drafts)):
                rows[place] = PlannedRow(sequence, row.position, row.num_tokens, False, True, drafts)
                num_drafts += len(drafts)
        return num_drafts > 0

    def expects_any(self, plan: StepPlan) -> bool:
        """Returns whether to wait for the tokens of a step in flight, because drafts are likely to follow them."""
        drafted = [row.sequence for row in plan.rows if row.sequence in self.sequences] if self.sequences else []
        if not drafted:
            return False
        self.begin_step(len(plan.rows), plan.num_decode_tokens + plan.num_prefill_tokens)
        return any(self.expects(sequence) for sequence in drafted)

    def draft(self, sequence: Sequence, most: int) -> NDArray[np.int32] | None:
        """Returns guesses of the tokens behind the newest one, at most `most`, or None. They have no stop token."""
        known = self.sequences.get(sequence)
        found = None if known is None else self._find(sequence, known, min(most, NUM_SPECULATIVE_TOKENS))
        if known is None or found is None:
            return None
        count, _ = self._lengths.choose(known.rates, found.kind, found.shares)
        if not count:
            self._guess(sequence, known, found)
            known.pause.begin(self._step)
            return None
        known.kind, known.shares = found.kind, found.shares
        return _before_stop(np.asarray(found.token_ids[:count], np.int32), sequence.stop_tokens)

    def expects(self, sequence: Sequence) -> bool:
        """Returns whether there are likely to be drafts behind the token that the step in flight samples."""
        known = self.sequences.get(sequence)
        found = None if known is None else self._find(sequence, known, 1)
        if known is None or found is None:
            return False
        self._guess(sequence, known, found)
        if self._lengths.choose(known.rates, found.kind, found.shares)[0]:
            return True
        known.pause.begin(self._step)
        return False

    def _guess(self, sequence: Sequence, known: SequenceDrafts, found: Continuation) -> None:
        """Remembers the token that is likely to come behind the match."""
        known.guess = _Guess(sequence.num_tokens, int(found.token_ids[0]), found.kind, found.shares[:1])

    def _find(self, sequence: Sequence, known: SequenceDrafts, most: int) -> Continuation | None:
        """Returns at most `most` tokens that may follow. None: there are none, the sequence pauses, or no drafts pay in
        a step of this size."""
        guess, index = known.guess, known.index
        if guess is not None and sequence.num_tokens > guess.position:
            known.guess = None
            is_right = int(sequence.tokens.view(guess.position, guess.position + 1)[0]) == guess.token_id
            self._lengths.verified(known.rates, guess.kind, guess.shares, int(is_right))
            if is_right:
                known.pause.shorten(self._step)
        if most < 1 or not (self._lengths.may_pay and known.pause.is_over(self._step)):
            return None
        self._num_to_index -= index.extend(self._num_to_index)
        if known.with_shares:
            return self._likeliest(sequence, known, most)
        length, place = index.find() if index.is_current else (0, 0)
        if not place:
            return None
        return Continuation(kind_of(length), index.following(place, most), self._certain[:most])

    def _likeliest(self, sequence: Sequence, known: SequenceDrafts, most: int) -> Continuation | None:
        """Returns the continuation of largest expected gain, from the text itself or its owner's earlier outputs."""
        text, index = sequence.tokens, known.index
        found: list[tuple[int, list[list[int]]]] = []
        if index.is_current:
            length, places = index.find_all(text)
            found.append((kind_of(length), [index.following(place, most).tolist() for place in places]))
        for part in self.earlier.of(known.owner) if known.owner is not None else ():
            length, places = part.index.find_all(text)
            found.append((kind_of(length, from_earlier=True), [part.following(place, most) for place in places]))
        best, best_gain = None, -1.0
        for kind, paths in found:
            token_ids, shares = likeliest(paths, most)
            if token_ids:
                _, gain = self._lengths.choose(known.rates, kind, shares)
                if gain > best_gain:
                    best, best_gain = Continuation(kind, token_ids, shares), gain
        return best

    def verified(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """A step verified drafts of a sequence."""
        known = self.sequences.get(sequence)
        if known is not None:
            self._lengths.verified(known.rates, known.kind, known.shares[:num_drafts], num_accepted)
            if num_accepted:
                known.pause.end()

    def calibrate(self, cost: StepCost) -> None:
        """Starts from this cost. Measured steps correct it: steps of one size do not tell what one more token costs."""
        self._cost = CalibratedCost(cost)

    def step_ended(self, plan: StepPlan, forward_s: float) -> None:
        """A step took `forward_s`."""
        if self.sequences and any(row.sequence in self.sequences for row in plan.rows):
            self.measured(*work_of(plan.rows), forward_s)

    def measured(self, num_tokens: int, num_pairs: float, forward_s: float) -> None:
        """A step took `forward_s`. Pauses are counted in these steps: one may be planned twice."""
        self._step += 1
        self._cost.observe(num_tokens, num_pairs, forward_s)


def _before_stop(drafts: NDArray[np.int32], stop_tokens: frozenset[int]) -> NDArray[np.int32] | None:
    """The drafts before the first stop token: nothing follows it, and the step samples it without its draft."""
    if stop_tokens and not stop_tokens.isdisjoint(drafts.tolist()):
        at = next(at for at, token in enumerate(drafts.tolist()) if token in stop_tokens)
        return drafts[:at] if at else None
    return drafts
