"""Which transports to offer to which decode worker: all that there are, less what did not work with it lately. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from kvrelay.protocol.messages import PeerRef

TRY_AGAIN_AFTER_S = 60.0


class TransportOffers:
    """`names`: this worker's transports, best first."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = list(names)
        self._failed: dict[tuple[PeerRef, str], float] = {}

    def failed(self, peer: PeerRef, name: str, now: float) -> None:
        """A push to this peer could not be made."""
        self._failed = {pair: at for pair, at in self._failed.items() if now - at < TRY_AGAIN_AFTER_S}
        self._failed[peer, name] = now

    def to(self, peer: PeerRef, now: float) -> list[str]:
        """Best first; all of them where none is left."""
        left = [
            name
            for name in self._names
            if now - self._failed.get((peer, name), -TRY_AGAIN_AFTER_S) >= TRY_AGAIN_AFTER_S
        ]
        return left or list(self._names)
