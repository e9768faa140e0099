"""Configuration of `kvrelay up`, beside what it passes on to the services."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from kvrelay.config.common import NO_REDIS

_DEVICE = re.compile(r"^(\d{1,4}|(GPU|MIG)-[0-9A-Za-z/-]{1,120})$")


class UpConfig(BaseModel):
    """How many of what to start, and where."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefill: int = Field(
        default=1, ge=0, le=1024, description="prefill workers to start; with none, decode workers do both"
    )
    decode: int = Field(default=1, ge=1, le=1024, description="decode workers to start")
    workers_per_process: int = Field(
        default=1, ge=1, le=1024, description="workers that share a process, with backend = simulated"
    )
    router_processes: int = Field(
        default=1,
        ge=1,
        le=64,
        description="processes of the router, which share its port",
        json_schema_extra={"flags": ["--router-workers"]},
    )
    port: int = Field(default=8000, ge=0, le=65535, description="port of the HTTP endpoint; 0: any free one")
    host: str = Field(default="127.0.0.1", min_length=1, description="address of the HTTP endpoint")
    redis_url: str | None = Field(
        default=None,
        min_length=1,
        description="Redis to use (default: one of its own, which ends with it)",
        json_schema_extra={"flags": ["--redis"]},
    )
    metrics_port: int | None = Field(
        default=None,
        ge=1,
        le=65000,
        description="first port of the services' pages /metrics, for Prometheus: one for each process of the router, "
        "then one for each worker, prefill first (default: none)",
    )
    devices: tuple[str, ...] = Field(
        default=(),
        description="GPUs for the workers, as nvidia-smi numbers them or by UUID: 0,1 or GPU-...,MIG-...; divided "
        "between prefill and decode, or shared by all where there is one (default: what device says, for every worker)",
        json_schema_extra={"list": True},
    )
    prefill_devices: tuple[str, ...] = Field(
        default=(),
        description="GPUs on which the prefill workers take turns, in place of devices; with decode_devices, which may "
        "name the same",
        json_schema_extra={"list": True},
    )
    decode_devices: tuple[str, ...] = Field(
        default=(), description="GPUs on which the decode workers take turns", json_schema_extra={"list": True}
    )
    prefill_memory_utilization: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="share of its GPU's memory for each prefill worker, with devices (default: what others leave of "
        "memory_utilization, or of 0.9, in equal parts)",
    )
    decode_memory_utilization: float | None = Field(
        default=None, gt=0, le=1, description="share of its GPU's memory for each decode worker, with devices"
    )
    state_dir: Path = Field(default=Path(".kvrelay"), description="directory for the services' logs")
    verbose: bool = Field(default=False, description="show the services' logs here instead of writing them to files")

    @field_validator("redis_url")
    @classmethod
    def _is_a_redis(cls, url: str | None) -> str | None:
        if url == NO_REDIS:
            raise ValueError("its services find each other through Redis: leave it out for one of its own")
        return url

    @field_validator("devices", "prefill_devices", "decode_devices", mode="before")
    @classmethod
    def _as_text(cls, devices: Any) -> Any:
        """A file may hold numbers."""
        if isinstance(devices, list | tuple):
            return tuple(str(each) if type(each) is int else each for each in devices)
        return devices

    @field_validator("devices", "prefill_devices", "decode_devices")
    @classmethod
    def _names_devices(cls, devices: tuple[str, ...]) -> tuple[str, ...]:
        if not devices:
            raise ValueError("names no GPU: give one or more, or leave it out")
        for device in devices:
            if not _DEVICE.match(device):
                raise ValueError(f"{device!r} is no GPU (allowed: a number from 0 on, GPU-UUID or MIG-UUID)")
        if len(set(devices)) < len(devices):
            raise ValueError("names a GPU twice: workers that share one are placed on it by turns")
        return devices

    @property
    def places_workers(self) -> bool:
        """Whether the workers are told which GPU is theirs."""
        return bool(self.devices or self.decode_devices)

    @model_validator(mode="after")
    def _devices_fit_together(self) -> Self:
        if self.devices and (self.prefill_devices or self.decode_devices):
            raise ValueError("devices stands for prefill_devices and decode_devices: give the one or the two")
        if self.prefill_devices and not self.prefill:
            raise ValueError("prefill_devices without prefill workers (prefill = 0)")
        if self.prefill_devices and not self.decode_devices:
            raise ValueError("prefill_devices needs decode_devices beside it")
        if self.decode_devices and self.prefill and not self.prefill_devices:
            raise ValueError("decode_devices needs prefill_devices beside it, unless prefill = 0")
        for name in ("prefill_memory_utilization", "decode_memory_utilization"):
            if getattr(self, name) is not None and not self.places_workers:
                raise ValueError(f"{name} needs devices: it is a share of the memory of a GPU that is named")
        return self
