"""The endpoint of a NIXL receiver. `Granted` carries it, so no metadata server is needed."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast, get_args

from kvrelay.transfer.endpoints import Endpoint, MalformedEndpoint
from kvrelay.transfer.nixl_agent import Region
from kvrelay.transfer.pool_memory import Segment

METADATA_LIMIT_BYTES = 1 << 20
POOL_LIMIT_BLOCKS = 1 << 28


@dataclass(frozen=True, slots=True)
class NixlEndpoint:
    """The receiver's agent, which has another name after every start, its metadata, and where its pool lies.

    `process`: the identity of its process; empty if unknown.
    """

    agent: str
    metadata: bytes
    region: Region
    process: str = ""

    def encode(self) -> Endpoint:
        """Encodes the endpoint as strings for `Granted`."""
        return {
            "agent": self.agent,
            "metadata": base64.b64encode(self.metadata).decode(),
            "pool_address": str(self.region.address),
            "num_blocks": str(self.region.num_blocks),
            "block_bytes": str(self.region.block_bytes),
            "segment": self.region.segment,
            "device_id": str(self.region.device_id),
            "process": self.process,
        }

    @staticmethod
    def decode(words: Mapping[str, str]) -> NixlEndpoint:
        """Raises MalformedEndpoint if a word is missing or has no valid value."""
        try:
            metadata = base64.b64decode(words["metadata"], validate=True)
            segment = words["segment"]
            if segment not in get_args(Segment):
                raise ValueError(f"segment {segment!r}")
            region = Region(
                int(words["pool_address"]),
                int(words["num_blocks"]),
                int(words["block_bytes"]),
                cast("Segment", segment),
                int(words["device_id"]),
            )
            agent = words["agent"]
        except (KeyError, ValueError, binascii.Error) as error:
            raise MalformedEndpoint(f"no endpoint of a NIXL receiver: {error!r}") from error
        if not agent or not 0 < len(metadata) <= METADATA_LIMIT_BYTES:
            raise MalformedEndpoint("no endpoint of a NIXL receiver: no agent or no metadata")
        if not (
            0 < region.address < 1 << 64
            and 0 < region.num_blocks <= POOL_LIMIT_BLOCKS
            and region.block_bytes > 0
            and region.device_id >= 0
        ):
            raise MalformedEndpoint(f"no pool lies at {region}")
        return NixlEndpoint(agent, metadata, region, words.get("process", ""))
