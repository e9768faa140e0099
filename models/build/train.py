"""Training: AdamW with warm-up and cosine decay over packed conversations, in bfloat16 with float32 weights."""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

from models.build.corpus import IGNORED, Corpus, TrainingBatch
from models.build.tokenizer import END_OF_TEXT_ID, IM_END_ID

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingPhase:
    """A stretch of training with its own optimizer state: linear warm-up, then a cosine down to zero.

    A token of an answer weighs 1 in the loss, but its first token `first_token_weight` and all other text
    `text_weight`.
    """

    num_steps: int
    num_warmup_steps: int
    peak_rate: float
    first_token_weight: float
    text_weight: float


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what comes out, beside the text."""

    seed: int = 20
    num_words: int = 2000
    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 640
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    max_positions: int = 8192
    phases: tuple[TrainingPhase, ...] = (
        TrainingPhase(2200, 100, 2e-3, first_token_weight=1.0, text_weight=0.0),
        TrainingPhase(2100, 50, 8e-4, first_token_weight=3.0, text_weight=0.1),
        TrainingPhase(1000, 30, 5e-4, first_token_weight=3.0, text_weight=0.0),
    )
    weight_decay: float = 0.05
    batch_tokens: int = 2048
    row_tokens: int = 256
    long_row_tokens: int = 2048
    long_every_steps: int = 16
    num_threads: int = 2


def new_model(recipe: Recipe) -> Qwen3ForCausalLM:
    """An untrained model of the recipe's shape."""
    config = Qwen3Config(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.max_positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=IM_END_ID,
        pad_token_id=END_OF_TEXT_ID,
    )
    torch.manual_seed(recipe.seed)
    return Qwen3ForCausalLM(config)


def train(
    model: Qwen3ForCausalLM,
    recipe: Recipe,
    phase: TrainingPhase,
    corpus: Corpus,
    checkpoint: Callable[[Qwen3ForCausalLM], None],
    checkpoint_every_s: float,
) -> None:
    """Trains the model for one phase. `checkpoint` is called with it about every `checkpoint_every_s` seconds."""
    torch.set_num_threads(recipe.num_threads)
    model.train()
    optimizer = _optimizer(model, recipe, phase)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, phase))
    log.info("training %.2fM parameters for %d steps", model.num_parameters() / 1e6, phase.num_steps)
    started_s = saved_s = time.monotonic()
    mean_loss, mean_correct, mean_correct_first = math.log(recipe.vocab_size), 0.0, 0.0
    for step in range(1, phase.num_steps + 1):
        loss, correct, correct_first = _loss(model, _batch(corpus, recipe, step), phase)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        mean_loss += (loss.item() - mean_loss) * 0.02
        mean_correct += (correct - mean_correct) * 0.02
        mean_correct_first += (correct_first - mean_correct_first) * 0.02
        now_s = time.monotonic()
        if step % 50 == 0:
            left_min = (now_s - started_s) / step * (phase.num_steps - step) / 60
            rights = f"tokens right {mean_correct:.4f}, first ones {mean_correct_first:.4f}"
            log.info("step %d: loss %.4f, %s, %.1f min left", step, mean_loss, rights, left_min)
        if now_s - saved_s > checkpoint_every_s:
            checkpoint(model)
            saved_s = now_s
    model.eval()


def _batch(corpus: Corpus, recipe: Recipe, step: int) -> TrainingBatch:
    if step % recipe.long_every_steps == 0:
        return corpus.long(recipe.batch_tokens // recipe.long_row_tokens, recipe.long_row_tokens)
    return corpus.packed(recipe.batch_tokens // recipe.row_tokens, recipe.row_tokens)


def _loss(model: Qwen3ForCausalLM, batch: TrainingBatch, phase: TrainingPhase) -> tuple[torch.Tensor, float, float]:
    """Weighted mean cross-entropy, and the share of answer tokens, and of first answer tokens, predicted right.

    First tokens are counted apart because they come last: the model learns to go on with a gloss long before it
    learns to begin one.
    """
    answered = batch.labels != IGNORED
    first = answered & ~functional.pad(answered, (1, -1))
    followed = functional.pad(batch.position_ids.diff(dim=1) > 0, (0, 1))
    next_ids = batch.ids.roll(-1, dims=1)
    read = followed & ~answered & (next_ids != END_OF_TEXT_ID)
    weights = answered + first * (phase.first_token_weight - 1) + read * phase.text_weight
    targets = torch.where(answered, batch.labels, next_ids)
    counted = weights > 0
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(
            input_ids=batch.ids, position_ids=batch.position_ids, attention_mask=batch.mask, use_cache=False
        ).last_hidden_state
        logits = model.lm_head(hidden[counted])
    losses = functional.cross_entropy(logits.float(), targets[counted], reduction="none")
    right = (logits.detach().argmax(-1) == targets[counted]).float()
    loss = (losses * weights[counted]).sum() / weights.sum()
    return loss, right[answered[counted]].mean().item(), right[first[counted]].mean().item()


def _optimizer(model: Qwen3ForCausalLM, recipe: Recipe, phase: TrainingPhase) -> torch.optim.Optimizer:
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    scales = [weight for weight in model.parameters() if weight.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": scales, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=phase.peak_rate, betas=(0.9, 0.98), fused=True)


def _rate(step: int, phase: TrainingPhase) -> float:
    """The share of the peak rate at a step of the phase."""
    if step < phase.num_warmup_steps:
        return (step + 1) / phase.num_warmup_steps
    done = (step - phase.num_warmup_steps) / (phase.num_steps - phase.num_warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
