"""Configuration of `kvrelay up`, beside what it passes on to the services."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator

from kvrelay.config.common import NO_REDIS


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
    state_dir: Path = Field(default=Path(".kvrelay"), description="directory for the services' logs")
    verbose: bool = Field(default=False, description="show the services' logs here instead of writing them to files")

    @field_validator("redis_url")
    @classmethod
    def _is_a_redis(cls, url: str | None) -> str | None:
        if url == NO_REDIS:
            raise ValueError("its services find each other through Redis: leave it out for one of its own")
        return url
