"""The fleet as Redis knows it: which workers there are, under which lease, and how loaded they are."""

from kvrelay.fleet.worker_record import WorkerRecord
from kvrelay.fleet.worker_registry import (
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
