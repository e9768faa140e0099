"""The forward of a decoder over fused kernels: all layers in one call, or piece by piece over a pool of 8 bits.

Of other models, `use_panels` gives the products of their modules to the kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from kvrelay.backends.backend import StepAttention
from kvrelay.backends.cpu import CpuStep
from kvrelay.engine.fused.kernel import Angles, AngleTable, DecoderKernel, PanelProducts
from kvrelay.engine.fused.panels import PackedLinear, rows_of
from kvrelay.engine.fused.weights import DTYPES, DecoderWeights, NotFusable, WeightPacker
from kvrelay.engine.parallel.group_coordinator import GroupCoordinator
from kvrelay.engine.parallel.pipeline import PipelineLink
from kvrelay.engine.parallel.sharded_modules import GatheredMlps


class FusedForward:
    """A `Forward` of one recognised model. The residual stream is float32, whatever the weights' type."""

    name = "fused"

    def __init__(
        self,
        weights: DecoderWeights,
        group: GroupCoordinator | None = None,
        link: PipelineLink | None = None,
        vocabulary: range | None = None,
        vocab_size: int = 0,
        mlps: GatheredMlps | None = None,
    ) -> None:
        """Builds or loads the kernels. `group`: the ranks that divide heads, MLPs and the `vocab_size` tokens of the
        vocabulary, of which this one embeds `vocabulary`; `link`: of its part of a pipeline; `mlps`: if MLPs alone
        are divided. Raises KernelBuildError if they cannot be built here."""
        self._weights = weights
        self._kernel = DecoderKernel(weights)
        self._group, self._link = group, link
        self._vocabulary, self._vocab_size = vocabulary, vocab_size
        self._mlps = mlps
        self._angles = AngleTable(weights.rotary, weights.head_dim // 2)

    @property
    def instructions(self) -> str:
        """The CPU's instructions that the matrix products use, for logs."""
        return self._kernel.products.instructions

    @property
    def may_vary(self) -> bool:
        """Whether the bits of an output may depend on what is computed with it."""
        has_tiles = self._weights.dtype == torch.bfloat16 and "AMX" in self.instructions
        return has_tiles or not self._angles.is_fixed

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a decoding step reads."""
        return sum(each.nbytes for each in self._weights.linears)

    @property
    def weights(self) -> DecoderWeights:
        return self._weights

    @torch.inference_mode()
    def hidden_states(self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepAttention) -> torch.Tensor:
        weights = self._weights
        hidden = self._enter(token_ids)
        counts = None if self._mlps is None else self._mlps.begin(len(token_ids))
        angles = self._angles.at(positions)
        call = step.call_from_c(weights.num_heads, weights.dtype) if isinstance(step, CpuStep) else None
        group, delta = self._mlp_group, None
        if call is None or (group is not None and not group.shares_memory):
            delta = self._run_layers(hidden, angles, step)
        elif group is None:
            self._kernel.layers(hidden, angles, call)
        else:
            group.run_in_c(lambda ranks: self._kernel.layers(hidden, angles, call, ranks, counts))
            if self._mlps is not None:
                self._mlps.ended()
        if weights.norm is None:
            assert self._link is not None
            self._link.send(hidden if delta is None else hidden + delta)
            return hidden
        out = torch.empty(hidden.shape, dtype=weights.dtype)
        self._kernel.add_and_norm(hidden, delta, weights.norm, out)
        return out

    @property
    def _mlp_group(self) -> GroupCoordinator | None:
        """The ranks that divide MLPs."""
        return self._group if self._mlps is None else self._mlps.group

    @torch.inference_mode()
    def run_mlps(self, counts: Sequence[int]) -> None:
        """This rank's part of all MLPs of a step, in one call. Its own tokens, of the `counts` of all ranks, have no
        meaning."""
        group = self._mlp_group
        assert group is not None
        hidden = torch.zeros(counts[group.rank], self._weights.hidden_size)
        group.run_in_c(lambda ranks: self._kernel.layers(hidden, None, None, ranks, counts))

    @torch.inference_mode()
    def run_mlp(self, index: int, normed: torch.Tensor) -> torch.Tensor:
        """The output of a layer's MLP for this rank's tokens `[tokens, hidden_size]`, summed over the ranks."""
        layer, products = self._weights.layers[index], self._kernel.products

        def run(every: torch.Tensor) -> torch.Tensor:
            product = products.linear(layer.down, products.linear(layer.gate_up, every))
            return _summed(product, self._mlp_group)

        return run(normed) if self._mlps is None else self._mlps.run(run, normed)

    def _enter(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The residual stream before this rank's first layer, float32 `[tokens, hidden_size]`."""
        link, part = self._link, self._vocabulary
        if link is not None and not link.is_first:
            return link.receive((len(token_ids), self._weights.hidden_size), torch.float32)
        if self._group is None or part is None:
            return self._kernel.embed(token_ids)
        rows = token_ids - part.start
        is_other = (rows < 0) | (rows >= len(part))
        hidden = self._kernel.embed(rows.masked_fill(is_other, 0)).masked_fill_(is_other[:, None], 0)
        self._group.all_reduce(hidden)
        return hidden

    def _run_layers(self, hidden: torch.Tensor, angles: Angles, step: StepAttention) -> torch.Tensor | None:
        """All layers, piece by piece; returns the last MLP's output, which is not added to `hidden` yet."""
        weights, kernel, count = self._weights, self._kernel, len(hidden)
        normed = torch.empty(hidden.shape, dtype=weights.dtype)
        num_heads = (weights.num_heads, weights.num_kv_heads, weights.num_kv_heads)
        delta = None
        for index, layer in enumerate(weights.layers):
            kernel.add_and_norm(hidden, delta, layer.input_norm, normed)
            qkv = kernel.products.linear(layer.qkv, normed)
            kernel.norm_and_rotate(index, qkv, angles)
            query, key, value = qkv.view(count, -1, weights.head_dim).split(num_heads, dim=1)
            attended = step.attend(index, query, key, value, layer.attention)
            delta = _summed(kernel.products.linear(layer.output, attended.view(count, -1)), self._group)
            kernel.add_and_norm(hidden, delta, layer.mlp_norm, normed)
            delta = self.run_mlp(index, normed)
        return delta

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Forward.logits`: float32, which saves the rounding of 16-bit logits. `[tokens, 0]` on other ranks than
        the first."""
        if (head := self._weights.head) is None:
            return hidden[..., :0]
        logits = self._kernel.products.linear(head, hidden.contiguous(), torch.float32)
        if self._group is None:
            return logits
        gathered = self._group.gather_columns(logits)
        return logits[..., :0] if gathered is None else gathered[..., : self._vocab_size]


def _summed(product: torch.Tensor, group: GroupCoordinator | None) -> torch.Tensor:
    """The sum of the ranks' products."""
    if group is not None:
        group.all_reduce(product)
    return product


def use_panels(modules: torch.nn.Module, dtype: torch.dtype, packer: WeightPacker, undo: ExitStack) -> PanelProducts:
    """Makes the linear layers in `modules` compute by the kernels. Their sums do not depend on the number of rows, as
    torch's do.

    `packer` takes their weights, also if this raises; `undo` gets what makes the modules compute by torch again, once
    they have their weights back. Raises NotFusable for weights that the kernels do not multiply, and KernelBuildError
    if these cannot be built here.
    """
    if dtype not in DTYPES:
        raise NotFusable(f"the kernels do not multiply {dtype}")
    products = PanelProducts(dtype)
    for path, module in list(modules.named_modules()):
        if type(module) is Conv1D:
            modules.set_submodule(path, _as_linear(module))
    linears = [module for module in modules.modules() if type(module) is torch.nn.Linear]
    owners = Counter(linear.weight for linear in linears)
    if any(count > 1 or weight.dtype != dtype or not weight.numel() for weight, count in owners.items()):
        raise NotFusable(f"some linear layers share their weights, or are not {dtype}")
    embeddings = {each.weight: each for each in modules.modules() if isinstance(each, torch.nn.Embedding)}
    for linear in linears:
        packed = packer.pack(linear)
        vars(linear)["forward"] = partial(_product, products, packed)
        undo.callback(vars(linear).pop, "forward")
        if (tied := embeddings.get(linear.weight)) is not None:
            if packed.is_integer:
                raise NotFusable("a head of integer weights shares them with the embedding")
            # Packing has emptied the weights that the embedding shares with the head.
            tied.padding_idx = None  # has a meaning for gradients only, and is no row of the weights below
            undo.callback(tied.register_forward_pre_hook(partial(_embed_from, packed)).remove)
    return products


def _product(products: PanelProducts, packed: PackedLinear, x: torch.Tensor) -> torch.Tensor:
    return products.linear(packed, x.reshape(-1, packed.num_in)).view(*x.shape[:-1], packed.num_out)


def _embed_from(packed: PackedLinear, embedding: torch.nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """Gives an embedding the rows of the step's tokens in place of its weights, and their numbers in place of the
    tokens: some models' embeddings scale what they look up."""
    token_ids = args[0]
    embedding.weight.data = rows_of(packed, token_ids.flatten())
    return (torch.arange(token_ids.numel()).view(token_ids.shape),)


def _as_linear(module: Any) -> torch.nn.Linear:
    """The linear layer that computes what a `Conv1D` of GPT-2 does, whose weights are transposed."""
    num_in, num_out = module.weight.shape
    linear = torch.nn.Linear(num_in, num_out, device="meta")
    linear.weight, linear.bias = torch.nn.Parameter(module.weight.detach().t()), module.bias
    return linear
