"""Configuration of prefill and decode workers."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ByteSize, Field, field_validator, model_validator

from kvrelay.config.common import NAME_FORM, NAME_PATTERN
from kvrelay.config.ranks import DEVICE_FORM, RankedConfig
from kvrelay.device_profiles import BUILT_IN, find_profile
from kvrelay.scheduler_names import DEFAULT_SCHEDULER, WHOLE_PROMPTS, check_scheduler_name

Role = Literal["prefill", "decode"]
MIB = 1 << 20
RENEWALS_PER_LEASE = 5


def default_worker_id(data: dict[str, Any]) -> str:
    """The role and eight random hex digits."""
    return f"{data.get('role', 'worker')}-{secrets.token_hex(4)}"


class WorkerConfig(RankedConfig):
    """Fields of one worker. Sizes are in tokens, blocks or bytes as named; times in seconds."""

    role: Role = Field(description="set by the service itself", json_schema_extra={"flags": None})
    worker_id: str = Field(
        default_factory=default_worker_id,
        pattern=NAME_PATTERN,
        description="name of this worker, unique in the fleet (default: role and random digits)",
        json_schema_extra={"form": NAME_FORM},
    )
    num_workers: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="workers in this process, with backend = simulated; their ids end in -0, -1 and so on",
    )
    port: int = Field(default=0, ge=0, le=65535, description="port for control messages; 0: any free one")
    transfer_port: int = Field(default=0, ge=0, le=65535, description="port for incoming KV blocks; 0: any free one")
    http_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="port of /health and /ready for probes, /metrics for Prometheus, and /worker for static_workers of "
        "routers; 0: any free one (default: none)",
    )
    transfer: Literal["auto", "nixl", "zmq"] = Field(
        default="auto",
        description="transport of KV blocks; auto: nixl between workers that both have it, otherwise zmq",
    )
    transfer_checksums: bool = Field(
        default=False,
        description="send a checksum with each KV block; decode verifies it, and a corrupted block is a failed handoff",
    )

    backend: Literal["auto", "simulated"] = Field(
        default="auto",
        description="auto: compute the model on the device; simulated: compute nothing, steps take the time of the "
        "profile and tokens are made up",
    )
    profile: str = Field(
        default="llama3-8b-h100",
        description=f"profile of backend = simulated: {', '.join(BUILT_IN)}, other numbers of devices of these as in "
        "llama3-70b-h100-tp4-pp2, or a JSON file from `kvrelay measure`",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="type of weights, and of KV unless kv_cache_dtype is set; auto: the checkpoint's, or float32 if "
        "the CPU does not compute in it",
    )
    kv_cache_dtype: Literal["auto", "fp8_e4m3", "fp8_e5m2"] = Field(
        default="auto",
        description="type of keys and values in the pool; auto: as dtype; fp8_e4m3 (also as fp8), fp8_e5m2: 8-bit "
        "floats, which hold twice the tokens of bfloat16 and four times those of float32 and cost some accuracy",
    )
    load_format: Literal["auto", "dummy"] = Field(
        default="auto",
        description="auto: the checkpoint's weights; dummy: random weights of the model's shape, for measurements; "
        "needs only config.json and the tokenizer",
    )
    device: str = Field(
        default="auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="auto, cpu, cuda or cuda:N; auto: the CPU",
        json_schema_extra={"form": DEVICE_FORM},
    )
    cuda_graphs: bool = Field(
        default=True,
        description="on a decode worker's GPU, capture decoding steps in CUDA graphs at start and replay them; off: "
        "launch every kernel of every step",
    )
    fused_layers: bool = Field(
        default=True,
        description="on a CPU, run the decoder layers of Llama, Mistral, Qwen2 and Qwen3 models through fused C "
        "kernels; off: through the modules of transformers",
    )
    batch_invariant: bool = Field(
        default=False,
        description="compute logits whose bits do not depend on what else is in a step, nor on how steps cut the "
        "prompt. On a CPU the fused layers do, but for bfloat16 by AMX, which this leaves out; on a GPU it takes "
        "slower kernels. Refused for other models, float32 on a GPU, and ranks on GPUs",
        json_schema_extra={"flags": ["--enable-deterministic-inference"]},
    )
    quantization: Literal["none", "int8", "int4"] = Field(
        default="none",
        description="on a CPU, round the weights of the fused layers at load: int8 (a scale for each output) or int4 "
        "(groups of 32 inputs; head and down_proj in int8); the log says what that costs; other models are refused",
    )
    threads: int | None = Field(
        default=None, ge=1, le=1024, description="CPU threads of the forward pass (default: one per core)"
    )

    block_size: int = Field(
        default=16,
        ge=8,
        le=128,
        description="tokens per block, a power of two",
        json_schema_extra={"flags": ["--page-size"]},
    )
    num_blocks: int | None = Field(
        default=None,
        ge=2,
        description="blocks in the pool (default: as many as kv_memory_bytes holds)",
        json_schema_extra={"flags": ["--num-gpu-blocks-override"]},
    )
    kv_memory_bytes: ByteSize | None = Field(
        default=None,
        ge=MIB,
        description="memory of the pool if num_blocks is not set, as in 512MiB or 4GiB (default: 1GiB)",
    )
    memory_utilization: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="share of the machine's or GPU's memory for this worker, if neither num_blocks nor "
        "kv_memory_bytes is set; the pool gets what remains after weights and the largest step, which is measured at "
        "start",
        json_schema_extra={"flags": ["--gpu-memory-utilization", "--mem-fraction-static"]},
    )
    max_model_len: int | None = Field(
        default=None,
        ge=2,
        description="longest sequence in tokens, prompt plus output (default: the model's)",
        json_schema_extra={"flags": ["--context-length"]},
    )
    prefix_cache: bool = Field(
        default=True,
        description="keep the blocks of finished sequences for prompts with the same prefix",
        json_schema_extra={"flags": ["--enable-prefix-caching"]},
    )
    prefix_lookup: Literal["tree", "table"] = Field(
        default="tree",
        description="tree: prompts share any prefix of blocks; table: only complete sequences, for comparison",
    )

    token_budget: int = Field(
        default=512,
        ge=1,
        le=1 << 20,
        description="maximum tokens of a step",
        json_schema_extra={"flags": ["--max-num-batched-tokens", "--chunked-prefill-size"]},
    )
    max_running: int = Field(
        default=256,
        ge=1,
        le=1 << 16,
        description="maximum sequences that hold blocks at the same time; at most token_budget",
        json_schema_extra={"flags": ["--max-num-seqs", "--max-running-requests"]},
    )

    scheduler: str = Field(
        default=DEFAULT_SCHEDULER,
        description="scheduling policy: sarathi, vllm, simple_chunking, orca, faster_transformer, or the name of an "
        "entry point kvrelay.schedulers",
    )
    chunking: Literal["fixed", "dynamic"] = Field(
        default="fixed",
        description="how sarathi and simple_chunking cut prompts: chunks of equal length, or of equal time",
    )
    queue_order: Literal["fcfs", "lpm", "dfs_weight", "priority", "sjf", "random"] = Field(
        default="fcfs",
        description="admission order: first come, longest cached prefix, heaviest branch of prompts, smallest priority "
        "number, shortest job, or random",
    )
    retraction: Literal["latest", "least_progress"] = Field(
        default="latest",
        description="sequence to preempt when blocks run out: the latest, or the one with the least output",
    )
    preemption: Literal["auto", "recompute", "swap"] = Field(
        default="auto",
        description="how a preempted sequence on a decode worker keeps its KV: recompute, or swap (copied to the swap "
        "space if it has room, and back); auto: whichever is estimated to be faster",
    )
    swap_space: ByteSize | None = Field(
        default=None,
        ge=0,
        le=1 << 44,
        description="host memory for the KV of preempted sequences on a decode worker, as in 512MiB or 4GiB; 0: none "
        "(default: a quarter of the pool's memory)",
    )
    new_token_ratio: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="initial share of the running sequences' remaining output that admission keeps room for; it "
        "adapts. 0: none",
    )

    jump_forward: bool = Field(
        default=True,
        description="in constrained output, append the tokens that the grammar forces without sampling them, and "
        "compute them in one step; off: sample each token under the grammar's mask",
    )

    speculation: Literal["off", "ngram", "suffix"] = Field(
        default="off",
        description="drafts of decoding sequences for requests that choose none: ngram guesses that the output repeats "
        "earlier text of its own sequence, suffix that it repeats this text or earlier outputs of the same tenant, and "
        "the next step verifies that; outputs are the same. No effect on prefill workers",
    )

    prefill_delayer: bool = Field(
        default=False,
        description="on decode workers, hold prompts back until all ranks of data_parallel_size have one, and running "
        "sequences leave room for a batch of prompts",
    )
    overlap: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="while a step is computed, publish the previous one and plan the next (on a GPU also launch it); "
        "auto: on for a GPU or a simulated device, off for a CPU, which it does not make faster (0.99 to 1.01 "
        "times the tokens per second)",
    )

    metrics_file: Path | None = Field(
        default=None,
        description="file for one JSON line per step and sequence; {worker_id} is replaced (default: none)",
    )

    @field_validator("kv_cache_dtype", mode="before")
    @classmethod
    def _fp8_is_e4m3(cls, dtype: object) -> object:
        """`fp8` is `fp8_e4m3`, as in vLLM."""
        return "fp8_e4m3" if dtype == "fp8" else dtype

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
        if self.backend == "simulated" and self.data_parallel_size > 1:
            named = enumerate(self.rank_worker_ids)
            return [self.model_copy(update={"worker_id": name, "data_parallel_rank": rank}) for rank, name in named]
        if self.num_workers == 1:
            return [self]
        names = [f"{self.worker_id}-{number}" for number in range(self.num_workers)]
        return [self.model_copy(update={"worker_id": name, "num_workers": 1}) for name in names]

    @property
    def rank_worker_ids(self) -> list[str]:
        """The ids of the workers that are the ranks of data_parallel_size. Those behind rank 0 are derived from its."""
        own, rank = self.worker_id, self.data_parallel_rank
        first = own.removesuffix(f"-dp{rank}") if rank else own
        return [first, *(f"{first}-dp{each}" for each in range(1, self.data_parallel_size))]

    @property
    def started_worker_ids(self) -> set[str]:
        """The ids of the workers that this process runs or starts."""
        if self.data_parallel_size > 1:
            return set(self.rank_worker_ids[: 1 + self.num_local_ranks])
        return {each.worker_id for each in self.each_worker()}

    @property
    def transfer_choice(self) -> Literal["auto", "nixl", "zmq"]:
        """`transfer`, but simulated KV, which is small, uses zmq unless NIXL is named."""
        return "zmq" if self.backend == "simulated" and self.transfer == "auto" else self.transfer

    @property
    def publishes_prefixes(self) -> bool:
        """Returns whether this worker publishes its cache to the prefix index."""
        return self.uses_redis and self.prefix_cache and self.prefix_lookup == "tree"

    @property
    def pipeline_depth(self) -> int:
        """Steps of this worker that are computed at the same time, each in another part of a pipeline."""
        is_simulated = self.backend == "simulated"
        return find_profile(self.profile).pipeline_depth if is_simulated else self.pipeline_parallel_size

    @property
    def lease_ttl_s(self) -> float:
        """Seconds after which a silent worker leaves the registry. A worker that restarts under the same id in a new
        container waits for the rest of the lease."""
        return self.peer_timeout_s

    @property
    def lease_interval_s(self) -> float:
        """Seconds between renewals of the lease: several may be late or lost before it ends."""
        return self.lease_ttl_s / RENEWALS_PER_LEASE

    @property
    def pool_sizing(self) -> tuple[float, int, int, bool] | None:
        """The fields of the engine's `PoolSizing`; None if the pool's size is no share of the memory."""
        if self.memory_utilization is None or self.kv_memory_bytes is not None:
            return None
        return self.memory_utilization, self.token_budget, self.max_running, self.scheduler in WHOLE_PROMPTS

    @property
    def swap_bytes(self) -> int | None:
        """Bytes of swap space; None: the default share of the pool. Prefill workers never swap."""
        if self.role == "prefill" or self.preemption == "recompute":
            return 0
        return self.swap_space

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        self._check_simulated()
        if self.data_parallel_size > 1 and self.quantization != "none":
            raise ValueError(f"quantization = {self.quantization}: rounded weights are not divided: {self.division}")
        self._check_without_redis()
        if self.batch_invariant and not self.fused_layers:
            raise ValueError("batch_invariant needs fused_layers: the modules of transformers do not hold it")
        if self.batch_invariant and self.device.startswith("cuda") and self.num_processes > 1:
            raise ValueError(f"batch_invariant on GPUs needs one rank: NCCL's sums do not hold it: {self.division}")
        if self.prefill_delayer and self.role == "prefill":
            raise ValueError("prefill_delayer needs a worker that runs both phases: set it on decode workers")
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
        return self

    def _check_without_redis(self) -> None:
        if self.uses_redis:
            return
        if self.http_port is None:
            raise ValueError("redis_url = none needs http_port: routers read the worker's record from it")

    def _check_simulated(self) -> None:
        if self.backend != "simulated" and self.num_workers > 1:
            raise ValueError("several workers in a process (num_workers) need backend = simulated")
        if self.backend == "simulated" and self.memory_utilization is not None:
            raise ValueError("memory_utilization cannot be measured with backend = simulated: set num_blocks")
        if self.backend == "simulated" and self.num_ranks > 1:
            raise ValueError(f"{self.division} divides a real model: with backend = simulated, name a profile of it")
        if self.backend == "simulated" and self.data_parallel_size > 1 and self.pipeline_depth > 1:
            raise ValueError(
                f"{self.division} with profile = {self.profile}: ranks of data_parallel_size have no pipeline "
                f"(allowed: a profile without -ppM)"
            )
        if self.num_workers > 1 and self.data_parallel_size > 1:
            raise ValueError("one group of data_parallel_size per process: num_workers must be 1")
        num_here = self.data_parallel_size if self.backend == "simulated" else self.num_workers
        if max(num_here, self.num_workers) > 1 and (self.port or self.transfer_port or self.http_port):
            raise ValueError(
                "port, transfer_port and http_port must be 0 (any free one) for more than one worker in a process"
            )
        for name in ("metrics_file", "event_log"):
            path, place = getattr(self, name), "{worker_id}" if name == "metrics_file" else "{name}"
            if self.num_workers > 1 and path is not None and place not in str(path):
                raise ValueError(f"{name} must have {place} in it for more than one worker in a process")
