"""Configuration of a worker: prefill and decode have the same."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ByteSize, Field, field_validator, model_validator

from kvrelay.config.common import CommonConfig
from kvrelay.engine.graph_sizes import default_sizes
from kvrelay.scheduling.policies.scheduler_registry import DEFAULT_SCHEDULER, WHOLE_PROMPTS, check_scheduler_name
from kvrelay.scheduling.scheduler_settings import Chunking, Preemption, QueueOrderName, Retraction, SchedulerSettings
from kvrelay.simulated.profiles import BUILT_IN, find_profile

Role = Literal["prefill", "decode"]
MIB = 1 << 20


def default_worker_id(data: dict[str, Any]) -> str:
    """Role and eight random hex digits."""
    return f"{data.get('role', 'worker')}-{secrets.token_hex(4)}"


class WorkerConfig(CommonConfig):
    """One worker. Sizes in tokens, blocks or bytes as named; times in seconds."""

    role: Role = Field(description="set by the service itself", json_schema_extra={"flags": None})
    worker_id: str = Field(
        default_factory=default_worker_id,
        pattern=r"^[A-Za-z0-9_.-]{1,64}$",
        description="name of this worker, unique in the fleet (default: role and random digits)",
    )
    num_workers: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="workers in this process, with backend = simulated; the ids of several end in -0, -1 and so on",
    )
    port: int = Field(default=0, ge=0, le=65535, description="port of the inbox for control messages; 0: any free one")
    transfer_port: int = Field(default=0, ge=0, le=65535, description="port for incoming KV blocks; 0: any free one")
    http_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="port of the pages /health and /ready, for probes, /metrics, for Prometheus, and /worker, for the "
        "static_workers of routers; 0: any free one (default: none)",
    )
    http_host: str = Field(default="127.0.0.1", min_length=1, description="address to listen on for these pages")
    transfer: Literal["auto", "nixl", "zmq"] = Field(
        default="auto",
        description="how KV blocks travel; auto: by nixl between workers that both have it, by zmq otherwise",
    )
    transfer_checksums: bool = Field(
        default=False,
        description="send a checksum with each KV block; decode verifies it and asks again for a block that fails",
    )
    push_when: Literal["chunk", "prompt"] = Field(
        default="chunk",
        description="prefill sends a prompt's KV blocks as each chunk is computed; or all after the last chunk, to "
        "measure what sending meanwhile is worth",
    )
    nixl_transports: str = Field(
        default="",
        pattern=r"^[a-z0-9_,^:]*$",
        description="what NIXL's UCX may use, as in UCX_TLS: tcp, or rc,cuda_ipc,cuda_copy (default: what UCX finds)",
    )

    backend: Literal["auto", "simulated"] = Field(
        default="auto",
        description="what computes: auto: the model, on the device; simulated: nothing, a step takes the time that "
        "profile says and its tokens are made up",
    )
    profile: str = Field(
        default="llama3-8b-h100",
        description=f"of backend = simulated: {', '.join(BUILT_IN)}, or a JSON file as `kvrelay measure` writes it",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="type of weights, and of KV unless kv_cache_dtype says otherwise; auto: the checkpoint's, or "
        "float32 where the CPU lacks it",
    )
    kv_cache_dtype: Literal["auto", "fp8_e4m3", "fp8_e5m2"] = Field(
        default="auto",
        description="type of keys and values in the pool; auto: the model's, as dtype says; fp8_e4m3, fp8_e5m2: 8-bit "
        "floats, which hold twice the tokens of bfloat16 and four times those of float32, and cost some accuracy",
    )
    load_format: Literal["auto", "dummy"] = Field(
        default="auto",
        description="auto: the checkpoint's weights; dummy: random ones of the model's shape, made on the device, to "
        "measure a model without its weights: config.json and tokenizer are all that must be there",
    )
    device: str = Field(
        default="auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="auto, cpu, cuda or cuda:N; auto: the CPU. GPUs are experimental",
    )
    cuda_graphs: bool = Field(
        default=True,
        description="on a decode worker's GPU, capture decoding steps at the start and replay them; off: launch every "
        "kernel of every step",
    )
    cuda_graph_sizes: tuple[int, ...] = Field(
        default=(),
        description="numbers of sequences to capture a decoding step for, each 1 to max_running; a step is padded to "
        "the next of them (default: 1, 2, 4, multiples of 8 up to 128, of 16 up to 256, of 32 up to 512 and so on, up "
        "to max_running)",
        json_schema_extra={"list": True},
    )
    cascade_attention: bool = Field(
        default=False,
        description="on a GPU, sequences that decode behind the same prefix read its KV together, in steps where that "
        "saves more than its kernels cost; experimental",
    )
    threads: int | None = Field(
        default=None, ge=1, le=1024, description="CPU threads of the forward pass (default: one per core)"
    )

    block_size: int = Field(default=16, ge=8, le=128, description="tokens in a block; a power of two")
    num_blocks: int | None = Field(
        default=None, ge=2, description="blocks in the pool (default: as many as the KV memory holds)"
    )
    kv_memory_bytes: ByteSize | None = Field(
        default=None,
        ge=MIB,
        description="memory of the pool when num_blocks is not given, as in 512MiB or 4GiB (default: 1GiB)",
    )
    memory_utilization: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="share of the machine's memory, or of its GPU's, for this worker, when neither num_blocks nor "
        "kv_memory_bytes is given: the pool gets what the weights and the largest step, which is run to measure it, "
        "leave",
    )
    max_model_len: int | None = Field(
        default=None, ge=2, description="longest sequence in tokens, prompt and output (default: the model's own)"
    )
    prefix_cache: bool = Field(default=True, description="keep the blocks of finished prompts for prompts like them")
    prefix_lookup: Literal["tree", "table"] = Field(
        default="tree",
        description="what a prompt may share: any prefix of blocks; or whole sequences only, for comparison",
    )
    index_interval_s: float = Field(
        default=0.05,
        ge=0.001,
        le=60,
        description="time between batches of cache changes to the prefix index, in seconds",
    )

    token_budget: int = Field(default=512, ge=1, le=1 << 20, description="tokens that one step may hold")
    max_running: int = Field(
        default=256, ge=1, le=1 << 16, description="sequences that hold blocks at a time; at most token_budget"
    )

    scheduler: str = Field(
        default=DEFAULT_SCHEDULER,
        description="what a step holds: sarathi, vllm, simple_chunking, orca, faster_transformer, or the name of an "
        "entry point kvrelay.schedulers",
    )
    chunking: Chunking = Field(
        default="fixed", description="how sarathi and simple_chunking cut prompts: in tokens, or in equal time"
    )
    queue_order: QueueOrderName = Field(
        default="fcfs",
        description="who is admitted first: first come, longest cached prefix, heaviest branch of prompts, smallest "
        "priority number, shortest job, or anybody",
    )
    queue_starvation_bound: int = Field(
        default=64, ge=1, le=1 << 20, description="admissions after which a waiting sequence is next in any order"
    )
    retraction: Retraction = Field(
        default="latest", description="who loses its blocks when they run out: the latest, or who has the least output"
    )
    preemption: Preemption = Field(
        default="auto",
        description="what becomes of the KV of a sequence that loses its blocks on a decode worker: computed again, or "
        "copied to the swap space (if it has room) and back; auto: what is estimated to take less time",
    )
    swap_space: ByteSize | None = Field(
        default=None,
        ge=0,
        le=1 << 44,
        description="host memory for the KV of preempted sequences on a decode worker, as in 512MiB or 4GiB; 0: none "
        "(default: a quarter of the pool's memory; on a CPU pages are taken when they are first written)",
    )
    new_token_ratio: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="share of the output still allowed to running sequences that admission leaves room for, at first; "
        "it adapts. 0: none",
    )
    group_samples: bool = Field(
        default=True,
        description="whether the n samples of a request get, lose and regain their blocks together, as beams always do",
    )

    prefill_delayer: bool = Field(
        default=False,
        description="decode workers: prompts wait until the running sequences leave slots for a whole batch of them",
    )
    prefill_delayer_max_passes: int = Field(
        default=30,
        ge=1,
        le=1 << 16,
        description="passes less one that a prompt waits for those of the group's other workers",
    )
    prefill_delayer_max_wait_s: float = Field(
        default=1.0,
        gt=0,
        le=60,
        description="longest time that the delayer holds a prompt back, whatever the reason, in seconds",
    )
    prefill_delayer_group: str = Field(
        default="",
        pattern=r"^[\w.-]{0,64}$",
        description="name of a group of decode workers that let prompts in together; they find each other in the "
        "registry (default: this worker alone)",
    )
    prefill_delayer_silence_s: float = Field(
        default=1.0,
        ge=0.3,
        le=60,
        description="silence after which a worker of the group is left out and holds up no prompt, in seconds",
    )
    prefill_delayer_low_watermark: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="share of the KV pool in use below which a prompt does not wait for those of the group's others "
        "(default: it always waits)",
    )
    overlap: bool = Field(
        default=True,
        description="plan the next step, on a GPU launch it, and publish the last one while a step is computed; off: "
        "one after the other",
    )

    metrics_file: Path | None = Field(
        default=None,
        description="file for one JSON line a step and a sequence; {worker_id} in it is replaced (default: none)",
    )

    lease_ttl_s: float = Field(
        default=5.0, ge=0.5, le=600, description="time after which a silent worker leaves the registry, in seconds"
    )
    lease_interval_s: float = Field(
        default=1.0, ge=0.05, le=60, description="time between renewals of the lease, in seconds"
    )
    drain_timeout_s: float = Field(
        default=30.0, ge=0, le=3600, description="time for running requests to finish after SIGTERM, in seconds"
    )

    @field_validator("block_size")
    @classmethod
    def _power_of_two(cls, size: int) -> int:
        if size & (size - 1):
            raise ValueError("must be a power of two: 8, 16, 32, 64 or 128")
        return size

    @field_validator("scheduler")
    @classmethod
    def _known_scheduler(cls, name: str) -> str:
        return check_scheduler_name(name)

    @field_validator("profile")
    @classmethod
    def _known_profile(cls, name: str) -> str:
        find_profile(name)
        return name

    def each_worker(self) -> list[Self]:
        """The configuration of each worker of this process."""
        if self.num_workers == 1:
            return [self]
        names = [f"{self.worker_id}-{number}" for number in range(self.num_workers)]
        return [self.model_copy(update={"worker_id": name, "num_workers": 1}) for name in names]

    @property
    def transfer_choice(self) -> Literal["auto", "nixl", "zmq"]:
        """`transfer`; what stands for simulated K/V is small, and travels by zmq unless NIXL is asked for by name."""
        return "zmq" if self.backend == "simulated" and self.transfer == "auto" else self.transfer

    @property
    def publishes_prefixes(self) -> bool:
        """Whether the fleet hears what this worker's cache holds. Only the tree tells what joins and leaves it."""
        return self.uses_redis and self.prefix_index and self.prefix_cache and self.prefix_lookup == "tree"

    @property
    def scheduler_settings(self) -> SchedulerSettings:
        """What the scheduler's policy is told."""
        return SchedulerSettings(
            queue_order=self.queue_order,
            queue_starvation_bound=self.queue_starvation_bound,
            chunking=self.chunking,
            retraction=self.retraction,
            new_token_ratio=self.new_token_ratio,
            preemption=self.preemption,
            group_samples=self.group_samples,
        )

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """For how many sequences a decoding step is captured on a GPU, rising; prefill workers have no such steps."""
        if not self.cuda_graphs or self.role == "prefill":
            return ()
        return tuple(sorted(set(self.cuda_graph_sizes))) or default_sizes(self.max_running)

    @property
    def swap_bytes(self) -> int | None:
        """Bytes of swap space; None: a part of the pool's size. Prefill workers swap nothing."""
        if self.role == "prefill" or self.preemption == "recompute":
            return 0
        return self.swap_space

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        self._check_simulated()
        self._check_without_redis()
        if self.prefill_delayer and self.role == "prefill":
            raise ValueError("prefill_delayer is for workers that run both phases: decode workers")
        if self.prefill_delayer_group and not self.prefill_delayer:
            raise ValueError(
                f"prefill_delayer_group = {self.prefill_delayer_group} needs prefill_delayer, which is off"
            )
        if self.chunking == "dynamic" and self.scheduler in WHOLE_PROMPTS:
            raise ValueError(
                f"chunking = dynamic needs a scheduler that cuts prompts (sarathi, simple_chunking), "
                f"and scheduler = {self.scheduler} does not"
            )
        if self.preemption == "swap" and self.swap_space == 0:
            raise ValueError("preemption = swap needs a swap_space above 0")
        if self.max_running > self.token_budget:
            raise ValueError(
                f"max_running ({self.max_running}) must be at most token_budget ({self.token_budget}): each running "
                f"decode takes one token of every step"
            )
        if self.cuda_graph_sizes and not self.cuda_graphs:
            raise ValueError("cuda_graph_sizes need cuda_graphs, which is off")
        wrong = [size for size in self.cuda_graph_sizes if not 1 <= size <= self.max_running]
        if wrong:
            raise ValueError(f"cuda_graph_sizes = {wrong[0]} (allowed: 1 to max_running, which is {self.max_running})")
        if self.lease_interval_s * 2 > self.lease_ttl_s:
            raise ValueError(
                f"lease_interval_s ({self.lease_interval_s:g}) must be at most half of lease_ttl_s "
                f"({self.lease_ttl_s:g}), or one late renewal loses the lease"
            )
        return self

    def _check_without_redis(self) -> None:
        if self.uses_redis:
            return
        if self.http_port is None:
            raise ValueError("redis_url = none needs http_port: by its page there routers find the worker")
        if self.prefill_delayer_group:
            raise ValueError(
                f"prefill_delayer_group = {self.prefill_delayer_group} needs a Redis, in which its workers find each "
                f"other, and redis_url is none"
            )

    def _check_simulated(self) -> None:
        if self.backend != "simulated" and self.num_workers > 1:
            raise ValueError("several workers in a process (num_workers, workers_per_process) need backend = simulated")
        if self.backend == "simulated" and self.memory_utilization is not None:
            raise ValueError("memory_utilization is measured, which backend = simulated cannot; give num_blocks")
        if self.num_workers > 1 and (self.port or self.transfer_port or self.http_port):
            raise ValueError(
                "port, transfer_port and http_port must be 0 (any free one) for more than one worker in a process"
            )
        for name in ("metrics_file", "event_log"):
            path, place = getattr(self, name), "{worker_id}" if name == "metrics_file" else "{name}"
            if self.num_workers > 1 and path is not None and place not in str(path):
                raise ValueError(f"{name} must have {place} in it for more than one worker in a process")
