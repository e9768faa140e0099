"""Configuration of `kvrelay up` itself. It passes other flags on to the services."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from kvrelay.config.common import NO_REDIS
from kvrelay.config.ranks import MAX_RANKS

_DEVICE = re.compile(r"^(\d{1,4}|(GPU|MIG)-[0-9A-Za-z/-]{1,120})$")


class UpConfig(BaseModel):
    """Numbers of services to start, their ports and their GPUs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefill: int = Field(
        default=1, ge=0, le=1024, description="prefill workers to start; 0: decode workers also compute prompts"
    )
    decode: int = Field(default=1, ge=1, le=1024, description="decode workers to start")
    port: int = Field(default=8000, ge=0, le=65535, description="port of the HTTP endpoint; 0: any free one")
    host: str = Field(default="127.0.0.1", min_length=1, description="address of the HTTP endpoint")
    redis_url: str | None = Field(
        default=None,
        min_length=1,
        description="Redis to use (default: start one, and stop it at the end)",
        json_schema_extra={"flags": ["--redis"]},
    )
    metrics_port: int | None = Field(
        default=None,
        ge=1,
        le=65000,
        description="first port of the services' /metrics pages for Prometheus: the router's, then one per worker, "
        "prefill first (default: none)",
    )
    gpus: tuple[str, ...] = Field(
        default=(),
        description="GPUs for the workers, by nvidia-smi number or UUID (0,1 or GPU-...,MIG-...), divided between "
        "prefill and decode; a single one is shared",
        json_schema_extra={"list": True},
    )
    prefill_gpus: tuple[str, ...] = Field(
        default=(),
        description="GPUs of the prefill workers, used in turn, instead of gpus; needs decode_gpus, which may "
        "name the same GPUs",
        json_schema_extra={"list": True},
    )
    decode_gpus: tuple[str, ...] = Field(
        default=(), description="GPUs of the decode workers, used in turn", json_schema_extra={"list": True}
    )
    prefill_memory_utilization: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="share of a GPU's memory for each prefill worker, with gpus (default: an equal part of what "
        "remains of memory_utilization, or of 0.9)",
    )
    decode_memory_utilization: float | None = Field(
        default=None, gt=0, le=1, description="share of a GPU's memory for each decode worker, with gpus"
    )
    prefill_tensor_parallel_size: int | None = Field(
        default=None,
        ge=1,
        le=MAX_RANKS,
        description="tensor_parallel_size of each prefill worker (default: as tensor_parallel_size says)",
    )
    decode_tensor_parallel_size: int | None = Field(
        default=None,
        ge=1,
        le=MAX_RANKS,
        description="tensor_parallel_size of each decode worker (default: as tensor_parallel_size says)",
    )
    state_dir: Path = Field(
        default=Path(".kvrelay"),
        description="directory of the services' logs",
        json_schema_extra={"metavar": "DIR"},
    )
    detach: bool = Field(
        default=False,
        description="return when everything is ready, and run in the background until `kvrelay stop`",
    )
    verbose: bool = Field(default=False, description="show the services' logs on the terminal instead of writing files")

    @field_validator("redis_url")
    @classmethod
    def _is_a_redis(cls, url: str | None) -> str | None:
        if url == NO_REDIS:
            raise ValueError("kvrelay up needs Redis: leave it out to start one")
        return url

    @field_validator("gpus", "prefill_gpus", "decode_gpus", mode="before")
    @classmethod
    def _as_text(cls, gpus: Any) -> Any:
        """TOML files may have numbers."""
        if isinstance(gpus, list | tuple):
            return tuple(str(each) if type(each) is int else each for each in gpus)
        return gpus

    @field_validator("gpus", "prefill_gpus", "decode_gpus")
    @classmethod
    def _names_devices(cls, gpus: tuple[str, ...]) -> tuple[str, ...]:
        if not gpus:
            raise ValueError("names no GPU: name at least one, or leave it out")
        for device in gpus:
            if not _DEVICE.match(device):
                raise ValueError(f"{device!r} is not a GPU (allowed: a number from 0 on, GPU-UUID or MIG-UUID)")
        return gpus

    @property
    def places_workers(self) -> bool:
        """Returns whether `kvrelay up` assigns GPUs to workers."""
        return bool(self.gpus or self.decode_gpus)

    @model_validator(mode="after")
    def _has_logs_in_the_background(self) -> Self:
        if self.detach and self.verbose:
            raise ValueError("detach excludes verbose: there is no terminal to show logs on")
        return self

    @model_validator(mode="after")
    def _ranks_have_workers(self) -> Self:
        if self.prefill_tensor_parallel_size is not None and not self.prefill:
            raise ValueError("prefill_tensor_parallel_size without prefill workers (prefill = 0)")
        return self

    @model_validator(mode="after")
    def _devices_fit_together(self) -> Self:
        if self.gpus and (self.prefill_gpus or self.decode_gpus):
            raise ValueError("gpus excludes prefill_gpus and decode_gpus: set either")
        if self.prefill_gpus and not self.prefill:
            raise ValueError("prefill_gpus without prefill workers (prefill = 0)")
        if self.prefill_gpus and not self.decode_gpus:
            raise ValueError("prefill_gpus needs decode_gpus")
        if self.decode_gpus and self.prefill and not self.prefill_gpus:
            raise ValueError("decode_gpus needs prefill_gpus, unless prefill = 0")
        for name in ("prefill_memory_utilization", "decode_memory_utilization"):
            if getattr(self, name) is not None and not self.places_workers:
                raise ValueError(f"{name} needs gpus: it is a share of the memory of a named GPU")
        return self
