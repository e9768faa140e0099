"""Encryption of ZMQ traffic between the processes of a fleet (CURVE), with one key for the fleet, or two while it
rotates.

A process guards its sockets with the first key of its file, and advertises them as `ADDRESS#FINGERPRINT`. A client
connects with that very key, if its own file has it: it must know the public key to encrypt at all, and proves the
secret one because the gate (ZAP, RFC 27 of ZeroMQ) admits no other client key. So an address that anybody else wrote
gains nothing, and keys rotate by files that hold the new key beside the old one.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import zmq

from kvrelay.logs import LimitedLog

log = logging.getLogger(__name__)

OVERHEAD_BYTES = 64
"""Upper bound of the encryption overhead per message."""
FINGERPRINT_CHARS = 8
_DOMAIN = b"kvrelay"


class BadKeyFile(ValueError):
    """The file contains no valid key. The message has the reason."""


class KeysDiffer(ValueError):
    """An address cannot be used with the keys of this process. The message says why, after the peer's name."""


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

    @property
    def fingerprint(self) -> str:
        """Tells the keys of a fleet apart, in addresses and for people. Reveals nothing of the secret key."""
        return hashlib.sha256(self.public).hexdigest()[:FINGERPRINT_CHARS]

    def text(self) -> str:
        """Contents of a key file."""
        head = f"# A fleet's secret key {self.fingerprint}. Anyone who has it can read and forge the fleet's messages."
        return f"{head}\n{self.secret.decode()}\n"

    def guard_server(self, socket: zmq.Socket[bytes]) -> None:
        """Enables CURVE on a socket before it binds. Its context needs `open_curve_gate`."""
        socket.curve_server = True
        socket.curve_secretkey = self.secret
        socket.zap_domain = _DOMAIN

    def guard_client(self, socket: zmq.Socket[bytes]) -> None:
        """Enables CURVE on a socket before it connects to one that this key guards."""
        socket.curve_serverkey = self.public
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret


def read_keys(path: Path) -> tuple[CurveKey, ...]:
    """Reads the secret keys of a key file, one a line, skipping lines that begin with "# ". Raises BadKeyFile."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="latin-1").splitlines()]
    except OSError as error:
        raise BadKeyFile(f"cannot read {path}: {error.strerror}") from error
    secrets = [line.encode() for line in lines if line and not line.startswith("# ")]
    try:
        keys = tuple(CurveKey(secret, zmq.curve_public(secret)) for secret in secrets)
    except (ValueError, zmq.ZMQError):
        raise BadKeyFile(f"{path} holds a line that is no key: `kvrelay keys FILE` makes one") from None
    if not keys:
        raise BadKeyFile(f"{path} holds no key: `kvrelay keys FILE` makes one")
    return keys


class CurveKeys:
    """The keys of a process: `own` guards its sockets to its end, all others are for peers."""

    def __init__(self, own: CurveKey, *others: CurveKey, path: Path | None = None) -> None:
        """`path`: the keys are read from there again for each connection."""
        self.own = own
        self._others = others
        self._path = path
        self._log = LimitedLog(log)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises BadKeyFile."""
        return cls(*read_keys(path), path=path)

    def known(self) -> dict[str, CurveKey]:
        """By fingerprint, its own first. Peers may have restarted with a key that was added to the file meanwhile."""
        if self._path is not None:
            try:
                self._others = read_keys(self._path)
            except BadKeyFile as error:
                self._log.warning("file", "goes on with the keys that it has: %s", error)
        return {key.fingerprint: key for key in (self.own, *self._others)}

    def __str__(self) -> str:
        fingerprints = ", ".join(self.known())
        return fingerprints if self._path is None else f"{fingerprints} in {self._path}"


def advertised(address: str, curve: CurveKeys | None) -> str:
    """The address of a socket that `curve` guards, as peers must know it."""
    return address if curve is None else f"{address}#{curve.own.fingerprint}"


def location(address: str) -> str:
    """What ZMQ connects to."""
    return address.partition("#")[0]


def key_for(address: str, curve: CurveKeys | None) -> CurveKey | None:
    """The key with which to connect to an advertised address; None: without encryption. Raises KeysDiffer."""
    fingerprint = address.partition("#")[2][:FINGERPRINT_CHARS]
    known = {} if curve is None else curve.known()
    if fingerprint in known:
        return known[fingerprint]
    if curve is None and not fingerprint:
        return None
    theirs = f"encrypts with key {fingerprint}" if fingerprint else "does not encrypt"
    ours = "has no curve_key_file" if curve is None else f"has {curve}"
    raise KeysDiffer(f"it {theirs}, this process {ours}: both need a key in common, see curve_key_file")
