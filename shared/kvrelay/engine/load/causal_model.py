"""Loads a causal language model of transformers with paged attention, and runs its two halves.

The backbone computes hidden states of a packed batch. The head turns selected hidden states into logits. They are
separate so that the head can run in slices: logits of a whole chunk take vocabulary times tokens of memory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from hashlib import blake2b
from importlib.util import find_spec

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvrelay.backends.backend import AttentionBackend, KVLayout, StepAttention, dtype_name
from kvrelay.backends.choose_backend import select_backend
from kvrelay.backends.cpu import CpuBackend
from kvrelay.backends.cpu_build import KernelBuildError, cpu_features, kernel_key, load_kernel
from kvrelay.engine.fused.forward import FusedForward, use_panels
from kvrelay.engine.fused.gpu_forward import GpuForward, TorchPieces, merge_weights
from kvrelay.engine.fused.kernel import FIXED_TYPES
from kvrelay.engine.fused.weights import FAMILIES, NotFusable, WeightPacker, decoder_weights, require_fusable
from kvrelay.engine.load.checkpoint import read_integer_model, read_model, read_part, refusing
from kvrelay.engine.load.model_files import find_model_dir, fingerprint, shard_fingerprint
from kvrelay.engine.load.model_source import DUMMY_SEED, ModelSource, causal_lm_class
from kvrelay.engine.load.probe import (
    ForwardCheck,
    ObservedLayers,
    check_paged_forward,
    observe_layers,
)
from kvrelay.engine.load.quantization_cost import QuantizationCost
from kvrelay.engine.load.stored_weights import StoredWeights, layer_readers
from kvrelay.engine.parallel.model_part import WHOLE, PartPlan, connect, fill_randomly, own_modules, plan_part
from kvrelay.engine.parallel.shard_plan import plan_shards
from kvrelay.engine.parallel.sharded_modules import GatheredMlps
from kvrelay.engine.run.attention import ATTENTION_NAME, EagerForward, Forward, UnsupportedModel, register
from kvrelay.engine.run.device import describe_device
from kvrelay.model_directory import end_token_ids, identity_of_file
from kvrelay.step.batch import ModelSpec

log = logging.getLogger(__name__)

MAY_VARY = "; the bits of an output may depend on what is computed with it; see docs/reproducibility.md"


@dataclass
class CausalModel:
    """A loaded model with its KV layout and the backend with which its attention was checked.

    `layout` is of this rank's KV heads and layers. `part`: what this rank has of the model. `gathered_mlps`: those
    that take the tokens of all ranks.
    """

    source: ModelSource
    forward: Forward
    layout: KVLayout
    backend: AttentionBackend
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    part: PartPlan = WHOLE
    gathered_mlps: GatheredMlps | None = None
    numerics: str = ""  # see `ModelSpec`

    @property
    def whole_layout(self) -> KVLayout:
        """The layout of the whole model's KV."""
        num_layers, num_kv_heads = self.part.whole_kv(self.layout.num_layers, self.layout.num_kv_heads)
        return replace(self.layout, num_layers=num_layers, num_kv_heads=num_kv_heads)

    @property
    def is_divided(self) -> bool:
        """Returns whether other processes compute a part of each step, for the requests of rank 0."""
        return self.part.is_divided

    @property
    def has_divided_head(self) -> bool:
        """Returns whether this rank computes a part of the logits, together with others."""
        return self.part.shards is not None and bool(self.part.shards.head)

    @property
    def follows(self) -> bool:
        """Returns whether another rank samples."""
        group = self.source.ranks.all_ranks
        return self.is_divided and group is not None and group.rank > 0

    def hidden_states(self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepAttention) -> torch.Tensor:
        return self.forward.hidden_states(token_ids, positions, step)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits `[tokens, vocab]`; on other ranks than the first, `[tokens, 0]`."""
        return self.forward.logits(hidden)


@dataclass(frozen=True, slots=True)
class _Modules:
    """A model of transformers, or a rank's part of it, that attends through the pool as it should."""

    model: PreTrainedModel
    source: ModelSource
    plan: PartPlan
    mlps: GatheredMlps | None
    observed: ObservedLayers
    layout: KVLayout
    backend: AttentionBackend
    packer: WeightPacker
    batch_invariant: bool


