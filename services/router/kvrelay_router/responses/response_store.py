"""Keeps responses for GET and for requests that continue them, in bounded memory of this process."""

from __future__ import annotations

from collections import OrderedDict

import msgspec


class StoredResponse(msgspec.Struct, frozen=True):
    """JSON of a response, and of the items of the whole conversation up to and including its output, whose ids are
    `output_ids`.
    """

    response: bytes
    items: tuple[bytes, ...]
    output_ids: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        return len(self.response) + sum(map(len, self.items)) + sum(map(len, self.output_ids))

    def output_item(self, item_id: str) -> bytes | None:
        """JSON of an item of its output."""
        if item_id not in self.output_ids:
            return None
        return self.items[self.output_ids.index(item_id) - len(self.output_ids)]


class ResponseStore:
    """Drops the responses that were not used for the longest time. Each API key has its own."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._responses: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self.num_bytes = 0

    @property
    def is_open(self) -> bool:
        return self._max_bytes > 0

    def put(self, owner: str, response_id: str, stored: StoredResponse) -> None:
        """Stores a response, unless it alone is too large."""
        if stored.num_bytes > self._max_bytes:
            return
        self.delete(owner, response_id)
        self._responses[owner, response_id] = stored
        self.num_bytes += stored.num_bytes
        while self.num_bytes > self._max_bytes:
            _, oldest = self._responses.popitem(last=False)
            self.num_bytes -= oldest.num_bytes

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        found = self._responses.get((owner, response_id))
        if found is not None:
            self._responses.move_to_end((owner, response_id))
        return found

    def output_item(self, owner: str, item_id: str) -> bytes | None:
        """JSON of an item of the output of a stored response. Its id names the response."""
        _, _, unique = item_id.partition("_")
        found = self.get(owner, f"resp_{unique.partition('_')[0]}")
        return None if found is None else found.output_item(item_id)

    def delete(self, owner: str, response_id: str) -> bool:
        """Returns whether it was there."""
        found = self._responses.pop((owner, response_id), None)
        if found is None:
            return False
        self.num_bytes -= found.num_bytes
        return True
