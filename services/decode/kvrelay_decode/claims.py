"""Room that is set aside for the rest of a group: the other samples of a request of which one was granted its blocks.

A sample comes with the number of others that its sender is about to ask for. Their claims end as they are granted or
given up, and at the latest when none of the group holds anything here any more: some may never ask, because they ended
with their first token, or went elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.memory.block_manager import BlockManager
from kvrelay.scheduling.sequence import Sequence
from kvrelay_decode.request import DecodeRequest


@dataclass(slots=True)
class _Claim:
    num_samples: int
    num_blocks_each: int


class SampleClaims:
    """`requests` are all of the worker's; `wishes` those of them that hold nothing."""

    def __init__(
        self, blocks: BlockManager, requests: Mapping[SequenceKey, DecodeRequest], wishes: Collection[SequenceKey]
    ) -> None:
        self._blocks = blocks
        self._requests = requests
        self._wishes = wishes
        self._claims: dict[str, _Claim] = {}

    def granted(self, request: DecodeRequest, max_running: int) -> None:
        """A wish got its blocks: one of those set aside is taken, or the others' are set aside."""
        group = request.sequence.sample_group
        if group in self._claims:
            self.given_up(request)
        elif num_others := self.num_others(request, max_running):
            self._claims[group] = _Claim(num_others, self._num_blocks_each(request.sequence))

    def given_up(self, request: DecodeRequest) -> None:
        """A wish is no more."""
        claim = self._claims.get(request.sequence.sample_group)
        if claim is not None:
            claim.num_samples -= 1
            if not claim.num_samples:
                del self._claims[request.sequence.sample_group]

    def has(self, request: DecodeRequest) -> bool:
        """Whether room is set aside for this wish."""
        return request.sequence.sample_group in self._claims

    def num_others(self, request: DecodeRequest, max_running: int) -> int:
        """Those that are granted their blocks with a wish, or none. Where all of them could never be: 0."""
        if not request.sequence.sample_group or self.has(request):
            return 0
        num_blocks = self._blocks.num_at_admission(request.sequence)
        num_blocks += request.num_siblings * self._num_blocks_each(request.sequence)
        fits = 1 + request.num_siblings <= max_running and num_blocks <= self._blocks.pool.num_blocks
        return request.num_siblings if fits else 0

    def num_blocks_of_others(self, request: DecodeRequest, max_running: int) -> int:
        """Blocks that those take beside the wish."""
        return self.num_others(request, max_running) * self._num_blocks_each(request.sequence)

    def totals(self) -> tuple[int, int]:
        """Running sequences and blocks that are set aside. O(requests) while anything is."""
        if self._claims:
            here = {each.sequence.sample_group for key, each in self._requests.items() if key not in self._wishes}
            for group in self._claims.keys() - here:
                del self._claims[group]
        num_samples = sum(claim.num_samples for claim in self._claims.values())
        return num_samples, sum(claim.num_samples * claim.num_blocks_each for claim in self._claims.values())

    def _num_blocks_each(self, sequence: Sequence) -> int:
        return self._blocks.num_own(sequence, sequence)
