"""Worker registry, key limits and prefix index in Redis."""

from kvrelay.fleet.worker_registry import (
    FleetFull,
    LeaseLost,
    Registry,
    RegistryError,
    RegistryMisconfigured,
    RegistryUnavailable,
    WorkerIdTaken,
    WorkerRecord,
)

__all__ = [
    "FleetFull",
    "LeaseLost",
    "Registry",
    "RegistryError",
    "RegistryMisconfigured",
    "RegistryUnavailable",
    "WorkerIdTaken",
    "WorkerRecord",
]
