"""Loads a causal language model of transformers with paged attention, and runs its two halves.

The backbone computes hidden states of a packed batch. The head turns selected hidden states into logits. They are
separate so that the head can run in slices: logits of a whole chunk take vocabulary times tokens of memory.
"""

from __future__ import annotations

import logging
from copy import deepcopy
from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvrelay.backends.backend import AttentionBackend, KVLayout, StepAttention, dtype_name
from kvrelay.backends.choose_backend import select_backend
from kvrelay.backends.cpu import CpuBackend
from kvrelay.backends.cpu_build import KernelBuildError
from kvrelay.engine.fused.forward import FusedForward
from kvrelay.engine.fused.gpu_forward import GpuForward, choose_pieces
from kvrelay.engine.fused.gpu_weights import merge_weights
from kvrelay.engine.fused.weights import NotFusable, WeightPacker, decoder_weights, require_fusable
from kvrelay.engine.load.checkpoint import (
    read_integer_model,
    read_model,
    read_part,
)
from kvrelay.engine.load.model_source import DUMMY_SEED, ModelSource
from kvrelay.engine.load.probe import ForwardCheck, ObservedLayers, check_paged_forward, observe_layers
from kvrelay.engine.parallel.gathered_mlps import GatheredMlps
from kvrelay.engine.parallel.part_plan import PartPlan, own_modules, plan_part
from kvrelay.engine.parallel.shard_plan import plan_shards
from kvrelay.engine.parallel.sharded_checkpoint import fill_randomly
from kvrelay.engine.parallel.sharded_modules import connect_modules
from kvrelay.engine.parallel.stage_modules import connect_stage, drop_absent
from kvrelay.engine.quantized.quantization_cost import QuantizationCost
from kvrelay.engine.quantized.stored_weights import StoredWeights, layer_readers
from kvrelay.engine.run.attention import ATTENTION_NAME, UnsupportedModel, register
from kvrelay.engine.run.eager import EagerForward, Forward

log = logging.getLogger(__name__)


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


def load_model(
    source: ModelSource,
    block_size: int,
    backend: AttentionBackend | None = None,
    *,
    fused_layers: bool = True,
) -> CausalModel:
    """Loads the weights, finds the KV layout with a tiny forward, and checks paged attention against the model's own.

    Without a `backend`, the fastest one that works is used.
    With `fused_layers`, layers run through the fused kernels if these know the model and the results agree.

    Raises:
        UnsupportedModel: with the reason.
    """
    register()
    if source.group is not None:
        return _load_part(source, block_size, backend, fused_layers=fused_layers)
    weights = None if source.stored_format is None else StoredWeights(source.name, source.stored_format)
    model = _read_model(source, weights)
    model.to(source.device).eval()  # type: ignore[arg-type]
    text = source.config.get_text_config(decoder=True)
    observed = observe_layers(model, text.num_hidden_layers, source.max_model_len)
    shape = (observed.num_layers, observed.num_kv_heads, observed.head_dim, block_size)
    layout = KVLayout(*shape, observed.dtype, source.stored)
    if backend is None:
        backend = select_backend(source.device, layout, observed.kinds)
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
            backend = select_backend(source.device, layout, observed.kinds)
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
            torch.manual_seed(DUMMY_SEED)
            return _from_config(source, attn_implementation), plan
    fill_randomly(model, source.device, DUMMY_SEED, plan.narrowing, plan.has)
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
