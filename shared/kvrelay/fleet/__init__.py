"""The fleet as Redis knows it: which workers there are, under which lease, and how loaded they are."""

from kvrelay.fleet.records import WorkerRecord
from kvrelay.fleet.registry import (
    FleetFull,
    LeaseLost,
    Registry,
    RegistryError,
    RegistryMisconfigured,
    RegistryUnavailable,
)

__all__ = [
    "FleetFull",
    "LeaseLost",
    "Registry",
    "RegistryError",
    "RegistryMisconfigured",
    "RegistryUnavailable",
    "WorkerRecord",
]
