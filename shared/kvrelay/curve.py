"""Encryption of ZMQ traffic between the processes of a fleet (CURVE), with one key for the fleet.

All processes share one key pair. A client must know the public key to encrypt at all, and proves the secret key because
the gate (ZAP, RFC 27 of ZeroMQ) admits no other client key.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import zmq

OVERHEAD_BYTES = 64
"""Upper bound of the encryption overhead per message."""
_Z85_KEY = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_DOMAIN = b"kvrelay"


class BadKeyFile(ValueError):
    """The file contains no valid key. The message has the reason."""


@dataclass(frozen=True, slots=True)
class CurveKey:
    """A key pair in Z85."""

    secret: bytes = field(repr=False)
    public: bytes

    @classmethod
    def new(cls) -> Self:
        """Generates a random key pair."""
        public, secret = zmq.curve_keypair()
        return cls(secret, public)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads the secret key from a key file, skipping lines that begin with "# ". Raises BadKeyFile."""
        try:
            lines = [line.strip() for line in path.read_text(encoding="ascii").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise BadKeyFile(f"cannot read {path}: {error}") from error
        keys = [line for line in lines if line and not line.startswith("# ")]
        if len(keys) != 1 or not _Z85_KEY.fullmatch(keys[0]):
            raise BadKeyFile(f"{path} holds no key: `kvrelay keys FILE` makes one")
        secret = keys[0].encode()
        try:
            return cls(secret, zmq.curve_public(secret))
        except (ValueError, zmq.ZMQError) as error:
            raise BadKeyFile(f"{path} holds no key: {error}") from error

    def text(self) -> str:
        """Contents of a key file."""
        head = "# A fleet's secret key. Anyone who has it can read and forge the fleet's messages."
        return f"{head}\n{self.secret.decode()}\n"

    def guard_server(self, socket: zmq.Socket[bytes]) -> None:
        """Enables CURVE on a socket before it binds. Its context needs `open_curve_gate`."""
        socket.curve_server = True
        socket.curve_secretkey = self.secret
        socket.zap_domain = _DOMAIN

    def guard_client(self, socket: zmq.Socket[bytes]) -> None:
        """Enables CURVE on a socket before it connects."""
        socket.curve_serverkey = self.public
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret
