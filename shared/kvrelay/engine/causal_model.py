"""Loads a causal language model of transformers with paged attention, and runs its two halves.

The backbone computes hidden states of a packed batch. The head turns selected hidden states into logits. They are
separate so that the head can run in slices: logits of a whole chunk take vocabulary times tokens of memory.
"""

from __future__ import annotations

import logging
import platform
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from kvrelay.backends.backend import KV_DTYPES, AttentionBackend, KVLayout, StepAttention, dtype_name
from kvrelay.backends.choose_backend import select_backend
from kvrelay.backends.cpu import CpuBackend
from kvrelay.backends.cpu_build import KernelBuildError
from kvrelay.engine.attention import ATTENTION_NAME, UnsupportedModel, register
from kvrelay.engine.checkpoint import (
    check_quantization,
    read_config,
    read_integer_model,
    read_model,
    read_part,
)
from kvrelay.engine.eager import EagerForward, Forward
from kvrelay.engine.fused.forward import FusedForward
from kvrelay.engine.fused.gpu_forward import GpuForward, choose_pieces
from kvrelay.engine.fused.gpu_weights import merge_weights
from kvrelay.engine.fused.quantization import Quantization
from kvrelay.engine.fused.weights import NotFusable, WeightPacker, decoder_weights, require_fusable
from kvrelay.engine.parallel.gathered_mlps import GatheredMlps
from kvrelay.engine.parallel.group_coordinator import GroupCoordinator
from kvrelay.engine.parallel.part_plan import PartPlan, own_modules, plan_part
from kvrelay.engine.parallel.shard_plan import check_data_parallel, check_tensor_parallel, plan_shards
from kvrelay.engine.parallel.sharded_checkpoint import fill_randomly
from kvrelay.engine.parallel.sharded_modules import connect_modules
from kvrelay.engine.parallel.stage_link import StageLink
from kvrelay.engine.parallel.stage_modules import connect_stage, drop_absent
from kvrelay.engine.parallel.stage_plan import check_pipeline_parallel
from kvrelay.engine.probe import ForwardCheck, ObservedLayers, check_paged_forward, observe_layers
from kvrelay.engine.quantization_cost import QuantizationCost
from kvrelay.engine.quantized.stored_format import StoredFormat, find_format, stated_quantization
from kvrelay.engine.quantized.stored_weights import StoredWeights, layer_readers
from kvrelay.engine.support import check_config, check_positions, resolve_max_model_len

LoadFormat = Literal["auto", "dummy"]
"""Where weights come from: the checkpoint, or random values of the same shapes, which need no files but the config."""

log = logging.getLogger(__name__)

_DUMMY_SEED = 1
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NATIVE_FLAGS = {
    torch.bfloat16: frozenset({"avx512_bf16", "amx_bf16", "bf16"}),
    torch.float16: frozenset({"avx512_fp16", "amx_fp16", "asimdhp"}),
}


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The model to load: a directory or a hub name, with its config read and checked."""

    name: str
    config: PreTrainedConfig
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    load_format: LoadFormat = "auto"
    stored: torch.dtype | None = None  # dtype of keys and values in the pool; None: as computed
    quantization: Quantization = "none"
    stored_format: StoredFormat | None = None  # format of integer weights that are read here
    tensor_parallel: GroupCoordinator | None = None  # the ranks among which heads of this rank's layers are divided
    pipeline: StageLink | None = None  # the stages among which layers are divided
    data_parallel: GroupCoordinator | None = None  # the ranks among which MLPs are divided, each with its own requests

    @property
    def group(self) -> GroupCoordinator | None:
        """All ranks that load the model together."""
        if self.data_parallel is not None:
            return self.data_parallel
        return self.tensor_parallel if self.pipeline is None else self.pipeline.group

    @property
    def weights_salt(self) -> str:
        """Returns a salt that separates random and rounded weights from the checkpoint's and from each other; empty for
        the checkpoint's."""
        parts = [f"dummy {_DUMMY_SEED} {self.device.type}"] if self.load_format == "dummy" else []
        return " ".join([*parts, self.quantization] if self.quantization != "none" else parts)


class CausalModel:
    """A loaded model with its KV layout and the backend with which its attention was checked."""

    def __init__(
        self,
        source: ModelSource,
        forward: Forward,
        layout: KVLayout,
        backend: AttentionBackend,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        plan: PartPlan | None = None,
        gathered_mlps: GatheredMlps | None = None,
    ) -> None:
        """`layout` is of this rank's KV heads and layers. `plan`: how the model is divided among ranks; None: it is
        not. `gathered_mlps`: those that take the tokens of all ranks."""
        self.source = source
        plan = plan or PartPlan()
        self.shard_plan = plan.shards
        self.stage_plan = plan.stage
        self.gathered_mlps = gathered_mlps
        self.layout = layout
        self.backend = backend
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.forward = forward

    @property
    def whole_layout(self) -> KVLayout:
        """The layout of the whole model's KV."""
        layout = self.layout
        if self.shard_plan is not None:
            layout = replace(layout, num_kv_heads=self.shard_plan.num_kv_heads)
        if self.stage_plan is not None:
            layout = replace(layout, num_layers=self.stage_plan.num_layers)
        return layout

    @property
    def is_divided(self) -> bool:
        """Returns whether other processes compute a part of each step, for the requests of rank 0."""
        return self.shard_plan is not None or self.stage_plan is not None

    @property
    def has_divided_head(self) -> bool:
        """Returns whether this rank computes a part of the logits, together with others."""
        return self.shard_plan is not None and bool(self.shard_plan.head)

    @property
    def follows(self) -> bool:
        """Returns whether another rank samples."""
        return self.is_divided and self.source.group is not None and self.source.group.rank > 0

    def hidden_states(self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepAttention) -> torch.Tensor:
        return self.forward.hidden_states(token_ids, positions, step)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits `[tokens, vocab]`; on other ranks than the first, `[tokens, 0]`."""
        return self.forward.logits(hidden)


def open_source(
    name: str,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    max_model_len: int | None = None,
    load_format: LoadFormat = "auto",
    kv_cache_dtype: str = "auto",
    quantization: Quantization = "none",
    tensor_parallel: GroupCoordinator | None = None,
    pipeline: StageLink | None = None,
    data_parallel: GroupCoordinator | None = None,
) -> ModelSource:
    """Reads and checks the config, and resolves `auto`.

    Raises:
        UnsupportedModel: the layout cannot hold the model.
        ValueError: an unknown dtype or kv_cache_dtype, or no length.
        OSError: there is no such model.
    """
    config = read_config(name)
    check_config(config)
    target = torch.device(device)
    stored_format = None
    if load_format != "dummy":
        check_quantization(config)
        # On other devices transformers loads them, with the packages that have kernels for these.
        stored_format = find_format(config) if target.type == "cpu" else None
    length = resolve_max_model_len(config, max_model_len)
    check_positions(config, length)
    if kv_cache_dtype not in ("auto", *KV_DTYPES):
        raise ValueError(f"kv_cache_dtype {kv_cache_dtype!r} is none of auto, {', '.join(KV_DTYPES)}")
    computed = resolve_dtype(dtype, config, target)
    if quantization != "none" and target.type != "cpu":
        raise UnsupportedModel(f"quantization = {quantization}: only the CPU's fused layers round weights")
    if quantization != "none" and stored_format is not None:
        raise UnsupportedModel(
            f"quantization = {quantization}: the checkpoint is quantized already, by {stored_format.method}"
        )
    if tensor_parallel is not None:
        _check_weights(config, quantization, load_format, f"tensor_parallel_size = {tensor_parallel.size}")
        check_tensor_parallel(config, tensor_parallel.size)
    if pipeline is not None:
        _check_weights(config, quantization, load_format, f"pipeline_parallel_size = {pipeline.num_stages}")
        check_pipeline_parallel(config, pipeline.num_stages)
    if data_parallel is not None:
        _check_weights(config, quantization, load_format, f"data_parallel_size = {data_parallel.size}")
        check_data_parallel(config, data_parallel.size)
    stored = KV_DTYPES.get(kv_cache_dtype)
    return ModelSource(
        *(name, config, computed, target, length, load_format, stored, quantization, stored_format, tensor_parallel),
        pipeline=pipeline,
        data_parallel=data_parallel,
    )


def _check_weights(
    config: PreTrainedConfig, quantization: Quantization, load_format: LoadFormat, division: str
) -> None:
    """Raises UnsupportedModel for weights that cannot be divided, by the setting `division`."""
    stated = stated_quantization(config) if load_format != "dummy" else None
    if quantization != "none" or stated is not None:
        method = quantization if stated is None else stated[0]
        raise UnsupportedModel(
            f"{config.model_type}: weights quantized by {method} are not divided: {division} takes "
            f"weights in 16 or 32 bits"
        )


def resolve_dtype(requested: str, config: PreTrainedConfig, device: torch.device) -> torch.dtype:
    """The dtype to compute in. `auto` is the checkpoint's, but float32 on CPUs without support for it.

    Raises:
        ValueError: an unknown name.
    """
    if requested != "auto":
        if requested not in DTYPES:
            raise ValueError(f"dtype {requested!r} is none of auto, {', '.join(DTYPES)}")
        return DTYPES[requested]
    named = getattr(config.get_text_config(decoder=True), "dtype", None) or getattr(config, "dtype", None)
    stored = DTYPES.get(str(named).removeprefix("torch."), torch.float32)
    if device.type == "cpu" and stored in _NATIVE_FLAGS and not _NATIVE_FLAGS[stored] & _cpu_flags():
        return torch.float32
    return stored


def load_model(
    source: ModelSource,
    block_size: int,
    backend: AttentionBackend | None = None,
    *,
    cascade_attention: bool = False,
    fused_layers: bool = True,
) -> CausalModel:
    """Loads the weights, finds the KV layout with a tiny forward, and checks paged attention against the model's own.

    Without a `backend`, the fastest one that works is used; see `select_backend` for `cascade_attention`.
    With `fused_layers`, layers run through the fused kernels if these know the model and the results agree.

    Raises:
        UnsupportedModel: with the reason.
    """
    register()
    if source.group is not None:
        return _load_part(source, block_size, backend, cascade_attention=cascade_attention, fused_layers=fused_layers)
    weights = None if source.stored_format is None else StoredWeights(source.name, source.stored_format)
    model = _read_model(source, weights)
    model.to(source.device).eval()  # type: ignore[arg-type]
    text = source.config.get_text_config(decoder=True)
    observed = observe_layers(model, text.num_hidden_layers, source.max_model_len)
    shape = (observed.num_layers, observed.num_kv_heads, observed.head_dim, block_size)
    layout = KVLayout(*shape, observed.dtype, source.stored)
    if backend is None:
        backend = select_backend(source.device, layout, observed.kinds, cascade=cascade_attention)
    check_paged_forward(model, layout, backend, source.max_model_len)
    packer = WeightPacker(source.quantization, None if weights is None else layer_readers(model, weights))
    forward = _choose_forward(model, observed, layout, backend, source, packer, fused_layers)
    if weights is not None:
        log.info(
            "weights by %s: %d linear layers keep the checkpoint's integers, and %d are dequantized to %s",
            *(weights.method, packer.num_kept, len(weights.paths) - packer.num_kept, dtype_name(source.dtype)),
        )
    eos_token_ids = _eos_token_ids(model, observed.vocab_size)
    return CausalModel(source, forward, layout, backend, observed.vocab_size, eos_token_ids)


def _load_part(
    source: ModelSource,
    block_size: int,
    backend: AttentionBackend | None,
    *,
    cascade_attention: bool,
    fused_layers: bool,
) -> CausalModel:
    """Loads this rank's part as `load_model` does. All ranks run the checks together and get the same results."""
    group, heads_group, link = source.group, source.tensor_parallel, source.pipeline
    assert group is not None
    with group.in_agreement():
        if source.load_format == "dummy":
            model, plan = _make_dummy(source, ATTENTION_NAME)
        else:
            model, plan = read_part(
                *(source.name, source.config, source.dtype, ATTENTION_NAME, heads_group, link, source.data_parallel)
            )
        model.to(source.device).eval()  # type: ignore[arg-type]
    gathered = connect_modules(model, plan.shards, heads_group) if plan.shards and heads_group else None
    mlps = None
    if plan.mlps is not None and source.data_parallel is not None:
        mlps = GatheredMlps(model, plan.mlps, source.data_parallel)
    stage_head = connect_stage(model, plan.stage, link) if plan.stage and link else None
    text = source.config.get_text_config(decoder=True)
    num_layers = text.num_hidden_layers if plan.stage is None else len(plan.stage.own_layers)
    observed = observe_layers(model, num_layers, source.max_model_len)
    if plan.shards is not None and observed.num_kv_heads != plan.shards.local_kv_heads:
        raise UnsupportedModel(
            f"{type(model).__name__}: a rank has {observed.num_kv_heads} KV heads in place of "
            f"{plan.shards.local_kv_heads}"
        )
    shape = (observed.num_layers, observed.num_kv_heads, observed.head_dim, block_size)
    layout = KVLayout(*shape, observed.dtype, source.stored)
    with group.in_agreement():
        if backend is None:
            backend = select_backend(source.device, layout, observed.kinds, cascade=cascade_attention)
    check_paged_forward(model, layout, backend, source.max_model_len)
    fused = _fuse_part(model, observed, layout, backend, source, plan, mlps) if fused_layers else None
    if fused is not None and mlps is not None:
        # As the forwards of the other ranks, which have tokens: see `FusedForward.hidden_states`.
        mlps.use(fused, runs_in_c=mlps.group.shares_memory and layout.stored is None)
    if gathered is not None:
        gathered.gathers_to_all = False
    if stage_head is not None:
        stage_head.is_shared = False
    _log_part(plan)
    eos_token_ids = _eos_token_ids(model, observed.vocab_size)
    forward = fused or EagerForward(model)
    return CausalModel(source, forward, layout, backend, observed.vocab_size, eos_token_ids, plan, mlps)


def _fuse_part(
    model: PreTrainedModel,
    observed: ObservedLayers,
    layout: KVLayout,
    backend: AttentionBackend,
    source: ModelSource,
    plan: PartPlan,
    mlps: GatheredMlps | None,
) -> FusedForward | None:
    """This rank's part of the fused kernels, or None on all ranks if one of them cannot use these, or their results
    differ from the modules'."""
    group, shards, packer, own = source.group, plan.shards, WeightPacker(), own_modules(plan)
    assert group is not None
    try:
        with group.in_agreement():
            if not isinstance(backend, CpuBackend):
                raise NotFusable("it needs the C kernels on a CPU")
            require_fusable(model, observed.params, own)
        check = ForwardCheck(model, source.max_model_len)
        with group.in_agreement():
            weights = decoder_weights(model, observed.params, packer, own)
            vocabulary = None if shards is None else shards.vocabulary
            ranks = (source.tensor_parallel, source.pipeline)
            fused = FusedForward(weights, *ranks, vocabulary, observed.vocab_size, mlps)
        error = check.measure(fused, layout, backend)
        with group.in_agreement():
            check.judge(fused, error, layout)
    except (NotFusable, KernelBuildError, UnsupportedModel) as reason:
        packer.restore()
        log.info("decoder layers: the modules of transformers, since %s", reason)
        return None
    log.info("decoder layers: fused kernels (%s)", fused.instructions)
    return fused