def load_model(
    source: ModelSource,
    block_size: int,
    backend: AttentionBackend | None = None,
    *,
    fused_layers: bool = True,
    batch_invariant: bool = False,
) -> CausalModel:
    """Loads the weights, finds the KV layout with a tiny forward, and checks paged attention against the model's own.

    Without a `backend`, the fastest one that works is used. With `fused_layers`, layers run through the fused kernels
    if these know the model and the results agree. With `batch_invariant`, the bits of a position's logits depend on its
    sequence alone. If there are several ranks, all of them run the checks together and get the same results. Raises
    UnsupportedModel with the reason.
    """
    register()
    ranks = source.ranks
    if batch_invariant:
        with ranks.in_agreement():
            _check_batch_invariant(source, fused_layers=fused_layers)
        if source.device.type == "cpu":
            _leave_tiles()
    with ranks.in_agreement():
        weights = None if source.stored_format is None else StoredWeights(source.name, source.stored_format)
        model, plan = _read(source, weights)
        model.to(source.device).eval()  # type: ignore[arg-type]
    heads, mlps = connect(model, plan, ranks)
    text = source.config.get_text_config(decoder=True)
    num_layers = plan.num_layers(text.num_hidden_layers)
    observed = observe_layers(model, num_layers, source.max_model_len)
    if plan.shards is not None and observed.num_kv_heads != plan.shards.local_kv_heads:
        raise UnsupportedModel(
            f"{type(model).__name__}: a rank has {observed.num_kv_heads} KV heads in place of "
            f"{plan.shards.local_kv_heads}"
        )
    layout = KVLayout(num_layers, observed.num_kv_heads, observed.head_dim, block_size, observed.dtype, source.stored)
    with ranks.in_agreement():
        backend = backend or select_backend(source.device, layout, observed.kinds, batch_invariant=batch_invariant)
    check_paged_forward(model, layout, backend, source.max_model_len)
    packer = WeightPacker(source.quantization, None if weights is None else layer_readers(model, weights))
    modules = _Modules(model, source, plan, mlps, observed, layout, backend, packer, batch_invariant)
    forward = _choose_forward(modules, fused_layers=fused_layers)
    if mlps is not None and isinstance(forward, FusedForward):
        # As the forwards of the other ranks, which have tokens: see `FusedForward.hidden_states`.
        mlps.use(forward, runs_in_c=mlps.group.shares_memory and layout.stored is None)
    for head in heads:
        head.is_shared = False
    plan.log()
    if weights is not None:
        num_kept, num_all = packer.num_kept, len(weights.paths)
        log.info(
            "weights by %s: %d linear layers keep the checkpoint's integers, and %d are dequantized to %s",
            weights.method,
            num_kept,
            num_all - num_kept,
            dtype_name(source.dtype),
        )
    eos_token_ids = _eos_token_ids(model, source, observed.vocab_size)
    loaded = CausalModel(source, forward, layout, backend, observed.vocab_size, eos_token_ids, plan, mlps)
    loaded.numerics = _numerics_with_ranks(loaded)
    return loaded


def _read(source: ModelSource, weights: StoredWeights | None) -> tuple[PreTrainedModel, PartPlan]:
    if source.load_format == "dummy":
        return _make_dummy(source, ATTENTION_NAME)
    if source.ranks.all_ranks is not None:
        return read_part(source.name, source.config, source.dtype, source.ranks)
    if weights is not None:
        return read_integer_model(source.name, source.config, source.dtype, weights), WHOLE
    return read_model(source.name, source.config, source.dtype), WHOLE


