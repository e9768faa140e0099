"""Configuration of a worker's ranks, and of `kvrelay rank`."""

from __future__ import annotations

from typing import Self

from pydantic import Field, field_validator, model_validator

from kvrelay.config.common import CommonConfig, ProcessConfig, is_wildcard

MAX_RANKS = 64
DEVICE_FORM = "auto, cpu, cuda or cuda:N"
WAIT_FOR_WORKER_S = 900.0
"""Time that a rank waits for its worker, whose pod may still fetch its image. Ranks that it starts end with it."""


class RankedConfig(CommonConfig):
    """The fields of a worker that concern its ranks."""

    tensor_parallel_size: int = Field(
        default=1,
        ge=1,
        le=MAX_RANKS,
        description="ranks (processes) among which the heads of the model, or of each of its stages, and their KV are "
        "divided; rank 0 is the worker's own process",
        json_schema_extra={"flags": ["--tp-size", "--tp"]},
    )
    pipeline_parallel_size: int = Field(
        default=1,
        ge=1,
        le=MAX_RANKS,
        description="stages (of tensor_parallel_size processes each) among which the model's layers and their KV are "
        "divided, so that several steps are computed at the same time, each in another stage",
        json_schema_extra={"flags": ["--pp-size", "--pp"]},
    )
    data_parallel_size: int = Field(
        default=1,
        ge=1,
        le=MAX_RANKS,
        description="ranks (workers of their own, each with its requests and KV) among which MLPs and experts are "
        "divided, while attention is whole in each; they take each step together; rank 0 starts the others",
        json_schema_extra={"flags": ["--dp-size", "--dp"]},
    )
    data_parallel_rank: int = Field(
        default=0,
        ge=0,
        lt=MAX_RANKS,
        description="number of this worker among data_parallel_size; above 0: it joins rank 0 at rank_host, rank_port",
    )
    local_ranks: int | None = Field(
        default=None,
        ge=0,
        le=MAX_RANKS - 1,
        description="ranks besides rank 0 that the worker starts on its machine; the others are started by hand, with "
        "`kvrelay rank`, or with data_parallel_rank (default: all)",
    )
    rank_host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="address of the worker's machine at which its other ranks reach it; not a wildcard",
    )
    rank_port: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="port at which the other ranks reach the worker; 0: any free one, if it starts all ranks itself",
    )
    rank_timeout_s: float = Field(
        default=60.0, ge=0.5, le=3600, description="seconds within which all ranks must have joined the worker"
    )

    @property
    def num_ranks(self) -> int:
        """The processes that hold the model of this worker together, rank 0 included."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_processes(self) -> int:
        """The processes of this worker and the other ranks of data_parallel_size."""
        return self.num_ranks * self.data_parallel_size

    @property
    def division(self) -> str:
        """The settings that divide the model among ranks, for messages."""
        sizes = {name: getattr(self, name) for name in ("pipeline_parallel_size", "tensor_parallel_size")}
        dividing = [f"{name} = {size}" for name, size in sizes.items() if size > 1]
        if self.data_parallel_size > 1:
            dividing.append(f"data_parallel_size = {self.data_parallel_size}")
        return " and ".join(dividing) or f"tensor_parallel_size = {self.tensor_parallel_size}"

    @property
    def num_local_ranks(self) -> int:
        """The ranks besides rank 0 that the worker starts itself."""
        others = self.num_processes - 1
        if self.data_parallel_rank:
            return 0
        return others if self.local_ranks is None else self.local_ranks

    @field_validator("rank_host")
    @classmethod
    def _is_one_address(cls, host: str) -> str:
        if is_wildcard(host):
            raise ValueError("must be one address of this machine, at which its other ranks reach the worker")
        return host

    @model_validator(mode="after")
    def _ranks_fit_together(self) -> Self:
        if self.num_ranks > 1 and self.data_parallel_size > 1:
            raise ValueError(f"{self.division}: ranks of data_parallel_size have the whole of attention (allowed: one)")
        if self.data_parallel_rank >= self.data_parallel_size:
            raise ValueError(
                f"data_parallel_rank = {self.data_parallel_rank} of data_parallel_size = {self.data_parallel_size} "
                f"(allowed: 0 to {self.data_parallel_size - 1})"
            )
        if self.data_parallel_rank and not self.rank_port:
            raise ValueError(f"data_parallel_rank = {self.data_parallel_rank} needs the rank_port of rank 0")
        if self.num_processes > MAX_RANKS:
            raise ValueError(f"{self.division}: {self.num_processes} ranks (allowed: up to {MAX_RANKS} together)")
        others = self.num_processes - 1
        if self.num_local_ranks > others:
            raise ValueError(
                f"local_ranks = {self.local_ranks} of {self.division} "
                f"(allowed: 0 to {others}; rank 0 is the worker's own process)"
            )
        if self.num_local_ranks < others and not self.rank_port:
            raise ValueError(
                f"local_ranks = {self.local_ranks} needs a rank_port: ranks that are started by hand must know it"
            )
        return self


class RankConfig(ProcessConfig):
    """Fields of `kvrelay rank`, which listens at `host` for KV blocks. What the model needs comes from the worker."""

    engine: str = Field(
        pattern=r"^(\[[0-9A-Fa-f:.%]+\]|[^:\[\]/]+):\d{1,5}$",
        description="HOST:PORT of the worker, its rank_host and rank_port",
        json_schema_extra={"form": "HOST:PORT"},
    )
    rank: int = Field(ge=1, lt=MAX_RANKS, description="number of this rank; rank 0 is the worker itself")
    model: str | None = Field(
        default=None,
        min_length=1,
        description="directory or hub name of the model on this machine (default: as the worker's)",
    )
    device: str = Field(
        default="auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="auto, cpu, cuda or cuda:N; auto: the CPU",
        json_schema_extra={"form": DEVICE_FORM},
    )
    threads: int | None = Field(
        default=None, ge=1, le=1024, description="CPU threads of this rank (default: one per core)"
    )