def _log_part(plan: PartPlan) -> None:
    if (mlps := plan.mlps) is not None:
        log.info(
            "data parallelism: rank %d of %d has attention and a part of %d MLPs",
            *(mlps.rank, mlps.size, len(mlps.mlps)),
        )
    if (stage := plan.stage) is not None:
        log.info(
            "pipeline parallelism: stage %d of %d has layers %d to %d of %d",
            *(stage.stage, stage.num_stages, stage.own_layers.start, stage.own_layers.stop - 1, stage.num_layers),
        )
    if (shards := plan.shards) is not None:
        log.info(
            "tensor parallelism: rank %d of %d has %d of %d attention heads and %d of %d KV heads",
            *(shards.rank, shards.size, shards.local_heads, shards.num_heads),
            *(shards.local_kv_heads, shards.num_kv_heads),
        )


def _read_model(source: ModelSource, weights: StoredWeights | None) -> PreTrainedModel:
    if source.load_format == "dummy":
        return make_dummy(source, ATTENTION_NAME)
    if weights is not None:
        return read_integer_model(source.name, source.config, source.dtype, ATTENTION_NAME, weights)
    return read_model(source.name, source.config, source.dtype, ATTENTION_NAME)


def _choose_forward(
    model: PreTrainedModel,
    observed: ObservedLayers,
    layout: KVLayout,
    backend: AttentionBackend,
    source: ModelSource,
    packer: WeightPacker,
    fused_layers: bool,
) -> Forward:
    """The fused kernels if they are wanted, know the model, and give its logits; else the model's own modules.

    Raises:
        UnsupportedModel: the weights are to be rounded, and the fused kernels cannot run.
    """
    if fused_layers and source.device.type == "cuda":
        return _choose_on_gpu(model, observed, layout, backend, source)
    wanted, reason = source.quantization, "it needs the fused layers of the C kernels on a CPU"
    if fused_layers and isinstance(backend, CpuBackend):
        try:
            require_fusable(model, observed.params)
            check = ForwardCheck(model, source.max_model_len)
            cost = QuantizationCost(model, source.name, source.max_model_len) if wanted != "none" else None
            fused = FusedForward(decoder_weights(model, observed.params, packer))
            check.run(fused, layout, backend, exact=cost is None)
            log.info("decoder layers: fused kernels (%s)", fused.instructions)
            if cost is not None:
                cost.report(wanted, fused, layout, backend)
            return fused
        except (NotFusable, KernelBuildError, UnsupportedModel) as error:
            reason = str(error)
            if wanted == "none":
                packer.restore()
                log.info("decoder layers: the modules of transformers, since %s", reason)
    if wanted != "none":
        raise UnsupportedModel(f"{type(model).__name__}: quantization = {wanted} is not possible: {reason}")
    return EagerForward(model)