def _check_batch_invariant(source: ModelSource, *, fused_layers: bool) -> None:
    """Raises UnsupportedModel if the bits of logits would depend on more than the sequence, as far as can be known
    before the weights are read."""
    name, reason = getattr(causal_lm_class(source.config), "__name__", "the model"), None
    rope = getattr(source.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    rope_type = rope.get("rope_type", "default")
    if not fused_layers:
        reason = "only the fused layers hold it, and they are off"
    elif name not in FAMILIES:
        reason = f"only the fused layers hold it, and {name} is not one of {', '.join(sorted(FAMILIES))}"
    elif rope_type not in FIXED_TYPES:
        reason = f"its rotary embeddings of type {rope_type!r} depend on more than the position"
    elif source.device.type == "cuda" and source.ranks.all_ranks is not None:
        reason = "the order in which NCCL sums over ranks depends on the size of the step: serve the model with one"
    elif source.device.type == "cuda" and source.dtype == torch.float32:
        reason = "on GPUs, attention holds it in 16 bits alone: set dtype = bfloat16"
    if reason is not None:
        raise UnsupportedModel(f"batch_invariant: {reason}")


def _leave_tiles() -> None:
    """From now on no product of this process takes AMX, which adds up one row in another order than several."""
    with suppress(KernelBuildError):  # which the choice of the forward reports
        load_kernel().kvrelay_use_tiles(0)


def _choose_forward(modules: _Modules, *, fused_layers: bool) -> Forward:
    """The fused kernels if they are wanted, know the model, and give its logits; else the model's own modules. The same
    on all ranks. Raises UnsupportedModel if the weights are to be rounded or logits to be batch-invariant, and the
    fused kernels cannot run."""
    model, quantization, needing = modules.model, modules.source.quantization, []
    reason = "the fused layers are off"
    if fused_layers:
        try:
            return _fuse(modules)
        except (NotFusable, KernelBuildError, UnsupportedModel) as error:
            reason = str(error)
    if quantization != "none":
        needing.append(f"quantization = {quantization}")
    if modules.batch_invariant:
        needing.append("batch_invariant")
    if needing:
        raise UnsupportedModel(f"{type(model).__name__}: {' and '.join(needing)} is not possible: {reason}")
    modules.packer.restore()
    forward = _run_modules(modules) if fused_layers else EagerForward(model)
    log.info(
        "decoder layers: the modules of transformers, since %s; products by %s%s", reason, forward.products, MAY_VARY
    )
    return forward


def _run_modules(modules: _Modules) -> EagerForward:
    """The model's own modules, with their products by the kernels if these give the same logits."""
    source, packer, backend = modules.source, modules.packer, modules.backend
    if not isinstance(backend, CpuBackend) or source.ranks.all_ranks is not None:
        return EagerForward(modules.model)
    check = ForwardCheck(modules.model, source.max_model_len)
    forward = EagerForward(modules.model)
    with ExitStack() as undo:
        try:
            products = use_panels(forward.modules, source.dtype, packer, undo)
            check.run(forward, modules.layout, backend)
        # RuntimeError and IndexError: some modules may read their weights, which are empty, for more than the product.
        except (NotFusable, KernelBuildError, UnsupportedModel, RuntimeError, IndexError) as error:
            log.info("products by torch, since those by the kernels fail: %s", error)
        else:
            undo.pop_all()
            forward.products = f"kernels ({products.instructions})"
            return forward
    packer.restore()
    return forward


def _fuse(modules: _Modules) -> Forward:
    """The model's layers through fused kernels.

    Raises:
        NotFusable, KernelBuildError: they do not compute this model, on some rank.
        UnsupportedModel: their results differ from those of the modules.
    """
    model, source, plan, observed = modules.model, modules.source, modules.plan, modules.observed
    layout, backend, ranks = modules.layout, modules.backend, source.ranks
    if source.device.type == "cuda" and ranks.all_ranks is None:
        return _fuse_on_gpu(modules)
    own = own_modules(plan)
    with ranks.in_agreement():
        if not isinstance(backend, CpuBackend):
            raise NotFusable("they need the C kernels on a CPU")
        require_fusable(model, observed.params, own)
    check = ForwardCheck(model, source.max_model_len)
    is_rounded = source.quantization != "none"
    cost = QuantizationCost(model, source.name, source.max_model_len) if is_rounded else None
    if cost is not None:
        modules.packer.importance = cost.importance
    with ranks.in_agreement():
        weights = decoder_weights(model, observed.params, modules.packer, own)
        vocabulary = None if plan.shards is None else plan.shards.vocabulary
        fused = FusedForward(
            weights, ranks.tensor_parallel, ranks.pipeline, vocabulary, observed.vocab_size, modules.mlps
        )
    error = check.measure(fused, layout, backend)
    with ranks.in_agreement():
        check.judge(fused, error, layout, exact=not is_rounded)
    log.info("decoder layers: fused kernels (%s)%s", fused.instructions, MAY_VARY if fused.may_vary else "")
    if cost is not None:
        cost.report(source.quantization, fused, layout, backend)
    return fused


def _fuse_on_gpu(modules: _Modules) -> GpuForward:
    """Merged products with one kernel between two of them. Raises as `_fuse`."""
    model, source = modules.model, modules.source
    if modules.batch_invariant and not modules.backend.batch_invariant:
        raise NotFusable(f"attention by the {modules.backend.name} backend depends on the batch on a GPU")
    check = ForwardCheck(model, source.max_model_len)
    pieces = choose_pieces(source.device, batch_invariant=modules.batch_invariant)
    fused = GpuForward(merge_weights(model, modules.observed.params, source.max_model_len), pieces)
    check.run(fused, modules.layout, modules.backend, model=model)
    log.info("decoder layers: fused kernels (%s)%s", pieces.name, "" if modules.batch_invariant else MAY_VARY)
    return fused


def choose_pieces(device: torch.device, *, batch_invariant: bool = False) -> TorchPieces:
    """Triton's kernels if Triton is installed and the device is a GPU, else plain torch."""
    if device.type != "cuda" or find_spec("triton") is None:
        return TorchPieces(batch_invariant=batch_invariant)
    from kvrelay.engine.fused.triton_kernels import TritonPieces

    return TritonPieces(batch_invariant=batch_invariant)


def make_dummy(source: ModelSource, attn_implementation: str) -> PreTrainedModel:
    """The source's model with random weights, made on its device. All devices of one type get the same weights, and the
    ranks of any group parts of them."""
    return _make_dummy(source, attn_implementation)[0]


def _make_dummy(source: ModelSource, attn_implementation: str) -> tuple[PreTrainedModel, PartPlan]:
    model = on_meta(source, attn_implementation)
    plan = plan_part(model, source.ranks)
    try:
        plan_shards(model, 0, 1)  # raises for models whose random weights are not made module by module
    except UnsupportedModel:
        if source.ranks.all_ranks is not None:
            raise
        generators = [source.device] if source.device.type == "cuda" else []
        with torch.random.fork_rng(generators), torch.device(source.device):
            torch.manual_seed(DUMMY_SEED)
            return _from_config(source, attn_implementation), plan
    fill_randomly(model, source.device, DUMMY_SEED, plan)
    return model, plan


def on_meta(source: ModelSource, attn_implementation: str = ATTENTION_NAME) -> PreTrainedModel:
    """The whole model without values, which takes no memory. Raises UnsupportedModel if transformers makes none."""
    register()
    with torch.device("meta"), refusing(source.name, "it cannot be loaded"):
        return _from_config(source, attn_implementation)


def _from_config(source: ModelSource, attn_implementation: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        deepcopy(source.config),  # the model keeps this config, and it names the attention implementation
        dtype=source.dtype,
        attn_implementation=attn_implementation,
    )
    return model


def _eos_token_ids(model: PreTrainedModel, source: ModelSource, vocab_size: int) -> tuple[int, ...]:
    """The end tokens of the generation config, which transformers makes of the config if there is none, and of the
    files. Ids outside the vocabulary (some configs have -1) are left out."""
    generation = getattr(model, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    if ids is None:
        ids = getattr(model.config.get_text_config(decoder=True), "eos_token_id", None)
    ids = [] if ids is None else ids if isinstance(ids, list | tuple) else [ids]
    every = dict.fromkeys([*map(int, ids), *end_token_ids(find_model_dir(source.name))])
    return tuple(each for each in every if 0 <= each < vocab_size)


def numerics_of(model: CausalModel) -> str:
    """Returns 8 hex digits over everything on this rank, but the model, that bits of outputs depend on. They are equal
    for ranks of one installation and configuration on machines of one kind."""
    source, part, layout = model.source, model.part, model.layout
    match model.forward:
        case FusedForward(instructions=instructions):
            layers = f"fused {instructions}"
        case GpuForward(pieces=pieces):
            layers = f"fused {pieces.name}"
        case EagerForward(products=products):
            layers = f"modules of transformers {transformers.__version__}, products by {products}"
        case other:
            layers = other.name
    if source.device.type == "cuda":
        device = torch.cuda.get_device_name(source.device)
    else:
        device = kernel_key() if isinstance(model.backend, CpuBackend) else cpu_features()
    num_mlp_parts = 1 if part.mlps is None else part.mlps.size
    group = source.ranks.tensor_parallel or source.ranks.data_parallel
    sums = "" if group is None or group.shares_memory else "no shared memory"
    facts = [layers, model.backend.name, str(model.backend.batch_invariant), device, torch.__version__]
    facts += [str(layout.dtype), str(layout.pool_dtype), source.quantization]
    facts += [str(part.tensor_size), str(part.pipeline_size), str(num_mlp_parts), sums]
    return _short_hash(facts)


def _numerics_with_ranks(model: CausalModel) -> str:
    """The numerics of all ranks together: the machine of any of them may round otherwise."""
    ranks = model.source.ranks
    with ranks.in_agreement():
        own = numerics_of(model)
    if ranks.all_ranks is None:
        return own
    every = ranks.all_ranks.exchange([int(own, 16)])
    return _short_hash([own, *map(str, every)])


def _short_hash(facts: Iterable[str]) -> str:
    return blake2b("\0".join(facts).encode(), digest_size=4).hexdigest()


def spec_of(model: CausalModel, num_blocks: int, num_host_slots: int, host_block_s: float) -> ModelSpec:
    """Returns the spec of a model with a pool of `num_blocks`. `host_block_s`: seconds that copying a block to the host
    takes."""
    layout, source = model.layout, model.source
    path, part = find_model_dir(source.name), model.part
    identity = fingerprint(path, model.whole_layout, source.weights_salt)
    return ModelSpec(
        name=source.name,
        vocab_size=model.vocab_size,
        max_model_len=min(source.max_model_len, num_blocks * layout.block_size),
        eos_token_ids=model.eos_token_ids,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        num_blocks=num_blocks,
        block_bytes=layout.block_bytes,
        dtype=dtype_name(layout.dtype),
        fingerprint=shard_fingerprint(identity, part.tensor_size, part.pipeline_size),
        numerics=model.numerics,
        num_host_slots=num_host_slots,
        host_block_s=host_block_s,
        device=describe_device(source.device),
        kv_dtype=dtype_name(layout.pool_dtype),
        tokenizer=identity_of_file(path / "tokenizer.json"),
        model_identity=identity,
        tensor_parallel_size=part.tensor_size,
        total_kv_heads=model.whole_layout.num_kv_heads,
        pipeline_parallel_size=part.pipeline_size,
        total_layers=model.whole_layout.num_layers,
    )