def _choose_on_gpu(
    model: PreTrainedModel,
    observed: ObservedLayers,
    layout: KVLayout,
    backend: AttentionBackend,
    source: ModelSource,
) -> Forward:
    """Merged products with one kernel between two of them, if the model is known and this gives its logits; else the
    model's own modules."""
    try:
        check = ForwardCheck(model, source.max_model_len)
        pieces = choose_pieces(source.device)
        fused = GpuForward(merge_weights(model, observed.params, source.max_model_len), pieces)
        check.run(fused, layout, backend, model=model)
    except (NotFusable, UnsupportedModel) as reason:
        log.info("decoder layers: the modules of transformers, since %s", reason)
        return EagerForward(model)
    log.info("decoder layers: fused kernels (%s)", pieces.name)
    return fused


def make_dummy(source: ModelSource, attn_implementation: str) -> PreTrainedModel:
    """The source's model with random weights, made on its device. All devices of one type get the same weights, and the
    ranks of any group parts of them."""
    return _make_dummy(source, attn_implementation)[0]


def _make_dummy(source: ModelSource, attn_implementation: str) -> tuple[PreTrainedModel, PartPlan]:
    with torch.device("meta"):
        model = _from_config(source, attn_implementation)
    plan = plan_part(model, source.tensor_parallel, source.pipeline, source.data_parallel)
    try:
        plan_shards(model, 0, 1)  # raises for models whose random weights are not made module by module
    except UnsupportedModel:
        if source.group is not None:
            raise
        generators = [source.device] if source.device.type == "cuda" else []
        with torch.random.fork_rng(generators), torch.device(source.device):
            torch.manual_seed(_DUMMY_SEED)
            return _from_config(source, attn_implementation), plan
    fill_randomly(model, source.device, _DUMMY_SEED, plan.narrowing, plan.has)
    if plan.stage is not None:
        drop_absent(model, plan.stage)
    return model, plan


def _from_config(source: ModelSource, attn_implementation: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        deepcopy(source.config),  # the model keeps this config, and it names the attention implementation
        dtype=source.dtype,
        attn_implementation=attn_implementation,
    )
    return model


def _eos_token_ids(model: PreTrainedModel, vocab_size: int) -> tuple[int, ...]:
    """The end tokens of the generation config, or else of the config. Ids outside the vocabulary (some configs have -1)
    are left out."""
    generation = getattr(model, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    if ids is None:
        ids = getattr(model.config.get_text_config(decoder=True), "eos_token_id", None)
    if ids is None:
        return ()
    ids = ids if isinstance(ids, list | tuple) else (ids,)
    return tuple(each for each in map(int, ids) if 0 <= each < vocab_size)


def _cpu_flags() -> frozenset[str]:
    """The CPU's feature names as Linux lists them. Elsewhere none, except the features that every Apple arm64 has."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.lower().startswith(("flags", "features")):
                return frozenset(line.split(":", 1)[1].split())
    return frozenset({"asimdhp"}) if platform.machine() == "arm64" else frozenset()
